"""Fixtures: Llama directories of unusual sizes, made on the spot. What is quick, and what may run
beside other tests. The CPU seconds that each script takes."""

import fcntl
import functools
import os
import re
import subprocess
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch

import launch

pytest.register_assert_rewrite("runs", "spellings")  # helpers with assertions of their own
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


def pytest_addoption(parser):
    parser.addoption("--part", default="1/1", help="K/N: of the tests marked stress the K-th of N")


def pytest_collection_modifyitems(config, items):
    """`quick`: some files, and every script once, in float64 on 2 ranks. `gpu`: see pyproject.

    --part deals the tests marked stress to N parts, by their names: all are in one of them.
    """
    part, parts = map(int, config.getoption("--part").split("/"))

    def is_in_part(item):
        stress = item.get_closest_marker("stress")
        return not stress or zlib.crc32(item.nodeid.encode()) % parts == part % parts

    if others := [item for item in items if not is_in_part(item)]:
        config.hook.pytest_deselected(items=others)
        items[:] = filter(is_in_part, items)
    for item in items:
        reasons = [mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif")]
        if any(reason.startswith("no GPU") for reason in reasons):
            item.add_marker("gpu")
        marks = {mark.name for mark in item.iter_markers()}
        slow = item.name.startswith("test_other_commands") or marks & {"stress", "real"}
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

WHOLE = "not stress and not real"  # `make test-all`, which is to take 8 minutes of 2 cores,
FIRST = {"tp_mlp", "tp_attention", "tp_llama", "dtensor_llama", "ulysses_forward",
         "ulysses_finetune", "kv_cache"}  # fmt: skip
FIRST_S, LATER_S = 8 * 60 * 2, 40 * 2  # for these, and 40 s for each that came later. CPU seconds.
# The same tests of the first ones took from 900 to 1,580 CPU seconds, by the hour. So the later
# ones are held against what these take in the same run.
FIRST_SLACK, LATER_SLACK = 2.5, 1.75
FIXED_WORK_S = (
    0.3  # of `fixed_work` on the machine of these limits; on a slower one they are higher
)
SHOWN_S = 15 * 2  # what a later one may take of `make demo`, too: as the README shows it
SPENT = Counter()  # {script: CPU seconds of the tests that start it and no other}
SHOWN = " as shown"  # {script + SHOWN: of these what the README's own command takes}


def cpu_seconds():
    """Of this process, of those that it has started and that have ended, and of the ranks."""
    return sum(os.times()[:4]) + launch.Nursery.cpu_s


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    launch.STARTED.clear()
    before = cpu_seconds()
    result = yield
    (script,) = launch.STARTED if len(launch.STARTED) == 1 else ("",)
    script = script if script in launch.SCRIPTS else "the rest"
    SPENT[script] += (seconds := cpu_seconds() - before)
    if item.name.startswith("test_as_shown"):
        SPENT[script + SHOWN] += seconds
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """pytest-xdist: one of its processes has ended, and tells what its tests took."""
    SPENT.update(getattr(node, "workeroutput", {}).get("spent", {}))


@functools.cache
def fixed_work():
    """CPU seconds of some work that is always the same: products of matrices, and a loop."""
    x, begin = torch.ones(512, 512), time.process_time()
    for _ in range(100):
        x = (x @ x).clamp(max=1)
    total = 0
    for i in range(3_000_000):
        total += i
    return time.process_time() - begin


def over_budget(config):
    """What takes too long of `make test-all` and of `make demo`, in words.

    It is printed on every machine; a run ends as failed for it with CI=true alone.
    """
    if config.option.markexpr != WHOLE:
        return
    pace = max(1, fixed_work() / FIXED_WORK_S)
    first = sum(s for name, s in SPENT.items() if name in FIRST or name == "the rest")
    limits = {"the first seven scripts and the rest": (first, FIRST_S, FIRST_SLACK)}
    slack = LATER_SLACK * max(1, first / FIRST_S)
    for script in set(launch.SCRIPTS) - FIRST:
        limits[script] = SPENT[script], LATER_S, slack
        shown = (launch.ROOT / "figures" / "outputs" / f"{script}.txt").read_text()
        ranks = int(re.search(r"--nproc_per_node (\d+)", shown)[1])  # `make demo` has 2
        limits[script + SHOWN] = SPENT[script + SHOWN], SHOWN_S * max(1, ranks / 2), slack
    for name, (seconds, limit, times) in limits.items():
        if seconds > times * limit * pace:
            yield (f"the tests of {name} took {seconds:.0f} CPU seconds, of {limit}, and more than "
                   f"{times * pace:.2f} times as many")  # fmt: skip


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["spent"] = dict(SPENT)
    elif os.environ.get("CI") == "true" and session.exitstatus == 0:
        session.exitstatus = int(any(over_budget(session.config)))


def pytest_terminal_summary(terminalreporter, config):
    taken = (f"{script} {seconds:.0f}" for script, seconds in sorted(SPENT.items()))
    terminalreporter.line(f"CPU seconds by script: {', '.join(taken)}")
    for line in over_budget(config):
        failed = "FAILED" if os.environ.get("CI") == "true" else "note:"
        terminalreporter.line(f"{failed} {line}", red=True)


def make_llama(directory, kind="Llama", **changes):
    """Save a random Llama with biases, an untied head, and sizes that divide by next to nothing.

    kind: or one of its relatives, as its classes are called. A change to None takes a setting out.
    """
    import transformers

    settings = dict(
        hidden_size=42, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3,
        head_dim=10, intermediate_size=53, vocab_size=211, max_position_embeddings=300,
        tie_word_embeddings=False, attention_bias=True, mlp_bias=True, pad_token_id=150,
    )  # fmt: skip
    settings |= changes
    out = [name for name in ("head_dim", "attention_bias", "mlp_bias") if settings[name] is None]
    settings = {name: value for name, value in settings.items() if name not in out}
    config, model = (getattr(transformers, kind + of) for of in ("Config", "ForCausalLM"))
    torch.manual_seed(0)
    model = model(config(**settings))
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
