"""Faults, as jobs really fail: over all scripts, each by one contract.

The whole job is gone in time; one `error:` line, from one rank, says what to do; the exit code is 2
for what a user got wrong and 1 for the rest; no file that was there is changed. What takes long is
marked `stress` (`make stress`). Task 5's own faults, of training and checkpoints, are in
test_finetune.py; those of several machines in test_launch.py; damage to a model that every script
reads through one class, in test_bad_input.py.

How a job ends depends on how its ranks talk: those tests run on the CPU and by NCCL (places.py).
"""

import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid

import pytest
import torch
import torch.distributed as dist

import launch
from conftest import make_llama
from damage import DAMAGE, change_tensors
from harness import watchdog
from places import CPU, NCCL, PLACES
from planting import plant, replace, write
from runs import QUICK

PARTS = [launch.ROOT / name for name in ("README.md", "tasks", "figures")]
FIRST = "tp_llama"  # where one script must stand for all, to save time
TASK_5 = "ulysses_finetune"  # which has signal handlers of its own
ENDLESS = {
    # flags with which a script works until it is stopped; the others are over too soon to matter
    "tp_llama": ["--repeats", 10**6],
    "dtensor_llama": ["--repeats", 10**6],
    "kv_cache": ["--repeats", 10**6],
    "ulysses_forward": ["--repeats", 10**6],
    "ring_attention": ["--repeats", 10**6],
    "tp_ulysses": ["--repeats", 10**6],
    "ulysses_finetune": ["--steps", 10**6, "--check-steps", 0],
}


def contents(folder):
    """{file: hash} of everything under a folder."""
    files = (
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    )
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def not_a_number(directory):
    def damage(tensors):
        for name in ("self_attn.q_proj", "mlp.up_proj"):
            tensors[f"model.layers.0.{name}.weight"][1, 1] = float("nan")

    change_tensors(directory, damage)


