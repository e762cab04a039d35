"""Attention a few heads at a time: which heads each rank has in a round, and their projections."""

from itertools import zip_longest

import torch.nn.functional as F
from torch import nn

from memory.tiled_loss import tiles
from utils.partition import shard_heads


def plan_rounds(config, ranks, head_groups):
    """Plan which heads each rank attends with in each round: [[(queries, keys) of each rank], ...].

    queries, keys: (start, stop). With `head_groups`, all ranks together have at most N/K query
    heads in a round (one KV head's group), or one per rank if that is more. So the memory for a
    token does not depend on the number of groups. (8 query and 2 KV heads on 2 ranks: heads 0 and 1
    beside 4 and 5, then 2 and 3 beside 6 and 7.) Without `head_groups` there is one round. In the
    last rounds a rank may have no heads: it sends its tokens' heads to other ranks, and receives
    nothing.
    """
    N, K = config.num_attention_heads, config.num_key_value_heads
    heads = [shard_heads(N, K, ranks, rank)[:2] for rank in range(ranks)]
    if not head_groups:
        return [heads]
    group, turns = N // K, []
    for (first, stop), keys in heads:
        turns.append([])
        for key in range(*keys):
            queries = range(max(first, key * group), min(stop, (key + 1) * group))
            for tile in tiles(len(queries), max(1, group // ranks)):
                some = queries[tile]
                turns[-1].append(((some.start, some.stop), (key, key + 1)))
    return list(zip_longest(*turns, fillvalue=((0, 0), (0, 0))))


def sliceable(linear):
    """Tell whether `project` can compute some of a layer's outputs alone."""
    if type(linear) is nn.Linear:
        return True
    adapters = getattr(linear, "active_adapters", None)
    plain = getattr(linear, "lora_A", None) is not None and not linear.disable_adapters
    plain = plain and not linear.merged and type(linear.base_layer) is nn.Linear
    plain = plain and all(name in linear.lora_A for name in adapters)
    plain = plain and all(linear.lora_B[name].bias is None for name in adapters)
    variants = getattr(linear, "lora_variant", getattr(linear, "use_dora", {}))  # DoRA, KaSA, ...
    return plain and not any(variants.get(name) for name in adapters)


def project(linear, x, rows):
    """Compute the outputs with indices `rows` of a linear layer; PEFT's LoRA, if any, included."""
    base = getattr(linear, "base_layer", linear)
    y = F.linear(x, base.weight[rows], None if base.bias is None else base.bias[rows])
    for name in getattr(linear, "active_adapters", ()):
        a, b = linear.lora_A[name].weight, linear.lora_B[name].weight
        low_rank = F.linear(F.linear(x.to(a.dtype), a), b[rows])
        y = (y + low_rank * linear.scaling[name]).to(y.dtype)
    return y
