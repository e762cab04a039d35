"""What a training asks of a split model, held against the unsplit model, on each rank.

    torchrun --nproc_per_node N tests/helpers/full_model.py TASKS MODEL FOLDER DTYPE WHAT [NAME ...]

TASKS: the folder with the scripts. MODEL: a directory. FOLDER: where models are written. DTYPE:
float64 or float32. WHAT: a function below; NAME: techniques, by default all that so many ranks run.
"""

import copy
import gc
import json
import math
import os
import shutil
import sys
import weakref
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_ as imported_before
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig

sys.path.insert(0, sys.argv[1])

import tp_llama
from checkpoints.sharded_checkpoint import load_training_state, read_region, save_training_state
from data_parallel import shard_fully
from dtensor_llama import dtensor_parallelize
from guards.agreement import CALLS, without_comparing
from harness.float64 import compute_in_float64
from harness.tolerance import LIMITS
from kv_cache import choose_from_full_logits, generate
from loading.models import from_pretrained
from memory.long_sequence import Techniques, supported_techniques
from pipeline_llama import keep_stage
from pretrain_2d import forward_backward, parallelize_2d
from ring_attention import Ring, ring_attention, ring_parallelize
from tp_llama import tensor_parallelize, vocab_parallel_cross_entropy
from tp_training import split_loss_alone
from tp_ulysses import parallelize_tp_sp
from ulysses_finetune import shard_loss
from ulysses_forward import causal_attention, sequence_parallelize, ulysses_attention
from utils.full_model import clip_grad_norm_, full_state_dict, grad_norm, save_pretrained
from utils.gradients import local_part, new_gradients
from utils.kernels import ATTENTION_OPS
from utils.llama import llama_of
from utils.partition import shard_range
from utils.replicas import sum_gradients
from utils.sequence import MaskInfo
from utils.settings import settings_of
from utils.shards import shard_of


def refused(function, message):
    try:
        function()
    except (ValueError, OSError) as error:
        assert message in str(error) and "\n" not in str(error), (message, error)
    except Exception as error:  # by a library, further on, and in its own words
        raise AssertionError(f"not refused: {message}, but: {error!r}") from error
    else:
        raise AssertionError(f"not refused: {message}")


def ordinary():
    model = AutoModelForCausalLM.from_pretrained(MODEL).to(DTYPE).train()
    if torch.float64 == DTYPE:
        compute_in_float64(model)
    return model


def dealt_evenly():
    """A new model, whose heads are a multiple of the ranks."""
    config = ordinary().config
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2 * P, P, 6
    torch.manual_seed(0)
    return type(ordinary())(config).to(DTYPE)


def step(model, ids, times=1):
    """Forward and backward of the mean loss, which Hugging Face computes in float32 at most."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    (times * loss).backward()


def whole_loss(ids, labels):
    """The unsplit model, with its gradients, and its mean loss in DTYPE."""
    whole = ordinary()
    logits = whole(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    return whole, loss.detach()


def evaluate(model, ids):
    """A forward alone, behind which FSDP2's root unit is whole."""
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)


def summed(step, mesh):
    """A step whose gradients are each rank's own, and then their sum over the axis."""

    def both(model, ids):
        step(model, ids)
        if mesh.size() > 1:
            refused(partial(grad_norm, model), "sum or average them first")
        sum_gradients(model.parameters(), mesh)

    both.mesh = mesh
    return both


def rows_of(mesh):
    """A step of this rank's rows of the batch; the mean over the ranks is the batch's gradient."""

    def one(model, ids):
        step(model, ids.chunk(mesh.size())[mesh.get_local_rank()])

    return one


def averaged(step, mesh):
    def both(model, ids):
        step(model, ids)
        if mesh.size() > 1:
            refused(partial(grad_norm, model), "sum or average them first")
        sum_gradients(model.parameters(), mesh)
        for parameter in model.parameters():
            parameter.grad /= mesh.size()

    return both


def sharded_too(split, mesh):
    """Split the tokens of a model, and its weights by FSDP2 over the same ranks."""

    def both(model):
        return shard_fully(split(model, mesh), mesh)

    return both


def of_pretraining(mesh, model, ids):
    own = ids.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    with loss_parallel():
        forward_backward(model, (own, own), mesh)


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
        # FSDP2 takes the mean of the ranks' parts of a gradient, of which the sum is wanted.
        "Ulysses, FSDP2": (sharded_too(sequence_parallelize, one), partial(step, times=P)),
        "ring, FSDP2": (sharded_too(ring_parallelize, one), partial(step, times=P)),
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
            split = partial(parallelize_tp_sp, mesh=of_both, sequence="ring")
            found["TP x ring"] = split, summed(step, of_both["sp"])
        for replicate in False, True:
            split = partial(parallelize_2d, mesh=mesh, replicate=replicate)
            found[f"2-D, {shape}, {replicate}"] = split, partial(of_pretraining, mesh)
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


def loading(folder):
    """Folders of each kind: one file or several, tied or not, bfloat16 or float32; wrong ones."""
    mesh, saved = init_device_mesh("cpu", (P,), mesh_dim_names=("tp",)), {}
    for tied, kind, size in product((False, True), (torch.float32, torch.bfloat16), ("1GB", "9KB")):
        where = folder / f"{tied}, {kind}, {size}"
        config = ordinary().config
        config.tie_word_embeddings = tied
        if RANK == 0:
            type(ordinary())(config).to(kind).save_pretrained(where, max_shard_size=size)
        saved[where] = kind
    dist.barrier()
    for where, kind in saved.items():
        assert (len([*where.glob("*.safetensors")]) > 2) == where.name.endswith("9KB"), where
        for split, dtype in product(
            (tensor_parallelize, dtensor_parallelize, sequence_parallelize), (None, torch.float64)
        ):
            model = from_pretrained(partial(split, mesh=mesh), where, dtype)
            whole = AutoModelForCausalLM.from_pretrained(where, dtype=dtype or "auto")
            name = f"{split.__name__}, {where.name}, {dtype}"
            assert model.dtype == whole.dtype == (dtype or kind), name
            for key, parameter in model.named_parameters():
                part = whole.get_parameter(key)[shard_of(parameter)]
                assert local_part(parameter).equal(part), f"{name}: {key}, as loaded"
            tied = model.lm_head.weight is model.model.embed_tokens.weight
            assert tied == whole.config.tie_word_embeddings, f"{name}: tied"
            assert not model.training, name
    before, where = Path.cwd(), folder / "tiny"  # not the model of this name
    if RANK == 0:
        shutil.copytree(next(iter(saved)), where)
        settings = json.loads((where / "config.json").read_text()) | {"use_cache": False}
        (where / "config.json").write_text(json.dumps(settings))
    dist.barrier()
    os.chdir(folder)
    for split in None, tensor_parallelize, sequence_parallelize:
        model = from_pretrained(split and partial(split, mesh=mesh), Path("tiny"))
        assert model.config.vocab_size == 211 and model.name_or_path == "tiny", split
        save_pretrained(model, folder / "tiny again")
        assert not settings_of(model)[0].use_cache, split
    os.chdir(before)
    wrong = folder / "wrong"
    for change, said in (
        (lambda tensors: tensors.pop("model.norm.weight"), "tensor model.norm.weight is missing"),
        (lambda tensors: tensors.update(more=torch.ones(1)), "unexpected tensor more"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(2)}), "norm.weight has"),
    ):
        if RANK == 0:
            shutil.copytree(next(iter(saved)), wrong)
            tensors = load_file(wrong / "model.safetensors")
            change(tensors)
            save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
        dist.barrier()
        refused(partial(from_pretrained, partial(tensor_parallelize, mesh=mesh), wrong), said)
        dist.barrier()
        if RANK == 0:
            shutil.rmtree(wrong)


