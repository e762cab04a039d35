"""Bonus: ring attention. Each rank keeps its tokens; keys and values travel from rank to rank.

As in Task 4 every rank has all weights and a share of the tokens. Task 4 exchanges heads for
tokens; here a rank's queries attend to the keys of one rank after another, while the next
keys are on their way (arXiv 2310.01889). Attention is causal, so later keys are skipped:

    hop     rank 0              rank 1              rank 2
    0       q0 to k0, v0        q1 to k1, v1        q2 to k2, v2
    1       k2, v2 are later    q1 to k0, v0        q2 to k1, v1
    2       k1, v1 are later    k2, v2 are later    q2 to k0, v0

Each entry above, a block, gives outputs and, for each query, the log of the sum of its scores'
exponentials. With these log-sum-exps two blocks merge into what both sets of keys would give at
once. In the backward keys and values travel again, and behind them travel their gradients, to which
each rank adds, until they are home. A block's gradients are exact: with lse the log-sum-exp over
*all* keys, and o the output over all keys, its probabilities are p = exp(s - lse), and its scores'
gradient is ds = p * (dp - rowsum(do * o)), with dp = do v.T.

This file has the ring twice. First comes its simplest form, for contiguous shares of one sequence
without padding. Then comes what `ring_parallelize` gives a full model: equal work for all ranks
(zigzag), padding and packed documents, and no messages that nobody needs.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 3 tasks/ring_attention.py

checks what Task 4 checks against a single-rank run of the unmodified model: hidden states, logits,
loss, gradients of the input embeddings and of all weights (batch of 2, left padding), text, bytes.
Last, it checks the simplest form against one attention of the unmodified model.
"""

from functools import lru_cache, partial
from itertools import accumulate

import torch
from torch.autograd.function import once_differentiable

import harness
import loading
from utils.collectives import group_of_axis
from utils.kernels import attend, attend_backward, bias_of
from utils.partition import shard_range
from utils.point_to_point import exchange
from utils.sequence import (
    MaskInfo,
    SequenceParallelLlama,
    as_attention_takes,
    check_window,
    convert_attention,
    heads_of,
    seq_len,
)

# ---------------------------------------------------------------- the technique, simplest form


def merge(one, other):
    """Merge partial attention over disjoint keys by log-sum-exp.

    one, other: outputs (B, N, S, D), and for each query the log of the sum of its scores'
    exponentials, (B, N, S).
    """
    (o, lse), (other_o, other_lse) = one, other
    share = (other_lse - lse).sigmoid()  # the other's part of the sum of exponentials
    return o.lerp(other_o, share[..., None]), lse.logaddexp(other_lse)


def start_hop(x, tokens, group):
    """Begin to send x, (..., S/P, D), to the next rank, and to receive from the one before.

    tokens: how many come, because shares may differ by one. Returns the tensor that is being
    received, and a function that waits until it is there.
    """
    rank, P = group.rank(), group.size()
    if P == 1:
        return x, lambda: None
    coming = x.new_empty(*x.shape[:-2], tokens, x.shape[-1])
    wait = exchange([(x, (rank + 1) % P)], [(coming, (rank - 1) % P)], group)
    return coming, wait


def all_the_way_round(k, v, sizes, group):
    """Yield (share, its keys and values, (2, B, K, S/P, D)): first this rank's, then all others'.

    The next share comes while the caller works on this one.
    """
    share, here = group.rank(), torch.stack([k, v])
    for _ in range(group.size() - 1):
        share_before = (share - 1) % group.size()
        coming, wait = start_hop(here, sizes[share_before], group)
        yield share, here
        wait()
        share, here = share_before, coming
    yield share, here


