"""The tensor-parallel README's experiments: what a step's memory is made of, and bad input."""

import gzip
import json

import pytest
import torch

import launch
from harness.memory_profile import record_memory, write_trace
from planting import plant
from runs import refused
from utils.errors import UserError

FILE = launch.TASKS / "tp_training.py"
LOGITS = "logits and what the loss makes of them"


def test_recorded_memory():
    """The peak of what a function allocates, to the byte; nothing of what was there before."""
    before = [torch.ones(1000)]

    def function():
        first = torch.ones(3000)
        before.clear()
        second = torch.ones(5000)
        del first
        return second * 2

    curve, blocks, _ = record_memory(function, torch.device("cpu"))
    peak = max(size for _, size in curve)
    assert sum(blocks.values()) == peak == pytest.approx(40_000, abs=100)  # and a few numbers
    assert sorted(blocks.values())[-2:] == [20_000, 20_000]
    seconds = [second for second, _ in curve]
    assert seconds == sorted(seconds) and seconds[0] == 0


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.stress)])
def test_memory_of_a_step(ranks, tmp_path):
    """Three arrays as large as the logits at once; split, two of a rank's share of the words.

    The traces have what the record was made of.
    """
    path = tmp_path / "record.json"
    args = ["--profile", "--model", "random/small", "--num-layers", 1, "--json", path]
    args += ["--batch-size", 4, "--seq-len", 200, "--trace", tmp_path / "trace.json.gz"]
    result = launch.ranks(FILE, *args, nproc=ranks, folder=tmp_path)
    assert result.code == 0 and result.out.count("Tests passed") == ranks, result.tail()
    memory, V, T = json.loads(path.read_text())["results"]["memory"], 32000, 800
    assert [len(memory[name]) for name in ("one process", "TP", "TP + loss parallel")] == [
        1, ranks, ranks,
    ]  # fmt: skip
    for name, arrays, columns in (
        ("one process", 3, V), ("TP", 3, V), ("TP + loss parallel", 2, V / ranks),
    ):  # fmt: skip
        for one in memory[name]:
            assert one[LOGITS] == pytest.approx(arrays * T * columns * 4, rel=0.03), (name, one)
            parts = one[LOGITS] + one["gradients"] + one["the rest"]
            assert parts == one["peak"] == max(size for _, size in one["curve"])
    whole, split = (max(one[LOGITS] for one in memory[name]) for name in list(memory)[1:3])
    assert split < 0.55 * whole
    assert (memory["batch_size"], memory["seq_len"], memory["tokens"]) == (4, 200, T)
    traces = sorted(tmp_path.glob("*trace*"))
    for trace, name in zip(traces, ("TP", "TP + loss parallel", "one process"), strict=True):
        assert f"trace of rank 0, {name}: {trace}\n" in result.out, result.tail()
        with gzip.open(trace, "rt") as file:
            events = json.load(file)["traceEvents"]
        totals = [e["args"]["Total Allocated"] for e in events if e["name"] == "[memory]"]
        peak = memory[name][0]["peak"]  # of rank 0
        assert max(totals) - min(totals) == pytest.approx(peak, rel=0.02), (name, peak)


def test_trace_that_cannot_be_written(tmp_path):
    """A part of one, as on a full disk, is no trace: what was there before stays."""
    path = tmp_path / "trace.json"
    path.write_text("before")

    class Recorded:
        def export_chrome_trace(self, name):
            with open(name, "w") as file:
                file.write('{"traceEvents": [{"name": ')

    with pytest.raises(UserError, match=r"--trace .*: cannot be written there"):
        write_trace(Recorded(), path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_full_logits_where_they_are_to_be_split(odd_llama, tmp_path):
    """The loss of a step is compared in --profile, too."""
    right = "return log_sum - (targets_logits.sum(0) - largest)"
    plant(tmp_path, "tp_llama.py", right, "return log_sum - (target - largest)")
    args = ["--profile", "--model", odd_llama, "--seq-len", 30]
    refused(tmp_path, "tp_training", 2, args, "^TP . loss parallel: loss")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr", "9e5"], "--lr 900000.0: a loss or a norm is not finite"),
        (["--lr", "30"], "--lr 30.0: rounding alone changes the training by"),
        (["--text", "a"], "--text 'a': 1 tokens, too short"),
        (["--text", "\udcff"], "--text '\\udcff': not valid Unicode"),
        (["--seq-len", "2"], "--seq-len 2: too short to compare"),
        (["--trace", "trace.json"], "--trace: of what --profile records, give that, too"),
        (["--profile", "--trace", "/no/such/x.json"], "--trace /no/such/x.json: cannot be written"),
    ],
)
def test_refused(flags, message, tmp_path):
    result = launch.ranks(FILE, *flags, nproc=2, folder=tmp_path)
    assert result.code == 2 and message in result.errors()[0], result.tail()
