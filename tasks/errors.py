"""How far is too far: as far as the reference itself is off, times a few.

The reference's own error is its difference from the same model in the next wider dtype
(`wider.py`). A parallel run adds the same products in another order. It rounds as often, so it is
about as far off; which of the two is nearer is chance. Chance averages out in a root mean square
(rms) over many values, less in one over few, and least in a largest value. So four norms of the
error are compared, and each may be a few times the reference's:

    rms      over a whole tensor, or this rank's slice of it
    row      rms over the last dim: of a token, an output unit, a word of the vocabulary
    column   rms over all other dims: of an input unit, a number in all tokens' hidden states
    max      the largest value

The parts are there for what the whole hides: a head or a token whose values are small, and wrong.

Where the reference happens to be nearly right, it is off by less than it may be. So its error
counts as no less than is usual, relative to the values' norm: as in the worst tensor of the check
(the same weight in all layers, on all ranks); of rows and columns, what one of a hundred exceeds.
It also counts as no less than one rounding; and the largest error as no less than is to be expected
where the worst row and the worst column meet.
"""

from dataclasses import dataclass

import torch

# How many times the reference's error is too far. figures/tolerance.py measures how far right runs
# come: most to about 1, and none to half of these.
LIMITS = {"rms": 8.0, "row": 12.0, "column": 12.0, "max": 12.0}
FEW = 8  # values; a mean square over fewer says nothing that the largest value does not
CHUNK = 2**22


@dataclass
class Errors:
    """Norms of one tensor, each of three: the run's error, the reference's error, the values.

    norms: {"rms": (3, 1), "row": (3, rows), "column": (3, columns), "max": (3, 1)}, float64.
    mean: of the run's error.
    """

    norms: dict
    mean: float


def measure(actual, reference, exact, own=0.0):
    """The `Errors` of tensors of one shape. own: what the reference's error is at least.

    In pieces of some rows, since the tensors may be most of the memory.
    """
    width = actual.shape[-1] if actual.dim() else 1
    tensors = [tensor.detach().reshape(-1, width) for tensor in (actual, reference, exact)]
    step, rows, columns, largest, total = max(1, CHUNK // width), [], 0, 0, 0.0
    for pieces in zip(*(tensor.split(step) for tensor in tensors), strict=True):
        a, r, x = (piece.double() for piece in pieces)
        three = torch.stack([a - x, r - x, x])
        total += three[0].abs().sum().item()
        largest = torch.stack([three.abs().amax((1, 2)), three.new_zeros(3) + largest]).amax(0)
        squares = three.square_()
        rows.append(squares.mean(2))
        columns = columns + squares.sum(1)
    rows = torch.cat(rows, dim=1)
    count = rows.shape[1]
    norms = {"rms": rows.mean(1, keepdim=True).sqrt(), "max": largest[:, None]}
    columns = columns / count
    meet = (rows[1].max() * columns[1].max() / rows[1].mean()).sqrt()
    largest[1] = torch.maximum(largest[1], meet.nan_to_num(0.0))
    if width >= FEW and count > 1:
        norms["row"] = rows.sqrt()
    if count >= FEW and width > 1:
        norms["column"] = columns.sqrt()
    for norm in norms.values():
        norm[1].clamp_(min=own)
    return Errors(norms, total / actual.numel())


def worst_relative(many):
    """{kind: the largest error of a reference, of those of `many`, as a share of its values'}."""
    relative = {
        kind: [(of[kind][1] / of[kind][2]).item() for of in (errors.norms for errors in many)
               if of[kind][2] > 0]
        for kind in ("rms", "max")
    }  # fmt: skip
    return {kind: max(shares, default=0.0) for kind, shares in relative.items()}


def judge(many, dtype, worst):
    """Of each measure of each tensor: (share of the limit, number, kind, part, error, allowed).

    many: the `Errors` of tensors whose usual errors are alike. worst: `worst_relative` of those, on
    all ranks. dtype: the run's. Of rows and columns the nearest to its limit; part is its index.
    """
    unit = torch.finfo(dtype).eps / 2
    for kind, limit in LIMITS.items():
        own = [(number, errors.norms[kind]) for number, errors in enumerate(many)
               if kind in errors.norms]  # fmt: skip
        if not own:
            continue
        usual = worst.get(kind)
        if usual is None:
            norms = torch.cat([norm for _, norm in own], dim=1)
            relative = (norms[1] / norms[2])[norms[2] > 0].sort().values
            usual = relative[int(0.99 * (len(relative) - 1))].item() if len(relative) else 0.0
        for number, (error, reference, size) in own:
            scale = torch.maximum(reference, max(usual, unit) * size)
            scale += torch.finfo(dtype).tiny  # what is smaller may have been rounded to zero
            share = error / (limit * scale)
            share = share.nan_to_num(torch.inf)  # NaN must not pass
            part = share.argmax().item()
            allowed = (limit * scale)[part].item()
            yield share[part].item(), number, kind, part, error[part].item(), allowed
