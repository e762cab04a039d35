"""A model directory means to us what it means to transformers, to the bit.

The reference of every script is what `from_pretrained` loads. A rank's share is read by our own
code, so that code is held against it here, on directories as people have them: settings in the
spellings of several versions, files left behind by an earlier save, keys that nobody expects.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import launch
from conftest import make_llama
from damage import change_config, change_tensors, shard, without_prefix
from harness.generation import hf_generate, other_settings, recompute
from loading.architectures import LLAMA_AND_GPT2, count_parameters
from loading.models import IGNORED_SETTINGS, TRANSFORMERS_4, Source, as_transformers_4, quiet
from spellings import (
    CPU,
    SCALINGS,
    SPELLINGS,
    as_half,
    assert_same_as_the_library,
    change_rope,
    copy_over_shards,
    drop_settings,
    generation,
    renamed,
    resave_in_one_file,
)
from utils.errors import UserError


@pytest.fixture
def directory(odd_llama, tmp_path):
    """A copy of the odd Llama, to be changed."""
    return shutil.copytree(odd_llama, tmp_path / "a model")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kind", SCALINGS)
def test_rope(kind, spelling, directory):
    """Each type of RoPE in each spelling."""
    newer, settings = SPELLINGS[spelling]
    if TRANSFORMERS_4 and (newer or (kind, spelling) == ("default", "4, type")):
        pytest.skip("transformers 4 does not read this spelling: see test_rope_for_transformers_4")
    change_config(directory, max_position_embeddings=40)
    change_rope(directory, settings(SCALINGS[kind]))
    assert_same_as_the_library(directory)


LINEAR = SCALINGS["linear"]
TRANSLATED = [
    # settings, the theta and the scaling that transformers 4 shall read
    ({"rope_parameters": LINEAR | {"rope_theta": 7.0}}, 7.0, LINEAR),
    ({"rope_parameters": renamed(LINEAR) | {"rope_theta": 7.0}}, 7.0, LINEAR),
    ({"rope_parameters": LINEAR, "rope_theta": 7.0}, 7.0, LINEAR),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_scaling": LINEAR},
     10000.0, LINEAR),
    ({"rope_parameters": None, "rope_theta": 7.0, "rope_scaling": LINEAR}, 7.0, LINEAR),
    ({"rope_theta": 7.0}, 7.0, None),
    ({}, 10000.0, None),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "theta", "scaling"), TRANSLATED)
def test_rope_for_transformers_4(settings, theta, scaling):
    """What transformers 5 makes of a directory, in transformers 4's words."""
    found = as_transformers_4(dict(settings))
    assert (found["rope_theta"], found["rope_scaling"]) == (theta, scaling)
    assert "rope_parameters" not in found


def only_the_head(tensors):
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


def tie(directory, keep_head=False, **settings):
    """With tied embeddings; keep_head: the file has the LM head, too."""

    def change(tensors):
        tensors.pop("lm_head.weight")
        if keep_head:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(directory, change)
    change_config(directory, tie_word_embeddings=True, **settings)


def with_prefix(tensors):
    """As a wrapper's names for the model."""
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


NEWER = "names that transformers 5 reads: "


def spare_shard(directory):
    shard(directory)
    shutil.copy(directory / "model-00001-of-00002.safetensors",
                directory / "model-00003-of-00003.safetensors")  # fmt: skip


