"""What is measured and drawn: quickly, on the embedded model."""

import contextlib
import importlib.util
import json
import statistics
import sys
import threading
import time
from collections import Counter
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import launch
import nursery
from figures.bench import (
    gpu,
    longest,
    one_step,
    one_token,
    records,
    strategies,
    tolerance,
    tp_speed,
    training_memory,
    worker_speed,
)
from figures.draw import kinds
from figures.draw.diagrams import TITLES, Diagram
from figures.draw.mesh_diagrams import MeshPicture
from figures.draw.ring import RingPicture
from figures.plan import longest as longest_plan
from harness.flags import make_parser
from harness.tolerance import LIMITS
from utils.errors import UserError

TECHNIQUES = ["hand-made", "DTensor"]
if importlib.util.find_spec("transformers.distributed"):  # not in the course's version
    TECHNIQUES.append("transformers")
TECHNIQUES += [f"{name}, gloo" for name in TECHNIQUES]
SPEED = launch.program("bench.tp_speed")
DIAGRAMS, MESH_DIAGRAMS = (
    launch.RECORDS / f"{name}.json" for name in ("diagrams", "mesh_diagrams")
)


@pytest.mark.stress
@pytest.mark.alone
def test_bytes_on_the_wire(tmp_path):
    """Every technique sends what its formula says, within 2 %, and its loss is the reference's."""
    output = tmp_path / "speed.json"
    args = ["--model", "tiny", "--ranks", 2, "--seq-lens", 1024, "--repeats", 1]
    args += ["--techniques", *TECHNIQUES]
    result = launch.run([*SPEED, *args, "--output", output])
    assert result.code == 0, result.tail()
    runs = json.loads(output.read_text())["runs"]
    assert [run["technique"] for run in runs] == TECHNIQUES
    for run in runs:
        results = run["results"]
        assert results["parallel"].keys() == {"forward", "backward", "generate"}
        assert results["sent_bytes"] == pytest.approx(results["formula_bytes"])
        wire = pytest.approx(results["formula_bytes"], rel=0.02)
        assert results["wire_bytes"] == (wire if "gloo" in run["technique"] else [None, None])
    checks = {check["name"]: check["passed"] for run in runs for check in run["checks"]}
    assert checks == {f"{technique}: loss": True for technique in TECHNIQUES}
    # Nothing is measured twice where an interrupted comparison goes on.
    result = launch.run([*SPEED, *args, "--missing", "--output", output])
    assert result.code == 0 and "nothing to measure" in result.out, result.tail()
    assert json.loads(output.read_text())["runs"] == runs


