"""The longest sequence: a training step that holds as little as possible for each token.

What fills the memory when a Llama is trained on one long sequence is neither weights nor attention
scores (which no fused kernel keeps) but what the backward needs of every token. Of `random/small`
(8 layers, hidden 256, MLP 1024, 32000 tokens, float32, frozen weights) a token takes, in KiB:

    510   Hugging Face: three times the logits (375), and each layer's activations (17 a layer)
    386   with checkpointing: the same of the logits, and one hidden state (1) a layer
     15   with loss, MLP and attention in parts, too: hidden states, one layer's temporaries
     14   with what `saved_outputs.py` does: attention's outputs (1 a layer), a part's temporaries

`saved_outputs.py` is a backward of layers that never runs attention again. A selective checkpoint
(arXiv 2310.03294) would keep each layer's input, too; here only the last one's is kept. All of a
layer but attention treats tokens one by one, and is rebuilt from attention's outputs: in as little
memory as if layers were recomputed, and in less time.

Under Ulysses all works as on one rank: tiles are of a rank's own tokens, and the heads of a round
are spread over the ranks. With saved outputs each round takes six all-to-alls; with checkpointing,
all heads at once take six.

`sequence_loss` is what a training script calls. Sources: checkpointing, arXiv 1604.06174; tiled
loss and MLP, ALST, arXiv 2506.13996, section 3; log-sum-exps, FlashAttention-2, arXiv 2307.08691.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from guards.adapters import check_by_token, dropping_adapter
from memory.head_groups import plan_rounds, project, sliceable
from memory.packed import attend_parts, attend_parts_backward, parts_of
from memory.saved_outputs import SavedOutputs
from memory.tiled_loss import TiledLoss, tiles
from ring_attention import Ring, RingAttention, RingLlama, ring_backward, ring_forward
from ulysses_forward import AllToAll, by_documents
from utils.collectives import group_of_axis
from utils.kernels import ATTENTION_OPS, attend, attend_backward, repeat_kv_heads
from utils.llama import window_of
from utils.partition import shard_range
from utils.sequence import MaskInfo, check_window, documents_of, sum_of_losses


@dataclass(frozen=True)
class Techniques:
    """How a step saves memory. Alone or together, techniques change gradients by rounding only.

    backward: "saved-outputs", "selective" (recompute layers but for attention, whose outputs are
    kept, too), "checkpoint" (recompute all of a layer) or "plain" (keep everything).
    tiled_loss, tiled_mlp: run in tiles of tokens, whose largest tensors take `tile_bytes`, whatever
    the sequence's length. head_groups: attention one group of heads after another. offload: what is
    kept of each layer goes to host memory (CUDA). tile_tokens: the size of tiles, if not by bytes.
    """

    backward: str = "saved-outputs"
    tiled_loss: bool = True
    tiled_mlp: bool = True
    head_groups: bool = True
    offload: bool = False
    tile_bytes: int = 2**23
    tile_tokens: int | None = None

    def tile(self, numbers, itemsize):
        """Return how many tokens are a tile, each with so many numbers of `itemsize` bytes."""
        return self.tile_tokens or max(1, self.tile_bytes // (numbers * itemsize))


def sequence_loss(model, embeddings, targets, length, mesh, techniques, positions=None):
    """Sum the losses of this rank's tokens, as `utils/sequence.py` does, but in less memory.

    Layers are taken apart: hooks on them are not called. Raises ValueError for layers that are not
    Hugging Face's own, for techniques that `supported_techniques` does not allow, and for dropout
    that the model's own forward refuses, too.

    model: a sequence-parallel LlamaForCausalLM. embeddings(): the embeddings of this rank's share
    of a sequence of `length` tokens, (B, S/P, H), each time in a new tensor. targets: (B, S/P),
    -100 if a token has none. mesh: of the one axis on which the sequence is split. positions: all
    tokens' positions, (B or 1, S); a document begins where they jump, as in Task 4's forward. None:
    0, 1, 2, ...
    """
    from guards.refusals import refuse_across_tokens, refuse_dropout

    if why := supported_techniques(model, techniques)[1]:
        raise ValueError(f"{why}: ask `supported_techniques` for the techniques that are left")
    # Layers are called without the hooks that refuse this in the model's own forward.
    group = group_of_axis(mesh)
    if group.size() > 1:
        refuse_across_tokens(model)
    if group.size() > 1 or isinstance(model, RingLlama):
        refuse_dropout(model)
    if positions is None:
        positions = torch.arange(length, device=model.device)[None]
    stack = Stack(model, embeddings, len(targets), positions, group, techniques)
    norm, head = model.model.norm, model.lm_head

    def loss_of(hidden):
        if not techniques.tiled_loss:
            return sum_of_losses(head(norm(hidden)), targets)
        size = hidden.element_size()  # half types have a float32 copy, too
        tile = techniques.tile(head.weight.shape[0], size if size > 2 else size + 4)
        weights = norm.weight, head.weight
        return TiledLoss.apply(hidden, targets, norm, tile, torch.is_grad_enabled(), *weights)

    if techniques.backward == "saved-outputs" and torch.is_grad_enabled():
        last = [p for p in (*norm.parameters(), *head.parameters()) if p.requires_grad]
        total = SavedOutputs.apply(embeddings(), stack, loss_of, *stack.parameters, *last)
    else:
        total = loss_of(stack.run(embeddings()))
    # Without any label the gradients are 0, also in a mean, which divides by 0: see `losses.py`.
    return total.masked_fill((targets == -100).all(), 0)


# Attention classes that `Stack` runs in parts: projections, norms of heads, RoPE, attention.
TAKEN_APART = {f"{name}Attention" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")}


def supported_techniques(model, techniques):
    """Return the techniques that this model allows, and why they are fewer than asked for, or None.

    Raises ValueError for layers that cannot be taken apart, and as `check_by_token` does.
    """
    if hasattr(model, "get_ring") or any(getattr(x, "slices", ()) for x in model.modules()):
        raise ValueError("layers are taken apart with Ulysses or a ring: not with USP or slices")
    check_by_token(model)
    fewer = techniques
    # in_one: why attention takes all heads at once and is recomputed; kernel: why it is recomputed.
    in_one, kernel = None, None
    if model.training and model.config.attention_dropout:
        in_one = "attention has dropout"
    for layer in model.model.layers:
        attention = layer.self_attn
        if any(isinstance(module, nn.Dropout) and module.p for module in layer.modules()):
            in_one = "a layer has dropout"
        if type(attention).__name__ not in TAKEN_APART:
            raise ValueError(f"layers with {type(attention).__name__} cannot be taken apart")
        if not all(map(sliceable, (attention.q_proj, attention.k_proj, attention.v_proj))):
            in_one = "a projection is neither linear nor LoRA"
    on_gpu, head_dim = model.device.type == "cuda", model.model.layers[0].self_attn.head_dim
    half = model.dtype.itemsize == 2
    old = on_gpu and torch.cuda.get_device_capability(model.device) < (8, 0)
    none = model.dtype == torch.float64 or head_dim % 8 or (half and (old or head_dim > 256))
    if on_gpu and none:
        kernel = f"no GPU kernel gives log-sum-exps of {model.dtype} heads of {head_dim} here"
    if isinstance(model, RingLlama) and fewer.backward == "selective":
        fewer, kernel = replace(fewer, backward="checkpoint"), "a ring is not one kernel"
    if name := dropping_adapter(model):
        in_one = f"{name} drops parts of an adapter's weights"
    if in_one:
        fewer = replace(fewer, head_groups=False)
    if fewer.backward in ("saved-outputs", "selective") and (in_one or kernel):
        fewer = replace(fewer, backward="checkpoint")
    head = None
    plain = type(model.lm_head) is nn.Linear and model.lm_head.bias is None
    if not plain or "RMSNorm" not in type(model.model.norm).__name__:
        head = "the LM head or its norm is not plain (an adapter, a bias)"
        fewer = replace(fewer, tiled_loss=False)
    return fewer, None if fewer == techniques else in_one or kernel or head


# ---------------------------------------------------------------- the layers


class Stack:
    """All layers of a model, taken apart: what works token by token, and what works head by head.

    Hidden states are (B, S/P, H). One round of attention, on each rank:

        x, a tile of tokens -> norm, q, k, v of the round's heads, RoPE     `qkv_of_tokens`
          -> for each rank its heads, (S/P, B, n + 2k, D), one piece after another in a flat tensor
          -> all-to-all -> (S, B, n + 2k, D) -> (B, heads, S, D)            `to_heads`
          -> attention, (B, n, S, D)
          -> all-to-all -> flat again, of each rank's heads (S/P, B, n, D)  `to_tokens`

    Tokens come first in a piece, so that the pieces that arrive are the sequence, in order. Without
    a ring, each document of a packed row takes its own call of attention's kernel.
    """

    def __init__(self, model, embeddings, batch_size, positions, group, techniques):
        self.model, self.layers, self.group = model.model, model.model.layers, group
        self.embeddings, self.techniques, config = embeddings, techniques, model.config
        length, documents = positions.shape[1], documents_of(positions).expand(batch_size, -1)
        check_window(window_of(config), length)
        self.documents = documents if documents.any() else None
        self.B, self.S, self.D = batch_size, length, self.layers[0].self_attn.head_dim
        ranks, self.rank = group.size(), group.rank()
        shares = [shard_range(length, ranks, rank) for rank in range(ranks)]
        self.tokens = [stop - first for first, stop in shares]
        own, self.local_tokens = slice(*shares[self.rank]), self.tokens[self.rank]
        self.positions = positions[:, own]
        self.attend, self.attend_backward, self.ring = attend, attend_backward, None
        if isinstance(model, RingLlama):  # its ranks exchange no heads: each is as if alone
            mask = MaskInfo(length, documents=self.documents)
            self.ring = Ring(group, length, model.zigzag, mask)
            self.positions = positions[:, self.ring.order()[own]]
            self.attend = partial(ring_forward, self.ring)
            self.attend_backward = partial(ring_backward, self.ring)
            ranks, self.rank = 1, 0
            self.tokens, self.S = [self.local_tokens], self.local_tokens
        elif self.documents is not None:
            parts = parts_of(documents)
            self.attend = partial(attend_parts, parts)
            self.attend_backward = partial(attend_parts_backward, parts)
        self.dropout = config.attention_dropout if model.training else 0.0
        self.rounds = plan_rounds(config, ranks, techniques.head_groups)
        self.made = {}  # what `indices` returns, made once, not for each tile of each pass
        # The backward of a layer's rest takes some six tensors as wide as the MLP.
        a_token = 6 * (config.intermediate_size + config.hidden_size) * self.B
        tile = (
            techniques.tile(a_token, model.dtype.itemsize)
            if techniques.tiled_mlp
            else self.local_tokens
        )
        self.tiles = tiles(self.local_tokens, max(tile, 1))
        self.parameters = [p for p in self.layers.parameters() if p.requires_grad]
        # How many hidden states fit into the memory of one layer's attention outputs.
        self.room = config.num_attention_heads * self.D / config.hidden_size

    def counts(self, head_round, keys=0):
        """Count each rank's heads in a round: its query heads, and `keys` times its KV heads."""
        return [q[1] - q[0] + keys * (k[1] - k[0]) for q, k in head_round]

    def sizes(self, counts):
        """Return how many elements this rank sends to, and receives from, each rank."""
        sent = [self.local_tokens * self.B * count * self.D for count in counts]
        return sent, [t * self.B * counts[self.rank] * self.D for t in self.tokens]

    def pieces(self, flat, counts):
        """Return views of this rank's tokens, (S/P, B, counts[r], D) for each rank r's heads."""
        sizes = flat.split(self.sizes(counts)[0])
        return [
            p.view(self.local_tokens, self.B, n, self.D) for p, n in zip(sizes, counts, strict=True)
        ]

    def to_heads(self, flat, counts):
        """Turn all heads of this rank's tokens into its heads of all tokens, (B, heads, S, D)."""
        flat = self.exchange(flat, *self.sizes(counts))
        return flat.view(self.S, self.B, -1, self.D).permute(1, 2, 0, 3)

    def to_tokens(self, heads, counts):
        """Turn tensors (B, heads, S, D), put side by side, back into local tokens' heads, flat.

        The list is emptied: its tensors need not outlive the message that is made of them.
        """
        sent, received = self.sizes(counts)
        flat = torch.cat([h.permute(2, 0, 1, 3) for h in heads], dim=2).flatten()
        heads.clear()
        return self.exchange(flat, received, sent)

    def exchange(self, flat, sent, received):
        """Run an all-to-all. Without autograd, on a CPU, the memory of what is sent is freed."""
        if len(sent) == 1:
            return flat
        out = AllToAll.apply(flat, sent, received, self.group)
        if flat.device.type == "cpu" and not torch.is_grad_enabled():
            flat.untyped_storage().resize_(0)  # gloo's thread may hold on to it for some time
        return out

    def qkv_of_tokens(self, layer, x, at, head_round):
        """Compute a round's q, k, v of tokens `at`: a piece (tokens, B, heads, D) for each rank."""
        normed = layer.input_layernorm(x)
        cos, sin = self.model.rotary_emb(x, self.positions[:, at])
        queries, keys = zip(*head_round, strict=True)

        def heads(linear, ranges):
            chosen, rows = self.indices(ranges, x.device)
            if self.techniques.head_groups:
                return project(linear, normed, rows).unflatten(-1, (-1, self.D))
            return linear(normed).unflatten(-1, (-1, self.D))[:, :, chosen]

        attention = layer.self_attn
        q, k = heads(attention.q_proj, queries), heads(attention.k_proj, keys)
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        if getattr(attention, "use_rope", True):  # not in each layer of SmolLM3
            q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
        all_three = (q, queries), (k, keys), (heads(attention.v_proj, keys), keys)
        split = [t.split([stop - first for first, stop in ranges], 2) for t, ranges in all_three]
        return [torch.cat(three, 2).transpose(0, 1) for three in zip(*split, strict=True)]

    def indices(self, ranges, device):
        """Return the indices of heads in `ranges`, and of a projection's outputs for them."""
        if ranges not in self.made:
            chosen = torch.cat([torch.arange(*some, device=device) for some in ranges])
            rows = chosen[:, None] * self.D + torch.arange(self.D, device=device)
            self.made[ranges] = chosen, rows.flatten()
        return self.made[ranges]

    def in_order(self, flats):
        """Split rounds' flat attention outputs into pieces (S/P, B, heads, D), sorted by head."""
        pairs = []
        for head_round, flat in zip(self.rounds, flats, strict=True):
            pieces = self.pieces(flat, self.counts(head_round))
            pairs += [
                (queries, piece) for (queries, _), piece in zip(head_round, pieces, strict=True)
            ]
        return [piece for _, piece in sorted(pairs, key=lambda pair: pair[0])]

    def outputs(self, pieces, at):
        """Join attention's outputs of tokens `at`, (B, tokens, N D), from pieces `in_order`."""
        return torch.cat([p[at] for p in pieces], 2).transpose(0, 1).flatten(2)

    @staticmethod
    def finish(layer, x, o):
        """Run the rest of a layer, after attention: x (B, tokens, H), o (B, tokens, N D)."""
        x = x + layer.self_attn.o_proj(o)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    # ------------------------------------------------ with autograd

    def causal(self, q, k, v):
        """Run causal attention: (B, heads, S, D)."""
        return F.scaled_dot_product_attention(q, k, v, None, self.dropout, is_causal=True)

    def run(self, x):
        """Run all layers under autograd; return hidden states before the final norm."""
        contexts = noop_context_fn
        if self.techniques.backward == "selective":
            contexts = partial(create_selective_checkpoint_contexts, ATTENTION_OPS)
        for layer in self.layers:
            run = partial(self.run_layer, layer)
            if self.techniques.backward != "plain":
                with save_on_cpu(x.is_cuda) if self.techniques.offload else nullcontext():
                    x = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
            else:
                x = run(x)
        return x

    def run_layer(self, layer, x):
        """Run one layer; rounds and tiles are recomputed, each in its own backward."""

        def attention(head_round, x):
            heads = self.counts(head_round, keys=2)
            everything = slice(0, self.local_tokens)
            pieces = self.qkv_of_tokens(layer, x, everything, head_round)
            flat = torch.cat([piece.flatten() for piece in pieces])
            (first, stop), (key, end) = head_round[self.rank]
            split = [stop - first, end - key, end - key]
            q, k, v = self.to_heads(flat, heads).split(split, dim=1)
            if self.ring:
                o = RingAttention.apply(q, k, v, self.ring)
            elif stop > first:
                k, v = (repeat_kv_heads(t, stop - first) for t in (k, v))
                if self.documents is None:
                    o = self.causal(q, k, v)
                else:
                    o = by_documents(self.causal, q, k, v, self.documents)
            else:
                # A checkpoint recomputes when its first saved tensor is unpacked. A rank without
                # heads must save one here, too: else it would call the all-to-alls of the
                # recomputation later than the others do.
                o = q * q.new_ones(())
            return self.to_tokens([o], self.counts(head_round))

        def maybe(again, function, *args):
            return checkpoint(function, *args, use_reentrant=False) if again else function(*args)

        # A checkpoint inside a selective checkpoint would run its attention again.
        again = len(self.rounds) > 1 and self.techniques.backward != "selective"
        flats = [maybe(again, attention, head_round, x) for head_round in self.rounds]
        o = self.outputs(self.in_order(flats), slice(None))
        # (The backward of each slice would make zeros as long as the sequence; `split`'s does not.)
        size = self.tiles[0].stop
        parts = [
            maybe(len(self.tiles) > 1, self.finish, layer, *both)
            for both in zip(x.split(size, 1), o.split(size, 1), strict=True)
        ]
        return torch.cat(parts, dim=1)
