"""Gradients of several microbatches before one optimizer step are those of the one batch.

A sum over ranks that is in place, and once more after the second backward, would add up the first
microbatch's gradients again, once for each rank. (`Pipeline.step`: test_pipeline.py.)
"""

import pytest

import launch
from planting import plant

ACCUMULATE = """
import contextlib, copy, sys
sys.path.insert(0, {tasks!r})
import torch, torch.distributed as dist
from functools import partial
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM
import data_parallel, pretrain_2d, ulysses_finetune
from dtensor_llama import dtensor_parallelize
from memory.long_sequence import Techniques
from pipeline_llama import Pipeline, keep_stage
from ring_attention import ring_parallelize
from tp_llama import tensor_parallelize
from ulysses_forward import sequence_parallelize
from utils.replicas import sum_gradients
from utils.gradients import local_part
from utils.shards import shard_of
from utils.llama import trained_parameters

K, ROWS = 3, 6  # microbatches, and sequences in each

def one_batch(model, ids):
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()

def compare(name, model, whole, times=K):
    # times: K, if microbatches have as many labels each: the batch's loss is the mean of theirs.
    for parameter_name, mine in trained_parameters(model).items():
        grad = whole.get_parameter(parameter_name).grad
        expected, bound = grad[shard_of(mine)], 1e-5 * grad.abs().max().item()
        assert bound > 0, parameter_name
        grad = local_part(mine.grad, mine) / times
        of = lambda message: f"{{name}}: {{parameter_name}}: {{message}}"
        torch.testing.assert_close(grad, expected, rtol=0, atol=bound, msg=of)

def ordinary():
    return LlamaForCausalLM.from_pretrained({model!r}).float()

def split_by_rank(ids, mesh):
    P = mesh.size()
    return ids.view(P, -1, ids.shape[1])[mesh.get_local_rank()]

def models(ids, mesh):
    # Tasks 2, 3 and 4: the user's own loop.
    whole = ordinary()
    one_batch(whole, ids)
    for split in tensor_parallelize, dtensor_parallelize, sequence_parallelize, ring_parallelize:
        model = ordinary()
        model = split(model, mesh) or model
        for part in ids.chunk(K):
            model(input_ids=part, labels=part).loss.backward()
        if split in (sequence_parallelize, ring_parallelize):
            sum_gradients(model.parameters(), mesh)
        compare(split.__name__, model, whole)
    # As many labels as there are, in each row another number.
    places = torch.arange(ids.shape[1])
    labels = ids.masked_fill(places < torch.arange(len(ids))[:, None] % 13, -100)
    count = (labels[:, 1:] != -100).sum()
    assert len({{(part[:, 1:] != -100).sum().item() for part in labels.chunk(K)}}) == K
    whole.zero_grad()
    whole(input_ids=ids, labels=labels).loss.backward()
    for split in tensor_parallelize, dtensor_parallelize, sequence_parallelize, ring_parallelize:
        model = split(ordinary(), mesh)
        for part, some in zip(ids.chunk(K), labels.chunk(K)):
            model(input_ids=part, labels=some, num_items_in_batch=count).loss.backward()
        if split in (sequence_parallelize, ring_parallelize):
            sum_gradients(model.parameters(), mesh)
        compare(f"{{split.__name__}}, uneven labels", model, whole, 1)

def calls(ids, mesh):
    # Labels by position, and tuples: what comes back is as from the unmodified model.
    whole, mask, nothing = ordinary(), torch.ones_like(ids), (None, None, None)
    for split in tensor_parallelize, dtensor_parallelize, sequence_parallelize:
        model = ordinary()
        split(model, mesh)
        for labels in ids, None:
            many = dict(num_items_in_batch=torch.tensor([7]), return_dict=False)
            for given in {{"return_dict": False}}, {{}}, *([many] if labels is not None else []):
                args = ids, mask, *nothing, labels, False
                one, other = whole(*args, **given), model(*args, **given)
                assert type(one) is type(other) and len(one) == len(other), (split, given)
                torch.testing.assert_close(other[0], one[0], rtol=1e-5, atol=1e-5)

def refused(function, message):
    try:
        function()
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)

def wrong_use(ids, mesh):
    # What would add a sum up again is an error, and what would not is none.
    model = sequence_parallelize(ordinary(), mesh)
    def backward():
        model(input_ids=ids, labels=ids).loss.backward()
    def add_up():
        sum_gradients(model.parameters(), mesh)
    grads = []
    for to_none in False, True, False:
        backward()
        add_up()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
        refused(add_up, "sums over these ranks already")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        refused(add_up, "sums over these ranks already")
        copy.deepcopy([parameter.grad for parameter in model.parameters()])
        model.zero_grad(to_none)
    assert all(map(torch.equal, grads[0], grads[1])) and all(map(torch.equal, *grads[1:]))
    backward(), add_up()
    refused(backward, "has added to gradients that are sums")
    model.zero_grad()
    for part in ids.chunk(K):
        ulysses_finetune.forward_backward(model, part, mesh)
    refused(add_up, "sums over these ranks already")

def task_5(ids, mesh):
    # With PEFT and without; Ulysses and a ring; with the techniques that save memory, and without.
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"],
                      init_lora_weights=False)
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    every = Techniques("saved-outputs", True, True, True, tile_tokens=7)
    for name, adapter, split, techniques in (
        ("all weights", None, sequence_parallelize, None),
        ("all weights, ring", None, ring_parallelize, every),
        ("LoRA", lora, sequence_parallelize, every), ("prompt", prompt, ring_parallelize, None),
    ):
        both = []
        for model in ordinary(), ordinary():
            if both:
                split(model, mesh)
            torch.manual_seed(0)
            both.append(get_peft_model(model, copy.deepcopy(adapter)) if adapter else model)
        whole, model = both
        one_batch(whole, ids)
        for part in ids.chunk(K):
            ulysses_finetune.forward_backward(model, part, mesh, techniques)
        compare(f"Task 5, {{name}}", model, whole)

def replicas(ids, mesh):
    whole, group = ordinary(), mesh.get_group()
    one_batch(whole, ids)
    for strategy in "each", "last", "ddp", "fsdp2":
        called = model = ordinary()
        if strategy == "ddp":
            called = DistributedDataParallel(model, process_group=group)
        if strategy == "fsdp2":
            data_parallel.shard_fully(model, mesh)
        for part in ids.chunk(K):
            own = split_by_rank(part, mesh)
            data_parallel.local_forward_backward(called, (own, torch.ones_like(own), own), group)
            if strategy == "each":
                data_parallel.average_gradients(model, mesh)
        if strategy == "last":
            data_parallel.average_gradients(model, mesh)
        compare(f"data parallel, {{strategy}}", model, whole)

def dtensors(ids):
    # Weights that FSDP2 or a plan has split over one axis; replicas, or tokens, over the other.
    whole, mesh = ordinary(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "other"))
    one, other = mesh["one"], mesh["other"]
    one_batch(whole, ids)

    def backward(model, mesh):
        for part in ids.chunk(K):
            own = split_by_rank(part, mesh)
            model(input_ids=own, labels=own).loss.backward()

    for to_none in True, False:  # the second backward is not mistaken for one after a sum
        if to_none:
            model = sequence_parallelize(ordinary(), other)
            data_parallel.shard_fully(model, one)
        backward(model, one)
        sum_gradients(model.parameters(), other)
        compare("tokens and FSDP2", model, whole)
        refused(lambda: sum_gradients(model.parameters(), other), "sums over these ranks already")
        model.zero_grad(set_to_none=to_none)
    trained = trained_parameters(model).values()
    refused(lambda: sum_gradients(trained, one), "summed by DTensor or FSDP2")
    model = dtensor_parallelize(ordinary(), other)
    backward(model, one)
    refused(lambda: data_parallel.average_gradients(model, other), "whose mesh has several")
    data_parallel.average_gradients(model, one)
    compare("replicas of a plan", model, whole)
    model.requires_grad_(False)
    data_parallel.average_gradients(model, one)  # nothing to do

def no_labels(ids, mesh):
    # A mean of no losses is NaN, with gradients of 0: of the unmodified model, and of all others.
    P, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    own = split_by_rank(ids, mesh)
    labels, own_labels = (torch.full_like(x, -100) for x in (ids, own))
    filler = torch.stack([labels, torch.arange(ids.shape[1]).expand_as(ids)], 1)

    def of_model(split, ids, labels):
        model = ordinary()
        split(model)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        return model, loss

    def of_loss_parallel():
        with loss_parallel():
            return of_model(partial(dtensor_parallelize, mesh=mesh), ids, labels)

    def of_task_5(techniques):
        model = sequence_parallelize(ordinary(), mesh)
        return model, ulysses_finetune.forward_backward(model, filler, mesh, techniques)

    def of_replicas(split):
        model = ordinary()
        split(model)
        batch = own, torch.ones_like(own), own_labels
        return model, data_parallel.local_forward_backward(model, batch, group)[0]

    def of_pretraining():
        mesh = init_device_mesh("cpu", (P, 1), mesh_dim_names=("dp", "tp"))
        model = pretrain_2d.parallelize_2d(ordinary(), mesh)
        with loss_parallel():
            return model, pretrain_2d.forward_backward(model, (own, own_labels), mesh)

    def of_pipeline(schedule):
        stage, layers = ordinary(), ordinary().config.num_hidden_layers
        keep_stage(stage, [1, layers] if P == 2 else [layers], rank)
        pipe, half = Pipeline(mesh, schedule, [stage], P), len(ids) // 2
        loss, _ = pipe.step(ids, torch.ones_like(ids), labels, [half, half])
        return stage, loss if rank == P - 1 else torch.tensor(torch.nan)  # no loss there

    losses = {{
        "unmodified": partial(of_model, lambda model: None, ids, labels),
        "one token": partial(of_model, lambda model: None, ids[:, :1], ids[:, :1]),
        "loss_parallel": of_loss_parallel,
        "pretraining": of_pretraining,
        "tiled": partial(of_task_5, Techniques("checkpoint", tile_tokens=7)),
        "saved outputs": partial(of_task_5, Techniques("saved-outputs", tile_tokens=7)),
        "shard_loss": partial(of_task_5, None),
        "data parallel": partial(of_replicas, lambda model: None),
        "FSDP2": partial(of_replicas, partial(data_parallel.shard_fully, mesh=mesh)),
        "GPipe": partial(of_pipeline, "gpipe"),
        "PyTorch's 1F1B": partial(of_pipeline, "torch-1f1b"),
    }}
    for split in (
        tensor_parallelize, partial(tensor_parallelize, vocab_parallel=False), dtensor_parallelize,
        sequence_parallelize, ring_parallelize,
    ):
        losses[f"{{split}}"] = partial(of_model, partial(split, mesh=mesh), ids, labels)
        losses[f"{{split}}, one token"] = partial(
            of_model, partial(split, mesh=mesh), ids[:, :1], ids[:, :1])
    for name, step in losses.items():
        model, loss = step()
        assert loss.isnan(), f"no labels: {{name}}: {{loss}}"
        for parameter_name, parameter in model.named_parameters():
            assert not local_part(parameter.grad).any(), f"no labels: {{name}}: {{parameter_name}}"

def pretraining(ids, shapes):
    whole = ordinary()
    one_batch(whole, ids)
    for shape, replicate in shapes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = pretrain_2d.parallelize_2d(ordinary(), mesh, replicate)
        with loss_parallel():
            for part in ids.chunk(K):
                own = split_by_rank(part, mesh["dp"])
                pretrain_2d.forward_backward(model, (own, own), mesh)
        compare(f"pretraining, {{shape}}, {{replicate}}", model, whole)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    P, only = dist.get_world_size(), sys.argv[1:]
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("sp",))
    torch.manual_seed(0)
    ids = torch.randint(2, 140, (K * ROWS, 16))
    shapes = [((P, 1), True), ((P, 1), False), ((1, P), False)]
    shapes = [((2, 2), True), ((2, 2), False)] if P == 4 else shapes
    parts = dict(models=partial(models, ids, mesh), wrong_use=partial(wrong_use, ids, mesh),
                 no_labels=partial(no_labels, ids, mesh), calls=partial(calls, ids, mesh),
                 dtensors=partial(dtensors, ids),
                 task_5=partial(task_5, ids, mesh), replicas=partial(replicas, ids, mesh),
                 pretraining=partial(pretraining, ids, shapes))
    for name in only:
        parts[name]()
    dist.barrier()
    print("accumulated")
"""


