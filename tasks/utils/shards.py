"""Who owns what: shares of units and heads, slices of weights, targets of a split sequence; and
what a model of slices refuses.

Shapes as in `utils/__init__.py`.
"""

import copy
import inspect
import weakref
from fnmatch import fnmatch
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from utils.adapters import check_by_token, guard, refuse_adapters
from utils.errors import UserError


def shard_range(items, parts, index):
    """[start, stop) of share `index` when `items` are dealt to `parts` as evenly as possible."""
    start = index * (items // parts) + min(index, items % parts)
    return start, start + items // parts + (index < items % parts)


def shard_heads(num_heads, num_kv_heads, ranks, rank):
    """This rank's query heads, its KV heads, and the ranks that hold the same KV heads.

    Query heads g*G .. g*G+G-1 attend to KV head g, G = N/K (GQA, arXiv 2305.13245), so a rank's
    query heads must bring their KV heads along. Up to K ranks: whole KV groups are dealt out,
    unevenly if need be. More than K: each group goes to several ranks, which split its query heads
    and each hold a copy of its one KV head. Returns three (start, stop) pairs.
    Raises UserError for more ranks than query heads.
    """
    if ranks > num_heads:
        raise UserError(f"{num_heads} query heads: use 1 to {num_heads} ranks, not {ranks}")
    group_size = num_heads // num_kv_heads
    if ranks <= num_kv_heads:
        first, stop = shard_range(num_kv_heads, ranks, rank)
        return (first * group_size, stop * group_size), (first, stop), (rank, rank + 1)
    for group in range(num_kv_heads):
        holders = shard_range(ranks, num_kv_heads, group)
        if holders[0] <= rank < holders[1]:
            start, stop = shard_range(group_size, holders[1] - holders[0], rank - holders[0])
            start, stop = group * group_size + start, group * group_size + stop
            return (start, stop), (group, group + 1), holders
    raise AssertionError(rank)


def sides_of(P, outer, inner, rows=None, columns=None):
    """(rows, columns) of P ranks as a mesh of the axes `outer` and `inner`; None: to be chosen.

    Raises UserError where their product is not P.
    """
    columns = columns or (max(1, P // rows) if rows else 2 - P % 2)
    rows = rows or max(1, P // columns)
    if rows * columns != P:
        raise UserError(f"--{outer} {rows} times --{inner} {columns} is not {P}, the number of "
                        "ranks")  # fmt: skip
    return rows, columns


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


def keep_shard(layer, dim, start, stop):
    """Replace `layer`'s weight by its slice [start, stop) along `dim`, in place.

    layer: nn.Linear or nn.Embedding. With dim 0 (output units, vocabulary rows) a bias is sliced
    too; with dim 1 (input units) it is left whole. Each parameter remembers as `parameter.shard`
    what it is of the whole; `shard_of` reads it.
    """
    for name, full in list(layer.named_parameters(recurse=False)):
        if dim < full.dim():
            piece = full.detach().narrow(dim, start, stop - start).clone()
            region = list(shard_of(full))
            first = region[dim].start  # not 0 where `full` is a slice itself
            region[dim] = slice(first + start, first + stop)
            shard = nn.Parameter(piece, requires_grad=full.requires_grad)
            whole = getattr(full, "ds_shape", full.shape)
            setattr(layer, name, mark_shard(shard, tuple(region), whole))
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    else:
        layer.num_embeddings = len(layer.weight)


def mark_shard(parameter, region, whole):
    """Let a parameter, and its deep copies, remember what `shard_of` tells: its region. Returns it.

    whole: the whole tensor's shape. As `ds_shape`, DeepSpeed's name, it is what PEFT knows the
    embedding by, whose prompts need it. PyTorch's own deep copy of a parameter forgets attributes.
    """
    itself = weakref.ref(parameter)  # it would not be freed at once if it held itself

    def copied(memo):
        return mark_shard(nn.Parameter.__deepcopy__(itself(), memo), region, whole)

    parameter.shard, parameter.ds_shape, parameter.__deepcopy__ = region, whole, copied
    return parameter


def shard_of(parameter):
    """Which region of the whole tensor this rank holds: a slice for each dim.

    Of a DTensor, on a mesh of any number of axes; of what `keep_shard` made; all of any other.
    """
    if isinstance(parameter, DTensor):
        region = [slice(0, size) for size in parameter.shape]
        mesh, kinds = parameter.device_mesh, enumerate(parameter.placements)
        # FSDP2 splits what a plan has split already, though its axis is the mesh's first one.
        # (PyTorch's own `__create_chunk_list__` is wrong of such regions where they are uneven.)
        for axis, kind in sorted(kinds, key=lambda pair: type(pair[1]) is not Shard):
            if (dim := getattr(kind, "dim", None)) is not None:
                start, length = region[dim].start, region[dim].stop - region[dim].start
                chunk = -(-length // mesh.size(axis))  # as torch.chunk deals out
                first = min(chunk * mesh.get_local_rank(axis), length)
                region[dim] = slice(start + first, start + min(first + chunk, length))
        sizes = [part.stop - part.start for part in region]
        assert sizes == list(parameter.to_local().shape), (sizes, parameter.to_local().shape)
        return tuple(region)
    return getattr(parameter, "shard", tuple(slice(0, size) for size in parameter.shape))


def local_part(tensor, like=None):
    """What this rank holds of a DTensor, laid out as `like` is; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    # A gradient need not lie where its parameter does: that of an embedding is whole on all ranks.
    return (tensor if like is None else tensor.redistribute(placements=like.placements)).to_local()


def with_whole_logits(whole):
    """A forward hook for a LlamaForCausalLM: `whole(logits)`, where no loss was asked for."""

    def hook(model, args, kwargs, output):
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        if given.get("labels") is not None:
            return output
        if isinstance(output, tuple):  # return_dict=False: logits come first
            return whole(output[0]), *output[1:]
        output.logits = whole(output.logits)
        return output

    return hook


def held(group):
    """A function that returns `group`, for a module to have: deep copies of it have the same group.

    copy.deepcopy cannot copy a process group, but takes a function as it is.
    """
    return lambda: group


def bound(function, **given):
    """As functools.partial, whose arguments copy.deepcopy would copy; see `held`."""
    return lambda *args, **kwargs: function(*args, **given, **kwargs)


def refuse_as_whole(model):
    """A model of slices says no where it would be taken for a whole one: to save it, or split it.

    To PEFT's adapters, too: those that it has, and at its first forward those that it gets later.
    Raises ValueError as `check_whole` and `refuse_adapters` do.
    """
    check_whole(model)
    refuse_adapters(model)
    guard(model, refuse_adapters)

    def save_pretrained(*_, **__):
        raise ValueError("save_pretrained: each rank has slices only; save the model before")

    def resize_token_embeddings(*_, **__):
        raise ValueError("resize_token_embeddings: each rank has slices only; resize it before")

    model.save_pretrained = save_pretrained
    model.resize_token_embeddings = resize_token_embeddings


def check_whole(model):
    """ValueError for what is no ordinary LlamaForCausalLM: it would lose a forward of its own."""
    if "save_pretrained" in vars(model):
        raise ValueError("this model is tensor-parallel already")
    check_ordinary(model)


def check_ordinary(model):
    """ValueError for what is no ordinary LlamaForCausalLM, or has a plan."""
    if type(model).__name__ != "LlamaForCausalLM":
        raise ValueError(f"not an ordinary LlamaForCausalLM: {type(model).__name__}")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("weights are DTensors, which are not split by tokens here")


def rope_of(config):
    """The rotary settings of a LlamaConfig: {} or {"rope_type": ..., ...}."""
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def become(model, kind, group, name, attend):
    """Make a LlamaForCausalLM one of `kind`, whose layers call `attend`; it and they have `group`.

    name: of attend, in transformers' list. `model.before` are the configurations that it had, which
    others may share. Weights may be `keep_shard`'s slices. Raises ValueError as `check_ordinary`
    does, and UserError for RoPE that depends on the length of the sequence. Adapters that are not
    right raise ValueError at the first forward, see `check_by_token`.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    check_ordinary(model)
    config = model.config
    if (of_rope := rope_of(config).get("rope_type")) in ("dynamic", "longrope"):
        raise UserError(f"RoPE {of_rope} depends on the sequence's length, which no rank sees")
    model.before = config, model.generation_config
    config, model.generation_config = map(copy.deepcopy, model.before)
    ALL_ATTENTION_FUNCTIONS[name] = attend
    config._attn_implementation = name
    config.use_cache = model.generation_config.use_cache = False
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = config
    for layer in model.model.layers:
        layer.self_attn.get_group = held(group)
    guard(model, check_by_token)
    model.__class__, model.get_group = kind, held(group)
    model.parts, model.multiple = group.size(), 1  # see `SequenceParallelLlama.padded`


def heads_of(model):
    """A rank's query heads and KV heads, of a model that may be tensor-parallel."""
    attention = model.model.layers[0].self_attn
    both = attention.q_proj, attention.k_proj
    return [projection.out_features // attention.head_dim for projection in both]


def share_heads(model, group):
    """Tell a model's layers which heads each rank of `group` attends with."""
    ranks = range(group.size())
    heads = [shard_heads(*heads_of(model), group.size(), rank)[:2] for rank in ranks]
    (first, stop), (first_key, stop_key) = heads[group.rank()]
    for attention in (layer.self_attn for layer in model.model.layers):
        attention.heads = heads
        attention.num_key_value_groups = (stop - first) // (stop_key - first_key)


def refuse(arguments, *names):
    """Take these out of a forward's keyword arguments; ValueError where one is given."""
    for name in names:
        if torch.is_tensor(value := arguments.pop(name, None)) or value:
            raise ValueError(f"{name}: not under sequence parallelism")


def check_ids(ids, vocab_size):
    """IndexError for ids that no rank has, as from a whole embedding; else they would count as 0.

    On a GPU the device asserts it, as ever, and nobody waits for it.
    """
    F.embedding(ids, torch.zeros((), device=ids.device).expand(vocab_size, 1))


def next_tokens(labels, size, vocab_size, ignore_index=-100, shift_labels=None):
    """Labels (B, S), shifted: the target of each of `size` tokens; the last has none.

    Raises ValueError for labels that are not `size` and for `shift_labels`, labels that are shifted
    already, and IndexError as `check_ids` does.
    """
    if shift_labels is not None:
        raise ValueError("shift_labels: labels are shifted here")
    if labels.shape != size:
        raise ValueError(f"labels are {list(labels.shape)}, of tokens that are {list(size)}")
    targets = F.pad(labels, (0, 1), value=ignore_index)[:, 1:]
    check_ids(targets.masked_fill(targets == ignore_index, 0), vocab_size)
    return targets


def apply_plan(model, mesh, plan):
    """parallelize_module, but a name that the model does not have is a UserError, not a warning."""
    names = [name.split(".") for name, _ in model.named_modules()]
    for pattern in plan:
        parts = pattern.split(".")
        if not any(len(n) == len(parts) and all(map(fnmatch, n, parts)) for n in names):
            raise UserError(f"the plan names {pattern}, which the model does not have")
    parallelize_module(model, mesh, plan)
