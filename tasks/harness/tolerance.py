"""How far a run may be off: a few times as far as the reference itself is off.

The reference's own error is its difference from the same model in the next wider dtype
(`wider.py`). A parallel run adds the same products in another order. It rounds as often, so it is
about as far off; which of the two is nearer is chance. Chance averages out in a root mean square
(rms) over many values, less in one over few, and least in a largest value. Hence these rules.

1. Several measures of the error are compared. Each may be a few times the reference's: see LIMITS.

    rms      over a full tensor, or this rank's slice of it
    row      rms over the last dim: of a token, an output unit, a word of the vocabulary
    column   rms over all other dims: of an input unit, one hidden dim over all tokens
    max      the largest value
    scale    |s - 1|, where s is the factor by which the exact values come nearest to the run's
    row scale, column scale     the same, of each row and of each column

Rows and columns are there for what the rms hides: a head or a token whose values are small, and
wrong. The scale is there for bfloat16: single values are off by 5 %, and such errors average out in
the scale, but what is left out, or counted twice, does not.

2. The reference's error counts as no less than each of these, since by chance it may be small:

    * the usual error, relative to the values' norm. For a full tensor: that of the worst tensor
      in the check (the same weight in all layers, on all ranks). For rows and columns: the 99th
      percentile.
    * one rounding
    * for the largest error: what is to be expected where the worst row and the worst column meet
    * for a scale: what independent errors of n values give, 1 / sqrt(n) of their rms, and no less
      than a 24th of it, for errors are not quite independent
    * an eighth of the error that random roundings, up or down alike, cause in the longest sum (not
      for a full tensor's scale, in which roundings average out)

The last is there because some kernels add more carefully than others. A CPU's library adds the
products of up to three rows one after the other, and of four rows in blocks: a sum of 32,000 random
products is off by 4.6e-6 of itself in the first way, by 4.3e-7 in the second. A rank of few tokens
adds in the first way, the reference in the second. If all tokens are the same, all have the same
error, which no sum over them averages out.

3. Where the values of a row or column are smaller than the reference's error, a scale says nothing:
there the error of the reference's scale counts as no less than the reference's relative rms error.

4. Of a tensor that should be zero, no rows, columns or scale are judged. (The gradient of the
queries is one, where each token sees only itself.) Its rms and its largest value are compared with
those of the largest such tensor in the check.

5. Rows with few independent roundings are measured together with their neighbours: so many rows
that they have MANY roundings between them, as a head's 64 rows do for one token. (Columns: alike.)

A weight's gradient is a sum over the tokens t of d_t x_t^T, where x_t is the layer's input and d_t
the gradient of its output. The error of row i is the sum of (error of d_t[i]) x_t: as many
roundings as there are tokens, however long the row is. The d_t[i] is a sum itself. Its rounding
goes by the size of the sum's terms, so it is about the same for all i, while the sum may be next to
nothing. Among thousands of rows of one token's gradient there is one where the sum is next to
nothing, and where the reference happens to have rounded right: then the reference's error and the
values are both far too small to measure by. (For columns d and x change places.)

How many independent roundings a row has is seen in the reference's errors: where they come from one
token, those of all rows have one direction. So nobody has to say how many tokens there were, and
only tokens that had a part in the errors count. With one token, 64 rows are measured as one; with
64 tokens, each row by itself.

6. Where a group's own scale explains, on average, more than a quarter of its squared error, larger
groups are made: the rows of one head may have fewer roundings than rule 5 expects. The gradient of
a query is a sum over the keys, each times one number, which is off by chance. Where all keys are
alike, as in a text that repeats one word, the error of a head is one number times the head's
values. (The usual error of rule 2 still comes from the smaller groups: larger ones would tighten
other tensors' limits.)

7. A run's scale is not judged where there are few roundings, as they do not average out: with two
tokens, the gradient of the queries is made of one number for each head. Nor is that of a matrix of
one row or column, such as LoRA's of rank 1, which cannot show how many roundings there were. (The
reference's scale still counts among the usual errors of rule 2.)
"""

import math
from dataclasses import dataclass
from itertools import product

import torch

# How many times the reference's error is allowed. figures/bench/tolerance.py measures how far
# correct runs come: most to about 1, and none to three quarters of these limits.
LIMITS = {"rms": 8.0, "row": 16.0, "column": 16.0, "max": 16.0}
LIMITS |= {"scale": 16.0, "row scale": 32.0, "column scale": 32.0}
WHOLE = "rms", "max", "scale"  # one number a tensor
APART, OF_ROUNDING = ("rms", "max"), " of rounding"  # all that is measured of what should be zero
FEW = 8  # values; a mean square over fewer says nothing that the largest value does not
FEW_ROUNDINGS = 12  # independent ones: below this, rows or columns are measured together
MANY = 64  # independent roundings such a group should have: many, as their sizes may differ much
SHARED = 1 / 4  # the part of neighbours' squared error that one scale for them may explain
SOME = 32  # rows or columns that tell how many independent roundings one has
# Values taken at a time: on a CPU so few that they stay in its cache, for touching new memory takes
# ten times as long as these sums; on a GPU so many that it has something to do.
CHUNK = {"cpu": 2**16, "cuda": 2**22}