def accumulate(folder, model, nproc, *parts, tasks=launch.TASKS):
    """The Result of such a script."""
    path = folder / "accumulate.py"
    path.write_text(ACCUMULATE.format(tasks=str(tasks), model=str(model)))
    return launch.ranks(path, *parts, nproc=nproc, folder=folder)


@pytest.mark.parametrize(
    ("nproc", "parts"),
    [(2, ["models", "wrong_use", "no_labels", "calls"]), (2, ["task_5"]),
     (2, ["replicas", "pretraining"]), (3, ["replicas"]), (4, ["pretraining", "dtensors"])],
)  # fmt: skip
def test_microbatches(nproc, parts, odd_llama, tmp_path):
    """Three microbatches of every technique's own step, against one batch on one rank.

    And a batch without any valid label, of which every loss says what the unmodified model's does.
    """
    result = accumulate(tmp_path, odd_llama, nproc, *parts)
    assert result.code == 0 and result.out.count("accumulated") == nproc, result.tail()


BUGS = {
    # name: (part, file, right, wrong, what is off)
    "a microbatch's mean counts like another's": (
        "models", "sequence.py", "if num_items_in_batch is None:", "if True:",
        "sequence_parallelize, uneven labels",
    ),
    "Task 5 sums all there is": (
        "task_5", "gradients.py", "        tensor.grad = None\n", "        pass\n",
        "a backward has added to gradients that are sums",
    ),
    "earlier gradients are lost": (
        "task_5", "gradients.py", "tensor.grad.add_(grad)", "pass", "Task 5",
    ),
    "pretraining sums all there is": (
        "pretraining", "pretrain_2d.py", "with new_gradients(model.parameters()):", "if True:",
        "pretraining",
    ),
    "an average is a sum": (
        "replicas", "data_parallel.py", "parameter.grad /= group.size()", "pass", "data parallel",
    ),
    "a sum is not remembered": (
        "wrong_use", "replicas.py", "{ranks, *others}", "set(others)", "sums over these ranks",
    ),
    "no label is one label": (
        "no_labels", "sequence.py", "(targets != -100).sum()",
        "(targets != -100).sum().clamp(min=1)", "no labels: ",
    ),
    "gradients of no label are NaN": (
        "no_labels", "long_sequence.py", "total.masked_fill((targets == -100).all(), 0)", "total",
        "no labels: tiled",
    ),
    "a loss is taken for logits": (
        "calls", "shards.py", 'return given.get("labels") is not None', "return False", "",
    ),
    "a backward may add to a sum": (
        "wrong_use", "replicas.py", "if sum_is_there:", "if False:", "has added to gradients",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_microbatches_with_a_bug(name, odd_llama, tmp_path):
    part, file, right, wrong, off = BUGS[name]
    plant(tmp_path / "tasks", file, right, wrong)
    result = accumulate(tmp_path, odd_llama, 2, part, tasks=tmp_path / "tasks")
    assert result.code == 1 and f"Error: {off}" in result.err, result.tail()
