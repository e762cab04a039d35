"""Bonus: tensor x sequence parallelism, on a mesh of two axes.

Of P = sp x tp ranks, those of one row share the weights of a Llama, as in Task 2; those of one
column have the same part of them, and share the tokens. A rank computes (with Task 2's f and g)

    ids (B, S) -> its S/sp tokens -> embedding rows V/tp -> g
    layer:  norm -> f -> q, k, v of N/tp heads, (B, S/sp, (N + 2K)/tp, D)
            -> along sp, by --sequence:
               ulysses  all-to-all -> (B, S, (N + 2K)/(tp sp), D) -> attention -> all-to-all
               ring     its own queries; keys and values travel (`ring_attention.py`)
               usp      both: neighbours exchange heads, and each is in a ring with one of all
                        other neighbours (arXiv 2405.07719)
            -> o_proj -> g -> + -> norm -> f -> MLP, F/tp units -> g -> +
    -> norm -> f -> LM head, rows V/tp -> logits (B, S/sp, V/tp) -> loss from log-sum-exps

Gradients of a column are parts of a sum: one all-reduce along sp, of a tp-th of the weights.

`--megatron-sp` (arXiv 2205.05198): within a row, what Task 2 keeps whole between its blocks is
split by tokens, too. An all-reduce is a reduce-scatter and an all-gather; norms come in between:

                            Task 2                      --megatron-sp
    norms, residual stream  (B, S/sp, H)                (B, S/(sp tp), H)
    into a block            f: nothing; all-reduce      all-gather of tokens; reduce-scatter
    out of it               g: all-reduce; nothing      reduce-scatter of tokens; all-gather
    a norm's gradient       equal along tp              a sum over the tokens of all ranks

(forward; backward), and as many bytes; more where layers are recomputed. Sequences are then padded
to a multiple of the ranks.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 tasks/tp_ulysses.py --tp 2 --sp 2

checks what Task 4 checks against a single-rank run of the unmodified model: hidden states, logits,
loss, gradients of the input embeddings and of all weights (batch of 2, left padding), text, bytes.
"""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

import harness
import ring_attention
import ulysses_forward
from ring_attention import Ring, RingLlama, ring_parallelize
from tp_llama import tensor_parallelize
from ulysses_forward import numbers, sequence_parallelize, to_heads, to_tokens
from utils.collectives import (
    SHARED_MEMORY,
    all_gather,
    all_reduce,
    gather_shares,
    group_of_axis,
    subgroup,
)
from utils.errors import UserError
from utils.llama import held
from utils.partition import shard_heads, shard_range, sides_of
from utils.sequence import become, share_heads
from utils.shards import SharedLinear

# ---------------------------------------------------------------- the technique: Megatron's tokens


def whole_of(x, group):
    """All tokens, (B, S, H), of each rank's (B, S/P, H)."""
    return all_gather(x, group).transpose(0, 1).flatten(1, 2)


def sum_of(x, group):
    """This rank's tokens, (B, S/P, H), of the sum of all ranks' x, (B, S, H); a reduce-scatter.

    It is sent all parts of its tokens, and adds them up. (gloo's own sends twice as much.)
    """
    pieces = x.unflatten(1, (group.size(), -1)).movedim(1, 0).contiguous()
    parts = torch.empty_like(pieces)
    dist.all_to_all_single(parts, pieces, group=group)
    return parts.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


