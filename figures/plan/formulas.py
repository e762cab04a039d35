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

Where layers are recomputed and logits come in tiles, a layer keeps its input alone, T H e; the rest
is there for one layer at a time, and the logits for one tile. Attention is a fused kernel's, which
keeps no scores. (On a GPU in float32 there is none for grouped queries: add B N S^2 numbers a
layer.)

What the techniques make of it is in `techniques.py`.
"""

from dataclasses import dataclass

from utils.partition import shard_heads


def up(number, parts):
    """The largest share of `number` things that are dealt to `parts` ranks."""
    return -(-number // parts)


@dataclass
class Work:
    """A model's sizes, and what it is trained on: B sequences of S tokens where a batch is shared.

    (The ranks of one model share these B; along dp each replica has as many others.) e: bytes of a
    number. tile: None, or layers are recomputed, and logits come, twice, in tiles of so many tokens
    of all sequences.
    """

    config: object
    S: int
    B: int = 1
    e: int = 4
    microbatches: int = 4
    tile: int | None = None

    def __post_init__(self):
        c = self.config
        self.w, self.T = max(self.e, 4), self.B * self.S
        self.H, self.F, self.V = c.hidden_size, c.intermediate_size, c.vocab_size
        self.N, self.K, self.D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.L, self.tied = c.num_hidden_layers, c.tie_word_embeddings

    def heads(self, P, of=max):
        """The most query heads and KV heads of a rank; UserError for more ranks than heads."""
        shard_heads(self.N, self.K, P, 0)
        both = [shard_heads(self.N, self.K, P, rank)[:2] for rank in range(P)]
        return [of(stop - first for first, stop in kind) for kind in zip(*both, strict=True)]

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
def own_loss(work):  # `utils/losses.py`, and Task 2's: logits, softmax, and it in half precision
    return work.e + work.w + work.e * (work.e < work.w)


def plain_loss(work):  # `token_losses`: in float64 PyTorch's, whose softmax and gradients are apart
    return 3 * work.e if work.e == 8 else own_loss(work)


def loss_beside_logits(work):  # the same, in a step that returns its logits
    return 4 * work.e if work.e == 8 else own_loss(work)


def dtensor_loss(work):  # PyTorch's `loss_parallel`
    return 4 * work.w + work.e * (work.e < work.w)


def step(work, loss, P=1, own=1.0, more=0, tokens=None):
    """A rank of P that share heads, units, words. tokens: its; own, more: see `Work.kept`."""
    T, e, L = tokens or work.T, work.e, work.L
    weights = work.parameters(P) * e
    table, one, rows = work.table(P) * e, work.kept(P, own, more) * T, T
    layer, last = work.backward(P) * T, own * work.H * (2 * work.w + work.e) * T
    layer += work.H * e * T * (P > 1 and own == 1)  # f's sum, beside what it is of
    kept, others = L * one, 0  # by all layers; by those before the one that is run again
    if work.tile:
        rows, others = min(work.tile, T), work.H * own * T * e
        kept, others = L * others, (L - 1) * others
        last += work.H * own * T * e  # the gradient of hidden states, tile by tile
    words = up(work.V, P) * rows
    # The MLP's gradients come before those of the rest of a layer's weights.
    late = work.layer(P) * e - work.unit(P) * e
    moments = {
        "loss": kept + last + words * loss(work) + table * (work.tile is not None),
        "last layer": (others + one if work.tile else kept) + table + layer,
        "first layer": weights - late - (0 if work.tied else table) + one + layer,
        "embedding": weights + (2 * table if work.tied else 0),
        "optimizer": weights + 2 * max(table, work.unit(P) * e),
    }
    return Rank(weights, weights, 2 * weights, kept + last + words * work.w, moments)
