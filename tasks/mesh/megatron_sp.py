"""Megatron's sequence parallelism (arXiv 2205.05198): between TP's blocks, tokens are split.

What Task 2 keeps full on each rank between its blocks is split by tokens, along the same axis. An
all-reduce is a reduce-scatter and an all-gather; norms come in between. Below: forward; backward.

                            Task 2                      here
    norms, residual stream  (B, S, H)                   (B, S/tp, H)
    into a block            f: nothing; all-reduce      all-gather of tokens; reduce-scatter
    out of a block          g: all-reduce; nothing      reduce-scatter of tokens; all-gather
    a norm's gradient       equal along tp              a sum over the tokens of all ranks

Both send the same number of bytes of activations. The one here also sums norms' small gradients,
and sends more where layers are recomputed. Shapes as in `utils/__init__.py`. P divides S.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from utils.collectives import all_gather, all_reduce
from utils.shards import HeadNorm


def all_gather_tokens(x, group):
    """Gather all tokens, (B, S, H), from each rank's (B, S/P, H)."""
    return all_gather(x, group).transpose(0, 1).flatten(1, 2)


def reduce_scatter_tokens(x, group):
    """Reduce-scatter x, (B, S, H): return the ranks' sum for this rank's tokens, (B, S/P, H).

    A rank receives each rank's summand for its own tokens, and adds these up. (gloo's own function
    sends twice as much.)
    """
    pieces = x.unflatten(1, (group.size(), -1)).movedim(1, 0).contiguous()
    parts = torch.empty_like(pieces)
    dist.all_to_all_single(parts, pieces, group=group)
    return parts.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


class GatherTokens(torch.autograd.Function):
    """In front of column-parallel layers, in place of f: they need all tokens.

            per rank        forward             backward
    x       (B, S/P, H)     all-gather(x)       reduce-scatter(dy)

    Every rank uses the full x for its own output units, so x's gradient is the sum over ranks.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather_tokens(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return reduce_scatter_tokens(grad, ctx.group), None


class ReduceScatterTokens(torch.autograd.Function):
    """Behind row-parallel layers, in place of g: the conjugate of `GatherTokens`.

            per rank        forward             backward
    x       (B, S, H)       reduce-scatter(x)   all-gather(dy)
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter_tokens(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_gather_tokens(grad, ctx.group), None


class TakeTokens(torch.autograd.Function):
    """Slice a replicated tensor along the sequence: this rank keeps its own tokens.

            per rank        forward             backward
    x       (B, S, H)       a slice             all-gather(dy)
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.unflatten(1, (group.size(), -1))[:, group.rank()].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_gather_tokens(grad, ctx.group), None


TOKEN_OPS = GatherTokens.apply, ReduceScatterTokens.apply  # for Task 2, in place of f and g


def split_between_blocks(model, group):
    """Split embeddings by tokens, and add up norms' gradients. (Blocks' f and g: `TOKEN_OPS`.)"""

    def take_inputs(llama, args, kwargs):
        ids, given = args[0] if args else kwargs.pop("input_ids", None), kwargs.get("inputs_embeds")
        if given is None:  # one collective sums rows over ranks, and splits tokens
            local = ReduceScatterTokens.apply(llama.embed_tokens.part(ids), group)
        else:
            local = TakeTokens.apply(given, group)
        return (None, *args[1:]), kwargs | {"inputs_embeds": local}

    # A gradient's hook belongs to a tensor, and leaving the meta device makes a new tensor: so the
    # first forward adds the hook.
    def add_up(norm, args):
        if norm.weight.requires_grad and not hasattr(norm.weight, "added_up"):
            norm.weight.added_up = norm.weight.register_hook(partial(all_reduce, group=group))

    model.model.register_forward_pre_hook(take_inputs, with_kwargs=True)
    for name, norm in model.named_modules():
        if name.endswith("norm") and not isinstance(norm, HeadNorm):
            norm.register_forward_pre_hook(add_up)
