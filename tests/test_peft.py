"""PEFT's methods on a split model: right, or refused in one line. Deep copies of split models."""

from importlib.metadata import version

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import launch
from guards.adapters import check_by_token

METHODS = launch.HELPERS / "peft_methods.py"


def test_methods_of_peft(tmp_path):
    """Adapters that are not token by token, through forward, `shard_loss` and its techniques.

    The script has a negative control: methods that are refused, compared as if they were not.
    """
    result = launch.ranks(METHODS, launch.TASKS, nproc=2, folder=tmp_path)
    assert result.code == 0, result.tail()
    counts = [result.out.count(kind) for kind in ("right: ", "refused: ", "unlike: ")]
    newest = tuple(map(int, version("peft").split(".")[:2])) >= (0, 21)
    least = [55, 13, 4] if newest else [25, 4, 1]
    assert all(map(int.__ge__, counts, least)), (counts, result.tail())


COPIES = """
import copy, sys
from functools import partial
sys.path.insert(0, {tasks!r})
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from dtensor_llama import dtensor_parallelize
from ring_attention import ring_parallelize
from tp_llama import tensor_parallelize
from tp_ulysses import parallelize_tp_sp
from ulysses_forward import sequence_parallelize
from utils.gradients import local_part
from utils.shards import shard_of

def step(model):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    none = torch.zeros(())
    grads = (none if p.grad is None else local_part(p.grad).clone() for p in model.parameters())
    return [loss.detach(), *grads]

def same(one, other):
    return all(map(torch.equal, one, other))

def check_copy(model, new):
    before = step(model)
    assert same(before, step(new))
    for old, parameter in zip(model.parameters(), new.parameters(), strict=True):
        assert parameter is not old and shard_of(parameter) == shard_of(old)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(0.9)  # not by gradients, which are not summed here
    assert same(before, step(model))
    assert all(not torch.equal(*pair) for pair in zip(before, step(new)))
    assert new.get_output_embeddings().weight is new.get_input_embeddings().weight

if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (4,))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
    flat = init_device_mesh("cpu", (4, 1), mesh_dim_names=("sp", "tp"))
    ids = torch.arange(2 * 12).view(2, 12) * 7 % 150
    sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, head_dim=8,
                 num_key_value_heads=3, intermediate_size=64, vocab_size=150,
                 tie_word_embeddings=True)
    for split in (
        partial(tensor_parallelize, mesh=mesh), partial(dtensor_parallelize, mesh=mesh),
        partial(sequence_parallelize, mesh=mesh), partial(ring_parallelize, mesh=mesh),
        partial(parallelize_tp_sp, mesh=both),
        partial(parallelize_tp_sp, mesh=both, megatron_sp=True),
        partial(parallelize_tp_sp, mesh=flat, sequence="usp", ulysses=2),
    ):
        model = split(LlamaForCausalLM(LlamaConfig(**sizes)))
        check_copy(model, copy.deepcopy(copy.deepcopy(model)))
        broken = copy.deepcopy(model)  # a negative control: a layer is still the original's
        broken.model.layers[1].mlp.forward = model.model.layers[1].mlp.forward
        try:
            check_copy(model, broken)
        except AssertionError:
            pass
        else:
            raise RuntimeError("a copy that uses the original's weights is taken for a copy")
    dist.barrier()
    print("copied")
    dist.destroy_process_group()
"""


def test_deep_copies(tmp_path):
    """An EMA, or DPO's reference: a copy computes the same, and training it trains nothing else."""
    (tmp_path / "copies.py").write_text(COPIES.format(tasks=str(launch.TASKS)))
    result = launch.ranks(tmp_path / "copies.py", nproc=4, folder=tmp_path)
    assert result.code == 0 and result.out.count("copied") == 4, result.tail()


@pytest.mark.skipif(
    not hasattr(LoraConfig, "alora_invocation_tokens"), reason="this PEFT has no aLoRA"
)
def test_variant_that_is_not_active():
    """What an adapter would do counts when it is the one that is used."""
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=20, num_key_value_heads=2, **sizes))
    model = get_peft_model(llama, LoraConfig(target_modules=["q_proj"]))
    activated = LoraConfig(
        target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[1]
    )
    model.add_adapter("activated", activated)
    check_by_token(llama)
    model.set_adapter("activated")
    with pytest.raises(ValueError, match="ALoraLinearVariant: adapters that are not known"):
        check_by_token(llama)
