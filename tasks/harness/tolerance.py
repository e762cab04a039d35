"""How far is too far: as far as the reference itself is off, times a few.

The reference's own error is its difference from the same model in the next wider dtype
(`wider.py`). A parallel run adds the same products in another order. It rounds as often, so it is
about as far off; which of the two is nearer is chance. Chance averages out in a root mean square
(rms) over many values, less in one over few, and least in a largest value. So several measures of
the error are compared, and each may be a few times the reference's:

    rms      over a whole tensor, or this rank's slice of it
    row      rms over the last dim: of a token, an output unit, a word of the vocabulary
    column   rms over all other dims: of an input unit, a number in all tokens' hidden states
    max      the largest value
    scale    s - 1, where s times the exact values is nearest to what was computed; of the whole,
    (row scale, column scale)    each row and each column

The parts are there for what the whole hides: a head or a token whose values are small, and wrong.
The scale is there for bfloat16. Errors of single values, of 5 % there, average out in it; what is
left out, or counted twice, does not.

Where the reference happens to be nearly right, it is off by less than it may be. So its error
counts as no less than is usual, relative to the values' norm: as in the worst tensor of the check
(the same weight in all layers, on all ranks); of rows and columns, what one of a hundred exceeds.
It also counts as no less than one rounding; the largest error as no less than is to be expected
where the worst row and the worst column meet; and the scale's as no less than independent errors of
n values give, 1 / sqrt(n) of their rms, or a 24th, for errors are not quite independent. A row
or column whose values are smaller than the reference's error has no scale: there it may be as far
off as the rms. A tensor that should be zero has no parts and no scale. Such is the gradient of the
queries where each token sees only itself. Its rms and its largest value are held against the
largest of such tensors in the check.

A gradient from few tokens needs more care. A weight's gradient is a sum over the tokens t of
d_t x_t^T, where x_t is the layer's input and d_t the gradient of its output. The error of a row i
is the sum of (error of d_t[i]) x_t: as many roundings as there are tokens, however long the row is.
The d_t[i] is a sum itself, and its rounding is as large as the sum's terms, so it is alike for
all i; but the sum may be next to nothing. Among thousands of rows of one token's gradient there is
one where that is so, and where the reference happens to have rounded right: both of its measures
are far too small. (Columns: the same, with d and x exchanged.)

So rows that have few independent roundings are measured together with their neighbours: so many
that they have MANY between them, as a head has. How many independent roundings a row has is seen in
the reference's errors: where they come from one token, those of all rows have one direction. Nobody
has to say how many tokens there were; and what counts is how many of them had a part in the errors.
With one token, 64 rows are measured as one; with 64 tokens, each by itself.

The rows of one head may have fewer roundings between them than that. The gradient of a query is a
sum over the keys, each times one number, which is off by chance. Where all keys are alike, as in a
text that repeats one word, the error of a head is one rounding, along the head's values. So where a
scale explains a quarter of the neighbours' squared error, more of them are measured together.
(The usual error still comes from the smaller groups: larger would tighten other tensors' limits.)

A run's scale is not judged where there are few roundings, as they do not average out: the gradient
of the queries of two tokens is made of one number a head. (The reference's is: as an error that is
usual in the check.) Nor is it of a matrix of one row or column, such as LoRA's of rank 1, which
cannot show how many there were.

Some kernels add more carefully than others. A CPU's library adds the products of up to three rows
one after the other, and of four rows in blocks: of 32,000 random products that is off by 4.6e-6 and
by 4.3e-7 of the sum. A rank of few tokens has the first, where the reference has the second. If the
tokens are one and the same, all have the same error, which no sum over them averages out. So the
reference's error counts as no less than an eighth of what the longest sum makes of random
roundings, each as likely up as down. (Not of the scale: there they average out.)
"""

import math
from dataclasses import dataclass
from itertools import product

import torch

# How many times the reference's error is too far. figures/bench/tolerance.py measures how far right
# runs come: most to about 1, and none to three quarters of these.
LIMITS = {"rms": 8.0, "row": 16.0, "column": 16.0, "max": 16.0}
LIMITS |= {"scale": 16.0, "row scale": 32.0, "column scale": 32.0}
WHOLE = "rms", "max", "scale"  # one number a tensor
APART, OF_ROUNDING = ("rms", "max"), " of rounding"  # of what should be zero, all that is measured
FEW = 8  # values; a mean square over fewer says nothing that the largest value does not
FEW_ROUNDINGS = 12  # independent ones: below this, rows or columns are measured together
MANY = 64  # independent roundings that such a group should have: their sizes may differ much
SHARED = 1 / 4  # of neighbours' squared error: what one number for all of them may explain
SOME = 32  # rows or columns that tell how many independent roundings one has
# Values taken at a time: on a CPU so few that they stay in its cache, for touching new memory takes
# ten times as long as these sums; on a GPU so many that it has something to do.
CHUNK = {"cpu": 2**16, "cuda": 2**22}


