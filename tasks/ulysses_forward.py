"""Task 4: a Llama whose sequence is split over the ranks, after DeepSpeed-Ulysses.

Every rank has all weights and a share of the tokens. Every part of a Llama except attention works
on each token alone; attention works on each head alone. So two all-to-alls around attention turn
shares of the tokens into shares of the heads and back:

    ids (B, S) -> this rank's S/P tokens -> embedding (B, S/P, H)
    layer:  norm -> q, k, v of all heads (B, S/P, N + 2K, D) -> RoPE, with the tokens' own positions
            -> all-to-all -> (B, S, (N + 2K)/P, D): all tokens, few heads (K >= P)
            -> causal attention -> (B, S, N/P, D)
            -> all-to-all -> (B, S/P, N, D) -> o_proj -> + -> norm -> MLP -> +
    -> norm -> LM head -> logits of this rank's tokens (B, S/P, V)
    -> sum of these tokens' losses -> g, the sum over ranks -> / number of all ranks' labels

A token's label is the next token, which may be on another rank: labels are shifted before they are
split. A rank may have fewer valid labels than others, or none; so the loss is the sum of all ranks'
losses, divided by the number of all ranks' labels, and not a mean of the ranks' means. (That is in
utils/sequence.py: `SequenceParallelLlama.forward`.) The backward goes through these steps in
reverse. Each rank uses the weights for its own tokens, so the ranks' gradients are partial sums:
one all-reduce after the backward adds them up (`sum_gradients`), as in data parallelism.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 tasks/ulysses_forward.py

checks hidden states, logits, loss, the gradients of the input embeddings and of all weights against
a single-rank run of the unmodified model (batch of 2, left padding), continues a prompt, counts the
bytes on the wire, and measures time and memory of both.
"""

from functools import partial
from itertools import permutations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import harness
import loading
from utils.collectives import group_of_axis
from utils.llama import guard_dropout
from utils.partition import shard_heads, shard_range
from utils.sequence import (
    MaskInfo,
    SequenceParallelLlama,
    as_attention_takes,
    check_window,
    convert_attention,
    seq_len,
)

# ---------------------------------------------------------------- the technique