def test_gpus_are_named_that_were_used(monkeypatch):
    """Not all that the machine has."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")
    assert records.machine()["gpus"] == records.machine("cpu", 2)["gpus"] == []
    assert records.machine("cuda", 1)["gpus"] == ["GPU 0"]
    assert records.machine("cuda", 5)["gpus"] == ["GPU 0", "GPU 1"]  # ranks share them


def test_bytes_of_the_comparison():
    """Of all that was measured: sent is what the formula says, within 2 %; by gloo it was seen."""
    runs = json.loads((launch.RECORDS / "tp_speed.json").read_text())["runs"]
    runs = [run["results"] for run in runs if run["world_size"] > 1]
    assert runs
    for results in runs:
        assert results["sent_bytes"] == pytest.approx(results["formula_bytes"], rel=0.02)
        for sent, wire in zip(results["sent_bytes"], results["wire_bytes"], strict=True):
            assert wire is None or wire > 0.9 * sent


@pytest.mark.parametrize("failures", [0, 1, 2, 3])
def test_short_of_memory(failures, tmp_path, monkeypatch):
    """A job that fails is tried again with less in memory, and the others go on."""
    tries, output, laps = [], tmp_path / "speed.json", {"forward": [1.0], "backward": [2.0]}

    def job(ranks, threads, words):
        length, layers = (words[words.index(flag) + 1] for flag in ("--seq-len", "--num-layers"))
        assert layers == (4 if length == 512 else 2)
        of = [technique for technique in TECHNIQUES[:2] if technique in words]
        if (ranks, length) == (2, 512):
            tries.append((len(of), "--giving-back" in words))
            if len(tries) <= failures:
                return None
        return {"results": {technique: {"single": laps, "parallel": laps} for technique in of}}

    monkeypatch.setattr(tp_speed, "job", job)
    monkeypatch.setattr(tp_speed.os, "cpu_count", lambda: 2)
    techniques = " ".join(TECHNIQUES[:2])
    words = f"tp_speed.py --ranks 1 2 4 --techniques {techniques} --output {output}"
    monkeypatch.setattr(sys, "argv", words.split())
    failed = r"failed: hand-made on 2 rank\(s\) at 512 tokens. The rest is in"
    with pytest.raises(SystemExit, match=failed) if failures == 3 else contextlib.nullcontext():
        tp_speed.main()
    again = [(1, False), (1, True)][:failures]  # of the first technique
    assert tries == [(2, False), *again, *([(1, False)] if failures else [])]
    runs = json.loads(output.read_text())["runs"]
    lost = [("hand-made", 2, 512)] if failures == 3 else []
    sizes = {(1, 512), (2, 512), (4, 512), (1, 2048), (2, 2048)}  # 4 ranks share 2 cores
    wanted = {(technique, *size) for technique in TECHNIQUES[:2] for size in sizes}
    assert {(r["technique"], r["world_size"], r["seq_len"]) for r in runs} == wanted - {*lost}


def test_measured_elsewhere(tmp_path, capsys):
    """Another machine's measurements are not mixed with one's own, nor lost."""
    path, here = tmp_path / "speed.json", {"machine": "here"}
    for number, name in enumerate(["there", "elsewhere"], 1):
        before = records.resume(path, {"machine": name})
        records.add(path, before, {"ranks": 2}, {"seconds": 3})
        records.add(path, before, {"ranks": 2}, {"seconds": 4})
        assert records.resume(path, here) == here | {"runs": []}
        assert json.loads(path.read_text()) == before  # until something comes in its place
        records.add(path, here | {"runs": []}, {"ranks": 2}, {"seconds": 5})
        assert f"speed.{2 * number - 1}.json now" in capsys.readouterr().out
        kept = json.loads((tmp_path / f"speed.{2 * number - 1}.json").read_text())
        assert kept == before and [run["seconds"] for run in kept["runs"]] == [4]
        assert [run["seconds"] for run in records.resume(path, here)["runs"]] == [5]


def test_record_in_lines(tmp_path):
    """As JSON has it, with numbers as keys and braces in strings; an innermost object a line."""
    data = {1: [{"a": {2: None}}, {"b": [[0.1, 2], []]}], "c": ["{", {}], "d": "a [ b {c}"}
    records.write_record(tmp_path / "record.json", data)
    text = (tmp_path / "record.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(data))
    records.write_record(tmp_path / "record.json", {"off": [inf, -inf, nan, 1.0]})
    assert (tmp_path / "record.json").read_text() == '{"off": [null, null, null, 1.0]}\n'
    assert '\n  {"b": [[0.1, 2], []]}\n' in text


@pytest.mark.parametrize(
    "name",
    ["tp_speed", "longest", "sequence_speed", "ring_speed_2", "pretraining_loss", "estimate"],
)
def test_drawing(name, tmp_path):
    """The committed measurements can be drawn; a step by selective checkpoints, too."""
    files = ["ulysses_speed", "long_speed"] if name == "sequence_speed" else [name]
    data = {file: json.loads((launch.RECORDS / f"{file}.json").read_text()) for file in files}
    for count in (1, 2) if name == "sequence_speed" else (1,):
        make = kinds.kind(data[name]) if name in data else kinds.draw_sequence_speed
        make(data.get(name, data), tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 10_000
        if count == 1 and "long_speed" in data:
            steps = {"step_s": [1.0, 2.0]}
            data["long_speed"]["results"]["selective checkpoint, tiled loss and MLP"] = steps


@pytest.mark.stress
def test_thread_speed(tmp_path):
    """Both modes train, an epoch each in turns; the first warms up; a figure for each metric."""
    path = tmp_path / "speed.json"
    sizes = ["--seq-len", 16, "--batch-size", 6, "--split-size", 2, "--num-sequences", 20]
    model = ["--model", "random/gpt2-small-test", "--epochs", 3]
    result = launch.run([*launch.program("bench.thread_speed"), *model, *sizes, "--json", path])
    assert result.code == 0, result.tail()
    data = json.loads(path.read_text())
    for mode in "model_parallel", "pipeline_parallel":
        epochs = data["modes"][mode]
        seconds = [one["training_time_s"] for one in epochs]
        assert [one["epoch"] for one in epochs] == [0, 1, 2] and min(seconds) > 0
        median = f"{mode}: training time {statistics.median(seconds[1:]):.2f} s, tokens per second"
        assert median in result.out, result.tail()
    kinds.kind(data)(data, tmp_path / "speed.png")
    for metric in "time", "tokens":
        assert (tmp_path / f"speed_{metric}.png").stat().st_size > 10_000


def test_contenders_of_the_longest_sequence():
    """Each is started with flags that its script knows, and is estimated to hold more than ours."""
    config = longest.Source("random/small").config
    for name in longest_plan.CONTENDERS:
        script, *flags = map(str, longest.command(name, 100, 64, []))
        known = Path(script).read_text()
        if "add_memory_flags(" in known:
            known += (launch.TASKS / "harness" / "finetune.py").read_text()
        own = {flag.removeprefix("--no-").removeprefix("--") for flag in flags if flag[:2] == "--"}
        more = longest_plan.a_token(name, config, 1, 4) - longest_plan.a_token("ours", config, 1, 4)
        same = name in ("ours", longest_plan.SEGMENTS)
        assert more < 0 if name == "ours, offload" else more > 0 or (same and more == 0)
        common = make_parser("").format_help() if "make_parser(" in known else ""
        for flag in own:
            assert flag in known or f"--{flag} " in common, (name, flag)


@pytest.mark.parametrize(
    ("record", "nproc", "pictures"),
    [
        (DIAGRAMS, 2, TITLES),
        pytest.param(MESH_DIAGRAMS, 4, ("ring", "mesh"), marks=pytest.mark.stress),
    ],
)
def test_diagrams(record, nproc, pictures, tmp_path):
    """What a run holds and sends is what is committed; both pictures are drawn from that."""
    output = tmp_path / "record.json"
    flags = ["--device", "cpu", "--json", output]
    file = launch.FIGURES / "bench" / f"{record.stem}.py"
    result = launch.ranks(file, *flags, nproc=nproc, folder=tmp_path)
    assert result.code == 0, result.tail()
    data = json.loads(record.read_text())
    assert json.loads(output.read_text())["results"] == data["results"]
    kinds.kind(data)(data, tmp_path / "picture.png")
    for name in pictures:
        assert (tmp_path / f"{name}_diagram.png").stat().st_size > 100_000


ONCE = "tolerance", "one_step", "attention_peers"  # without turns


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("decoding", ["--techniques", "hand-made", "--prompt-len", 16, "--new-tokens", 4]),
        ("long_speed", ["--seq-len", 128]),
        pytest.param("ulysses_speed", ["--seq-len", 64], marks=pytest.mark.stress),
        ("tolerance", ["--texts", 1]), ("one_step", ["--positions", 256]),
        pytest.param(
            "pipeline", ["--seq-len", 16, "--microbatches", 2], marks=pytest.mark.stress
        ),
        ("data_speed", ["--seq-len", 16, "--batch-size", 2]),
        pytest.param("strategies", ["--seq-len", 16, "--only", "ddp"], marks=pytest.mark.stress),
        ("ring_speed", ["--seq-len", 64]),
        pytest.param("mesh_speed", ["--seq-len", 16, "--batch-size", 2], marks=pytest.mark.stress),
        pytest.param("sequence_speed", ["--seq-len", 64, "--budget", 12], marks=pytest.mark.stress),
        pytest.param("compiled", ["--seq-len", 64], marks=pytest.mark.stress),
        pytest.param("overlap", ["--seq-len", 16], marks=pytest.mark.stress),
        ("one_token", ["--prompt-len", 16, "--new-tokens", 3, "--batch-sizes", 1]),
        ("attention_peers", []),
        ("precise_sums", ["--kib", 8, "--dtype", "bfloat16", "--gloo"]),
    ],
)  # fmt: skip
def test_measured_on_ranks(script, flags, tmp_path):
    """What the others measure on ranks, on as little as can be: nothing of it is else run here."""
    flags = [*flags, "--model", "tiny", "--json", tmp_path / "record.json"]
    flags += ["--repeats", 1] if script not in ONCE else []
    file, nproc = launch.FIGURES / "bench" / f"{script}.py", 1 if script.startswith("one_") else 2
    result = launch.ranks(file, *flags, nproc=nproc, folder=tmp_path)
    assert result.code == 0 and result.out.count("Tests passed") == nproc, result.tail()
    assert json.loads((tmp_path / "record.json").read_text())


def test_worker_speed(monkeypatch, tmp_path, capsys):
    """The course's metrics, of numbers that are known: the first epoch is left out, times are
    averaged over workers, tokens per second summed. Both figures are drawn.
    """

    def train(workers, args):
        jobs.append(workers)
        seconds = [100.0, 4.0 + len(jobs), 6.0 + len(jobs)]
        epochs = [
            [{"rank": rank, "epoch": i, "training_time_s": s + rank, "tokens_per_second": 60 / s,
              "validation_loss": 5.0, "losses": [5.0]} for rank in range(workers)]
            for i, s in enumerate(seconds)
        ]  # fmt: skip
        return {"results": {"epochs": {"by-hand": epochs}}, "device": "cpu", "model": "tiny",
                "dtype": "float32", "backend": "gloo",
                "versions": {"torch": "2", "transformers": "5"}}  # fmt: skip

    jobs, path = [], tmp_path / "speed.json"
    monkeypatch.setattr(worker_speed, "train", train)
    words = ["worker_speed", "--workers", "1", "2", "--rounds", "2", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", words)
    worker_speed.main()
    assert jobs == [1, 2, 2, 1]  # in turns
    printed = capsys.readouterr().out
    # One worker: 5, 7, 8, 10 s; two: 6, 8, 7, 9 s and half a second more.
    assert (
        "1 worker(s), batch 64: training time 7.50 +- 2.08 s, tokens per second 9 +- 3" in printed
    )
    assert (
        "2 worker(s), batch 128: training time 8.00 +- 1.29 s, tokens per second 16 +-" in printed
    )
    data = json.loads(path.read_text())
    assert set(data["workers"]["2"][0][0][1]) == set(worker_speed.KEPT)
    kinds.kind(data)(data, tmp_path / "speed.png")
    for name in "time", "tokens":
        assert (tmp_path / f"speed_{name}.png").stat().st_size > 10_000


@pytest.mark.stress
def test_worker_speed_runs(tmp_path):
    """The program itself, on as little as can be."""
    words = ["--model", "random/gpt2-small-test", "--workers", 1, 2, "--batch-size", 2]
    words += ["--seq-len", 16, "--num-sequences", 12, "--epochs", 2, "--rounds", 1]
    words += ["--json", tmp_path / "speed.json"]
    result = launch.run([*launch.program("bench.worker_speed"), *words])
    assert result.code == 0 and "2 worker(s), batch 4: training time" in result.out, result.tail()


def test_strategies(monkeypatch, tmp_path, capsys):
    """Each is a job of its own, in turns; the table has the largest peak, and all ranks' tokens."""

    def on_ranks(file, nproc, *flags, **more):
        name = flags[flags.index("--only") + 1]
        jobs.append(name)
        row = {"tensors": (3 + len(jobs)) * 10**9, "estimate": 4e9, "process": 5e9, "bytes": [0, 0]}
        results = {"step_s": [0.5, 0.25, 4.0], "techniques": {name: row}}
        record = {"results": results, "device": "cpu", "model": "tiny", "dtype": "float32"}
        record |= {"backend": "gloo", "versions": {"torch": "2", "transformers": "5"}}
        return record, None

    jobs, path = [], tmp_path / "strategies.json"
    monkeypatch.setattr(strategies, "torchrun", on_ranks)
    monkeypatch.setattr(sys, "argv", ["strategies", "--device", "cpu", "--json", str(path)])
    strategies.main()
    names = list(strategies.STRATEGIES)
    assert jobs == names + names[1:] + names[:1]
    printed = capsys.readouterr().out
    assert "| one process | 1 | 2 x 64 | 256 | 13.00 | 4.00 | 5.00 |" in printed
    assert "| ddp | 2 | 4 x 64 | 512 | 10.00 | 4.00 | 5.00 |" in printed
    data = json.loads(path.read_text())
    assert strategies.rows(data)[2] in printed
    assert "| zero1 | | | not run" in "\n".join(
        line.replace("|  |  |", "| | |") for line in strategies.rows(None, strategies.ARTICLE_GB)
    )


