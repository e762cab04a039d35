"""What is refused when a model is split, and from then on. This file is loaded then, not before.

Shapes as in `utils/__init__.py`.
"""

import sys
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.loss.loss_utils import ForCausalLMLoss

from utils.errors import UserError
from utils.llama import HEAD_NORMS, window_of

# What techniques know of a model: its parts, by their names.
OF_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
OF_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
OF_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
OF_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
LINEAR = {"lm_head"} | OF_ATTENTION | OF_MLP - {"act_fn"}


def check_ordinary(model):
    """Raise ValueError for subclasses, DTensors, and what is not built as a LlamaForCausalLM.

    Mistral, Qwen2, Qwen3 and SmolLM3 are built as one: a model is known by its parts. The error
    names a part that is unknown or missing.
    """
    name = type(model).__name__
    if not type(model).__module__.startswith("transformers.models."):
        raise ValueError(f"not an ordinary LlamaForCausalLM: {name}")
    check_parts(name, model, {"model", "lm_head"})
    check_parts(f"{name}'s model", model.model, OF_MODEL)
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"{name}: {heads} query heads do not divide by {kv_heads} KV heads")
    for layer in model.model.layers:
        check_parts(f"a layer of {name}", layer, OF_LAYER)
        check_parts(f"attention of {name}", layer.self_attn, OF_ATTENTION, HEAD_NORMS)
        check_parts(f"the MLP of {name}", layer.mlp, OF_MLP)
        for norm in HEAD_NORMS & dict(layer.self_attn.named_children()).keys():
            size, D = layer.self_attn.get_submodule(norm).weight.numel(), layer.self_attn.head_dim
            if size != D:
                raise ValueError(f"attention of {name}: {norm} is of {size}, not of a head's {D}")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("weights are DTensors already: split the plain model")


def refuse_order(mesh):
    """Raise ValueError where ranks do not ascend along an axis: DTensor would deal out wrongly.

    It takes a shard's place from the mesh, and gathers in the order of the group, which is sorted.
    """
    for axis in range(mesh.ndim):
        if (mesh.mesh.diff(dim=axis) <= 0).any():
            raise ValueError(f"a mesh of ranks {mesh.mesh.tolist()}: DTensor wants them ascending")


def check_parts(name, module, parts, more=frozenset()):
    """Raise ValueError for a module that lacks some `parts`, or has any but these and `more`."""
    found = dict(module.named_children()).keys()
    unknown = sorted((found - parts - more) | dict(module.named_parameters(recurse=False)).keys())
    if unknown or parts - found:
        missing = sorted(parts - found)
        said = [f"has {', '.join(unknown)}"] * bool(unknown)
        said += [f"has no {', '.join(missing)}"] * bool(missing)
        raise ValueError(f"not built as a LlamaForCausalLM: {name} {' and '.join(said)}")


def check_layers(model):
    """Raise ValueError for layers of which slices would be wrong.

    Such layers do more with a weight than PyTorch's (Gemma's embedding scales its rows, quantized
    layers keep other numbers), are not of the size in the configuration (which decides the slices),
    or share a weight (only a tied LM head may).
    """
    config, sizes = model.config, {}
    sizes |= dict.fromkeys(("embed_tokens", "lm_head"), config.vocab_size)
    sizes |= dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size)
    names, tied = {}, {"model.embed_tokens.weight", "lm_head.weight"}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = names.setdefault(id(parameter), name)
        if other != name and {other, name} != tied:
            raise ValueError(f"{other} and {name} are one weight: slices of them would be two")
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        expected = nn.Embedding if last == "embed_tokens" else nn.Linear
        if last in LINEAR | {"embed_tokens"} and type(module) is not expected:
            kind = type(module).__name__
            raise ValueError(f"{name} is a {kind}: slices are taken of an nn.{expected.__name__}")
        if last in sizes and len(module.weight) != (rows := sizes[last]):
            raise ValueError(f"{name} has {len(module.weight)} rows, the configuration says {rows}")


def check_ranks(config, ranks, of_heads=True, of_vocabulary=True):
    """Raise UserError for more ranks than query heads or vocabulary entries, if these are split."""
    if of_heads and ranks > (heads := config.num_attention_heads):
        raise UserError(f"{heads} query heads: use 1 to {heads} ranks, not {ranks}")
    if of_vocabulary and ranks > config.vocab_size:
        raise UserError(f"{ranks} ranks share {config.vocab_size} tokens: fewer ranks")


def check_stops(stops, layers, devices=None):
    """Raise ValueError unless stages that end before the layers `stops` have each layer once.

    devices: how many there are, one for each stage.
    """
    if devices not in (None, len(stops)):
        raise ValueError(f"{len(stops)} stages for {devices} devices")
    ascending = all(first < stop for first, stop in pairwise((0, *stops)))
    if not stops or not ascending or stops[-1] != layers:
        said = f"stages that end before layers {tuple(stops)}"
        raise ValueError(f"{said}: they do not divide {layers} layers")