DIRECTORIES = {
    "as saved": lambda d: None,
    "in shards": shard,
    "in shards, then in one file": resave_in_one_file,
    "in shards, with one that is in no index": spare_shard,
    "one file copied over shards": copy_over_shards,
    "tied": tie,
    "tied, with the head in the file": lambda d: tie(d, keep_head=True),
    "untied, as is the default": lambda d: drop_settings(d, "tie_word_embeddings"),
    "weights in bfloat16": lambda d: change_tensors(d, as_half),
    "dtype bfloat16, weights float32": lambda d: change_config(d, dtype="bfloat16"),
    "no dtype": lambda d: drop_settings(d, "dtype", "torch_dtype"),
    "torch_dtype": lambda d: (drop_settings(d, "dtype"), change_config(d, torch_dtype="bfloat16")),
    "the default head_dim": lambda d: (make_llama(d, hidden_size=60), drop_settings(d, "head_dim")),
    "no biases": lambda d: make_llama(d, attention_bias=False, mlp_bias=False),
    "one KV head": lambda d: make_llama(d, num_key_value_heads=1),
    "a KV head a query head": lambda d: make_llama(d, num_key_value_heads=6),
    "no KV heads said": lambda d: (
        make_llama(d, num_key_value_heads=6), drop_settings(d, "num_key_value_heads")
    ),
    "gelu, another epsilon": lambda d: change_config(d, hidden_act="gelu", rms_norm_eps=0.03),
    "use_cache false": lambda d: change_config(d, use_cache=False),
    "output_hidden_states": lambda d: change_config(d, output_hidden_states=True),
    "eager attention": lambda d: change_config(d, _attn_implementation="eager"),
    "settings of other programs": lambda d: change_config(d, pretraining_tp=1, lora_rank=8),
    "several ends of a text": lambda d: generation(d, eos_token_id=[2, 15], pad_token_id=3),
    "ends in config.json": lambda d: (
        (d / "generation_config.json").unlink(), change_config(d, eos_token_id=[2, 15])
    ),
    "a repetition penalty": lambda d: generation(d, repetition_penalty=1.3, eos_token_id=2),
    "of a LlamaModel": lambda d: (tie(d), change_tensors(d, without_prefix)),
    "of a LlamaModel, in shards": lambda d: (tie(d), change_tensors(d, without_prefix), shard(d)),
    f"{NEWER}of a LlamaModel, and a head": lambda d: change_tensors(d, without_prefix),
    f"{NEWER}tied, the head's name alone": lambda d: (tie(d), change_tensors(d, only_the_head)),
    f"{NEWER}model. twice": lambda d: change_tensors(d, with_prefix),
    "frequencies in the file": lambda d: change_tensors(
        d, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)})
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIRECTORIES)
def test_directory(name, directory):
    if name.startswith(NEWER) and TRANSFORMERS_4:
        pytest.skip("transformers 4 does not read these names")
    DIRECTORIES[name](directory)
    assert_same_as_the_library(directory)


# ---------------------------------------------------------------- settings for generation


# What stops, needs something beside the model, or makes other tokens: in generation_config.json.
OTHER = dict(
    stop_strings=["a"], max_time=1e-9, token_healing=True, forced_eos_token_id=5, min_new_tokens=5,
    num_beams=3, early_stopping=True, length_penalty=2.0, num_beam_groups=3, diversity_penalty=0.5,
    constraints=[1], force_words_ids=[[5]], penalty_alpha=0.6, dola_layers="low", use_mtp=True,
    prompt_lookup_num_tokens=3, assistant_early_exit=2, is_assistant=True,
    speculation_type="dflash", watermarking_config={"greenlist_ratio": 0.5, "bias": 9.0},
    guidance_scale=2.0,
    repetition_penalty=5.0, no_repeat_ngram_size=1, encoder_repetition_penalty=2.0,
    bad_words_ids=[[7]], suppress_tokens=[7], begin_suppress_tokens=[7],
    sequence_bias=[[[5], 50.0]], exponential_decay_length_penalty=[1, 9.0],
    renormalize_logits=True, remove_invalid_values=True, cache_implementation="offloaded",
    prefill_chunk_size=2, custom_generate="x",
)  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_likeliest_tokens(name, directory):
    """Whatever a directory says of how to generate; what is left out is named."""
    generation(directory, **{name: OTHER[name]})
    source, ids = Source(str(directory)), torch.arange(12).view(2, 6)
    assert other_settings(source.generation) == [name]
    model = source.load_model(torch.float32, CPU)
    before = model.generation_config.to_dict()
    assert torch.equal(hf_generate(model, ids, 5), recompute(model, ids, 5))
    assert model.generation_config.to_dict() == before


