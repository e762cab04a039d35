"""Runs of task scripts: flags that keep them short, and what they must print and record."""

import json
import random
import re

import launch

# Every script there is is run; these flags only keep further runs of some short.
QUICK = {
    "tp_mlp": ["--hidden-size", 260, "--intermediate-size", 509],
    "tp_attention": ["--shapes", "model"],
    "tp_llama": ["--repeats", 1],
    "dtensor_llama": ["--repeats", 1, "--new-tokens", 5],
    "kv_cache": ["--repeats", 1, "--new-tokens", 6],
    "ulysses_forward": ["--repeats", 1, "--new-tokens", 6],
    "ring_attention": ["--repeats", 1, "--new-tokens", 6],
    "tp_ulysses": ["--repeats", 1, "--new-tokens", 6],
    "pipeline_threads": ["--batch-size", 5, "--seq-len", 19, "--repeats", 1],
    "pipeline_llama": ["--batch-size", 6, "--microbatches", 3, "--seq-len", 19],
    "data_parallel": ["--batch-size", 7, "--seq-len", 19, "--num-sequences", 19, "--epochs", 1],
    "tp_training": ["--seq-len", 19, "--iterations", 2],
    "pretrain_2d": ["--batch-size", 6, "--seq-len", 15, "--num-documents", 60, "--steps", 3],
}
WHOLE_MODEL = "tp_llama", "dtensor_llama", "ulysses_forward", "ring_attention", "tp_ulysses"


def passed(result, nproc):
    """Exit code 0, the protocol from every rank in order, nothing left running, no warnings."""
    assert result.code == 0 and not result.survivors, result.tail()
    for line in ("Initialized rank={}", "Tests passed (rank={})"):
        at = [result.out.find(line.format(rank)) for rank in range(nproc)]
        assert -1 not in at and at == sorted(at), result.tail()
    for kind in {"outputs", "input grad"} & set(re.findall(r"Reference ([a-z ]+) \(", result.out)):
        assert f"Reference {kind} (rank=0): tensor(" in result.out, result.tail()
        for rank in range(nproc):
            shown = rf"Parallel {kind} \(rank={rank}\): "
            shown = rf"^[TSPD]{shown}tensor\(|^[PD]{shown}another rank has it$"
            assert re.search(shown, result.out, re.M), result.tail()
        assert re.search(rf"^[TSPD]Parallel {kind} \(rank=\d\): tensor\(", result.out, re.M)
    assert "FAILED" not in result.out and "Warning" not in result.err, result.tail()


LARGEST_ERROR = {"float32": 1e-3, "bfloat16": 0.5, "float64": 1}  # of a reference, by rms
# Weights are rounded by 6e-8 of their size, of which a small change is off by up to 1 %: seen in
# SmolLM2's embedding after 2 iterations.
LARGEST_OF_CHANGES = {**LARGEST_ERROR, "float32": 2e-2}


def checks(path, nproc, dtype):
    """The record that a script wrote, and its checks; all passed, none missing a number."""
    record = json.loads(path.read_text())
    assert record["world_size"] == nproc and record["dtype"] == dtype and record["checks"]
    assert {"task", "backend", "device", "model", "flags", "versions", "results"} <= record.keys()
    for check in record["checks"]:
        assert check["passed"] and 0 <= check["max_abs_diff"] <= check["tolerance"], check
        # Were the wider reference wrong, the reference would look imprecise, and all be allowed.
        largest = LARGEST_OF_CHANGES if ": changes by " in check["name"] else LARGEST_ERROR
        assert check.get("own_rms_share", 0) < largest[dtype], check
    return record, record["checks"]


def refused(folder, script, nproc, args, check, rounding=None):
    """Run the copy: it must fail on all ranks, within seconds, with the name of a check.

    rounding: see `launch.ranks`.
    """
    path = folder / f"{script}.py"
    result = launch.ranks(path, *args, nproc=nproc, folder=folder, rounding=rounding)
    assert result.code == 1, result.tail()
    failed = re.findall(r"^FAILED (.*) \(rank=\d+\): ", result.out, re.MULTILINE)
    assert len(failed) == 1 and re.search(check, failed[0]), result.tail()
    assert "Tests passed" not in result.out and not result.err.count("TIMEOUT"), result.tail()


def paragraphs(folder):
    """Flags that make several documents fit into a row: of 2 to 40 tokens, and one of a single."""
    chance, path = random.Random(0), folder / "paragraphs.txt"
    lengths = [9, 8, 1, *(chance.randint(2, 12) for _ in range(100)), 40]
    chance.shuffle(lengths)
    letters = "abcdefghijklmnopqrstuvwxyz"
    path.write_text("\n\n".join("".join(chance.choices(letters, k=n)) for n in lengths))
    return ["--text", path, "--num-virtual-tokens", 3]
