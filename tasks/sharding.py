"""Who owns what, and the conjugate collectives between the shares: what the scripts build on.

Shapes as in utils.py: B batch, S sequence, H hidden, N query heads, K key/value heads, P ranks.
"""

from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from shared_group import NAME

try:
    from torch.distributed import all_gather_single
except ImportError:  # its name before PyTorch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single

# ---------------------------------------------------------------- who owns what


class UserError(ValueError):
    """Bad input. One `error: ...` line, no traceback of ours, and each rank exits with code 2."""


def share(items, parts, index):
    """[start, stop) of share `index` when `items` are dealt to `parts` as evenly as possible."""
    start = index * (items // parts) + min(index, items % parts)
    return start, start + items // parts + (index < items % parts)


def share_heads(num_heads, num_kv_heads, ranks, rank):
    """This rank's query heads, its KV heads, and the ranks that hold the same KV heads.

    Query heads g*G .. g*G+G-1 attend to KV head g, G = N/K (GQA, arXiv 2305.13245), so a rank's
    query heads must bring their KV heads along. Up to K ranks: whole KV groups are dealt out,
    unevenly if need be. More than K: each group goes to several ranks, which split its query heads
    and each hold a copy of its one KV head. Returns three (start, stop) pairs.
    Raises UserError for more ranks than query heads.
    """
    if ranks > num_heads:
        raise UserError(f"{num_heads} query heads: use 1 to {num_heads} ranks, not {ranks}")
    group_size = num_heads // num_kv_heads
    if ranks <= num_kv_heads:
        first, last = share(num_kv_heads, ranks, rank)
        return (first * group_size, last * group_size), (first, last), (rank, rank + 1)
    for group in range(num_kv_heads):
        holders = share(ranks, num_kv_heads, group)
        if holders[0] <= rank < holders[1]:
            start, stop = share(group_size, holders[1] - holders[0], rank - holders[0])
            start, stop = group * group_size + start, group * group_size + stop
            return (start, stop), (group, group + 1), holders
    raise AssertionError(rank)


@cache  # each is a communicator, with memory of its own
def subgroup(group, start, stop):
    """The process group of `group`'s ranks [start, stop), which each of these asks for at once.

    All ranks of `group` must ask for one, their own: where NCCL splits its communicator for it,
    that is a collective of all. It has `group`'s timeout, not the backend's own.
    """
    members = dist.get_process_group_ranks(group)[start:stop]
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    timeout = group._get_backend(torch.device(device)).options._timeout
    return dist.new_group(members, timeout=timeout, use_local_synchronization=True)


def keep_shard(layer, dim, start, stop):
    """Replace `layer`'s weight by its slice [start, stop) along `dim`, in place.

    layer: nn.Linear or nn.Embedding. With dim 0 (output units, vocabulary rows) a bias is sliced
    too; with dim 1 (input units) it is left whole. Each parameter remembers its slice as
    `parameter.shard = (dim, start, stop)`, from which the loader and the checks read it.
    """
    for name, full in list(layer.named_parameters(recurse=False)):
        if dim < full.dim():
            piece = full.detach().narrow(dim, start, stop - start).clone()
            shard = nn.Parameter(piece, requires_grad=full.requires_grad)
            shard.shard = (dim, start, stop)
            setattr(layer, name, shard)
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    else:
        layer.num_embeddings = len(layer.weight)


def shard_of(parameter):
    """(dim, start, stop) of a sharded parameter; the whole of dim 0 for any other."""
    if isinstance(parameter, DTensor) and parameter.placements[0].is_shard():
        dim, mesh = parameter.placements[0].dim, parameter.device_mesh
        size, chunk = parameter.shape[dim], -(-parameter.shape[dim] // mesh.size())
        start = min(mesh.get_local_rank() * chunk, size)  # equal chunks; the last may be short
        return dim, start, min(start + chunk, size)
    return getattr(parameter, "shard", (0, 0, parameter.shape[0]))


def local_part(tensor, like=None):
    """What this rank holds of a DTensor, laid out as `like` is; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    # A gradient need not lie where its parameter does: that of an embedding is whole on all ranks.
    return (tensor if like is None else tensor.redistribute(placements=like.placements)).to_local()


# ---------------------------------------------------------------- f and g

FEW_BYTES = 2**16  # by gloo: up to here a sum in one step is quicker than one in two


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


class CopyToRanks(torch.autograd.Function):
    """Megatron's f (arXiv 1909.08053, section 3), in front of column-parallel layers.

            per rank        forward         dgrad
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

            per rank        forward         dgrad
    x       (..., H)        all-reduce(x)   dy

    Every rank's partial sum enters the output once, so each gets the output's whole gradient.
    """

    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def copy_to_ranks(x, group):
    """f: identity; its backward sums the gradient over the ranks of `group`. Any shape."""
    return CopyToRanks.apply(x, group)


def sum_over_ranks(x, group):
    """g: the sum over the ranks of `group`; its backward is the identity. Any shape."""
    return SumOverRanks.apply(x, group)


class GatherShares(torch.autograd.Function):
    """Shares of one dim, made whole on every rank.

                per rank        forward         dgrad
    x           (..., V/P)      (..., V)        this rank's slice of dy

    Every rank computes the same from the whole, so each has the whole's gradient already.
    """

    @staticmethod
    def forward(ctx, x, dim, size, group):
        shares = [share(size, group.size(), rank) for rank in range(group.size())]
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
    """The whole dim of `size`, on all ranks, from the shares that `share` deals out."""
    return GatherShares.apply(x, dim, size, group)


def with_whole_logits(whole):
    """A forward hook for a LlamaForCausalLM: `whole(logits)`, where no loss was asked for."""

    def hook(model, args, kwargs, output):
        if kwargs.get("labels") is not None:
            return output
        if isinstance(output, tuple):  # return_dict=False: logits come first
            return whole(output[0]), *output[1:]
        output.logits = whole(output.logits)
        return output

    return hook


def refuse_as_whole(model):
    """A model of slices says no where it would be taken for a whole one: to save it, or split it.

    Raises ValueError for a model that is split already.
    """
    if "save_pretrained" in vars(model):
        raise ValueError("this model is tensor-parallel already")

    def save_pretrained(*_, **__):
        raise ValueError("save_pretrained: each rank has slices only; save the model before")

    model.save_pretrained = save_pretrained


def check_ids(ids, vocab_size):
    """IndexError for ids that no rank has, as from a whole embedding; else they would count as 0.

    On a GPU the device asserts it, as ever, and nobody waits for it.
    """
    F.embedding(ids, torch.zeros((), device=ids.device).expand(vocab_size, 1))


def next_tokens(labels, size, vocab_size, ignore_index=-100):
    """Labels (B, S), shifted: the target of each of `size` tokens; the last has none.

    Raises ValueError for labels that are not `size`, and IndexError as `check_ids` does.
    """
    if labels.shape != size:
        raise ValueError(f"labels are {list(labels.shape)}, of tokens that are {list(size)}")
    targets = F.pad(labels, (0, 1), value=ignore_index)[:, 1:]
    check_ids(targets.masked_fill(targets == ignore_index, 0), vocab_size)
    return targets


class SharedLinear(nn.Linear):
    """A linear layer that several ranks hold whole, each using its output for other heads.

    It is f applied to the weights: their gradient is the sum over the `holders`, a process group.
    """

    def forward(self, x):
        bias = None if self.bias is None else copy_to_ranks(self.bias, self.holders)
        return F.linear(x, copy_to_ranks(self.weight, self.holders), bias)
