"""Who owns what, in numbers: shares of units and of heads."""

from utils.errors import UserError


def shard_range(items, parts, index):
    """Return [start, stop) of share `index` of `items`, dealt to `parts` as evenly as possible."""
    start = index * (items // parts) + min(index, items % parts)
    return start, start + items // parts + (index < items % parts)


def shard_heads(num_heads, num_kv_heads, ranks, rank):
    """Return this rank's query heads, its KV heads, and the ranks that hold the same KV heads.

    Query heads g*G .. g*G+G-1 attend to KV head g, G = N/K (GQA, arXiv 2305.13245), so a rank's
    query heads must bring their KV heads along. Up to K ranks: whole KV groups are dealt out,
    unevenly if need be. More than K: each group goes to several ranks, which split its query heads
    and each hold a copy of its one KV head. All three are returned as (start, stop).
    Raises UserError for more ranks than query heads.
    """
    if ranks > num_heads:
        raise UserError(f"{num_heads} query heads: use 1 to {num_heads} ranks, not {ranks}")
    queries_per_kv = num_heads // num_kv_heads
    if ranks <= num_kv_heads:
        first, stop = shard_range(num_kv_heads, ranks, rank)
        return (first * queries_per_kv, stop * queries_per_kv), (first, stop), (rank, rank + 1)
    for kv_head in range(num_kv_heads):
        replicas = shard_range(ranks, num_kv_heads, kv_head)
        if replicas[0] <= rank < replicas[1]:
            start, stop = shard_range(queries_per_kv, replicas[1] - replicas[0], rank - replicas[0])
            start, stop = kv_head * queries_per_kv + start, kv_head * queries_per_kv + stop
            return (start, stop), (kv_head, kv_head + 1), replicas
    raise AssertionError(rank)
