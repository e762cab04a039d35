"""Hugging Face's Trainer over a Task 4 model, as `figures/tasks.md` has it, beside one process."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import launch
from pages import CODE

(SHOWN,) = [code for code in CODE if "Trainer" in code]
TINY = launch.TASKS / "tiny_llama"
ROWS = """
import json
import torch

path = {tiny!r}
torch.manual_seed(0)
ids = torch.randint(64, (16, 23))
rows = [{{"input_ids": row, "labels": row}} for row in ids]
"""
WRITES = """
from pathlib import Path

entries = [entry for entry in trainer.state.log_history if "loss" in entry]
values = {key: [entry[key] for entry in entries] for key in ("loss", "grad_norm")}
total = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
values["sum of weights"] = total
Path(f"{arguments.output_dir}_{dist.get_rank()}.json").write_text(json.dumps(values))
"""
NO_SUM = ("sum_gradients(self.model.parameters(), mesh)", "pass")
NO_CHECK = (
    "from utils.replicas import sum_gradients\n",
    "from guards import agreement\n\nagreement.error_in = lambda *_: None\n",
)
# What the single process leaves out of the page's program: all that splits the model.
ALONE = [("sequence_parallelize(model, mesh)", ""), NO_SUM]


def run(folder, nproc, *changes):
    """Run the page's program."""
    folder.mkdir(exist_ok=True)
    code = SHOWN.replace('"parallel-llama/tasks"', repr(str(launch.TASKS)))
    code = code.replace('"trained"', repr(str(folder / "trained")))
    for right, wrong in changes:
        assert code.count(right) == 1, right
        code = code.replace(right, wrong)
    (folder / "train.py").write_text(ROWS.format(tiny=str(TINY)) + code + WRITES)
    return launch.ranks(folder / "train.py", nproc=nproc, folder=folder)


def train(folder, nproc, *changes):
    """Run it. Of each rank losses and norms of all steps, and a sum of weights."""
    result = run(folder, nproc, *changes)
    assert result.code == 0, result.tail()
    return [json.loads((folder / f"trained_{rank}.json").read_text()) for rank in range(nproc)]


def weights(path):
    """By plain transformers, as one vector."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.stress
@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_as_shown(bf16, nproc, tmp_path):
    """Losses, norms and weights of all ranks are one process's; so they are when it goes on."""
    dtype = [('report_to="none"', 'report_to="none", bf16=True')] * bf16
    (alone,) = train(tmp_path / "alone", 1, *ALONE, *dtype)
    together = train(tmp_path / "together", nproc, *dtype)
    # bfloat16: one rounding of another order of sums.
    close = {"rel": 2**-8 if bf16 else 1e-5}
    assert len(alone["loss"]) == 4 and alone["grad_norm"][0] > 1  # it clips
    for history in together:
        assert history == together[0]  # the same bits on all ranks
    for key in "loss", "grad_norm":
        assert together[0][key] == pytest.approx(alone[key], **close), key
    last = "trained/checkpoint-4"
    expected, before = weights(tmp_path / "alone" / last), weights(TINY)
    off = (weights(tmp_path / "together" / last) - expected).norm() / (expected - before).norm()
    # Adam divides by the gradient's size: where that is next to nothing, rounding decides.
    assert off < (0.3 if bf16 else 1e-2), off
    again = train(
        tmp_path / "together", nproc, *dtype,
        ("resume_from_checkpoint=False",
         "resume_from_checkpoint=f\"{arguments.output_dir}/checkpoint-2\""),
    )  # fmt: skip
    for history in again:
        assert history["loss"][-2:] == together[0]["loss"][-2:]


@pytest.mark.stress
def test_without_the_sum(tmp_path):
    """Where gradients are not summed, a forward soon after raises, on each rank."""
    result = run(tmp_path, 2, NO_SUM)
    assert result.code == 1 and result.err.count("before the clipping\n") == 2, result.tail()


@pytest.mark.stress
def test_without_the_sum_nor_its_check(tmp_path):
    """It can fail: where gradients are not summed, norms are others, and ranks part."""
    (alone,) = train(tmp_path / "alone", 1, *ALONE)
    histories = train(tmp_path / "together", 2, NO_SUM, NO_CHECK)
    assert not math.isclose(histories[0]["grad_norm"][0], alone["grad_norm"][0], rel_tol=1e-2)
    assert histories[0]["grad_norm"] != histories[1]["grad_norm"]


DDP = """
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from accelerate import Accelerator
from transformers import LlamaForCausalLM

sys.path.insert(0, {tasks!r})
from dtensor_llama import dtensor_parallelize
from ring_attention import ring_parallelize
from tp_llama import tensor_parallelize
from ulysses_forward import sequence_parallelize

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
group = mesh["dp"].get_group()
for split in tensor_parallelize, dtensor_parallelize, sequence_parallelize, ring_parallelize:
    model = split(LlamaForCausalLM.from_pretrained({tiny!r}), mesh["tp"])
    for wrap in (
        DistributedDataParallel,
        partial(DistributedDataParallel, process_group=mesh["tp"].get_group()),
        partial(DistributedDataParallel, device_mesh=mesh["tp"]),
        Accelerator(cpu=True).prepare,
    ):
        try:
            wrap(model)
        except ValueError as error:
            assert "which share each batch" in str(error), error
        else:
            raise AssertionError((split, wrap))
    if split is not dtensor_parallelize:  # of DTensors DDP takes none
        DistributedDataParallel(model, process_group=group)
dist.destroy_process_group()
print("refused")
"""


def test_ddp_over_ranks_that_share_a_batch(tmp_path):
    """Of each technique, over all ranks or those of its axis, or by accelerate; over the other axis
    it is right.
    """
    program = tmp_path / "ddp.py"
    program.write_text(DDP.format(tasks=str(launch.TASKS), tiny=str(TINY)))
    result = launch.ranks(program, nproc=4, folder=tmp_path)
    assert result.code == 0 and result.out.count("refused") == 4, result.tail()


@pytest.mark.stress
def test_trainer_over_slices(tmp_path):
    """It clips by PyTorch's function, which takes a rank's slices for the model."""
    imported = "from ulysses_forward import sequence_parallelize"
    slices = [
        (imported, "from tp_llama import tensor_parallelize"),
        ("sequence_parallelize(model, mesh)", "tensor_parallelize(model, mesh)"),
    ]
    result = run(tmp_path, 2, *slices, NO_SUM)
    assert result.code == 1, result.tail()
    assert result.err.count("ValueError: get_total_norm, clip_grad_norm_") == 2, result.tail()


@pytest.mark.stress
def test_trainer_that_sees_torchrun(tmp_path):
    """It would make DDP of the ranks that share each batch."""
    code = SHOWN.replace('"parallel-llama/tasks"', repr(str(launch.TASKS)))
    code = code.replace("del os.environ[name]", "pass")
    (tmp_path / "train.py").write_text(ROWS.format(tiny=str(TINY)) + code)
    result = launch.ranks(tmp_path / "train.py", nproc=2, folder=tmp_path)
    assert result.code == 1 and "which share each batch" in result.err + result.out, result.tail()
