"""The parts in one process: who owns what, loading, flags."""

import itertools
import json
import os
import re
import sys

import pytest
import torch
from torch.distributed.run import get_args_parser
from transformers import LlamaForCausalLM

import launch
import starting
from conftest import make_llama
from loading import LLAMA3_ROPE, PRESETS, TINY, Source
from sharding import share, share_heads

CPU = torch.device("cpu")


@pytest.mark.parametrize("items", [1, 7, 8, 53])
def test_share(items):
    """Shares lie end to end and differ by one at most."""
    for parts in range(1, 10):
        shares = [share(items, parts, index) for index in range(parts)]
        assert shares[0][0] == 0 and shares[-1][1] == items
        assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))
        sizes = {stop - start for start, stop in shares}
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (32, 8), (6, 3), (12, 3), (4, 1)])
def test_share_heads(heads, kv_heads):
    """Every query head is owned once, beside its own KV head, in groups of equal size."""
    group = heads // kv_heads
    for ranks in range(1, heads + 1):
        owned = []
        for rank in range(ranks):
            queries, keys, holders = share_heads(heads, kv_heads, ranks, rank)
            mine = range(*queries)
            assert mine and {head // group for head in mine} == set(range(*keys))
            assert len(mine) % (keys[1] - keys[0]) == 0
            same = [r for r in range(ranks) if share_heads(heads, kv_heads, ranks, r)[1] == keys]
            assert list(range(*holders)) == same
            owned += mine
        assert owned == list(range(heads))
    with pytest.raises(ValueError, match=f"use 1 to {heads} ranks, not {heads + 1}"):
        share_heads(heads, kv_heads, heads + 1, 0)


ROPE = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": LLAMA3_ROPE | {"original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("kind", ROPE)
def test_reference_is_hugging_faces_model(kind, tmp_path):
    """Our loader gives, to the bit, what the library's own gives; in float64, to its float32."""
    make_llama(tmp_path, rope_scaling=ROPE[kind], max_position_embeddings=40, rms_norm_eps=0.03)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path).float()
    source = Source(str(tmp_path))
    ours, exact = source.load_model(torch.float32, CPU), source.load_model(torch.float64, CPU)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter)
    ids = torch.arange(2 * 100).view(2, 100)  # longer than all of these were made for
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
        assert (exact(ids).logits - theirs(ids).logits).abs().max() < 1e-4


def test_tiny_is_what_hugging_face_loads():
    theirs, ids = LlamaForCausalLM.from_pretrained(TINY).float(), torch.arange(40)[None]
    ours = Source("tiny").load_model(torch.float32, CPU)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_random_weights_do_not_depend_on_slices():
    source = Source("random/small", num_layers=1, seed=3)
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"):
        whole = source.read(name)
        for dim in (0, 1):
            for start, stop in ((0, 7), (5, 200), (whole.shape[dim] - 9, whole.shape[dim])):
                part = source.read(name, (dim, start, stop))
                assert torch.equal(part, whole.narrow(dim, start, stop - start))
    assert not torch.equal(whole, Source("random/small", 1, seed=4).read(name))


@pytest.mark.parametrize(
    ("name", "count"), [("llama-3.2-1b", 1_235_814_400), ("llama-3.1-8b", 8_030_261_248)]
)
def test_presets_have_the_real_sizes(name, count):
    assert sum(p.numel() for p in Source(f"random/{name}").empty_model().parameters()) == count


def test_float64_is_float64():
    """With norms and rotary tables in float64, and close to the float32 model."""
    ids = torch.arange(30)[None]
    source = Source("random/small", num_layers=2)
    with torch.no_grad():
        exact = source.load_model(torch.float64, CPU)(ids).logits
        plain = source.load_model(torch.float32, CPU)(ids).logits
        rounded = source.load_model(torch.float64, CPU)
        rounded.model.norm = source.load_model(torch.float32, CPU).double().model.norm
    assert exact.dtype == torch.float64
    assert 0 < (exact - plain).abs().max() < 1e-4
    assert (exact - rounded(ids).logits).abs().max() > 1e-9  # what the library's norm rounds away


@pytest.mark.parametrize("script", launch.SCRIPTS)
def test_help_and_flags(script, tmp_path):
    """F1, F2: each flag has a help text with its default, and torchrun takes none for its own."""
    file = launch.TASKS / f"{script}.py"
    result = launch.ranks(file, "--help", nproc=1, folder=tmp_path, torchrun=False)
    assert result.code == 0 and not result.err, result.tail()
    text = result.out
    options = text[text.index("\noptions:") :]
    flags = re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", options, re.M)
    assert {"--model", "--dtype", "--device", "--seed", "--json", "--num-layers"} <= set(flags)
    for flag, entry in zip(flags, re.split(r"^  (?=-)", options, flags=re.M)[1:], strict=True):
        assert flag == "--help" or "default" in entry, entry
        for words in ([flag], [flag, "x"], [f"{flag}=x"]):
            parsed = get_args_parser().parse_args(["script.py", *words])
            assert parsed.training_script_args == words


def test_tiny_llama():
    """The embedded model is small, complete, and has sizes that differ from one another."""
    assert sum(path.stat().st_size for path in TINY.iterdir() if path.is_file()) <= 8_000_000
    source = Source("tiny")
    config, tokenizer = source.config, source.tokenizer()
    sizes = [config.hidden_size, config.num_hidden_layers, config.num_attention_heads]
    sizes += [config.num_key_value_heads, config.head_dim, config.intermediate_size]
    sizes += [config.vocab_size, config.max_position_embeddings]
    assert len(set(sizes)) == len(sizes) and config.max_position_embeddings >= 2048
    text = "Ünïcode, 中文 and a quick brown fox\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    evaluation = json.loads((TINY / "evaluation.json").read_text())
    assert evaluation["held_out"]["stories_2048"]["perplexity"] < 5
    assert set(PRESETS) >= {"small", "llama-3.2-1b", "llama-3.1-8b"}


def test_fewer_gpus_than_ranks(monkeypatch, capsys):
    """--device auto goes to the CPU, and says so; --device cuda is refused."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "_exit", sys.exit)
    device, notice = starting.choose_device("auto")
    assert device.type == "cpu" and "2 ranks but 1 GPU(s)" in notice
    with pytest.raises(SystemExit, match="2"):
        starting.choose_device("cuda")
    assert "error: --device cuda: 2 ranks but 1 GPU(s)" in capsys.readouterr().err
    # One that its driver does not make usable.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert starting.choose_device("auto") == (CPU, None)
