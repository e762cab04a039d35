"""f's all-reduce behind the weights' gradients: every bit as without."""

import pytest
import torch

import launch
from figures.bench.overlap import beside
from planting import plant


def overlap(folder, model, nproc, dtype, tasks=launch.TASKS):
    """The Result of tests/helpers/overlap.py."""
    path = launch.HELPERS / "overlap.py"
    return launch.ranks(path, tasks, model, dtype, nproc=nproc, folder=folder)


@pytest.mark.parametrize(
    ("nproc", "dtype"),
    [(2, "float32"), (4, "bfloat16"), *(pytest.param(*of, marks=pytest.mark.stress) for of in (
        (1, "float32"), (2, "float64"), (3, "float64"), (4, "float32")))],
)  # fmt: skip
def test_same_bits(nproc, dtype, odd_llama, tmp_path):
    """With biases, shared KV heads, frozen weights, autocast, checkpoints, and two backwards."""
    result = overlap(tmp_path, odd_llama, nproc, dtype)
    assert result.code == 0 and result.out.count("Tests passed") == nproc, result.tail()


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("begin_all_reduce(grad, ctx.group)", "(grad, None)", "one step: input 0"),
        ("ctx.deferred.pop(number)", "ctx.deferred.pop(number).flip(0)", "one step: model.layers"),
        ("isinstance(self, ReplicatedKVLinear)", "False", "k_proj.weight: not the same bits"),
        ("db = dy.flatten(0, -2).sum(0)", "db = dy.flatten(0, -2).mean(0)", "bias: not the same"),
    ],
)
def test_planted_bug(right, wrong, said, odd_llama, tmp_path):
    """Not summed; of another sequence; of one of the ranks of a KV head; a mean."""
    plant(tmp_path / "tasks", "overlap.py", right, wrong)
    result = overlap(tmp_path, odd_llama, 4, "float32", tmp_path / "tasks")
    assert result.code != 0 and said in result.err, result.tail()


def test_kernels_beside():
    """Of NCCL's kernels' time, what other kernels ran in, each moment once."""
    kernels = [(True, 0.0, 4e6), (True, 3e6, 6e6), (False, 1e6, 3e6), (False, 2e6, 4e6),
               (False, 5e6, 9e6), (True, 20e6, 24e6)]  # fmt: skip
    assert beside(kernels) == (10.0, 0.4) and beside(kernels[2:5]) == (0.0, 0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(odd_llama):
    """On one rank of NCCL, whose sums run on a stream of their own: the same bits."""
    args = launch.HELPERS / "overlap.py", launch.TASKS, odd_llama, "bfloat16"
    result = launch.torchrun(*args, nproc=1, env=launch.ONE_GPU)
    assert result.code == 0 and "Tests passed, on cuda" in result.out, result.tail()
