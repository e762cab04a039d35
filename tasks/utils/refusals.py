"""What is refused when a model is split, and from then on. This file is loaded then, not before.

Shapes as in `utils/__init__.py`.
"""

import hashlib
import inspect
import math
import sys
import weakref
from collections.abc import Iterator
from functools import cache, wraps

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers.loss.loss_utils import ForCausalLMLoss

from utils.collectives import all_gather
from utils.full_model import norm_of
from utils.gradients import local_part
from utils.llama import HEAD_NORMS
from utils.shards import SLICES, is_slice, shard_of

# What techniques know of a model: its parts, by their names.
OF_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
OF_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
OF_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
OF_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
# Optimizers whose step of an element depends on others of its tensor, or of all tensors.
OF_MATRICES = {"Muon", "Adafactor", "LBFGS", "Shampoo", "SOAP", "LAMB", "Lamb", "LARS", "AdaLOMO"}
SPLIT_MODELS = weakref.WeakSet()
SHARING_BATCHES = weakref.WeakSet()  # models of which several ranks work on one batch
FIRST_STEP_DONE = weakref.WeakSet()  # optimizers
BEFORE_SPLIT = weakref.WeakValueDictionary()  # {id: parameter} of models, when they were split


def check_ordinary(model):
    """Raise ValueError for subclasses, DTensors, and what is not built as a LlamaForCausalLM.

    Mistral, Qwen2, Qwen3 and SmolLM3 are built as one: a model is known by its parts. The error
    names a part that is unknown or missing.
    """
    name = type(model).__name__
    if not type(model).__module__.startswith("transformers.models."):
        raise ValueError(f"not an ordinary LlamaForCausalLM: {name}")
    check_parts(name, model, {"model", "lm_head"})
    check_parts(f"{name}'s model", model.model, OF_MODEL)
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"{name}: {heads} query heads do not divide by {kv_heads} KV heads")
    for layer in model.model.layers:
        check_parts(f"a layer of {name}", layer, OF_LAYER)
        check_parts(f"attention of {name}", layer.self_attn, OF_ATTENTION, HEAD_NORMS)
        check_parts(f"the MLP of {name}", layer.mlp, OF_MLP)
        for norm in HEAD_NORMS & dict(layer.self_attn.named_children()).keys():
            size, D = layer.self_attn.get_submodule(norm).weight.numel(), layer.self_attn.head_dim
            if size != D:
                raise ValueError(f"attention of {name}: {norm} is of {size}, not of a head's {D}")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("weights are DTensors, which are not split by tokens here")


def check_parts(name, module, parts, more=frozenset()):
    """Raise ValueError for a module that lacks some `parts`, or has any but these and `more`."""
    found = dict(module.named_children()).keys()
    unknown = sorted((found - parts - more) | dict(module.named_parameters(recurse=False)).keys())
    if unknown or parts - found:
        missing = sorted(parts - found)
        said = [f"has {', '.join(unknown)}"] * bool(unknown)
        said += [f"has no {', '.join(missing)}"] * bool(missing)
        raise ValueError(f"not built as a LlamaForCausalLM: {name} {' and '.join(said)}")


def check_slices(model):
    """Raise ValueError for PEFT's adapters, none of which is right here, and for lost slices."""
    if "peft" in sys.modules:  # else there is no adapter
        from utils.adapters import refuse_adapters

        refuse_adapters(model)
    refuse_lost_slices(model)


def refuse_lost_slices(model):
    """Raise ValueError if a slice was replaced by a parameter that does not know its region.

    FSDP2's `fully_shard` does so, and `load_state_dict(assign=True)`. A rank's slice would count as
    the full tensor from then on.
    """
    if not vars(model).get("of_slices"):  # kept: a walk through all modules at each token is slow
        named = model.named_modules()
        model.of_slices = [(place, part) for place, part in named if hasattr(part, "slices")]
    for place, module in model.of_slices:
        for name in module.slices:
            if not hasattr(getattr(module, name), "shard"):
                raise ValueError(
                    f"{place}.{name} was a slice, and has been replaced: by fully_shard "
                    "(parallelize_2d of pretrain_2d.py splits over two axes), or by to_empty "
                    "(loading.models.materialize fills a model that was split without memory)"
                )


