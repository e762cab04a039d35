"""Collectives: f, g and shares made whole, each an autograd function with a table of its forward
and backward; what these are built of; point to point; subgroups; and the sum of gradients.

Shapes as in `utils/__init__.py`.
"""

import weakref
from contextlib import contextmanager
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from utils.shards import local_part, shard_range
from utils.shared_group import NAME

try:
    from torch.distributed import all_gather_single
except ImportError:  # its name before PyTorch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single

FEW_BYTES = 2**16  # by gloo: up to here a sum in one step is quicker than one in two


def group_of_axis(mesh):
    """The process group of a DeviceMesh of one axis. Raises ValueError for a mesh of several."""
    if mesh.ndim != 1:
        raise ValueError(f"a mesh of {mesh.ndim} axes, {mesh.mesh_dim_names}: give one of them, as "
                         "in mesh[name]")  # fmt: skip
    return mesh.get_group()


@cache  # each is a communicator, with memory of its own
def subgroup(group, kind, start, stop, step=1):
    """The process group of `group`'s ranks [start:stop:step], which each of these asks for at once.

    All ranks of `group` must ask for one, their own: where NCCL splits its communicator for it,
    that is a collective of all. kind: of the split, so that all make a group, or all have it:
    PyTorch names one by how many its rank has. It has `group`'s timeout, not the backend's own.
    """
    members = dist.get_process_group_ranks(group)[start:stop:step]
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    timeout = group._get_backend(torch.device(device)).options._timeout
    return dist.new_group(members, timeout=timeout, use_local_synchronization=True)


def all_reduce(tensor, group):
    """Sum over the ranks of `group`, out of place: autograd may still need the input.

    By gloo few bytes cost the number of their messages: its all-reduce scatters the sum and gathers
    it, one after the other; an all-gather and a sum on each rank are half of the steps.
    """
    few = tensor.device.type == "cpu" and tensor.nbytes <= FEW_BYTES
    if few and dist.get_backend(group) == "gloo":
        return all_gather(tensor, group).sum(0)
    total = tensor.clone(memory_format=torch.contiguous_format)
    all_reduce_(total, group)
    return total


def all_reduce_(tensor, group):
    """Sum over the ranks of `group`, in place. tensor: contiguous.

    A library's all-reduce adds half-precision parts one by one, and rounds each time. (Not so that
    of `shared_group.py`.) Here each rank is sent all parts of its slice, adds them in float32, and
    rounds once. A scatter and a gather are what an all-reduce is made of: it costs no byte more.
    """
    P = group.size()
    if P <= 2 or tensor.dtype.itemsize > 2 or dist.get_backend(group) == NAME:
        dist.all_reduce(tensor, group=group)
        return
    flat = tensor.view(-1)
    padded = F.pad(flat, (0, -len(flat) % P))
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded, group=group)
    mine = parts.view(P, -1).sum(0, dtype=torch.float32).to(tensor.dtype)
    flat.copy_(all_gather(mine, group).view(-1)[: len(flat)])


def all_gather(tensor, group):
    """Every rank's tensor, all of one shape: (P, *shape), the same on all ranks of `group`."""
    everyone = tensor.new_empty(group.size(), *tensor.shape)
    all_gather_single(everyone, tensor[None].contiguous(), group=group)
    return everyone


def send(tensor, target, group):
    """Begin to send to a rank of `group`: the work, and the tensor, which must last until its end.

    Through host memory by gloo, which sends nothing else from rank to rank.
    """
    if tensor.is_cuda and dist.get_backend(group) == "gloo":
        tensor = tensor.cpu()
    return dist.isend(tensor, group=group, group_dst=target), tensor


def receive(source, group, shapes, like):
    """Yield what a rank of `group` sends, tensors of these shapes. The next is always under way.

    like: a tensor of their dtype and device.
    """
    device = "cpu" if dist.get_backend(group) == "gloo" else like.device

    def post(shape):
        tensor = torch.empty(shape, dtype=like.dtype, device=device)
        return tensor, dist.irecv(tensor, group=group, group_src=source)

    coming = post(shapes[0])
    for shape in [*shapes[1:], None]:
        tensor, work = coming
        work.wait()
        coming = shape and post(shape)
        yield tensor.to(like.device)


def exchange(sends, receives, group):
    """Begin messages to and from ranks of `group`, all at once; the function that waits for them.

    sends, receives: [(contiguous tensor, rank)]; what lies between two ranks is in the same order
    on both. All must be left alone until then. Through host memory by gloo.
    """
    host = dist.get_backend(group) == "gloo"
    there = [torch.empty_like(x, device="cpu") if host and x.is_cuda else x for x, _ in receives]
    here = [x.cpu() if host else x for x, _ in sends]
    message = partial(dist.P2POp, group=group)
    ops = [message(dist.isend, x, group_peer=to) for x, (_, to) in zip(here, sends, strict=True)]
    ops += [
        message(dist.irecv, x, group_peer=of) for x, (_, of) in zip(there, receives, strict=True)
    ]
    works = dist.batch_isend_irecv(ops) if ops else []

    def wait():
        for work in works:
            work.wait()
        for x, (tensor, _) in zip(there, receives, strict=True):
            if x is not tensor:
                tensor.copy_(x)
        here.clear()  # until now somebody had to have them

    return wait


