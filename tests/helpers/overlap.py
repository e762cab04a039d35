"""Gradients with f's all-reduce behind the weights' gradients, held against those without.

    torchrun --nproc_per_node N tests/helpers/overlap.py TASKS MODEL DTYPE

TASKS: the folder with the scripts. MODEL: a directory. All bits must be the same.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, sys.argv[1])

from loading.models import from_pretrained
from tp_llama import tensor_parallelize
from utils.overlap import CopyAndDefer, DeferredLinear

MODEL, DTYPE = sys.argv[2], getattr(torch, sys.argv[3])


def gradients(model, ids, steps=1, autocast=False, frozen=()):
    """Return losses and gradients, by name, of a fresh backward; `steps` of them are added up."""
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    found = {}
    for step in range(steps):
        x = model.get_input_embeddings()(ids).detach().requires_grad_()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
            loss = model(inputs_embeds=x, labels=ids).loss
        loss.backward()
        found |= {f"loss {step}": loss.detach(), f"input {step}": x.grad}
    return found | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same_bits(name, ours, theirs):
    assert ours.keys() == theirs.keys(), (name, ours.keys() ^ theirs.keys())
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype, (name, key)
        assert torch.equal(ours[key], tensor), f"{name}: {key}: not the same bits"


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
        torch.use_deterministic_algorithms(True, warn_only=True)  # for attention's backward
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))

    def split(**settings):
        return from_pretrained(
            lambda model: tensor_parallelize(model, mesh["tp"], **settings), MODEL, DTYPE, device
        )

    plain, model = split(), split(overlap=True)
    torch.manual_seed(0)
    ids = torch.randint(plain.config.vocab_size, (2, 11), device=device)
    settings = {
        "one step": {},
        "two steps": {"steps": 2},
        "queries and gates frozen": {"frozen": ("q_proj.weight", "gate_proj.weight")},
        "all of layers frozen": {"frozen": ("proj.weight", "proj.bias", "norm.weight")},
    }
    if torch.float32 == DTYPE:
        settings["autocast"] = {"autocast": True}
    for name, given in settings.items():
        same_bits(name, gradients(model, ids, **given), gradients(plain, ids, **given))
    same_bits("deep copies", *(gradients(copy.deepcopy(of), ids) for of in (model, plain)))
    for checkpointed in plain, model:
        checkpointed.train()
        checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    same_bits("checkpoints", gradients(model, ids), gradients(plain, ids))
    try:
        tensor_parallelize(plain, mesh, region_ops=(None, None), overlap=True)
    except ValueError as error:
        assert "region_ops" in str(error), error
    else:
        raise AssertionError("overlap with region_ops: not refused")
    # A second backward of one graph.
    both = []
    for of in plain, model:
        of.zero_grad()
        loss = of(ids, labels=ids).loss
        loss.backward(retain_graph=True)
        loss.backward()
        both.append({n: p.grad for n, p in of.named_parameters()})
    same_bits("backward twice", *both)
    with torch.no_grad():
        same_bits("no gradients", {"logits": model(ids).logits}, {"logits": plain(ids).logits})
    # It is what ran, and nothing of a graph is left behind in a layer.
    node = model.model.layers[0].mlp.gate_proj
    assert isinstance(node, DeferredLinear) and "given" not in vars(node)
    calls = []
    backward = CopyAndDefer.backward
    CopyAndDefer.backward = staticmethod(lambda *args: calls.append(1) or backward(*args))
    gradients(model, ids)
    assert len(calls) >= 2 * len(model.model.layers), calls
    print(f"Tests passed, on {device.type}", flush=True)


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