class Largest(TorchDispatchMode):
    """Tracks how many bytes, of all that is made inside it, are there at one time, at most."""

    def __init__(self):
        super().__init__()
        self.there = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        returned = function._schema.returns
        if torch.is_tensor(made) and returned[0].alias_info is None:
            self.there += made.nbytes
            self.most = max(self.most, self.there)
            weakref.finalize(made, self.gone, made.nbytes)
        return made

    def gone(self, nbytes):
        self.there -= nbytes


def saving(folder):
    """A folder takes no more memory than one full tensor, and a rank's piece of it."""
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("tp",))
    for split in tensor_parallelize, dtensor_parallelize, sequence_parallelize:
        model = split(ordinary(), mesh)
        largest = max(p.nbytes for p in ordinary().parameters())
        with Largest() as made:
            save_pretrained(model, folder)
        # (Ranks also tell each other what they have, which is next to nothing in a larger model.)
        least, most = (1.0, 1.7) if RANK == 0 else (0.0, 0.9)
        assert least <= made.most / largest <= most, f"{split}: {made.most / largest} full tensors"
        of_halves(split, mesh, folder)


def of_halves(split, mesh, folder):
    """The folder of a bfloat16 model, and its clipped gradients, each of which is rounded once."""
    whole = ordinary().bfloat16()
    model = split(copy.deepcopy(whole), mesh)
    save_pretrained(model, folder)
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert again.dtype == torch.bfloat16, split
    state = again.state_dict()
    for key, tensor in whole.state_dict().items():
        assert state[key].equal(tensor), f"{split}: {key}, bfloat16"
    step(whole, IDS)
    for key, parameter in model.named_parameters():
        parameter.grad = parameter.detach().clone()
        grad = whole.get_parameter(key).grad[shard_of(parameter)]
        local_part(parameter.grad, parameter).copy_(grad)
    exact = {key: p.grad.double() for key, p in whole.named_parameters()}
    norm = torch.stack([grad.norm() for grad in exact.values()]).norm()
    found = clip_grad_norm_(model, norm.item() / 3)
    assert abs(found - norm) < 1e-6 * norm, f"{split}: a norm of bfloat16"
    for key, parameter in model.named_parameters():
        grad = exact[key][shard_of(parameter)] / 3
        error = (local_part(parameter.grad, parameter).double() - grad).abs()
        assert (error <= 2**-8 * grad.abs()).all(), f"{split}: {key}, clipped in bfloat16"
    dist.barrier()


def full(name, split, step_of, ids, folder):
    check_loading(name, split)
    whole, model = ordinary(), ordinary()
    step(whole, ids)
    model = split(model) or model
    step_of(model, ids)
    evaluate(model, ids)
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
    for size in 2 * max(p.nbytes for p in whole.parameters()), "1GB":
        save_pretrained(model, folder, size)
        dist.barrier()
        files = {path.name for path in folder.glob("model*")}
        assert (files == {"model.safetensors"}) == (size == "1GB"), (name, files)
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).state_dict()
        assert again.keys() == before.keys(), name
        assert all(again[key].equal(before[key]) for key in before), name
        files = sorted(path.name for path in folder.glob("*.safetensors*"))
        assert len(files) > 2 if size != "1GB" else files == ["model.safetensors"], (name, files)
        dist.barrier()
    if RANK == 0:
        whole.save_pretrained(folder / "by_transformers")
        for file in "config.json", "generation_config.json":
            ours, theirs = (json.loads((f / file).read_text())
                            for f in (folder, folder / "by_transformers"))  # fmt: skip
            assert ours == theirs, (name, file, ours, theirs)


def gradients(model):
    """{name: this rank's part of the gradient}."""
    return {name: local_part(p.grad, p) for name, p in model.named_parameters()}


class Calls(TorchDispatchMode):
    """Counts what is called inside it: attention's kernels, and collectives."""

    def __init__(self):
        super().__init__()
        self.attention = self.collectives = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.attention += function in ATTENTION_OPS
        of_torch = function.namespace in ("c10d", "_c10d_functional")
        self.collectives += of_torch and "wait_tensor" not in str(function)
        return function(*args, **(kwargs or {}))


def collectives_again(name):
    """How many of a layer's collectives run in its recomputation; None: not known by a formula.

    It stops where nothing is left to keep: Task 2's g behind attention runs, but not the one behind
    the MLP; Task 4's two all-to-alls. (A ring's messages differ by rank.)
    """
    if "2-D" in name or "ring" in name:
        return None
    of_tp = {"TP": 1, "DTensor": 2}.get(name.split(",")[0].split(" ")[0], 0)
    return of_tp + 2 * ("Ulysses" in name) + 2 * name.endswith("True")  # Megatron's gathers


def recompute(name, split, step_of, ids, folder):
    """Hugging Face's own checkpoints of layers: the gradients are as without, to the last bit.

    With a selective one attention's kernel is run once, as without.
    """
    model = ordinary()
    model = split(model) or model
    step_of(model, ids)
    expected = {key: grad.clone() for key, grad in gradients(model).items()}
    layers, counted = len(model.model.layers), {}
    keep = partial(create_selective_checkpoint_contexts, ATTENTION_OPS)
    for kind, how in (
        ("no", None), ("reentrant", {"use_reentrant": True}), ("by default", {}),
        ("all", {"use_reentrant": False}),
        ("selective", {"use_reentrant": False, "context_fn": keep}),
    ):  # fmt: skip
        model.zero_grad()
        if how is not None:
            model.gradient_checkpointing_enable(how or None)
        with Calls() as counted[kind], without_comparing():
            step_of(model, ids)
        for key, grad in gradients(model).items():
            assert grad.equal(expected[key]), f"{name}: {key}, {kind} recomputed"
    runs = {kind: calls.attention for kind, calls in counted.items()}
    assert layers <= runs["no"] == runs["selective"] < runs["all"], f"{name}: attention {runs}"
    for kind in "all", "selective":
        again = counted[kind].collectives - counted["no"].collectives
        wanted = collectives_again(name)
        fits = again % layers == 0 if wanted is None else again == layers * wanted
        assert fits, f"{name}: {again} collectives again, {kind}"


def compiled(name, split, step_of, ids, folder):
    """Each layer by torch.compile: the gradients are as without, but for rounding.

    Each is one graph, but for the ring, whose messages PyTorch does not compile.
    """
    whole, model = ordinary(), ordinary()
    step(whole, ids)
    model = split(model) or model
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph="ring" not in name)
    step_of(model, ids)
    for key, grad in gradients(model).items():
        expected = whole.get_parameter(key).grad[shard_of(model.get_parameter(key))]
        close(grad, expected, f"{name}: {key}, compiled")


def accumulated(name, split, step_of, ids, folder):
    """Microbatches of uneven rows and labels are one batch, by `num_items_in_batch`."""
    # (Rows of one's own: see test_accumulation.py. Without split logits the loss is the library's.)
    if "DP" in name or "2-D" in name or name == "TP, layers alone":
        return
    labels = ids.clone()
    labels[:5, 3:] = labels[:, ::5] = -100
    count, (whole, expected) = (labels[:, 1:] != -100).sum(), whole_loss(ids, labels)
    model, total = split(ordinary()), 0
    for rows in range(5), range(5, 6), range(6, len(ids)):
        some = dict(input_ids=ids[rows], labels=labels[rows], use_cache=False)
        loss = model(**some, num_items_in_batch=count).loss
        loss.backward()
        total += loss.detach()
    if hasattr(step_of, "mesh"):
        sum_gradients(model.parameters(), step_of.mesh)
    close(total, expected, f"{name}: loss of microbatches")
    for key, grad in gradients(model).items():
        exact = whole.get_parameter(key).grad[shard_of(model.get_parameter(key))]
        close(grad, exact, f"{name}: {key}, of microbatches")