class CopyToRanks(torch.autograd.Function):
    """Megatron's f (arXiv 1909.08053, section 3), in front of column-parallel layers.

            per rank        forward         backward
    x       (..., H)        x               all-reduce(dy)

    Every rank uses the whole x for its own output units, so x's gradient is the sum over ranks.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group), None


class SumOverRanks(torch.autograd.Function):
    """Megatron's g, behind row-parallel layers: the conjugate of f.

            per rank        forward         backward
    x       (..., H)        all-reduce(x)   dy

    Every rank's partial sum enters the output once, so each gets the output's whole gradient.
    """

    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


copy_to_ranks = CopyToRanks.apply  # f(x, group)
sum_over_ranks = SumOverRanks.apply  # g(x, group)


class GatherShares(torch.autograd.Function):
    """Shares of one dim, made whole on every rank.

                per rank        forward         backward
    x           (..., V/P)      (..., V)        this rank's slice of dy

    Every rank computes the same from the whole, so each has the whole's gradient already.
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
    """The whole dim of `size`, on all ranks, from the shares that `shard_range` deals out."""
    return GatherShares.apply(x, dim, size, group)


class SharedLinear(nn.Linear):
    """A linear layer that several ranks hold whole, each using its output for other heads.

    It is f applied to the weights: their gradient is the sum over `get_holders()`, these ranks.
    """

    def forward(self, x):
        holders = self.get_holders()
        bias = None if self.bias is None else copy_to_ranks(self.bias, holders)
        return F.linear(x, copy_to_ranks(self.weight, holders), bias)


def sum_gradients(tensors, mesh, bucket_bytes=2**25):
    """The one sum over ranks of what is replicated and has each rank's part of its gradient.

    mesh: of the axis whose ranks had different tokens. All of them must have gradients for the same
    tensors. In place. Small ones travel together, up to `bucket_bytes`: few messages, and little
    copied. DTensors may be split over another axis; of this one, `check_mesh` raises ValueError.

    Call it once, after the last backward before the optimizer: with k microbatches, after the k-th.
    A later call would add up the earlier sum again, once for each rank. So from now on a ValueError
    is raised by a second call, and by a backward that adds to the sum, unless the gradients are
    None or 0 by then. (`new_gradients` sums after each backward, at the cost of a copy.)
    """
    group = group_of_axis(mesh)
    if group.size() == 1:
        return
    tensors = [tensor for tensor in tensors if tensor.grad is not None]
    check_mesh(tensors, group)
    ranks = tuple(dist.get_process_group_ranks(group))
    earlier = [summed_over(tensor.grad) for tensor in tensors]
    if any(ranks in others for others in earlier):
        raise ValueError("these gradients are sums over these ranks already")
    sum_in_place([tensor.grad for tensor in tensors], group, bucket_bytes)
    for tensor, others in zip(tensors, earlier, strict=True):
        # FSDP2 calls no hooks, so there any change of the gradient ends it.
        hooked = tensor.is_leaf and tensor.requires_grad and not isinstance(tensor, DTensor)
        tensor.grad.summed = None if hooked else tensor.grad._version, {ranks, *others}
        if tensor.is_leaf and tensor.requires_grad:
            refuse_additions(tensor)


def check_mesh(tensors, group):
    """ValueError for DTensors of which the ranks of `group` have different parts.

    On another axis than their mesh's, a sum of DTensors is the sum of the ranks' local parts.
    """
    ranks = set(dist.get_process_group_ranks(group))
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            shared = ranks.intersection(tensor.device_mesh.mesh.flatten().tolist())
            if len(shared) > 1:
                raise ValueError(f"DTensors whose mesh has several of these ranks, {shared}: their "
                                 "gradients are summed by DTensor or FSDP2 itself")  # fmt: skip


def summed_over(grad):
    """The ranks of each sum by `sum_gradients` that a gradient still is. Clipped, it still is one.

    The mark is (version, ranks): a version says that it holds for this one alone.
    """
    version, ranks = getattr(grad, "summed", (None, set()))
    if not ranks or version not in (None, grad._version) or not local_part(grad).any():
        return set()
    return ranks


def refuse_additions(tensor):
    """The next backward raises ValueError if it adds to the gradient that is there now."""
    # Weak references, for the tensor holds the hooks.
    owner, summed = weakref.ref(tensor), weakref.ref(tensor.grad)
    sum_is_there = False

    def before(_):  # also where autograd.grad takes the new gradient, and adds it to nothing
        nonlocal sum_is_there
        grad = owner().grad
        sum_is_there = grad is not None and grad is summed() and local_part(grad).any()

    def after_adding(_):
        for hook in hooks:
            hook.remove()
        if owner().grad is summed() and hasattr(owner().grad, "summed") and not sum_is_there:
            del owner().grad.summed  # it was 0, and is a new gradient
        if sum_is_there:
            raise ValueError("a backward has added to gradients that are sums over ranks: call "
                             "sum_gradients after the last backward, and zero_grad before the next "
                             "step")  # fmt: skip

    hooks = [tensor.register_hook(before), tensor.register_post_accumulate_grad_hook(after_adding)]


@contextmanager
def new_gradients(tensors):
    """Within, these tensors have no gradients but new ones; behind it, those from before are added.

    So a sum over ranks, within, is of what is new. From before there are those of earlier
    microbatches, summed already.
    """
    earlier = [(tensor, tensor.grad) for tensor in tensors]
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


def sum_in_place(grads, group, bucket_bytes=2**25):
    """Each tensor becomes its sum over the ranks of `group`; see `sum_gradients`."""
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
    """In place, in one message. Of a copy, unless it is one tensor."""
    alone = len(bucket) == 1 and bucket[0].is_contiguous()
    flat = bucket[0] if alone else torch.cat([g.flatten() for g in bucket])
    all_reduce_(flat, group)
    if not alone:
        for g, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            g.copy_(piece.view_as(g))


def sum_copies(first, second):
    """Two copies of a weight, which one process has, get the sum of their gradients, in place."""
    total = first.grad + second.grad.to(first.device)
    first.grad, second.grad = total, total.to(second.device, copy=True)
