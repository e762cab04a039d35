"""Cross-entropy of large vocabularies: accurate in float32, and with little memory.

It computes what `F.cross_entropy` does, whose sums over a large vocabulary lose digits on a CPU. Of
tensors over the vocabulary it keeps only the logits. (At its peak there is one more of their shape,
in float32 at least; for half types a gradient, too.) `tp_llama.py` has the same for split logits.

Without any valid label (all are -100, or there is no token) a mean loss is NaN, 0 / 0, and all its
gradients are 0: so it is in `F.cross_entropy` and in transformers, and so it is in every loss here.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


class CrossEntropy(torch.autograd.Function):
    """The loss of every token, (...), from logits (..., V) and targets (...).

    loss = log sum exp(logits - largest) - (target's logit - largest). If the largest logit were not
    subtracted, exponentials would overflow. If it were added to the log again, as in `logsumexp`,
    the result, and the gradient that is made from it, would be rounded to the largest logit's size.
    """

    @staticmethod
    def forward(ctx, logits, targets):
        wide = torch.promote_types(logits.dtype, torch.float32)
        lowest = torch.finfo(wide).min  # finite: -inf minus -inf would be NaN
        largest = logits.amax(-1, keepdim=True).to(wide).clamp(min=lowest)
        log_sum = logits.to(wide, copy=True).sub_(largest).exp_().sum(-1, keepdim=True).log_()
        ctx.save_for_backward(logits, targets, largest, log_sum)
        return (log_sum - (logits.gather(-1, targets[..., None]) - largest))[..., 0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, targets, largest, log_sum = ctx.saved_tensors
        dlogits = logits.to(log_sum.dtype, copy=True).sub_(largest).sub_(log_sum).exp_()  # softmax
        dlogits.scatter_add_(-1, targets[..., None], -torch.ones_like(log_sum))
        return dlogits.mul_(grad[..., None]).to(logits.dtype), None


def cross_entropy(logits, targets, ignore_index=-100):
    """Compute every token's cross-entropy; 0 for targets of ignore_index. (..., V), (...) -> (...).

    In float32 at least. Raises an error for other targets that are outside the vocabulary.
    """
    ignored = targets == ignore_index
    return CrossEntropy.apply(logits, targets.masked_fill(ignored, 0)).masked_fill(ignored, 0)


def token_losses(logits, labels):
    """Compute next-token losses of logits (B, S, V), labels (B, S): (B, S - 1); 0 for -100.

    In float64 by PyTorch's cross-entropy, so that no mistake of ours is in both sides of a check.
    In other dtypes by ours: in float32, over 49,152 logits on a CPU, PyTorch's cross-entropy errs
    by more than the whole model before it, and its error would be in all the reference's gradients.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)  # padded: no copy of the logits is needed
    if logits.dtype != torch.float64:
        return cross_entropy(logits, targets)[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)[:, :-1]


def mean_loss(losses, labels):
    """Return the mean of `token_losses` over all labels that are not -100."""
    return losses.sum() / (labels[:, 1:] != -100).sum()
