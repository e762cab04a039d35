"""`make lift`: each technique as one file, in a folder that has nothing else of the project."""

import os
import re
import subprocess
import sys

import pytest

import launch

OURS = {path.stem for path in launch.TASKS.iterdir()}
# Run on two ranks, by the lifted files alone; each function is one technique's check.
JOB = """
import copy, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
group, rank = mesh.get_group(), dist.get_rank()
CONFIG = LlamaConfig(
    vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=6, num_key_value_heads=2, head_dim=4, attn_implementation="sdpa",
)
torch.manual_seed(0)
WHOLE = LlamaForCausalLM(CONFIG)
IDS = torch.randint(50, (2, 12))
LOSS = WHOLE(IDS, labels=IDS).loss
LOSS.backward()
LOSS = LOSS.detach()
GRADS = {name: parameter.grad for name, parameter in WHOLE.named_parameters()}


def model():
    made = LlamaForCausalLM(CONFIG)
    made.load_state_dict(WHOLE.state_dict())
    return made


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)


def same_gradients(split):
    for name, parameter in split.named_parameters():
        grad, whole = parameter.grad, GRADS[name]
        if hasattr(grad, "full_tensor"):
            grad = grad.full_tensor()
        close(grad, whole[getattr(parameter, "shard", ...)])


def trained(split):
    loss = split(IDS, labels=IDS).loss
    loss.backward()
    close(loss.detach(), LOSS)
    return split


def clipped_and_saved(split, of):
    norm = torch.stack([grad.norm() for grad in GRADS.values()]).norm()
    close(of.clip_grad_norm_(split, 1e9).float(), norm)
    of.save_pretrained(split, "saved")
    saved = LlamaForCausalLM.from_pretrained("saved").state_dict()
    assert all(saved[name].equal(value) for name, value in WHOLE.state_dict().items())


def tp_llama(of):
    for size in 2**28, 1:  # the loss in one, and in tiles
        of.LOSS_TILE_BYTES = size
        same_gradients(split := trained(of.tensor_parallelize(model(), mesh)))
    clipped_and_saved(split, of)
    overlapped = of.tensor_parallelize(model(), mesh, overlap=True)
    same_gradients(trained(overlapped))


def tp_training(of):
    same_gradients(trained(of.tensor_parallelize(model(), mesh)))


def dtensor_llama(of):
    split = of.dtensor_parallelize(model(), mesh)
    with loss_parallel():
        same_gradients(trained(split))


def by_tokens(split, of):
    trained(split)
    of.sum_gradients(split.parameters(), mesh)
    same_gradients(split)
    clipped_and_saved(split, of)


def ulysses_forward(of):
    by_tokens(of.sequence_parallelize(model(), mesh), of)


def ring_attention(of):
    by_tokens(of.ring_parallelize(model(), mesh), of)


def tp_ulysses(of):
    axes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("sp", "tp"))
    by_tokens(of.parallelize_tp_sp(model(), axes), of)


def ulysses_finetune(of):
    split = LlamaForCausalLM(CONFIG)
    split.load_state_dict(WHOLE.state_dict())
    of.sequence_parallelize(split, mesh)
    for loss in of.local_loss(split, IDS).detach(), of.forward_backward(split, IDS, mesh):
        dist.all_reduce(loss)
        close(loss, LOSS)
    same_gradients(split)


def kv_cache(of):
    mask = torch.ones_like(IDS)
    split = of.tensor_parallelize(model(), mesh)
    alone = of.generate(WHOLE, IDS, mask, 4, of.choose_from_full_logits)
    assert of.generate(split, IDS, mask, 4, of.choose_among_ranks, DynamicCache()).equal(alone)


def pipeline_llama(of):
    stage = model()
    of.keep_stage(stage, stops=(1, 2), index=rank)
    pipe = of.Pipeline(mesh, "1f1b", [stage], 2)
    loss, _ = pipe.step(IDS, torch.ones_like(IDS), IDS, [1, 1])
    if rank == 1:
        close(loss, LOSS)
    same_gradients(stage)


def pipeline_threads(of):
    torch.manual_seed(1)
    parts = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    labelled = nn.Sequential(*(of.WithDevice(p, f"cpu:{i // 2}") for i, p in enumerate(parts)))
    x = torch.randn(6, 4)
    expected = parts(x)
    expected.square().sum().backward()
    grads = [parameter.grad.clone() for parameter in parts.parameters()]
    parts.zero_grad()
    y = of.Pipe(labelled, 2)(x)
    y.square().sum().backward()
    close(y, expected)
    for parameter, grad in zip(parts.parameters(), grads, strict=True):
        close(parameter.grad, grad)


def data_parallel(of):
    split = model()
    split(IDS[rank : rank + 1], labels=IDS[rank : rank + 1]).loss.backward()
    of.average_gradients(split)
    same_gradients(split)


def pretrain_2d(of):
    axes = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    split = of.parallelize_2d(model(), axes)
    with loss_parallel():
        loss = of.forward_backward(split, (IDS, IDS), axes)
    close(loss.full_tensor() if hasattr(loss, "full_tensor") else loss, LOSS)
    same_gradients(split)


def tp_mlp(of):
    torch.manual_seed(2)
    whole = LlamaMLP(CONFIG)
    split, x = copy.deepcopy(whole), torch.randn(2, 5, 24, requires_grad=True)
    of.tensor_parallelize_mlp(split, mesh)
    close(split(x), whole(x))


def tp_attention(of):
    split = model()
    for layer in split.model.layers:
        of.tensor_parallelize_attention(layer.self_attn, mesh)
    trained(split)


def tp_naive(of):
    torch.manual_seed(3)
    x, w = torch.randn(6, 4), torch.randn(4, 5)
    first, stop = of.share_of(5, group)
    close(of.forward_by_columns(x, w[:, first:stop], 5, group), x @ w)


for name in sys.argv[1:]:
    __import__(name)
for name in sys.argv[1:]:
    globals()[name](sys.modules[name])
    print(f"{name} (rank={rank}): as unsplit", flush=True)
dist.destroy_process_group()
"""


def lift(*args):
    command = [sys.executable, launch.ROOT / "launch" / "lift.py", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.quick
def test_lifted(tmp_path):
    """Each script's file alone: imported in an empty folder, forward and backward on 2 ranks."""
    for script in launch.SCRIPTS:
        done = lift(script, tmp_path / f"{script}.py")
        assert not done.returncode, done.stderr
        text = (tmp_path / f"{script}.py").read_text()
        imported = re.findall(r"^ *(?:from|import) (\w+)", text, re.M)
        assert not OURS & set(imported), (script, OURS & set(imported))
        assert "MIT License" in text
    (tmp_path / "job.py").write_text(JOB)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc_per_node", "2", "job.py", *launch.SCRIPTS]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
    )
    assert not done.returncode, done.stderr[:3000]
    said = re.findall(r"(\w+) \(rank=\d\): as unsplit", done.stdout)
    assert sorted(said) == sorted(2 * launch.SCRIPTS), done.stdout


def test_bad_arguments(tmp_path):
    assert "TASK" in lift("tp_none", tmp_path / "a.py").stderr
    done = lift("tp_mlp", tmp_path / "none" / "a.py")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "written" in done.stderr