def refuse_own_loss(model, expected=ForCausalLMLoss):
    """Raise ValueError if a model's `loss_function` is not `expected` but a user's own."""
    if model.loss_function != expected:
        raise ValueError(
            "a loss_function of your own would not be called, or get a part of the logits: compute "
            "the loss from the logits, which come out full without labels"
        )


def refuse_arguments(model, attention_mask, cache, labels, others):
    """Raise ValueError for what a forward of a `SequenceParallelLlama` does not take.

    others: its other keyword arguments, out of which known names are taken.
    """
    for name in "logits_to_keep", "num_logits_to_keep", "output_attentions", "shift_labels":
        if torch.is_tensor(value := others.pop(name, None)) or value:
            raise ValueError(f"{name}: not under sequence parallelism")
    if others.pop("ignore_index", None) not in (None, -100):
        raise ValueError("ignore_index: only -100 under sequence parallelism")
    if cache is not None or others.pop("past_key_values", None) is not None:
        # One thing: transformers calls it `cache` from 5.24 on.
        raise ValueError("cache, past_key_values: no KV cache under sequence parallelism")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError("attention_mask must be (B, S)")
    if labels is not None:
        refuse_own_loss(model, model.replaced_loss)


def refuse_dropout(model):
    """Raise ValueError in training with dropout of attention, see `guard_dropout`."""
    attention = getattr(model, "model", model).layers[0].self_attn.modules()  # PEFT may wrap it
    rate = next((m.attention_dropout for m in attention if hasattr(m, "attention_dropout")), 0)
    if model.training and rate:
        raise ValueError(
            f"attention_dropout {rate} in training: ranks would drop the same for different heads"
        )