class GatherTokens(torch.autograd.Function):
    """In front of column-parallel layers, in place of f: they need all tokens.

            per rank        forward             backward
    x       (B, S/P, H)     all-gather(x)       reduce-scatter(dy)

    Every rank uses the whole for its own output units: its gradient is the sum over ranks.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return whole_of(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return sum_of(grad, ctx.group), None


class ScatterSums(torch.autograd.Function):
    """Behind row-parallel layers, in place of g: the conjugate of `GatherTokens`.

            per rank        forward             backward
    x       (B, S, H)       reduce-scatter(x)   all-gather(dy)
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return sum_of(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return whole_of(grad, ctx.group), None


class TakeTokens(torch.autograd.Function):
    """This rank's tokens of what all have.

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
        return whole_of(grad, ctx.group), None


BY_TOKENS = GatherTokens.apply, ScatterSums.apply  # for Task 2, in place of f and g


def split_between_blocks(model, group):
    """Besides the pair above: embeddings are split by tokens, and norms' gradients added up."""

    def take_inputs(llama, args, kwargs):
        ids, given = args[0] if args else kwargs.pop("input_ids", None), kwargs.get("inputs_embeds")
        if given is None:  # the words' sum and the tokens' scatter in one
            mine = ScatterSums.apply(llama.embed_tokens.part(ids), group)
        else:
            mine = TakeTokens.apply(given, group)
        return (None, *args[1:]), kwargs | {"inputs_embeds": mine}

    # A gradient's hook goes with its weight, which is another when the meta device is left: so the
    # first forward adds it.
    def add_up(norm, args):
        if norm.weight.requires_grad and not hasattr(norm.weight, "added_up"):
            norm.weight.added_up = norm.weight.register_hook(partial(all_reduce, group=group))

    model.model.register_forward_pre_hook(take_inputs, with_kwargs=True)
    for name, norm in model.named_modules():
        if name.endswith("norm"):
            norm.register_forward_pre_hook(add_up)


# ---------------------------------------------------------------- the technique: USP


def usp_attention(module, query, key, value, attention_mask, **kwargs):
    """Shapes as `ulysses_attention`'s, among the neighbours; attention_mask: `RingLlama.seen`."""
    S, ring = attention_mask.shape[-1], module.get_group()
    first, stop = shard_range(S, ring.size(), ring.rank())
    share = module.get_inner(), module.heads, stop - first
    query, key, value = to_heads(query, key, value, *share)
    output, _ = ring_attention.ring_attention(module, query, key, value, attention_mask, **kwargs)
    return to_tokens(output, *share), None


class USPLlama(RingLlama):
    """Takes and gives whole sequences; a ring's share of the tokens is `inner` ranks' together."""

    def order(self, length):
        return Ring(self.get_ring(), length, self.zigzag).order()

    def tokens(self, length):
        ring, inner = self.get_ring(), self.get_inner()
        mine = self.order(length)[slice(*shard_range(length, ring.size(), ring.rank()))]
        return mine[slice(*shard_range(len(mine), inner.size(), inner.rank()))]

    def whole(self, x, length):
        ring, inner = self.get_ring(), self.get_inner()
        first, stop = shard_range(length, ring.size(), ring.rank())
        x = gather_shares(gather_shares(x, 1, stop - first, inner), 1, length, ring)
        return x[:, self.order(length).argsort().to(x.device)]


def usp_parallelize(model, mesh, ulysses, zigzag=True):
    """Make a LlamaForCausalLM sequence-parallel by both, as `sequence_parallelize` does by one.

    ulysses: how many neighbours exchange heads; each is in a ring with every so many'th rank. Of 4
    ranks and 2 neighbours 0 and 1, 2 and 3 exchange heads; 0 and 2, 1 and 3 are rings, of which the
    ranks 0 and 1 hold the first one's tokens together.
    """
    group = group_of_axis(mesh)
    rank, ranks = group.rank(), group.size()
    first = rank // ulysses * ulysses
    inner = subgroup(group, "neighbours", first, first + ulysses)
    ring = subgroup(group, "ring", rank - first, ranks, ulysses)
    become(model, USPLlama, group, "usp", usp_attention)
    share_heads(model, inner)
    for module in [model, *(layer.self_attn for layer in model.model.layers)]:
        module.zigzag, module.get_inner = zigzag, held(inner)
    for layer in model.model.layers:
        layer.self_attn.get_group = held(ring)
    model.get_ring = held(ring)
    return model


def neighbours(ranks, keys, machine):
    """How many of a sequence's ranks exchange heads: a KV head each, and on one machine.

    (More would send KV heads twice, or all heads from machine to machine.) machine: ranks on one.
    """
    return max(u for u in range(1, ranks + 1) if ranks % u == 0 and u <= max(1, min(keys, machine)))


# ---------------------------------------------------------------- the technique: both axes


def fewest_heads(config, tp):
    """Query heads of the rank that has the fewest of them, of so many along tp."""
    N, K = config.num_attention_heads, config.num_key_value_heads
    shares = (shard_heads(N, K, tp, rank)[0] for rank in range(tp))
    return min(stop - first for first, stop in shares)


def combine(model, mesh, sequence="ulysses", megatron_sp=False, ulysses=1, zigzag=True):
    """Make a LlamaForCausalLM parallel in place on a mesh of the axes "sp" and "tp".

    sequence: "ulysses", "ring" or "usp", the last with so many neighbours that exchange heads;
    zigzag: of rings.
    It is used as Task 4's: call `sum_gradients(..., mesh["sp"])` after the backward. Raises, on all
    ranks, UserError for more ranks of an axis than it has heads to share out.
    """
    tp, sp, N = mesh["tp"], mesh["sp"], model.config.num_attention_heads
    exchange = {"ulysses": sp.size(), "ring": 1, "usp": ulysses}[sequence]
    if exchange > (heads := fewest_heads(model.config, tp.size())):
        raise UserError(
            f"{heads} query heads of a rank ({N} over tp {tp.size()}) for {exchange} "
            "ranks that exchange heads: fewer of these, or a ring"
        )
    if sp.size() % exchange:
        raise UserError(f"--ulysses {ulysses}: does not divide --sp {sp.size()}")
    tensor_parallelize(model, tp, pair=BY_TOKENS if megatron_sp else None)
    if sequence == "usp":
        usp_parallelize(model, sp, ulysses, zigzag)
    elif sequence == "ring":
        ring_parallelize(model, sp, zigzag)
    else:
        sequence_parallelize(model, sp)
    if megatron_sp:
        split_between_blocks(model, group_of_axis(tp))
        model.multiple = sp.size() * tp.size()
    return model


# ---------------------------------------------------------------- what is shown with it


def formula(model, B, S, mesh, sequence, megatron_sp):
    """Bytes that a rank sends in one layer, forward and backward; the mean over its column."""
    L, P, attention = len(model.model.layers), mesh["tp"].size(), model.model.layers[0].self_attn
    if sequence == "ulysses":
        sent = [ulysses_forward.formula(model, B, S)] * 2
    elif sequence == "ring":
        sent = ring_attention.formula(model, B, S)
    else:
        ring, inner = model.get_ring(), model.get_inner()
        shares = [shard_range(S, ring.size(), rank) for rank in range(ring.size())]
        exchange = partial(ulysses_forward.formula, model, B, group=inner)
        exchanged = sum(exchange(stop - start) for start, stop in shares) / ring.size()
        keys = sum(numbers(inner, attention.heads, S)[2]) / inner.size()
        sent = [exchanged + of for of in ring_attention.formula(model, B, S, ring, keys)]
    e, H = model.dtype.itemsize, model.config.hidden_size
    half = (P - 1) / P * B * S / mesh["sp"].size() * H * e  # of an all-reduce
    # Two blocks a layer, and the embedding; backward, what is summed of weights, too.
    forward, backward = (4 * L + 1, 4 * L + 1) if megatron_sp else (4 * L + 2, 4 * L)
    weights = megatron_sp * (2 + 1 / L) * 2 * (P - 1) / P * H * e
    if isinstance(attention.k_proj, SharedLinear):  # several ranks hold one KV head
        holders = attention.k_proj.get_holders().size()
        inputs = H + (attention.k_proj.bias is not None)
        weights += 4 * (holders - 1) / holders * attention.head_dim * inputs * e
    return sent[0] + forward / L * half, sent[1] + backward / L * half + weights


def main():
    parser = harness.add_model_flags(harness.make_parser(__doc__))
    add = parser.add_argument
    add("--sp", type=harness.positive, help="rows of the mesh; default the ranks / tp")
    add(
        "--tp",
        type=harness.positive,
        help="columns; default the ranks / sp, or 2 of an even number, if "
        "there are heads enough, else more",
    )
    add(
        "--sequence",
        choices=["ulysses", "ring", "usp"],
        default="ulysses",
        help="how attention sees all tokens; default ulysses",
    )
    add(
        "--ulysses",
        type=harness.positive,
        help="of usp: neighbours that exchange heads, which divide sp; "
        "default by KV heads and machines",
    )
    add("--megatron-sp", action="store_true", help="along tp, split norms by tokens; default no")
    harness.start(parser.parse_args(), show)


def default_tp(config, ranks, sequence):
    """How many ranks tp has if nobody says it: 2 of an even number, else 1.

    Where that leaves too few heads, to share out or for Ulysses to exchange, the next larger number
    that does not, or else a smaller one.
    """
    usual = 2 - ranks % 2
    divisors = [tp for tp in range(1, ranks + 1) if ranks % tp == 0]
    for tp in sorted(divisors, key=lambda tp: (tp < usual, tp)):
        exchange = ranks // tp if sequence == "ulysses" else 1
        if tp <= config.num_attention_heads and exchange <= fewest_heads(config, tp):
            return tp
    return usual


def show(run, args):
    """All checks of the model, its text, bytes, time and memory."""
    config = run.source.config
    tp = args.tp or (None if args.sp else default_tp(config, run.world_size, args.sequence))
    sp, tp = sides_of(run.world_size, "sp", "tp", args.sp, tp)
    nothing = "; --megatron-sp: nothing to split along tp" * (args.megatron_sp and tp == 1)
    run.print0(f"mesh: sp={sp} x tp={tp}{nothing}")
    mesh, u = run.rectangle("sp", "tp", tp), 1
    if args.sequence == "usp":
        keys = max(1, config.num_key_value_heads // tp)
        machine = int(os.environ.get("LOCAL_WORLD_SIZE", run.world_size)) // tp
        u = args.ulysses or neighbours(sp, keys, machine)
        run.print0(
            f"sequence: {u} neighbours exchange heads, in rings of {sp // u} (sp {sp}, "
            f"{keys} KV heads of a rank, {machine} of these on a machine)"
            f"{': plain Ulysses' * (u == sp)}"
        )
    elif args.ulysses:
        raise UserError(f"--ulysses: not with --sequence {args.sequence}")
    parallelize = partial(
        combine, mesh=mesh, sequence=args.sequence, megatron_sp=args.megatron_sp, ulysses=u
    )

    def bytes_of(model, B, S):
        mine = formula(model, B, S, mesh, args.sequence, args.megatron_sp)
        return tuple(sum(of) / run.world_size for of in zip(*run.gather_objects(mine), strict=True))

    def held(model, S):
        mine = torch.arange(S)[model.tokens(S)]
        return mine.view(tp, -1)[mesh["tp"].get_local_rank()] if args.megatron_sp else mine

    # Of more than two ranks, sums of few bytes by gloo, or in half precision, are other messages.
    exact = tp <= 2 or dist.get_backend(mesh["tp"].get_group()) == SHARED_MEMORY
    whole = "norm" if tp > 1 else ""
    harness.show_sequence(
        run,
        harness.Workload.of(args),
        mesh["sp"],
        parallelize,
        bytes_of,
        held,
        (whole,),
        exact,
    )


if __name__ == "__main__":
    main()
