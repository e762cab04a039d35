"""A Llama on a split sequence: takes and returns full sequences, works on a rank's own tokens.

Task 4 and the ring share it; they differ in how tokens attend to tokens of other ranks. Shapes as
in `utils/__init__.py`.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from utils.collectives import gather_shares, reduce_from_region
from utils.errors import UserError
from utils.llama import (
    BY_LENGTH,
    check_ids,
    expect_same_batches,
    getter,
    guard,
    mixed_in,
    next_tokens,
    rope_of,
)
from utils.losses import cross_entropy
from utils.partition import shard_heads, shard_range
from utils.settings import settings_of


def convert_attention(model, mixin, group, name, attend, exchanging=None):
    """Mix `mixin` into a LlamaForCausalLM; its layers then call `attend` on the ranks of `group`.

    name: the key of `attend` in transformers' ALL_ATTENTION_FUNCTIONS. `model.original_settings`
    keeps the configurations, which other models may share. Weights may be `keep_shard`'s slices.
    exchanging: the ranks that exchange heads, if any do. Raises ValueError as `check_ordinary` and
    `refuse_own_loss` do, in forwards as `refuse_across_tokens` does; UserError for RoPE that
    depends on the sequence's length, and for more `exchanging` ranks than query heads.
    """
    from guards.refusals import check_ordinary, refuse_across_tokens, refuse_own_loss

    check_ordinary(model)
    if not hasattr(model, "sum_of_losses"):  # Task 2's split vocabulary sets it
        refuse_own_loss(model)
    config = model.config
    if (of_rope := rope_of(config).get("rope_type")) in BY_LENGTH:
        raise UserError(f"RoPE {of_rope} depends on the sequence's length, which ranks share")
    if exchanging is not None:
        assign_heads(model, exchanging)
    model.replaced_loss = model.loss_function
    model.original_settings = config, model.generation_config
    config, model.generation_config = map(copy.deepcopy, model.original_settings)
    ALL_ATTENTION_FUNCTIONS[name] = attend
    config._attn_implementation = name
    config.use_cache = model.generation_config.use_cache = False
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = config
    for layer in model.model.layers:
        layer.self_attn.get_group = getter(group)
    guard(model, refuse_across_tokens)
    expect_same_batches(model, group)
    model.__class__, model.get_group = mixed_in(mixin, type(model)), getter(group)
    model.sequence_parts, model.pad_multiple = group.size(), 1  # see `SequenceParallelLlama.padded`


def heads_of(model):
    """Return how many query heads and KV heads a rank of a (tensor-parallel) model has."""
    attention = model.model.layers[0].self_attn
    return [x.out_features // attention.head_dim for x in (attention.q_proj, attention.k_proj)]


def assign_heads(model, group):
    """Tell a model's layers which heads each rank of `group` attends with."""
    heads = [shard_heads(*heads_of(model), group.size(), r)[:2] for r in range(group.size())]
    (first, stop), (first_key, stop_key) = heads[group.rank()]
    for attention in (layer.self_attn for layer in model.model.layers):
        attention.heads = heads
        attention.num_key_value_groups = (stop - first) // (stop_key - first_key)


def seq_len(query, key, value, group, length=None):
    """Return the length, by default P times this rank's tokens; raise ValueError for a misfit."""
    P, rank, tokens = group.size(), group.rank(), query.shape[2]
    length = tokens * P if length is None else length
    if torch.compiler.is_compiling():  # each check would be a guard: compiling took 3 times as long
        return length
    fits = key.shape == value.shape and query[:, 0].shape == key[:, 0].shape
    if not fits or query.shape[1] % key.shape[1] or not query.dtype == key.dtype == value.dtype:
        said = ", ".join(f"{list(x.shape)} of {x.dtype}" for x in (query, key, value))
        raise ValueError(f"query, key, value do not fit: {said}")
    if length < P:
        raise ValueError(f"{length} tokens for {P} ranks: each needs one")
    first, stop = shard_range(length, P, rank)
    if stop - first != tokens:
        raise ValueError(f"{tokens} tokens on rank {rank}, not {stop - first}, of {length}")
    return length