def with_tokenizer(directory):
    """Another model's, that knows more tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(launch.TASKS / "tiny_llama" / name, directory)


MODELS = {name: DAMAGE[name] for name in (
    "another kind of model", "truncated", "zero bytes", "pickle only", "missing tensor",
    "wrong shape", "missing shard", "shard outside",
)}  # fmt: skip
MODELS["not a number"] = not_a_number, "non-finite values in model.layers.0."
MODELS["a tokenizer of more tokens"] = with_tokenizer, "the model only 211"
NO_TEXT = "tp_mlp", "tp_attention", "tp_naive"  # these need no tokenizer

FLAGS = {
    # id and name: (flags of rank 0, flags of rank 1 if they differ, environment, message)
    "RANK alone": ([], None, {"WORLD_SIZE": ""}, "set, but not WORLD_SIZE: unset them"),
    "other flags": (["--seed", 1], ["--seed", 2], {}, "--seed is 1 on rank 0, but 2 on rank 1"),
    "other dtypes": ([], ["--dtype", "float64"], {}, "--dtype is float32 on rank 0"),
    "no directory": (["--model", "/no/such"], None, {}, "no such directory"),
    "no preset": (["--model", "random/x"], None, {}, "no such preset"),
    "no hub": (["--model", "some/llama"], None, {}, "local directory"),
    "unknown flag": (["--modle", "x"], None, {}, "--modle"),
    "unknown dtype": (["--dtype", "int8"], None, {}, "--dtype"),
    "no seed": (["--seed", "-1"], None, {}, "--seed"),
    "no time": (["--timeout", 0], None, {}, "--timeout"),
    "layers of a directory": (["--num-layers", 2], None, {}, "--num-layers cuts random/"),
    "no folder": (["--json", "/no/such/x.json"], None, {}, "--json /no/such/x.json"),
    "no GPU": (["--device", "cuda"], None, {}, "PyTorch sees no GPU"),
    "no GPU to share": (["--share-gpus"], None, {}, "--share-gpus: there is no GPU to share"),
}


def table(rows, common):
    """(script, row): all rows for FIRST, the common ones for every script, the rest for stress."""
    return [
        pytest.param(
            script, row,
            marks=[] if script == FIRST or row in common else [pytest.mark.stress],
        )
        for script in launch.SCRIPTS for row in rows
    ]  # fmt: skip


COMMON = "other flags", "no directory", "unknown flag", "no folder"


@pytest.mark.parametrize(("script", "name"), table(FLAGS, COMMON))
def test_flags(script, name, tmp_path):
    flags, others, env, message = FLAGS[name]
    file = launch.TASKS / f"{script}.py"
    each = None if others is None else [flags, others]
    nproc = 1 if "WORLD_SIZE" in env else 2  # else each rank would be a shell that says so
    result = launch.ranks(file, *flags, nproc=nproc, folder=tmp_path, env=env, each=each)
    result.assert_refused(message)


@pytest.mark.parametrize(
    ("script", "name"), table(MODELS, ("another kind of model", "not a number"))
)
def test_models(script, name, odd_llama, tmp_path):
    """A damaged model is refused, and the directory is left as it was."""
    if name.startswith("a tokenizer") and script in NO_TEXT:
        pytest.skip("needs no tokenizer")
    if name in ("not a number", "a tokenizer of more tokens") and script == "pretrain_2d":
        pytest.skip("it takes a model's shape alone")
    directory = shutil.copytree(odd_llama, tmp_path / "a model")
    damage, message = MODELS[name]
    damage(directory)
    before = contents(directory)
    file = launch.TASKS / f"{script}.py"
    result = launch.ranks(file, "--model", directory, nproc=2, folder=tmp_path)
    result.assert_refused(message)
    assert contents(directory) == before


@pytest.mark.parametrize("script", launch.SCRIPTS)
def test_too_many_ranks(script, odd_llama, tmp_path):
    """More ranks than query heads, with the numbers. (MLP units there are more of.)"""
    if script in ("tp_mlp", "tp_naive", "pipeline_threads", "data_parallel", "ring_attention"):
        pytest.skip("it has no heads, 53 MLP units go over 7 ranks; or it splits no heads")
    file = launch.TASKS / f"{script}.py"
    result = launch.ranks(file, "--model", odd_llama, nproc=7, folder=tmp_path)
    wanted = "6 query heads: use 1 to 6 ranks, not 7"
    if script == "pipeline_llama":
        wanted = "7 stages, but only 3 layers"
    if script == "tp_ulysses":
        wanted = "6 query heads of a rank (6 over tp 1) for 7 ranks that exchange heads"
    if script == "pretrain_2d":
        wanted = "--batch-size 12: not a multiple of --dp 7"
    result.assert_refused(wanted)


@pytest.mark.parametrize(("script", "words"), [("tp_llama", 3), ("dtensor_llama", 9)])
def test_fewer_words_than_ranks(script, words, tmp_path):
    """Some rank would have none, of 9 DTensor's fourth: chunks of 3."""
    model = make_llama(tmp_path / "model", vocab_size=words, pad_token_id=None)
    file = launch.TASKS / f"{script}.py"
    result = launch.ranks(file, "--model", model, nproc=4, folder=tmp_path)
    result.assert_refused(f"4 ranks share {words} tokens")


def test_pickles_are_not_opened(odd_llama, tmp_path):
    """A file that would run a program when unpickled, under every name that a loader knows."""

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "opened"),)

    directory = shutil.copytree(odd_llama, tmp_path / "model")
    names = "pytorch_model.bin", "adapter_model.bin", "training_args.bin", "model.pt"
    (tmp_path / "out").mkdir()
    for name in names:
        torch.save(Payload(), directory / name)
        torch.save(Payload(), tmp_path / "out" / name)
    args = ["--model", directory, "--check-steps", 0, "--steps", 1]
    args += ["--output-dir", tmp_path / "out", "--resume"]
    file = launch.TASKS / "ulysses_finetune.py"
    assert launch.ranks(file, *args, nproc=1, folder=tmp_path).code == 0
    (directory / "model.safetensors").unlink()
    launch.ranks(file, *args, nproc=1, folder=tmp_path).assert_refused("pickle weights")
    assert not (tmp_path / "opened").exists()


