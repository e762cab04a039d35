"""Stages of a pipeline: which layers each has, when it works, and weights that two of them have."""

from functools import cache

from utils.errors import UserError


def balance(costs, stages):
    """Cut layers of these costs into consecutive stages, of which the dearest costs least.

    Returns of each stage the layer before which it ends. Raises UserError for more stages than
    layers, ValueError for none.
    """
    if stages < 1:
        raise ValueError(f"{stages} stages")
    if stages > len(costs):
        raise UserError(f"{stages} stages, but only {len(costs)} layers")

    @cache
    def best(first, left):  # (cost of the dearest, ends) of the layers from `first` on
        if left == 1:
            return sum(costs[first:]), (len(costs),)
        return min(
            (max(sum(costs[first:stop]), best(stop, left - 1)[0]), (stop, *best(stop, left - 1)[1]))
            for stop in range(first + 1, len(costs) - left + 2)
        )

    return best(0, stages)[1]


def clock_cycles(num_batches, num_partitions):
    """GPipe's forward: of each tick the (microbatch, stage) that work at once."""
    for tick in range(num_batches + num_partitions - 1):
        stages = range(max(0, tick - num_batches + 1), min(tick + 1, num_partitions))
        yield [(tick - stage, stage) for stage in stages]


def sum_copies(first, second):
    """Two copies of a weight, which one process has, get the sum of their gradients, in place."""
    total = first.grad + second.grad.to(first.device)
    first.grad, second.grad = total, total.to(second.device, copy=True)
