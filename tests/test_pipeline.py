"""The pipelines' parts: schedules, stages, threads; and what cannot be run."""

import sys
from itertools import pairwise

import pytest
import torch
from torch import nn

import launch
from pipeline_llama import clock_cycles, gpipe, one_forward_one_backward
from pipeline_threads import Pipe, WithDevice, device_of, split_module
from utils.errors import UserError
from utils.shards import balance

CPU = [torch.device("cpu", i) for i in range(3)]


def test_clock_cycles():
    """Each (microbatch, stage) once, tick by tick, behind what it needs."""
    assert list(clock_cycles(3, 2)) == [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]
    assert list(clock_cycles(2, 3))[1:4] == [[(1, 0), (0, 1)], [(1, 1), (0, 2)], [(1, 2)]]
    for m, p in (1, 1), (1, 4), (5, 1), (4, 4), (2, 5):
        ticks = list(clock_cycles(m, p))
        assert all(i + j == tick for tick, pairs in enumerate(ticks) for i, j in pairs)
        assert sorted(pair for pairs in ticks for pair in pairs) == [
            (i, j) for i in range(m) for j in range(p)
        ]


def test_schedules():
    """As the docstring draws them; 1F1B keeps p - stage microbatches at most, GPipe all."""

    def text(order):
        return " ".join(f"{kind}{i}" for kind, i in order)

    assert text(gpipe(4, 2, 0)) == text(gpipe(4, 2, 1)) == "F0 F1 F2 F3 B3 B2 B1 B0"
    assert text(one_forward_one_backward(4, 2, 0)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert text(one_forward_one_backward(4, 2, 1)) == "F0 B0 F1 B1 F2 B2 F3 B3"
    for m, p in (1, 3), (2, 4), (7, 3):
        for stage in range(p):
            order, kept, most = one_forward_one_backward(m, p, stage), 0, 0
            for kind, _ in order:
                kept += 1 if kind == "F" else -1
                most = max(most, kept)
            assert sorted(order) == [(kind, i) for kind in "BF" for i in range(m)]
            assert most == min(m, p - stage)


def test_balance():
    """The dearest stage is as cheap as it can be, and no stage is empty."""
    assert balance([1.0] * 6, 3) == (2, 4, 6)
    assert balance([1.0, 1, 1, 5], 2) == (3, 4)
    assert balance([9.0, 1, 1, 1], 3) == (1, 2, 4)
    for stages in range(1, 6):
        stops = balance([1.0, 2, 3, 4, 5], stages)
        assert len(stops) == stages and stops[-1] == 5
        assert all(a < b for a, b in pairwise((0, *stops)))
    with pytest.raises(UserError, match="6 stages, but only 5 layers"):
        balance([1.0] * 5, 6)
    with pytest.raises(ValueError, match="0 stages"):
        balance([1.0] * 5, 0)


def test_split_module():
    """Neighbours on one device are one partition; a label says where, on CPUs."""
    first, second, third = nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)
    partitions, devices = split_module(nn.Sequential(first, second, third))
    assert [len(part) for part in partitions] == [3] and devices == [torch.device("cpu")]
    labelled = [WithDevice(m, d) for m, d in ((first, CPU[0]), (second, CPU[0]), (third, CPU[1]))]
    partitions, devices = split_module(nn.Sequential(*labelled))
    assert [list(part) for part in partitions] == [[first, second], [third]]
    assert devices == CPU[:2]
    assert torch.equal(labelled[0](torch.ones(1, 2)), first(torch.ones(1, 2)))
    with pytest.raises(ValueError, match="several devices"):
        device_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def stack(layers=6):
    torch.manual_seed(0)
    sizes = [(WithDevice(nn.Linear(8, 8), CPU[i * 3 // layers])) for i in range(layers)]
    return nn.Sequential(*sizes).double()


@pytest.mark.parametrize("batch", [1, 16, 30, 32])
@pytest.mark.parametrize("split_size", [1, 2, 4, 8, 16])
def test_pipe(batch, split_size):
    """Output and gradients of the sequential module, also where rows are left over."""
    whole, x = stack(), torch.randn(batch, 8, dtype=torch.float64)
    results = []
    for module in whole, Pipe(whole, split_size):
        whole.zero_grad()
        mine = x.clone().requires_grad_()
        y = module(mine)
        (y**2).sum().backward()
        results.append([y.detach(), mine.grad, *(p.grad for p in whole.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


class Fails(nn.Module):
    def forward(self, x):
        if (x > 5).any():
            raise ArithmeticError("planted")
        return x * 1


def test_exception_in_a_thread():
    """It reaches the caller, from the forward and the backward, and the pipe goes on after it."""
    pipe = Pipe(nn.Sequential(*(WithDevice(Fails(), device) for device in CPU[:2])), 1)
    x = torch.ones(4, 1, requires_grad=True)
    with pytest.raises(ArithmeticError, match="planted"):
        pipe(torch.full((4, 1), 9.0))
    assert torch.equal(pipe(x), x)
    y = pipe(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="runs once"):
        y.sum().backward()
    with torch.no_grad():
        assert not pipe(x).requires_grad


ARGS = ["--seq-len", 8, "--batch-size", 4]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--microbatches", 5], "--batch-size 4: fewer sequences than --microbatches 5"),
        (["--microbatches", 3, "--schedule", "torch-gpipe"], "unequal size, [2, 1, 1]"),
        (["--microbatches", 1, "--schedule", "torch-1f1b"], "1 microbatches, fewer than 2 stages"),
        (["--schedule", "interleaved", "--stages-per-rank", 9], "18 stages, but only 5 layers"),
    ],
)
def test_refused(flags, message, tmp_path):
    file = launch.TASKS / "pipeline_llama.py"
    result = launch.ranks(file, *ARGS, *flags, nproc=2, folder=tmp_path)
    result.assert_refused(message)


@pytest.mark.skipif(sys.platform != "linux", reason="only there can a process's memory be limited")
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_model_that_does_not_fit(nproc, tmp_path):
    """Weights, gradients and Adam's states take 0.36 GiB: more than one rank has, not than two."""
    args = ["--model", "random/small", "--memory-budget", 0.33]
    file = launch.TASKS / "pipeline_llama.py"
    result = launch.ranks(file, *args, nproc=nproc, folder=tmp_path)
    if nproc == 1:
        result.assert_refused("out of memory", 60)
    else:
        assert result.code == 0 and "losses: " in result.out, result.tail()