def test_port_in_use(tmp_path):
    """It is said, with what to do instead; who listens there is not disturbed."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        env = {"MASTER_PORT": str(other.getsockname()[1])}
        file = launch.TASKS / f"{FIRST}.py"
        result = launch.ranks(file, nproc=1, folder=tmp_path, env=env | {"WORLD_SIZE": "2"})
        result.assert_refused("start with torchrun --standalone")
        with socket.create_connection(other.getsockname()):
            assert other.accept()


# ---------------------------------------------------------------- while it works


def stressed(scripts, kept=(FIRST, TASK_5)):
    """Parameters of which all but some are left to `make stress`."""
    return [pytest.param(s, marks=[] if s in kept else [pytest.mark.stress]) for s in scripts]


def in_places(cases, kept=()):
    """Parameters: each case on the CPU and by NCCL. Some are left to `make stress`.

    cases: tuples that begin with a script; `kept` are not left, on the CPU. By NCCL Task 2 and
    Task 5 are not left.
    """
    parameters = []
    for place, case in itertools.product(PLACES, cases):
        if place is NCCL and "--gloo" in case[0]:
            continue
        at_once = case in kept if place is CPU else case[0] in (FIRST, TASK_5)
        marks = [] if at_once else [pytest.mark.stress]
        name = "-".join(map(str, [*case, place]))
        parameters.append(pytest.param(*case, place, marks=marks, id=name))
    return parameters


class Working:
    """A script under torchrun that works until it is stopped; the processes of a job."""

    def __init__(self, script, *args, place=CPU, nproc=2, env=None, folder=launch.TASKS):
        self.job, (script, *flags) = uuid.uuid4().hex, script.split()
        args = [*ENDLESS[script], *flags, *args, *place.flags(nproc)]
        words = launch.command(folder / f"{script}.py", *args, nproc=nproc)
        self.agent = subprocess.Popen(
            words, env=launch.environment(self.job, place.env | (env or {})), cwd=launch.ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self):
        """Once it is at work: the first check is passed, or a step is done."""
        for line in self.agent.stdout:
            if line.startswith(("check", "i=1")):
                time.sleep(1)
                return self
        raise AssertionError(self.agent.stderr.read())

    def __exit__(self, *error):
        for process in launch.processes(self.job):
            process.kill()
        self.agent.communicate()

    def rank(self, rank):
        """A rank's process."""
        return next(
            process for process in launch.processes(self.job)
            if process.environ().get("RANK") == str(rank)
        )  # fmt: skip

    def end(self, seconds):
        """Exit code and errors, once all is gone."""
        out, err = self.agent.communicate(timeout=seconds)
        return launch.Result(self.agent.returncode, out, err, 0, launch.survivors(self.job))


BY_GLOO = f"{FIRST} --gloo"
TWO = [2, pytest.param(3, marks=pytest.mark.stress)]
# As PyTorch prefixes its lines; what its C++ logs, as of a store that is gone, has "[rank0]:[W".
A_RANKS_TRACEBACK = r"\[rank(\d)\]: "


EACH = [(script,) for script in [*ENDLESS, BY_GLOO]]
KILLED = [(script, i % 2) for i, script in enumerate([*ENDLESS, FIRST, BY_GLOO, TASK_5])]


@pytest.mark.parametrize(("script", "rank", "place"), in_places(KILLED))
def test_killed(script, rank, place):
    """The job ends within 15 s, and torchrun names rank and signal.

    (On a CPU, in `make test-all`, it is `test_gone_while_a_rank_waits_in_c` that says so.)
    """
    with Working(script, place=place) as job:
        job.rank(rank).kill()
        result = job.end(15)
    assert result.code and not result.survivors, result.tail()
    assert "SIGKILL" in result.err and f"rank      : {rank} " in result.err, result.tail()


