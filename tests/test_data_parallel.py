"""Data parallelism's parts: partitions, the average; what cannot be run, and what is estimated."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file, save_file

import launch
from data_parallel import STRATEGIES, DataPartitioner, Partition, partition_dataset
from harness import processes
from loading.batches import pad
from pages import same

FILE = launch.TASKS / "data_parallel.py"


def test_partitioner():
    """All samples once, in an order that hangs on the seed alone; where parts end is rounded."""
    data = [f"sample {i}" for i in range(101)]
    torch.manual_seed(0)
    parts = [DataPartitioner(data).use(i) for i in range(3)]
    assert [len(part) for part in parts] == [71, 20, 10]
    assert sorted(chain(*parts)) == sorted(data) and list(chain(*parts)) != data
    short = DataPartitioner(range(2_000_000), [1 / 3 - 2e-7] * 3)  # they add up to less than 1
    assert sum(len(short.use(i)) for i in range(3)) == 2_000_000
    again = DataPartitioner(data, seed=1234).use(1)
    assert list(again) == list(parts[1]) != list(DataPartitioner(data, seed=1).use(1))
    assert list(Partition("abcd", [3, 1])) == ["d", "b"] and len(Partition("abcd", [])) == 0


@pytest.mark.parametrize("sizes", [(0.5, 0.4), (0.7, 0.2, 0.2), (1.5, -0.5)])
def test_sizes_that_are_no_shares(sizes):
    with pytest.raises(ValueError, match="and add up to 1"):
        DataPartitioner(range(10), sizes)


@pytest.mark.parametrize("samples", [1, 10, 64, 101])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_partition_dataset(ranks, samples):
    """Each sample on one rank, none lost; a step's batches are the whole batch, while it lasts."""
    loaders = [partition_dataset(r, ranks, range(samples), 7, list) for r in range(ranks)]
    assert sorted(chain(*chain(*loaders))) == list(range(samples))
    steps = [list(loader) for loader in loaders]
    assert max(map(len, steps)) - min(map(len, steps)) <= 1 + (samples < ranks)
    if samples >= 14:
        assert sum(len(of_rank[0]) for of_rank in steps) == 7
    with pytest.raises(ValueError, match="a batch of 7 samples, but 8 ranks"):
        partition_dataset(0, 8, range(samples), 7)
    assert partition_dataset(0, 4, range(samples)).batch_size == 128 // 4


def test_pad():
    ids, mask, labels = pad([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], 4)
    assert ids.tolist() == [[5, 6, 7, 0], [8, 9, 0, 0]]
    assert mask.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert labels.tolist() == [[5, 6, 7, -100], [8, 9, -100, -100]]
    ids, mask, labels = pad([], 4)  # attention needs something to look at
    assert mask.tolist() == [[1] * 4] and labels.tolist() == [[-100] * 4]


AVERAGE = """
import sys
sys.path.insert(0, {tasks!r})
import torch
import os
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from data_parallel import average_gradients, partition_dataset, setup

if __name__ == "__main__":
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    setup(rank, ranks, "gloo")
    for meshes in [], [init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))]:
        model = nn.ParameterList([torch.ones(2) for _ in range(3)])
        loss = (rank + 1) * model[0].sum() + (6 * model[1].sum() if rank == 0 else 0)
        loss.backward()
        average_gradients(model, *meshes)
        print([p.grad if p.grad is None else p.grad.tolist() for p in model])
    loader, size = partition_dataset(list(range(200)), batch_size=96)
    everyone = [None] * ranks
    dist.all_gather_object(everyone, [sample for batch in loader for sample in batch.tolist()])
    print(size, sorted(sum(everyone, [])) == list(range(200)))
    dist.destroy_process_group()
"""


def test_average_gradients(tmp_path):
    """Of a parameter that all use, of one that rank 0 alone uses, and of one that nobody uses.

    With a mesh and without. And a partition by the process group, which `setup` has made.
    """
    (tmp_path / "average.py").write_text(AVERAGE.format(tasks=str(launch.TASKS)))
    result = launch.ranks(tmp_path / "average.py", nproc=3, folder=tmp_path)
    assert result.out.count("[[2.0, 2.0], [2.0, 2.0], None]") == 6, result.tail()
    assert result.out.count("32 True\n") == 3, result.tail()


