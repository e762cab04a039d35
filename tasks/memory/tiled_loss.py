"""The loss, a few tokens at a time: the logits of all tokens are never there at once.

Logits are V numbers a token, and Hugging Face's loss holds them three times (themselves, their
log-softmax, its gradient), where a hidden state takes H. Source: ALST, arXiv 2506.13996, section 3.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


class TiledLoss(torch.autograd.Function):
    """Final norm, LM head, cross-entropy and their gradient, a few tokens at a time.

    A tile's logits become their gradient in place, so that one tensor of `tile` tokens times the
    vocabulary is all there ever is (in half types a copy in float32, too). What is kept for the
    backward are the gradients of x and of the weights of norm and head, if those are trained.
    """

    @staticmethod
    def forward(ctx, x, targets, norm, tile, trains, norm_weight, head_weight):
        """x (B, S, H), targets (B, S) -> the sum of losses, in float32 at least.

        trains: whether gradients are enabled where this is called. (Inside they never are.)
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        dx = torch.empty_like(x) if trains else None
        loss = torch.zeros((), dtype=wide, device=x.device)
        # (`needs_input_grad` does not know of torch.no_grad.)
        train_norm, train_head = (trains and needed for needed in ctx.needs_input_grad[5:])
        dnorm = torch.zeros_like(norm_weight, dtype=wide) if train_norm else None
        dhead = torch.zeros_like(head_weight, dtype=wide) if train_head else None
        flat, targets = x.flatten(0, 1), targets.flatten()
        for rows in tiles(len(flat), tile):
            with torch.set_grad_enabled(trains):
                h = flat[rows].detach().requires_grad_(trains)
                normed = norm(h)
            n, valid = normed.detach(), (targets[rows] != -100).to(wide)[:, None]
            target = targets[rows].masked_fill(valid[:, 0] == 0, 0)[:, None]
            logits = F.linear(n, head_weight).to(wide)
            chosen, largest = logits.gather(1, target), logits.amax(1, keepdim=True)
            total = logits.sub_(largest).exp_().sum(1, keepdim=True)
            loss += (valid * (total.log() - (chosen - largest))).sum()
            if not trains:
                continue
            logits.mul_(valid / total).scatter_add_(1, target, -valid)  # d loss / d logits
            dlogits = logits.to(x.dtype)
            if train_head:
                dhead += dlogits.T @ n
            wanted = [h, norm.weight] if train_norm else [h]
            dh, *more = torch.autograd.grad(normed, wanted, dlogits @ head_weight)
            dx.view_as(flat)[rows] = dh
            if more:
                dnorm += more[0]
            del logits, dlogits, dh  # before the next are made
        ctx.gradients = dx, dnorm, dhead
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        dx, dnorm, dhead = (g if g is None else g.mul_(grad) for g in ctx.gradients)
        ctx.gradients = None  # a second backward is an error
        return dx, None, None, None, None, dnorm, dhead


def tiles(length, size):
    """Return slices of `size` that cover [0, length)."""
    return [slice(first, min(first + size, length)) for first in range(0, length, size)]