def names_rank_1(result, seconds):
    """The one error line, that the other rank has waited so long for it."""
    assert result.code and not result.survivors, result.tail()
    (line,) = result.errors()
    wanted = f"rank 1 did not come, in {seconds} s, to what rank 0 waited for at"
    assert wanted in line, result.tail()


@pytest.mark.parametrize(("script", "place"), in_places(EACH, [(FIRST,)]))
def test_stopped(script, place):
    """A rank that hangs (it is stopped, sleeps, or holds the interpreter) is named, and ended.

    (By gloo, in `make test-all`: `test_stopped_by_gloo`.)
    """
    with Working(script, "--timeout", place.timeout_s, place=place) as job:
        job.rank(1).send_signal(signal.SIGSTOP)
        result = job.end(place.timeout_s + 8)
    names_rank_1(result, place.timeout_s)


def test_stopped_by_gloo(tmp_path):
    """The other rank says which one it is, where neither gloo nor torchrun does."""
    line = "    references = run.references(reference)\n"
    stop = "    run.rank and __import__('os').kill(__import__('os').getpid(), 19)\n"
    plant(tmp_path, "tp_mlp.py", line, line + stop)
    args = ["--hidden-size", 8, "--intermediate-size", 8, "--timeout", 3, "--gloo"]
    result = launch.ranks(tmp_path / "tp_mlp.py", *args, nproc=2, folder=tmp_path)
    assert result.seconds < 3 + 12, result.tail()
    names_rank_1(result, 3)


@pytest.mark.parametrize("place", [pytest.param(CPU, marks=pytest.mark.stress), NCCL], ids=str)
def test_holds_the_interpreter(place, tmp_path):
    """Nothing of Python's runs on such a rank any more, no signal's handler either."""
    line = "    references = run.references(reference)\n"
    hold = "    run.rank and __import__('ctypes').PyDLL(None).sleep(1000)\n"
    plant(tmp_path, "tp_mlp.py", line, line + hold)
    args = ["--hidden-size", 8, "--intermediate-size", 8, "--timeout", place.timeout_s]
    args += place.flags(2)
    result = launch.torchrun(tmp_path / "tp_mlp.py", *args, nproc=2, env=place.env)
    assert result.seconds < place.timeout_s + 21 + place.slow_s, result.tail()
    names_rank_1(result, place.timeout_s)


def test_one_does_not_start(tmp_path):
    """A rank hangs before there are collectives; the others say which one it is."""
    joined = "join_store() if world_size > 1 else (dist.HashStore(), 0)\n"
    hang = "    __import__('time').sleep(60 * rank)\n"
    plant(tmp_path, "job.py", joined, joined + hang)
    file = tmp_path / "harness" / "environment.py"
    write(file, replace(file.read_text(), "START_S = 120", "START_S = 3"))
    args = ["--timeout", 3]
    result = launch.ranks(tmp_path / f"{FIRST}.py", *args, nproc=2, folder=tmp_path)
    result.assert_refused("rank 1 did not start within 3 s")


@pytest.mark.stress
def test_download_takes_long(tmp_path):
    """--timeout is not for it; the other ranks wait."""
    begin = "    from huggingface_hub import HfApi, snapshot_download\n"
    slow = "    __import__('time').sleep(0 if offline else 8)\n    return TINY\n"
    plant(tmp_path, "models.py", begin, slow + begin)
    args = ["--model", "some/llama", "--timeout", 4, *QUICK[FIRST]]
    result = launch.ranks(tmp_path / f"{FIRST}.py", *args, nproc=2, folder=tmp_path)
    assert result.code == 0 and result.seconds > 8, result.tail()


STORES = [(script, store) for script in (FIRST, BY_GLOO) for store in ("0", "1")]


