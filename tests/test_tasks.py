"""Every task script, started as the README starts it, on 1 to 4 ranks."""

import json
import re

import pytest
import torch

import launch

# Every script there is is run; these flags only keep a second and third run of it short.
QUICK = {"tp_mlp": ["--hidden-size", 260, "--intermediate-size", 509], "tp_llama": ["--repeats", 1]}


def passed(result, nproc):
    """Exit code 0, the protocol from every rank in order, nothing left running, no warnings."""
    assert result.code == 0 and not result.survivors, result.tail()
    for line in ("Initialized rank={}", "Tests passed (rank={})"):
        at = [result.out.find(line.format(rank)) for rank in range(nproc)]
        assert -1 not in at and at == sorted(at), result.tail()
    for kind in ("outputs", "input grad"):
        assert f"Reference {kind} (rank=0): tensor(" in result.out, result.tail()
        for rank in range(nproc):
            assert re.search(rf"^[TS]Parallel {kind} \(rank={rank}\): tensor\(", result.out, re.M)
    assert "FAILED" not in result.out and "Warning" not in result.err, result.tail()


def checks(path, nproc, dtype):
    """The record that a script wrote, and its checks; all passed, none missing a number."""
    record = json.loads(path.read_text())
    assert record["world_size"] == nproc and record["dtype"] == dtype and record["checks"]
    assert {"task", "backend", "device", "model", "versions", "results"} <= record.keys()
    for check in record["checks"]:
        assert check["passed"] and 0 <= check["max_abs_diff"] <= check["tolerance"], check
    return record, record["checks"]


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
@pytest.mark.parametrize("script", launch.SCRIPTS)
def test_float32(script, nproc, tmp_path):
    """As it stands in the README; the golden values of tp_mlp are asserted on 4 ranks."""
    args = QUICK.get(script, []) if nproc != 4 else []
    path = tmp_path / "record.json"
    result = launch.torchrun(script, *args, "--json", path, nproc=nproc)
    passed(result, nproc)
    record, every = checks(path, nproc, "float32")
    for check in every:
        assert check["tolerance"] <= 1e-5 * max(1, check["max_abs_reference"]) or (
            check["name"].startswith("golden")
        ), check
    if script == "tp_mlp" and nproc == 4:
        assert {"golden output", "golden input grad"} <= {check["name"] for check in every}
    if script == "tp_llama":
        assert "A quick brown fox jumps over the lazy dog" in result.out
        assert set(record["results"]) >= {"single_forward_s", "parallel_peak_memory_bytes"}


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
@pytest.mark.parametrize("script", launch.SCRIPTS)
def test_float64(script, nproc, tmp_path):
    """No bug can hide in rounding: everything to 1e-10 of the largest reference value."""
    path = tmp_path / "record.json"
    args = [*QUICK.get(script, []), "--dtype", "float64", "--json", path]
    passed(launch.torchrun(script, *args, nproc=nproc), nproc)
    for check in checks(path, nproc, "float64")[1]:
        bound = 0 if "bits" in check["name"] else 1e-10 * max(1, check["max_abs_reference"])
        assert check["max_abs_diff"] <= bound, check


@pytest.mark.parametrize("nproc", [1, 3, 4, 5, 6])
@pytest.mark.parametrize("script", launch.SCRIPTS)
def test_odd_llama(script, nproc, tmp_path, odd_llama):
    """Sizes that divide by nothing, biases, an untied head, more ranks than KV heads."""
    path = tmp_path / "record.json"
    args = ["--model", odd_llama, "--dtype", "float64", *QUICK.get(script, []), "--json", path]
    args += ["--batch-size", 3, "--seq-len", 23, "--repeats", 0] if script == "tp_llama" else []
    file = launch.TASKS / f"{script}.py"
    result = launch.ranks(file, *args, nproc=nproc, folder=tmp_path, timeout=120)
    assert result.code == 0 and result.out.count("Tests passed") == nproc, result.tail()
    checks(path, nproc, "float64")


@pytest.mark.parametrize("script", ["tp_attention", "tp_llama"])
def test_eight_ranks(script, tmp_path):
    """One query head a rank, and each of the 4 KV heads on two of them."""
    args = ["--repeats", 0] if script == "tp_llama" else []
    file = launch.TASKS / f"{script}.py"
    result = launch.ranks(file, *args, nproc=8, folder=tmp_path, timeout=200)
    assert result.code == 0 and result.out.count("Tests passed") == 8, result.tail()


@pytest.mark.parametrize("script", launch.SCRIPTS)
def test_bfloat16(script, tmp_path):
    args = ["--dtype", "bfloat16", *QUICK.get(script, [])]
    file = launch.TASKS / f"{script}.py"
    result = launch.ranks(file, *args, nproc=2, folder=tmp_path)
    assert result.code == 0 and result.out.count("Tests passed") == 2, result.tail()


def test_whole_vocabulary(tmp_path):
    """Task 2's own scope, transformer layers only: embedding and LM head stay whole."""
    args = ["--no-vocab-parallel", "--dtype", "float64", "--repeats", 0]
    file = launch.TASKS / "tp_llama.py"
    result = launch.ranks(file, *args, nproc=3, folder=tmp_path)
    assert result.code == 0 and result.out.count("Tests passed") == 3, result.tail()


@pytest.mark.parametrize("script", launch.SCRIPTS)
def test_without_torchrun(script):
    """Plain python is world size 1, and says so."""
    file = launch.TASKS / f"{script}.py"
    result = launch.run([launch.sys.executable, file, *QUICK.get(script, [])])
    passed(result, 1)
    assert "note: 1 rank: nothing is split" in result.out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: NCCL is not tested")
@pytest.mark.parametrize("script", launch.SCRIPTS)
def test_nccl(script, tmp_path):
    """On all GPUs of this machine, up to 4."""
    nproc, path = min(torch.cuda.device_count(), 4), tmp_path / "record.json"
    result = launch.torchrun(script, "--device", "cuda", "--json", path, nproc=nproc)
    passed(result, nproc)
    assert checks(path, nproc, "float32")[0]["backend"] == "nccl"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: cannot have too few of them")
def test_fewer_gpus_than_ranks():
    nproc = torch.cuda.device_count() + 1
    result = launch.torchrun("tp_mlp", *QUICK["tp_mlp"], nproc=nproc)
    passed(result, nproc)
    assert "running on CPU with gloo" in result.out