def autocast(name, split, step_of, ids, folder):
    """bfloat16 over float32 weights: about as far from float32 as the unsplit model is."""
    exact, whole, model = ordinary(), ordinary(), ordinary()
    step(exact, ids)
    model = split(model) or model
    with torch.autocast("cpu", torch.bfloat16):
        step(whole, ids)
        step_of(model, ids)
    sums = torch.zeros(2)  # of squares: of the run's error, and of the reference's own
    for key, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == DTYPE, (name, key)
        theirs, right = (one.get_parameter(key).grad for one in (whole, exact))
        ours = local_part(parameter.grad, parameter)
        part = shard_of(parameter)
        errors = torch.stack([(grad - right[part]).norm() for grad in (ours, theirs[part])])
        largest = LIMITS["rms"] * errors[1] + 1e-3 * right.norm()
        assert errors[0] <= largest, f"{name}: {key}: {errors}, autocast"
        sums += errors.square()
    assert sums[0] < 2 * sums[1], f"{name}: {sums}, autocast"


def resume(name, split, step_of, ids, folder):
    """From a checkpoint after two of three steps: the same third, also for another split."""

    def make(change=0.0, split=split):
        model = ordinary()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += change
        model = split(model) or model
        return model, torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)

    def train(model, optimizer, steps, step_of=step_of):
        for i in steps:
            optimizer.zero_grad()
            step_of(model, ids.roll(i, 1))
            optimizer.step()
        return full_state_dict(model)

    def unsplit(model):
        return model

    model, optimizer = make()
    train(model, optimizer, range(2))
    evaluate(model, ids)
    save_training_state(model, optimizer, folder / "split", 2, {"epoch": 7})
    expected = train(model, optimizer, [2])
    again = make(change=0.1)
    again[1].param_groups[0]["lr"] = 0.5  # what is loaded counts
    evaluate(again[0], ids)
    assert load_training_state(*again, folder / "split") == (2, {"epoch": 7}), name
    assert again[1].param_groups[0]["lr"] == 1e-3, name
    for key, tensor in train(*again, [2]).items():
        assert tensor.equal(expected[key]), f"{name}: {key}, resumed"

    # Another split of the same state, or none; and what the technique before this one saved, which
    # may have split the model over fewer ranks. Adam makes much of float32's roundings.
    def same_third(again, expected, what, step_of=step_of):
        for key, tensor in train(*again, [2], step_of).items():
            if torch.float64 == DTYPE:
                close(tensor, expected[key], f"{name}: {key}, resumed {what}")

    whole = make(0.1, unsplit)
    load_training_state(*whole, folder / "split")
    same_third(whole, expected, "by one rank", step)
    if (folder / "previous").exists():
        again = make(0.1)
        load_training_state(*again, folder / "previous")
        same_third(again, expected, "from another technique's")
    whole = make(0.0, unsplit)
    train(*whole, range(2), step)
    save_training_state(*whole, folder / "whole", 2)
    before, expected = full_state_dict(whole[0]), train(*whole, [2], step)
    again = make(0.1)
    load_training_state(*again, folder / "whole")
    for key, tensor in full_state_dict(again[0]).items():
        assert tensor.equal(before[key]), f"{name}: {key}, from one rank's"
    same_third(again, expected, "from one rank's")
    dist.barrier()
    if RANK == 0:
        for kind in "previous", "whole":
            shutil.rmtree(folder / kind, ignore_errors=True)
        (folder / "split").rename(folder / "previous")
    dist.barrier()


def in_tiles(name, split, step_of, ids, folder):
    """A loss whose logits are made some tokens at a time is the whole one, and so are gradients."""
    if "TP" not in name or "alone" in name:
        return
    labels = ids.clone()
    labels[:, ::5] = -100
    count, (whole, expected) = (labels[:, 1:] != -100).sum(), whole_loss(ids, labels)

    def loss_of(model, **kwargs):
        return model(input_ids=ids, labels=labels, use_cache=False, **kwargs)

    for size in 2**28, 1, 5000:
        tp_llama.LOSS_TILE_BYTES = size
        model = split(ordinary())
        output = loss_of(model)
        in_tiles = size < 2**28
        assert (output.logits is None) == ("logits" not in output) == in_tiles, name
        assert len(output.to_tuple()) == 2 - in_tiles, name
        close(output.loss, expected, f"{name}: loss in tiles of {size} bytes")
        output.loss.backward(retain_graph=True)
        if step_of is not step:
            continue  # their gradients are to be summed: what is theirs is in no tile
        for times in 1, 2:
            for key, parameter in model.named_parameters():
                grad = times * whole.get_parameter(key).grad[shard_of(parameter)]
                close(local_part(parameter.grad, parameter), grad, f"{name}: {key}, {size} bytes")
            if times == 1:
                output.loss.backward()
        with torch.inference_mode():
            close(loss_of(model, num_items_in_batch=2 * count).loss, expected / 2, f"{name}: half")
        assert loss_of(model, return_dict=False)[0].equal(output.loss), name
        assert model(ids[:, :3]).logits.shape[-1] == whole.config.vocab_size, f"{name}: logits"
        refused(partial(model, input_ids=ids, labels=labels[:, :3]), "labels are")
        assert model.lm_head(torch.ones(2, 3, model.config.hidden_size, dtype=DTYPE)).shape[-1] \
            == len(model.lm_head.weight), f"{name}: the head by itself"  # fmt: skip
        model.zero_grad()
        none = model(input_ids=ids, labels=torch.full_like(ids, -100), use_cache=False).loss
        none.backward()
        assert none.isnan(), f"{name}: a mean over no label"
        assert not any(p.grad.any() for p in model.parameters()), f"{name}: no label, {size} bytes"
        model.lm_head.weight.requires_grad_(False)
        model.zero_grad()
        loss_of(model).loss.backward()
        key = "model.norm.weight"
        grad = whole.get_parameter(key).grad
        close(model.get_parameter(key).grad, grad, f"{name}: {key}, frozen head")


