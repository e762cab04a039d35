"""How a parallel run is held against the reference: the unmodified module, run by rank 0 alone."""

import copy
import re

import torch
import torch.distributed as dist

from float64 import compute_in_float64
from sharding import SharedLinear, local_part, shard_of

# Allowed difference, as a share of the largest reference value. A parallel run adds the same
# products in another order, so it is off by a few roundings (6e-8 in float32, 1e-16 in float64)
# times the square root of the number of additions: about 1e-6 of the largest value after one
# float32 layer, 1e-14 in float64. bfloat16 is measured instead, see `Comparison.check`.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


class Comparison:
    """The comparing half of `utils.Run`. Every method is called by all ranks together."""

    def references(self, module):
        """Rank 0's whole module in a list; for bfloat16 with a float32 copy. Elsewhere empty."""
        if self.rank:
            return []
        exact = [copy.deepcopy(module).float()] if self.dtype == torch.bfloat16 else []
        return [module, *exact]

    def expect(self, function, references):
        """What function(module) gives for the references, on every rank.

        function returns tensors; for each, a tuple with its value for every reference.
        """
        values = [function(module) for module in references]
        shape = self.from_rank0((len(values), len(values[0])) if values else None)
        return [
            tuple(self.from_rank0(values[r][i] if values else None) for r in range(shape[0]))
            for i in range(shape[1])
        ]

    def check(self, name, pairs, tolerance=None, also=None, layers=1):
        """Compare on every rank, tell all ranks, print one line; a failure ends the job, exit 1.

        pairs: (actual, reference), tensors of one shape, or (actual, reference, exact) where
        `exact` is the float32 reference of a bfloat16 run.
        tolerance: absolute bound; default by `TOLERANCE`. With `exact` the difference is taken
        from that, and may be P + 1 times the reference's own (each rank rounds its part of a sum)
        or 2^-7 of the largest value, one to two units in its last place.
        also: a stricter bound whose verdict is printed too.
        layers: how many layers a float32 gradient has come through; it may be off by as many times
        more, for each adds its roundings, and its softmax's gradient, P (dP - sum(P dP)), is a
        difference that amplifies those before. (Seen: 1e-5 after 5 layers of a trained model,
        2e-6 after 4 random ones.)
        The line shows the rank and the pair whose difference came closest to its tolerance.
        """
        worst = {"ratio": -1.0}
        for actual, reference, *exact in pairs:
            assert actual.shape == reference.shape, (name, actual.shape, reference.shape)
            if not actual.numel():  # more ranks than MLP units
                continue
            target = exact[0] if exact else reference
            value, mean = difference(actual, target)
            largest = reference.abs().max().item()
            bound = tolerance
            if exact:
                bound = (self.world_size + 1) * difference(reference, target)[0]
                bound = max(bound, 2**-7 * largest)
            elif bound is None:
                bound = TOLERANCE[reference.dtype] * largest
                bound *= layers if reference.dtype == torch.float32 else 1
            ratio = value / bound if bound else float("inf") if value else 0.0
            ratio = float("inf") if ratio != ratio else ratio  # NaN must not pass
            if ratio > worst["ratio"]:
                worst = {"ratio": ratio, "max_abs_diff": value, "mean_abs_diff": mean,
                         "max_abs_reference": largest, "tolerance": bound}  # fmt: skip
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, worst)
        rank = max(range(self.world_size), key=lambda r: everyone[r]["ratio"])
        worst = everyone[rank]
        passed = worst.pop("ratio") <= 1
        self.checks.append({"name": name, **worst, "passed": passed})
        value, bound = worst["max_abs_diff"], worst["tolerance"]
        if not passed:
            self.say(f"FAILED {name} (rank={rank}): max|diff| {value:.1e} > tolerance {bound:.1e}")
            self.exit(1)
        verdict = f"; within {also:.0e}: {'yes' if value <= also else 'no'}" if also else ""
        self.say(f"check {name}: max|diff| {value:.1e}, mean|diff| {worst['mean_abs_diff']:.1e}, "
                 f"tolerance {bound:.1e} (rank={rank}): ok{verdict}")  # fmt: skip

    def nearest(self):
        """The check that came nearest to failing, in words; golden values have four digits only."""
        shares = {
            check["name"]: check["max_abs_diff"] / check["tolerance"]
            for check in self.checks
            if check["tolerance"] and not check["name"].startswith(("golden", "last loss"))
        }
        name = max(shares, key=shares.get, default=None)
        return f"{name} ({shares[name]:.0%} of it)" if name else "none has one"

    def check_same_bits(self, name, tensor):
        """All ranks hold the same bits: what a reduction must give, and what replicas must keep."""
        self.check(name, [(tensor, self.from_rank0(tensor))], tolerance=0.0)

    def check_golden(self, name, tensor, golden):
        """The first and last three values are those that the assignment prints, to four digits."""
        ends = tensor.flatten()[[0, 1, 2, -3, -2, -1]].float()
        # Half a unit of the last printed digit, and float32 noise.
        self.check(f"golden {name}", [(ends, torch.tensor(golden).to(ends))], tolerance=5.1e-5)

    def slices(self, module, references, only, value):
        """{kind: generator of (this rank's value, the references' slices)} of all parameters.

        module: this rank's share; references: see there. value(parameter) is what to compare.
        Parameters of one kind, one in each layer, go together; only(name) leaves some out.
        """
        mine = dict(module.named_parameters())
        whole = [dict(reference.named_parameters()) for reference in references]
        kinds = {}
        for name in self.from_rank0([n for n in whole[0] if only(n)] if whole else None):
            kinds.setdefault(kind_of(name), []).append(name)

        def pairs(names):
            for name in names:
                (expected,) = self.expect(lambda parameters, n=name: [value(parameters[n])], whole)
                if name in mine:  # a row-parallel layer's bias is on rank 0 only
                    dim, start, stop = shard_of(mine[name])
                    actual = value(mine[name])
                    actual = torch.zeros_like(mine[name]) if actual is None else actual
                    yield (
                        local_part(actual, mine[name]),
                        *(e.narrow(dim, start, stop - start) for e in expected),
                    )

        return {kind: pairs(names) for kind, names in kinds.items()}

    def check_weights(self, title, module, references, only=lambda name: True, whole=("norm",)):
        """Shards are slices of the whole weights, and all else is equal on all ranks: exactly.

        Nothing but what has one of the words `whole` in its name may be whole on a rank: neither
        parameters that nobody split, nor a split that leaves one rank everything.
        """
        kinds = self.slices(module, references, only, lambda parameter: parameter.detach())
        pairs = (pair[:2] for kind in kinds.values() for pair in kind)
        self.check(f"{title} weights, slices of the whole", pairs, tolerance=0.0)
        sizes = {n: p.shape for n, p in references[0].named_parameters()} if references else None
        sizes, unsplit = self.from_rank0(sizes), []
        for name, parameter in module.named_parameters():
            dim, start, stop = shard_of(parameter)
            layer = module.get_submodule(name.rpartition(".")[0])
            exempt = isinstance(layer, SharedLinear) or name.endswith("bias")
            exempt |= any(word in name for word in whole)
            if stop - start == sizes[name][dim] >= self.world_size > 1 and not exempt:
                unsplit.append(name)
        count = torch.tensor(float(len(unsplit)))
        self.check(f"{title} weights, none whole that should be split", [(count, 0 * count)], 0.0)

    def check_gradients(self, title, module, references, only=lambda name: True, layers=1):
        """Compare every parameter's gradient with this rank's slice of the reference's."""
        kinds = self.slices(module, references, only, lambda parameter: parameter.grad)
        for kind, pairs in kinds.items():
            self.check(f"{title} {kind} grad", pairs, layers=layers)

    def place(self, module):
        """A module on the run's device and in its dtype."""
        module = module.to(self.device, self.dtype)
        if self.dtype == torch.float64:
            compute_in_float64(module)
        return module

    def deal(self, module):
        """read(name, shard) for `fill`: slices of a module that rank 0 alone has."""

        def read(name, shard):
            dim, start, stop = shard
            whole = self.from_rank0(module.get_parameter(name) if self.rank == 0 else None)
            return whole.narrow(dim, start, stop - start).clone()

        return read


def kind_of(name):
    """A parameter's name without its layer's number: what is alike in all layers goes together."""
    return re.sub(r"layers\.\d+\.", "layers.*.", name)


def difference(a, b):
    """Largest and mean |a - b|; in pieces, since the tensors may be most of the memory."""
    largest, total = torch.zeros(()), 0.0
    for x, y in zip(a.detach().flatten().split(2**20), b.flatten().split(2**20), strict=True):
        diff = (x.to(torch.promote_types(x.dtype, torch.float32)) - y).abs()
        largest = torch.maximum(largest, diff.max().cpu())  # a NaN stays
        total += diff.sum().item()
    return largest.item(), total / max(a.numel(), 1)
