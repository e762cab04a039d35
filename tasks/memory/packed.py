"""Attention of packed documents, one at a time: see `utils/kernels.py`."""

from itertools import accumulate

import torch

from utils.kernels import attend, attend_backward


def parts_of(documents):
    """Return, for each document, the index of its part of tensors (B, heads, S, ...). documents:
    (B, S), the number of each token's document.
    """
    parts = []
    for row, of_row in enumerate(documents):
        sizes = of_row.unique_consecutive(return_counts=True)[1].tolist()
        for n, stop in zip(sizes, accumulate(sizes), strict=True):
            parts.append((slice(row, row + 1), slice(None), slice(stop - n, stop)))
    return parts


def attend_parts(parts, q, k, v):
    """Run `attend`, causal, on each document by itself. parts: see `parts_of`."""
    o, rests = torch.empty_like(q), []
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    for part in parts:
        o[part], lse[part], rest = attend(q[part], k[part], v[part])
        rests.append(rest)
    return o, lse, rests


def attend_parts_backward(parts, grad, q, k, v, o, lse, rests):
    """Compute the gradients of q, k, v, from what `attend_parts` took and returned."""
    grads = [torch.empty_like(t) for t in (q, k, v)]
    for part, rest in zip(parts, rests, strict=True):
        pieces = attend_backward(*(t[part] for t in (grad, q, k, v, o, lse)), rest)
        for full, piece in zip(grads, pieces, strict=True):
            full[part] = piece
    return grads