@pytest.mark.parametrize("name", ["stop_strings", "max_time", "repetition_penalty", "num_beams"])
def test_settings_that_the_library_follows(name, directory):
    """By itself: the test above would see it."""
    generation(directory, **{name: OTHER[name]})
    model, ids = Source(str(directory)).load_model(torch.float32, CPU), torch.arange(12).view(2, 6)
    try:
        found = model.generate(ids, attention_mask=ids * 0 + 1, max_new_tokens=5, pad_token_id=0)
    except ValueError as error:
        assert name == "stop_strings" and "tokenizer" in str(error)
        return
    assert not torch.equal(found, recompute(model, ids, 5))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eos_token_id": [2, 15], "temperature": 0.6, "top_p": 0.9, "do_sample": True}, []),
        ({"repetition_penalty": 1.3, "use_cache": False}, ["repetition_penalty"]),
    ],
)
def test_settings_that_change_no_token(settings, expected, directory):
    """Are not told of."""
    generation(directory, **settings)
    assert other_settings(Source(str(directory)).generation) == expected


# ---------------------------------------------------------------- GPT-2


@pytest.fixture(params=[True, False], ids=["whole", "without its head"])
def gpt2(request, tmp_path):
    """A directory as `save_pretrained` writes it; without the head, names have no prefix."""
    torch.manual_seed(0)
    sizes = dict(n_embd=20, n_layer=2, n_head=4, n_positions=32, vocab_size=101, n_inner=52)
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    (model if request.param else model.transformer).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("masks", [False, True])
def test_gpt2_directory(masks, gpt2):
    """What from_pretrained loads, to the bit, whole and by slices; old files hold masks, too."""
    tensors = load_file(gpt2 / "model.safetensors")
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    if masks:
        tensors[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.uint8).tril()
        tensors[f"{prefix}h.1.attn.masked_bias"] = torch.tensor(-1e4)
        save_file(tensors, gpt2 / "model.safetensors", metadata={"format": "pt"})
    ids, mask = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    with quiet():
        expected = AutoModelForCausalLM.from_pretrained(gpt2).eval()
    source = Source(str(gpt2), model_types=LLAMA_AND_GPT2)
    assert set(source.dropout.values()) == {0.1} and count_parameters(source.config) == sum(
        parameter.numel() for parameter in expected.parameters()
    )
    for parallelize in None, lambda model: None:
        model = source.load_model(torch.float32, CPU, parallelize)
        assert model.lm_head.weight is model.transformer.wte.weight
        for both in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(*both)
        logits = [m(ids, attention_mask=mask).logits for m in (model, expected)]
        assert torch.equal(*logits)


def test_gpt2_refused(gpt2):
    """By the scripts that take only Llamas, and where it is damaged or is no decoder alone."""
    for name in str(gpt2), "random/gpt2":
        with pytest.raises(
            UserError, match=r"a gpt2 model; this needs model_type llama \(data_par"
        ):
            Source(name)
    change_config(gpt2, add_cross_attention=True)
    with pytest.raises(UserError, match="add_cross_attention"):
        Source(str(gpt2), model_types=LLAMA_AND_GPT2)
    change_config(gpt2, add_cross_attention=False, n_positions=31)
    with pytest.raises(UserError, match=r"wpe.weight has shape \(32, 20\), config.json says"):
        Source(str(gpt2), model_types=LLAMA_AND_GPT2)


# ---------------------------------------------------------------- tokenizers


TINY_FILES = launch.TASKS / "tiny_llama"