@pytest.mark.parametrize(("script", "own_store", "place"), in_places(STORES, [(FIRST, "0")]))
def test_rank_0_is_stopped(script, own_store, place):
    """It is named, also where it is itself who holds the ranks' store."""
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": own_store}
    with Working(script, "--timeout", place.timeout_s, place=place, env=env) as job:
        job.rank(0).send_signal(signal.SIGSTOP)
        # torchrun would wait half a minute for one that is stopped: the other ends it, at once or,
        # if the store does not answer either, 7 s later.
        result = job.end(place.timeout_s + (12 if own_store == "1" else 8))
    assert result.code and not result.survivors, result.tail()
    said = "rank 0 is late, and its store at" if own_store == "1" else "rank 0 did not come, in"
    assert len(result.errors()) == 1 and said in result.errors()[0], result.tail()


@pytest.mark.parametrize(("script", "place"), in_places(EACH))
def test_torchrun_is_killed(script, place):
    """Its ranks end with it.

    (On a CPU, in `make test-all`, it is `test_gone_while_a_rank_waits_in_c` that says so.)
    """
    with Working(script, place=place) as job:
        job.agent.kill()
        assert not job.end(8).survivors


def in_a_long_step(folder, wait="__import__('time').sleep(60)", place=CPU):
    """Task 5, whose third step takes a minute on rank 1."""
    step = "        loss = forward_backward(model, batches(i), norms=norms)\n"
    wait = f"        i == 2 and group.rank() == 1 and {wait}\n"
    plant(folder, "ulysses_finetune.py", step, wait + step)
    return Working(TASK_5, folder=folder, place=place)


@pytest.mark.parametrize("who", [pytest.param("torchrun", marks=pytest.mark.stress), "rank 0"])
def test_gone_while_a_rank_waits_in_c(who, tmp_path):
    """As for a GPU: no signal's handler of Python's is run there."""
    # A mutex that is locked twice; signals do not interrupt that.
    lock = "ctypes.CDLL(None).pthread_mutex_lock"
    both = f"(lambda ctypes, m: ({lock}(m), {lock}(m)))"
    wait = f"(lambda ctypes: {both}(ctypes, ctypes.create_string_buffer(64)))(__import__('ctypes'))"
    with in_a_long_step(tmp_path, wait) as job:
        next(line for line in job.agent.stdout if line.startswith("i=1"))
        time.sleep(2)
        (job.agent if who == "torchrun" else job.rank(0)).kill()
        result = job.end(8)
    assert result.code and not result.survivors, result.tail()
    if who == "rank 0":
        assert "SIGKILL" in result.err and "rank      : 0 " in result.err, result.tail()


@pytest.mark.parametrize("place", [pytest.param(CPU, marks=pytest.mark.stress), NCCL], ids=str)
def test_torchrun_is_killed_in_a_long_step(place, tmp_path):
    """Asked to stop, Task 5 would end its step first; but nobody is left to wait for it."""
    with in_a_long_step(tmp_path, place=place) as job:
        next(line for line in job.agent.stdout if line.startswith("i=1"))
        job.agent.kill()
        assert not job.end(8).survivors


@pytest.mark.parametrize("place", [pytest.param(CPU, marks=pytest.mark.stress), NCCL], ids=str)
def test_interrupted_twice(place, tmp_path):
    """The first time Task 5 ends its step and saves, the second time it ends."""
    with in_a_long_step(tmp_path, place=place) as job:
        next(line for line in job.agent.stdout if line.startswith("i=1"))
        job.agent.send_signal(signal.SIGINT)
        time.sleep(3)
        assert job.rank(1).is_running()
        job.agent.send_signal(signal.SIGINT)
        result = job.end(10)
    assert result.code and not result.survivors, result.tail()


SIGNALS = [(script, "SIGINT") for (script,) in EACH]
SIGNALS += [(script, "SIGTERM") for script in (FIRST, TASK_5)]