def as_attention_takes(*tensors):
    """Return query, key and value in autocast's dtype, if it is on: RoPE leaves q, k in float32."""
    device_type = tensors[0].device.type
    if torch.is_autocast_enabled(device_type) and tensors[0].dtype != torch.float64:
        return [tensor.to(torch.get_autocast_dtype(device_type)) for tensor in tensors]
    return tensors


def check_window(window, length):
    """Raise UserError for a sequence longer than a sliding window: some tokens do not see all."""
    if window is not None and length > window:
        raise UserError(f"sliding_window {window}: not for {length} tokens that ranks share")


def documents_of(position_ids):
    """Number each token's document in its row, (B, S): documents begin where positions jump."""
    return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(1)


@dataclass(frozen=True, eq=False)
class MaskInfo:
    """What a token may look at, among the tokens of the full sequence that are not later.

    length: of the sequence, S. real: (B, S), False where a token is padding, which no other token
    sees. documents: (B, S), the number of each token's document, outside of which it sees nothing.
    Without either, a token sees all. Raises ValueError for both.

    Layers get it as a 4-D tensor. Hugging Face passes this on unchanged, also if a checkpoint runs
    a layer again. (An attribute might be a later forward's; some versions pass no other argument.)
    """

    length: int
    real: torch.Tensor | None = None
    documents: torch.Tensor | None = None

    def __post_init__(self):
        if self.real is not None and self.documents is not None:
            raise ValueError("padding or documents, not both: make padding a document of its own")

    @property
    def sees_all(self):
        """Tell whether attention is causal, and nothing else."""
        return self.real is None and self.documents is None

    def to_tensor(self, device=None):
        """Return `real` (bool) or `documents` (ints), (B, 1, 1, S); else an empty (1, 1, 0, S)."""
        if self.sees_all:
            return torch.ones(1, 1, 0, self.length, dtype=torch.bool, device=device)
        return (self.real if self.documents is None else self.documents)[:, None, None]

    @classmethod
    def from_tensor(cls, tensor):
        """Return the MaskInfo whose `to_tensor` made the tensor."""
        if not tensor.shape[2]:
            return cls(tensor.shape[-1])
        field = "real" if tensor.dtype == torch.bool else "documents"
        return cls(tensor.shape[-1], **{field: tensor[:, 0, 0]})

    def full(self):
        """Return (B, 1, S, S), True where a token may look, by `real`; None without `real`.

        Left padding, which would see nothing, sees itself: else it might become NaN. (Hugging Face
        lets it see all or nothing, by version; no other token sees what becomes of padding.)
        """
        if self.real is None:
            return None
        causal = self.real.new_ones(self.length, self.length).tril()
        itself = torch.eye(self.length, dtype=torch.bool, device=self.real.device)
        seen = causal & self.real[:, None, None]
        return seen | (itself & ~seen.any(-1, keepdim=True))


def sum_of_losses(logits, targets):
    """Sum the cross-entropy over tokens; -100: no loss. (B, S, V), (B, S) -> a scalar.

    In float32 at least. On a rank without a valid label the sum is 0, with a gradient of zeros: the
    rank must still take part in the collectives of the backward.
    """
    return cross_entropy(logits, targets).sum()


