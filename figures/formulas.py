"""What a rank holds and sends in a training step, in closed form, by technique.

A rank has T tokens. A number takes e bytes; w is e, or 4 if e is less. Of N query heads, K KV heads
and F units of an MLP the rank has n, k and f. A layer then keeps for its backward:

    two norms               2 T H (w + e)     their input, and what comes before their weight
    what goes into blocks   2 T H e
    attention               T D (2n + 2k) e   q, k, v, and its output; and log-sum-exps
    MLP                     4 T f e           gate, its activation, up, and their product

The peak is the weights, AdamW's states (2 numbers a parameter), and the largest of:

    loss         all layers' activations, and the logits with what the loss makes of them
    last layer   all layers' activations, the head's gradient, and the layer's backward
    first layer  all gradients, and one layer's activations and backward
    embedding    all gradients; with tied weights two more of the embedding's size
    optimizer    all gradients, and twice the largest parameter

Attention is a fused kernel's, which keeps no scores. (On a GPU in float32 there is none for grouped
queries: add B N S^2 numbers a layer.) `estimate_check.py` holds the formulas against steps that are
run, but for "finetune" and "kv-cache". Threads are one process: the sum of gpipe's stages.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tasks"))

import torch

from longest import ours
from memory.finetune import default_tile_mib
from memory.head_groups import plan_rounds
from pipeline_llama import BY_HAND
from utils.errors import UserError
from utils.shards import balance, shard_heads


def up(number, parts):
    """The largest share of `number` things that are dealt to `parts` ranks."""
    return -(-number // parts)


@dataclass
class Work:
    """A model's sizes, and what it is trained on: B sequences of S tokens where a batch is shared.

    (By all ranks of a model; along dp each has as many.) e: bytes of a number.
    """

    config: object
    S: int
    B: int = 1
    e: int = 4
    microbatches: int = 4

    def __post_init__(self):
        c = self.config
        self.w, self.T = max(self.e, 4), self.B * self.S
        self.H, self.F, self.V = c.hidden_size, c.intermediate_size, c.vocab_size
        self.N, self.K, self.D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.L, self.tied = c.num_hidden_layers, c.tie_word_embeddings

    def heads(self, P):
        """The most query heads and KV heads of a rank; UserError for more ranks than heads."""
        shard_heads(self.N, self.K, P, 0)
        both = [shard_heads(self.N, self.K, P, rank)[:2] for rank in range(P)]
        return [max(stop - first for first, stop in kind) for kind in zip(*both, strict=True)]

    def layer(self, P=1):
        """Parameters of a layer, of which P ranks share heads and units."""
        (n, k), H, f, c = self.heads(P), self.H, up(self.F, P), self.config
        bias = c.attention_bias * (self.D * (n + 2 * k) + H) + c.mlp_bias * (2 * f + H)
        return 2 * H * self.D * (n + k) + 3 * H * f + 2 * H + bias

    def table(self, P=1):
        """Numbers of the embedding, of whose rows P ranks have a share each."""
        return up(self.V, P) * self.H

    def unit(self, P=1):
        """Numbers of a layer's largest weight."""
        return self.H * max(up(self.F, P), self.heads(P)[0] * self.D)

    def ends(self, P=1):
        """Parameters of embedding, last norm and head."""
        return self.table(P) * (1 if self.tied else 2) + self.H

    def parameters(self, P=1):
        """All of a rank's."""
        return self.L * self.layer(P) + self.ends(P)

    def kept(self, P=1, own=1.0, more=0):
        """Bytes a token that a layer keeps. own: norms' share of the tokens; more: of numbers."""
        (n, k), H, w, e = self.heads(P), self.H, self.w, self.e
        norms = 2 * own * (H * (w + e) + w) + 2 * H * e
        attention = self.D * (2 * n + 2 * k) * e + n * w
        return norms + attention + 4 * up(self.F, P) * e + more * e

    def backward(self, P=1):
        """Bytes a token that a layer's backward takes for a while: gradients of units, and of x."""
        return (2 * up(self.F, P) + 2 * self.H) * self.e


@dataclass
class Rank:
    """Bytes of one rank. peak: the largest moment, beside parameters and states."""

    parameters: float
    gradients: float
    states: float
    kept: float
    moments: dict
    sent: float = 0.0
    mesh: str = ""

    @property
    def peak(self):
        return self.parameters + self.states + max(self.moments.values())


# Bytes of a word's logit, and of what the loss makes of it at once, by who computes it.
def plain_loss(work):  # `model_checks.token_losses`: logits, log-sum-exp's own, and two gradients
    return 4 * work.w


