"""Fixtures: Llama directories of unusual sizes, made on the spot."""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tasks")]


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
