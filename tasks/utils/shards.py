"""Slices of weights: how a layer gets one, which region of the full tensor it is, and what a model
of slices refuses.

Shapes as in `utils/__init__.py`.
"""

import inspect
import weakref

import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from utils.collectives import copy_to_region
from utils.llama import HEAD_NORMS, check_ids, getter, guard, mixed_in

SLICES = weakref.WeakValueDictionary()  # {id: parameter} of all that `mark_shard` has marked


def keep_shard(layer, dim, start, stop):
    """Replace `layer`'s weight by its slice [start, stop) along `dim`, in place.

    layer: nn.Linear or nn.Embedding. With dim 0 (output units, vocabulary rows) a bias is sliced
    too; with dim 1 (input units) the bias is left full. Each parameter remembers its region of the
    full tensor as `parameter.shard`, which `shard_of` reads; `layer.slices` names the parameters
    that are less than the full tensor.
    """
    for name, full in list(layer.named_parameters(recurse=False)):
        if dim < full.dim():
            piece = full.detach().narrow(dim, start, stop - start).clone()
            region = list(shard_of(full))
            first = region[dim].start  # not 0 where `full` is a slice itself
            region[dim] = slice(first + start, first + stop)
            shard = nn.Parameter(piece, requires_grad=full.requires_grad)
            setattr(layer, name, mark_shard(shard, tuple(region), full_shape_of(full)))
            if is_slice(shard):
                layer.slices = {*getattr(layer, "slices", ()), name}
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    else:
        layer.num_embeddings = len(layer.weight)


def mark_shard(parameter, region, full_shape):
    """Let a parameter and its deep copies remember a region, for `shard_of`; return the parameter.

    full_shape: of the full tensor. It is kept as `ds_shape`, DeepSpeed's name, because PEFT's
    prompts find the embedding by that. PyTorch's own deep copy of a parameter forgets attributes.
    """
    itself = weakref.ref(parameter)  # a parameter that held itself would not be freed at once

    def copied(memo):
        return mark_shard(nn.Parameter.__deepcopy__(itself(), memo), region, full_shape)

    SLICES[id(parameter)] = parameter
    parameter.shard, parameter.ds_shape = region, full_shape
    parameter.__deepcopy__ = copied
    return parameter