class ContiguousRing(torch.autograd.Function):
    """Attention of contiguous shares: rank r has share r, and sees shares 0 to r, if causal.

                per rank            forward             backward
    q           (B, N, S/P, D)      stays               dq: added up, share by share
    k, v        (B, K, S/P, D)      go all the way      go again; dk and dv follow, and come home
    o           (B, N, S/P, D)      merged              do: stays
    """

    @staticmethod
    def forward(ctx, q, k, v, sizes, group, causal=True):
        """sizes: how many tokens each rank has. causal: if not, each token sees all tokens."""
        ctx.sizes, ctx.group, ctx.causal = sizes, group, causal
        ctx.rests = {}  # for each block, what else the kernel's backward takes
        rank, merged = group.rank(), None
        for share, kv in all_the_way_round(k, v, sizes, group):
            if causal and share > rank:
                continue  # all its keys are later than the queries
            o, lse, ctx.rests[share] = attend(q, *kv, causal=causal and share == rank)
            block = o.to(lse.dtype), lse  # float32 at least
            merged = merge(merged, block) if merged else block
        o, lse = merged
        output = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, lse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, output, lse = ctx.saved_tensors
        rank, P = ctx.group.rank(), ctx.group.size()
        dq = torch.zeros_like(q, dtype=lse.dtype)
        coming, wait = 0, lambda: None
        for share, kv in all_the_way_round(k, v, ctx.sizes, ctx.group):
            dkv = torch.zeros_like(kv, dtype=lse.dtype)
            if not ctx.causal or share <= rank:
                block, within = (q, *kv, output, lse, ctx.rests[share]), share == rank
                dq_block, dk, dv = attend_backward(grad, *block, causal=ctx.causal and within)
                dq += dq_block
                dkv += torch.stack([dk, dv])
            wait()
            dkv += coming  # the sum so far, of the ranks that had this share before
            coming, wait = start_hop(dkv, ctx.sizes[(share - 1) % P], ctx.group)
        wait()
        dk, dv = coming  # of this rank's own keys and values: home again
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def contiguous_ring(query, key, value, group, length, causal=True):
    """Do as `ring_attention`, without a mask, for contiguous shares of a sequence of `length`."""
    shares = [shard_range(length, group.size(), rank) for rank in range(group.size())]
    sizes = [stop - first for first, stop in shares]
    return ContiguousRing.apply(query, key, value, sizes, group, causal)


# ---------------------------------------------------------------- the whole technique: who has what
#
# In the simplest form the last rank has the most work, and keys go on to ranks that skip them. The
# code below can give each rank an early and a late chunk (zigzag), so that all have the same work.
# It ends a chunk's journey at the last rank that needs the chunk; from there the chunk's gradients
# go home. Tokens do not attend to padding, nor to other documents packed into their row.


