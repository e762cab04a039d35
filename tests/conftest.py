"""Fixtures: Llama directories of unusual sizes, made on the spot. And what is quick."""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tasks")]


QUICK = {"test_parts.py", "test_bad_input.py", "test_long_sequence.py", "test_readme.py"}


def pytest_collection_modifyitems(items):
    """`quick`: some files, and every script once, in float64 on 2 ranks."""
    for item in items:
        slow = item.name.startswith("test_other_commands")
        once = item.name.startswith("test_float64[") and item.name.endswith("-2]")
        if once or (item.path.name in QUICK and not slow):
            item.add_marker("quick")


def make_llama(directory, **changes):
    """Save a random Llama with biases, an untied head, and sizes that divide by next to nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = dict(
        hidden_size=42, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3,
        head_dim=10, intermediate_size=53, vocab_size=211, max_position_embeddings=300,
        tie_word_embeddings=False, attention_bias=True, mlp_bias=True, pad_token_id=150,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + ("norm" in name))
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def odd_llama(tmp_path_factory):
    """6 query and 3 KV heads of 10, hidden 42, prime MLP and vocabulary, biases, untied."""
    return make_llama(tmp_path_factory.mktemp("odd_llama"))


@pytest.fixture(scope="session")
def shallow_llama(tmp_path_factory):
    """B13: one layer, one KV head, tied embeddings."""
    changes = {"num_hidden_layers": 1, "num_key_value_heads": 1, "tie_word_embeddings": True}
    return make_llama(tmp_path_factory.mktemp("shallow_llama"), **changes)