def see_all(query, key, value):
    """Attention of every token to every token, on one rank."""
    times = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def two_documents(S):
    """A mask of two documents, the first of which has a third of the tokens."""
    return MaskInfo(S, documents=(torch.arange(S) >= S // 3).long().expand(2, -1)).to_tensor()


def each_alone(*qkv):
    """Causal attention of these two documents, on one rank."""
    pieces = zip(*(t.tensor_split([t.shape[2] // 3], dim=2) for t in qkv), strict=True)
    return torch.cat([causal_attention(*piece) for piece in pieces], dim=2)


def functions(folder):
    """Attention and cross-entropy of tensors, without a model, against PyTorch's own."""
    groups = [dist.group.WORLD]
    if P == 4:  # the outer axis of a mesh, whose ranks are not neighbours
        groups.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")).get_group("a"))
    for group in groups:
        functions_of_attention(group, group.size(), group.rank())
        function_of_loss(group, group.size(), group.rank())


def functions_of_attention(group, P, rank):
    for N, K, S in product((P, 6), (1, 3), (4 * P, 4 * P + 1)):
        if N % K or N < P:
            continue
        qkv, grad = (
            [torch.randn(2, n, S, 4, dtype=DTYPE) for n in (N, K, K)],
            torch.randn(2, N, S, 4),
        )
        own = slice(*shard_range(S, P, rank))
        zigzag = Ring(group, S, True).order()[own]
        for name, attend, tokens, alone in (
            ("Ulysses", ulysses_attention, own, causal_attention),
            ("Ulysses, all", partial(ulysses_attention, attend=see_all), own, see_all),
            ("ring", ring_attention, own, causal_attention),
            ("ring, zigzag", partial(ring_attention, zigzag=True), zigzag, causal_attention),
            ("ring, all", partial(ring_attention, causal=False), own, see_all),
            ("ring, documents", partial(ring_attention, mask=two_documents(S)), own, each_alone),
            ("ring, zigzag, documents", partial(ring_attention, zigzag=True,
                                                mask=two_documents(S)), zigzag, each_alone),
        ):  # fmt: skip
            name = f"{name}, {N} heads, {K} KV heads, {S} tokens"
            full = [t.clone().requires_grad_() for t in qkv]
            expected = alone(*full)
            expected.backward(grad.to(DTYPE))
            local = [t[:, :, tokens].clone().requires_grad_() for t in qkv]
            output = attend(*local, group, length=S)
            output.backward(grad[:, :, tokens].to(DTYPE))
            close(output.detach(), expected.detach()[:, :, tokens], name)
            for one, other in zip(local, full, strict=True):
                close(one.grad, other.grad[:, :, tokens], f"{name}: gradient")
    few, own = torch.randn(2, 1, 4 * P, 4, dtype=DTYPE), slice(4 * rank, 4 * rank + 4)
    local = few[:, :, own]  # of a head: fewer than ranks
    output = ring_attention(local, local, local, group)
    close(output, causal_attention(few, few, few)[:, :, own], "a head")
    if P > 1:
        refused(partial(ulysses_attention, local, local, local, group), "query heads: use 1")
    q = torch.randn(1, 6, 3, 4)
    for how in dict(zigzag=True), dict(mask=torch.ones(1, 1, 1, 3 * P, dtype=torch.bool)):
        refused(partial(ring_attention, q, q, q, group, causal=False, **how), "only in causal")
    for attend in ulysses_attention, ring_attention:
        refused(partial(attend, q, q, q, group, length=3 * P + P), "tokens on rank")
        longer, others, half = (torch.randn(1, K, S, 4) for K, S in ((2, 4), (4, 3), (2, 3)))
        for kv in longer, others, half.bfloat16():
            refused(partial(attend, q, kv, kv, group), "query, key, value do not fit")


def function_of_loss(group, P, rank):
    for V, offset in product((5 * P, 5 * P + 1), (0, 1e4)):
        rows = shard_range(V, P, rank)
        logits = torch.randn(2, 7, V, dtype=DTYPE) + offset
        labels = torch.randint(V, (2, 7))
        for reduction, given, ignored in product(("mean", "sum", "none"), (rows, None), (-100, 3)):
            some = labels.masked_fill(torch.arange(14).view(2, 7) % 3 == 0, ignored)
            whole = logits.clone().requires_grad_()
            how = dict(reduction=reduction, ignore_index=ignored)
            expected = torch.nn.functional.cross_entropy(whole.flatten(0, 1), some.flatten(), **how)
            expected.sum().backward()
            local = logits[..., slice(*rows)].clone().requires_grad_()
            loss = vocab_parallel_cross_entropy(local, some, group, rows=given, **how)
            loss.sum().backward()
            name = f"cross-entropy, {V} words, + {offset}, {how}"
            close(loss.detach().flatten(), expected.detach().flatten(), name)
            close(local.grad, whole.grad[..., slice(*rows)], f"{name}: gradient")
        loss_of = partial(vocab_parallel_cross_entropy, group=group)
        if P > 1:
            refused(partial(loss_of, logits, labels, rows=rows), "for logits of")
        refused(partial(loss_of, local, labels[:, 1:]), "labels [2, 6], for logits")
        refused(partial(loss_of, local, labels, reduction="max"), "reduction 'max'")
        try:
            vocab_parallel_cross_entropy(local, labels.clamp(min=V), group)
        except IndexError:
            continue
        raise AssertionError(f"not refused: label {V} of {V} words")


def lost(folder):
    """What would lose slices, or clip by them, or take another loss, without a word."""
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("tp",))
    model = ordinary()
    model.loss_function = lambda *args, **kwargs: torch.zeros(())
    for split in tensor_parallelize, dtensor_parallelize, sequence_parallelize, ring_parallelize:
        refused(partial(split, model, mesh), "a loss_function of your own")
    for split in tensor_parallelize, sequence_parallelize:
        model = split(ordinary(), mesh)
        copy.deepcopy(model)(input_ids=IDS, labels=IDS)
        model.loss_function = lambda *args, **kwargs: torch.zeros(())
        refused(partial(model, input_ids=IDS, labels=IDS), "a loss_function of your own")
        model(input_ids=IDS)

    model = copy.deepcopy(tensor_parallelize(ordinary(), mesh))
    step(model, IDS)
    grads = [parameter.grad for parameter in model.parameters()]
    refused(partial(imported_before, model.parameters(), 1.0), "get_total_norm")
    refused(partial(torch.nn.utils.get_total_norm, grads), "get_total_norm")
    torch.nn.utils.get_total_norm([torch.ones(2)])
    imported_before([torch.ones(2, requires_grad=True)], 1.0)

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    said = "model.embed_tokens.weight was a slice, and has been replaced"
    refused(partial(model, input_ids=IDS), said)
    for function in grad_norm, full_state_dict, partial(clip_grad_norm_, max_norm=1.0):
        refused(partial(function, model), said)
    refused(partial(save_pretrained, model, folder / "none"), said)
    refused(model.state_dict, "full_state_dict")
    optimizer = torch.optim.AdamW(model.parameters())
    refused(partial(save_training_state, model, optimizer, folder / "none", 0), said)
    assert not (folder / "none").exists()


def optimizers(folder):
    """Optimizers that would not train slices as the full model's are refused at their step."""
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("tp",))
    for split in tensor_parallelize, dtensor_parallelize:
        model = ordinary()
        before, other = torch.optim.AdamW(model.parameters()), ordinary()
        split(model, mesh)
        model(input_ids=IDS, labels=IDS).loss.backward()
        refused(before.step, "from before the split")
        before.zero_grad(set_to_none=False)
        for parameter in before.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        refused(
            torch.optim.SGD(before.param_groups[0]["params"], 0.1).step, "from before the split"
        )
        after = torch.optim.AdamW(model.parameters(), foreach=False)
        torch.compile(after.step, backend="eager")()
        model.lm_head.requires_grad_(False)  # frozen, or without a gradient: not from before
        model.zero_grad()
        after.step()
        other(input_ids=IDS, labels=IDS).loss.backward()
        torch.optim.Adafactor(other.parameters()).step()  # of a model that is not split
    model = tensor_parallelize(ordinary(), mesh)
    model(input_ids=IDS, labels=IDS).loss.backward()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    refused(torch.optim.Muon(matrices).step, "Muon: its step needs full tensors")
    for of_matrices in torch.optim.Adafactor, transformers.Adafactor:
        refused(of_matrices(model.parameters()).step, "Adafactor: its step needs full tensors")
    named = type("MuonWithAuxAdam", (torch.optim.SGD,), {})  # as in other packages
    refused(named(model.parameters(), 0.1).step, "MuonWithAuxAdam: its step needs")
    refused(partial(torch.optim.LBFGS(model.parameters()).step, lambda: 0), "LBFGS: its step")
    # Of a model whose tokens are split, the weights are full.
    model, whole = sequence_parallelize(ordinary(), mesh), ordinary()
    for one in model, whole:
        one(input_ids=IDS, labels=IDS).loss.backward()
    sum_gradients(model.parameters(), mesh)
    for one in model, whole:
        torch.optim.Muon(p for p in one.parameters() if p.dim() == 2).step()
    for name, parameter in whole.named_parameters():
        close(model.get_parameter(name), parameter, f"Muon: {name}")


def shared_batches(folder):
    """Ranks that share a batch, and got different ones; or that did not sum their gradients."""
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("tp",))
    for split in tensor_parallelize, dtensor_parallelize, sequence_parallelize, ring_parallelize:
        for kept in False, True:
            model = split(ordinary(), mesh)
            model = copy.deepcopy(model) if kept else model
            own = IDS + RANK
            refused(partial(model, input_ids=own), "have different batches")
            model(IDS)
            model(input_ids=own, labels=own)  # the third forward: it would take a message
            refused(partial(model, input_ids=own), "have different batches")
        model = split(ordinary(), mesh)
        model(input_ids=IDS, attention_mask=torch.ones_like(IDS))
        model = split(ordinary(), mesh)
        refused(partial(model, IDS, labels=own), "have different batches")
        model = split(ordinary(), mesh)
        for _ in range(2):
            model(IDS)
        refused(partial(model.eval(), own), "have different batches")
        model = split(ordinary(), mesh)
        # PEFT, by version, or a user may call a part, or no hooks.
        part = model.forward if hasattr(model, "sequence_parts") else model.model
        refused(partial(part, input_ids=own), "have different batches")
        for whole in model, model.model:
            refused(partial(DistributedDataParallel, whole), "which share each batch and the")
    for split in tensor_parallelize, sequence_parallelize, ring_parallelize:
        torch.manual_seed(RANK)  # (DTensor sends rank 0's weights to all.)
        model, loaded = (type(ordinary())(ordinary().config).to(DTYPE) for _ in range(2))
        refused(partial(split(model, mesh), IDS), "had different weights when the model was split")
        split(loaded, mesh)
        one = split(ordinary(), mesh)
        saved = folder / split.__name__
        save_training_state(one, torch.optim.SGD(one.parameters(), 0.1), saved, 0)
        load_training_state(loaded, torch.optim.SGD(loaded.parameters(), 0.1), saved)
        loaded(IDS)
        model = ordinary()
        changed = model.model.norm if split is tensor_parallelize else model.model.embed_tokens
        with torch.no_grad():
            changed.weight[-1] += RANK  # as rows that were added, and filled by chance
        refused(partial(split(model, mesh), IDS), "have different values of model.")
    torch.manual_seed(RANK)  # Task 3's heads, which DTensor cannot deal out, are rank 0's, too
    model = type(ordinary())(ordinary().config).to(DTYPE)
    first, state = copy.deepcopy(model), full_state_dict(dtensor_parallelize(model, mesh))
    assert model.config.num_key_value_heads % P
    for name, tensor in state.items():  # on rank 0
        assert tensor.equal(first.get_parameter(name)), f"Task 3, unlike seeds: {name}"
    model = ordinary()
    split_loss_alone(model, mesh)
    refused(partial(model, IDS + RANK), "have different batches")
    step(model, IDS)
    refused(partial(sum_gradients, model.parameters(), mesh), "which split the weights")
    for split, techniques in product(
        (sequence_parallelize, ring_parallelize), (None, Techniques(tile_tokens=5))
    ):
        model = split(ordinary(), mesh)
        refused(partial(shard_loss, model, IDS + RANK, mesh, techniques), "different batches")
        model = split(ordinary(), mesh)
        shard_loss(model, IDS, mesh, techniques).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        refused(partial(shard_loss, model, IDS, mesh, techniques), "before the step")
    for split in sequence_parallelize, ring_parallelize:
        model, other = (split(ordinary(), mesh) for _ in range(2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.step()  # nothing to compare yet
        for one in model, other:
            one(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        said = "call sum_gradients(model.parameters(), mesh) before the "
        refused(partial(model, IDS), f"{said}step")  # the second forward
        for clip in (
            partial(torch.nn.utils.clip_grad_norm_, max_norm=1e-3),
            partial(torch.nn.utils.clip_grad_value_, clip_value=1e-3),
            partial(torch.nn.utils.clip_grads_with_norm_, max_norm=1e-3, total_norm=torch.ones(())),
        ):
            CALLS.clear()
            model = split(ordinary(), mesh)
            model(input_ids=IDS, labels=IDS).loss.backward()
            clip(model.parameters())
            refused(partial(model, IDS), f"{said}clipping")
        model = split(ordinary(), mesh)
        model(input_ids=IDS, labels=IDS).loss.backward()
        for max_norm in 1e9, math.inf:
            CALLS.clear()
            if RANK == 0:  # the norm alone, of a rank's own tokens
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        model(IDS)
        clip = torch.nn.utils.clip_grad_norm_
        optimizer = torch.optim.SGD(other.parameters(), 0.1)
        sum_gradients(other.parameters(), mesh)
        clip(other.parameters(), 1.0)
        optimizer.step()
        some = [other.lm_head.weight, other.model.norm.weight]
        other.zero_grad()
        other(input_ids=IDS, labels=IDS).loss.backward()
        sum_gradients(some, mesh)
        torch.optim.SGD(some, 0.1).step()  # the others are not trained
        # Each rank steps with its own part of the parameters.
        dealt = [*other.parameters()][1 + RANK :: P]
        torch.optim.SGD(dealt, 0.1).step()
        other(IDS)


def of_slices(folder):
    """What would add up or send slices of different weights, and tokens chosen by unlike chance."""
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("tp",))
    for split in tensor_parallelize, dtensor_parallelize:
        model = split(ordinary(), mesh)
        step(model, IDS)
        replicated = [model.model.norm.weight]
        for some in replicated, *([model.parameters()] if split is tensor_parallelize else []):
            refused(partial(sum_gradients, some, mesh), "which split the weights")
    model = tensor_parallelize(ordinary(), mesh)
    model(IDS)
    model = copy.deepcopy(model)
    step(model, IDS)
    refused(partial(sum_gradients, model.parameters(), mesh), "which split the weights")
    shares = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    refused(shares.step, "ZeroRedundancyOptimizer over ranks [0, 1")
    # Layers that are other than the configuration says, or share a weight.
    wider, tied, same = (ordinary() for _ in range(3))
    mlp = wider.model.layers[0].mlp
    for name in "gate_proj", "up_proj":
        setattr(mlp, name, nn.Linear(wider.config.hidden_size, 60, dtype=DTYPE))
    first, second = tied.model.layers[:2]
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    attention = same.model.layers[0].self_attn
    attention.v_proj.weight = attention.k_proj.weight
    for split in tensor_parallelize, dtensor_parallelize:
        for model, said in (
            (wider, "has 60 rows"),
            (tied, "are one weight"),
            (same, "are one weight"),
        ):
            refused(partial(split, model, mesh), said)
    # Replicas that were made with unlike seeds, of which the first sum knows.
    torch.manual_seed(RANK)
    model = type(ordinary())(ordinary().config).to(DTYPE)
    step(model, IDS)
    refused(partial(sum_gradients, model.parameters(), mesh), "make replicas with one seed")
    # Where the tokens are split, each rank has all weights, and may step for some of them.
    model, whole = sequence_parallelize(ordinary(), mesh), ordinary()
    step(model, IDS)
    shares = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    sum_gradients(model.parameters(), mesh)
    shares.step()
    step(whole, IDS)
    torch.optim.SGD(whole.parameters(), 0.1).step()
    for name, parameter in whole.named_parameters():
        close(model.get_parameter(name), parameter, f"ZeRO-1: {name}")

    for split in tensor_parallelize, dtensor_parallelize, sequence_parallelize:
        model = split(ordinary(), mesh).eval()
        sample = partial(model.generate, IDS[:, :4], do_sample=True, max_new_tokens=5)
        torch.manual_seed(RANK)
        refused(sample, "have different random states")
        model.generation_config.do_sample, some = True, GenerationConfig(max_new_tokens=2)
        refused(partial(model.generate, IDS[:, :4], some), "have different random states")
        model.generate(IDS[:, :4], do_sample=False, max_new_tokens=2)
        torch.manual_seed(0)
        everyone = [None] * P
        dist.all_gather_object(everyone, sample())
        assert all(tokens.equal(everyone[0]) for tokens in everyone), f"{split}: sampled"


def adapters(folder):
    """PEFT's adapters and prompts: made with unlike seeds, not summed, or with dropout."""
    from peft import (
        LoHaConfig,
        LoraConfig,
        PeftModel,
        PromptEncoderConfig,
        PromptTuningConfig,
        get_peft_model,
    )

    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("one",))
    lora = partial(LoraConfig, task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"])
    prompt = partial(PromptTuningConfig, task_type="CAUSAL_LM", num_virtual_tokens=3)
    encoder = partial(PromptEncoderConfig, task_type="CAUSAL_LM", num_virtual_tokens=3)

    def make(split, config, seed=0):
        model = split(ordinary(), mesh)
        torch.manual_seed(seed)
        return get_peft_model(model, config()).train()

    for split in tensor_parallelize, sequence_parallelize, ring_parallelize:
        for config in lora, prompt, encoder:
            if split is tensor_parallelize and config is lora:
                continue
            model = make(split, config, RANK)
            what = "model.layers.0.self_attn.q_proj.lora" if config is lora else "prompt_encoder"
            refused(partial(model, IDS), f"have different values of {what}")
            model = make(split, config)
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1)
            for _ in range(2):
                optimizer.zero_grad()
                model(input_ids=IDS, labels=IDS).loss.backward()
                if split is not tensor_parallelize:
                    sum_gradients(model.parameters(), mesh)
                optimizer.step()
            model(IDS)
            if split is not tensor_parallelize:
                model = make(split, config)
                model(input_ids=IDS, labels=IDS).loss.backward()
                torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1).step()
                refused(partial(model, IDS), "before the step")
    # What is saved: adapters of full weights, and the full state; no adapter in slices.
    for split in sequence_parallelize, ring_parallelize:
        model, whole = make(split, lora), make(lambda model, mesh: model, lora)
        for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
            parameter.data += 0.1 * parameter.requires_grad
            other.data += 0.1 * other.requires_grad
        save_pretrained(model, folder / "adapter")
        dist.barrier()
        again = PeftModel.from_pretrained(ordinary(), folder / "adapter")
        state, expected = full_state_dict(model), whole.state_dict()
        assert bool(state) == (RANK == 0), split
        for of, found in ("adapter's folder", again.state_dict()), ("full state", state):
            for key, tensor in found.items():
                assert tensor.equal(expected[key]), f"{split}: {key} of the {of}"
    model = make(tensor_parallelize, lora)
    refused(partial(save_pretrained, model, folder / "none"), "these ranks do not have all of it")
    model = get_peft_model(tensor_parallelize(dealt_evenly(), mesh), lora())
    refused(partial(save_pretrained, model, folder / "none"), "only whole weights can have one")
    assert not (folder / "none").exists()
    stage = ordinary()
    keep_stage(stage, (1, len(stage.model.layers)), RANK)
    model = get_peft_model(stage, lora())
    refused(partial(save_pretrained, model, folder / "none"), "layers that are on several ranks")
    assert not (folder / "none").exists()
    model = model.merge_and_unload()
    model.peft_config = {"default": lora()}  # as PEFT 0.14 leaves it
    save_pretrained(model, folder / "merged")
    dist.barrier()
    names = AutoModelForCausalLM.from_pretrained(folder / "merged", output_loading_info=True)[1]
    assert not any(names.values()), names
    for split in sequence_parallelize, ring_parallelize:
        config = ordinary().config
        config.attention_dropout = 0.5
        torch.manual_seed(0)
        model = split(AutoModelForCausalLM.from_config(config).train(), mesh)
        techniques = supported_techniques(model, Techniques())[0]
        refused(partial(shard_loss, model, IDS, mesh, techniques), "attention_dropout 0.5")
    for split in sequence_parallelize, ring_parallelize:
        model = make(split, partial(lora, lora_dropout=0.1))
        refused(partial(model, IDS), "would drop the same of different tokens")
        techniques = supported_techniques(llama_of(model), Techniques())[0]
        loss = partial(shard_loss, model, IDS, mesh, techniques)
        refused(loss, "would drop the same of different tokens")
        model.add_adapter("other", lora())
        model.set_adapter("other")
        model(IDS)  # the other's dropout is not used
        model.set_adapter("default")
        refused(partial(model, IDS), "would drop the same of different tokens")
        model.merge_adapter()
        model(IDS)
        model.unmerge_adapter()
        model.eval()
        model(IDS)
        loha = partial(LoHaConfig, target_modules=["down_proj"], module_dropout=0.5)
        model = make(split, loha)
        refused(partial(model, IDS), "would drop different parts of an adapter's weights")
        model.eval()
        model(IDS)
        # An adapter that came after a forward.
        model = split(ordinary(), mesh)
        model(IDS)
        torch.manual_seed(RANK)
        model = get_peft_model(model, lora())
        refused(partial(model, IDS), "have different values of")


def right_use(folder):
    """What is not refused: gradients in tensors that stay, optimizers of few parameters, FSDP1."""
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("sp",))
    model, whole = sequence_parallelize(ordinary(), mesh), ordinary()
    kept = {}
    for turn in range(3):
        for one in model, whole:
            one.zero_grad()
        step(whole, IDS.roll(turn))
        loss = model(input_ids=IDS.roll(turn), labels=IDS.roll(turn)).loss
        for parameter, grad in zip(
            model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
        ):
            parameter.grad = kept[parameter].copy_(grad) if turn else grad.clone()
        sum_gradients(model.parameters(), mesh)
        kept = {parameter: parameter.grad for parameter in model.parameters()}
        for name, parameter in whole.named_parameters():
            close(model.get_parameter(name).grad, parameter.grad, f"copied: {name}")
    # An optimizer of one tensor, of which one rank alone has the state.
    model, whole = sequence_parallelize(ordinary(), mesh), ordinary()
    shares = ZeroRedundancyOptimizer([model.lm_head.weight], torch.optim.SGD, lr=0.1)
    for _ in range(2):
        for one in model, whole:
            one.zero_grad()
            step(one, IDS)
        sum_gradients([model.lm_head.weight], mesh)
        shares.step()
        torch.optim.SGD([whole.lm_head.weight], 0.1).step()
    close(model.lm_head.weight, whole.lm_head.weight, "ZeRO-1 of one tensor")
    for by_layers, original in product((False, True), repeat=2):
        model, whole = sequence_parallelize(ordinary(), mesh), ordinary()
        policy = ModuleWrapPolicy({type(model.model.layers[0])}) if by_layers else None
        cpu = torch.device("cpu")
        wrapped = FullyShardedDataParallel(model, device_id=cpu, use_orig_params=original,
                                           auto_wrap_policy=policy)  # fmt: skip
        optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (wrapped, whole)]
        for _ in range(2):
            step(wrapped, IDS, P)  # FSDP takes the mean
            step(whole, IDS)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            logits = wrapped(IDS).logits
        close(logits, whole(IDS).logits.detach(), f"FSDP1, {by_layers}, {original}")
        for one in wrapped, model:
            refused(partial(full_state_dict, one), "FSDP1's parts do not say what they are of")


def on_two_axes(folder):
    """Tokens on one axis; DDP or FSDP2, of other rows, on the other; a sum that is forgotten."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    dp, sp = mesh["dp"], mesh["sp"]
    own = IDS.chunk(2)[dp.get_local_rank()]
    for kind in "views", "copies", "FSDP2", "FSDP2, not summed":
        model, whole = sequence_parallelize(ordinary(), sp), ordinary()
        called = model
        if kind.startswith("FSDP2"):
            shard_fully(model, dp)
        else:
            called = DistributedDataParallel(
                model, process_group=dp.get_group(), gradient_as_bucket_view=kind == "views"
            )
        optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model, whole)]
        for _ in range(2):
            step(called, own)
            step(whole, IDS)
            if "not" not in kind:
                sum_gradients(model.parameters(), sp)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if "not" in kind:
                refused(partial(called, own), "before the step")
                break
        for name, parameter in whole.named_parameters() if "not" not in kind else ():
            part = model.get_parameter(name)
            close(local_part(part.detach()), parameter.detach()[shard_of(part)], f"{kind}: {name}")


def of_tokens(folder):
    """What pretraining's plan takes, where a rank has its own tokens, and what it refuses."""
    mesh = init_device_mesh("cpu", (1, P), mesh_dim_names=("dp", "tp"))
    model, whole = parallelize_2d(ordinary(), mesh), ordinary()
    ids, one = IDS[:, : 2 * P], torch.ones(2, 2 * P, dtype=torch.int64)
    for some, more in (ids, {}), (ids[:, :P], {}), (ids, {"attention_mask": one[: len(ids)]}):
        expected = whole(some, use_cache=False).logits
        close(model(some, **more).logits.full_tensor(), expected, f"logits of {list(some.shape)}")
    positions = torch.arange(2 * P)[None]
    close(model(ids, None, positions).logits.full_tensor(), whole(ids).logits, "positions given")
    padded = torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)
    refused(partial(model, ids, attention_mask=padded), "attention_mask: ")
    refused(partial(model, ids, attention_mask=torch.ones(1, 1, 4, 4)), "attention_mask: ")
    refused(partial(model, ids, position_ids=positions % 3), "position_ids that jump")
    refused(partial(model, ids[:, :-1]), "do not divide by")
    refused(partial(model, ids, labels=ids), "labels: give them to forward_backward")
    embedded = whole.model.embed_tokens(ids)
    refused(partial(model, inputs_embeds=embedded), "inputs_embeds: not where")
    model.config._attn_implementation = "eager"
    refused(partial(model, ids), "eager attention")
    sizes = {name: getattr(whole.config, name) for name in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "pad_token_id")}  # fmt: skip
    for kind, more, said in (
        ("Mistral", {"sliding_window": 4}, "a sliding window: not in this plan"),
        ("Qwen3", {}, "norms of heads: not in this plan"),
    ):
        if hasattr(transformers, f"{kind}Config"):  # transformers 4.48 has no Qwen3
            config = getattr(transformers, f"{kind}Config")(**sizes, **more)
            relative = getattr(transformers, f"{kind}ForCausalLM")(config)
            refused(partial(parallelize_2d, relative, mesh), said)


