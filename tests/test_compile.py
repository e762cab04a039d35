"""--compile: layers by torch.compile, held against the same reference as without it."""

import copy
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM

import launch
from harness.compiling import compile_norms_and_mlps
from kv_cache import (
    choose_among_ranks,
    choose_from_full_logits,
    generate,
    generate_in_place,
    make_cache,
)
from planting import plant
from tp_llama import tensor_parallelize

pytestmark = pytest.mark.skipif(
    not shutil.which("g++"), reason="no C++ compiler, which torch.compile wants on a CPU"
)
STRESS = pytest.mark.stress
SHORT = ["--repeats", 0]
SCRIPTS = {
    "tp_llama": SHORT, "dtensor_llama": SHORT, "ulysses_forward": SHORT,
    "ring_attention": [*SHORT, "--new-tokens", 1], "tp_ulysses": [*SHORT, "--new-tokens", 1],
    "data_parallel": ["--epochs", 1], "pretrain_2d": [],
    "ulysses_finetune": ["--no-long-sequence"],
}  # fmt: skip


def compiled(script, nproc, dtype, folder, *flags, tasks=launch.TASKS):
    words = ["--compile", "--dtype", dtype, *flags]
    return launch.ranks(tasks / f"{script}.py", *words, nproc=nproc, folder=folder, timeout=1200)


# The quickest here; by gloo a size that is a name alone comes to a sum of few bytes.
@pytest.mark.parametrize(
    ("nproc", "dtype", "flags"),
    [
        (2, "bfloat16", [*SHORT, "--new-tokens", 1]),
        *(pytest.param(n, "float32", [*SHORT, "--gloo"], marks=STRESS) for n in (1, 3)),
    ],
)
def test_task_2(nproc, dtype, flags, tmp_path):
    check(compiled("tp_llama", nproc, dtype, tmp_path, *flags), nproc)


@STRESS
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("nproc", "dtype"), [(2, "bfloat16"), (3, "float64"), (4, "float32")])
def test_all(script, nproc, dtype, tmp_path):
    """(One rank, in float32 and with each technique: test_full_model.py.)"""
    check(compiled(script, nproc, dtype, tmp_path, *SCRIPTS[script]), nproc)


def check(result, nproc):
    assert result.code == 0, result.tail()
    assert result.out.count("Tests passed") == nproc
    assert result.out.count("note: layers are compiled: the first forward took") == 1
    assert "recompile_limit" not in result.err, "part of it was not compiled"


@STRESS
@pytest.mark.parametrize(
    ("script", "edit", "said"),
    [
        ("tp_llama", ("collectives.py", "return all_reduce(grad, ctx.group), None",
                      "return grad, None"), "FAILED logits: input embeddings grad"),
        ("ulysses_forward", ("ulysses_forward.py",
                             "dist.all_to_all_single(dx, grad.contiguous(), ctx.sent, ctx.received,"
                             " group=ctx.group)", "dx.copy_(grad.flatten()[: len(dx)])"), "FAILED"),
    ],
)  # fmt: skip
def test_planted_bug(script, edit, said, tmp_path):
    """What is wrong without a compiler is wrong with it."""
    plant(tmp_path / "tasks", *edit)
    flags = SCRIPTS[script]
    result = compiled(script, 2, "float32", tmp_path, *flags, tasks=tmp_path / "tasks")
    assert result.code == 1 and said in result.out, result.tail()


@STRESS
def test_norms_and_mlps():
    """A cached token by compiled norms and MLPs, on more than one prompt's length and batch."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = LlamaForCausalLM.from_pretrained(launch.TASKS / "tiny_llama", dtype=torch.float32)
        split = copy.deepcopy(model)
        tensor_parallelize(split, init_device_mesh("cpu", (1,)))
        compile_norms_and_mlps(split, torch.device("cpu"))
        heads, chance = model.config.num_key_value_heads, torch.Generator().manual_seed(0)
        for size in (1, 7), (3, 5):
            ids = torch.randint(64, 1000, size, generator=chance)
            mask, length = torch.ones_like(ids), size[1] + 12
            expected = generate(model, ids, mask, 12, choose_from_full_logits)
            cache = make_cache("static", split, heads, size[0], length)
            found = generate_in_place(split, ids, mask, 12, choose_among_ranks, cache)
            assert found.equal(expected)
    finally:
        dist.destroy_process_group()


def test_refused(tmp_path):
    """A machine without a C++ compiler; layers that are taken apart."""
    file, words = launch.TASKS / "tp_llama.py", ["--compile", *SHORT]
    result = launch.ranks(file, *words, nproc=2, folder=tmp_path, env={"CXX": "no-such-compiler"})
    assert result.code == 2 and result.err.count("error: ") == 1, result.tail()
    assert "needs a C++ compiler; there is no no-such-compiler" in result.err
    file = launch.TASKS / "ulysses_finetune.py"
    result = launch.ranks(file, "--compile", nproc=2, folder=tmp_path)
    assert result.code == 2 and "add --no-long-sequence" in result.err, result.tail()
