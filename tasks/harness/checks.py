"""Compare a parallel run with the reference: the unmodified module, run by rank 0 alone."""

import math
import re
from itertools import product

import torch
import torch.distributed as dist

from harness.float64 import compute_in_float64
from harness.terminal import styled
from harness.tolerance import (
    CHUNK,
    LIMITS,
    WHOLE,
    judge,
    measure,
    worst_of_ranks,
    worst_relative,
)
from harness.wider import WIDER, widen
from utils.gradients import local_part
from utils.shards import ReplicatedKVLinear, shard_of

# Allowed difference in float64, as a share of the largest reference value. A parallel run adds the
# same products in another order, so it is off by a few roundings, of 1e-16, times the square root
# of the number of additions: about 1e-14. In float32 and bfloat16 it is measured: `tolerance.py`.
# Values that should be zero are only rounding: they may be off by FLOOR of the check's largest.
TOLERANCE, FLOOR = 1e-10, 1e-13
NAME_WIDTH = 69  # characters, so that a check is one line of at most 100
HIDES = 0.1  # a reference that is off by more than this share of its values hides errors
# Checks whose tolerance is not for rounding: of printed values, and of how far a loss goes down.
NOT_ROUNDING = "golden", "last loss"


class Comparison:
    """The comparing half of `job.Run`. Every method is called by all ranks together."""

    longest_sum = 1  # the most products that a single value of the model adds up
    verbose = False  # whether all that a check measured is printed

    def references(self, module):
        """Return on rank 0 [module, the same in the next wider dtype, if any]; elsewhere []."""
        if self.rank:
            return []
        return [module, *([widen(module)] if self.dtype in WIDER else [])]

    def reference_values(self, function, references):
        """Return what function(module) gives for the references, on every rank.

        function returns a list of tensors. The result has a tuple for each tensor, with its values
        for all references. float64 values of the wider reference are sent as float32, which rounds
        them by half a unit in the last place at most.
        """
        values = [function(module) for module in references]
        shape = self.broadcast((len(values), len(values[0])) if values else None)

        def value(r, i):
            if not values:
                return self.broadcast(None)
            wider = r > 0 and values[r][i].dtype == torch.float64
            return self.broadcast(values[r][i].float() if wider else values[r][i])

        return [tuple(value(r, i) for r in range(shape[0])) for i in range(shape[1])]

    def compare(self, name, pairs, tolerance=None, least_error=0.0, category=None):
        """Compare pairs as a part of a check; `check` of the same name, later, gives the verdict.

        pairs: of tensors of one shape, (actual, reference), or (actual, reference, exact). `exact`
        is the wider reference's value, in float32 and bfloat16 runs: errors are then differences
        from `exact`, and `tolerance.judge` decides. tolerance: an absolute bound instead; None,
        without `exact`, is `TOLERANCE` of the pair's largest reference value. least_error: see
        `tolerance.measure`. category: groups the pairs of a check whose usual errors are alike.
        """
        found, measured = self.compared.setdefault(name, ([], {}))
        for actual, reference, *exact in pairs:
            assert actual.shape == reference.shape, (name, actual.shape, reference.shape)
            if not actual.numel():  # more ranks than MLP units
                continue
            if exact and tolerance is None:
                errors = measure(actual, reference, exact[0], least_error)
                measured.setdefault(category, []).append(errors)
                continue
            value, mean = difference(actual, reference)
            largest = reference.abs().max().item()
            assert tolerance is not None or reference.dtype == torch.float64, name
            found.append(
                {
                    "max_abs_diff": value,
                    "mean_abs_diff": mean,
                    "max_abs_reference": largest,
                    "tolerance": tolerance,
                }
            )

    def check(self, name, pairs=(), tolerance=None, least_error=0.0):
        """Compare pairs, give all ranks' verdict, and print one line; a failure ends the job.

        The line shows the largest difference and its limit, of the pair that is nearest to failing;
        FAILED and --verbose also tell its rank. The exit code of a failure is 1.
        """
        self.compare(name, pairs, tolerance, least_error)
        found, measured = self.compared.pop(name)
        usual = {category: worst_relative(many) for category, many in measured.items()}
        largest_here = max((pair["max_abs_reference"] for pair in found), default=0.0)
        usual_of_ranks, largest_of_ranks = zip(
            *self.gather_objects((usual, largest_here)), strict=True
        )
        largest = max(largest_of_ranks)
        for pair in found:
            size = pair["max_abs_reference"] or 1.0
            if pair["tolerance"] is None:
                size = max(pair["max_abs_reference"], FLOOR / TOLERANCE * largest)
                pair["tolerance"] = TOLERANCE * size
            pair["share"] = share_of(pair["max_abs_diff"], pair["tolerance"])
            pair["largest_share"] = pair["max_abs_diff"] / (size or 1.0)
        for category, many in measured.items():
            of_ranks = [theirs[category] for theirs in usual_of_ranks if category in theirs]
            found.append(nearest_of(many, self.dtype, worst_of_ranks(of_ranks), self.longest_sum))
        nearest_here = max(found, key=lambda pair: pair["share"], default={"share": -1.0})
        farthest_here = max((pair["largest_share"] for pair in found), default=0.0)
        nearest_of_ranks, farthest_of_ranks = zip(
            *self.gather_objects((nearest_here, farthest_here)), strict=True
        )
        rank = max(range(self.world_size), key=lambda r: nearest_of_ranks[r]["share"])
        record = nearest_of_ranks[rank] | {"largest_share": max(farthest_of_ranks)}
        if record["share"] < 0:
            self.print_failed(name, rank, "nothing was compared")
            self.exit(1)
        passed, nearest = record["share"] <= 1, record.pop("nearest", None)
        self.checks.append({"name": name, **record, "passed": passed})
        value, bound = record["max_abs_diff"], record["tolerance"]
        if not passed:
            norm, value, bound = nearest or ("max", value, bound)
            self.print_failed(name, rank, f"{norm}|diff| {value:.1e} > tolerance {bound:.1e}")
            self.exit(1)
        said = f"{value:.1e} of {bound:.1e}" if bound else "exact"
        self.print0(f"check {shortened(name):<{NAME_WIDTH}}  {said:<18}  {styled('ok', 'green')}")
        if self.verbose:
            self.print0(f"    rank {rank} is nearest; {details_of(record)}")

    def print_failed(self, name, rank, why):
        """Print the line of a check that failed."""
        self.print0(f"{styled('FAILED', 'red')} {name} (rank={rank}): {why}")

    def nearest(self):
        """Return, in words, the check that came nearest to failing.

        Those of NOT_ROUNDING do not count: golden values, for one, have four digits only.
        """
        shares = {
            check["name"]: check["share"]
            for check in self.checks
            if check["tolerance"] and not check["name"].startswith(NOT_ROUNDING)
        }
        name = max(shares, key=shares.get, default=None)
        golden = any(check["name"].startswith("golden") for check in self.checks)
        aside = ", golden values aside" if golden else ""
        return f"{name} ({shares[name]:.0%} of it{aside})" if name else "none has one"

    def furthest_off(self):
        """Return, in words, how far the reference itself is off at most, if it hides errors.

        By rms over a tensor: an error that is much smaller than this is not seen.
        """
        shares = {c["name"]: c["own_rms_share"] for c in self.checks if "own_rms_share" in c}
        name = max(shares, key=shares.get, default=None)
        if name is None or shares[name] <= HIDES:
            return ""
        return (
            f"; the reference itself is off by up to {shares[name]:.1e} ({name}): "
            f"{str(self.dtype)[6:]} shows little here, --dtype float64 more"
        )

    def check_same_bits(self, name, tensor):
        """Check that all ranks hold the same bits, as after a reduction, or in replicas."""
        self.check(name, [(tensor, self.broadcast(tensor))], tolerance=0.0)

    def check_golden(self, name, tensor, golden):
        """Compare the first and last three values with those that the assignment prints.

        These have four digits.
        """
        ends = tensor.flatten()[[0, 1, 2, -3, -2, -1]].float()
        # Half a unit of the last printed digit, and float32 noise.
        self.check(f"golden {name}", [(ends, torch.tensor(golden).to(ends))], tolerance=5.1e-5)

    def shards(self, module):
        """Return, for every rank, {parameter's name: the region that it holds}: see `shard_of`."""
        return self.gather_objects({n: shard_of(p) for n, p in module.named_parameters()})

    def slices(self, module, references, only, *values):
        """Return {category: generator of (this rank's value, the reference's slice, ...)}.

        module: this rank's share. references: from the method of that name. only(name): whether to
        take a parameter. values: functions of a parameter; the first is called with this rank's
        parameter and the full one, the others with the full one alone. A category is the same
        parameter in all layers: see `category_of`.
        """
        local = dict(module.named_parameters())
        full = dict(references[0].named_parameters()) if references else {}
        categories, shards = {}, self.shards(module)
        for name in self.broadcast([name for name in full if only(name)]):
            categories.setdefault(category_of(name), []).append(name)

        def pairs(names):
            for name in names:
                tensors = [value(full[name]) for value in values] if full else values
                slices = [self.to_each(t, [shard.get(name) for shard in shards]) for t in tensors]
                if name in local:  # a row-parallel layer's bias is on rank 0 only
                    actual = values[0](local[name])
                    actual = torch.zeros_like(local[name]) if actual is None else actual
                    yield local_part(actual, local[name]).to(self.device), *slices

        return {category: pairs(names) for category, names in categories.items()}

    def check_weights(self, title, module, references, only=lambda name: True, unsplit=("norm",)):
        """Check, to the bit, that each rank's weights are the reference's or slices of them.

        Together the ranks must have all of a weight. A weight that one rank has in full fails.
        Exempt are names with a word of `unsplit` in them ("" is in all), biases, projections to
        keys and values that several ranks share, and weights with a dim smaller than the ranks'
        number.
        """
        categories = self.slices(module, references, only, lambda parameter: parameter.detach())
        pairs = (pair for category in categories.values() for pair in category)
        self.check(f"{title} weights, slices of the whole", pairs, tolerance=0.0)
        sizes = {n: p.shape for n, p in references[0].named_parameters()} if references else None
        sizes, found, shards = self.broadcast(sizes), [], self.shards(module)
        missing = [
            name
            for name in filter(only, sizes)
            if not covered(sizes[name], [shard[name] for shard in shards if name in shard])
        ]
        added = {name for shard in shards for name in shard} - sizes.keys()  # a head that was tied
        count = torch.tensor(float(len(missing) + len(added)))
        self.check(f"{title} weights, nothing left out", [(count, 0 * count)], 0.0)
        if "" in unsplit:
            return
        for name, region in shards[self.rank].items():
            exempt = name.endswith("bias") or any(word in name for word in unsplit)
            if not exempt:
                exempt = isinstance(
                    module.get_submodule(name.rpartition(".")[0]), ReplicatedKVLinear
                )
            all_of_it = covered(sizes[name], [region])
            if all_of_it and min(sizes[name]) >= self.world_size > 1 and not exempt:
                found.append(name)
        count = torch.tensor(float(len(found)))
        self.check(f"{title} weights, none whole that should be split", [(count, 0 * count)], 0.0)

    def check_gradients(self, title, module, references, only=lambda name: True):
        """Compare every parameter's gradient with this rank's slice of the reference's."""
        values = [lambda parameter: parameter.grad]
        values += [lambda parameter: parameter.exact_grad] * (self.dtype in WIDER)
        categories = self.slices(module, references, only, *values)
        for category, pairs in categories.items():
            self.check(f"{title} {category} grad", pairs)

    def place(self, module):
        """Move a module to the run's device and dtype, and return it."""
        module = module.to(self.device, self.dtype)
        if self.dtype == torch.float64:
            compute_in_float64(module)
        return module

    def to_each(self, tensor, shards):
        """Send each rank its region of rank 0's tensor. Return this rank's; None if it has none.

        shards: each rank's region, or None. No other rank holds the full tensor: it may be the
        largest that there is.
        """
        dtype = self.broadcast(tensor.dtype if self.rank == 0 else None)
        local = None
        for rank, shard in enumerate(shards):
            if shard is None:
                continue
            sent = received = torch.empty(0, dtype=dtype, device=self.device)
            if self.rank == 0:
                sent = tensor.detach()[shard]
            if self.rank == rank:
                size = [part.stop - part.start for part in shard]
                local = received = sent if rank == 0 else sent.new_empty(size)
            if rank:  # no `send`: watchdog.py needs the same count of collectives on all ranks
                got, given = [0] * self.world_size, [0] * self.world_size
                got[0], given[rank] = received.numel(), sent.numel()
                dist.all_to_all_single(received.view(-1), sent.reshape(-1), got, given)
        return local

    def deal(self, module, share):
        """Return read(name, shard) for `materialize`: slices of a module that rank 0 alone has.

        share: this rank's module, perhaps on the meta device. A rank may lack a parameter, as a
        bias that enters a sum over ranks once.
        """
        full = dict(module.named_parameters()) if self.rank == 0 else {}
        shards = self.shards(share)
        slices = {
            name: self.to_each(full.get(name), [shard.get(name) for shard in shards])
            for name in self.broadcast(list(full))
        }
        return lambda name, shard: slices[name].clone()

    def check_allclose(self, title, what, actual, reference, against="reference"):
        """Run the assignment's own assertion: torch.allclose(actual, reference, atol=1e-6).

        It allows each element 1e-6 and, by its default rtol, 1e-5 of the reference's element. In
        float64 a failure ends the job, as in `check`. In float32 and bfloat16 only the verdict is
        printed, and put into `results`: small elements, which are sums of larger terms, miss the
        bound by rounding. (One rank in float32, held against float64, misses it too: tp_mlp.py.)

        what, against: how the line names the two tensors, which have one shape. The line shows the
        rank that misses the most elements, and its element that is furthest beyond its bound.
        """
        assert actual.shape == reference.shape, (what, actual.shape, reference.shape)
        wide = torch.promote_types(reference.dtype, torch.float32)
        target = reference.to(wide).flatten()
        diff, bound = (actual.to(wide).flatten() - target).abs(), 1e-6 + 1e-5 * target.abs()
        worst = (diff / bound).argmax()  # a NaN, if there is one
        largest = target.abs().max().item()
        local = {
            "share": (diff / bound)[worst].item(), "mean_abs_diff": diff.mean().item(),
            "largest_share": diff.max().item() / (largest or 1.0),
            "max_abs_diff": diff[worst].item(), "tolerance": bound[worst].item(),
            "max_abs_reference": largest,
            "reference": target[worst].item(), "elements": target.numel(),
            "elements_missed": (~torch.isclose(actual, reference, atol=1e-6)).sum().item(),
            "passed": torch.allclose(actual, reference, atol=1e-6),
        }  # fmt: skip
        everyone = self.gather_objects(local)
        rank = max(range(self.world_size), key=lambda r: everyone[r]["elements_missed"])
        most_missed, gate = everyone[rank], self.dtype == torch.float64
        off, tolerance = most_missed["max_abs_diff"], most_missed["tolerance"]
        name = f"torch.allclose({what}, {against}, atol=1e-6)"
        (self.checks if gate else self.results.setdefault("verdicts", [])).append(
            {"name": f"{title} {name}"} | most_missed
        )
        missed = f"{most_missed['elements_missed']:,} of {most_missed['elements']:,} elements"
        if most_missed["passed"]:
            self.print0(f"{name}: True")
        elif gate:
            why = f"|diff| {off:.1e} > tolerance {tolerance:.1e}"
            why = f"{what} mismatch on rank={rank}, {missed}: {why}"
            self.print_failed(f"{title} {name}", rank, why)
            self.exit(1)
        else:
            self.print0(
                f"{name}: False, {missed}: {off:.1e} off where the "
                f"{against} is {most_missed['reference']:.1e} (rank={rank}); why: "
                "figures/tasks.md, Part 1"
            )


