"""Task 2: a trained Llama, tensor-parallel, in one file.

`tensor_parallelize(model, mesh)` turns Hugging Face's own LlamaForCausalLM tensor-parallel in
place and from outside: it slices the weights and puts Megatron's f and g around the blocks. The
splits that Part 1 and Task 1 show one by one are here together, with a third, of the vocabulary:

    ids -> embedding rows V/P -> g -> [ norm -> f -> attention, N/P heads -> g -> + ]
                                      [ norm -> f -> MLP, F/P units       -> g -> + ] x layers
           -> norm -> f -> LM head, rows V/P -> logits (B, S, V/P) -> loss from log-sum-exps

    forward: an all-reduce at each g; backward: an all-reduce at each f; (B, S, H) each.

Why split the vocabulary, where the assignment hints at splitting the embedding *dim* H? Llama-3.2
ties the embedding to the LM head, so one split must serve both. Rows of the vocabulary suit the
head: its logits come out split over the vocabulary, and the loss needs three numbers a token from
each rank, never the full logits (B, S, V), which at V = 128256 are the largest tensor of all. Split
along H, the head would be row-parallel and would all-reduce that very tensor.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 tasks/tp_llama.py

checks logits, loss, the gradients of the input embeddings and of all weights against a single-rank
run of the unmodified model (batch of 2, left padding; a real loss, and a random gradient of the
logits), continues a prompt greedily, and measures time and memory of both.
"""

import argparse
from types import MethodType

import torch
from torch import nn
from torch.autograd.function import once_differentiable

import harness
import loading
from utils.collectives import (
    all_gather,
    copy_to_region,
    gather_shares,
    group_of_axis,
    reduce_from_region,
    subgroup,
)
from utils.llama import bind, check_ids, expect_same_batches, getter, guard_dropout, next_tokens
from utils.partition import shard_heads, shard_range
from utils.shards import (
    ReplicatedKVLinear,
    has_labels,
    keep_shard,
    local_rows,
    refuse_on_slices,
    sum_head_norm_grads,
    with_full_logits,
)

LOSS_TILE_BYTES = 2**28  # for a loss, logits of more bytes (in float32) are made in tiles of tokens

# ---------------------------------------------------------------- the technique