def refuse_masks(config):
    """Raise ValueError for attention that is not causal by itself, where layers get no mask."""
    if config._attn_implementation in ("eager", "flex_attention"):
        raise ValueError(f"{config._attn_implementation} attention needs a mask: use sdpa")
    if window_of(config):
        raise ValueError("a sliding window: not here, where layers get no mask")


def check_slices(model):
    """Raise ValueError for PEFT's adapters, none of which is right here, and for lost slices."""
    if "peft" in sys.modules:  # else there is no adapter
        from guards.adapters import refuse_adapters

        refuse_adapters(model)
    refuse_lost_slices(model)


def refuse_lost_slices(model):
    """Raise ValueError if a slice was replaced by a parameter that does not know its region.

    `load_state_dict(assign=True)`, FSDP2's `fully_shard` and `to_empty` do so. A rank's slice would
    count as the full tensor from then on.
    """
    if not vars(model).get("of_slices"):  # kept: a walk through all modules at each token is slow
        named = model.named_modules()
        model.of_slices = [(place, part) for place, part in named if hasattr(part, "slices")]
    for place, module in model.of_slices:
        for name in module.slices:
            if not hasattr(getattr(module, name), "shard"):
                raise ValueError(
                    f"{place}.{name} was a slice, and has been replaced: by load_state_dict "
                    "(assign=True), by fully_shard (parallelize_2d of pretrain_2d.py splits over "
                    "two axes), or by to_empty (loading.models.materialize fills a model that was "
                    "split on the meta device)"
                )


def refuse_own_loss(model, expected=ForCausalLMLoss):
    """Raise ValueError if a model's `loss_function` is not `expected` but a user's own."""
    if model.loss_function != expected:
        raise ValueError(
            "a loss_function of your own would not be called, or would get a part of the logits: "
            "compute the loss from the logits, which come out full without labels"
        )


def refuse_arguments(model, attention_mask, cache, labels, others):
    """Raise ValueError for what a forward of a `SequenceParallelLlama` does not take.

    others: its other keyword arguments, from which known names are removed.
    """
    for name in "logits_to_keep", "num_logits_to_keep", "output_attentions", "shift_labels":
        if torch.is_tensor(value := others.pop(name, None)) or value:
            raise ValueError(f"{name}: not under sequence parallelism")
    if others.pop("ignore_index", None) not in (None, -100):
        raise ValueError("ignore_index: only -100 under sequence parallelism")
    if cache is not None or others.pop("past_key_values", None) is not None:
        # One thing: transformers calls it `cache` from 5.24 on.
        raise ValueError("cache, past_key_values: no KV cache under sequence parallelism")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError("attention_mask must be (B, S)")
    if labels is not None:
        refuse_own_loss(model, model.replaced_loss)


def refuse_dropout(model):
    """Raise ValueError in training with dropout of attention, see `guard_dropout`."""
    if not model.training:
        return
    layers = getattr(model, "model", model).layers
    of_layers = (part for layer in layers for part in layer.self_attn.modules())  # PEFT may wrap it
    rate = max((getattr(part, "attention_dropout", 0) for part in of_layers), default=0)
    if rate:
        raise ValueError(
            f"attention_dropout {rate} in training: ranks would drop the same for different heads"
        )


def refuse_across_tokens(model):
    """Raise ValueError for dropout and adapters that are wrong where each rank has its own tokens.

    With one seed, ranks would drop the same entries of different tokens (in training; PEFT's LoRA
    may have a dropout); with several seeds, different parts of an adapter's weights. Adapters: as
    `check_by_token` does.
    """
    alone = not model.training or model.get_group().size() == 1
    if "peft" in sys.modules:  # else there is no adapter
        from guards.adapters import check_by_token, dropping_adapter

        check_by_token(model)
        if not alone and (name := dropping_adapter(model)):
            raise ValueError(f"{name}: ranks would drop different parts of an adapter's weights")
    if alone or torch.compiler.is_compiling():
        return
    unused = set()  # dropouts of adapters that are not active, or merged
    for module in model.modules():
        active = () if getattr(module, "merged", False) else getattr(module, "active_adapters", ())
        if isinstance(dropouts := getattr(module, "lora_dropout", None), nn.ModuleDict):
            unused |= {id(one) for name, one in dropouts.items() if name not in active}
        rate = (
            module.p if isinstance(module, nn.Dropout) else getattr(module, "residual_dropout", 0)
        )
        if module.training and rate and id(module) not in unused:
            name = next(name for name, one in model.named_modules() if one is module)
            raise ValueError(
                f"dropout {rate} of {name} in training: ranks would drop the same of different "
                "tokens"
            )
