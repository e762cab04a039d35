"""Bonus: tensor x sequence parallelism, on a mesh of two axes.

The mesh has P = sp x tp ranks. A Llama's weights are split over the ranks of a row, as in Task 2;
the ranks of a column have the same part of the weights, and split the tokens. A rank computes (with
Task 2's f and g)

    ids (B, S) -> its S/sp tokens -> embedding rows V/tp -> g
    layer:  norm -> f -> q, k, v of N/tp heads, (B, S/sp, (N + 2K)/tp, D)
            -> along sp, by --sequence:
               ulysses  all-to-all -> (B, S, (N + 2K)/(tp sp), D) -> attention -> all-to-all
               ring     its own queries; keys and values travel (`ring_attention.py`)
               usp      both: neighbours exchange heads, rings go across them (`mesh/usp.py`)
            -> o_proj -> g -> + -> norm -> f -> MLP, F/tp units -> g -> +
    -> norm -> f -> LM head, rows V/tp -> logits (B, S/sp, V/tp) -> loss from log-sum-exps

The gradients on a column's ranks are partial sums: one all-reduce along sp, of 1/tp of the
weights, completes them.

`--megatron-sp` splits what is between blocks (norms, residual stream) along tp, by tokens
(`mesh/megatron_sp.py`); sequences are then padded to a multiple of the ranks.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 tasks/tp_ulysses.py --tp 2 --sp 2

checks what Task 4 checks against a single-rank run of the unmodified model: hidden states, logits,
loss, gradients of the input embeddings and of all weights (batch of 2, left padding), text, bytes.
"""

import os
from functools import partial

import torch
import torch.distributed as dist

import harness
from tp_llama import tensor_parallelize
from ulysses_forward import sequence_parallelize
from utils.collectives import (
    SHARED_MEMORY,
    group_of_axis,
)
from utils.errors import UserError
from utils.partition import shard_heads, shard_range
from utils.shards import ReplicatedKVLinear

# ---------------------------------------------------------------- the technique


def fewest_heads(config, tp):
    """Return the smallest number of query heads that any of `tp` ranks has."""
    N, K = config.num_attention_heads, config.num_key_value_heads
    shares = (shard_heads(N, K, tp, rank)[0] for rank in range(tp))
    return min(stop - first for first, stop in shares)


def parallelize_tp_sp(model, mesh, sequence="ulysses", megatron_sp=False, ulysses=1, zigzag=True):
    """Make a LlamaForCausalLM parallel in place on a mesh of the axes "sp" and "tp".

    sequence: "ulysses", "ring" or "usp". ulysses: with "usp", how many neighbours exchange heads;
    it divides sp. zigzag: how rings deal out tokens.
    The model is used as Task 4's: call `sum_gradients(..., mesh["sp"])` after the backward. Raises
    UserError, on all ranks, for more ranks along an axis than there are heads to share out.
    """
    tp, sp, N = mesh["tp"], mesh["sp"], model.config.num_attention_heads
    exchange = {"ulysses": sp.size(), "ring": 1, "usp": ulysses}[sequence]
    if exchange > (heads := fewest_heads(model.config, tp.size())):
        raise UserError(
            f"{heads} query heads of a rank ({N} over tp {tp.size()}) for {exchange} "
            "ranks that exchange heads: take fewer such ranks, or a ring"
        )
    if sp.size() % exchange:
        raise UserError(f"--ulysses {ulysses}: does not divide --sp {sp.size()}")
    if megatron_sp:
        from mesh.megatron_sp import TOKEN_OPS, split_between_blocks

        tensor_parallelize(model, tp, region_ops=TOKEN_OPS)
    else:
        tensor_parallelize(model, tp)
    if sequence == "usp":
        from mesh.usp import usp_parallelize

        usp_parallelize(model, sp, ulysses, zigzag)
    elif sequence == "ring":
        from ring_attention import ring_parallelize

        ring_parallelize(model, sp, zigzag)
    else:
        sequence_parallelize(model, sp)
    if megatron_sp:
        split_between_blocks(model, group_of_axis(tp))
        model.pad_multiple = sp.size() * tp.size()
    return model


def ulysses_degree(ranks, num_kv_heads, machine):
    """Return the largest size of a Ulysses group with a KV head for each rank, on one machine.

    (A larger group would send KV heads twice, or all heads from machine to machine.) machine: how
    many of the ranks are on one machine.
    """
    return max(
        u for u in range(1, ranks + 1) if ranks % u == 0 and u <= max(1, min(num_kv_heads, machine))
    )


# ---------------------------------------------------------------- what is shown with it