def of_dtensors(folder):
    """Task 3's: a state of DTensors says so; PyTorch's own clipping is right, or an error."""
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("tp",))
    whole = dealt_evenly()
    model = dtensor_parallelize(copy.deepcopy(whole), mesh)
    state = whole.state_dict()
    for name, tensor in model.state_dict().items():
        full = state[name]
        assert isinstance(tensor, DTensor) or tensor.equal(full), f"{name}: a slice, unsaid"
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert tensor.equal(full), f"{name}: of the state"
    mask, choose = torch.ones_like(IDS), choose_from_full_logits
    expected = generate(whole, IDS, mask, 3, choose)
    assert generate(model, IDS, mask, 3, choose, transformers.DynamicCache()).equal(expected)
    for one in whole, model:
        step(one, IDS)
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e-3)
    refused(partial(torch.nn.utils.clip_grad_norm_, model.parameters(), 1e-3), "utils.full_model")
    close(clip_grad_norm_(model, 1e-3), norm.double(), "DTensors: norm")


def parts_of_losses(folder):
    """Task 5's loss of a model on a mesh; what saves memory is not for slices, nor for USP."""
    ids, techniques = IDS % (211 // P), Techniques(tile_tokens=5)  # words of the first rank alone
    for shape, kind in ((1, P), "ulysses"), ((P, 1), "ulysses"), ((P, 1), "ring"), ((P, 1), "usp"):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("sp", "tp"))
        whole, _ = whole_loss(ids, ids)
        model = parallelize_tp_sp(ordinary(), mesh, kind, ulysses=shape[0])
        given = [None]
        if shape[1] > 1 or kind == "usp":
            refused(partial(shard_loss, model, ids, mesh["sp"], techniques), "USP or slices")
        else:
            techniques = supported_techniques(model, techniques)[0]
            given.append(techniques)
        for some in given:
            model.zero_grad()
            shard_loss(model, ids, mesh["sp"], some).backward()
            sum_gradients(model.parameters(), mesh["sp"])
            for name, parameter in model.named_parameters():
                full = whole.get_parameter(name).grad
                close(parameter.grad, full[shard_of(parameter)], f"{kind}, {shape}: {name}")


