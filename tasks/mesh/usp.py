"""USP (arXiv 2405.07719): ranks that are neighbours exchange heads, and rings go across them.

Shapes as in `utils/__init__.py`.
"""

from ring_attention import RingLlama, attend_in_ring, ring_of
from ulysses_forward import to_heads, to_tokens
from utils.collectives import gather_shares, group_of_axis, subgroup
from utils.llama import getter
from utils.partition import shard_range
from utils.sequence import MaskInfo, as_attention_takes, convert_attention


def usp_attention(module, query, key, value, attention_mask, **kwargs):
    """Exchange heads among neighbours, attend in rings, exchange back: (B, S/P, N, D) and None.

    query: (B, N, S/P, D); key, value: (B, K, S/P, D). attention_mask: made by `MaskInfo.to_tensor`.
    """
    length, ring_group = MaskInfo.from_tensor(attention_mask).length, module.get_group()
    first, stop = shard_range(length, ring_group.size(), ring_group.rank())
    share = module.get_ulysses_group(), module.heads, stop - first
    query, key, value = to_heads(*as_attention_takes(query, key, value), *share)
    output, _ = attend_in_ring(module, query, key, value, attention_mask, **kwargs)
    return to_tokens(output, *share), None


class USPLlama(RingLlama):
    """Takes and returns full sequences; a Ulysses group has what one rank of a plain ring has."""

    def order(self, length):
        return ring_of(self.get_ring(), length, self.zigzag).order()

    def tokens(self, length):
        ring_group, ulysses_group = self.get_ring(), self.get_ulysses_group()
        of_place = shard_range(length, ring_group.size(), ring_group.rank())
        local = self.order(length)[slice(*of_place)]
        return local[slice(*shard_range(len(local), ulysses_group.size(), ulysses_group.rank()))]

    def gather_tokens(self, x, length):
        ring_group, ulysses_group = self.get_ring(), self.get_ulysses_group()
        first, stop = shard_range(length, ring_group.size(), ring_group.rank())
        x = gather_shares(gather_shares(x, 1, stop - first, ulysses_group), 1, length, ring_group)
        return x[:, self.order(length).argsort().to(x.device)]


def usp_parallelize(model, mesh, ulysses, zigzag=True):
    """Make a LlamaForCausalLM sequence-parallel in place, by Ulysses and rings together.

    ulysses: how many neighbours exchange heads; a ring has one rank of each group of neighbours.
    With 4 ranks and ulysses=2, the pairs (0, 1) and (2, 3) exchange heads, (0, 2) and (1, 3) are
    rings, and ranks 0 and 1 share the tokens that rank 0 of a plain ring of 2 would have.
    """
    group = group_of_axis(mesh)
    rank, ranks = group.rank(), group.size()
    first = rank // ulysses * ulysses
    ulysses_group = subgroup(group, "neighbours", first, first + ulysses)
    ring_group = subgroup(group, "ring", rank - first, ranks, ulysses)
    convert_attention(model, USPLlama, group, "usp", usp_attention, ulysses_group)
    for module in [model, *(layer.self_attn for layer in model.model.layers)]:
        module.zigzag, module.get_ulysses_group = zigzag, getter(ulysses_group)
    for layer in model.model.layers:
        layer.self_attn.get_group = getter(ring_group)
    model.get_ring = getter(ring_group)
    return model