def shard_of(parameter):
    """Return which region of the full tensor this rank holds: a slice for each dim.

    Knows DTensors, on a mesh of any number of axes, and `keep_shard`'s slices; others are full.
    """
    if isinstance(parameter, DTensor):
        region = [slice(0, size) for size in parameter.shape]
        mesh, placements = parameter.device_mesh, enumerate(parameter.placements)
        # What a plan has split, FSDP2 splits again: its placements, strided shards, come last here.
        # (PyTorch's own `__create_chunk_list__` is wrong for such regions where they are uneven.)
        for axis, placement in sorted(placements, key=lambda pair: type(pair[1]) is not Shard):
            if (dim := getattr(placement, "dim", None)) is not None:
                start, length = region[dim].start, region[dim].stop - region[dim].start
                chunk = -(-length // mesh.size(axis))  # as torch.chunk deals out
                first = min(chunk * mesh.get_local_rank(axis), length)
                region[dim] = slice(start + first, start + min(first + chunk, length))
        sizes = [part.stop - part.start for part in region]
        assert sizes == list(parameter.to_local().shape), (sizes, parameter.to_local().shape)
        return tuple(region)
    return getattr(parameter, "shard", tuple(slice(0, size) for size in parameter.shape))


def full_shape_of(parameter):
    """Return the shape of the full tensor, of which this rank may hold only a region."""
    return getattr(parameter, "ds_shape", parameter.shape)


def is_slice(parameter):
    """Tell whether a parameter is what `keep_shard` has left of a larger parameter."""
    return full_shape_of(parameter) != parameter.shape


class ReplicatedKVLinear(nn.Linear):
    """A linear layer of which several ranks hold the same weights, each for its own query heads.

    It applies f to the weights: their gradient is the sum over these ranks, whose group is
    `get_kv_replica_group()`.
    """

    def forward(self, x):
        return F.linear(x, *self.parameters_after_f())

    def parameters_after_f(self):
        group = self.get_kv_replica_group()
        bias = None if self.bias is None else copy_to_region(self.bias, group)
        return copy_to_region(self.weight, group), bias


class HeadNorm:
    """A norm of each head by itself (Qwen3's), whose weight, (D,), all ranks have.

    A rank's norm has seen only the rank's own heads. So f is applied to the weight, wherever the
    norm reads it: the weight's gradient is summed over `get_group()`, the ranks that split heads.
    (So `norm.weight` is not the parameter itself, which `named_parameters()` has.)
    """

    @property
    def weight(self):
        return copy_to_region(self._parameters["weight"], self.get_group())


def sum_head_norm_grads(model, group):
    """Turn a model's norms of heads, if any, into `HeadNorm`s. group: of ranks that split heads."""
    if group.size() == 1:
        return
    for layer in model.model.layers:
        for name, norm in layer.self_attn.named_children():
            if name in HEAD_NORMS:
                norm.__class__, norm.get_group = mixed_in(HeadNorm, type(norm)), getter(group)


def has_labels(model, args, kwargs):
    """Return whether a model's forward gets labels, by position or name."""
    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    return given.get("labels") is not None


def with_full_logits(gather):
    """Return a forward hook for a LlamaForCausalLM: `gather(logits)`, if no labels were given."""

    def hook(model, args, kwargs, output):
        if has_labels(model, args, kwargs):
            return output
        if isinstance(output, tuple):  # return_dict=False: logits come first
            return gather(output[0]), *output[1:]
        output.logits = gather(output.logits)
        return output

    return hook


def refuse_on_slices(model, ranks=1, of_heads=True, of_vocabulary=True):
    """Refuse a model that is split already; let an unsplit model refuse what slices cannot do.

    Refused are saving, PyTorch's own clipping (`full_model.py` has functions for both), resizing,
    GradScaler, wrong optimizers, and PEFT's adapters: at once or, if added later, at the next
    forward. Slices that `fully_shard` has split again are refused there, too. Raises ValueError as
    `check_unsplit`, `check_slices` and `check_layers` do, UserError as `check_ranks` does.
    """
    from guards.refusals import check_layers, check_ranks, check_slices, refuse_own_loss
    from guards.training import guard_training

    check_unsplit(model)
    check_ranks(model.config, ranks, of_heads, of_vocabulary)
    refuse_own_loss(model)
    check_slices(model)
    check_layers(model)
    guard(model, check_slices)
    for module in model.modules():
        module.register_state_dict_pre_hook(refuse_state_dict)
    guard_training(model)

    def save_pretrained(*_, **__):
        raise ValueError(
            "save_pretrained: each rank has slices only; utils.full_model.save_pretrained(model, "
            "folder) writes the full model"
        )

    def resize_token_embeddings(*_, **__):
        raise ValueError("resize_token_embeddings: each rank has slices only; resize it before")

    model.save_pretrained = save_pretrained
    model.resize_token_embeddings = resize_token_embeddings


def check_unsplit(model):
    """Raise ValueError for split models, and, as `check_ordinary`, for what is no plain Llama."""
    if "save_pretrained" in vars(model):
        raise ValueError("this model is tensor-parallel already")
    from guards.refusals import check_ordinary

    check_ordinary(model)


def refuse_state_dict(model, prefix, keep_vars):
    """Raise ValueError, as a hook, if a state dict would name slices like full tensors."""
    if any(getattr(module, "slices", ()) for module in model.modules()):
        raise ValueError(
            "state_dict: each rank has slices only; utils.full_model.full_state_dict(model) "
            "gathers the full tensors, and named_parameters() has the slices"
        )


def local_rows(ids, weight, first, vocab_size, padding):
    """Look up ids (B, S) in `weight`: (B, S, H), zeros where another rank has the row.

    weight: the rows from `first` on of an embedding of `vocab_size` rows. padding: None, or the id
    whose row gets no gradient, in the full model, too. Raises IndexError for ids of no row.
    """
    check_ids(ids, vocab_size)
    stop = first + len(weight)
    elsewhere = (ids < first) | (ids >= stop)
    padding = padding - first if padding is not None and first <= padding < stop else None
    rows = F.embedding((ids - first).masked_fill(elsewhere, 0), weight, padding)
    return rows.masked_fill(elsewhere[..., None], 0)