def comm_bytes_per_layer(model, B, S, mesh, sequence, megatron_sp):
    """Return the bytes a rank sends in one layer, forward and backward: means over its column."""
    import ring_attention
    import ulysses_forward

    L, tp, attention = len(model.model.layers), mesh["tp"].size(), model.model.layers[0].self_attn
    if sequence == "ulysses":
        sent = [ulysses_forward.comm_bytes_per_layer(model, B, S)] * 2
    elif sequence == "ring":
        sent = ring_attention.comm_bytes_per_layer(model, B, S)
    else:
        ring, ulysses_group = model.get_ring(), model.get_ulysses_group()
        shares = [shard_range(S, ring.size(), rank) for rank in range(ring.size())]
        exchange = partial(ulysses_forward.comm_bytes_per_layer, model, B, group=ulysses_group)
        exchanged = sum(exchange(stop - start) for start, stop in shares) / ring.size()
        num_kv_heads = (
            sum(ulysses_forward.split_sizes(ulysses_group, attention.heads, S)[2])
            / ulysses_group.size()
        )
        sent = [
            exchanged + passed
            for passed in ring_attention.comm_bytes_per_layer(model, B, S, ring, num_kv_heads)
        ]
    e, H = model.dtype.itemsize, model.config.hidden_size
    half = (tp - 1) / tp * B * S / mesh["sp"].size() * H * e  # of an all-reduce's bytes
    # Forward: two blocks a layer, and the embedding. The backward also sums gradients of weights.
    forward, backward = (4 * L + 1, 4 * L + 1) if megatron_sp else (4 * L + 2, 4 * L)
    weights = megatron_sp * (2 + 1 / L) * 2 * (tp - 1) / tp * H * e
    if isinstance(attention.k_proj, ReplicatedKVLinear):  # several ranks hold one KV head
        replicas = attention.k_proj.get_kv_replica_group().size()
        inputs = H + (attention.k_proj.bias is not None)
        weights += 4 * (replicas - 1) / replicas * attention.head_dim * inputs * e
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
    add(
        "--megatron-sp",
        action="store_true",
        help="along tp, split what is between blocks by tokens; default no",
    )
    harness.start(parser.parse_args(), show)


def default_tp(config, ranks, sequence):
    """Return the default number of ranks along tp: 2 if the ranks are an even number, else 1.

    If that leaves too few heads for all ranks along tp, or for Ulysses to exchange, return the next
    larger number that leaves enough, or else a smaller number.
    """
    usual = 2 - ranks % 2
    divisors = [tp for tp in range(1, ranks + 1) if ranks % tp == 0]
    for tp in sorted(divisors, key=lambda tp: (tp < usual, tp)):
        exchange = ranks // tp if sequence == "ulysses" else 1
        if tp <= config.num_attention_heads and exchange <= fewest_heads(config, tp):
            return tp
    return usual


def show(run, args):
    """Run all checks of the model, its text, bytes, time and memory."""
    config = run.source.config
    tp = args.tp or (None if args.sp else default_tp(config, run.world_size, args.sequence))
    sp, tp = harness.sides_of(run.world_size, "sp", "tp", args.sp, tp)
    nothing = "; --megatron-sp: nothing to split along tp" * (args.megatron_sp and tp == 1)
    run.print0(f"mesh: sp={sp} x tp={tp}{nothing}")
    mesh, u = run.mesh_2d("sp", "tp", tp), 1
    if args.sequence == "usp":
        num_kv_heads = max(1, config.num_key_value_heads // tp)
        machine = int(os.environ.get("LOCAL_WORLD_SIZE", run.world_size)) // tp
        u = args.ulysses or ulysses_degree(sp, num_kv_heads, machine)
        run.print0(
            f"sequence: {u} neighbours exchange heads, in rings of {sp // u} (sp {sp}, "
            f"{num_kv_heads} KV heads of a rank, {machine} of these on a machine)"
            f"{': plain Ulysses' * (u == sp)}"
        )
    elif args.ulysses:
        raise UserError(f"--ulysses: not with --sequence {args.sequence}")
    parallelize = partial(
        parallelize_tp_sp,
        mesh=mesh,
        sequence=args.sequence,
        megatron_sp=args.megatron_sp,
        ulysses=u,
    )

    def bytes_of(model, B, S):
        local = comm_bytes_per_layer(model, B, S, mesh, args.sequence, args.megatron_sp)
        return tuple(
            sum(sent) / run.world_size for sent in zip(*run.gather_objects(local), strict=True)
        )

    def tokens_of(model, S):
        local = torch.arange(S)[model.tokens(S)]
        return local.view(tp, -1)[mesh["tp"].get_local_rank()] if args.megatron_sp else local

    # Along more than two ranks `all_reduce` may be an all-gather (few bytes by gloo) or a padded
    # all-to-all (half precision), whose bytes the formula does not give.
    exact = tp <= 2 or dist.get_backend(mesh["tp"].get_group()) == SHARED_MEMORY
    unsplit = "norm" if tp > 1 else ""
    workload, how = harness.Workload.of(args), {"unsplit": (unsplit,), "exact": exact}
    harness.show_sequence(run, workload, mesh["sp"], parallelize, bytes_of, tokens_of, **how)


if __name__ == "__main__":
    main()
