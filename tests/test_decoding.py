"""A decoded token in tensors that keep their places, which a CUDA graph can replay."""

import pytest
import torch
from transformers import LlamaForCausalLM

import launch
from kv_cache import (
    DecodingStep,
    choose_from_full_logits,
    generate,
    generate_in_place,
    make_cache,
    replays,
)
from planting import plant
from runs import refused

TINY = launch.TASKS / "tiny_llama"
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: no CUDA graph is recorded")


def test_refused():
    """A cache that grows, one that is too short, and no new token."""
    model = LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    ids, heads = torch.ones(1, 5, dtype=torch.long), model.config.num_key_value_heads
    for kind, length, new_tokens, said in (
        ("dynamic", 9, 4, "a StaticCache"), ("static", 9, 0, "a StaticCache"),
        ("static", 8, 4, "a cache of 8 tokens: 9 are needed"),
        ("static", 3, 4, "a cache of 3 tokens: 9 are needed"),
    ):  # fmt: skip
        cache = make_cache(kind, model, heads, 1, length)
        with pytest.raises(ValueError, match=said):
            generate_in_place(model, ids, ids, new_tokens, choose_from_full_logits, cache)
    for kind in "dynamic", "static":  # one that has another text's tokens
        cache = make_cache(kind, model, heads, 1, 20)
        generate(model, ids, ids, 4, choose_from_full_logits, cache)
        for function in (generate, generate_in_place)[: 1 + (kind == "static")]:
            with pytest.raises(ValueError, match="a cache that has tokens already"):
                function(model, ids, ids, 4, choose_from_full_logits, cache)


@pytest.mark.parametrize(
    ("device", "attention", "room"),
    [("cpu", "sdpa", 0), ("cpu", "sdpa", 5), ("cpu", "eager", 0),
     pytest.param("cuda", "sdpa", 0, marks=GPU)],
)  # fmt: skip
@pytest.mark.parametrize("new_tokens", [1, 2, 12])
def test_as_by_the_loop(device, attention, room, new_tokens):
    """Of a batch of which one prompt is padded; for one token more than the prompt, too."""
    model = LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32).to(device)
    model.set_attn_implementation(attention)
    ids = torch.randint(64, 1000, (2, 7), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    expected = generate(model, ids, mask, new_tokens, choose_from_full_logits)
    length = 7 + new_tokens + room
    cache = make_cache("static", model, model.config.num_key_value_heads, 2, length)
    found = generate_in_place(model, ids, mask, new_tokens, choose_from_full_logits, cache)
    assert found.equal(expected)


def test_nothing_is_read_back():
    """On a device without numbers a step that asks for one is an error."""
    model = LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32).to("meta")
    step, B, length = object.__new__(DecodingStep), 2, 9
    step.model, step.choose = model, choose_from_full_logits
    step.cache = make_cache("static", model, model.config.num_key_value_heads, B, length)
    with torch.device("meta"):
        step.at, step.positions = torch.tensor([4]), torch.zeros(B, 1, dtype=torch.long)
        step.row = torch.zeros(B, 1, model.config.hidden_size)
        step.ids = torch.zeros(B, length, dtype=torch.long)
        step.bias = torch.zeros(B, 1, 1, length)
    step()
    with pytest.raises(RuntimeError, match="meta"):
        step.choose = lambda model, logits: choose_from_full_logits(
            model, logits * logits.sum().item()
        )
        step()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_replays(device):
    """What is timed on a GPU: a prompt and a few steps, and then so many tokens."""
    model = LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32).to(device)
    ids, calls = torch.ones(1, 5, dtype=torch.long, device=device), []

    def choose(model, logits):
        calls.append(len(logits))
        return choose_from_full_logits(model, logits)

    phases = list(replays(model, ids, 6, choose, model.config.num_key_value_heads))
    assert phases == ["record", "generate"]
    assert len(calls) == (1 + 3 + 6 if device == "cpu" else 1 + 3 + 1)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("for tensor in self.at, self.positions:", "for tensor in (self.at,):"),
        pytest.param("self.row.copy_(row)", "self.row.copy_(self.row)", marks=pytest.mark.stress),
        pytest.param(
            "self.ids.index_copy_(1, self.at, token)",
            "self.ids.index_copy_(1, self.at - 1, token)",
            marks=pytest.mark.stress,
        ),
    ],
    ids=["positions stand still", "the same token again", "one place too early"],
)
def test_planted(right, wrong, tmp_path):
    plant(tmp_path, "kv_cache.py", right, wrong)
    names = "^(generated tokens by hand-made, cached, in place|hand-made, cached (keys|logits))"
    refused(tmp_path, "kv_cache", 2, ["--repeats", 0, "--dtype", "float64"], names)