def patch_with_check(owner, name, check):
    """From now on call check({name: argument}), which may raise, before `owner`'s function.

    Where a module has imported the function by name, it gets the checked one, too.
    """
    original = getattr(owner, name)
    if getattr(original, "check", None) is check:
        return
    signature = inspect.signature(original)

    @wraps(original)
    def checked(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        for key, value in given.arguments.items():
            if isinstance(value, Iterator):  # which the check would use up
                given.arguments[key] = list(value)
        check(given.arguments)
        return original(*given.args, **given.kwargs)

    checked.check = check
    setattr(owner, name, checked)
    for module in list(sys.modules.values()) if inspect.ismodule(owner) else ():
        of_module = getattr(module, "__dict__", {})  # an entry may be anything, such as None
        names = [key for key, value in list(of_module.items()) if value is original]
        for key in names:
            setattr(module, key, checked)


def guard_batches(model):
    """Let what is wrong where ranks share each batch raise ValueError; see `expect_same_batches`.

    DDP would average parts of one gradient, or the gradients of different slices. Under torchrun,
    Trainer and accelerate would wrap the model in DDP without being asked.
    """
    patch_with_check(DistributedDataParallel, "__init__", refuse_shared_batches)
    guard_optimizers()
    if not hasattr(model, "row_at_split"):  # not split over another axis before
        model.register_forward_pre_hook(check_first_forward, with_kwargs=True)
        model.row_at_split = first_row(model.model.layers[0].mlp.down_proj.weight)
    SHARING_BATCHES.add(model)


def check_first_forward(model, args, kwargs):
    """Raise ValueError in the first forward if ranks that share a batch have unlike ones.

    Compares token ids, labels and masks: a sampler for data parallelism gives each rank other rows.
    Raises, too, if the ranks made unlike models, with different seeds: compares a row of the
    weights before the split, unless weights were loaded since.
    """
    if torch.compiler.is_compiling() or vars(model).get("forward_is_checked"):
        return
    given = {**dict(enumerate(args)), **kwargs}
    tensors = {key: x for key, x in given.items() if type(x) is torch.Tensor and not x.is_meta}
    # (Masks of S x S are left out: they may be most of the memory.)
    tensors = {k: x for k, x in tensors.items() if x.dim() <= 2 and not x.is_floating_point()}
    if not tensors or is_capturing():
        return
    model.forward_is_checked = True
    SHARING_BATCHES.add(model)  # it may be a copy of the one that was split
    shapes = [(key, list(x.shape)) for key, x in tensors.items()]
    numbers = [hash_of([str(shapes), *tensors.values()]), hash_of_start(model)]
    groups = [get_group() for get_group in model.batch_groups]
    # All messages before any error, or ranks of the next group would wait for those that raised.
    everyone = [gather_numbers(numbers, group) for group in groups]
    for group, found in zip(groups, everyone, strict=True):
        ranks, (batches, weights) = dist.get_process_group_ranks(group), found.unbind(1)
        if len(batches.unique()) > 1:
            raise ValueError(
                f"ranks {ranks} have different batches, and split one model or its tokens: give "
                "them the same, and let a sampler deal out rows to replicas only"
            )
        if len(weights.unique()) > 1 and weights.isfinite().all():
            raise ValueError(
                f"ranks {ranks} had different weights when the model was split: make it with one "
                "seed on all ranks, or load it"
            )


def hash_of(parts):
    """Return a number, of 48 bits, that stands for texts and tensors, which may be on a GPU."""
    digest = hashlib.sha256()
    for part in parts:
        text = isinstance(part, str)
        digest.update(part.encode() if text else part.cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest()[:6], "big")  # a float64 has 53 bits


def first_row(weight):
    """Return a copy, on the CPU, of a full weight's first row; None for any other weight."""
    full = not (weight.is_meta or is_slice(weight) or isinstance(weight, DTensor))
    return weight[0].detach().cpu().clone() if full else None


def hash_of_start(model):
    """Return a number that stands for the weights before the split; NaN if others were loaded.

    What was loaded is seen in the row that was kept: this rank's part of it is another one.
    """
    weight, row = model.model.layers[0].mlp.down_proj.weight, model.row_at_split
    if row is None or weight.is_meta:
        return math.nan
    (rows, columns), local = shard_of(weight), local_part(weight.detach())
    if rows.start or not len(local) or not local[0].cpu().to(row.dtype).equal(row[columns]):
        return math.nan
    return hash_of([row.double()])


def check_first_sums(optimizer):
    """Raise ValueError, on all ranks, if gradients differ between ranks that split the tokens.

    Then their sum over these ranks was forgotten. In an optimizer's first step only, for it takes
    a message. What is compared is the gradients that several ranks step with, by their norms.
    (FSDP2 sums its gradients, which are DTensors, by itself.)
    """
    stepped = {id(p) for p in optimized_by(optimizer) if type(p.grad) is torch.Tensor}
    if not stepped:
        return
    FIRST_STEP_DONE.add(optimizer)
    for model in list(SHARING_BATCHES):
        named = dict(model.named_parameters()) if hasattr(model, "sequence_parts") else {}
        if stepped.isdisjoint(map(id, named.values())):
            continue
        norms = [norm_of(p).item() if id(p) in stepped else math.nan for p in named.values()]
        found = gather_numbers(norms, model.get_group())
        least = found.nan_to_num(math.inf, math.inf).amin(0)
        largest = found.nan_to_num(0.0, math.inf).amax(0)
        # (Sums by other means than `sum_gradients` may round differently on each rank.)
        differ = largest.isfinite() & (largest - least > 1e-2 * largest)
        if differ.any():
            name = list(named)[differ.nonzero()[0].item()]
            raise ValueError(
                f"gradients of {name} differ between ranks, each of which has those of its own "
                "tokens: call sum_gradients(model.parameters(), mesh) before the step"
            )


def gather_numbers(numbers, group):
    """Gather every rank's list of n numbers: (P, n), float64, on the CPU."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    return all_gather(torch.tensor(numbers, dtype=torch.float64, device=device), group).cpu()


def is_capturing():
    """Tell whether a CUDA graph is being captured, in which no value can be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def refuse_shared_batches(given):
    """Raise ValueError for DDP over ranks that share each batch. given: DDP's arguments."""
    mesh = given.get("device_mesh")
    group = mesh.get_group() if mesh else given.get("process_group")
    ranks = {*dist.get_process_group_ranks(group)}
    for part in given["module"].modules():
        for get_group in getattr(part, "batch_groups", ()):
            both = sorted(ranks & {*dist.get_process_group_ranks(get_group())})
            if len(both) > 1:
                raise ValueError(
                    f"DDP over ranks {both}, which share each batch and the model's work: give "
                    "it the process group of the axis of replicas, if there is one"
                )


def guard_training(model):
    """Let PyTorch, from now on, refuse what would train slices wrongly. model: not split yet."""
    patch_with_check(nn.utils, "get_total_norm", check_total_norm)  # clip_grad_norm_ calls it
    patch_with_check(torch.amp.GradScaler, "unscale_", check_grad_scaler)
    SPLIT_MODELS.add(model)
    BEFORE_SPLIT.update({id(parameter): parameter for parameter in model.parameters()})
    guard_optimizers()


@cache
def guard_optimizers():
    """Let each optimizer call `check_optimizer` before its steps; registered once."""
    register_optimizer_step_pre_hook(check_optimizer)


def optimized_by(optimizer):
    """Return the parameters of all of an optimizer's groups."""
    return [parameter for settings in optimizer.param_groups for parameter in settings["params"]]


def check_optimizer(optimizer, *_):
    """Raise ValueError for an optimizer that would not train slices as the full model's."""
    if torch.compiler.is_compiling():
        return
    parameters = optimized_by(optimizer)
    if optimizer not in FIRST_STEP_DONE and not is_capturing():
        check_first_sums(optimizer)
    of_matrices = OF_MATRICES & {base.__name__ for base in type(optimizer).__mro__}
    if of_matrices and any(map(is_slice, parameters)):
        raise ValueError(
            f"{of_matrices.pop()}: its step needs full tensors, and each rank has slices only; use "
            "AdamW or SGD, or split by tokens (Task 4, ring)"
        )
    without = [p for p in parameters if p.grad is None and BEFORE_SPLIT.get(id(p)) is p]
    if without:
        present = {id(p) for model in SPLIT_MODELS for p in model.parameters()}
        if any(id(p) not in present for p in without):
            raise ValueError(
                "the optimizer has parameters from before the split, which nothing trains any "
                "more: make it after the split"
            )


def check_total_norm(given):
    """Raise ValueError for gradients of slices. given: the arguments of `get_total_norm`.

    Each rank would clip by the norm of its own slices, and the ranks would drift apart.
    """
    tensors = given["tensors"]
    known = {id(tensor) for tensor in ([tensors] if torch.is_tensor(tensors) else tensors)}
    if any(id(p.grad) in known for p in SLICES.values() if p.grad is not None and is_slice(p)):
        raise ValueError(
            "get_total_norm, clip_grad_norm_: each rank has slices only; utils.full_model has "
            "grad_norm(model) and clip_grad_norm_(model, max_norm), of the full model's norm"
        )


def check_grad_scaler(given):
    """Raise ValueError for slices. given: the arguments of PyTorch's `GradScaler.unscale_`.

    A rank whose own slices overflow would leave out the step, and the ranks would drift apart.
    """
    if given["self"].is_enabled() and any(map(is_slice, optimized_by(given["optimizer"]))):
        raise ValueError(
            "GradScaler: each rank has slices only, and would decide by them whether to skip a "
            "step; bfloat16 needs no scaler"
        )
