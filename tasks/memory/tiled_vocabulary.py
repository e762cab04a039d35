"""Task 2's loss over a split vocabulary, a few tokens at a time: see `VocabParallelHead`.

A hidden state is H numbers a token, logits are V/P on each rank. A step holds them twice:
themselves, and their softmax in float32, which becomes their gradient (in half types also a copy
of that). Source: ALST, arXiv 2506.13996, section 3.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from tp_llama import vocab_parallel_cross_entropy


class TiledVocabParallelLoss(torch.autograd.Function):
    """LM head and sum of the cross-entropies, one tile of tokens after another, with gradients.

                per rank        forward, tile by tile           backward
    x           (T, H)          logits (t, V/P), losses, dx     dx times dy
    weight      (V/P, H)        dweight                         dweight times dy

    Gradients are made in the forward, so that no logits are kept. dweight is added up in float32 at
    least.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, rows, group, ignore_index, tile, train):
        wide = torch.promote_types(x.dtype, torch.float32)
        total = x.new_zeros((), dtype=wide)
        # (`needs_input_grad` does not know of torch.no_grad.)
        train_x, train_weight = (train and needed for needed in ctx.needs_input_grad[:2])
        dx = torch.empty_like(x) if train_x else None
        dweight = torch.zeros_like(weight, dtype=wide) if train_weight else None
        # One weight for all tiles: autocast would keep a half-precision copy of each new one.
        w = weight.detach().requires_grad_() if train_weight else weight.detach()
        for first in range(0, len(x), tile):
            tokens = slice(first, first + tile)
            h = x[tokens].detach()
            if train_x:
                h.requires_grad_()
            with torch.set_grad_enabled(train_x or train_weight):
                logits, of_tile = F.linear(h, w), (targets[tokens], group, ignore_index)
                loss = vocab_parallel_cross_entropy(logits, *of_tile, "sum", rows)
            total += loss.detach()
            wanted = [t for t in (h, w) if t.requires_grad]
            grads = list(torch.autograd.grad(loss, wanted)) if wanted else []
            if train_weight:
                dweight += grads.pop()
            if train_x:
                dx[tokens] = grads.pop()
            del logits, loss, grads  # before the next tile's
        ctx.save_for_backward(dx, dweight, (targets == ignore_index).all())
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        dx, dweight, no_label = ctx.saved_tensors
        grad = grad.masked_fill(no_label, 0)  # a mean over no label divides by 0
        dx = dx if dx is None else dx * grad
        if dweight is not None:
            narrow = torch.empty_like(dweight, dtype=ctx.dtype)
            dweight = torch.mul(dweight, grad, out=narrow)  # no second one in float32
        return dx, dweight, None, None, None, None, None, None
