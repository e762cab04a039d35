"""The process group in shared memory: held against gloo's, and what it says of ranks that miss."""

import datetime
import json
import os
import shutil
import threading

import pytest
import torch.distributed as dist

import launch
from planting import plant
from shared_memory.slots import common

RANDOM = launch.HELPERS / "random_collectives.py"
MORE = [pytest.param(nproc, 10_000, marks=pytest.mark.stress) for nproc in (2, 3, 4, 8)]


@pytest.mark.parametrize(("nproc", "count"), [(2, 300), (3, 300), (4, 300), *MORE])
def test_random_collectives(nproc, count, tmp_path):
    """Of random kinds, sizes, dtypes and groups, with pauses: as gloo's, sums within rounding."""
    result = launch.ranks(RANDOM, count, nproc=nproc, folder=tmp_path, timeout=900)
    assert result.code == 0 and result.out.count(f"{count} collectives passed") == nproc, (
        result.tail()
    )


def test_rank_0_comes_late():
    """A rank waits for the group's timeout, though the job's store would wait for less."""
    store, wait = dist.HashStore(), datetime.timedelta(seconds=1)
    store.set_timeout(wait / 4)
    late = threading.Timer(0.5, common, (store, 0, 4096, wait))
    late.start()
    assert len(common(store, 1, 4096, 20 * wait)[0]) == 4096
    late.join()
    store.delete_key("memory")
    with pytest.raises(dist.DistStoreError, match="timeout"):
        common(store, 1, 4096, wait / 4)


