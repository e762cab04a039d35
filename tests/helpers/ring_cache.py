"""Count how many rings are built, and hold attention against masks that change, on two ranks.

    torchrun --nproc_per_node 2 tests/helpers/ring_cache.py TASKS

TASKS: the folder with the scripts.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, sys.argv[1])
import ring_attention
from utils.replicas import sum_gradients

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
built = 0


class Counted(ring_attention.Ring):
    def __init__(self, *args):
        global built
        built += 1
        super().__init__(*args)


ring_attention.Ring = Counted
config = LlamaConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    attn_implementation="sdpa",
)
torch.manual_seed(0)
whole = LlamaForCausalLM(config).double().train()
ids = torch.randint(50, (2, 12))
masks = torch.ones(2, 2, 12, dtype=torch.bool)
masks[0, 1, :3] = masks[1, 0, :7] = False
nothing = torch.ones(2, 12, dtype=torch.bool)


def parallel(zigzag):
    model = LlamaForCausalLM(config).double().train()
    model.load_state_dict(whole.state_dict())
    return ring_attention.ring_parallelize(model, mesh, zigzag)


def logits_of(model, mask):
    return model(ids, attention_mask=mask).logits[mask.clone()]


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def builds(times, model, mask):
    before = built
    logits = logits_of(model, mask)
    assert built - before == times, (built - before, times)
    same(logits, logits_of(whole, mask))
    return logits


split, other = parallel(True), parallel(False)
builds(1, split, nothing)  # as many as forwards, not as layers
builds(0, split, nothing)
builds(1, split, masks[0])
builds(1, split, masks[1])
mask = masks[0].clone()
builds(1, split, mask)
mask.copy_(masks[1])  # in place
builds(1, split, mask)
builds(2, other, mask)  # another layout, of its own order
builds(1, other, mask)
with torch.inference_mode():
    builds(1 + 3, split, mask.clone())  # of the order, and in every layer

# Those who call the layers hold the mask themselves.
seen = split.attention_mask_info(12, masks[0].clone())
tokens = split.tokens(12)
embeddings = split.get_input_embeddings()(ids[:, tokens]).detach()


def hidden():
    return split.model(None, seen, tokens[None], inputs_embeds=embeddings)[0]


def expected(mask):
    return whole.model(ids, attention_mask=mask)[0][:, tokens]


for mask in masks[1], masks[1], masks[0]:
    before, times = built, 0
    if not seen[:, 0, 0].equal(mask):
        seen.copy_(mask[:, None, None])
        times = 1
    real = mask[:, tokens, None]
    same(hidden() * real, expected(mask) * real)
    assert built - before == times

# A backward is of the mask that its forward saw.
weight = split.model.layers[0].self_attn.k_proj.weight
gradients = []
for changed in masks[0], masks[1]:
    seen.copy_(masks[0][:, None, None])
    output = hidden()
    seen.copy_(changed[:, None, None])
    gradients += torch.autograd.grad(output.square().sum(), weight)
assert gradients[0].equal(gradients[1])

# Two forwards, then their backwards.
for recompute in False, True:
    if recompute:
        split.gradient_checkpointing_enable({"use_reentrant": False})
    split.zero_grad()
    whole.zero_grad()
    mask = masks[0].clone()
    losses = []
    split.order(12)
    before = built
    for values in masks:
        mask = values.clone() if recompute else mask.copy_(values)
        losses.append(logits_of(split, mask).square().mean())
    assert built - before == 2
    for loss in losses:
        loss.backward()
    # Layers that are recomputed ask again: one for all of them.
    assert built - before == (4 if recompute else 2), built - before
    sum_gradients(split.parameters(), mesh)
    for values in masks:
        logits_of(whole, values).square().mean().backward()
    for ours, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        same(ours.grad, theirs.grad)
print(f"counted (rank={dist.get_rank()})", flush=True)
dist.destroy_process_group()