def freed(folder):
    """A split model goes with its last name, and needs no collector of cycles."""
    for name, (split, step_of) in techniques(P).items():
        model = split(ordinary())
        if "2-D" in name or "FSDP2" in name:  # PyTorch's own, in cycles
            continue
        step_of(model, IDS)
        gc.collect()
        gc.disable()
        parameters = {of: weakref.ref(p) for of, p in model.named_parameters()}
        del model
        left = [of for of, parameter in parameters.items() if parameter() is not None]
        gc.enable()
        assert not left, f"{name}: {left}"


class Streamer:
    """Takes tokens, as a TextIteratorStreamer does; to iterate over it would wait for them."""

    def put(self, ids):
        self.last = ids

    def end(self):
        self.ended = True

    def __iter__(self):
        return self

    def __next__(self):
        raise AssertionError("nobody but its owner may wait for what it streams")


def edges(folder):
    """What programs do now and then: parts of models, wrappers, streams, groups that are gone."""
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("one",))
    refused(partial(dtensor_parallelize, ordinary(), DeviceMesh("cpu", [1, 0])), "ascending")
    config = ordinary().config
    config.num_attention_heads = config.num_key_value_heads = 1
    few = AutoModelForCausalLM.from_config(config)
    before = type(few), few.config._attn_implementation, set(vars(few))
    for split in tensor_parallelize, dtensor_parallelize, sequence_parallelize:
        refused(partial(split, few, mesh), "1 query heads: use 1 to 1 ranks, not 2")
        assert before == (type(few), few.config._attn_implementation, set(vars(few))), split
        few.save_pretrained(folder / f"few {RANK}")
    lm, whole = ordinary(), ordinary()
    tensor_parallelize(lm, mesh)
    backbone = lm.model
    del lm
    optimizer = torch.optim.SGD(backbone.parameters(), 0.1)
    expected = whole.model(IDS).last_hidden_state
    for _ in range(2):
        found = backbone(IDS).last_hidden_state
        close(found, expected, "a backbone alone")
        found.sum().backward()
        optimizer.step()
        expected.sum().backward()
        torch.optim.SGD(whole.parameters(), 0.1).step()
        expected = whole.model(IDS).last_hidden_state
        optimizer.zero_grad()
        whole.zero_grad()
    save_pretrained(backbone, folder / "backbone")  # which has no settings for generation
    dist.barrier()
    again = AutoModel.from_pretrained(folder / "backbone", dtype=DTYPE)
    for name, parameter in backbone.named_parameters():
        assert again.get_parameter(name)[shard_of(parameter)].equal(parameter), name

    streamer, whole = Streamer(), ordinary()
    ids = whole.generate(IDS[:1], max_new_tokens=2, do_sample=False, streamer=streamer)
    assert streamer.ended and streamer.last.equal(ids[0, -1:])

    model, (whole, loss) = sequence_parallelize(ordinary(), mesh), whole_loss(IDS, IDS)
    step(model, IDS)
    sum_gradients([*model.parameters(), *model.model.parameters()], mesh, bucket_bytes=1)
    for name, parameter in model.named_parameters():
        close(parameter.grad, whole.get_parameter(name).grad, f"given twice: {name}")
    parameter = model.model.norm.weight
    grad = parameter.grad.clone()
    with new_gradients([parameter, parameter]):
        parameter.grad = grad.clone()
    close(parameter.grad, 2 * grad, "set aside twice")
    for backward in "saved-outputs", "selective", "checkpoint", "plain":
        techniques = supported_techniques(model, Techniques(backward, tile_tokens=5))[0]
        for quiet in torch.inference_mode, torch.no_grad:
            with quiet():
                parts = shard_loss(model, IDS, mesh, techniques)
                dist.all_reduce(parts)
                close(parts, loss, f"{backward} in {quiet.__name__}")
    model.lm_head.bias = nn.Parameter(torch.ones(211, dtype=DTYPE))
    assert not supported_techniques(model, Techniques())[0].tiled_loss

    model = sequence_parallelize(ordinary(), mesh)
    for number, layer in enumerate(model.model.layers):
        wrapper = nn.Module()  # PyTorch's checkpoint_wrapper has the layer by this name
        wrapper._checkpoint_wrapped_module = layer
        model.model.layers[number] = wrapper
    save_pretrained(model, folder)
    dist.barrier()
    names = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)[1]
    assert not any(names.values()), names

    qwen = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=3, vocab_size=211)
    qwen |= dict(num_attention_heads=2, num_key_value_heads=2)
    torch.manual_seed(0)
    stage = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**qwen))
    keep_stage(stage, (2, 3), RANK)  # whose configurations say of how many layers each is
    optimizer = torch.optim.SGD([{"params": [p]} for p in stage.parameters()], 0.1)
    save_training_state(stage, optimizer, folder / "stages", 1)
    assert load_training_state(stage, optimizer, folder / "stages") == (1, None)

    model, default = ordinary(), torch.get_default_dtype()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, IDS)
    optimizer.step()
    save_training_state(model, optimizer, folder / "state", 1)
    for milestones in {30: 1}, [{"a": {30: 1}}]:  # as MultiStepLR keeps them
        save = partial(save_training_state, model, optimizer, folder / "state", 2, milestones)
        refused(save, "JSON makes texts of the keys [30]")
    torch.set_default_dtype(torch.bfloat16)
    load_training_state(model, optimizer, folder / "state")
    torch.set_default_dtype(default)
    (kind,) = {state["step"].dtype for state in optimizer.state.values()}
    assert kind == torch.float32, kind
    (path,), key = folder.glob("state/step-*"), "parameter.model.norm.weight"
    assert read_region(path, key, [[0, [[0, 42]]]], [slice(42, 42)]).dtype == DTYPE

    group = dist.new_group(range(P))
    model = sequence_parallelize(ordinary(), DeviceMesh.from_group(group, "cpu"))
    step(model, IDS)
    dist.destroy_process_group(group)
    step(whole, IDS)
    torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    torch.optim.SGD(whole.parameters(), 0.1).step()