def test_spawn(tmp_path):
    """Processes without torchrun train a GPT-2, and their files are compared, as is shown."""
    files, path = tmp_path / "gradients", launch.ROOT / "figures" / "outputs"
    files.mkdir()
    (files / "model2_gradients.safetensors").write_text("of an earlier run of three")
    (tmp_path / "tasks").symlink_to(launch.TASKS)
    _, *shown = (path / "data_parallel_spawn.txt").read_text().split("$ OMP_NUM_THREADS=1 ")
    spawn, compare = (text.split("\n", 1) for text in shown)
    launch.STARTED.add(FILE.stem)
    words = spawn[0].removeprefix("python ").split()
    result = launch.run([sys.executable, *words], cwd=tmp_path)
    assert result.code == 0 and not result.survivors and "Warning" not in result.err, result.tail()
    same(spawn[1], result.out)
    for line in "Starting worker {}/2 with master address localhost:", "Tests passed (rank={})":
        assert all(line.format(rank) in result.out for rank in range(2)), result.tail()
    alone = {"nproc": 1, "folder": tmp_path, "torchrun": False}
    result = launch.ranks(FILE, "--compare-gradients", files, **alone)
    assert result.code == 0, result.tail()
    same(compare[1].replace("gradients: ", f"{files}: ", 1), result.out)
    grads = load_file(files / "model1_gradients.safetensors")
    for name, value in ("transformer.ln_f.bias", 1 + 2**-23), ("transformer.wpe.weight", -1.0):
        wrong = grads[name].clone()
        wrong[-1] *= value  # the last position has no gradient: 0 becomes -0
        save_file(grads | {name: wrong}, files / "model1_gradients.safetensors")
        result = launch.ranks(FILE, "--compare-gradients", files, **alone)
        assert result.code == 1 and "FAILED process 1: the gradients' bits" in result.out, name
    (files / "model1_gradients.safetensors").write_bytes(b"\0" * 9)
    result = launch.ranks(FILE, "--compare-gradients", files, **alone)
    result.assert_refused("model1_gradients.safetensors: cannot be read")


@pytest.mark.stress
def test_spawned_process_is_killed():
    """It is named in one line, and the others end with it, within seconds."""
    job = uuid.uuid4().hex
    args = ["--spawn", 2, "--train-only", "--epochs", 10000, "--seq-len", 19, "--num-sequences", 8]
    words = map(str, [sys.executable, FILE, *args])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=launch.environment(job), cwd=launch.ROOT, **pipes) as process:
        for line in process.stdout:
            if line.startswith("Epoch 0 (rank=1)"):
                break
        environments = {p.pid: p.environ() for p in launch.processes(job)}
        (killed,) = (pid for pid, env in environments.items() if env.get("RANK") == "1")
        os.kill(killed, signal.SIGKILL)
        begin = time.monotonic()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and time.monotonic() - begin < 20, err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    said = f"error: process 1 of 2 ({killed}) was killed by SIGKILL; the others are ended, too"
    assert errors == [said] and not launch.survivors(job), err


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        (lambda: os._exit(3), 3, "process 1 of 2 ({}) ended with code 3; the others"),
        (lambda: os._exit(2), 2, ""),  # it has said itself what the user got wrong
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 1, "({}) was killed by SIGKILL; the others"),
    ],
)
def test_a_process_fails(how, code, said, capfd):
    """Its end is told, and ends one that does not listen to being asked."""

    def deaf():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(100)

    fork, begin = multiprocessing.get_context("fork"), time.monotonic()
    both = [fork.Process(target=target) for target in (deaf, how)]
    processes.PATIENCE_S, before = 0.5, processes.PATIENCE_S
    handlers = {number: signal.getsignal(number) for number in (1, 2, 15)}
    try:
        with processes.ended_together(both):
            for process in both:
                process.start()
            assert processes.wait_for_all(both) == code
    finally:
        processes.PATIENCE_S = before
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert time.monotonic() - begin < 20 and not any(process.is_alive() for process in both)
    err = capfd.readouterr().err
    assert said.format(both[1].pid) in err and err.count("error: ") == bool(said)


def test_port(monkeypatch):
    """The next one, where the course's is taken; but the one that the user names, or none."""

    def refuse(message):
        raise SystemExit(message)

    monkeypatch.setattr(processes, "fail", refuse)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        monkeypatch.setattr(processes, "PORT", taken)
        store, note = processes.open_store()
        assert store.port > taken
        assert note == f"port {taken} is taken: the processes meet at port {store.port}"
        monkeypatch.setenv("MASTER_PORT", str(taken))
        with pytest.raises(SystemExit, match=f"^port {taken} is taken$"):
            processes.open_store()
    monkeypatch.setenv("MASTER_PORT", "port")
    with pytest.raises(SystemExit, match="MASTER_PORT=port: no such port"):
        processes.open_store()


DIVERGES = ["--strategy", "by-hand", "--lr", 9e5, "--num-sequences", 16, "--seq-len", 16]