def tensor_parallelize(model, mesh, vocab_parallel=True, region_ops=None, overlap=False):
    """Make a LlamaForCausalLM tensor-parallel in place, over the ranks of a `mesh` of one axis.

    Models with the same parts as a Llama can be split, too: Mistral, Qwen2, Qwen3, SmolLM3 (see
    `check_ordinary`).

                            full        local
    q_proj                  (N D, H)    (N/P D, H)      whole heads
    k_proj, v_proj          (K D, H)    (max(K/P, 1) D, H)  the KV heads of those query heads
    o_proj                  (H, N D)    (H, N/P D)
    gate_proj, up_proj      (F, H)      (F/P, H)
    down_proj               (H, F)      (H, F/P)
    embed_tokens, lm_head   (V, H)      (V/P, H)        with vocab_parallel; tied or not
    norms                   (H,)        (H,)            replicated; gradients equal by themselves
    q_norm, k_norm          (D,)        (D,)            Qwen3's: replicated; gradients summed

    Shares may be uneven; with more ranks than KV heads, several ranks may hold one KV head (see
    `shard_heads`). The model is used as before. Without labels, logits are gathered and come out
    full. With `labels`, the loss is computed from split logits, and `output.logits` is this rank's
    (B, S, V/P). If these would take more than `LOSS_TILE_BYTES` in float32, `output.logits` is
    None, and the loss is computed tile by tile. Attention weights, if asked for, are of this rank's
    heads. The model may also be on the meta device.
    region_ops: functions of (x, group), in place of f and g. overlap: all-reduces of the layers' f
    run while the weights' gradients are computed, see `utils.overlap`.
    Raises UserError for more ranks than query heads or vocabulary entries, ValueError for a model
    that is split already, or not built as a Llama, and for overlap with region_ops.
    Source: Megatron-LM, arXiv 1909.08053, section 3.
    """
    group, (enter, leave) = group_of_axis(mesh), region_ops or (copy_to_region, reduce_from_region)
    if overlap and region_ops:
        raise ValueError("overlap is of f, which region_ops replaces: give one of them")
    rank, ranks = group.rank(), group.size()
    refuse_on_slices(model, ranks, of_vocabulary=vocab_parallel)
    guard_dropout(model, ranks)
    expect_same_batches(model, group)
    D = model.model.layers[0].self_attn.head_dim
    num_heads, num_kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    queries, keys, kv_replicas = shard_heads(num_heads, num_kv_heads, ranks, rank)
    units = shard_range(model.config.intermediate_size, ranks, rank)
    if ranks > num_kv_heads:
        kv_replica_group = subgroup(group, f"of {num_kv_heads}", *kv_replicas)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        keep_shard(attention.q_proj, 0, queries[0] * D, queries[1] * D)
        for projection in attention.k_proj, attention.v_proj:
            keep_shard(projection, 0, keys[0] * D, keys[1] * D)
            if ranks > num_kv_heads:
                projection.__class__ = ReplicatedKVLinear
                projection.get_kv_replica_group = getter(kv_replica_group)
        keep_shard(attention.o_proj, 1, queries[0] * D, queries[1] * D)
        attention.num_key_value_groups = (queries[1] - queries[0]) // (keys[1] - keys[0])

        keep_shard(mlp.gate_proj, 0, *units)
        keep_shard(mlp.up_proj, 0, *units)
        keep_shard(mlp.down_proj, 1, *units)

        for block, last in (attention, attention.o_proj), (mlp, mlp.down_proj):
            if overlap:
                from utils.overlap import overlap_f

                overlap_f(block, f, group)
            else:
                block.register_forward_pre_hook(bind(f, enter=enter, group=group), with_kwargs=True)
            last.register_forward_hook(bind(g, leave=leave, group=group))
            if rank != 0:
                last.bias = None  # it must enter the sum over ranks once: rank 0 adds it

    sum_head_norm_grads(model, group)
    if vocab_parallel:
        split_vocabulary(model, group, enter)
    return model


def f(module, args, kwargs, enter, group):
    """Apply f to a block's input, as a pre-hook; attention takes its input as a keyword."""
    args = tuple(enter(x, group) for x in args)
    if "hidden_states" in kwargs:
        kwargs = kwargs | {"hidden_states": enter(kwargs["hidden_states"], group)}
    return args, kwargs


def g(module, args, y, leave, group):
    """Apply g to the output of a block's last layer, as a hook."""
    return leave(y, group)


def split_vocabulary(model, group, enter=copy_to_region):
    """Split embedding, LM head and loss over the vocabulary; both weights may be one (tied)."""
    vocab_size = model.config.vocab_size
    rows = shard_range(vocab_size, group.size(), group.rank())
    embedding, head = model.model.embed_tokens, model.lm_head
    tied = head.weight is embedding.weight
    keep_shard(embedding, 0, *rows)
    if tied:
        head.weight, head.out_features = embedding.weight, len(embedding.weight)
    else:
        keep_shard(head, 0, *rows)
    embedding.__class__, head.__class__ = VocabParallelEmbedding, VocabParallelHead
    for part in embedding, head:
        part.get_group, part.rows = getter(group), rows
    embedding.num_embeddings = head.full_size = vocab_size  # its forward takes all ids
    head.register_forward_pre_hook(bind(f, enter=enter, group=group), with_kwargs=True)
    # Bound to the head: a model that held itself would not be freed at once.
    model.sum_of_losses = MethodType(sum_of_vocab_parallel_losses, head)
    model.loss_function = MethodType(vocab_parallel_loss, head)
    gather = bind(gather_shares, dim=-1, size=vocab_size, group=group)
    model.register_forward_pre_hook(expect_loss, with_kwargs=True)
    model.register_forward_hook(with_full_logits(gather), with_kwargs=True)
    model.register_forward_hook(drop_logits, always_call=True)


