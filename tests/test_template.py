"""Part 1's template, its arithmetic written out in plain PyTorch, beside its own assertion.

Nothing of the project computes here but the block that is split. What figures/tasks.md says of it
is what this finds.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig

import launch
from tp_mlp import Block

PAGE = (launch.ROOT / "figures" / "tasks.md").read_text()
SAID = re.search(
    r"on 2 ranks (\d+) and on 4 ranks (\d+) of 4,096\s+elements .* up to (\S+) off", PAGE, re.S
)


def unsplit(block, x):
    x = x.clone().requires_grad_()
    y = block(x)
    y.sum().backward()
    return y.detach(), x.grad


def by_ranks(block, x, ranks):
    """Every rank's part of the output and of the gradient, one after the other, and their sums."""
    gates = block.mlp.gate_proj.weight.chunk(ranks, 0)
    ups = block.mlp.up_proj.weight.chunk(ranks, 0)
    downs = block.mlp.down_proj.weight.chunk(ranks, 1)
    x = x.clone().requires_grad_()
    h = block.norm(x)
    y = dh = 0
    for gate, up, down in zip(gates, ups, downs, strict=True):
        copy = h.detach().requires_grad_()
        part = F.linear(F.silu(F.linear(copy, gate)) * F.linear(copy, up), down)
        part.sum().backward()
        y = y + part.detach()
        dh = dh + copy.grad
    h.backward(dh)
    return y, x.grad


def misses(block, x):
    """Tell whether, on 4 ranks, an element of the input gradient misses the assertion."""
    return not torch.allclose(by_ranks(block, x, 4)[1], unsplit(block, x)[1], atol=1e-6)


@pytest.mark.stress
def test_template_misses_its_own_assertion():
    """In float32, by rounding, in an element or so of the input gradient; never in float64."""
    torch.manual_seed(1337)
    config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=1)
    block = Block(config).requires_grad_(False)
    x = torch.randn(1, 4096)
    missed, furthest = [], 0.0
    for ranks in (2, 4):
        y, dx = by_ranks(block, x, ranks)
        expected_y, expected_dx = unsplit(block, x)
        assert torch.allclose(y, expected_y, atol=1e-6)
        missed.append((~torch.isclose(dx, expected_dx, atol=1e-6)).sum().item())
        furthest = max(furthest, (dx - expected_dx).abs().max().item())
    on_2, on_4, said = (float(number) for number in SAID.groups())
    # Which elements miss it depends on the machine's kernels; of some input one does everywhere.
    assert missed == pytest.approx([on_2, on_4], abs=4), missed
    others = (torch.randn(1, 4096) for _ in range(30))
    assert sum(missed) > 0 or any(misses(block, other) for other in others)
    assert said / 3 < furthest < 3 * said
    block, x = block.double(), x.double()
    for ours, expected in zip(by_ranks(block, x, 4), unsplit(block, x), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)
