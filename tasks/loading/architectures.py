"""Settings and sizes of a Llama, its relatives and a GPT-2, and which of them a script takes."""

import transformers

from utils.errors import UserError
from utils.families import FAMILIES, GPT2, LLAMA, RELATIVES, family_of, layers_of

ONLY_LLAMA, LLAMA_AND_GPT2 = (LLAMA.model_type,), (LLAMA.model_type, GPT2.model_type)
LLAMAS = (LLAMA.model_type, *(family.model_type for family in RELATIVES))
TAKE_GPT2 = "data_parallel.py, pipeline_threads.py and pipeline_llama.py"
TAKE_LLAMAS = "Tasks 2 to 5, kv_cache.py and ring_attention.py"
DROPOUTS = "resid_pdrop", "embd_pdrop", "attn_pdrop"  # GPT-2's, in its configuration


def one_of(names):
    """Return names in words: "a", "a or b", "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def refuse_family(name, model_type, allowed):
    """Raise UserError for a kind of model that a script does not take."""
    if model_type not in allowed:
        others = (
            TAKE_GPT2
            if model_type == GPT2.model_type
            else TAKE_LLAMAS
            if model_type in LLAMAS
            else None
        )
        others = f" ({others} take {model_type}, too)" if others else ""
        raise UserError(
            f"{name}: a {model_type} model; this needs model_type {one_of(allowed)}{others}"
        )
    if not hasattr(transformers, FAMILIES[model_type].config):
        raise UserError(
            f"{name}: transformers {transformers.__version__} has no {model_type} models"
        )


def refuse_length(source, seq_len):
    """Raise UserError for more tokens than a model has positions: GPT-2's are in a table."""
    config = source.config
    if config.model_type == GPT2.model_type and seq_len > config.max_position_embeddings:
        raise UserError(
            f"--seq-len {seq_len}: {source.name} has positions for "
            f"{config.max_position_embeddings} tokens"
        )


def mlp_units(config):
    """Return the number of units inside the MLP of a layer."""
    if config.model_type == GPT2.model_type:
        return config.n_inner or 4 * config.hidden_size
    return config.intermediate_size


def count_parameters(config):
    """Return how many parameters a model has, in closed form; a tied head counts once."""
    V, H = config.vocab_size, config.hidden_size
    L, F = config.num_hidden_layers, mlp_units(config)
    embeddings = V * H * (1 if config.tie_word_embeddings else 2)
    if config.model_type == GPT2.model_type:  # layers and norms have biases
        attention, mlp, norm = 4 * H * H + 4 * H, 2 * H * F + F + H, 2 * H
        return (
            embeddings
            + config.max_position_embeddings * H
            + L * (attention + mlp)
            + ((2 * L + 1) * norm)
        )
    D = getattr(config, "head_dim", None) or H // config.num_attention_heads
    heads, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    bias = getattr(config, "attention_bias", False) * (heads + 2 * kv + H)
    bias += getattr(config, "mlp_bias", False) * (2 * F + H)
    if config.model_type == "qwen2":  # always biased, but for the output projection
        bias += heads + 2 * kv
    norms = 2 * H + 2 * D * (config.model_type == "qwen3")
    layer = 2 * H * (heads + kv) + 3 * H * F + norms + bias
    return embeddings + L * layer + H


def without_dropout(config):
    """Set GPT-2's dropouts to 0, in place. Return what they were, {name: rate}; of a Llama, {}."""
    if config.model_type != GPT2.model_type:
        return {}
    rates = {name: getattr(config, name) for name in DROPOUTS}
    for name in DROPOUTS:
        setattr(config, name, 0.0)
    return rates


def restore_dropout(source):
    """Give a `models.Source` the dropouts of its configuration again.

    Models that are loaded from now on have them, where they train.
    """
    for name, rate in source.dropout.items():
        setattr(source.config, name, rate)


def fill_buffers(model, config, device):
    """Build the buffers that no checkpoint holds, of a model that was made on the meta device.

    A Llama's are its rotary tables, in float32 whatever the model's dtype. GPT-2 has some in
    transformers 4 alone: each attention's causal mask.
    """
    if family_of(model) is not GPT2:
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
        return
    attentions = [getattr(layer, GPT2.attention) for layer in layers_of(model)]
    if attentions and any(True for _ in attentions[0].buffers()):
        fresh = type(attentions[0])(config, layer_idx=0)
        buffers = {name: buffer.to(device) for name, buffer in fresh.named_buffers()}
        for attention in attentions:
            for name, buffer in buffers.items():
                setattr(attention, name, buffer)
