"""What each technique makes of `formulas.py`: a rank's bytes in a step, and what it sends.

`estimate_check.py` holds all of it against steps that are run, but for "finetune" and "kv-cache".
Threads are one process: the sum of gpipe's stages.
"""

from dataclasses import replace
from functools import partial
from itertools import chain, pairwise

import torch

from figures.plan.formulas import (
    Rank,
    dtensor_loss,
    loss_beside_logits,
    own_loss,
    plain_loss,
    step,
    up,
)
from figures.plan.longest import a_token
from harness.finetune import default_tile_mib
from memory.head_groups import plan_rounds
from pipeline_llama import BY_HAND
from utils.errors import UserError
from utils.stages import balance


def ring(work, P, numbers):
    """Bytes that a rank sends in an all-reduce of so many."""
    return 2 * (P - 1) / P * numbers * work.e


def one_process(work, P):
    """The unmodified model, alone."""
    if P > 1:
        raise UserError("one process")
    return step(work, plain_loss)


def summed(work, rank, P, tp=1):
    """Add the moment of summing gradients to `rank`; return the bytes that it sends.

    Small gradients travel in one copy of 32 MiB. In half precision, over more than two ranks, there
    is also room for the parts that come from the others.
    """
    if P == 1:
        return 0
    beside = min(rank.gradients, 2**25)
    if work.e < 4 and P > 2:
        beside = 4 * max(work.table(tp) * work.e, work.unit(tp) * work.e, 2**25)
    rank.moments["sum of gradients"] = rank.gradients + beside
    return ring(work, P, rank.parameters / work.e)


def split_sequence(work, P, tp=1, u=None, by_tokens=False, zigzag=True,
                   loss=own_loss):  # fmt: skip
    """Tasks 2 and 4 and the ring, on a mesh of P/tp x tp ranks: see `tp_ulysses.py`.

    u: of a column's ranks, how many neighbours exchange heads (None: all); each is in a ring with
    every u-th. by_tokens: `--megatron-sp`. What o_proj is given is not what attention gives.
    """
    sp, L, D, e = P // tp, work.L, work.D, work.e
    u, T, (n, k) = u or P // tp, up(work.T, P // tp), work.heads(tp)
    if u > (fewest := work.heads(tp, min)[0]):
        raise UserError(f"{fewest} query heads of a rank for {u} that exchange heads")
    more = D * (n + 2 * (max(k, u) - k)) * (sp > 1)
    rank = step(work, loss, tp, 1 / tp if by_tokens else 1.0, more, T)
    T, runs = work.T / sp, 2 if work.tile else 1  # sent on average; runs of the forward
    rank.sent = L * (u - 1) / u * T * D * e * (runs + 1) * 2 * (n + max(k, u))
    r, way = sp // u, 3 / 4 if zigzag else 1 / 2  # round a ring; gradients in float32 at least
    rank.sent += L * way * 2 * (r - 1) * T * max(k, u) * D * ((runs + 1) * e + work.w)
    rank.sent += summed(work, rank, sp, tp)
    # Halves of an all-reduce: of the layers and the ends. (A layer's last one is not run again.)
    halves = 8 * L + 4 + (runs - 1) * (3 * L + 1 if by_tokens else 2 * L)
    rank.sent += ring(work, tp, halves / 2 * T * work.H)
    if tp > work.K:  # several hold a KV head, and add up its gradients
        rank.sent += ring(work, tp / work.K, 2 * work.H * D * L)
    rank.mesh = f"sp {sp} x tp {tp}"
    return rank


def tensor_parallel(work, P, loss=own_loss, by_tokens=False):
    """Tasks 2 and 3: an all-reduce of all tokens at each f and g."""
    return split_sequence(work, P, P, by_tokens=by_tokens, loss=loss)


def usp(work, P, u):
    """Each u neighbours exchange heads; rings have one rank of each such group."""
    rank = split_sequence(work, P, u=u)
    rank.mesh = f"ring {P // u} x {u}"
    return rank