@dataclass
class Errors:
    """Measures of three things, for one tensor: the run's error, the reference's error, the values.

    norms: {"rms": (3, 1), "row": (3, rows), "column": (3, columns), ...}, float64. A scale has no
    values to be relative to: 1 stands for them. mean: the run's mean error. reference_error: the
    reference's largest error. together: {"row": how many neighbouring rows are measured as one,
    "column": ...}, if they are. fewer: the norms by the groups of rule 5, where rule 6 has made
    larger groups.
    """

    norms: dict
    mean: float
    reference_error: float
    together: dict
    fewer: dict
    single: bool  # a matrix of one row or column

    @property
    def largest_share(self):
        """The run's largest error, as a share of the largest value; 0 where all is rounding."""
        error, _, size = (norm.item() for norm in self.norms["max"])
        return 0.0 if is_rounding(self) else error / (size or 1.0)


def measure(actual, reference, exact, least_error=0.0):
    """Return the `Errors` of three tensors of one shape.

    least_error: what the reference's error counts as at least. Works in pieces of some rows, since
    the tensors may be most of the memory.
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
    # What is left is little, and goes to the CPU: on a GPU that others use, too, each value that is
    # read would wait for its turn.
    rows, columns = torch.cat(rows, dim=1).cpu(), columns.cpu()
    total, largest = total.cpu(), largest.cpu()
    count = rows.shape[1]
    columns = columns / count
    overall = rows.mean(1, keepdim=True)
    norms, own_largest = {"rms": overall[:3].sqrt(), "max": largest[:, None]}, largest[1].item()
    meet = (rows[1].max() * columns[1].max() / overall[1, 0]).sqrt()
    largest[1] = torch.maximum(largest[1], meet.nan_to_num(0.0))
    together, fewer = {}, {}
    for name, means, dim, length in (("row", rows, 0, width), ("column", columns, 1, count)):
        if length < FEW:
            continue
        number = independent_roundings(*tensors[1:], dim, worst_parts(means))
        if number < min(FEW_ROUNDINGS, length / 2):  # few, though `length` values could have more
            # A power of 2, so that a head's first row begins a group.
            together[name] = 2 ** round(math.log2(MANY / number))
            neighbours = mean_of_neighbours(means, together[name])
            shared = share_of_scales(neighbours)
            if shared > SHARED:
                fewer[name] = neighbours[:3].sqrt()
                together[name] *= 2 ** round(math.log2(FEW_ROUNDINGS * shared))
                neighbours = mean_of_neighbours(means, together[name])
            means = neighbours
        if means.shape[1] > 1:
            norms[name] = means[:3].sqrt()
            if name not in together:  # errors of few roundings do not average out
                norms[f"{name} scale"] = scales(means, length)
    if count * width >= FEW:
        norms["scale"] = scales(overall, count * width, part=False)
    for name, norm in (*norms.items(), *fewer.items()):
        if "scale" not in name:
            norm[1].clamp_(min=least_error)
    single = actual.dim() > 1 and min(count, width) == 1
    return Errors(norms, total.item() / actual.numel(), own_largest, together, fewer, single)


def worst_parts(means):
    """Return indices of the rows, or columns, where the reference is furthest off, relatively."""
    relative = (means[1] / means[2]).nan_to_num(0.0, 0.0, 0.0)
    return relative.topk(min(SOME, len(relative))).indices


def independent_roundings(reference, exact, dim, parts):
    """Return how many independent roundings the error of a row has (dim 0), or of a column (dim 1).

    parts: indices of the rows, or columns, to look at. In a space of n dimensions, the squared
    cosine of two random directions is 1/n in the mean. The rows' errors lie in such a space if n
    tokens made them.
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
    """Average groups of `number` neighbours: (5, n) -> (5, n // number), at least one group.

    The last group takes what is left, too.
    """
    groups = max(1, means.shape[1] // number)
    last = (groups - 1) * number
    others = means[:, :last].unflatten(1, (groups - 1, number)).mean(2)
    return torch.cat([others, means[:, last:].mean(1, keepdim=True)], dim=1)


def share_of_scales(means):
    """Return the mean share of the reference's squared error that a part's own scale explains.

    means: (5, n), of n parts of a tensor. The full tensor's scale is taken out before: all parts
    share that one.
    """
    _, error, values, _, product = means
    scale = product.sum() / values.sum()
    error = error - 2 * scale * product + scale.square() * values
    explained = (product - scale * values).square() / (error * values)
    return explained.nan_to_num(0.0, 0.0, 0.0).mean().item()


def scales(means, number, part=True):
    """Return the scales, (3, n) as in `Errors`, of n parts of a tensor.

    means: their mean squares and products, (5, n), of `number` values each. part: whether they are
    parts of a tensor, and not all of it.
    """
    ours, its = (means[3:] / means[2]).abs().nan_to_num(0.0)
    rms = (means[1] / means[2]).sqrt().nan_to_num(0.0)
    floor = torch.where((rms > 1) & part, rms, rms * max(number**-0.5, 1 / 24))
    return torch.stack([ours, torch.maximum(its, floor), torch.ones_like(its)])


def worst_relative(many):
    """Return {measure: the largest of the reference's errors in `many`, relative to the values}.

    Tensors that should be zero are kept apart: their errors are many times their values, and would
    allow the other tensors everything. For them there are {"rms of rounding": the largest error
    itself, "max of rounding": the same, "values of rounding": the largest rms of their values}.
    """
    worst = {name: 0.0 for name in (*WHOLE, *(name + OF_ROUNDING for name in (*APART, "values")))}
    for errors in many:
        if is_rounding(errors):
            found = {name + OF_ROUNDING: errors.norms[name][1] for name in APART}
            found["values" + OF_ROUNDING] = errors.norms["rms"][2]
        else:
            found = {name: errors.norms[name] for name in errors.norms.keys() & set(WHOLE)}
            found = {name: norm[1] / norm[2] for name, norm in found.items() if norm[2] > 0}
        for name, value in found.items():
            worst[name] = max(worst[name], value.item())
    return worst


def is_rounding(errors):
    """Return whether the reference is a hundred times as far off as the values are large."""
    _, reference, size = errors.norms["rms"]
    return (reference > 100 * size).item()


def worst_of_ranks(of_ranks):
    """Return the largest of each measure in what `worst_relative` has returned on several ranks."""
    return {name: max(worst[name] for worst in of_ranks) for name in of_ranks[0]}


def judge(many, dtype, worst, longest_sum=1):
    """Yield (share of the limit, number, name, part, error, allowed), by tensor and measure.

    many: the `Errors` of tensors whose usual errors are alike; number: a tensor's place among them.
    dtype: the run's. worst: `worst_relative` of those tensors, on all ranks. longest_sum: the most
    products that a single value of the model adds up. Of a tensor's rows, or columns, only the one
    that is nearest to its limit counts: part is its index.
    """
    unit = torch.finfo(dtype).eps / 2
    # Sums of half-precision numbers, too, are computed in float32.
    of_sum = max(unit, math.sqrt(longest_sum) / 8 * torch.finfo(torch.float32).eps / 2)
    # A tensor as small as those of rounding counts as rounding, too, even if its error is small.
    small = worst["values" + OF_ROUNDING]
    apart = [is_rounding(e) or 0 < e.norms["rms"][2] <= small for e in many]
    for (name, limit), rounding in product(LIMITS.items(), (False, True)):
        own = [
            (number, errors.norms[name])
            for number, errors in enumerate(many)
            if name in errors.norms
            and apart[number] == rounding
            and not (name == "scale" and (errors.together or errors.single))
        ]
        if not own or (rounding and name not in APART):
            continue
        usual = worst.get(name)
        if usual is None:
            others = [errors for errors, is_apart in zip(many, apart, strict=True) if not is_apart]
            norms = [errors.fewer.get(name, errors.norms.get(name)) for errors in others]
            norms = torch.cat([norm for norm in norms if norm is not None], dim=1)
            relative = (norms[1] / norms[2])[norms[2] > 0].sort().values
            usual = relative[int(0.99 * (len(relative) - 1))].item() if len(relative) else 0.0
        for number, (error, reference, size) in own:
            least = max(usual, unit if name == "scale" else of_sum) * size
            if rounding:  # doubled for chance: with one token, a head's error is one number
                least = torch.full_like(size, 2 * worst[name + OF_ROUNDING])
            scale = torch.maximum(reference, least)
            scale += torch.finfo(dtype).tiny  # smaller values may have been rounded to zero
            share = error / (limit * scale)
            # A NaN must not pass, nor anything whose reference is not finite.
            share = share.masked_fill(~scale.isfinite(), torch.inf).nan_to_num(torch.inf)
            part = share.argmax().item()
            allowed = (limit * scale)[part].item()
            yield share[part].item(), number, name, part, error[part].item(), allowed