@pytest.mark.parametrize("name", ["pipeline", "data_parallel"])
def test_recorded(name):
    """Bytes as the formulas have them; with FSDP2 a rank has its share of everything."""
    record = json.loads((launch.RECORDS / f"{name}.json").read_text())
    results, ranks = record["results"], record["world_size"]
    assert len(results["bytes"]) == (6 if name == "pipeline" else 4)
    for sent, formula, _ in results["bytes"].values():
        assert sent == pytest.approx(formula, rel=0.02)
    if name == "data_parallel":
        whole = results["memory_bytes"]["by-hand"][0]
        for of_rank in results["memory_bytes"]["fsdp2"]:
            for mine, all_of_it in zip(of_rank[:3], whole, strict=False):
                assert mine == pytest.approx(all_of_it / ranks, rel=0.05)


def test_training_memory(tmp_path, monkeypatch):
    """The README's size goes beside the other records, on what fits; and all of it is drawn."""
    gib, ranks = 2**30, 2
    assert training_memory.readme_model(ranks, 100 * gib) == "random/small-50k"
    assert training_memory.readme_model(ranks, 23 * gib) == "random/small-8k"
    with pytest.raises(SystemExit, match="error: 9 GiB of memory: 2 ranks need 19 for 8,192"):
        training_memory.readme_model(ranks, 9 * gib)

    def on_ranks(file, nproc, *flags):
        args = [*flags, "--json", tmp_path / "run.json"]
        result = launch.ranks(file, *args, nproc=nproc, folder=tmp_path)
        assert result.code == 0, result.tail()
        return json.loads((tmp_path / "run.json").read_text()), SimpleNamespace(stdout=result.out)

    output, small = tmp_path / "record.json", ["--num-layers", 1, "--batch-size", 3, "--seq-len", 9]
    recorded = json.loads((launch.RECORDS / "training_memory.json").read_text())
    others = [one for one in recorded["profiles"] if one["model"] in training_memory.SIZES]
    stale = {"model": "random/small-50k"}
    output.write_text(json.dumps(recorded | {"profiles": [*others, stale]}))
    monkeypatch.setattr(training_memory, "torchrun", on_ranks)
    monkeypatch.setattr(training_memory, "README", small)
    monkeypatch.setattr(training_memory, "room", lambda ranks: 23 * gib)
    monkeypatch.setattr(sys, "argv", ["training_memory.py", "--readme-only", "--json", str(output)])
    training_memory.main()
    data = json.loads(output.read_text())
    assert data["profiles"][:-1] == others
    last = data["profiles"][-1]
    sizes = [last[name] for name in ("model", "batch_size", "seq_len", "tokens", "vocab_size")]
    assert sizes == ["random/small-8k", 3, 9, 27, 8192]
    kinds.kind(data)(data, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 50_000


@pytest.mark.parametrize(("technique", "count"), [("tp", 7), ("ulysses", 6)])
def test_diagrams_show_every_collective(technique, count, tmp_path):
    """None is left out: each has its place between two rows, and every such place is drawn."""
    diagram = Diagram(json.loads(DIAGRAMS.read_text()), technique)
    assert sum(map(len, diagram.sent.values())) == count

    class Asked(dict):
        def get(self, key):
            drawn.add(key)
            return super().get(key)

    drawn, diagram.sent = set(), Asked(diagram.sent)
    diagram.draw(tmp_path / "picture.png")
    assert drawn >= diagram.sent.keys() and (0, True) not in diagram.sent


def test_mesh_diagrams_show_every_collective(tmp_path):
    """Of a ring all blocks and messages, of a mesh all collectives; and bytes are the formulas'."""
    data = json.loads(MESH_DIAGRAMS.read_text())
    ring, mesh, results = RingPicture(data), MeshPicture(data), data["results"]
    for picture in ring, mesh:
        picture.draw(tmp_path / "picture.png")
    drawn = Counter()
    for told in results["ring"].values():
        sent = {"forward": [], "backward": []}
        for event in told["hops"]:
            drawn["blocks"] += len(event["computes"]) * (event["phase"] == "forward")
            sent[event["phase"]] += [*event["sends"], *event.get("gradients", [])]
        sums = [sum(nbytes for *_, nbytes in of) for of in sent.values()]
        assert [total / results["sizes"]["P"] for total in sums] == told["formula"]
        # Backward, keys and values travel as forward, and are not drawn again.
        drawn["messages"] += len(sent["backward"])
    assert ring.drawn == drawn == {"blocks": 10 + 36, "messages": 12 + 36}
    events = [of["events"] for key, of in results["mesh"].items() if key in mesh.variants]
    assert mesh.drawn == sum(map(len, events)) == 13 + 22


@pytest.mark.parametrize("limit", [0, 45, 1000, 1040, 5000, 123456])
@pytest.mark.parametrize("estimate", [50, 1000, 130000])
def test_search(limit, estimate, monkeypatch):
    """From any estimate to a length that fits, while 5 % more does not; few runs if it was good."""
    tried = []

    def fits(name, ranks, length, budget, model):
        tried.append(length)
        used = 0.85 * 64 * 2**20 * length / limit if limit else 0  # of the budget; the rest is lost
        results = {"idle_memory_bytes": [7], "peak_memory_bytes": [7 + int(used)]}
        return {"length": length, "results": results} if length <= limit else None

    monkeypatch.setattr(longest, "fits", fits)
    found, record = longest.search("ours", 1, 64, estimate)
    if limit < 34:
        assert (found, record) == (0, None)
    else:
        assert found <= limit <= found * longest.GRAIN + 1 and record["length"] == found
        assert len(tried) == len(set(tried)) and len(tried) <= 14
    if estimate * 0.95 < limit < estimate * 1.05:
        assert len(tried) <= 2 or limit < 1000


OUTPUTS = {
    # what a job printed that failed: whether it was for memory
    "error: out of memory: 1 x 99 positions on 1 rank(s) do not fit\nexitcode  : 2": True,
    "frame #1: CUDACachingAllocator\nPYTORCH_ALLOC_CONF=\nRuntimeError: a bug": False,
    "note: out of memory, some say\nerror: --seq-len 1: too short": False,
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_what_does_not_fit(output, monkeypatch):
    """A job's error line alone tells; one that failed otherwise ends the search."""
    monkeypatch.setattr(longest, "torchrun", lambda *a, **k: (None, SimpleNamespace(stdout=output)))
    refused = contextlib.nullcontext() if OUTPUTS[output] else pytest.raises(SystemExit)
    with refused:
        assert longest.fits("ours", 1, 99, 64, []) is None


def test_longest_as_estimated():
    """What is committed: all found within 10 % of the closed form."""
    for run in json.loads((launch.RECORDS / "longest.json").read_text())["runs"]:
        assert run["found"] == pytest.approx(run["estimate"], rel=0.1), run


def test_segments_of_a_gpu():
    """How the allocator of a GPU lays tensors, by hand: four of just 5 MiB into 20, then three."""
    five, mib = 5 * 2**20 // 512, 2**20  # tokens of 512 bytes
    assert longest_plan.segments([(128, 512)], five) == 640 * mib
    assert longest_plan.segments([(128, 512)], five + 1) == 43 * 20 * mib  # each 512 bytes more
    assert longest_plan.segments([(16, 16)], five) == 2 * 2 * mib  # of 160 KiB, 12 into 2 MiB
    assert longest_plan.segments([(3, 4096)], five) == 3 * 40 * mib
    assert longest_plan.segments([(3, 4096)], five + 1) == 3 * 42 * mib


# What the first run on a GPU found, from which the formula was corrected.
FIRST_RUN = {
    "contender": "ours", "budget_mib": 1024, "found": 9930, "measured_bytes": 89354.15750251763,
    "estimate": 12674, "predicted_bytes": 81408,
}  # fmt: skip


def hold_against_formula(run, config):
    """What was measured is the formula's within 2 %. Returns what fitted, of what should fit."""
    device, budget, of = torch.device("cuda"), run["budget_mib"] * 2**20, run["contender"]
    said = longest_plan.expected(of, config, 2, run["found"], budget, device)
    assert run["measured_bytes"] * run["found"] == pytest.approx(said, rel=0.02), (run, said)
    return run["found"] / longest_plan.estimate(of, config, 1, 2, budget, device)


def test_longest_of_a_gpu():
    """What a GPU held is the formula's within 2 %, and what fitted is no more than it says.

    The formula before, which knew neither the end of the loss nor segments, is refused by both.
    """
    folder, steps, lengths = launch.RECORDS / "gpu", 0, {}
    for path in folder.glob("*.json"):
        one = json.loads(path.read_text())
        if "positions" in one:
            source, name = (
                longest.Source(one["model"]),
                "ours, offload" if one["offload"] else "ours",
            )
            sizes = source.config, 2, one["positions"], 2**30, longest_plan.tensors
            weights = 2 * sum(torch.Size(shape).numel() for shape in source.shapes.values())
            said = weights + longest_plan.most(name, *sizes)
            assert one["peak_bytes"] == pytest.approx(said, rel=0.02), (path, said)
            steps += 1
        for run in (run for run in one.get("runs", []) if "found" in run):
            config = longest.Source(one["model"]).config
            lengths[run["contender"]] = hold_against_formula(run, config)
    config = longest.Source("random/llama-3.2-1b").config
    assert 0.95 < hold_against_formula(FIRST_RUN, config) <= 1
    measured = FIRST_RUN["measured_bytes"] * FIRST_RUN["found"]
    predicted = FIRST_RUN["predicted_bytes"] * FIRST_RUN["found"]
    assert predicted + longest_plan.OTHER < 0.95 * measured
    assert FIRST_RUN["found"] / FIRST_RUN["estimate"] < 0.8
    assert steps and 0.95 < lengths["ours"] <= 1 and 0.9 < lengths["selective checkpoint"] <= 1


def test_tolerance_table():
    """It is of the record beside it, by the limits of today; no right run was refused.

    None came to three quarters of a limit, as LIMITS' comment says, and what is small is refused.
    """
    path = launch.RECORDS / "tolerance.json"
    whole = json.loads(path.read_text())
    assert whole["limits"] == LIMITS
    other = json.loads(path.with_stem("rounding").read_text())
    assert (launch.FIGURES / "tolerance.md").read_text() == tolerance.table(whole, other)
    runs = {(run["model"], run["dtype"], run["ranks"]) for run in whole["runs"]}
    assert runs == {
        (model, dtype, count)
        for model, (_, ranks) in tolerance.MODELS.items()
        for dtype in tolerance.DTYPES
        for count in ranks
    }
    for run in whole["runs"]:
        assert not run["refused"] and run["measured"] > 50, run
        assert all(run["times"][kind] < 0.75 * limit for kind, limit in LIMITS.items()), run
        if run["dtype"] == "float32":
            assert run["smallest_refused"]["a KV head's gradient"] < 0.01, run
            assert run["smallest_refused"]["a norm's gradient"] < 0.001, run


def test_rounding_record():
    """With other roundings no right run was refused, none came near, and no wrong one passed.

    But for bfloat16, whose errors hide a single row of few tokens.
    """
    record = json.loads((launch.RECORDS / "rounding.json").read_text())
    assert record["limits"] == LIMITS
    kinds = {"few tokens": 0, "script": 0, "planted bug": 0}
    for run in record["runs"]:
        kinds[run["what"]] += 1
        if run["what"] == "planted bug":
            assert run["refused"], run
            continue
        assert not run["refused"] and run["nearest"] < 0.75, run
        for what, (number, refused) in run.get("wrong", {}).items():
            hidden = run["dtype"] == "bfloat16" and what == "one row"
            assert refused == number > 0 or hidden, run
    assert all(kinds.values()), kinds


# What parts of `make gpu` leave, and what is said of it.
TESTS = '<testsuite errors="0" failures="0" skipped="1" tests="2"/>'
CHECKS = [{"name": "golden x", "share": 0.9}, {"name": "y", "share": 0.5}]
RECORD = {"task": "t", "model": "tiny", "checks": CHECKS, "world_size": 2, "dtype": "float64",
          "device": "cpu", "backend": "gloo"}  # fmt: skip
SAID = (
    "of--junitxml: 2 tests, 0 failures, 0 errors, 1 skipped",
    "tiny, 2 ranks, float64: 1 of 3 tasks passed on cpu by gloo, 2 checks, nearest to its "
    "tolerance 50% (t)",
    "fails: FAILED: error: it has to",
    "hangs: FAILED: TIMEOUT: killed after 10 s",
)
WRITES = "import pathlib, sys; pathlib.Path(sys.argv[-1]).write_text({!r})"
ENDS = {
    "passes": WRITES.format(json.dumps(RECORD)),
    "fails": "import sys; sys.exit(print('error: it has to') or 2)",
    "hangs": "import time; time.sleep(60)",
}


@pytest.mark.stress
def test_steps_of_gpu(tmp_path, monkeypatch, capfd):
    """Files of all kinds become table and picture; what failed is run again, and no more.

    Scripts' ranks are forked beside one another; one that fails or hangs keeps none from passing.
    """
    scripts = {name: tmp_path / f"{name}.py" for name in ENDS}
    for name, path in scripts.items():
        path.write_text(ENDS[name])

    def parts(device, smollm2=None):
        words = ["-c", WRITES.format(TESTS)]
        yield gpu.Part(3, "of--junitxml", words, size=1, json_flag="--junitxml")
        for name, path in scripts.items():
            yield gpu.Part(3, name, [path, "--dtype", "float64"], ranks=2, size=2)

    monkeypatch.setattr(gpu, "parts", parts)
    monkeypatch.setattr(gpu.Jobs, "fork_from", staticmethod(lambda env: launch.nursery()))
    monkeypatch.setitem(gpu.JOB_S, "cpu", 10)
    out = tmp_path / "out"
    out.mkdir()
    assert sorted(gpu.drive([3], out, "cpu")) == ["fails", "hangs"]
    assert "4 of 4 to run" in capfd.readouterr().out
    seen, picture = (out / "gpu.md").read_text(), out / "gpu.png"
    assert all(said in seen for said in SAID) and picture.stat().st_size > 10_000
    scripts["fails"].write_text(ENDS["passes"])
    assert gpu.drive([3], out, "cpu") == ["hangs"]
    assert "2 of 4 to run" in capfd.readouterr().out
    seen = (out / "gpu.md").read_text()
    assert "2 of 3 tasks" in seen and "fails" not in seen and "hangs: FAILED" in seen
    # The same table of the files alone, on a machine where nothing is run.
    here = json.loads((out / "gpu.json").read_text()) | {"date": "2001-01-01", "note": "elsewhere"}
    gpu.write_tables(out, {name: here[name] for name in here if name != "seen"})
    assert "(2001-01-01, " in (out / "gpu.md").read_text() and "elsewhere" in here["note"]
    assert json.loads((out / "gpu.json").read_text()) == here
    monkeypatch.setattr(gpu, "here_and_now", lambda *_: {"machine": "another"})
    with pytest.raises(SystemExit, match="is of another machine"):
        gpu.drive([3], out, "cpu")


def test_parts_that_run_at_once(tmp_path, monkeypatch):
    """Small ones beside one another, large ones alone, none begun when time is short.

    What had too little memory beside others runs once more, alone.
    """
    running, beside, short = [], {}, {"b"}
    jobs = gpu.Jobs(tmp_path, "cpu")
    jobs.room, jobs.log = 4, lambda part: tmp_path / "log"
    jobs.log(None).write_text("CUDA out of memory")
    meeting = threading.Barrier(2)  # a and b are running, both, before either ends

    def run(part, until):
        running.append(part.name)
        if part.name in "ab" and part.size == 2:
            meeting.wait(60)
        beside.setdefault(part.name, []).append(len(running))
        time.sleep(0.2)
        running.remove(part.name)
        return "FAILED" if part.name in short and part.size < 4 else gpu.CUT * (part.name == "d")

    monkeypatch.setattr(jobs, "run", run)
    sizes = {"a": 2, "b": 2, "alone": 0, "d": 4}
    left = [gpu.Part(1, name, [], size=size) for name, size in sizes.items()]
    said = [(part.name, words) for part, words in jobs.run_all(left, time.monotonic() + 99)]
    again = "out of memory beside others: again, alone, at the end"
    assert sorted(said) == [("a", ""), ("alone", ""), ("b", ""), ("b", again), ("d", gpu.CUT)]
    assert beside["alone"] == beside["d"] == [1] and beside["b"][1:] == [1] and len(left) == 1
    assert max(beside["a"][0], beside["b"][0]) == 2
    left = [gpu.Part(1, "late", [])]
    assert not list(jobs.run_all(left, time.monotonic() + gpu.LEAST_S[1] - 5)) and len(left) == 1


def test_parts_of_gpu():
    """Each is named once, by the names that records have; a run is planned for twenty minutes."""
    names = {device: [part.name for part in gpu.parts(device)] for device in ("cuda", "cpu")}
    assert all(len(of) == len(set(of)) for of in names.values())
    stable = ["tp_mlp_float32", "tp_mlp_2_ranks", "tp_mlp_4_ranks_float64", "tests_gpu",
              "smollm2_tp_mlp_float32", "step_time", "step_compiled", "token_time", "longest_ours",
              "step_262144", "step_262144_offload"]  # fmt: skip
    assert set(stable) <= set(names["cuda"])
    assert sorted(gpu.SCRIPTS) == launch.SCRIPTS
    assert sum(minutes for step, (_, minutes) in gpu.STEPS.items() if step not in gpu.LONG) == 20


def test_overview_of_a_gpu(tmp_path):
    """The table a user looks for, of files as `make gpu` writes them; what is missing says so."""
    machine = {"gpus": ["NVIDIA H200"], "cores": 16, "cpu": ""}
    data = {"date": "today", "machine": machine, "device": "cuda", "driver": ""}
    rows = gpu.overview(data, tmp_path)[2:8]
    assert all(row.count("|") == 7 and "not run" in row for row in rows)
    model = "random/llama-3.2-1b"
    ways = {
        gpu.ONE: {"step_s": [[0.3, 0.2, 0.25], [0.2] * 3], "peak": [2**33, 2**32]},
        gpu.BY_HAND: {"step_s": [[0.3] * 3, [0.15, 0.1, 0.12]], "peak": [2**33, 3 * 2**30]},
    }
    ms = {one_token.GRAPH: 1.0, one_token.EAGER: 18.0, one_token.COMPILED: 3.8}
    ms[one_token.PARTS] = 0.9
    files = {
        "step_compiled": {"model": model, "results": {"ways": ways, "size": [1, 8192]}},
        "token_time": {"results": {"token_ms": {"1": ms, "8": ms}, "weights_bytes": 2.4e9}},
        "longest_ours": {"runs": [{"contender": "ours", "found": 10240}]},
        "longest_hugging_face_peft": {"runs": [{"contender": "Hugging Face + PEFT", "found": 600}]},
        "step_262144": json.loads((launch.RECORDS / "gpu" / "step_262144.json").read_text()),
    }
    cut = files["step_262144"] | {"extrapolated": True, "step_s": 700.4}
    files["step_1048576_offload"] = cut
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    step, one, eight, longest, long, longer = gpu.overview(data, tmp_path)[2:8]
    # 6 x 1.24e9 weights x 8,192 tokens, and attention: 76 TFLOP.
    assert "| 0.120 s (64% of the peak), 3.0 GiB | 0.250 s (31%" in step and "| 0.077 s |" in step
    assert "| 1.00 ms; 0.90 ms (norms and MLPs compiled) | 18.00 ms | 3.80 ms | 0.50 ms |" in one
    assert "8 |" in eight and "`make gpu STEP=3`" in one
    assert "| 10,240 (ours) | 600 (Hugging Face + PEFT) |" in longest
    assert "| 68 s, 24.0 GiB | - | - | 16 s, of attention alone |" in long
    assert "| 700 s, extrapolated (--offload) | - | - | 16 s" in longer


def test_smollm2_of_make_gpu(tmp_path, monkeypatch, capfd):
    """From a folder; where it cannot be had its parts are left out, in one line, and no others."""
    folder = launch.TASKS / "tiny_llama"
    words = {part.name: part.words for part in gpu.parts("cuda", folder)}["smollm2_tp_mlp_float32"]
    assert words[words.index("--model") + 1] == folder and gpu.missing("cuda", folder) is None

    def find(cache):
        raise UserError("no network")

    monkeypatch.setattr(gpu, "find", find)
    assert gpu.missing("cuda", None) == "no network" and gpu.missing("cpu", None) is None
    assert "no such directory" in gpu.missing("cuda", tmp_path / "none")
    write = ["-c", WRITES.format(TESTS)]
    two = [gpu.Part(2, name, write, json_flag="--junitxml") for name in ("tests", "smollm2_x")]
    monkeypatch.setattr(gpu, "parts", lambda device, smollm2=None: two)
    monkeypatch.setattr(gpu, "missing", lambda device, smollm2: "no network")
    assert gpu.drive([2], tmp_path, "cpu") == []
    said = capfd.readouterr().out
    assert said.count("no network") == 1 and (tmp_path / "tests.xml").exists()
    assert not (tmp_path / "smollm2_x.xml").exists() and "time is up" not in said


def test_no_cuda_before_a_fork(monkeypatch):
    """Where an import has started CUDA, the process that ranks are forked from refuses."""
    nursery.check_untouched()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(AssertionError, match="has started CUDA"):
        nursery.check_untouched()


def test_records_of_a_gpu(tmp_path):
    """What is committed of a GPU: all its files are of parts that there are, and make its table."""
    folder = launch.RECORDS / "gpu"
    known = {gpu.file_of(part, folder) for part in gpu.parts("cuda")}
    files = {*folder.glob("*.json"), *folder.glob("*.xml")} - {folder / "gpu.json"}
    assert files and files <= known, files - known
    data = json.loads((folder / "gpu.json").read_text())
    assert gpu.record(folder, data)[0] == data
    assert "\n".join(gpu.table(data)) + "\n" == (folder / "gpu.md").read_text()
    for path in files:  # nothing but what failed is missing a pass
        one = json.loads(path.read_text()) if path.suffix == ".json" else gpu.counts(path)
        assert not one.get("failures") and all(c["passed"] for c in one.get("checks", [])), path


@pytest.mark.stress
@pytest.mark.soak
def test_gpu_rehearsal(tmp_path):
    """All steps of `make gpu` on the CPU, by small sizes; a second call has nothing to do."""
    command = ["make", "DEVICE=cpu", f"OUT={tmp_path}", "STEP="]
    for target in ("gpu", "gpu-long"):
        result = launch.run([*command, target], timeout=3600)
        assert result.code == 0, result.tail()
    seen = (tmp_path / "gpu.md").read_text()
    assert "not run" not in seen and "FAILED" not in seen, seen
    assert (tmp_path / "gpu.png").stat().st_size > 10_000
    result = launch.run([*command, "gpu"], timeout=60)
    assert result.code == 0 and result.out.count(": 0 of ") == 5, result.tail()


def test_step_that_is_cut():
    """Its layers are extrapolated from those that ran, and marked; before the backward, nothing."""
    forward, backward = [1.0, 2.0, 3.0, 4.0], [6.0, 8.0]
    assert one_step.whole_step({"run_attention": forward, "layer_backward": []}, 4) is None
    both = {"run_attention": forward, "layer_backward": backward}
    assert one_step.whole_step(both, 4) == (12.0, True)
    both["layer_backward"] = [6.0, 8.0, 10.0, 13.0]
    assert one_step.whole_step(both, 4) == (13.0, False)
