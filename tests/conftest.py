"""Fixtures: Llama directories of unusual sizes, made on the spot. What is quick, and what may run
beside other tests. The CPU seconds that each script takes."""

import fcntl
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import launch

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


# ---------------------------------------------------------------- several tests at once


@pytest.fixture(scope="session")
def turnstile(tmp_path_factory):
    """A folder that all of pytest-xdist's processes know, for the two files that they lock."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(autouse=True)
def turn(request, turnstile):
    """A test marked `alone` waits until no other runs, and then lets none begin beside it."""
    alone = request.node.get_closest_marker("alone")
    with open(turnstile / "gate", "w") as gate, open(turnstile / "room", "w") as room:
        fcntl.flock(gate, fcntl.LOCK_EX)  # who waits for the room keeps all others before the gate
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


# ---------------------------------------------------------------- what each script takes

WHOLE = "not stress and not real"  # `make test-all`
SPENT = Counter()  # {script: CPU seconds of the tests that start it}


def cpu_seconds():
    """Of this process, of those that it has started and that have ended, and of the ranks."""
    return sum(os.times()[:4]) + launch.Nursery.cpu_s


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    launch.STARTED.clear()
    before = cpu_seconds()
    result = yield
    (script,) = launch.STARTED if len(launch.STARTED) == 1 else ("",)
    SPENT[script if script in launch.SCRIPTS else "the rest"] += cpu_seconds() - before
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """pytest-xdist: one of its processes has ended, and tells what its tests took."""
    SPENT.update(getattr(node, "workeroutput", {}).get("spent", {}))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["spent"] = dict(SPENT)
    elif over_budget(session.config):
        session.exitstatus = session.exitstatus or 1


def pytest_terminal_summary(terminalreporter, config):
    taken = (f"{script} {seconds:.0f}" for script, seconds in sorted(SPENT.items()))
    terminalreporter.line(f"CPU seconds by script: {', '.join(taken)}")
    for line in over_budget(config):
        terminalreporter.line(f"FAILED {line}", red=True)


def over_budget(config):
    return []


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
