"""Data parallelism's parts: partitions, the average; what cannot be run, and what is estimated."""

import sys
from itertools import chain

import pytest
import torch

import launch
from data_parallel import DataPartitioner, Partition, partition_dataset
from utils.batches import pad

FILE = launch.TASKS / "data_parallel.py"


def test_partitioner():
    """All samples once, in an order that hangs on the seed alone; where parts end is rounded."""
    data = [f"sample {i}" for i in range(101)]
    torch.manual_seed(0)
    parts = [DataPartitioner(data).use(i) for i in range(3)]
    assert [len(part) for part in parts] == [71, 20, 10]
    assert sorted(chain(*parts)) == sorted(data) and list(chain(*parts)) != data
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
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from data_parallel import average_gradients

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.ParameterList([torch.ones(2) for _ in range(3)])
    loss = (rank + 1) * model[0].sum() + (6 * model[1].sum() if rank == 0 else 0)
    loss.backward()
    average_gradients(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)))
    print([p.grad if p.grad is None else p.grad.tolist() for p in model])
    dist.destroy_process_group()
"""


def test_average_gradients(tmp_path):
    """Of a parameter that all use, of one that rank 0 alone uses, and of one that nobody uses."""
    (tmp_path / "average.py").write_text(AVERAGE.format(tasks=str(launch.TASKS)))
    result = launch.ranks(tmp_path / "average.py", nproc=3, folder=tmp_path)
    assert result.out.count("[[2.0, 2.0], [2.0, 2.0], None]") == 3, result.tail()


def test_spawn():
    """Without torchrun: processes, their files, the single rank's gradients.

    Of one sample to train on, so that the second process has none.
    """
    args = ["--spawn", 2, "--num-sequences", 2, "--dtype", "float64", "--seq-len", 19]
    launch.STARTED.add(FILE.stem)
    result = launch.run([sys.executable, FILE, *args])
    assert result.code == 0 and not result.survivors, result.tail()
    for rank in range(2):
        assert f"Starting worker {rank}/2 with master address localhost:" in result.out
        assert f"check process {rank}: the gradients' bits are process 0's" in result.out
    assert "check processes: gradients" in result.out and "Warning" not in result.err


@pytest.mark.parametrize(
    ("flags", "nproc", "message"),
    [
        (["--batch-size", 1], 2, "--batch-size 1: fewer sequences than 2 ranks"),
        (["--spawn", 2, "--batch-size", 1], 1, "--batch-size 1: fewer sequences than 2 ranks"),
        (["--spawn", 2], 2, "--spawn starts processes itself"),
        (["--num-sequences", 1], 2, "--num-sequences 1: 1 to train on and 0 to validate"),
        (["--lr", 0], 1, "--lr: must be above 0"),
        (["--seq-len", 2], 2, "--seq-len 2: too short"),
    ],
)
def test_refused(flags, nproc, message, tmp_path):
    launch.ranks(FILE, *flags, nproc=nproc, folder=tmp_path).assert_refused(message)


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