class AllToAll(torch.autograd.Function):
    """Every rank sends a piece to every rank. The backward is the same, with the splits swapped.

            per rank                forward                     backward
    x       (sum of sent,)          piece r goes to rank r      all-to-all(dy), splits swapped
    y       (sum of received,)      piece r came from rank r    dy
    """

    @staticmethod
    def forward(ctx, x, sent, received, group):
        """x: flat; sent, received: how many elements go to and come from each rank of `group`."""
        ctx.sent, ctx.received, ctx.group = sent, received, group
        y = x.new_empty(sum(received))
        dist.all_to_all_single(y, x.contiguous(), received, sent, group=group)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        dx = grad.new_empty(sum(ctx.sent))
        dist.all_to_all_single(dx, grad.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return dx, None, None, None


def causal_attention(query, key, value):
    """Run PyTorch's own causal attention, also with fewer KV heads than query heads."""
    times = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def ulysses_attention(query, key, value, group, attend=causal_attention, length=None, heads=None):
    """Attend with this rank's heads to all tokens; take and return all heads of its own tokens.

                        per rank before     sent to rank r              per rank after
    query               (B, N, S/P, D)      its heads, (S/P, B, N/P, D)     (B, N/P, S, D)
    key, value          (B, K, S/P, D)      (S/P, B, max(K/P, 1), D)        (B, max(K/P, 1), S, D)
    output              (B, N/P, S, D)      its tokens, (S/P, B, N/P, D)    (B, N, S/P, D)

    attend(query, key, value): the attention of some heads; by default causal. length: S, by default
    P times this rank's tokens; each rank has as many as `shard_range` says. heads: for each rank,
    its query heads and KV heads, by default by `shard_heads`. Raises UserError for more ranks than
    query heads, ValueError for shapes or dtypes that do not fit each other or `length`.
    """
    P, length = group.size(), seq_len(query, key, value, group, length)
    heads = heads or [shard_heads(query.shape[1], key.shape[1], P, rank)[:2] for rank in range(P)]
    output = attend(*to_heads(query, key, value, group, heads, length))
    return to_tokens(output.transpose(1, 2), group, heads, length).transpose(1, 2)


def attend_to_all_tokens(module, query, key, value, attention_mask, sliding_window=None, **kwargs):
    """Run `ulysses_attention` as Hugging Face calls it; return output (B, S/P, N, D) and None.

    attention_mask: made by `MaskInfo.to_tensor`. Raises UserError as `check_window` does.
    """
    message = "model.model needs attention_mask=model.attention_mask_info(S)"
    assert attention_mask is not None, message
    mask = MaskInfo.from_tensor(attention_mask)
    check_window(sliding_window, mask.length)

    def by_hf(query, key, value, attention_mask=None):
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        output, _ = sdpa(module, query, key, value, attention_mask=attention_mask, **kwargs)
        return output.transpose(1, 2)

    if mask.documents is not None:
        attend = partial(by_documents, by_hf, documents=mask.documents)
    else:
        attend = partial(by_hf, attention_mask=mask.full())
    group, heads = module.get_group(), module.heads
    qkv = as_attention_takes(query, key, value)
    output = ulysses_attention(*qkv, group, attend, mask.length, heads)
    return output.transpose(1, 2), None


@torch.compiler.disable  # the sizes of documents are known at run time
def by_documents(attend, query, key, value, documents):
    """Run causal attention inside each document, in a call for each. documents: (B, S)."""
    outputs = []
    for row, *parts in zip(documents, query[:, None], key[:, None], value[:, None], strict=True):
        sizes = row.unique_consecutive(return_counts=True)[1].tolist()
        pieces = zip(*(x.split(sizes, dim=2) for x in parts), strict=True)
        outputs.append(torch.cat([attend(*piece) for piece in pieces], dim=2))
    return torch.cat(outputs)


def split_sizes(group, heads, S):
    """Return three lists: how many tokens, query heads and KV heads each rank has."""
    tokens = (shard_range(S, group.size(), rank) for rank in range(group.size()))
    queries, keys = zip(*heads, strict=True)
    return [[stop - first for first, stop in ranges] for ranges in (tokens, queries, keys)]


def to_heads(query, key, value, group, heads, S):
    """Swap all heads of this rank's tokens for its heads of all tokens; see `ulysses_attention`.

    Query, key and value travel in one packed all-to-all. A KV head goes to every rank that has
    query heads of its group; its gradient is the sum of what these ranks send back. Within a piece
    tokens come first, so that the pieces received, one after the other, are the sequence.
    """
    tokens, queries, keys = split_sizes(group, heads, S)
    B, D, n, k = len(query), query.shape[-1], queries[group.rank()], keys[group.rank()]
    query, key, value = (x.permute(2, 0, 1, 3) for x in (query, key, value))  # tokens first
    pieces = [
        torch.cat([query[:, :, slice(*q)], key[:, :, slice(*kv)], value[:, :, slice(*kv)]], dim=2)
        for q, kv in heads
    ]
    packed = torch.cat([piece.flatten() for piece in pieces])
    received = [t * B * (n + 2 * k) * D for t in tokens]
    full = AllToAll.apply(packed, [piece.numel() for piece in pieces], received, group)
    return full.view(S, B, n + 2 * k, D).permute(1, 2, 0, 3).split([n, k, k], dim=1)


def to_tokens(output, group, heads, S):
    """Swap back: this rank's heads of all tokens, (B, S, n, D), for (B, S/P, N, D)."""
    tokens, queries, _ = split_sizes(group, heads, S)
    B, _, n, D = output.shape
    local_tokens = tokens[group.rank()]
    packed = output.transpose(0, 1).flatten()
    received = [local_tokens * B * q * D for q in queries]
    pieces = AllToAll.apply(packed, [t * B * n * D for t in tokens], received, group)
    pieces = [piece.view(local_tokens, B, -1, D) for piece in pieces.split(received)]
    return torch.cat(pieces, dim=2).transpose(0, 1)


def sequence_parallelize(model, mesh):
    """Make a LlamaForCausalLM sequence-parallel in place, over the ranks of a `mesh` of one axis.

    All ranks keep full weights. The model is used as before (see `SequenceParallelLlama`), but
    a rank's gradients of weights and `inputs_embeds`, of full shape, come from its own tokens only:
    call `sum_gradients` after the backward. Any sequence length and batch size works: where heads
    or tokens are not a multiple of P, shares are uneven.

    `model.tokens(S)` says which tokens this rank has. With these tokens only, call
    `model.model(inputs_embeds=..., position_ids=..., attention_mask=model.attention_mask_info(S))`:
    it returns their hidden states, (B, S/P, H).

    The model may be tensor-parallel along another axis: then the ranks of `mesh` have the same part
    of the heads, and divide it. It may also be on the meta device. Raises UserError for more ranks
    than query heads and for RoPE that depends on the length of the sequence, ValueError as
    `convert_attention` does. With at most K ranks, each gets whole KV groups: of 3 ranks with 4
    groups, one gets two, and its attention takes twice as long.
    Source: DeepSpeed-Ulysses, arXiv 2309.14509, section 3.
    """
    group = group_of_axis(mesh)
    convert_attention(model, SequenceParallelLlama, group, "ulysses", attend_to_all_tokens, group)
    guard_dropout(model, group.size())
    return model


# ---------------------------------------------------------------- what is shown with it


def comm_bytes_per_layer(model, B, S, group=None):
    """Return the bytes that a rank sends in one layer's forward; the backward sends as many.

    A mean over ranks. For sizes that are multiples of P: (P-1)/P (T/P) e D (2N + 2 max(K, P)), with
    T = B S tokens and numbers of e bytes. group: ranks that exchange heads; default
    `model.get_group()`.
    """
    attention, group = model.model.layers[0].self_attn, group or model.get_group()
    tokens, queries, keys = split_sizes(group, attention.heads, S)
    pairs = list(permutations(range(group.size()), 2))
    sent = sum(tokens[a] * (queries[b] + 2 * keys[b]) + tokens[b] * queries[a] for a, b in pairs)
    return sent * B * attention.head_dim * model.dtype.itemsize / group.size()


def main():
    parser = harness.make_parser(__doc__, model_types=loading.LLAMAS)
    harness.start(harness.add_model_flags(parser).parse_args(), show)


def show(run, args):
    """Run all checks of the model, its text, bytes, time and memory."""
    mesh = run.mesh("sp")
    parallelize = partial(sequence_parallelize, mesh=mesh)
    workload = harness.Workload.of(args)
    harness.show_sequence(run, workload, mesh, parallelize, comm_bytes_per_layer)
    harness.check_attention(run, "ulysses_attention by itself", ulysses_attention, mesh, workload)


if __name__ == "__main__":
    main()