def covered(size, regions):
    """Return whether the regions of a tensor, a slice for each dim, leave nothing of it out."""
    edges = [
        {0} | {edge for region in regions for edge in (region[dim].start, region[dim].stop)}
        for dim in range(len(size))
    ]
    # Between neighbouring edges a region has all or nothing, so the first index stands for all.
    corners = product(*(of_dim - {length} for of_dim, length in zip(edges, size, strict=True)))
    return all(
        any(
            all(p.start <= at < p.stop for p, at in zip(region, corner, strict=True))
            for region in regions
        )
        for corner in corners
    )


def nearest_of(many, dtype, worst, longest_sum):
    """Judge a check's tensors, by `tolerance.judge`; return a record of the nearest to a limit."""
    judged = list(judge(many, dtype, worst, longest_sum))
    share, nearest, measure_name, part, *numbers = max(judged, key=lambda found: found[0])
    (largest,) = (found for found in judged if found[1:3] == (nearest, "max"))
    times = {}
    for of_limit, _, measure_of, *_ in judged:
        times[measure_of] = max(times.get(measure_of, 0), of_limit * LIMITS[measure_of])
    if measure_name in WHOLE:
        part = measure_name
    else:
        axis, _, what = measure_name.partition(" ")
        together = many[nearest].together.get(axis)
        place = f"{together} {axis}s from {part * together}" if together else f"{axis} {part}"
        part = f"{place}: {what or 'rms'}"
    return {
        "share": share,
        "max_abs_diff": largest[4],
        "largest_share": max(errors.largest_share for errors in many),
        "mean_abs_diff": many[nearest].mean,
        "max_abs_reference": many[nearest].norms["max"][2].item(),
        "tolerance": largest[5],
        "own_max_abs_error": many[nearest].reference_error,
        "own_rms_share": worst["rms"],
        "times_reference": times,
        "nearest": (part, *numbers),
    }