def finetuning(work, P):
    """Task 5: a virtual prompt is trained; large things in parts, attention never run again.

    In the backward q, k, v and outputs travel again; a KV head does in each round that needs it.
    """
    weights = work.parameters() * work.e
    tile = default_tile_mib(torch.device("cpu")) * 2**20
    kept = a_token("ours", work.config, P, work.e) * up(work.T, P)
    rounds = chain.from_iterable(plan_rounds(work.config, P, True))
    heads = sum(stop - first for queries_and_keys in rounds for first, stop in queries_and_keys)
    sent = work.L * (P - 1) / P * up(work.T, P) * work.D * 6 * heads * work.e
    return Rank(weights, 0, 0, kept, {"last layer": kept + tile}, sent)


def pipeline(work, P, schedule="1f1b"):
    """`pipeline_llama.py` by hand: the stage that takes most; cut by FLOP, not by seconds."""
    m, e, w = work.microbatches, work.e, work.w
    if m > work.B:
        raise UserError(f"{work.B} sequences, fewer than {m} microbatches")
    t, stages = up(work.B, m) * work.S, []
    costs = [work.layer() + 2 * work.S * work.N * work.D] * work.L
    costs[-1] += work.table()
    for s, (first, stop) in enumerate(pairwise((0, *balance(costs, P)))):
        last, table, logits = s == P - 1, work.table() * e, work.V * work.T * e
        tables = max(s == 0, last) if work.tied else (s == 0) + last
        W = ((stop - first) * work.layer() + last * work.H) * e + tables * table
        kept, beside = (stop - first) * work.kept() * t, work.backward() * t
        if last:  # which keeps all logits, and at the end makes one tensor of them
            kept += work.H * (2 * w + e) * t
            words = work.V * t
            log_probabilities = e if e == 8 else 0  # of PyTorch's loss, which keeps them
            kept += log_probabilities * words
            of_loss = (loss_beside_logits(work) - e - log_probabilities) * words
            beside = max(beside + table, of_loss) + logits
            beside += table * (s == 0 and work.tied)
        alive = gradients = most = at_once = 0
        for kind, _ in BY_HAND[schedule](m, P, s):
            if kind == "B":
                most = max(most, gradients + alive * kept + beside, W + (alive - 1) * kept + beside)
                gradients = W  # beside what other microbatches keep
            alive += 1 if kind == "F" else -1
            at_once = max(alive, at_once)
        moments = {"a microbatch's backward": most, "end": W + 2 * logits * last}
        moments["optimizer"] = W + 2 * max(table, work.unit() * e)
        sent = work.T * work.H * e * ((s > 0) + (s < P - 1))
        sent += table * (work.tied and P > 1 == tables)
        stages.append(Rank(W, W, 2 * W, at_once * kept, moments, sent))
    most = max(stages, key=lambda stage: stage.peak)
    most.sent = sum(stage.sent for stage in stages) / P  # on average, as the others' is
    return most


def by_hand(work, P):
    """`data_parallel.py`: copies of all."""
    rank = step(work, loss_beside_logits)
    rank.sent = summed(work, rank, P)
    return rank


def ddp(work, P):
    """Gradients are views of DDP's buckets, and so there all the time."""
    rank = step(work, loss_beside_logits)
    rank.sent = ring(work, P, rank.parameters / work.e)
    rank.moments["loss"] += rank.gradients
    rank.moments["last layer"] += rank.gradients - work.table() * work.e
    return rank


def zero1(work, P):
    """DDP, and Adam's states of each parameter on one rank."""
    rank = ddp(work, P)
    rank.sent *= 1.5
    rank.states = max(rank.states / P, 2 * work.table() * work.e)
    return rank


