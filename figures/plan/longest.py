"""How long a sequence may be under a limit on memory, in closed form: of ours and of others.

For each contender the tensors that it holds when it holds most, and on a GPU how PyTorch lays
these into memory. `figures/bench/longest.py` holds the estimates against runs.
"""

from figures.plan.formulas import up
from harness.finetune import default_tile_mib

# What libraries keep for themselves, and what small tensors add up to: seen, not counted. More of
# it where operators pass through Python to be told apart.
OTHER = 8 * 2**20
OTHER_SELECTIVE = 13 * 2**20

# A contender is told as moments in which it may hold most, {moment: [(how many, bytes a token of
# each), ...]}: its tensors of that moment. A moment whose name begins with TILE holds a tile, too.
# w: bytes of what is float32 at least; a softmax's log-sum-exps always are.
TILE = "a tile of"


def hugging_face(c, ranks, e, on_gpu, checkpointing):
    """When the loss is differentiated: what all layers keep, and three times logits.

    With frozen weights a linear layer keeps nothing. Kept are the inputs of two norms; q and k
    after RoPE, v, and attention's output; the MLP's gate, its activation, and what it multiplies.
    The logits' log-softmax, its gradient, and theirs.
    """
    H, F, V, ND, KD = sizes(c)
    w, L = max(e, 4), c.num_hidden_layers
    layers = [(2 * L, w * H), (2 * L, e * ND), (2 * L, e * KD), (3 * L, e * F)]
    layers = [(L, e * H)] if checkpointing else layers
    return {"the loss's backward": [*layers, (3, e * H), (3, w * V)]}