def shortened(name):
    """Return a check's name in at most NAME_WIDTH characters, if need be without its middle."""
    if len(name) <= NAME_WIDTH:
        return name
    end = NAME_WIDTH * 2 // 3  # the end names the parameter
    return f"{name[: NAME_WIDTH - end - 3]}...{name[-end:]}"


def details_of(record):
    """Return what --verbose tells of a check, in words. record: as in the JSON file."""
    text = f"mean|diff| {record['mean_abs_diff']:.1e}"
    text += f", largest value {record['max_abs_reference']:.1e}"
    if times := record.get("times_reference"):
        errors = ", ".join(f"{measure_name} {share:.1f}" for measure_name, share in times.items())
        text += (
            f"; reference's own {record['own_max_abs_error']:.1e}, of which errors are: {errors}"
        )
    return text


def share_of(value, bound):
    """Return the value as a share of the bound; infinite for a NaN, which must not pass."""
    share = value / bound if bound else math.inf if value else 0.0
    return math.inf if share != share else share


def category_of(name):
    """Return a parameter's name without its layer's number: the same for all layers."""
    return re.sub(r"\b(layers|h)\.\d+\.", r"\1.*.", name)


def difference(a, b):
    """Return the largest and the mean |a - b|; in pieces, as in `tolerance.measure`."""
    largest, total = a.new_zeros((), dtype=torch.float64), 0.0
    chunk = CHUNK[a.device.type]
    for x, y in zip(a.detach().flatten().split(chunk), b.flatten().split(chunk), strict=True):
        diff = (x.to(torch.promote_types(x.dtype, torch.float32)) - y).abs()
        largest = torch.maximum(largest, diff.max())  # a NaN stays
        total = total + diff.sum().double()
    return largest.item(), total.item() / max(a.numel(), 1)
