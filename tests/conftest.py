"""Fixtures: Llama directories of unusual sizes, made on the spot. And what is quick."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tasks")]


@pytest.fixture
def read_only():
    """A function that makes a folder one that nobody may write to; root neither, if it can."""
    mounted = []

    def close(folder):
        for path in [*folder.rglob("*"), folder]:
            path.chmod(path.stat().st_mode & ~0o222)
        if os.access(folder, os.W_OK):  # we are root
            command = ["mount", "-o", "bind,ro", folder, folder]
            if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
                pytest.skip("root may write everywhere, and cannot mount here")
            mounted.append(folder)

    yield close
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


QUICK = {"test_parts.py", "test_bad_input.py", "test_long_sequence.py", "test_readme.py"}


def pytest_collection_modifyitems(items):
    """`quick`: some files, and every script once, in float64 on 2 ranks."""
    for item in items:
        slow = item.name.startswith("test_other_commands") or item.get_closest_marker("stress")
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
    """One layer, one KV head, tied embeddings."""
    changes = {"num_hidden_layers": 1, "num_key_value_heads": 1, "tie_word_embeddings": True}
    return make_llama(tmp_path_factory.mktemp("shallow_llama"), **changes)