@pytest.mark.parametrize(("script", "name", "place"), in_places(SIGNALS, SIGNALS[:1]))
def test_interrupted(script, name, place):
    """Ctrl-C, or being asked to stop, ends all within seconds, without a rank's traceback."""
    with Working(script, place=place) as job:
        job.agent.send_signal(getattr(signal, name))
        result = job.end(8)
    assert result.code and not result.survivors, result.tail()
    assert not re.search(A_RANKS_TRACEBACK, result.err) and not result.errors(), result.tail()


@pytest.mark.stress
def test_interrupted_at_the_start(tmp_path):
    """One rank would end at once, the other save: that the first is gone is no error then."""
    ready = "stopped = harness.catch_signals()"
    sleep = "__import__('time').sleep(20 * (run.rank == 0))"
    wait = f"stopped = {sleep} or harness.catch_signals()"
    plant(tmp_path, "ulysses_finetune.py", ready, wait)
    with Working("ulysses_finetune", folder=tmp_path) as job:
        time.sleep(3)
        job.agent.send_signal(signal.SIGINT)
        result = job.end(10)
    assert result.code and not result.survivors, result.tail()
    assert not re.search(A_RANKS_TRACEBACK, result.err) and not result.errors(), result.tail()


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("nproc", TWO)
def test_exception_on_one_rank(nproc, place, tmp_path):
    """A bug keeps its traceback, one, and no rank waits for the one that is gone."""
    line = "    references = run.references(reference)\n"
    wait = "    __import__('atexit').register(__import__('time').sleep, 100)\n"  # as NCCL might
    bug = "    assert run.rank != 1, f'planted {__import__(\"time\").time()}'\n"
    plant(tmp_path, "tp_mlp.py", line, line + wait + bug)
    args = ["--model", "random/small", "--hidden-size", 8, "--intermediate-size", 8]
    args += place.flags(nproc)
    result = launch.torchrun(tmp_path / "tp_mlp.py", *args, nproc=nproc, env=place.env)
    (when,) = re.findall(r"\[rank1\]: AssertionError: planted ([\d.]+)", result.err)
    assert result.code != 0 and not result.survivors, result.tail()
    assert time.time() - float(when) < 20, result.tail()
    assert set(re.findall(A_RANKS_TRACEBACK, result.err)) == {"1"}, result.tail()


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("nproc", TWO)
def test_one_failure_is_one_line(nproc, place, tmp_path):
    """Also where all ranks see it, under torchrun, which signals those that come second."""
    line = "        loss = forward_backward(model, batches(i), norms=norms)\n"
    worse = "        loss = loss * float('nan' if i == 3 else 1)\n"  # which --lr does it varies
    plant(tmp_path, "ulysses_finetune.py", line, line + worse)
    args = ["--steps", 60, "--check-steps", 0, "--seq-len", 32, *place.flags(nproc)]
    file = tmp_path / "ulysses_finetune.py"
    result = launch.torchrun(file, *args, nproc=nproc, env=place.env)
    assert result.code and result.seconds < 150 and not result.survivors, result.tail()
    assert len(result.errors()) == 1 and "A smaller --lr may help" in result.err, result.tail()


@pytest.mark.parametrize("place", [pytest.param(CPU, marks=pytest.mark.stress), NCCL], ids=str)
def test_memory_of_one_rank(place, tmp_path):
    """It runs out on one rank alone, while the other waits for it."""
    line = "        loss = forward_backward(model, batches(i), norms=norms)\n"
    bug = "raise torch.OutOfMemoryError('planted')"
    worse = f"        if i == 3 and group.rank():\n            {bug}\n"
    plant(tmp_path, "ulysses_finetune.py", line, worse + line)
    args = ["--steps", 60, "--check-steps", 0, "--seq-len", 32, *place.flags(2)]
    file = tmp_path / "ulysses_finetune.py"
    result = launch.torchrun(file, *args, nproc=2, env=place.env)
    assert result.code and result.seconds < 120 + place.slow_s, result.tail()
    assert not result.survivors, result.tail()
    assert len(result.errors()) == 1 and "out of memory: 1 x 64" in result.err, result.tail()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here PyTorch can use the GPU")