def tokenizer_files(directory, edit):
    """The embedded model in a directory of its own, its tokenizer in other files."""
    shutil.copytree(TINY_FILES, directory, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    edit(directory, json.loads((directory / "tokenizer.json").read_text())["model"])
    return Source(str(directory))


def as_gpt2(directory, model):
    """vocab.json and merges.txt, as of tokenizers without a tokenizer.json."""
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (directory / "tokenizer.json").unlink()
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings |= {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<|endoftext|>"}
    path.write_text(json.dumps(settings))


def test_tokenizer_of_other_files(tmp_path):
    """Read as AutoTokenizer reads it, not taken for none."""
    text = "A quick brown fox jumps over the lazy dog."
    expected = Source("tiny").tokenizer()(text)["input_ids"]
    found = tokenizer_files(tmp_path / "gpt2", as_gpt2).tokenizer()
    assert found(text)["input_ids"] == expected and found.decode(expected) == text


def test_tokenizer_that_cannot_be_read(tmp_path):
    """Refused by the names of its files: bytes are no tokens of this model."""

    def damage(directory, model):
        (directory / "tokenizer.json").unlink()
        (directory / "tokenizer.model").write_bytes(b"no such format")

    with pytest.raises(UserError, match=r"tokenizer \(tokenizer.model, tokenizer_config.json\)"):
        tokenizer_files(tmp_path / "damaged", damage).tokenizer()


@pytest.mark.parametrize("kind", ["CodeLlamaTokenizer", "T5Tokenizer", "GPT2Tokenizer"])
def test_tokenizer_without_words(kind, tmp_path):
    """Refused: the library makes an empty one of some classes, for which all words are unknown."""

    def lose(directory, model):
        (directory / "tokenizer.json").unlink()
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": kind}))

    with pytest.raises(UserError, match=r"tokenizer \(tokenizer_config.json\)"):
        tokenizer_files(tmp_path / "lost", lose).tokenizer()


def test_tokenizer_of_a_class_with_other_files(tmp_path):
    """The library reads tokenizer.json, which the class does not name, and so do we."""

    def rename(directory, model):
        path = directory / "tokenizer_config.json"
        settings = json.loads(path.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
        path.write_text(json.dumps(settings))

    found = tokenizer_files(tmp_path / "model", rename).tokenizer()
    assert (
        found("fox")["input_ids"]
        == AutoTokenizer.from_pretrained(tmp_path / "model")("fox")["input_ids"]
    )


@pytest.mark.parametrize("name", ["tekken.json", "sentencepiece.bpe.model", "qwen.tiktoken"])
def test_tokenizer_of_a_kind_that_is_not_read(name, tmp_path):
    """Refused by its file's name, not taken for none."""

    def replace(directory, model):
        for path in directory.glob("tokenizer*"):
            path.unlink()
        (directory / name).write_text("[]")

    with pytest.raises(UserError, match=rf"tokenizer \({name}\)"):
        tokenizer_files(tmp_path / "other", replace).tokenizer()


def test_generation_settings_of_older_directories(tmp_path):
    """In config.json; as the library reads them."""
    directory = tmp_path / "older"

    def move(directory, model):
        (directory / "generation_config.json").unlink()
        path = directory / "config.json"
        more = {"repetition_penalty": 1.5, "suppress_tokens": [5], "use_cache": False}
        path.write_text(json.dumps(json.loads(path.read_text()) | more))

    source = tokenizer_files(directory, move)
    found, expected = source.generation, AutoModelForCausalLM.from_pretrained(directory)
    assert found.repetition_penalty == 1.5 and found.suppress_tokens == [5]
    for name in "repetition_penalty", "suppress_tokens", "eos_token_id", "pad_token_id":
        assert getattr(found, name) == getattr(expected.generation_config, name), name


def test_weights_by_another_name(tmp_path):
    """Which the library reads where config.json says so."""

    def rename(directory, model):
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"transformers_weights": "x"}))

    with pytest.raises(UserError, match="transformers_weights"):
        tokenizer_files(tmp_path / "named", rename)


def test_no_tokenizer(directory):
    assert Source(str(directory)).tokenizer() is None


def test_settings_of_the_run():
    """What config.json may not decide is none of the model's function."""
    assert not set(IGNORED_SETTINGS) & {
        "rope_theta",
        "head_dim",
        "hidden_act",
        "tie_word_embeddings",
    }
