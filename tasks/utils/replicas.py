"""Gradients of replicated parameters, summed over ranks that used them for different tokens.

Shapes as in `utils/__init__.py`.
"""

import weakref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from utils.collectives import group_of_axis
from utils.gradients import check_mesh, local_part, sum_in_place

SAMPLES = 4  # of how many gradients a sample is kept, to recognize them after clipping


def sum_gradients(tensors, mesh, bucket_bytes=2**25):
    """All-reduce the gradients of replicated parameters over the ranks that split the tokens.

    In place. mesh: of the axis whose ranks had different tokens. All these ranks must have
    gradients for the same tensors. Small gradients travel together, up to `bucket_bytes`: few
    messages, and little copied. DTensors may be split over another axis; `check_mesh` raises
    ValueError for DTensors whose mesh has several of these ranks.

    Call it once, after the last backward before the optimizer: with k microbatches, after the k-th.
    A second call would add up the first sum again, once for each rank. So a second call raises
    ValueError, and so does a backward that adds to the sum, unless the gradients are None or 0 by
    then. (Called within `new_gradients`, it can sum after each backward, at the cost of a copy.)
    """
    from guards.agreement import check_sum

    group = group_of_axis(mesh)
    if group.size() == 1:
        return
    # (A tied weight may be given twice.)
    tensors = [tensor for tensor in dict.fromkeys(tensors) if tensor.grad is not None]
    check_mesh(tensors, group)
    check_sum(tensors, group)
    ranks = tuple(dist.get_process_group_ranks(group))
    earlier = [summed_over(tensor.grad) for tensor in tensors]
    if any(ranks in others for others in earlier):
        raise ValueError("these gradients are sums over these ranks already")
    sum_in_place([tensor.grad for tensor in tensors], group, bucket_bytes)
    for number, (tensor, others) in enumerate(zip(tensors, earlier, strict=True)):
        # FSDP2 does not run the hooks that see additions, so any change ends a DTensor's mark.
        sampled = number < SAMPLES and tensor.requires_grad and not isinstance(tensor, DTensor)
        sample = sample_of(tensor.grad) if sampled else None
        tensor.grad.summed = tensor.grad._version, sample, {ranks, *others}
        if tensor.is_leaf and tensor.requires_grad:
            refuse_additions(tensor)


def summed_over(grad):
    """Return the sets of ranks over which a gradient is still the sum that `sum_gradients` made.

    The gradient's mark, (version, sample, these sets), holds while the gradient is unchanged. With
    a sample, it also holds after changes in place that keep the sample's direction, such as
    clipping.
    """
    version, sample, ranks = getattr(grad, "summed", (None, None, set()))
    if not ranks or not local_part(grad).any():
        return set()
    same = grad._version == version
    if not same and sample is not None:
        same = same_direction(sample, sample_of(grad))
    return ranks if same else set()


def sample_of(grad):
    """Return some of a gradient's numbers, copied, in float64."""
    flat = grad.detach().reshape(-1)
    return flat[:: max(1, len(flat) // 256)].to(torch.float64, copy=True)


def same_direction(one, other):
    """Tell whether two vectors, not 0, have one direction."""
    return bool(one @ other > (1 - 1e-3) * one.norm() * other.norm() > 0)


def refuse_additions(tensor):
    """Let the next backward raise ValueError if it adds to the gradient that is there now."""
    # Weak references, because the tensor holds the hooks.
    owner, summed = weakref.ref(tensor), weakref.ref(tensor.grad)
    sum_is_there = False

    def before(_):  # also runs under autograd.grad, which adds nothing to .grad
        nonlocal sum_is_there
        grad = owner().grad
        sum_is_there = grad is not None and grad is summed() and local_part(grad).any()

    def after_adding(_):
        for hook in hooks:
            hook.remove()
        if owner().grad is summed() and hasattr(owner().grad, "summed") and not sum_is_there:
            del owner().grad.summed  # zeroed before: now a new gradient
        if sum_is_there:
            raise ValueError(
                "a backward has added to gradients that are sums over ranks: call sum_gradients "
                "after the last backward, and zero_grad before the next step"
            )

    hooks = [tensor.register_hook(before), tensor.register_post_accumulate_grad_hook(after_adding)]