class Ring:
    """Which tokens each rank has, which keys they see, and how far keys and values travel.

    The sequence is cut into chunks, numbered in its order. Rank r has chunk r; with `zigzag` there
    are 2P chunks, and rank r has chunk 2P-1-r, too. Queries see all keys of earlier chunks, and the
    keys of their own chunk that are not later. A hop is from rank r to r+1, or, with `zigzag`, to
    r-1. So a chunk passes only ranks that need it, and stops at the last of them. (With several
    documents in zigzag it may pass some that have no queries of the chunk's documents.)

    What there is to do and to send depends on the layout:

                                                    most work of a rank     sent in a forward
    contiguous, upwards     rank r: share r of P    2 - 1/P times the mean  1/2 of all the way round
    zigzag, downwards       r and 2P-1-r of 2P      the mean, on each rank  3/4

    All the way round, a rank sends 2 (P-1) T/P K D e bytes, for T = B S tokens with K KV heads of D
    numbers of e bytes. The backward sends keys and values again, and as many gradients, in float32
    at least. Equal work thus takes 3/4 : 1/2 = 1.5 times the bytes. (Zigzag: Llama 3, arXiv
    2407.21783, section 3.3.2.)
    """

    def __init__(self, group, length, zigzag, mask=None):
        """length: of the sequence, at least P. mask: a `MaskInfo`, by default only causal."""
        self.group, self.P, self.rank = group, group.size(), group.rank()
        self.zigzag, self.mask = zigzag, mask or MaskInfo(length)
        shares = (shard_range(length, self.P, rank) for rank in range(self.P))
        sizes = [stop - first for first, stop in shares]
        if zigzag:
            sizes = [-(-n // 2) for n in sizes] + [n // 2 for n in reversed(sizes)]
        stops = accumulate(sizes)
        self.tokens = [slice(stop - n, stop) for stop, n in zip(stops, sizes, strict=True)]
        documents = self.mask.documents
        edges = [[min(part.start, length - 1), part.stop - 1] for part in self.tokens]
        self.ends = [[[0, 0]] * len(edges)]  # each chunk begins and ends in the one document, 0
        if documents is not None:
            self.ends = documents[:, edges].tolist()
        # Hops down from c's rank to i's: (owner[c] - owner[i]) % P. Contiguous hops go up: -rank.
        every = range(len(sizes))
        owner = [min(c, len(sizes) - 1 - c) if zigzag else -c for c in every]
        self.last_hop = [  # for each chunk, the hop that brings it to the last rank that needs it
            max((owner[c] - owner[i]) % self.P for i in every if self.needs(i, c)) for c in every
        ]

    def size(self, chunk):
        return self.tokens[chunk].stop - self.tokens[chunk].start

    def chunks(self, rank):
        """List a rank's chunks, but for those without a token."""
        both = [rank, len(self.tokens) - 1 - rank] if self.zigzag else [rank]
        return [chunk for chunk in both if self.size(chunk)]

    def order(self):
        """Return all tokens, (length,), rank by rank; a rank has as many as `shard_range` says."""
        local = [self.tokens[chunk] for rank in range(self.P) for chunk in self.chunks(rank)]
        return torch.cat([torch.arange(tokens.start, tokens.stop) for tokens in local])

    def along(self, rank, hops):
        """Return the rank that is so many hops further on; negative hops go back."""
        return (rank - hops if self.zigzag else rank + hops) % self.P

    def needs(self, i, j):
        """Tell whether queries of chunk i see keys of chunk j."""
        together = any(ends[j][1] == ends[i][0] for ends in self.ends)  # share a document
        return i == j or (i > j and self.size(i) > 0 and together)

    def chunks_at(self, rank, hop):
        """List the chunks whose keys and values a rank has after so many hops."""
        return [c for c in self.chunks(self.along(rank, -hop)) if self.last_hop[c] >= hop]

    def split(self, x):
        """Split this rank's tokens, (B, heads, S/P, ...): {chunk: (B, heads, tokens, ...)}."""
        local = self.chunks(self.rank)
        return dict(zip(local, x.split([self.size(chunk) for chunk in local], dim=2), strict=True))

    def bias(self, i, j, like):
        """Return what is added to the scores of chunk i's queries and chunk j's keys, or None."""
        real, documents = self.mask.real, self.mask.documents
        if real is not None:
            seen = real[:, None, None, self.tokens[j]]
        elif all(ends[j][0] == ends[i][1] for ends in self.ends):  # all of one document
            return None
        else:
            documents = documents[:, None]
            seen = documents[..., self.tokens[i], None] == documents[..., None, self.tokens[j]]
        if i == j:
            causal = seen.new_ones(self.size(i), self.size(i)).tril()
            seen = (seen | causal.mT) & causal  # padding sees itself: every query needs a key
        return bias_of(seen, like).expand(-1, -1, self.size(i), -1)

    def pass_on(self, hop, leaving, k, grad_dtype=None):
        """Begin a hop; return {chunk: tensor being received}, and a function that waits for them.

        leaving: {chunk: (2, B, K, tokens, D)}, for all chunks here after `hop` hops; k: this rank's
        keys. grad_dtype: None for keys and values; for gradients their dtype. The last rank on a
        chunk's way sends the chunk's gradients home, to its owner.
        """
        onward, back = self.along(self.rank, 1), self.along(self.rank, -1)
        sends = [(x, onward) for chunk, x in leaving.items() if self.last_hop[chunk] > hop]
        comes = {chunk: back for chunk in self.chunks_at(back, hop) if self.last_hop[chunk] > hop}
        if grad_dtype:
            first, last = self.along(self.rank, -hop), self.along(self.rank, hop)
            sends += [(x, first) for chunk, x in leaving.items() if self.last_hop[chunk] == hop]
            local = self.chunks(self.rank)
            comes |= {chunk: last for chunk in local if self.last_hop[chunk] == hop}
        B, K, _, D = k.shape
        empty = partial(k.new_empty, dtype=grad_dtype or k.dtype)
        coming = {chunk: empty(2, B, K, self.size(chunk), D) for chunk in comes}
        receives = [(coming[chunk], source) for chunk, source in comes.items()]
        return coming, exchange(sends, receives, self.group)


def ring_of(group, length, zigzag, mask=None):
    """Return the `Ring` of a length and a mask, from a cache if possible: once for all layers.

    mask: None, or made by `MaskInfo.to_tensor`.
    """
    if mask is None:
        return build_ring(group, length, zigzag, None, None)
    if mask.is_inference():  # it has no version counter
        return build_ring.__wrapped__(group, length, zigzag, mask, None)
    return build_ring(group, length, zigzag, mask, mask._version)


@lru_cache(maxsize=2)  # a ring without a mask, for the order of the tokens, and a ring with a mask
def build_ring(group, length, zigzag, mask, version):
    """Build a Ring. The cache tells masks apart by identity, and a mask's values by the version.

    The cache keeps the mask alive, so that no other tensor can have its identity.
    """
    # A copy of the mask: if it is changed in place, a backward still needs what its forward saw.
    info = None if mask is None else MaskInfo.from_tensor(mask.clone())
    return Ring(group, length, zigzag, info)


# ---------------------------------------------------------------- the whole technique: attention


def travel(ring, k, v):
    """Yield (hop, pairs, here) for each hop, while the next keys and values come.

    here: {chunk: its keys and values, (2, B, K, tokens, D)}. pairs: the (i, j) for which chunk i's
    queries attend to chunk j's keys now; for each i, (i, i) comes first.
    """
    keys, values = ring.split(k), ring.split(v)
    here = {chunk: torch.stack([keys[chunk], values[chunk]]) for chunk in keys}
    for hop in range(ring.P):
        coming, wait = ring.pass_on(hop, here, k)
        pairs = [(i, j) for j in sorted(here, reverse=True) for i in keys if ring.needs(i, j)]
        yield hop, pairs, here
        wait()
        here = coming


def ring_forward(ring, q, k, v):
    """Return outputs, log-sum-exps (B, N, S/P), and what else `ring_backward` needs."""
    wide, queries = torch.promote_types(q.dtype, torch.float32), ring.split(q)
    merged, rest = {}, {}
    for _, pairs, here in travel(ring, k, v):
        for i, j in pairs:
            bias = ring.bias(i, j, q)
            o, lse, rest[i, j] = attend(queries[i], *here[j], i == j, bias)
            if bias is not None and i > j:  # queries that see no key of this chunk
                lse = lse.masked_fill((bias == -torch.inf).all(-1), -torch.inf)
            block = o.to(wide), lse.to(wide)
            merged[i] = merge(merged[i], block) if i in merged else block
    o, lse = (torch.cat(x, dim=2) for x in zip(*(merged[i] for i in queries), strict=True))
    return o.to(q.dtype), lse, rest


def ring_backward(ring, grad, q, k, v, o, lse, rest):
    """Compute the gradients of q, k, v, from what `ring_forward` took and returned."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = torch.zeros_like(q, dtype=wide)
    queries, outputs, grads, sums, lses = map(ring.split, (q, o, grad, dq, lse))
    local, coming, wait = {}, {}, lambda: None
    for hop, pairs, here in travel(ring, k, v):
        dkv = {j: torch.zeros_like(x, dtype=wide) for j, x in here.items()}
        for i, j in pairs:
            block = queries[i], *here[j], outputs[i], lses[i], rest[i, j]
            parts = attend_backward(grads[i], *block, i == j, ring.bias(i, j, q))
            for total, part in zip((sums[i], *dkv[j]), parts, strict=True):
                total += part
        if hop == 0:
            local = dkv
            continue
        wait()
        add(coming, local, dkv)
        coming, wait = ring.pass_on(hop, dkv, k, grad_dtype=wide)
    wait()
    add(coming, local, {})
    dk, dv = (torch.cat(x, dim=2) for x in zip(*local.values(), strict=True))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def add(coming, local, others):
    """Add received gradients: to `others` if they travel on, to `local` if they have come home."""
    for chunk, dkv in coming.items():
        (others if chunk in others else local)[chunk] += dkv


class RingAttention(torch.autograd.Function):
    """Causal attention of a rank's own queries to the keys of all ranks.

                per rank            forward                 backward
    q           (B, N, S/P, D)      stays                   dq: added up, hop by hop
    k, v        (B, K, S/P, D)      travel                  travel; dk and dv follow, and go home
    o           (B, N, S/P, D)      merged, hop by hop      do: stays

    Outputs are merged, and dq, dk and dv are added up and sent, in float32 at least.
    """

    @staticmethod
    def forward(ctx, q, k, v, ring):
        ctx.ring, (o, lse, ctx.rest) = ring, ring_forward(ring, q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return *ring_backward(ctx.ring, grad, *ctx.saved_tensors, ctx.rest), None


@torch.compiler.disable  # it cannot trace messages between two ranks
def ring_attention(query, key, value, group, causal=True, length=None, zigzag=False, mask=None):
    """Attend from query (B, N, S/P, D) to all ranks' key and value, (B, K, S/P, D) each.

    causal: if False, each token sees all tokens, and shares are contiguous. length: S, at least P;
    by default P times this rank's tokens. zigzag: which tokens a rank has, see `Ring`; `Ring(group,
    length, zigzag).order()` lists all ranks' tokens in turn. mask: None, or padding and documents,
    made by `MaskInfo.to_tensor`. Raises ValueError for shapes or dtypes that do not fit each other
    or `length`, and for zigzag or a mask with causal=False. Source: Ring Attention, arXiv
    2310.01889, section 3.
    """
    length = seq_len(query, key, value, group, length)
    if not causal:
        if zigzag or mask is not None:
            raise ValueError("zigzag, mask: only in causal attention")
        return contiguous_ring(query, key, value, group, length, causal=False)
    return RingAttention.apply(query, key, value, ring_of(group, length, zigzag, mask))


def attend_in_ring(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, **_
):
    """Run `ring_attention` as Hugging Face calls it; return the output (B, S/P, N, D) and None.

    attention_mask: made by `MaskInfo.to_tensor`. Raises ValueError for dropout, and for a
    scaling other than 1/sqrt(D); UserError as `check_window` does.
    """
    if dropout:
        raise ValueError("attention dropout: not in a ring")
    if scaling not in (None, query.shape[-1] ** -0.5):
        raise ValueError(f"scores scaled by {scaling}: a ring scales by 1/sqrt(head_dim)")
    info = MaskInfo.from_tensor(attention_mask)
    check_window(sliding_window, info.length)
    mask = None if info.sees_all else attention_mask
    qkv = as_attention_takes(query, key, value)
    how = dict(length=info.length, zigzag=module.zigzag, mask=mask)
    return ring_attention(*qkv, module.get_group(), **how).transpose(1, 2), None


class RingLlama(SequenceParallelLlama):
    """Takes and returns full sequences, in order, as Task 4's model; a `Ring` deals out tokens."""

    def order(self, length):
        return ring_of(self.get_group(), length, self.zigzag).order()

    def tokens(self, length):
        return self.order(length)[super().tokens(length)]

    def gather_tokens(self, x, length):
        return super().gather_tokens(x, length)[:, self.order(length).argsort().to(x.device)]


def ring_parallelize(model, mesh, zigzag=True):
    """Make a LlamaForCausalLM sequence-parallel in place, by a ring of the ranks of `mesh`.

    Use it like a model of `sequence_parallelize`; there may be more ranks than heads. A rank's own
    tokens are `model.tokens(S)`, and a forward of these tokens alone takes the mask
    `model.attention_mask_info(S)`. Raises UserError for RoPE that depends on the length, ValueError
    as `convert_attention` does; the forward raises ValueError for dropout of attention.
    """
    convert_attention(model, RingLlama, group_of_axis(mesh), "ring", attend_in_ring)
    for module in [model, *(layer.self_attn for layer in model.model.layers)]:
        module.zigzag = zigzag
    return model


# ---------------------------------------------------------------- what is shown with it


def comm_bytes_per_layer(model, B, S, group=None, num_kv_heads=None):
    """Return bytes that a rank sends, a mean over ranks, in a layer's (forward, backward)."""
    ring, dtype = Ring(group or model.get_group(), S, model.zigzag), model.dtype
    hops = sum(ring.size(chunk) * ring.last_hop[chunk] for chunk in range(len(ring.tokens)))
    num_kv_heads = num_kv_heads or heads_of(model)[1]
    head_dim = model.model.layers[0].self_attn.head_dim
    numbers = 2 * B * hops / ring.P * num_kv_heads * head_dim
    wide = torch.promote_types(dtype, torch.float32)
    return numbers * dtype.itemsize, numbers * (dtype.itemsize + wide.itemsize)


def main():
    parser = harness.add_model_flags(harness.make_parser(__doc__, model_types=loading.LLAMAS))
    parser.add_argument(
        "--layout",
        choices=["zigzag", "contiguous"],
        default="zigzag",
        help="how tokens are dealt out; default zigzag",
    )
    harness.start(parser.parse_args(), show)


def show(run, args):
    """Run all checks of the model, its text, bytes, time and memory; and of the simplest form."""
    mesh = run.mesh("sp")
    parallelize = partial(ring_parallelize, mesh=mesh, zigzag=args.layout == "zigzag")
    workload = harness.Workload.of(args)
    harness.show_sequence(run, workload, mesh, parallelize, comm_bytes_per_layer)
    harness.check_attention(run, "simplest ring, one attention", contiguous_ring, mesh, workload)


if __name__ == "__main__":
    main()