class SequenceParallelLlama:
    """Takes full sequences, works on this rank's tokens, and returns what the full model returns.

    Mixed into the model's own class, LlamaForCausalLM or a relative's.
    """

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, cache=None,
        inputs_embeds=None, labels=None, use_cache=None, cache_position=None,
        num_items_in_batch=None, return_dict=None, **kwargs,
    ):  # fmt: skip
        """Run the full model's forward, without a KV cache. All ranks pass the same, (B, S, ...).

        Without attention_mask, position_ids that jump mean packed documents, as in transformers 5
        with use_cache=False: a token attends to its own document. The caller sees to the labels at
        the borders of documents.

        Logits come out full, gathered from the ranks, unless `labels` are given: then
        `output.logits` is this rank's (B, S/P, V), and the loss is the same on every rank: the sum
        over all ranks' tokens, divided by the number of all valid labels. A backward from logits or
        loss gives a rank the gradient of its own tokens' part, so nothing is counted P times.
        Hidden states that are asked for are those of this rank's tokens.
        Raises ValueError as `refuse_arguments`, `refuse_across_tokens` and `check_forward` do.
        """
        from guards.agreement import check_forward
        from guards.refusals import refuse_arguments

        refuse_arguments(self, attention_mask, cache, labels, kwargs)
        given = dict(ids=input_ids, embeds=inputs_embeds, mask=attention_mask, labels=labels)
        check_forward(self, given | dict(positions=position_ids))
        ids = input_ids if inputs_embeds is None else inputs_embeds
        if inputs_embeds is None:
            check_ids(ids, self.config.vocab_size)  # on all ranks, so that all raise
        if labels is not None:
            targets = next_tokens(labels, ids.shape[:2], self.config.vocab_size)
        S = ids.shape[1]
        length = self.padded(S)
        tokens = self.tokens(length)

        def local(x, value=0):
            if x is None:
                return None
            return F.pad(x, (0, 0) * (x.dim() - 2) + (0, length - S), value=value)[:, tokens]

        if attention_mask is not None:
            attention_mask = F.pad(attention_mask, (0, length - S), value=1)
        mask_info = self.attention_mask_info(length, attention_mask, ids.device)
        if position_ids is None:
            position_ids = torch.arange(S, device=ids.device)[None]
        elif attention_mask is None and (position_ids.diff() != 1).any():
            padded = F.pad(position_ids, (0, length - S)).expand(len(ids), -1)
            mask_info = MaskInfo(length, documents=documents_of(padded)).to_tensor()
        output = super().forward(
            local(input_ids), mask_info, local(position_ids),
            inputs_embeds=local(inputs_embeds), use_cache=False, return_dict=True, **kwargs,
        )  # fmt: skip
        if labels is None:
            output.logits = self.gather_tokens(output.logits, length)[:, :S]
        else:
            # Labels are shifted before they are split: the next token may be on another rank.
            loss = self.sum_of_losses(output.logits, local(targets, -100))
            if num_items_in_batch is None:
                num_items_in_batch = (targets != -100).sum()
            loss = reduce_from_region(loss, self.get_group()) / num_items_in_batch
            output = type(output)(loss=loss, **output)  # the loss first, as in the full model's
        return output.to_tuple() if return_dict is False else output

    sum_of_losses = staticmethod(sum_of_losses)  # a model with a split vocabulary sets its own

    @staticmethod
    def attention_mask_info(length, attention_mask=None, device=None):
        """Return what layers get as a mask, see `MaskInfo`. attention_mask: (B, length)."""
        is_padded = attention_mask is not None and not attention_mask.all()
        real = attention_mask.bool() if is_padded else None
        return MaskInfo(length, real).to_tensor(device)

    def padded(self, S):
        """Round S up, to a token for each rank at least, and to a multiple of `pad_multiple`."""
        return -(-max(S, self.sequence_parts) // self.pad_multiple) * self.pad_multiple

    def tokens(self, length):
        """Return which of a sequence's tokens this rank has."""
        return slice(*shard_range(length, self.get_group().size(), self.get_group().rank()))

    def gather_tokens(self, x, length):
        """Gather the tokens of all ranks, (B, length, ...), on each of them."""
        return gather_shares(x, 1, length, self.get_group())

    def save_pretrained(self, *args, **kwargs):
        """Save the full model, with its own class and settings; each rank has all weights."""
        full = copy.copy(self)
        full.__class__, (full.config, full.generation_config) = self.ordinary, settings_of(self)
        return full.save_pretrained(*args, **kwargs)
