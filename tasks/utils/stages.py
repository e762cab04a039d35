"""Stages of a pipeline: which layers each has, when it works, and weights that two of them have."""

from functools import cache

import torch

from utils.errors import UserError


def balance(costs, stages):
    """Cut layers into consecutive stages, so that the costliest one costs as little as possible.

    costs: of each layer. Returns, for each stage, the layer before which it ends. Raises UserError
    for more stages than layers, ValueError for fewer than one stage.
    """
    if stages < 1:
        raise ValueError(f"{stages} stages: 1 or more")
    if stages > len(costs):
        raise UserError(f"{stages} stages, but only {len(costs)} layers")

    @cache
    def best(first, left):  # (cost of the costliest, ends) of the layers from `first` on
        if left == 1:
            return sum(costs[first:]), (len(costs),)
        return min(
            (max(sum(costs[first:stop]), best(stop, left - 1)[0]), (stop, *best(stop, left - 1)[1]))
            for stop in range(first + 1, len(costs) - left + 2)
        )

    return best(0, stages)[1]


def clock_cycles(num_batches, num_partitions):
    """Yield, for each tick of GPipe's forward, the (microbatch, stage) pairs that work at once."""
    for tick in range(num_batches + num_partitions - 1):
        stages = range(max(0, tick - num_batches + 1), min(tick + 1, num_partitions))
        yield [(tick - stage, stage) for stage in stages]


def sum_copies_once(first, second):
    """Give both copies the sum, as `sum_copies` does, after the last backward before the optimizer.

    Raises ValueError for gradients that are this sum already; so does a backward that adds to it.
    """
    from utils.replicas import refuse_additions, sample_of, summed_over

    copies = [weight for weight in (first, second) if weight.requires_grad]
    for weight in copies:
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if summed_over(weight.grad):
            raise ValueError("these gradients are sums of both copies' already")
    if copies:
        sum_copies(first, second)
    for weight in copies:
        weight.grad.summed = weight.grad._version, sample_of(weight.grad), {"both copies"}
        refuse_additions(weight)


def sum_copies(first, second):
    """Give both copies of a weight, in one process, the sum of their gradients, in place."""
    total = first.grad + second.grad.to(first.device)
    first.grad, second.grad = total, total.to(second.device, copy=True)