def split_loss(work):  # Task 2's: logits, and their gradient; half precision, and both in float32
    return 2 * work.w + work.e * (work.e < work.w)


def dtensor_loss(work):  # PyTorch's `loss_parallel`
    return 4 * work.w + work.e * (work.e < work.w)


def step(work, loss, P=1, own=1.0, more=0, tokens=None):
    """A rank of P that share heads, units, words. tokens: its; own, more: see `Work.kept`."""
    T, e, L = tokens or work.T, work.e, work.L
    weights = work.parameters(P) * e
    table, kept, words = work.table(P) * e, work.kept(P, own, more) * T, up(work.V, P) * T
    layer, last = work.backward(P) * T, own * work.H * (2 * work.w + work.e) * T
    moments = {
        "loss": L * kept + last + words * loss(work),
        "last layer": L * kept + table + layer,
        "first layer": weights - (0 if work.tied else table) + kept + layer,
        "embedding": weights + (2 * table if work.tied else 0),
        "optimizer": weights + 2 * max(table, work.unit(P) * e),
    }
    return Rank(weights, weights, 2 * weights, L * kept + last + words * work.w, moments)


# ---------------------------------------------------------------- the techniques


def ring(work, P, numbers):
    """Bytes that a rank sends in an all-reduce of so many."""
    return 2 * (P - 1) / P * numbers * work.e


def one_process(work, P):
    """The unmodified model, alone."""
    if P > 1:
        raise UserError("one process")
    return step(work, plain_loss)


def tensor_parallel(work, P, loss=split_loss):
    """Tasks 2 and 3: an all-reduce of all tokens at each f and g."""
    rank = step(work, loss, P)
    rank.sent = ring(work, P, 2 * (2 * work.L + 1) * work.T * work.H)
    if P > work.K:  # several hold a KV head, and add up its gradients
        rank.sent += ring(work, P / work.K, 2 * work.H * work.D * work.L)
    return rank


def summed(work, rank, P, tp=1):
    """The sum of gradients; of half precision, over more than two ranks, parts are beside them."""
    if work.e < 4 and P > 2:
        largest = max(work.table(tp) * work.e, work.unit(tp) * work.e, 2**25)
        rank.moments["sum of gradients"] = rank.gradients + 4 * largest
    return ring(work, P, rank.parameters / work.e)


def ulysses(work, P):
    """Task 4: all weights, some tokens; what o_proj is given is not what attention gives."""
    work.heads(P)  # which refuses more ranks than query heads
    more = work.D * (work.N + 2 * (max(work.K, P) - work.K))
    rank = step(work, plain_loss, tokens=up(work.T, P), more=more * (P > 1))
    rank.sent = all_to_alls(work, P, 4 * (work.N + max(work.K, P))) + summed(work, rank, P)
    return rank


def all_to_alls(work, P, heads):
    """Bytes of all layers', by the heads of a token that travel, forward and backward."""
    return work.L * (P - 1) / P * up(work.T, P) * work.D * heads * work.e


def finetuning(work, P):
    """Task 5: a virtual prompt is trained; large things in parts, attention never run again.

    In the backward q, k, v and outputs travel again; a KV head does in each round that needs it.
    """
    weights = work.parameters() * work.e
    tile = default_tile_mib(torch.device("cpu")) * 2**20
    kept = ours(work.config, P, work.e, ()) * up(work.T, P)
    rounds = chain.from_iterable(plan_rounds(work.config, P, True))
    heads = sum(stop - first for queries_and_keys in rounds for first, stop in queries_and_keys)
    sent = all_to_alls(work, P, 6 * heads)
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
            kept += (work.H * (2 * w + e) + work.V * w * (e < w)) * t
            beside = max(beside + table, 3 * work.V * t * w) + logits
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
    rank = step(work, plain_loss)
    rank.sent = summed(work, rank, P)
    return rank


def ddp(work, P):
    """Gradients are views of DDP's buckets, and so there all the time."""
    rank = step(work, plain_loss)
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


def fully_sharded(work, P, tp=1, loss=plain_loss, own=1.0, base_apart=False, more=0):
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
    "ulysses": ulysses,
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


def estimates(technique, work, P):
    """Every way in which P ranks can do it, [Rank]; raises UserError where there is none."""
    function = TECHNIQUES[technique]
    if not technique.startswith("2d"):
        return [function(work, P)]
    return [function(work, P, tp) for tp in range(1, min(P, work.N) + 1) if P % tp == 0]