@dataclass
class Errors:
    """Measures of one tensor, each of three: the run's error, the reference's error, the values.

    norms: {"rms": (3, 1), "row": (3, rows), "column": (3, columns), ...}, float64. The scale is a
    share already: its values count as 1. mean: of the run's error. own_error: the reference's
    largest.
    together: {"row": how many neighbouring rows are measured as one, "column": ...}, if they are.
    fewer: norms of fewer neighbours, where more are measured together because they share roundings.
    """

    norms: dict
    mean: float
    own_error: float
    together: dict
    fewer: dict
    single: bool  # a matrix of one row or column


def measure(actual, reference, exact, own_error=0.0):
    """The `Errors` of tensors of one shape. own_error: what the reference's error is at least.

    In pieces of some rows: the tensors may be most of the memory.
    """
    width = actual.shape[-1] if actual.dim() else 1
    tensors = [tensor.detach().reshape(-1, width) for tensor in (actual, reference, exact)]
    step, rows = max(1, CHUNK[actual.device.type] // width), []
    columns = total = largest = actual.new_zeros((), dtype=torch.float64)
    for pieces in zip(*(tensor.split(step) for tensor in tensors), strict=True):
        three = torch.stack([piece.double() for piece in pieces])  # the errors, and the values
        three[:2] -= three[2]
        sizes = three.abs()
        total = total + sizes[0].sum()
        largest = torch.maximum(largest, sizes.amax((1, 2)))  # a NaN stays
        # Squares, and products with the values, which the scale is made of.
        five = torch.cat([three.square(), three[:2] * three[2]])
        rows.append(five.mean(2))
        columns = columns + five.sum(1)
    # From here on it is little, and on the CPU: a GPU that others use, too, lets each value that is
    # read wait for its turn.
    rows, columns = torch.cat(rows, dim=1).cpu(), columns.cpu()
    total, largest = total.cpu(), largest.cpu()
    count = rows.shape[1]
    columns = columns / count
    whole = rows.mean(1, keepdim=True)
    norms, own_largest = {"rms": whole[:3].sqrt(), "max": largest[:, None]}, largest[1].item()
    meet = (rows[1].max() * columns[1].max() / whole[1, 0]).sqrt()
    largest[1] = torch.maximum(largest[1], meet.nan_to_num(0.0))
    together, fewer = {}, {}
    for kind, means, dim, length in (("row", rows, 0, width), ("column", columns, 1, count)):
        if length < FEW:
            continue
        number = independent_roundings(*tensors[1:], dim, worst_parts(means))
        if number < min(FEW_ROUNDINGS, length / 2):  # fewer than a row of so many values can have
            together[kind] = 2 ** round(math.log2(MANY / number))  # a head's first row begins one
            neighbours = mean_of_neighbours(means, together[kind])
            shared = share_of_scales(neighbours)
            if shared > SHARED:
                fewer[kind] = neighbours[:3].sqrt()
                together[kind] *= 2 ** round(math.log2(FEW_ROUNDINGS * shared))
                neighbours = mean_of_neighbours(means, together[kind])
            means = neighbours
        if means.shape[1] > 1:
            norms[kind] = means[:3].sqrt()
            if kind not in together:  # of few roundings errors do not average out
                norms[f"{kind} scale"] = scales(means, length)
    if count * width >= FEW:
        norms["scale"] = scales(whole, count * width, part=False)
    for kind, norm in (*norms.items(), *fewer.items()):
        if "scale" not in kind:
            norm[1].clamp_(min=own_error)
    single = actual.dim() > 1 and min(count, width) == 1
    return Errors(norms, total.item() / actual.numel(), own_largest, together, fewer, single)


def worst_parts(means):
    """Of which rows, or columns, the reference is furthest off for their values: some indices."""
    relative = (means[1] / means[2]).nan_to_num(0.0, 0.0, 0.0)
    return relative.topk(min(SOME, len(relative))).indices


def independent_roundings(reference, exact, dim, parts):
    """How many independent roundings the error of a row has (dim 0), or of a column (dim 1).

    parts: indices of the rows that tell. Two random directions in a space of n dimensions have in
    the mean a squared cosine of 1/n. Those of n tokens' errors are in such a space.
    """
    parts = parts.to(reference.device)
    errors = reference.index_select(dim, parts).double() - exact.index_select(dim, parts).double()
    errors = errors.movedim(dim, 0).cpu()
    lengths = errors.norm(dim=1, keepdim=True)
    errors = (errors / lengths)[lengths[:, 0] > 0]
    pairs = len(errors) * (len(errors) - 1)
    squares = (errors @ errors.mT).square().sum().item() - len(errors)  # not each with itself
    return pairs / squares if pairs and squares > 0 else math.inf


def mean_of_neighbours(means, number):
    """(5, n) -> (5, n // number), at least one: means of so many; the last takes what is left."""
    groups = max(1, means.shape[1] // number)
    last = (groups - 1) * number
    others = means[:, :last].unflatten(1, (groups - 1, number)).mean(2)
    return torch.cat([others, means[:, last:].mean(1, keepdim=True)], dim=1)


def share_of_scales(means):
    """How much of the reference's squared error a scale of each part explains, in the mean.

    means: (5, n), of n parts of a tensor. The whole tensor's scale is taken out before: all parts
    share that one.
    """
    _, error, values, _, product = means
    whole = product.sum() / values.sum()
    error = error - 2 * whole * product + whole.square() * values
    explained = (product - whole * values).square() / (error * values)
    return explained.nan_to_num(0.0, 0.0, 0.0).mean().item()


def scales(means, number, part=True):
    """(3, n) as in `Errors`, of n parts of `number` values, from their mean products, (5, n).

    part: of a tensor, and not all of it.
    """
    ours, its = (means[3:] / means[2]).abs().nan_to_num(0.0)
    rms = (means[1] / means[2]).sqrt().nan_to_num(0.0)
    floor = torch.where((rms > 1) & part, rms, rms * max(number**-0.5, 1 / 24))
    return torch.stack([ours, torch.maximum(its, floor), torch.ones_like(its)])


def worst_relative(many):
    """{kind: the largest error of a reference, of those of `many`, as a share of its values'}.

    Of what should be zero, and is rounding, the error is many times the values: such tensors are
    apart, for they would allow the others everything: {"rms of rounding": the largest error itself,
    "max of rounding": the same, "values of rounding": the rms of the values of the largest one}.
    """
    worst = {kind: 0.0 for kind in (*WHOLE, *(kind + OF_ROUNDING for kind in (*APART, "values")))}
    for errors in many:
        if is_rounding(errors):
            found = {kind + OF_ROUNDING: errors.norms[kind][1] for kind in APART}
            found["values" + OF_ROUNDING] = errors.norms["rms"][2]
        else:
            found = {kind: errors.norms[kind] for kind in errors.norms.keys() & set(WHOLE)}
            found = {kind: norm[1] / norm[2] for kind, norm in found.items() if norm[2] > 0}
        for kind, value in found.items():
            worst[kind] = max(worst[kind], value.item())
    return worst


def is_rounding(errors):
    """Whether the reference is a hundred times as far off as the values are large."""
    _, reference, size = errors.norms["rms"]
    return (reference > 100 * size).item()


def judge(many, dtype, worst, longest_sum=1):
    """Of each measure of each tensor: (share of the limit, number, kind, part, error, allowed).

    many: the `Errors` of tensors whose usual errors are alike. worst: `worst_relative` of those, on
    all ranks. dtype: the run's. longest_sum: how many products a value of the model is a sum of at
    most. Of rows and columns the nearest to its limit; part is its index.
    """
    unit = torch.finfo(dtype).eps / 2
    # Half precision is added in float32, too.
    of_sum = max(unit, math.sqrt(longest_sum) / 8 * torch.finfo(torch.float32).eps / 2)
    # What is as small as rounding elsewhere is rounding, too, and happens to be zero here.
    small = worst["values" + OF_ROUNDING]
    apart = [is_rounding(e) or 0 < e.norms["rms"][2] <= small for e in many]
    for (kind, limit), rounding in product(LIMITS.items(), (False, True)):
        own = [
            (number, errors.norms[kind])
            for number, errors in enumerate(many)
            if kind in errors.norms
            and apart[number] == rounding
            and not (kind == "scale" and (errors.together or errors.single))
        ]
        if not own or (rounding and kind not in APART):
            continue
        usual = worst.get(kind)
        if usual is None:
            others = [errors for errors, is_apart in zip(many, apart, strict=True) if not is_apart]
            norms = [errors.fewer.get(kind, errors.norms.get(kind)) for errors in others]
            norms = torch.cat([norm for norm in norms if norm is not None], dim=1)
            relative = (norms[1] / norms[2])[norms[2] > 0].sort().values
            usual = relative[int(0.99 * (len(relative) - 1))].item() if len(relative) else 0.0
        for number, (error, reference, size) in own:
            least = max(usual, unit if kind == "scale" else of_sum) * size
            if rounding:  # one number a head, of queries and keys of one token: double, for chance
                least = torch.full_like(size, 2 * worst[kind + OF_ROUNDING])
            scale = torch.maximum(reference, least)
            scale += torch.finfo(dtype).tiny  # what is smaller may have been rounded to zero
            share = error / (limit * scale)
            # NaN must not pass, and nothing can be held against a reference that is not finite.
            share = share.masked_fill(~scale.isfinite(), torch.inf).nan_to_num(torch.inf)
            part = share.argmax().item()
            allowed = (limit * scale)[part].item()
            yield share[part].item(), number, kind, part, error[part].item(), allowed
