"""The full model that a split one stands for: its gradients' norm, its weights, its folder.

Every parameter knows which region of the full tensor this rank has (`shards.shard_of`), and nothing
else is needed here: not which technique split the model, nor along how many axes of a mesh. All
ranks of `group`, by default all there are, call these functions together. A region on several ranks
counts once, and is taken from the first of these ranks.
"""

import hashlib
import json
import math
import os
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers.utils.hub import convert_file_size_to_int

from utils.collectives import all_gather
from utils.gradients import local_part
from utils.settings import settings_of
from utils.shards import full_shape_of, shard_of


def parameters_of(model):
    """Return {name: parameter}, by the names that the model has without PyTorch's wrappers.

    First reshards FSDP2's modules: a forward without a backward leaves the root's parameters full.
    Raises ValueError for FSDP1's parts, which do not know what they are of, and as
    `refuse_lost_slices` does.
    """
    from guards.refusals import refuse_lost_slices

    refuse_lost_slices(model)
    if any(getattr(parameter, "_fsdp_flattened", False) for parameter in model.parameters()):
        raise ValueError("FSDP1's parts do not say what they are of: use fully_shard, FSDP2")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    of_wrappers = r"_orig_mod\.|_checkpoint_wrapped_module\."  # torch.compile, checkpoint_wrapper
    return {re.sub(of_wrappers, "", name): p for name, p in model.named_parameters()}


def rank_in(group):
    """Return this rank's number in `group`, by default in all; 0 without torch.distributed."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def gather_objects(value, group):
    """Gather every rank's value, in a list."""
    if not dist.is_initialized():
        return [value]
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


# ---------------------------------------------------------------- gradients


def clip_grad_norm_(model, max_norm, group=None):
    """Scale all gradients in place so that the full model's have a norm of at most `max_norm`.

    It takes the place of `torch.nn.utils.clip_grad_norm_`, by which each rank would use the norm of
    its own slices. Returns the norm before the scaling; raises ValueError as `grad_norm` does.
    """
    norm = grad_norm(model, group)  # which also reshards FSDP2's units
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # PyTorch's own formula
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                grad = local_part(parameter.grad)
                grad.mul_(scale.to(grad.device, torch.promote_types(grad.dtype, torch.float32)))
    return norm


@torch.no_grad()
def grad_norm(model, group=None):
    """Return the 2-norm of all gradients of the full model: float64, the same bits on all ranks.

    Raises ValueError where ranks that have the same part of a parameter have different gradients
    for it: gradients of their own tokens or samples, which are not summed yet.
    """
    named = parameters_of(model).items()
    counted = [(name, p) for name, p in named if p.requires_grad or p.grad is not None]
    norms = {name_of_part(name, p): norm_of(p) for name, p in counted}
    # (Of a pipeline's stage that trains nothing, too: others gather by its device's collectives.)
    device = next((p.device for _, p in named), torch.device("cpu"))
    first = {}  # {part: its norm on the first rank that has this part}
    for table in gather_tables(norms, device, group):
        for part, norm in table:
            expected = first.setdefault(part, norm)
            if not math.isfinite(norm):
                first[part] = norm  # on any rank, so that the result is not finite either
            # (Ranks that compute the same by different kernels may round differently. Where a sum
            # was left out, norms differ by more. A norm that is not finite is left to the caller.)
            if abs(norm - expected) > 1e-2 * max(norm, expected):
                of = {digest_of(part): part for part in norms}.get(part, "another rank's parameter")
                raise ValueError(
                    f"gradients of {of} differ between ranks that all have it: sum or average "
                    "them first (sum_gradients)"
                )
    total = torch.tensor([*first.values(), 0.0], dtype=torch.float64)
    return total.square().sum().sqrt().to(device)


def name_of_part(name, parameter):
    """Return a text that is the same on all ranks that have the same region of a parameter."""
    return f"{name} {[(part.start, part.stop) for part in shard_of(parameter)]}"


def norm_of(parameter):
    """Return the norm of this rank's part of the gradient; 0 where there is no gradient."""
    if parameter.grad is None:
        return torch.zeros((), dtype=torch.float64, device=parameter.device)
    grad = local_part(parameter.grad, parameter)
    wide = torch.promote_types(grad.dtype, torch.float32)
    return torch.linalg.vector_norm(grad, dtype=wide).double()