def fully_sharded(work, P, tp=1, loss=loss_beside_logits, own=1.0, base_apart=False, more=0):
    """FSDP2: a P-th of everything; layers whole while they run, the ends from forward to backward.

    tp: ranks that share a layer besides. base_apart: embedding and last norm are a unit of their
    own, whole in forward and backward only. more: see `Work.kept`. Rows are padded.
    """
    rank = step(work, loss, tp, own, more)
    if P == 1:
        return rank
    e, whole, (n, k), f = work.e, rank.parameters, work.heads(tp), up(work.F, tp)
    rows = [(n * work.D, work.H), *[(k * work.D, work.H)] * 2, (work.H, n * work.D)]
    rows += [*[(f, work.H)] * 2, (work.H, f), *[(work.H, 1)] * 2]
    layer = (work.layer(tp) + sum((-of % P) * columns for of, columns in rows)) * e
    table = (up(up(work.V, tp), P) * P * work.H) * e
    ends = (1 if work.tied else 2) * table + up(work.H, P) * P * e
    total = work.L * layer + ends
    rank.moments["loss"] += table if base_apart else ends
    rank.moments["last layer"] += ends + 3 * layer
    rank.moments["first layer"] += (total - ends - layer) / P - whole + 2 * ends + 4 * layer
    rank.moments["embedding"] = (total - ends) / P + 4 * table
    rank.moments["optimizer"] = total / P + 2 * max(table, work.unit(tp) * e) / P
    rank.parameters = rank.gradients = total / P
    rank.states, rank.sent = 2 * total / P, (P - 1) / P * (3 * total - ends)
    if base_apart:
        rank.sent += (P - 1) / P * (table + work.H * e)
    return rank


def mesh_2d(work, P, tp, replicate=False):
    """`pretrain_2d.py`: a plan over tp that splits norms by tokens, and FSDP2 or copies over dp.

    Columns that cut through heads are gathered: k's, v's (each query head has its own), q's, o's.
    """
    dp, work = P // tp, replace(work, S=up(work.S, tp) * tp)
    (n, k), cut = work.heads(tp), work.K % tp > 0
    of_dp = 1 if replicate else dp, tp, dtensor_loss, 1 / tp, not work.tied
    rank = fully_sharded(work, *of_dp, 2 * (n - k) * work.D * cut)
    if replicate:
        rank.sent = summed(work, rank, dp, tp)
    cut = sum(up(heads * work.D, tp) * tp for heads in (work.K, work.N) if heads % tp)
    rank.sent += ring(work, tp, (2 * (2 * work.L + 1) * work.H + 2 * work.L * cut) * work.T)
    rank.mesh = f"dp {dp} x tp {tp}"
    return rank


def kv_cache(work, P):
    """`kv_cache.py`: generation; a prompt of S tokens, no gradients, and a rank's heads' cache."""
    _, k = work.heads(P)
    weights = work.parameters(P) * work.e
    cache = 2 * work.L * k * work.D * work.T * work.e
    moment = cache + (4 * work.H + 3 * up(work.F, P)) * work.T * work.e
    sent = ring(work, P, (2 * work.L + 1) * work.T * work.H)
    return Rank(weights, 0, 0, cache, {"forward": moment}, sent)


TECHNIQUES = {
    "one process": one_process,
    "tp": tensor_parallel,
    "dtensor": partial(tensor_parallel, loss=dtensor_loss),
    "megatron-sp": partial(tensor_parallel, by_tokens=True),
    "ulysses": split_sequence,
    "ring": partial(split_sequence, u=1),
    "usp": usp,
    "tp x ulysses": split_sequence,
    "tp x ring": partial(split_sequence, u=1),
    "finetune": finetuning,
    "gpipe": partial(pipeline, schedule="gpipe"),
    "1f1b": pipeline,
    "by-hand": by_hand,
    "ddp": ddp,
    "zero1": zero1,
    "fsdp2": fully_sharded,
    "2d": mesh_2d,
    "2d, copies": partial(mesh_2d, replicate=True),
    "kv-cache": kv_cache,
}


TILED = "one process", "tp", "megatron-sp", "ulysses", "ring", "usp", "tp x ulysses", "tp x ring"
MESHES = "usp", "tp x ulysses", "tp x ring", "2d", "2d, copies"


def estimates(technique, work, P):
    """Every way in which P ranks can do it, [Rank]; raises UserError where there is none."""
    function = TECHNIQUES[technique]
    if work.tile and technique not in TILED:
        raise UserError("not worked out with recomputed layers and tiles")
    if technique not in MESHES:
        return [replace(function(work, P), mesh="")]
    ways, why = [], None
    for side in (side for side in range(1, min(P, work.N) + 1) if P % side == 0):
        try:
            ways.append(function(work, P, side))
        except UserError as error:
            why = error
    if not ways:
        raise why
    return ways
