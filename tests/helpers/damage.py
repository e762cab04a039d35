"""Folders of models made wrong: what happens to a good one, and what a user is told of it."""

import json
import math

import torch
from safetensors.torch import load_file, save_file


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory, function):
    tensors = load_file(directory / "model.safetensors")
    function(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def shard(
    directory, names=("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
):
    """Turn one safetensors file into two with an index."""
    tensors = load_file(directory / "model.safetensors")
    half, weight_map = len(tensors) // 2, {}
    for name, keys in zip(names, (list(tensors)[:half], list(tensors)[half:]), strict=True):
        save_file({key: tensors[key] for key in keys}, directory / name)
        weight_map |= {key: name for key in keys}
    (directory / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def pickle_only(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def outside(directory):
    weight_map = shard(directory)
    weight_map[min(weight_map)] = "../elsewhere.safetensors"
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def missing_shard(directory):
    shard(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()


def no_metadata(directory):
    index = {"weight_map": shard(directory)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def without_prefix(tensors):
    """Named as in a LlamaModel."""
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


NORM = "model.norm.weight"
DAMAGE = {
    # name: (what happens to a good directory, what the message says)
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "config is not JSON": (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
    "another kind of model": (lambda d: change_config(d, model_type="gemma"), "a gemma model"),
    "heads do not fit": (lambda d: change_config(d, num_attention_heads=5), "heads"),
    "config is a folder": (
        lambda d: ((d / "config.json").unlink(), (d / "config.json").mkdir()),
        "cannot be read",
    ),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "not valid JSON"),
    "odd groups": (lambda d: change_config(d, num_key_value_heads=4), "6 query heads"),
    "no such activation": (lambda d: change_config(d, hidden_act="none"), "config.json"),
    "rope of some dims": (
        lambda d: change_config(d, partial_rotary_factor=0.4),
        "partial_rotary_factor 0.4",
    ),
    "rope is a word": (lambda d: change_config(d, rope_parameters="x"), "rope_parameters"),
    "tied, but is not": (lambda d: change_config(d, tie_word_embeddings=True), "has another one"),
    "truncated": (lambda d: truncate(d / "model.safetensors"), "damaged safetensors"),
    "zero bytes": (lambda d: (d / "model.safetensors").write_bytes(b""), "damaged safetensors"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "no model.safetensors"),
    "pickle only": (pickle_only, "pickle weights are not loaded; convert to safetensors"),
    "integer weights": (
        lambda d: change_tensors(d, lambda t: t.update({NORM: torch.ones(42, dtype=torch.int8)})),
        f"tensor {NORM} is I8",
    ),
    "tied to nothing": (
        lambda d: (
            change_config(d, tie_word_embeddings=True),
            change_tensors(
                d, lambda t: (t.pop("lm_head.weight"), t.pop("model.embed_tokens.weight"))
            ),
        ),
        "model.embed_tokens.weight is missing",
    ),
    "missing tensor": (lambda d: change_tensors(d, lambda t: t.pop(NORM)), f"{NORM} is missing"),
    "unexpected tensor": (
        lambda d: change_tensors(d, lambda t: t.update({"more": torch.ones(1)})),
        "unexpected tensor more",
    ),
    "wrong shape": (
        lambda d: change_tensors(d, lambda t: t.update({NORM: torch.ones(41)})),
        f"tensor {NORM} has shape (41,), config.json says (42,)",
    ),
    "missing shard": (missing_shard, "model-00002-of-00002.safetensors: missing"),
    "no number": (
        lambda d: change_config(d, rms_norm_eps=math.nan),
        "config.json: rms_norm_eps nan",
    ),
    "shard outside": (outside, "outside its directory"),
    "an index without metadata": (no_metadata, 'transformers wants an entry "metadata"'),
    "a LlamaModel's, untied: no head": (
        lambda d: change_tensors(d, lambda t: (without_prefix(t), t.pop("lm_head.weight"))),
        "tensor lm_head.weight is missing",
    ),
    # What transformers would make another model of, or overlook:
    "quantised": (
        lambda d: change_config(d, quantization_config={"load_in_8bit": True}),
        "quantised models are not loaded",
    ),
    "an adapter": (
        lambda d: (d / "adapter_config.json").write_text('{"base_model_name_or_path": "other"}'),
        "an adapter is not loaded",
    ),
    "generation_config is not JSON": (
        lambda d: (d / "generation_config.json").write_text("{"),
        "generation_config.json",
    ),
    "damaged index": (
        lambda d: (shard(d), (d / "model.safetensors.index.json").write_text("[]")),
        "damaged index",
    ),
}
