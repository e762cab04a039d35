"""Hold the full model's norm, weights and folder against the unsplit model's, on each rank.

    torchrun --nproc_per_node N tests/helpers/full_model.py TASKS MODEL FOLDER DTYPE [TECHNIQUE ...]

TASKS: the folder with the scripts. MODEL: a directory. FOLDER: where models are written. DTYPE:
float64 or float32. Without a technique, all that so many ranks can run.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from transformers import AutoModelForCausalLM, LlamaForCausalLM

sys.path.insert(0, sys.argv[1])

from data_parallel import shard_fully
from dtensor_llama import dtensor_parallelize
from harness.float64 import compute_in_float64
from loading.models import from_pretrained
from pretrain_2d import forward_backward, parallelize_2d
from ring_attention import ring_parallelize
from tp_llama import tensor_parallelize
from tp_ulysses import parallelize_tp_sp
from ulysses_forward import sequence_parallelize
from utils.full_model import clip_grad_norm_, full_state_dict, grad_norm, save_pretrained
from utils.gradients import local_part
from utils.replicas import sum_gradients
from utils.shards import shard_of


def refused(function, message):
    try:
        function()
    except (ValueError, OSError) as error:
        assert message in str(error), (message, error)
    else:
        raise AssertionError(f"not refused: {message}")


def ordinary():
    model = LlamaForCausalLM.from_pretrained(MODEL).to(DTYPE).train()
    if torch.float64 == DTYPE:
        compute_in_float64(model)
    return model


def step(model, ids, **kwargs):
    """Forward and backward of the mean loss, which Hugging Face computes in float32 at most."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()


def summed(step, mesh):
    """A step whose gradients are each rank's own, and then their sum over the axis."""

    def both(model, ids):
        step(model, ids)
        refused(partial(grad_norm, model), "sum or average them first")
        sum_gradients(model.parameters(), mesh)

    return both


def rows_of(mesh):
    """A step of this rank's rows of the batch; the mean over the ranks is the batch's gradient."""

    def one(model, ids):
        step(model, ids.chunk(mesh.size())[mesh.get_local_rank()])

    return one


def averaged(step, mesh):
    def both(model, ids):
        step(model, ids)
        refused(partial(grad_norm, model), "sum or average them first")
        sum_gradients(model.parameters(), mesh)
        for parameter in model.parameters():
            parameter.grad /= mesh.size()

    return both


def of_pretraining(mesh, replicate, model, ids):
    own = ids.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    with loss_parallel():
        forward_backward(model, (own, own), mesh, replicate)


def techniques(P):
    """{name: (what splits a model in place, its step)}."""
    one = init_device_mesh("cpu", (P,), mesh_dim_names=("one",))
    found = {
        "TP": (partial(tensor_parallelize, mesh=one), step),
        "TP, layers alone": (partial(tensor_parallelize, mesh=one, vocab_parallel=False), step),
        "DTensor": (partial(dtensor_parallelize, mesh=one), step),
        "Ulysses": (partial(sequence_parallelize, mesh=one), summed(step, one)),
        "ring": (partial(ring_parallelize, mesh=one), summed(step, one)),
        "DP": (lambda model: model, averaged(rows_of(one), one)),
        "FSDP2": (partial(shard_fully, mesh=one), rows_of(one)),
    }
    for shape in [(2, 2)] if P == 4 else [(1, P), (P, 1)]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        dp, tp = mesh["dp"], mesh["tp"]
        if P == 4:
            split = partial(tensor_parallelize, mesh=tp)
            found["TP x DP"] = split, averaged(rows_of(dp), dp)
            of_both = init_device_mesh("cpu", shape, mesh_dim_names=("sp", "tp"))
            for megatron_sp in False, True:
                split = partial(parallelize_tp_sp, mesh=of_both, megatron_sp=megatron_sp)
                found[f"TP x Ulysses, {megatron_sp}"] = split, summed(step, of_both["sp"])
        for replicate in False, True:
            split = partial(parallelize_2d, mesh=mesh, replicate=replicate)
            found[f"2-D, {shape}, {replicate}"] = split, partial(of_pretraining, mesh, replicate)
    return found