def wrong_use(folder):
    """What would be silently wrong on slices is an error."""
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("tp",))
    model = ordinary()
    tensor_parallelize(model, mesh)
    refused(model.state_dict, "full_state_dict")
    refused(partial(model.save_pretrained, folder), "utils.full_model.save_pretrained")
    step(model, IDS)
    if RANK == 1:
        model.model.norm.weight.grad[0] = math.nan
    assert math.isnan(grad_norm(model).item())
    clip = partial(torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0)
    refused(clip, "get_total_norm")
    for part in model.model, model.lm_head:
        refused(part.state_dict, "full_state_dict")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    refused(partial(scaler.step, optimizer), "GradScaler")
    refused(partial(scaler.step, torch.optim.AdamW(model.parameters(), fused=True)), "GradScaler")
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    nothing = folder / "nothing"
    if RANK == 0:
        nothing.write_text("a file, not a folder")
    dist.barrier()
    refused(partial(save_pretrained, model, nothing), f"{nothing}: not written")
    if RANK:  # not all of the model
        model.model.layers[0].mlp.down_proj = None
    refused(partial(full_state_dict, model), "these ranks do not have all of it")
    model, other = ordinary(), ordinary()
    del other.model.layers[1:]
    model, other = ((one, torch.optim.AdamW(one.parameters())) for one in (model, other))
    assert load_training_state(*other, folder / "none yet") is None
    save_training_state(*model, folder / "state", 0)
    refused(partial(load_training_state, *other, folder / "state"), "of another model")
    refused(partial(save_training_state, *model, nothing, 0), "nothing")
    save_training_state(*model, folder / "state", 5)
    refused(partial(save_training_state, *model, folder / "state", 3), "of a later step than 3")
    sgd = torch.optim.SGD(model[0].parameters(), 0.1, 0.9)
    refused(partial(load_training_state, model[0], sgd, folder / "state"), "of the optimizer AdamW")
    eps = model[0].config.rms_norm_eps
    model[0].config.rms_norm_eps = 2 * eps
    said = f"of another model: rms_norm_eps was {eps}, not {2 * eps}"
    refused(partial(load_training_state, *model, folder / "state"), said)
    model[0].config.rms_norm_eps = eps
    before = torch.optim.AdamW(ordinary().parameters())
    refused(partial(save_training_state, model[0], before, folder / "state", 6), "before the split")
    some = torch.optim.AdamW([*model[0].parameters()][1:])
    refused(partial(load_training_state, model[0], some, folder / "state"), "had other groups")
    more = torch.optim.AdamW(model[0].parameters(), lr=torch.tensor(0.5))
    save_training_state(model[0], more, folder / "of tensors", 6)
    more.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
    refused(partial(load_training_state, model[0], more, folder / "of tensors"), "had other groups")
    more = torch.optim.AdamW(model[0].parameters(), lr=torch.tensor(0.1), fused=True)
    assert load_training_state(model[0], more, folder / "of tensors")[0] == 6
    assert more.param_groups[0]["lr"].equal(torch.tensor(0.5)), "a learning rate in a tensor"
    assert load_training_state(*model, folder / "state")[0] == 5
    model[0].config.pad_token_id, halves = 7, (1, model[0].config.num_hidden_layers)
    stage = copy.deepcopy(model[0])
    keep_stage(stage, halves, RANK)
    save_pretrained(stage, folder / "stages")
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(folder / "stages", dtype=DTYPE)
    assert again.config.pad_token_id == 7, "a stage's folder"
    assert len(again.model.layers) == halves[1], "a stage's folder"
    for key, tensor in model[0].state_dict().items():
        assert again.state_dict()[key].equal(tensor), f"a stage's folder: {key}"
    refused(partial(save_pretrained, nn.Linear(2, 2), folder / "stages"), "not a model of transf")
    shares = ZeroRedundancyOptimizer(model[0].parameters(), torch.optim.AdamW)
    refused(partial(save_training_state, model[0], shares, folder / "state", 0), "its share alone")
    for split, said in (
        (tensor_parallelize, "drop the same for different heads"),
        (dtensor_parallelize, "drop the same for different heads"),
        (sequence_parallelize, "drop the same for different heads"),
        (ring_parallelize, "attention dropout: not in a ring"),
    ):
        model = ordinary()
        model.model.layers[-1].self_attn.attention_dropout = 0.1
        split(model, mesh)
        refused(partial(step, model, IDS), said)
        model.eval()
        model(IDS)


if __name__ == "__main__":
    _, _, MODEL, FOLDER, kind, what, *only = sys.argv
    FOLDER, DTYPE = Path(FOLDER), getattr(torch, kind)
    dist.init_process_group("gloo")
    RANK, P = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    IDS = torch.randint(2, 140, (12, 12))
    every = techniques(P)
    of_each = "full", "recompute", "compiled", "autocast", "resume", "in_tiles", "accumulated"
    if what not in of_each:
        every, only = {}, []  # no techniques, one by one
        globals()[what](FOLDER)
    for name in only or every:
        globals()[what](name, *every[name], IDS, FOLDER / "saved")
    dist.barrier()
    print("full model: ok", flush=True)
    dist.destroy_process_group()
