"""Another computer's rounding, on this one: linear layers add their products in another order.

    torchrun --nproc_per_node 2 -m figures.bench.rounding SEED tasks/tp_mlp.py --device cpu

A GPU has a kernel for each shape, and each adds in an order of its own. So a shard's sums are
rounded otherwise than the full layer's, also where it adds the same products. On a CPU they often
get the same bits, which hides what a tolerance does to other roundings. Here each shape of a weight
has a random order of its own, forward and backward.
"""

import random
import runpy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

plain_linear = F.linear


def reorder_sums(seed):
    """From now on `F.linear`, and with it `nn.Linear`, adds in the orders that belong to a seed."""

    def linear(x, weight, bias=None):
        tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
        ordinary = all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors)
        if not ordinary or x.shape[-1] != weight.shape[-1]:  # a DTensor; or an error to be
            return plain_linear(x, weight, bias)
        return Linear.apply(x, weight, bias, seed)

    F.linear = linear


def order(number, weight, seed):
    """A permutation of a number of terms: another one for each shape of the weight."""
    chance = random.Random(f"{seed}: {number} of {tuple(weight.shape)}")
    generator = torch.Generator().manual_seed(chance.getrandbits(63))
    return torch.randperm(number, generator=generator).to(weight.device)


class Linear(torch.autograd.Function):
    """y = x @ weight.T + bias; each sum in another order."""

    @staticmethod
    def forward(ctx, x, weight, bias, seed):
        ctx.save_for_backward(x, weight)
        ctx.seed = seed
        units = order(x.shape[-1], weight, seed)
        return plain_linear(x[..., units], weight[:, units], bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        x_grad = weight_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            units = order(len(weight), weight, ctx.seed)
            x_grad = grad[..., units] @ weight[units]
        grad, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        tokens = order(len(grad), weight, ctx.seed)
        if ctx.needs_input_grad[1]:
            weight_grad = grad[tokens].mT @ x[tokens]
        if ctx.needs_input_grad[2]:
            bias_grad = grad[tokens].sum(0)
        return x_grad, weight_grad, bias_grad, None


def main():
    """Run a script as `python SCRIPT ...` would, with sums in another order."""
    seed, script, *flags = sys.argv[1:]
    reorder_sums(int(seed))
    sys.argv = [script, *flags]
    # In the place of tasks/, of which the script may be in a copy.
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