def close(ours, theirs, name):
    rtol = 1e-12 if torch.float64 == DTYPE else 1e-5
    atol = rtol * theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, msg=lambda m: f"{name}: {m}")


def check_loading(name, split):
    """Each rank's own reading is a part of what transformers reads."""
    model, state = from_pretrained(split, MODEL, DTYPE), ordinary().state_dict()
    for key, parameter in model.named_parameters():
        part = state[key][shard_of(parameter)]
        assert local_part(parameter).equal(part), f"{name}: {key}, as loaded"


def check(name, split, step_of, ids, folder):
    check_loading(name, split)
    whole, model = ordinary(), ordinary()
    step(whole, ids)
    model = split(model) or model
    step_of(model, ids)
    expected = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()]).double()
    norms = [None] * P
    dist.all_gather_object(norms, grad_norm(model).item())
    assert len(set(norms)) == 1, (name, norms)
    close(grad_norm(model), expected, f"{name}: norm")
    for max_norm in 1e3, expected.item() / 3:  # nothing to clip, and something
        torch.nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
        close(clip_grad_norm_(model, max_norm), expected, f"{name}: norm, returned")
        for key, parameter in model.named_parameters():
            grad = whole.get_parameter(key).grad[shard_of(parameter)]
            close(local_part(parameter.grad, parameter), grad, f"{name}: {key}, clipped")

    state, before = full_state_dict(model), ordinary().state_dict()
    assert bool(state) == (RANK == 0), name
    for key, tensor in state.items():
        assert tensor.equal(before[key]), f"{name}: {key} in the full state"
    tied = {"lm_head.weight"} if whole.config.tie_word_embeddings else set()
    assert not state or before.keys() - state.keys() == tied, name

    # Several files, and then one, which must not leave the others beside it.
    for size in 2 * max(p.nbytes for p in whole.parameters()), 10**9:
        save_pretrained(model, folder, size)
        dist.barrier()
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).state_dict()
        assert again.keys() == before.keys(), name
        assert all(again[key].equal(before[key]) for key in before), name
        files = sorted(path.name for path in folder.glob("*.safetensors*"))
        assert len(files) > 2 if size < 10**9 else files == ["model.safetensors"], (name, files)
        dist.barrier()
    if RANK == 0:
        whole.save_pretrained(folder / "by_transformers")
        for file in "config.json", "generation_config.json":
            ours, theirs = (json.loads((f / file).read_text())
                            for f in (folder, folder / "by_transformers"))  # fmt: skip
            assert ours == theirs, (name, file, ours, theirs)


def wrong_use(folder):
    """What would be silently wrong on slices is an error."""
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("tp",))
    model = ordinary()
    tensor_parallelize(model, mesh)
    refused(model.state_dict, "full_state_dict")
    refused(partial(model.save_pretrained, folder), "utils.full_model.save_pretrained")
    clip = partial(torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0)
    refused(clip, "utils.full_model.clip_grad_norm_")
    nothing = folder / "nothing"
    if RANK == 0:
        nothing.write_text("a file, not a folder")
    dist.barrier()
    refused(partial(save_pretrained, model, nothing), f"{nothing}: not written")
    if RANK:  # not all of the model
        model.model.layers[0].mlp.down_proj = None
    refused(partial(full_state_dict, model), "these ranks do not have all of it")
    for split in tensor_parallelize, dtensor_parallelize, sequence_parallelize:
        model = ordinary()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        split(model, mesh)
        refused(partial(step, model, IDS), "drop the same for different heads")
        model.eval()
        model(IDS)


if __name__ == "__main__":
    _, _, MODEL, FOLDER, kind, *only = sys.argv
    FOLDER, DTYPE = Path(FOLDER), getattr(torch, kind)
    dist.init_process_group("gloo")
    RANK, P = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    IDS = torch.randint(2, 140, (12, 12))
    every = techniques(P)
    for name in only or every:
        if name == "wrong use":
            wrong_use(FOLDER)
            continue
        check(name, *every[name], IDS, FOLDER / "saved")
    dist.barrier()
    print("full model: ok", flush=True)
    dist.destroy_process_group()
