"""The seam to Hugging Face: where a Llama and a GPT-2 have their parts, and how large these are.

GPT-2 is read by the scripts that split layers or samples, not what is inside a layer.
"""

from dataclasses import dataclass

import transformers
from torch import nn

from utils.errors import UserError


@dataclass(frozen=True)
class Family:
    """A kind of model, by the library's names for its classes and for its parts."""

    kind: str  # config.model_type
    config: str
    model: str
    layer: str
    base: str  # in the model; the next four are in the base, the last one in a layer
    layers: str
    embedding: str
    positions: str | None  # an embedding of positions, where there is one
    norm: str  # behind the last layer
    attention: str

    @property
    def config_class(self):
        return getattr(transformers, self.config)

    @property
    def model_class(self):
        return getattr(transformers, self.model)

    @property
    def embedding_weight(self):
        """The name of the embedding's parameter."""
        return f"{self.base}.{self.embedding}.weight"


LLAMA = Family(
    kind="llama", config="LlamaConfig", model="LlamaForCausalLM", layer="LlamaDecoderLayer",
    base="model", layers="layers", embedding="embed_tokens", positions=None, norm="norm",
    attention="self_attn",
)  # fmt: skip
GPT2 = Family(
    kind="gpt2", config="GPT2Config", model="GPT2LMHeadModel", layer="GPT2Block",
    base="transformer", layers="h", embedding="wte", positions="wpe", norm="ln_f",
    attention="attn",
)  # fmt: skip
FAMILIES = {family.kind: family for family in (LLAMA, GPT2)}
ONLY_LLAMA, ALL_FAMILIES = (LLAMA.kind,), tuple(FAMILIES)
TAKE_GPT2 = "data_parallel.py, pipeline_threads.py and pipeline_llama.py"
DROPOUTS = "resid_pdrop", "embd_pdrop", "attn_pdrop"  # GPT-2's, in its configuration


def family_of(model):
    return FAMILIES[model.config.model_type]


def base_of(model):
    """The model without its head."""
    return getattr(model, family_of(model).base)


def layers_of(model):
    """Its layers, an nn.ModuleList."""
    return getattr(base_of(model), family_of(model).layers)


def embedding_of(model):
    """Its embedding of words; None in a stage of a pipeline that has none."""
    return getattr(base_of(model), family_of(model).embedding)


def norm_of(model):
    """The norm behind its last layer."""
    return getattr(base_of(model), family_of(model).norm)


def refuse_family(name, kind, allowed):
    """UserError for a kind of model that a script does not take."""
    if kind not in allowed:
        others = f" ({TAKE_GPT2} take gpt2, too)" if kind == GPT2.kind else ""
        raise UserError(f"{name}: a {kind} model; this needs model_type {' or '.join(allowed)}"
                        f"{others}")  # fmt: skip


def refuse_length(source, seq_len):
    """UserError for more tokens than a model has positions for: GPT-2's are in a table."""
    config = source.config
    if config.model_type == GPT2.kind and seq_len > config.max_position_embeddings:
        raise UserError(f"--seq-len {seq_len}: {source.name} has positions for "
                        f"{config.max_position_embeddings} tokens")  # fmt: skip


def mlp_units(config):
    """Units inside the MLP of a layer."""
    if config.model_type == GPT2.kind:
        return config.n_inner or 4 * config.hidden_size
    return config.intermediate_size


def count_parameters(config):
    """How many parameters a model has, in closed form; a tied head counts once."""
    V, H, L, F = config.vocab_size, config.hidden_size, config.num_hidden_layers, mlp_units(config)
    embeddings = V * H * (1 if config.tie_word_embeddings else 2)
    if config.model_type == GPT2.kind:  # everything but the head has a bias
        attention, mlp, norm = 4 * H * H + 4 * H, 2 * H * F + F + H, 2 * H
        return embeddings + config.max_position_embeddings * H + L * (attention + mlp) + (
            (2 * L + 1) * norm
        )  # fmt: skip
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    bias = config.attention_bias * (heads + 2 * kv + H) + config.mlp_bias * (2 * F + H)
    layer = 2 * H * (heads + kv) + 3 * H * F + 2 * H + bias
    return embeddings + L * layer + H


def without_dropout(config):
    """Set GPT-2's dropouts to 0, in place. Returns what they were, {name: rate}; of a Llama, {}."""
    if config.model_type != GPT2.kind:
        return {}
    rates = {name: getattr(config, name) for name in DROPOUTS}
    for name in DROPOUTS:
        setattr(config, name, 0.0)
    return rates


def restore_dropout(source):
    """Give a `models.Source` the dropouts of its configuration again: models that are loaded now
    have them, where they train.
    """
    for name, rate in source.dropout.items():
        setattr(source.config, name, rate)


def fill_buffers(model, config, device):
    """Build the buffers that no checkpoint holds, of a model that was made on the meta device.

    A Llama's are its rotary tables, in float32 whatever the model's dtype. GPT-2 has some in
    transformers 4 alone: each attention's causal mask.
    """
    if family_of(model) is LLAMA:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
        return
    attentions = [getattr(layer, GPT2.attention) for layer in layers_of(model)]
    if attentions and any(True for _ in attentions[0].buffers()):
        fresh = type(attentions[0])(config, layer_idx=0)
        buffers = {name: buffer.to(device) for name, buffer in fresh.named_buffers()}
        for attention in attentions:
            for name, buffer in buffers.items():
                setattr(attention, name, buffer)


class LayersInOrder(nn.ModuleList):
    """Some layers of a model, by their place here, under the names that they have in the model.

    An nn.ModuleList would look for a layer of this name: so GPT-2 of transformers 4 asks for them.
    """

    def __getitem__(self, place):
        return list(self)[place]