def ours(c, ranks, e, on_gpu, left_out=()):
    """The moments at which ours may hold most, in bytes for each of a rank's own tokens.

    left_out: the technique that is off; or "offload", which is on.
    """
    H, F, V, ND, _ = sizes(c)
    L, D, groups = c.num_hidden_layers, c.head_dim, "head-groups" not in left_out
    N, K, w = c.num_attention_heads, c.num_key_value_heads, max(e, 4)
    # Heads in flight, on all ranks together, and how often.
    n, k = (max(N // K, ranks), ranks) if groups else (N, max(K, ranks))
    rounds = up(N, n)
    # Of each layer attention's outputs, a tensor a round, and their log-sum-exps.
    kept, a_layer = L, [(rounds, e * n * D), (rounds, w * n)]
    if "offload" in left_out:  # on their way to the host, or back, and the one that is used
        kept = min(2, L)
    layers = [(kept * many, size) for many, size in a_layer]
    hidden = 1, e * H  # of all of a rank's tokens
    # The last layer's backward: its input; the gradients behind it, and of attention's outputs; q,
    # k and v in one piece; dq; dk and dv, as the kernel gives them for each query head, and summed.
    backward = [*layers, hidden, hidden, (rounds, e * n * D), (1, e * (n + 2 * k) * D)]
    backward += [(3, e * n * D)] + [(2, e * k * D)] * (n > k)
    if k > ranks:  # several KV heads of a rank, each repeated for its query heads
        backward += [(2, e * n * D)]
    if on_gpu and e < 4:  # FlashAttention's own: dq in float32, and a number a token and head
        backward += [(1, w * n * D), (1, w * n)]
    # The end of the loss: embeddings, the last layer's input and output, and its gradient; once
    # the last tile is gone, a copy of the gradient.
    if "offload" in left_out:  # that input is on its way to the host, and one layer's outputs
        layers = a_layer
    loss = [*layers, *[hidden] * 4]
    moments = {"attention's backward": backward, f"{TILE} the loss": loss,
               "the loss's gradient": [*loss, hidden]}  # fmt: skip
    if "saved-outputs" in left_out:
        # All layers' inputs. For one round: the gradients behind the layer, before it, and of all
        # outputs; q, k and v in one piece, and sent; the output, and gradients of it, q, k and v.
        moments = {"attention's backward": [
            (L + 2, e * H), (1, e * ND), (2, e * (n + 2 * k) * D), (5, e * n * D)]}  # fmt: skip
    if "tiled-loss" in left_out:  # logits, softmax; x and its gradient, before and behind a norm
        words = [(1, e * V), (1, w * V)] + [(1, e * V)] * (e < w)
        moments["the loss's backward"] = [*layers, hidden, *words, (4, e * H)]
    if "tiled-mlp" in left_out:
        # d, do, o; gate, its activation, what it multiplies, and gradients; the norm's, and y.
        moments["the MLP's backward"] = [*layers, (5, e * H), (2, e * ND), (6, e * F)]
    return moments


def selective(c, ranks, e, on_gpu):
    """In the backward of the last layer's attention.

    Kept are layers' inputs, attention's outputs and their log-sum-exps. Then, the layer being run
    again: q, k and v in one piece, keys and values repeated for their queries; the gradients behind
    the layer and before it, of the outputs, and of q, k and v as the kernel gives them.
    """
    H, _, _, ND, KD = sizes(c)
    L, N, w = c.num_hidden_layers, c.num_attention_heads, max(e, 4)
    moment = [(L, e * H), (L, e * ND), (L, w * N), (1, e * (ND + 2 * KD)), (2, e * H), (4, e * ND)]
    moment += [(2, e * ND)] * (KD < ND)
    if on_gpu and e < 4:
        moment += [(1, w * ND), (1, w * N)]
    return {"attention's backward": moment}


def sizes(c):
    D = c.head_dim
    return (c.hidden_size, c.intermediate_size, c.vocab_size, c.num_attention_heads * D,
            c.num_key_value_heads * D)  # fmt: skip


TRICKS = ("saved-outputs", "tiled-loss", "tiled-mlp", "head-groups")
LEFT_OUT = {f"ours, no {trick}": trick for trick in TRICKS}
SEGMENTS = "ours, expandable segments"
CONTENDERS = {
    # name: (its moments, flags)
    "Hugging Face + PEFT": (lambda *a: hugging_face(*a, False), []),
    "with checkpointing": (lambda *a: hugging_face(*a, True), ["--gradient-checkpointing"]),
    # PyTorch's own, of the layers; loss and MLP in parts as ours.
    "selective checkpoint": (selective, ["--selective-checkpoint", "--no-head-groups"]),
    "ours": (ours, []),
    SEGMENTS: (ours, []),  # by an allocator that grows a segment: see `estimate`
    "ours, offload": (lambda *a: ours(*a, ("offload",)), ["--offload"]),
    **{
        name: (lambda *a, t=trick: ours(*a, (t,)), [f"--no-{trick}"])
        for name, trick in LEFT_OUT.items()
    },
}


PLAIN = "Hugging Face + PEFT", "with checkpointing"  # nothing of theirs is in parts
ON_GPU = "ours, offload", SEGMENTS  # the others, anywhere


def a_token(name, c, ranks, e, on_gpu=False):
    """Bytes of tensors for each of a rank's tokens, in the moment in which they are most."""
    moments = CONTENDERS[name][0](c, ranks, e, on_gpu).values()
    return max(sum(many * size for many, size in moment) for moment in moments)


def segments(moment, tokens):
    """Bytes that PyTorch's CUDA allocator takes for a moment's tensors.

    It lays tensors of up to 1 MiB into segments of 2 MiB, of less than 10 MiB into segments of 20;
    a larger one has its own, of a multiple of 2 MiB. (c10/cuda/CUDACachingAllocator.) Of 5 MiB and
    a little each, 3 fit into 20: a quarter is lost. Here a segment holds tensors of one kind.
    """
    total = 0
    for many, size in moment:
        size = up(size * tokens, 512) * 512
        segment = 2 if size <= 2**20 else 20 if size < 10 * 2**20 else 2 * up(size, 2**21)
        total += up(many, segment * 2**20 // size) * segment * 2**20
    return total


def tensors(moment, tokens):
    """Bytes of a moment's tensors themselves."""
    return sum(many * size for many, size in moment) * tokens


def most(name, c, e, tokens, tile, count=segments, on_gpu=True):
    """Bytes that one rank takes beyond the model for so many tokens; tile: bytes of one."""
    moments = CONTENDERS[name][0](c, 1, e, on_gpu)
    return max(count(moment, tokens) + tile * what.startswith(TILE)
               for what, moment in moments.items())  # fmt: skip


def other(name):
    return OTHER_SELECTIVE if name == "selective checkpoint" else OTHER


def tile_of(name, budget, device):
    """Bytes of a tile where there is a budget in bytes; nothing of the plain ones is in tiles."""
    return default_tile_mib(device, budget) * 2**20 * (name not in PLAIN)


def expected(name, c, e, tokens, budget, device):
    """Bytes of tensors that a GPU's rank takes for so many tokens, and what libraries keep."""
    return most(name, c, e, tokens, tile_of(name, budget, device), tensors) + other(name)


def estimate(name, c, ranks, e, budget, device):
    """Positions that fit into a budget in bytes on each rank.

    On a GPU the limit is on segments, which the allocator makes; expandable ones are as large as
    what is in them. On a CPU every large tensor is a mapping of its own, of pages.
    """
    tile, room = tile_of(name, budget, device), budget - other(name)
    if device.type == "cpu":
        return int((room - tile) / a_token(name, c, ranks, e)) * ranks
    count = tensors if name == SEGMENTS else segments
    fewest, too_many = 0, room  # a token takes a byte at least
    while too_many - fewest > 1:
        middle = (fewest + too_many) // 2
        fits = most(name, c, e, middle, tile, count) <= room
        fewest, too_many = (middle, too_many) if fits else (fewest, middle)
    return fewest * ranks
