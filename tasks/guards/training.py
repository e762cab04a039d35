"""What is put in front of PyTorch's own functions once a model is split, to refuse wrong training.

This file is loaded when a model is split, not before.
"""

import inspect
import re
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
from transformers import GenerationMixin

from guards.agreement import (
    STEPS,
    check_sampling,
    is_due,
    note_clipping,
    note_step,
    ranks_that_split,
    share_batches,
)
from utils.shards import SLICES, is_slice

# Parts of the names of optimizers whose step of an element depends on other elements.
OF_MATRICES = re.compile(
    "Muon|Adafactor|LBFGS|Shampoo|SOAP|LAMB|Lamb|LARS|AdaLOMO|AdaLomo|APOLLO|CAME|DAdapt|GaLore|"
    "Prodigy|StableAdamW"
)
SPLIT_MODELS = weakref.WeakSet()
BEFORE_SPLIT = weakref.WeakValueDictionary()  # {id: parameter} of models, when they were split


def patch_with_check(owner, name, check, walked=None):
    """From now on call check({name: argument}), which may raise, before `owner`'s function.

    Where a module has imported the function by name, it gets the checked one, too. walked: the name
    of an argument that the check walks through, and so would use up if it is an iterator.
    """
    original = getattr(owner, name)
    if getattr(original, "check", None) is check:
        return
    signature = inspect.signature(original)

    @wraps(original)
    def checked(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        if isinstance(given.arguments.get(walked), Iterator):
            given.arguments[walked] = list(given.arguments[walked])
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
    """Refuse what is wrong where ranks share each batch; see `expect_same_batches`."""
    patch_with_check(DistributedDataParallel, "__init__", refuse_shared_batches)
    # clip_grad_norm_ calls the first of these.
    patch_with_check(nn.utils, "clip_grads_with_norm_", note_clipping, "parameters")
    patch_with_check(nn.utils, "clip_grad_value_", note_clipping, "parameters")
    patch_with_check(GenerationMixin, "generate", check_sampling)
    guard_optimizers()
    share_batches(model)


def refuse_shared_batches(given):
    """Raise ValueError for DDP over ranks that share each batch. given: DDP's arguments.

    It would average parts of one gradient, or the gradients of different slices. Under torchrun,
    Trainer and accelerate would wrap the model in DDP without being asked.
    """
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
    # clip_grad_norm_ calls it.
    patch_with_check(nn.utils, "get_total_norm", check_total_norm, "tensors")
    patch_with_check(torch.amp.GradScaler, "unscale_", check_grad_scaler)
    patch_with_check(torch.amp.GradScaler, "step", check_grad_scaler)  # fused steps unscale, too
    SPLIT_MODELS.update([model, model.model])  # a user may keep this part alone
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
    """Raise ValueError for an optimizer that would train slices otherwise than full weights."""
    if torch.compiler.is_compiling():
        return
    parameters = optimized_by(optimizer)
    note_step(optimizer, parameters)
    kinds = [base.__name__ for base in type(optimizer).__mro__]
    if "ZeroRedundancyOptimizer" in kinds:
        refuse_shares(optimizer, parameters)
    if any(map(OF_MATRICES.search, kinds)) and any(map(is_slice, parameters)):
        raise ValueError(
            f"{kinds[0]}: its step needs full tensors, and each rank has slices only; use AdamW or "
            "SGD, or split by tokens (Task 4, ring)"
        )
    if not is_due(STEPS[optimizer]):
        return
    of_split = [p for p in parameters if BEFORE_SPLIT.get(id(p)) is p]
    present = {id(p) for model in SPLIT_MODELS for p in model.parameters()} if of_split else ()
    if any(id(p) not in present for p in of_split):
        raise ValueError(
            "the optimizer has parameters from before the split, which nothing trains any more: "
            "make it after the split"
        )


def refuse_shares(optimizer, parameters):
    """Raise ValueError for ZeRO-1 over ranks that have different slices of the weights.

    A rank would step for the others, with its own slices, and send them these.
    """
    if both := ranks_that_split(parameters, optimizer.process_group):
        raise ValueError(
            f"ZeroRedundancyOptimizer over ranks {both}, which have different slices of the "
            "weights: give it the process group of the axis of replicas, if there is one"
        )


def check_total_norm(given):
    """Raise ValueError for gradients of slices. given: the arguments of `get_total_norm`.

    Each rank would clip by the norm of its own slices, and the ranks would drift apart. PyTorch
    takes no mixture of DTensors (Task 3) and plain tensors.
    """
    tensors = given["tensors"]
    tensors = [tensors] if torch.is_tensor(tensors) else tensors
    known = {id(tensor) for tensor in tensors}
    of_slices = (p for p in SLICES.values() if p.grad is not None and is_slice(p))
    mixed = len({isinstance(tensor, DTensor) for tensor in tensors}) > 1
    if mixed or any(id(p.grad) in known for p in of_slices):
        raise ValueError(
            "get_total_norm, clip_grad_norm_: each rank has slices only; utils.full_model has "
            "grad_norm(model) and clip_grad_norm_(model, max_norm), of the full model's norm"
        )


def check_grad_scaler(given):
    """Raise ValueError for slices. given: the arguments of PyTorch's `GradScaler.unscale_` or step.

    A rank whose own slices overflow would leave out the step, and the ranks would drift apart.
    """
    if given["self"].is_enabled() and any(map(is_slice, optimized_by(given["optimizer"]))):
        raise ValueError(
            "GradScaler: each rank has slices only, and would decide by them whether to skip a "
            "step; bfloat16 needs no scaler"
        )