class VocabParallelEmbedding(nn.Embedding):
    """Rows [start, stop) of an embedding; a token's row comes from the rank that has it."""

    def forward(self, ids):
        """ids (B, S) -> (B, S, H): this rank's rows, then g."""
        return reduce_from_region(self.part(ids), self.get_group())

    def part(self, ids):
        return local_rows(ids, self.weight, self.rows[0], self.num_embeddings, self.padding_idx)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy of every token from logits that are split over the vocabulary.

                per rank        forward                         backward
    logits      (T, V/P)        largest logit, sum of all       softmax - onehot, local
                                exp(logit - largest), and
                                target's logit or 0
    loss        (T,)            all-gather of these 3 T numbers

    loss = log sum exp(logits - largest) - (target's logit - largest), with the largest of all V
    logits. Each rank makes its sum with its own largest logit, and all sums are rescaled to the
    largest of all. Nothing of size V is sent or gathered. (Megatron-LM has three all-reduces.)
    Half precision is computed in float32.
    """

    @staticmethod
    def forward(ctx, logits, targets, rows, group):
        first, stop = rows
        wide = torch.promote_types(logits.dtype, torch.float32)
        lowest = torch.finfo(wide).min  # finite: -inf minus -inf would be NaN
        here = (targets >= first) & (targets < stop)
        column = (targets - first).clamp(0, stop - first - 1)
        target = logits.gather(1, column[:, None])[:, 0].masked_fill(~here, 0).to(wide)
        own_largest = logits.amax(1).to(wide).clamp(min=lowest)
        own_sum = logits.to(wide, copy=True).sub_(own_largest[:, None]).exp_().sum(1)
        everyone = all_gather(torch.stack([own_largest, own_sum, target]), group)  # (P, 3, T)
        largests, sums, targets_logits = everyone.unbind(1)
        largest = largests.amax(0)
        log_sum = (sums * (largests - largest).exp()).sum(0).log()
        ctx.save_for_backward(logits, largest, log_sum, here, column)
        return log_sum - (targets_logits.sum(0) - largest)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, largest, log_sum, here, column = ctx.saved_tensors
        dlogits = logits.to(log_sum.dtype, copy=True).sub_(largest[:, None])
        dlogits.sub_(log_sum[:, None]).exp_()  # softmax
        dlogits[torch.arange(len(column), device=column.device), column] -= here.to(dlogits.dtype)
        return dlogits.mul_(grad[:, None]).to(logits.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits, labels, group, ignore_index=-100, reduction="mean", rows=None
):
    """Compute `F.cross_entropy`, on all ranks of `group`, of logits (..., V/P) and labels (...).

    reduction: "mean", "sum" or "none". Labels are the same on all ranks. rows: this rank's part of
    the vocabulary, [start, stop); then labels are not checked to be in the vocabulary. By default
    the ranks ask each other for their sizes, and labels that no rank has raise IndexError. Each
    rank's logits get their own gradient, without a sum over ranks. Raises ValueError for another
    reduction, and for labels or rows that do not fit the logits.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels {list(labels.shape)}, for logits {list(logits.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction {reduction!r}: not mean, sum or none")
    if rows is None:
        size = torch.tensor(logits.shape[-1], device=logits.device)
        sizes, rank = all_gather(size, group).tolist(), group.rank()
        rows = sum(sizes[:rank]), sum(sizes[: rank + 1])
        check_ids(labels.masked_fill(labels == ignore_index, 0), sum(sizes))
    if rows[1] - rows[0] != logits.shape[-1]:
        raise ValueError(f"rows {rows}, for logits of {logits.shape[-1]} words")
    losses = VocabParallelCrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), rows, group)
    is_label = (labels != ignore_index).flatten()
    losses = losses.masked_fill(~is_label, 0)
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() / is_label.sum() if reduction == "mean" else losses.sum()


def sum_of_vocab_parallel_losses(head, logits, targets, ignore_index=-100):
    """Sum the cross-entropy over tokens, on all ranks; (B, S, V/P), (B, S) -> a scalar.

    logits: (B, S, V/P), or the hidden states (B, S, H), if `VocabParallelHead` has passed them on.
    """
    group, rows = head.get_group(), head.rows
    if not head.in_tiles:
        return vocab_parallel_cross_entropy(logits, targets, group, ignore_index, "sum", rows)
    from memory.tiled_vocabulary import TiledVocabParallelLoss

    x, tile = logits.flatten(0, -2), head.tile(logits.dtype)
    of_tokens = targets.flatten(), rows, group, ignore_index, tile, torch.is_grad_enabled()
    return TiledVocabParallelLoss.apply(x, head.weight, *of_tokens)


def vocab_parallel_loss(
    head,
    logits,
    labels,
    vocab_size,
    ignore_index=-100,
    num_items_in_batch=None,
    shift_labels=None,
    **kwargs,
):
    """Return the mean next-token loss, on all ranks, of logits (B, S, V/P) and labels (B, S).

    It takes the place of Hugging Face's loss: labels are the input tokens and are shifted here,
    and the sum is divided by the number of targets that are not `ignore_index`, or, if Hugging
    Face's Trainer gives it, by `num_items_in_batch`. Raises ValueError and IndexError as
    `next_tokens` does.
    """
    size = logits.shape[:2]
    targets = next_tokens(labels, size, vocab_size, ignore_index, shift_labels)
    count = num_items_in_batch
    if count is None:
        count = (targets != ignore_index).sum()
    return sum_of_vocab_parallel_losses(head, logits, targets, ignore_index) / count


# ---------------------------------------------------------------- a loss without full logits


class VocabParallelHead(nn.Linear):
    """Rows [start, stop) of an LM head: its logits are this rank's, (B, S, V/P).

    If a loss is wanted, and logits would take more than `LOSS_TILE_BYTES`, in float32 at least, on
    some rank, the head passes hidden states on, and the loss makes the logits tile by tile.
    """

    wants_loss = in_tiles = False

    def forward(self, x):
        """x (B, S, H) -> (B, S, V/P), or x itself."""
        tokens = x.shape[:-1].numel()
        large = self.bias is None and tokens > self.tile(x.dtype)
        self.in_tiles = self.wants_loss and large
        return x if self.in_tiles else super().forward(x)

    def tile(self, dtype):
        """Return how many tokens' logits take `LOSS_TILE_BYTES`, the same on all ranks."""
        wide = torch.promote_types(dtype, torch.float32)
        widest = -(-self.full_size // self.get_group().size())
        return max(1, LOSS_TILE_BYTES // (widest * wide.itemsize))


def expect_loss(model, args, kwargs):
    """Tell the LM head, as a pre-hook, whether the model was given labels.

    Raises ValueError if its `loss_function` has been replaced since the split.
    """
    model.lm_head.wants_loss = has_labels(model, args, kwargs)
    if model.lm_head.wants_loss:
        from guards.refusals import refuse_own_loss

        refuse_own_loss(model, MethodType(vocab_parallel_loss, model.lm_head))


def drop_logits(model, args, output):
    """Return None for logits, as a hook, if the head passed hidden states on; reset the head."""
    head = model.lm_head
    if head.in_tiles and isinstance(output, tuple):  # return_dict=False: the loss comes first
        output = output[0], None, *output[2:]
    elif head.in_tiles and output is not None:  # None: the forward has failed
        # (A new output: setting its attribute to None would leave the old entry in place.)
        output = type(output)(**(dict(output) | {"logits": None}))
    head.wants_loss = head.in_tiles = False
    return output


# ---------------------------------------------------------------- what is shown with it


def main():
    parser = harness.add_model_flags(harness.make_parser(__doc__, model_types=loading.LLAMAS))
    parser.add_argument(
        "--vocab-parallel",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="split embedding and LM head over the ranks too; default yes",
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="run f's all-reduces while the weights' gradients are computed (on GPUs); default no",
    )
    harness.start(parser.parse_args(), show)


def show(run, args):
    """Run all checks of the model, its text, time and memory."""
    mesh = run.mesh("tp")

    def parallelize(model):
        tensor_parallelize(model, mesh, args.vocab_parallel, overlap=args.overlap)

    if args.vocab_parallel:
        harness.show_model(run, harness.Workload.of(args), parallelize)
    else:
        unsplit = "norm", "embed_tokens", "lm_head"
        harness.show_model(run, harness.Workload.of(args), parallelize, harness.plain_loss, unsplit)


if __name__ == "__main__":
    main()