def test_gpu_that_cannot_be_used(tmp_path):
    """That all runs on the CPU is said, and why."""
    gpu = tmp_path / "nvidia0"
    gpu.touch()
    plant(tmp_path, "environment.py", '"/dev/nvidia[0-9]*"', repr(str(gpu)))
    args, env = ["--hidden-size", 8, "--intermediate-size", 8], {"CUDA_VISIBLE_DEVICES": "0"}
    file = tmp_path / "tp_mlp.py"
    result = launch.ranks(file, *args, nproc=2, folder=tmp_path, env=env)
    assert result.code == 0 and "note: a GPU is here, but PyTorch" in result.out, result.tail()
    result = launch.ranks(file, *args, "--device", "cuda", nproc=2, folder=tmp_path, env=env)
    result.assert_refused("a GPU is here, but PyTorch")
    hidden = launch.ranks(file, *args, nproc=2, folder=tmp_path)
    assert hidden.code == 0 and "a GPU is here" not in hidden.out, hidden.tail()


def test_an_error_that_speaks_of_peers(tmp_path):
    """No rank is ended for it, and said to be gone; the one that has it keeps its traceback."""
    line = "    references = run.references(reference)\n"
    said = "CUDA error: peer access is not supported between these two devices"
    bug = f"    if run.rank == 1:\n        raise RuntimeError({said!r})\n"
    plant(tmp_path, "tp_mlp.py", line, line + bug)
    args = ["--hidden-size", 8, "--intermediate-size", 8]
    result = launch.ranks(tmp_path / "tp_mlp.py", *args, nproc=2, folder=tmp_path)
    assert result.code == 1 and not result.errors(), result.tail()
    assert "Traceback" in result.err and f"RuntimeError: {said}" in result.err, result.tail()


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
ENDED = [
    # what is said of a rank that has ended, and what of something else
    (RuntimeError(f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is"), True),
    (RuntimeError(f"{GLOO}pair.cc:537] Read error [::1]:1: Connection reset by peer"), True),
    (RuntimeError(f"{GLOO}pair.cc:301] writev [127.0.0.1]:17832: Broken pipe"), True),
    (dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited or there was a network "
                           "error, NCCL version 2.29.7\nncclRemoteError: A call failed"), True),
    (dist.DistNetworkError("sendBytes failed on SocketImpl(fd=9): Broken pipe"), True),
    (dist.DistStoreError("wait timeout after 600000ms, keys: /default_pg/0//cpu//1"), False),
    (dist.DistBackendError("unhandled cuda error\nLast error:\nCuda failure 217 'peer access is "
                           "not supported between these two devices'"), False),
    (RuntimeError("CUDA error: peer access is not supported between these two devices"), False),
    (RuntimeError("a file server: Connection reset by peer"), False),
    (RuntimeError(f"{GLOO}pair.cc:1] ::gloo::EnforceNotMet: peer rank 7"), False),
]  # fmt: skip


@pytest.mark.parametrize(("error", "ended"), ENDED, ids=lambda x: repr(x)[-40:])
def test_what_is_said_of_a_rank(error, ended):
    assert watchdog.speaks_of_an_end(error) == ended


def test_a_bug_is_no_lack_of_memory(tmp_path):
    """Its message speaks of storage; it keeps its traceback."""
    line = "    references = run.references(reference)\n"
    plant(tmp_path, "tp_mlp.py", line, f"{line}    torch.empty(2).as_strided((3,), (1,))\n")
    args = ["--hidden-size", 8, "--intermediate-size", 8]
    result = launch.ranks(tmp_path / "tp_mlp.py", *args, nproc=1, folder=tmp_path)
    assert result.code == 1 and not result.errors(), result.tail()
    assert "Traceback" in result.err and "requiring a storage size of 12" in result.err


# (The other scripts read no file but the model's, as the first does.)
READERS = FIRST, "ulysses_finetune", "pretrain_2d", "data_parallel"


@pytest.mark.parametrize("script", stressed(READERS, [FIRST]))
def test_from_elsewhere(script, tmp_path, read_only):
    """Through a link, from another folder, in a checkout with spaces and Cyrillic in its name
    that nobody may write to; nothing is written there."""
    checkout = tmp_path / "мой checkout"
    shutil.copytree(launch.TASKS, checkout / "tasks", ignore=shutil.ignore_patterns("__pycache__"))
    before = contents(tmp_path)
    read_only(checkout)
    link = tmp_path / "link.py"
    link.symlink_to(checkout / "tasks" / f"{script}.py")
    env = {"PYTHONDONTWRITEBYTECODE": "1"}
    result = launch.torchrun(link, *QUICK.get(script, []), nproc=2, cwd="/", env=env)
    assert result.code == 0 and not result.survivors, result.tail()
    after = contents(tmp_path)
    del after[str(link)]
    assert after == before


@pytest.mark.stress
def test_without_network(tmp_path):
    """A fresh copy, made and used under another umask, with neither network nor display."""
    alone = ["unshare", "--map-root-user", "--net", "bash", "-c"]
    if not shutil.which("ip") or launch.run([*alone, "true"]).code:
        pytest.skip("no network namespaces here (unshare, ip)")
    python, task = sys.executable, "tasks/ulysses_finetune.py --output-dir out"
    commands = [
        "umask 077", "ip link set lo up", f"cp -r {' '.join(map(str, PARTS))} .",
        f"{python} -m torch.distributed.run --standalone --nproc_per_node 2 {task}",
        f"{python} -m figures.draw",
    ]  # fmt: skip
    env = {"DISPLAY": "", "WAYLAND_DISPLAY": ""}
    result = launch.run([*alone, " && ".join(commands)], cwd=tmp_path, env=env)
    assert result.code == 0 and "Tests passed (rank=1)" in result.out, result.tail()
    assert (tmp_path / "out" / "adapter").exists()


@pytest.mark.parametrize("script", stressed(launch.SCRIPTS, []))
def test_same_command_twice(script, tmp_path):
    """The same differences, losses and hashes, to the bit."""
    records = []
    for _ in range(2):
        path = tmp_path / "record.json"
        args = [*QUICK.get(script, []), "--json", path]
        result = launch.ranks(launch.TASKS / f"{script}.py", *args, nproc=2, folder=tmp_path)
        assert result.code == 0, result.tail()
        record = json.loads(path.read_text())
        kept = {key: record["results"][key] for key in ("losses", "sha256")
                if key in record["results"]}  # fmt: skip
        records.append((record["checks"], kept))
    assert records[0] == records[1]


@pytest.mark.stress
def test_two_jobs_at_once(tmp_path):
    """On one machine, each with its own folder."""
    jobs = []
    for i in range(2):
        args = ["--check-steps", 0, "--output-dir", tmp_path / str(i)]
        words = launch.command("ulysses_finetune", *args, nproc=2)
        env = launch.environment(uuid.uuid4().hex)
        job = subprocess.Popen(words, cwd=launch.ROOT, env=env, stdout=subprocess.DEVNULL)
        jobs.append(job)
    assert [job.wait(120) for job in jobs] == [0, 0]
    files = [tmp_path / str(i) / "adapter" / "adapter_model.safetensors" for i in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_other_versions(tmp_path):
    """Libraries older or newer than tested: said in one line, and the run goes on."""
    plant(tmp_path, "environment.py", '("4.48.3", "5.24.0"), "peft"', '("1.0", "2.0"), "peft"')
    args = QUICK["tp_mlp"]
    result = launch.ranks(tmp_path / "tp_mlp.py", *args, nproc=2, folder=tmp_path)
    assert result.code == 0 and result.out.count("tested with 1.0 to 2.0") == 1, result.tail()
