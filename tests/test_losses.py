"""Every loss of the project beside PyTorch's `F.cross_entropy`: itself and its gradient.

All checks of the scripts have such a loss on both sides, so that they cannot tell a mistake in it.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tp_llama
from memory.tiled_loss import TiledLoss
from utils.losses import cross_entropy, token_losses
from utils.partition import shard_range
from utils.sequence import sum_of_losses

TOKENS, IGNORED = 24, 5
VOCABULARIES = 53, 1531
# What is added to all logits, and what they are multiplied by.
LOGITS = [(offset, scale) for offset in (0, 20, 1000, 1e4) for scale in (1, 30, 1000)]


def make(vocabulary, offset, scale, dtype=torch.float32):
    """Logits (T, V) and targets (T,), some of which are the largest logits', some ignored."""
    torch.manual_seed(1)
    logits = (torch.randn(TOKENS, vocabulary) * scale + offset).to(dtype)
    targets = torch.randint(vocabulary, (TOKENS,))
    targets[::2] = logits[::2].argmax(-1)
    targets[:IGNORED] = -100
    return logits, targets


def of_pytorch(logits, targets):
    """Losses (T,) and the gradient of their sum, in float64."""
    logits = logits.clone().double().requires_grad_()
    losses = F.cross_entropy(logits, targets, reduction="none")
    losses.sum().backward()
    return losses.detach(), logits.grad


def alone(loss, logits, targets):
    """Losses, or their sum, and the gradient of it."""
    logits = logits.clone().requires_grad_()
    losses = loss(logits, targets)
    losses.sum().backward()
    return losses.detach(), logits.grad


def next_tokens(logits, targets):
    """`token_losses`, whose labels are shifted; the last token has none."""
    logits = torch.cat([logits, logits[-1:]])[None]
    return token_losses(logits, F.pad(targets, (1, 0), value=-100)[None])[0]


def tiled(logits, targets):
    """`TiledLoss`, by a head whose weight is the logits, of hidden states that are one-hot."""
    norm = nn.Identity()
    norm.weight = torch.ones(1)
    hidden = torch.eye(TOKENS, dtype=logits.dtype).view(1, TOKENS, TOKENS).requires_grad_()
    return TiledLoss.apply(hidden, targets[None], norm, 7, True, norm.weight, logits.T)


def split(ranks, logits, targets):
    """Task 2's, by threads: each has its share of the words. Their gradients, side by side."""
    barrier, sent = threading.Barrier(ranks, timeout=30), [None] * ranks

    def run(rank):
        def all_gather(x, group):
            sent[rank] = x
            barrier.wait()
            return torch.stack(sent)

        first, stop = shard_range(logits.shape[1], ranks, rank)
        mine = logits[:, first:stop].clone().requires_grad_()
        losses = tp_llama.VocabParallelCrossEntropy.apply(mine, targets, (first, stop), all_gather)
        losses = losses.masked_fill(targets == -100, 0)
        losses.sum().backward()
        return losses.detach(), mine.grad

    with ThreadPoolExecutor(ranks) as pool:
        losses, gradients = zip(*pool.map(run, range(ranks)), strict=True)
    for of_one in losses:  # the same bits, on all ranks
        torch.testing.assert_close(of_one, losses[0], rtol=0, atol=0, equal_nan=True)
    return losses[0], torch.cat(gradients, -1)


@pytest.fixture(autouse=True)
def by_threads(monkeypatch):
    """A "group" here is its own all-gather."""
    monkeypatch.setattr(tp_llama, "all_gather", lambda x, group: group(x, group))


EACH = partial(alone, cross_entropy), partial(alone, next_tokens), *(
    partial(split, ranks) for ranks in (1, 2, 3)
)  # fmt: skip
SUMS = partial(alone, sum_of_losses), partial(alone, tiled)


def off(found, exact):
    """Differences of the losses and of the gradients, of the largest of each."""
    return [
        ((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item()
        for a, b in zip(found, exact, strict=True)
    ]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(("offset", "scale"), LOGITS)
def test_as_pytorch(vocabulary, offset, scale):
    """Whatever the logits' size, to float32's last digits; ignored targets have no gradient."""
    logits, targets = make(vocabulary, offset, scale)
    losses, gradient = of_pytorch(logits, targets)
    for loss in EACH:
        assert max(off(loss(logits, targets), (losses, gradient))) < 5e-7, loss
    for loss in SUMS:
        assert max(off(loss(logits, targets), (losses.sum(), gradient))) < 5e-7, loss


def test_it_can_fail():
    """By the log-sum-exp, rounded to the largest logit's size, gradients are 1e-6 to 5e-4 off."""

    def rounded(logits, targets):
        chosen = logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
        return (logits.logsumexp(-1) - chosen).masked_fill(targets == -100, 0)

    for offset, scale in LOGITS:
        if scale == 30 or offset >= 1000 > scale:
            logits, targets = make(VOCABULARIES[1], offset, scale)
            found = off(alone(rounded, logits, targets), of_pytorch(logits, targets))
            assert max(found) > 5e-7, (offset, scale, found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    """Half precision: the loss in float32, the gradient rounded once. float64: all of it."""
    logits, targets = make(VOCABULARIES[1], 20, 30, dtype)
    losses, gradient = of_pytorch(logits, targets)
    bounds = {torch.bfloat16: (5e-7, 2**-9), torch.float64: (1e-14, 1e-14)}[dtype]
    for loss in EACH + SUMS:
        of_losses, of_gradient = found = loss(logits, targets)
        assert of_losses.dtype == torch.promote_types(dtype, torch.float32)
        assert of_gradient.dtype == dtype
        exact = (losses if of_losses.dim() else losses.sum()), gradient
        assert all(a <= b for a, b in zip(off(found, exact), bounds, strict=True)), (loss, found)


def test_no_tokens():
    """A batch or a rank's share may be empty: no losses, as PyTorch has it, whose sum is 0."""
    logits, targets = make(VOCABULARIES[0], 0, 1)
    logits, targets = logits[:0], targets[:0]
    losses, gradient = of_pytorch(logits, targets)
    for loss in EACH:
        if loss.args != (next_tokens,):  # which needs one more
            found = loss(logits, targets)
            assert found[0].shape == losses.shape and found[1].shape == gradient.shape, loss
    assert alone(sum_of_losses, logits, targets)[0] == 0


def test_words_that_are_ruled_out():
    """Logits of minus infinity, of some words, of all of a rank's, or of all there are."""
    logits, targets = make(VOCABULARIES[0], 0, 1)
    logits[:, 3] = -torch.inf
    logits[::2, :20] = logits[1::2, 40:] = -torch.inf  # all of the first or the last of 3 ranks'
    targets[IGNORED:] = 30
    losses, gradient = of_pytorch(logits, targets)
    for loss in EACH:
        found = loss(logits, targets)
        assert max(off(found, (losses, gradient))) < 5e-7, loss
        assert loss(logits * 0 - torch.inf, targets)[0][IGNORED:].isnan().all()  # as PyTorch's
