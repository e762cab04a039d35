"""Sums of gradients over ranks, in few messages; if wanted, of new gradients alone."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from utils.collectives import all_reduce_


def check_mesh(tensors, group):
    """Raise ValueError for DTensors whose mesh has several ranks of `group`, replicated or not.

    If a mesh has only one of these ranks, its DTensors' local parts can be summed over `group`.
    """
    ranks = set(dist.get_process_group_ranks(group))
    for tensor in tensors:
        if len(shared := ranks_in_mesh(tensor, ranks)) > 1:
            said = f"DTensors whose mesh has several of these ranks, {shared}"
            raise ValueError(f"{said}: their gradients are summed by DTensor or FSDP2 itself")


def ranks_in_mesh(tensor, ranks):
    """Return which of these ranks a DTensor's mesh has; for another tensor none."""
    of_mesh = tensor.device_mesh.mesh.flatten().tolist() if isinstance(tensor, DTensor) else ()
    return ranks.intersection(of_mesh)


@contextmanager
def new_gradients(tensors):
    """Set tensors' gradients aside, as a context; on exit add them to the gradients made inside.

    So a sum over ranks, inside, is a sum of new gradients alone. Those set aside are gradients of
    earlier microbatches, which are summed already.
    """
    earlier = [(tensor, tensor.grad) for tensor in dict.fromkeys(tensors)]
    for tensor, _ in earlier:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, grad in earlier:
            if tensor.grad is None:
                tensor.grad = grad
            elif grad is not None:
                tensor.grad.add_(grad)
                if mark := getattr(tensor.grad, "summed", None):  # of `sum_gradients`
                    tensor.grad.summed = tensor.grad._version, *mark[1:]


def sum_in_place(grads, group, bucket_bytes=2**25):
    """Replace each tensor by its sum over the ranks of `group`; see `sum_gradients`."""
    buckets = []
    for grad in map(local_part, grads):
        last = buckets[-1] if buckets else []
        room = sum(g.nbytes for g in last) + grad.nbytes <= bucket_bytes
        if last and room and grad.dtype == last[0].dtype:
            last.append(grad)
        else:
            buckets.append([grad])
    for bucket in buckets:
        sum_together(bucket, group)


def sum_together(bucket, group):
    """Sum a bucket in place, in one all-reduce of its one contiguous tensor, or of a flat copy."""
    alone = len(bucket) == 1 and bucket[0].is_contiguous()
    flat = bucket[0] if alone else torch.cat([g.flatten() for g in bucket])
    all_reduce_(flat, group)
    if not alone:
        for g, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            g.copy_(piece.view_as(g))


def local_part(tensor, like=None):
    """Return what this rank holds of a DTensor, placed as `like` is; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    # A gradient need not be placed as its parameter is: an embedding's is full on all ranks.
    return (tensor if like is None else tensor.redistribute(placements=like.placements)).to_local()
