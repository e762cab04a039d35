"""Slices of weights: how a layer gets one, which region of the full tensor it is, and what a model
of slices refuses.

Shapes as in `utils/__init__.py`.
"""

import inspect
import sys
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from utils.collectives import copy_to_region
from utils.llama import HEAD_NORMS, check_ids, getter, guard, mixed_in


def keep_shard(layer, dim, start, stop):
    """Replace `layer`'s weight by its slice [start, stop) along `dim`, in place.

    layer: nn.Linear or nn.Embedding. With dim 0 (output units, vocabulary rows) a bias is sliced
    too; with dim 1 (input units) it is left full. Each parameter remembers as `parameter.shard`
    what it is of the full tensor; `shard_of` reads it.
    """
    for name, full in list(layer.named_parameters(recurse=False)):
        if dim < full.dim():
            piece = full.detach().narrow(dim, start, stop - start).clone()
            region = list(shard_of(full))
            first = region[dim].start  # not 0 where `full` is a slice itself
            region[dim] = slice(first + start, first + stop)
            shard = nn.Parameter(piece, requires_grad=full.requires_grad)
            setattr(layer, name, mark_shard(shard, tuple(region), full_shape_of(full)))
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    else:
        layer.num_embeddings = len(layer.weight)


def mark_shard(parameter, region, full_shape):
    """Let a parameter, and its deep copies, remember what `shard_of` tells: its region. Returns it.

    full_shape: of the full tensor. As `ds_shape`, DeepSpeed's name, it is what PEFT knows the
    embedding by, whose prompts need it. PyTorch's own deep copy of a parameter forgets attributes.
    """
    itself = weakref.ref(parameter)  # it would not be freed at once if it held itself

    def copied(memo):
        return mark_shard(nn.Parameter.__deepcopy__(itself(), memo), region, full_shape)

    parameter.shard, parameter.ds_shape = region, full_shape
    parameter.__deepcopy__ = copied
    return parameter


def shard_of(parameter):
    """Which region of the full tensor this rank holds: a slice for each dim.

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


def full_shape_of(parameter):
    """The shape of the full tensor, of which this rank may hold a region only."""
    return getattr(parameter, "ds_shape", parameter.shape)


def is_slice(parameter):
    """Whether it is what `keep_shard` has left of a larger one."""
    return full_shape_of(parameter) != parameter.shape


class ReplicatedKVLinear(nn.Linear):
    """A linear layer that several ranks hold in full, each using its output for other heads.

    It is f applied to the weights: their gradient is the sum over these ranks, of which
    `get_kv_replica_group()` is the group.
    """

    def forward(self, x):
        group = self.get_kv_replica_group()
        bias = None if self.bias is None else copy_to_region(self.bias, group)
        return F.linear(x, copy_to_region(self.weight, group), bias)


class HeadNorm:
    """A norm of each head by itself (Qwen3's), whose weight, (D,), all ranks have.

    A rank has seen its own heads alone. So f is applied to the weight, wherever the norm reads it:
    its gradient is the sum over the ranks of `get_group()`, those that split the heads.
    """

    @property
    def weight(self):
        return copy_to_region(self._parameters["weight"], self.get_group())


def share_head_norms(model, group):
    """Make a model's norms of heads, if it has some, `HeadNorm`s of the ranks that split heads."""
    if group.size() == 1:
        return
    for layer in model.model.layers:
        for name, norm in layer.self_attn.named_children():
            if name in HEAD_NORMS:
                norm.__class__, norm.get_group = mixed_in(HeadNorm, type(norm)), getter(group)


def with_full_logits(gather):
    """A forward hook for a LlamaForCausalLM: `gather(logits)`, where no loss was asked for."""

    def hook(model, args, kwargs, output):
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        if given.get("labels") is not None:
            return output
        if isinstance(output, tuple):  # return_dict=False: logits come first
            return gather(output[0]), *output[1:]
        output.logits = gather(output.logits)
        return output

    return hook


def refuse_if_split(model):
    """Refuse a model that is split; and let this one, to be split, refuse what slices cannot do.

    That is to be saved or resized, to be clipped by PyTorch's own norm (`full_model.py` has what
    takes their place), to be scaled by a GradScaler, and to have PEFT's adapters: present ones are
    refused now, later ones at the next forward. Raises ValueError as `check_unsplit` and
    `refuse_adapters_on_slices` do.
    """
    from utils.refusals import check_first, refuse_to_clip_slices, refuse_to_scale_slices

    check_unsplit(model)
    refuse_adapters_on_slices(model)
    guard(model, refuse_adapters_on_slices)
    for module in model.modules():
        module.register_state_dict_pre_hook(refuse_state_dict)
    for owner in nn.utils, nn.utils.clip_grad:
        check_first(owner, "clip_grad_norm_", refuse_to_clip_slices)
    check_first(torch.amp.GradScaler, "unscale_", refuse_to_scale_slices)

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
    """Reject split models and subclasses, whose own forward would be lost, by a ValueError."""
    if "save_pretrained" in vars(model):
        raise ValueError("this model is tensor-parallel already")
    from utils.refusals import check_ordinary

    check_ordinary(model)


def refuse_adapters_on_slices(model):
    """ValueError for PEFT's adapters: none is right on slices of weights."""
    if "peft" in sys.modules:  # else there is no adapter
        from utils.adapters import refuse_adapters

        refuse_adapters(model)


def refuse_state_dict(model, prefix, keep_vars):
    """A hook: ValueError where a state dict would have slices by the names of full tensors."""
    if any(map(is_slice, model.parameters())):
        raise ValueError(
            "state_dict: each rank has slices only; utils.full_model.full_state_dict(model) "
            "gathers the full tensors, and named_parameters() has the slices"
        )


def local_rows(ids, weight, first, vocab_size, padding):
    """The rows of ids (B, S) that `weight` has, (B, S, H); zeros where the row is another rank's.

    weight: rows from `first` on of an embedding of `vocab_size`. padding: the id, or None, whose
    row gets no gradient, in the full model too. Raises IndexError for ids beyond the vocabulary.
    """
    check_ids(ids, vocab_size)
    stop = first + len(weight)
    elsewhere = (ids < first) | (ids >= stop)
    padding = padding - first if padding is not None and first <= padding < stop else None
    rows = F.embedding((ids - first).masked_fill(elsewhere, 0), weight, padding)
    return rows.masked_fill(elsewhere[..., None], 0)