def digest_of(part):
    """Return 64 bits that stand for a part's name, so that a table of names is a tensor."""
    digest = hashlib.sha256(part.encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def gather_tables(norms, device, group):
    """Yield each rank's [(digest of a part, norm)], from its {part: norm}; send 16 bytes a part."""
    digests = torch.tensor([digest_of(part) for part in norms], dtype=torch.int64, device=device)
    one_more = digests.new_zeros((), dtype=torch.float64)  # for there may be no norm
    values = torch.stack([*norms.values(), one_more])[:-1]
    table = torch.stack([digests, values.view(torch.int64)], dim=1)
    tables = [table]
    if dist.is_initialized():
        group = group or dist.group.WORLD
        counts = all_gather(torch.tensor(len(table), device=device), group).tolist()
        padded = table.new_zeros(max(counts), 2)
        padded[: len(table)] = table
        everyone = all_gather(padded, group)
        tables = [one[:count] for one, count in zip(everyone, counts, strict=True)]
    for one in tables:
        parts, values = one.cpu().unbind(1)
        values = values.contiguous().view(torch.float64)
        yield list(zip(parts.tolist(), values.tolist(), strict=True))


# ---------------------------------------------------------------- weights


@dataclass(frozen=True)
class Described:
    """A full parameter. parts: {region: the rank to take it from}; region: (start, stop) by dim."""

    shape: tuple
    dtype: torch.dtype
    parts: dict

    @property
    def nbytes(self):
        return prod(self.shape) * self.dtype.itemsize


def describe(model, group=None):
    """Return {name: `Described`} of all parameters of the full model, the same on all ranks.

    Raises ValueError, on all ranks, for a parameter that the ranks together do not have in full.
    """
    local = {}
    for name, parameter in parameters_of(model).items():
        region = tuple((part.start, part.stop) for part in shard_of(parameter))
        local[name] = tuple(full_shape_of(parameter)), parameter.dtype, region
    found = {}
    for rank, parameters in enumerate(gather_objects(local, group)):
        for name, (shape, dtype, region) in parameters.items():
            one = found.setdefault(name, Described(shape, dtype, {}))
            if all(start < stop for start, stop in region):
                one.parts.setdefault(region, rank)
    for name, one in found.items():
        if sum(prod(stop - start for start, stop in part) for part in one.parts) != prod(one.shape):
            raise ValueError(f"{name}: these ranks do not have all of it")
    return found


@torch.no_grad()
def full_tensors(model, found, group=None):
    """Yield (name, full tensor), one after the other, on the CPU of rank 0; elsewhere (name, None).

    found: what `describe` returned. No rank ever has more than one full tensor.
    """
    parameters = parameters_of(model)
    rank, group = 0, group or (dist.group.WORLD if dist.is_initialized() else None)
    if group:
        rank = group.rank()
    for name, one in found.items():
        full = torch.empty(one.shape, dtype=one.dtype) if rank == 0 else None
        for region, holder in one.parts.items():
            piece = None
            if rank == holder:
                piece = local_part(parameters[name]).detach()
            if holder != 0 and rank in (0, holder):
                piece = pass_to_first(piece, region, one.dtype, holder, group)
            if rank == 0:
                full[tuple(slice(*part) for part in region)] = piece.cpu()
        yield name, full
        full = piece = None  # else they would be there beside the next


def pass_to_first(piece, region, dtype, holder, group):
    """Send a piece from rank `holder` to rank 0; return it there."""
    by_nccl = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if by_nccl else torch.device("cpu")
    first, source = (dist.get_global_rank(group, rank) for rank in (0, holder))
    if piece is not None:
        dist.send(piece.to(device).contiguous(), first, group=group)
        return None
    shape = [stop - start for start, stop in region]
    received = torch.empty(shape, dtype=dtype, device=device)
    dist.recv(received, source, group=group)
    return received


def full_state_dict(model, group=None):
    """Return {name: tensor} of the full model's parameters, on the CPU of rank 0; elsewhere {}.

    They are those of `model.state_dict()`, were the model not split; tied weights have one name.
    """
    tensors = full_tensors(model, describe(model, group), group)
    return {name: tensor for name, tensor in tensors if tensor is not None}


# ---------------------------------------------------------------- a folder

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
INDEX = "model.safetensors.index.json"


def save_pretrained(model, folder, max_shard_size="5GB", group=None):
    """Write, on rank 0, the folder that transformers' `save_pretrained` writes of the full model.

    It has weights, configuration and generation settings. Weights are in safetensors, in several
    files with an index if they exceed `max_shard_size` (bytes, or a text such as "5GB"). A tensor
    is gathered, written and forgotten before the next, so that no rank needs room for the model.
    Weights' files get their names at the end, when all are complete; settings are overwritten in
    place just before. If weights cannot be written, all earlier files are still there, and all
    ranks raise OSError. Of a job that is killed while names are given, nothing can be loaded.

    Of a PEFT model only the adapter is written, by PEFT: virtual tokens, or, if the model's weights
    are full on each rank, any adapter. Raises ValueError for other adapters, and as `describe`
    does.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile(model)
    # (PEFT 0.14 leaves `peft_config` on a model from which it has removed the adapters.)
    adapters = any(type(module).__module__.startswith("peft.") for module in model.modules())
    is_adapter = adapters and hasattr(model, "peft_config")
    if not is_adapter:
        library_class(model)
    folder, found = Path(folder), describe(model, group)
    rank = rank_in(group)
    if is_adapter:
        virtual = all(config.is_prompt_learning for config in model.peft_config.values())
        split = [name for name, one in found.items() if len(one.parts) > 1]
        if any("prompt_encoder" in name for name in split) or (split and not virtual):
            raise ValueError("an adapter in layers that are split: only whole weights can have one")
        if any(gather_objects(parameters_of(model).keys() != found.keys(), group)):
            raise ValueError("an adapter of layers that are on several ranks: rank 0 has a part")
        # PEFT would ask for the state of the model, of which virtual tokens are no part.
        given = {"state_dict": {}, "save_embedding_layers": False} if split else {}
        error = attempt(lambda: model.save_pretrained(folder, **given)) if rank == 0 else None
        return raise_together(error, folder, group)
    files, error = into_files(found, convert_file_size_to_int(max_shard_size)), None
    tensors = full_tensors(model, found, group)
    if rank == 0:
        error = attempt(lambda: write_all(model, folder, files, found, tensors))
    for _ in tensors:  # on other ranks, and after an error: else a rank would wait for a piece
        pass
    return raise_together(error, folder, group)


def attempt(function):
    """Call a function; return the exception that it raised, or None."""
    try:
        function()
    except Exception as error:
        return error
    return None


def raise_together(error, folder, group):
    """Raise OSError on all ranks if there was an error on rank 0."""
    said = [None if error is None else f"{folder}: not written ({error})"]
    if dist.is_initialized():
        dist.broadcast_object_list(said, dist.get_global_rank(group or dist.group.WORLD, 0), group)
    if said[0]:
        raise OSError(said[0]) from error


def into_files(found, max_shard_size):
    """Return {file: its tensors' names}; a file above max_shard_size has a single tensor."""
    groups, room = [], 0
    for name, one in found.items():
        if one.nbytes > room or not groups:
            groups.append([])
            room = max_shard_size
        groups[-1].append(name)
        room -= one.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{i:05}-of-{count:05}.safetensors": names for i, names in enumerate(groups, 1)}


def write_all(model, folder, files, found, tensors):
    """Write weights under other names, overwrite the settings, and rename the weights' files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}  # {name: its path so far}
    try:
        for name, names in files.items():
            written[name] = folder / f"{name}.part"
            write_safetensors(written[name], {name: found[name] for name in names}, tensors)
        if len(files) > 1:
            written[INDEX] = folder / f"{INDEX}.part"
            where = {name: file for file, names in files.items() for name in names}
            size = sum(one.nbytes for one in found.values())
            index = {"metadata": {"total_size": size}, "weight_map": where}
            written[INDEX].write_text(json.dumps(index, indent=2) + "\n")
        write_settings(model, folder, next(iter(found.values())).dtype)
        # An earlier model's files would be read beside these. The index goes first, and a new one
        # comes last: it never names files of two models.
        (folder / INDEX).unlink(missing_ok=True)
        for earlier in folder.iterdir():
            is_of_model = re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", earlier.name)
            if is_of_model and earlier.name not in written:
                earlier.unlink()
        for name, part in written.items():
            os.replace(part, folder / name)
    finally:
        for part in written.values():
            part.unlink(missing_ok=True)


def write_safetensors(path, found, tensors):
    """Write a safetensors file, tensor by tensor. found: {name: `Described`}, in their order.

    The library's own writer wants all tensors at once. The format is a length, a header of JSON,
    and the tensors' bytes (https://huggingface.co/docs/safetensors).
    """
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, one in found.items():
        stop = offset + one.nbytes
        described = {"dtype": DTYPES[one.dtype], "shape": one.shape, "data_offsets": [offset, stop]}
        header[name], offset = described, stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for expected in found:
            name, tensor = next(tensors)
            assert name == expected, (name, expected)
            file.write(tensor.view(torch.uint8).numpy())
            del tensor
        file.flush()
        os.fsync(file.fileno())


def library_class(model):
    """Return a model's class in transformers, without what a technique has mixed into it.

    Raises ValueError for a model of another library.
    """
    for base in type(model).__mro__:
        if base.__module__.startswith("transformers."):
            return base
    raise ValueError(f"{type(model).__name__}: not a model of transformers; give the one inside")


def write_settings(model, folder, dtype):
    """Write config.json and generation_config.json, as the full model has them."""
    config, generation = settings_of(model)
    config.architectures = [library_class(model).__name__]
    # transformers 4 has another name for the dtype.
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)
    config.save_pretrained(folder)
    if generation is not None:  # a backbone alone, or a classifier, has none
        generation.save_pretrained(folder)
