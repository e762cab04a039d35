"""Collectives: f, g and gathered shares, each an autograd function with a table of its forward
and backward; what these are built of; and subgroups.

(The backward of `torch.distributed.nn`'s all-reduce sums the gradient over the ranks, as if each
rank had a loss of its own. Here all ranks compute one loss, which would be counted P times.)

Shapes as in `utils/__init__.py`.
"""

from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from utils.partition import shard_range

try:
    from torch.distributed import all_gather_single
except ImportError:  # its name before PyTorch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single

SHARED_MEMORY = "shared_memory"  # the name of the backend in the package of this name
# Whether half-precision sums over more than two ranks are added in float32, rounded once: see
# `all_reduce_`. If False, on all ranks, the library adds (but few bytes, see `all_reduce`).
PRECISE = True
FEW_BYTES = 2**16  # by gloo: up to here a sum in one step is quicker than a sum in two steps


class CopyToRegion(torch.autograd.Function):
    """Megatron's f (arXiv 1909.08053, section 3), in front of column-parallel layers.

            per rank        forward         backward
    x       (..., H)        x               all-reduce(dy)

    Every rank uses the full x for its own output units, so x's gradient is the sum over ranks.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group), None


class ReduceFromRegion(torch.autograd.Function):
    """Megatron's g, after row-parallel layers: the conjugate of f.

            per rank        forward         backward
    x       (..., H)        all-reduce(x)   dy

    Every rank's partial sum enters the output once, so each partial sum gets the full gradient.
    """

    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


copy_to_region = CopyToRegion.apply  # f(x, group)
reduce_from_region = ReduceFromRegion.apply  # g(x, group)


class GatherShares(torch.autograd.Function):
    """All-gather shares of one dim: the full dim on every rank.

                per rank        forward         backward
    x           (..., V/P)      (..., V)        this rank's slice of dy

    Every rank computes the same from the full tensor, so each rank has the full gradient already.
    """

    @staticmethod
    def forward(ctx, x, dim, size, group):
        shares = [shard_range(size, group.size(), rank) for rank in range(group.size())]
        ctx.dim, (ctx.start, stop) = dim, shares[group.rank()]
        ctx.length = stop - ctx.start
        widest = -(-size // group.size())  # all ranks must send alike: pad the smaller shares
        padded = F.pad(x.movedim(dim, -1), (0, widest - ctx.length)).movedim(-1, 0)
        pieces = zip(all_gather(padded, group), shares, strict=True)
        return torch.cat([p[: stop - start] for p, (start, stop) in pieces]).movedim(0, dim)

    @staticmethod
    def backward(ctx, grad):
        return grad.narrow(ctx.dim, ctx.start, ctx.length), None, None, None


def gather_shares(x, dim, size, group):
    """All-gather a dim of `size`, on all ranks, from the shares that `shard_range` deals out."""
    return GatherShares.apply(x, dim, size, group)


# ---------------------------------------------------------------- what these are built of


def group_of_axis(mesh):
    """Return the process group of a DeviceMesh of one axis; raise ValueError for several axes."""
    if mesh.ndim != 1:
        raise ValueError(
            f"a mesh of {mesh.ndim} axes, {mesh.mesh_dim_names}: give mesh[one of them]"
        )
    return mesh.get_group()


@cache  # each group is a communicator, with memory of its own
def subgroup(group, name, start, stop, step=1):
    """Return the process group of `group`'s ranks [start:stop:step], with `group`'s timeout.

    All ranks of `group` call it together, each for its own subgroup, because NCCL may split the
    communicator. name: a different one for each way to split `group`; part of the cache's key.
    Without it a rank may find its group in the cache while others create theirs. PyTorch numbers
    new groups by each rank's own count, so later groups would have unlike names on the ranks.
    """
    members = dist.get_process_group_ranks(group)[start:stop:step]
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    timeout = group._get_backend(torch.device(device)).options._timeout
    return dist.new_group(members, timeout=timeout, use_local_synchronization=True)


def all_reduce(tensor, group):
    """Sum over the ranks of `group`, out of place: autograd may still need the input.

    With gloo, the number of steps decides the time for few bytes. Its all-reduce scatters the sum,
    then gathers it; an all-gather, after which each rank adds up for itself, takes half the steps.
    """
    by_gloo = tensor.device.type == "cpu" and dist.get_backend(group) == "gloo"
    # (Within torch.compile, where a size may be a symbol, `nbytes` is an error.)
    if by_gloo and tensor.numel() * tensor.element_size() <= FEW_BYTES:
        return all_gather(tensor, group).sum(0)
    total = tensor.clone(memory_format=torch.contiguous_format)
    all_reduce_(total, group)
    return total


def all_reduce_(tensor, group):
    """Sum over the ranks of `group`, in place. tensor: contiguous.

    The all-reduces of gloo and NCCL add half-precision parts one by one, and round each time. (The
    all-reduce of `shared_memory/group.py` does not.) Here, unless `PRECISE` is False, each rank is
    sent all parts of its slice, adds them in float32, and rounds once. As in an all-reduce, there
    are a scatter and a gather: no more bytes are sent, but for padding. figures/speed.md has times.
    """
    P = group.size()
    exact = tensor.dtype.itemsize > 2 or dist.get_backend(group) == SHARED_MEMORY
    if exact or P <= 2 or not PRECISE:
        dist.all_reduce(tensor, group=group)
        return
    flat = tensor.view(-1)
    padded = F.pad(flat, (0, -len(flat) % P))
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded, group=group)
    local = parts.view(P, -1).sum(0, dtype=torch.float32).to(tensor.dtype)
    flat.copy_(all_gather(local, group).view(-1)[: len(flat)])


def all_gather(tensor, group):
    """Gather every rank's tensor, all of one shape: (P, *shape), the same on `group`'s ranks."""
    everyone = tensor.new_empty(group.size(), *tensor.shape)
    all_gather_single(everyone, tensor[None].contiguous(), group=group)
    return everyone