@pytest.mark.parametrize(
    ("flags", "nproc", "message"),
    [
        (["--batch-size", 1], 2, "--batch-size 1: fewer sequences than 2 ranks"),
        (["--spawn", 2, "--batch-size", 1], 1, "--batch-size 1: fewer sequences than 2 ranks"),
        (["--spawn", 2], 2, "--spawn starts processes itself"),
        (["--strategy", "ddp", "--gradients-dir", "files"], 1, "the gradients of --strategy by-"),
        (["--gradients-dir", FILE], 1, "--gradients-dir " + str(FILE) + ": cannot be written"),
        (["--compare-gradients", "nowhere"], 1, "--compare-gradients nowhere: 0 files"),
        (["--compare-gradients", "files"], 2, "in one process, without torchrun"),
        (["--num-sequences", 1], 2, "--num-sequences 1: 1 to train on and 0 to validate"),
        (["--lr", 0], 1, "--lr: must be above 0"),
        (["--seq-len", 2], 2, "--seq-len 2: too short"),
        (["--memory-budget", 1, "--epochs", 0], 1, "--memory-budget trains: with 1 or more"),
        (["--memory-budget", 1, "--train-only"], 1, "trains without dropout"),
        ([*DIVERGES, "--dtype", "bfloat16"], 2, "--lr 900000.0: a loss or a norm is not finite"),
        (DIVERGES, 2, "--lr 900000.0: a loss or a norm is not finite"),
    ],
)
def test_refused(flags, nproc, message, tmp_path):
    launch.ranks(FILE, *flags, nproc=nproc, folder=tmp_path).assert_refused(message)


SHORT = ["--model", "random/balanced", "--num-layers", 10, "--batch-size", 2, "--seq-len", 8]
SHORT += ["--num-sequences", 8, "--epochs", 1, "--memory-budget", 0.47]


@pytest.mark.skipif(sys.platform != "linux", reason="only there can a process's memory be limited")
@pytest.mark.parametrize(
    ("strategy", "nproc"),
    [
        ("fsdp2", 1),
        *(pytest.param(strategy, 2, marks=pytest.mark.stress) for strategy in STRATEGIES),
    ],
)
def test_a_model_that_does_not_fit(strategy, nproc, tmp_path):
    """Weights, gradients and states of ZeRO-1 are 0.52 GiB; with FSDP2 a rank has 0.42."""
    result = launch.ranks(FILE, *SHORT, "--strategy", strategy, nproc=nproc, folder=tmp_path)
    if (strategy, nproc) == ("fsdp2", 2):
        assert result.code == 0 and result.out.count("Tests passed") == 2, result.tail()
        return
    result.assert_refused(f"out of memory: {strategy} does not train random/balanced", 60)


def test_with_a_budget(tmp_path):
    """Enough for FSDP2, which is the default then. On three ranks a weight's rows do not divide."""
    args = ["--memory-budget", 2, "--seq-len", 9, "--num-sequences", 12]
    args += ["--epochs", 1, "--dtype", "float64"]
    result = launch.ranks(FILE, *args, nproc=3, folder=tmp_path)
    assert result.code == 0 and result.out.count("Tests passed") == 3, result.tail()
    for check in "fsdp2: losses of the training", "fsdp2, the model one unit: peak in MiB":
        assert f"check {check}" in result.out, result.tail()


def test_few_samples(tmp_path):
    """Fewer than a batch, and than ranks: some have none, and all is right."""
    args = ["--num-sequences", 3, "--seq-len", 19, "--dtype", "float64", "--epochs", 1]
    args += ["--strategy", "fsdp2"]  # of which every rank must come to every collective
    result = launch.ranks(FILE, *args, nproc=3, folder=tmp_path)
    assert result.code == 0 and result.out.count("Tests passed") == 3, result.tail()


def test_gloo(tmp_path):
    """In float32 FSDP2 asks it for a mean, which older ones take for a sum; and without epochs."""
    args = ["--gloo", "--strategy", "fsdp2", "--epochs", 0, "--seq-len", 19]
    result = launch.ranks(FILE, *args, nproc=3, folder=tmp_path)
    assert result.code == 0 and result.out.count("Tests passed") == 3, result.tail()


def test_estimate(tmp_path):
    """The article's number, of a model that no machine here has room for."""
    args = ["--model", "random/7b", "--dtype", "bfloat16", "--batch-size", 1, "--seq-len", 256]
    result = launch.ranks(FILE, *args, "--estimate", nproc=2, folder=tmp_path)
    assert result.code == 0 and "Model has 7257206784 parameters" in result.out, result.tail()
    assert "1 x 256 tokens: 59.77 GB on one rank" in result.out
    assert "by-hand 58.91, ddp 58.91, zero1 44.40, fsdp2 29.89" in result.out