MEMORY, GROUP = "slots.py", "group.py"
BUGS = {
    "nobody is waited for": (MEMORY, "if words[LINE * rank] < n:", "if False:"),
    "one half": (MEMORY, "(like)[n % 2]", "(like)[1]"),
    "the counter comes first": (
        MEMORY,
        "            box[number % 2][: len(piece)].copy_(piece)\n"
        "            self.words[filled + SAID",
        "            self.words[filled] = number\n            time.sleep(0.001)\n"
        "            box[number % 2][: len(piece)].copy_(piece)\n"
        "            self.words[filled + SAID",
    ),
    "a slot that is not emptied": (MEMORY, "self.words[emptied] > 2", "self.words[emptied] > 3"),
    "gaps": (GROUP, "if flat.data_ptr() != tensor.data_ptr()", "if False"),
    "another's share": (GROUP, "(sums[rank].tensor", "(sums[0].tensor"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs(bug, tmp_path):
    """They are found."""
    plant(tmp_path, *BUGS[bug])
    script = shutil.copy(RANDOM, tmp_path)
    result = launch.ranks(script, 300, nproc=3, folder=tmp_path)
    assert result.code, result.tail()


SCENE = """
import datetime, os, sys, time
sys.path.insert(0, {tasks!r})
import torch
import torch.distributed as dist
from shared_memory.group import NAME

if __name__ == "__main__":
    timeout = datetime.timedelta(seconds=3)
    dist.init_process_group(NAME, timeout=timeout)
    rank, x = dist.get_rank(), torch.ones(4)
    pair = dist.new_group([1, 2], timeout=timeout)
    begin = time.monotonic()
    try:
        exec({scenes!r}[rank])
    except (RuntimeError, NotImplementedError, ValueError) as error:
        after = time.monotonic() - begin
        print(f"rank {{rank}}: {{type(error).__name__}} after {{after:.0f}} s: {{error}}")
    time.sleep(max(0, begin + {stay} - time.monotonic()))  # for who ends is missing
    os._exit(0)
"""
SCENES = {
    # what ranks 0, 1 and 2 do, and what is said of it
    "one hangs, for whom another waits": (
        ["dist.barrier()", "dist.all_reduce(x, group=pair)", "pass"],
        ["rank 0: Missing after 3 s: rank 2 did not come, in 3 s, to what rank 0, 1 waited for",
         "rank 1: Missing after 3 s: rank 2 did not come, in 3 s, to what rank 0, 1 waited for"],
    ),
    "one sends nothing": (
        ["dist.recv(x, 1)", "pass", "pass"],
        ["rank 0: Missing after 3 s: rank 1 did not come, in 3 s, to what rank 0 waited for"],
    ),
    "one takes nothing": (
        ["dist.send(torch.ones(2**22), 1)", "pass", "pass"],
        ["rank 0: Missing after 3 s: rank 1 did not come, in 3 s, to what rank 0 waited for"],
    ),
    "one has ended": (
        ["dist.recv(x, 2)", "dist.all_reduce(x, group=pair)", "os._exit(0)"],
        ["rank 0: Missing after 0 s: rank 2 has ended",
         "rank 1: Missing after 0 s: rank 2 has ended"],
    ),
    "each waits for the next": (
        ["dist.recv(x, 1)", "dist.recv(x, 2)", "dist.recv(x, 0)"],
        ["rank 0: RuntimeError after 3 s: all ranks wait, each for something else"],
    ),
    "other collectives": (
        ["dist.all_reduce(x)", "dist.barrier()", "dist.barrier()"],
        ["rank 0: RuntimeError after 0 s: rank 0 is in all_reduce of 16 bytes, but rank 1 of this "
         "group in barrier of 0",
         "rank 1: RuntimeError after 0 s: rank 1 is in barrier of 0 bytes, but rank 0 of this "
         "group in all_reduce of 16"],
    ),
    "other sizes": (
        ["dist.all_reduce(x)", "dist.all_reduce(x[1:])", "dist.all_reduce(x)"],
        ["rank 0: RuntimeError after 0 s: rank 0 is in all_reduce of 16 bytes, but rank 1 of this "
         "group in all_reduce of 12"],
    ),
    "another dtype": (
        ["dist.all_reduce(x)", "dist.all_reduce(x.int())", "dist.all_reduce(x)"],
        ["rank 1: RuntimeError after 0 s: rank 1 is in all_reduce of 16 bytes, but rank 0 of this "
         "group in all_reduce of 16, with another operator, dtype or root"],
    ),
    "another operator": (
        ["dist.all_reduce(x)", "dist.all_reduce(x, dist.ReduceOp.MAX)", "dist.all_reduce(x)"],
        ["rank 0: RuntimeError after 0 s: rank 0 is in all_reduce of 16 bytes, but rank 1 of this "
         "group in all_reduce of 16, with another operator, dtype or root"],
    ),
    "another root": (
        ["dist.broadcast(x, 0)", "dist.broadcast(x, 1)", "dist.broadcast(x, 0)"],
        ["rank 2: RuntimeError after 0 s: rank 2 is in broadcast of 16 bytes, but rank 1 of this "
         "group in broadcast of 16, with another operator, dtype or root"],
    ),
    "another dtype of what comes out": (
        ["dist.all_gather_into_tensor(torch.ones(12).double(), x)", "pass", "pass"],
        ["rank 0: ValueError after 0 s: a tensor has 4 values of torch.float64, where 4 of "
         "torch.float32 are expected"],
    ),
    "another dtype of a sum": (
        ["dist.reduce_scatter_tensor(x.double(), torch.ones(12))", "pass", "pass"],
        ["rank 0: ValueError after 0 s: a tensor has 12 values of torch.float32, where 12 of "
         "torch.float64 are expected"],
    ),
    "other sizes of a message": (
        ["dist.send(x, 1)", "dist.recv(x[1:], 0)", "pass"],
        ["rank 1: RuntimeError after 0 s: rank 0 of this group sends 16 bytes to rank 1, which "
         "expects 12"],
    ),
    "another message first": (
        ["dist.send(x, 1, tag=1)", "dist.recv(x, 0, tag=2)", "pass"],
        ["rank 1: RuntimeError after 0 s: rank 0 of this group sent a message of tag 1 first"],
    ),
    "from anyone": (
        ["dist.recv(x)", "pass", "pass"],
        ["rank 0: NotImplementedError after 0 s: recv from any rank: name one, or use gloo"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENES)
def test_who_is_missing(name, tmp_path):
    scenes, expected = SCENES[name]
    file = tmp_path / "scene.py"
    stay = 5 if "after 3 s" in expected[0] else 2.5
    file.write_text(SCENE.format(tasks=str(launch.TASKS), scenes=scenes, stay=stay))
    result = launch.ranks(file, nproc=3, folder=tmp_path)
    assert result.code == 0, result.tail()
    for line in expected:
        assert line in result.out, result.tail()


AS_BY_GLOO = """
import os, sys, threading
sys.path.insert(0, {tasks!r})
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from shared_memory.group import NAME

def is_sum(x, group=None):
    dist.all_reduce(x, group=group)
    assert (x.to_dense() == 2).all(), x

def exchange(group, many):
    for number in range(many):
        out = torch.empty(2**21)
        works = [dist.isend(torch.full((2**21,), number + 0.5), 1 - rank, group),
                 dist.irecv(out, 1 - rank, group)]
        for work in works:
            work.wait()
        assert (out == number + 0.5).all()

def in_threads(*jobs):
    failed = []
    def run(function, *args):
        try:
            function(*args)
        except BaseException as error:
            failed.append(error)
    threads = [threading.Thread(target=run, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed

if __name__ == "__main__":
    dist.init_process_group(NAME)
    rank, everyone = dist.get_rank(), [0, 1]
    with torch.inference_mode():  # what is made there cannot be written to outside
        x = torch.ones(77)
        is_sum(x)
        group = dist.new_group(everyone)
    is_sum(torch.ones(77))
    is_sum(torch.ones(77), group)
    with torch.inference_mode():
        x = torch.ones(77)
    is_sum(x)
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)

    pending = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    dist.broadcast(pending, 0)
    is_sum(pending / 2)
    is_sum(functional.all_reduce(torch.ones(3), "avg", dist.group.WORLD))
    gaps = functional.all_reduce(torch.ones(3, 2), "avg", dist.group.WORLD)[:, 0]
    is_sum(gaps)
    pending = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    dist.send(pending, 1) if rank == 0 else dist.recv(pending, 0)
    assert (pending == 2).all()
    leaf = torch.ones(3, 2, requires_grad=True)
    dist.all_reduce(leaf)
    dist.broadcast(leaf.T, 0)
    dist.send(leaf, 1) if rank == 0 else dist.recv(leaf, 0)
    assert (leaf == 2).all()

    for _ in range(3):  # by the same name: what the one before has left must not be found
        again = dist.new_group(everyone, use_local_synchronization=True)
        is_sum(torch.ones(3), again)
        dist.reduce(torch.ones(3), 0, group=again)  # by gloo
        dist.destroy_process_group(again)

    for i in range(300):  # by gloo, whose threads let go of Python's tensors
        parts = [torch.full((999,), float(i)), torch.full((999,), i + 1.0)]
        out, found = torch.empty(999), [torch.empty(999), torch.empty(999)]
        dist.scatter(out, parts if rank == 0 else None)
        dist.gather(out, found if rank == 0 else None)
        assert (out == i + rank).all() and (rank or torch.equal(found[1], parts[1]))

    is_sum(torch.ones(4).to_sparse())
    dist.broadcast(torch.ones(0)[::2], 0)
    minus = torch.full((5,), 1 + 1j).conj().imag  # "negative bit set"
    dist.all_reduce(minus)
    assert (minus == -2).all()
    out = torch.empty(2 + rank)
    dist.reduce_scatter(out, [torch.ones(2), torch.ones(3)])
    assert (out == 2).all()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    assert (work.result()[0] == 2).all()

    groups = [dist.new_group(everyone) for _ in range(3)]
    in_threads(*[(exchange, group, 9) for group in groups])
    a, b = torch.ones(2**22), torch.zeros(2**22)
    in_threads((dist.send, a, 1 - rank), (dist.recv, b, 1 - rank))
    assert (b == 1).all()
    print("as by gloo", flush=True)
    os._exit(0)
"""


def test_as_by_gloo(tmp_path):
    """What programs do that this project does not; gloo allows all, but for groups made anew."""
    (tmp_path / "others.py").write_text(AS_BY_GLOO.format(tasks=str(launch.TASKS)))
    result = launch.ranks(tmp_path / "others.py", nproc=2, folder=tmp_path)
    assert result.out.count("as by gloo") == 2, result.tail()


def test_places(tmp_path, monkeypatch):
    """Where memory cannot be shared the group says so itself, to those who use it alone."""
    import torch.distributed as dist

    from shared_memory import slots as shared_memory

    monkeypatch.setattr(shared_memory, "neighbourhood", lambda: "here")
    store = dist.HashStore()
    wait = datetime.timedelta(seconds=9)
    *_, file = shared_memory.common(store, 0, 4096, wait)
    monkeypatch.setattr(shared_memory, "neighbourhood", lambda: "there")
    with pytest.raises(RuntimeError, match="rank 1 shares no memory with rank 0"):
        shared_memory.common(store, 1, 4096, wait)
    monkeypatch.setattr(shared_memory, "neighbourhood", lambda: None)
    with pytest.raises(RuntimeError, match="no memory to share here"):
        shared_memory.common(store, 0, 4096, wait)
    os.close(file)


BUILT_ON_IT = """
import copy, sys
sys.path.insert(0, {tasks!r})
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from shared_memory import group as shared_group
from shared_memory.traffic import Meter

def grads(model):
    found = [p.grad for p in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in found]

if __name__ == "__main__":
    dist.init_process_group(shared_group.NAME)
    rank, P = dist.get_rank(), dist.get_world_size()
    with Meter() as meter:  # each of them is counted once, whoever tells it
        dist.all_reduce(torch.zeros(30))
        functional_all_reduce(torch.zeros(30), "sum", dist.group.WORLD).sum()
    assert meter.sent == 2 * 2 * (P - 1) / P * 120, meter.sent
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(P)))
    x, y = torch.randn(2, 4 * P, 24)
    whole = copy.deepcopy(layers)
    nn.functional.mse_loss(whole(x), y).backward()

    sharded = copy.deepcopy(layers)
    for layer in sharded:
        fully_shard(layer, mesh=init_device_mesh("cpu", (P,)))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (P,)))
    mine = slice(4 * rank, 4 * rank + 4)
    nn.functional.mse_loss(sharded(x[mine]), y[mine]).backward()
    torch.testing.assert_close(grads(sharded), grads(whole))

    stage = PipelineStage(copy.deepcopy(layers[rank]), rank, P, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    schedule.step(*[x] * (rank == 0), **dict(target=y) if rank == P - 1 else {{}})
    torch.testing.assert_close(grads(stage.submod), grads(whole[rank]))
    print("built")
"""


def test_built_on_it(tmp_path):
    """PyTorch's FSDP2 and pipelining; meshes, DTensor and functional collectives with them."""
    (tmp_path / "built.py").write_text(BUILT_ON_IT.format(tasks=str(launch.TASKS)))
    result = launch.ranks(tmp_path / "built.py", nproc=3, folder=tmp_path)
    assert result.out.count("built") == 3, result.tail()


BYTES = ["--batch-size", 1, "--seq-len", 201, "--repeats", 0]


@pytest.mark.parametrize("gloo", [False, True])
def test_backend(gloo, tmp_path):
    """Shared memory unless --gloo says otherwise; the bytes sent are the technique's."""
    path = tmp_path / "record.json"
    args = [*BYTES, "--json", path, *["--gloo"] * gloo]
    file = launch.TASKS / "ulysses_forward.py"
    result = launch.ranks(file, *args, nproc=3, folder=tmp_path)
    assert result.code == 0 and "note:" not in result.out, result.tail()
    backend = "gloo" if gloo else "shared_memory"
    assert f"on cpu ({backend})" in result.out
    record = json.loads(path.read_text())
    assert record["backend"] == backend
    record = record["results"]
    assert record["sent_bytes"] == [record["formula_bytes"]] * 2, record
    assert (record["wire_bytes"] == [None, None]) == (not gloo)


def test_other_processors(tmp_path):
    """There gloo is used, which is said, once."""
    plant(tmp_path, "slots.py", 'platform.machine() != "x86_64"', "True")
    args = ["--hidden-size", 8, "--intermediate-size", 8]
    result = launch.ranks(tmp_path / "tp_mlp.py", *args, nproc=2, folder=tmp_path)
    assert result.code == 0 and "on cpu (gloo)" in result.out, result.tail()
    assert result.out.count("note: no memory that all ranks could share") == 1, result.tail()
