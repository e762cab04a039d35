"""Folders that hold one model in the spellings of several libraries and versions."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from damage import shard
from loading.models import TRANSFORMERS_4, Source
from loading.presets import LLAMA3_ROPE

CPU = torch.device("cpu")
FACTORS = {"short_factor": [1.0] * 5, "long_factor": [4.0] * 5}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": LLAMA3_ROPE | {"original_max_position_embeddings": 32},
    "longrope": FACTORS | {"rope_type": "longrope", "factor": 4.0,
                           "original_max_position_embeddings": 30},
}  # fmt: skip


def renamed(scaling):
    """As versions of long ago spelled it."""
    return {"type" if key == "rope_type" else key: value for key, value in scaling.items()}


SPELLINGS = {
    # name: (of transformers 5 alone, settings of config.json, from a scaling)
    "4": (False, lambda scaling: {"rope_theta": 100.0, "rope_scaling": scaling}),
    "4, type": (False, lambda scaling: {"rope_theta": 100.0, "rope_scaling": renamed(scaling)}),
    "4, no theta": (False, lambda scaling: {"rope_scaling": scaling}),
    "5": (True, lambda scaling: {"rope_parameters": scaling | {"rope_theta": 100.0}}),
    "5, type": (True, lambda scaling: {"rope_parameters": renamed(scaling) | {"rope_theta": 9.0}}),
    "5, theta on top": (True, lambda scaling: {"rope_parameters": scaling, "rope_theta": 100.0}),
    "5, scaling added": (
        True,
        lambda scaling: {
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "rope_scaling": scaling,
        },
    ),
    "5, no theta": (True, lambda scaling: {"rope_parameters": scaling}),
}


def change_rope(directory, settings):
    """Set these rotary settings alone."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for name in "rope_parameters", "rope_scaling", "rope_theta":
        config.pop(name, None)
    path.write_text(json.dumps(config | settings))


def assert_same_as_the_library(directory):
    """Our loader's shares, and the model without a split: parameters, logits, generation."""
    as_float32 = {"torch_dtype" if TRANSFORMERS_4 else "dtype": torch.float32}
    theirs = AutoModelForCausalLM.from_pretrained(directory, **as_float32)
    theirs.config._attn_implementation = "sdpa"  # whatever a directory says, as in our runs
    source = Source(str(directory))
    # Longer than some of these were made for.
    ids = torch.arange(2 * 100).view(2, 100) % source.config.vocab_size
    for parallelize in (lambda model: None), None:
        ours = source.load_model(torch.float32, CPU, parallelize)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        for name, parameter in theirs.named_parameters():
            assert torch.equal(ours.get_parameter(name), parameter), name
        assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == (
            theirs.lm_head.weight is theirs.model.embed_tokens.weight
        )
        with torch.no_grad():
            logits = [model(ids, return_dict=True).logits for model in (ours, theirs)]
        assert torch.equal(*logits), (logits[0] - logits[1]).abs().max()
        for name in "eos_token_id", "pad_token_id", "bos_token_id", "repetition_penalty":
            values = [getattr(m.generation_config, name) for m in (ours, theirs)]
            assert values[0] == values[1], (name, values)
    auto = {name: "auto" for name in as_float32}
    with_dtype = AutoModelForCausalLM.from_pretrained(directory, **auto)
    assert source.dtype() == with_dtype.dtype


def halve(tensors):
    for tensor in tensors.values():
        tensor.mul_(0.5)


def resave_in_one_file(directory):
    """As `save_pretrained` does, in shards and then in one file: shards go, their index stays."""
    whole = load_file(directory / "model.safetensors")
    for name in set(shard(directory).values()):
        (directory / name).unlink()
    halve(whole)
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})


def copy_over_shards(directory):
    """One file, copied over a directory that has older weights in shards."""
    whole = load_file(directory / "model.safetensors")
    shard(directory)
    halve(whole)
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})


def drop_settings(directory, *names):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in names}))


def as_half(tensors):
    for name, tensor in tensors.items():
        tensors[name] = tensor.bfloat16()


def generation(directory, **settings):
    (directory / "generation_config.json").write_text(json.dumps(settings))
