"""Checkpoints of a state that is split: each rank writes its parts, and any mesh reads them.

    folder/step-000020/rank0.safetensors    rank 0's regions of parameters and of Adam's states
                       rank1.safetensors    (what several ranks hold, only the first one writes)
                       record.json          ranks' regions; losses, learning rate; sums of squares
                       manifest.json        SHA-256 of all of these

On several machines the folder must be one that all of them see. See `checkpoint.py`.

`save_training_state` and `load_training_state` are for a program of one's own, of any technique.
(`torch.distributed.checkpoint` takes ordinary tensors of one name for replicas, and would keep one
rank's slice alone. DTensors would tell it of slices, but not of uneven heads or shared KV heads.)
"""

import json
import math
import shutil
from itertools import chain, zip_longest
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.optim import ZeroRedundancyOptimizer

from checkpoints.checkpoint import (
    Checkpoints,
    begin,
    damage,
    digest,
    finish,
    flush,
    list_checkpoints,
    newest,
    step_of,
)
from utils.errors import UserError
from utils.full_model import gather_objects, parameters_of, rank_in
from utils.gradients import local_part
from utils.llama import BY_LENGTH, rope_of, window_of
from utils.shards import full_shape_of, shard_of

STATES = "exp_avg", "exp_avg_sq"  # Adam's
# Settings of an optimizer's groups that are not saved: its parameters, and kernels that it uses.
OF_THE_PROGRAM = "params", "param_names", "foreach", "fused", "capturable", "differentiable"


class ShardedCheckpoints(Checkpoints):
    """`Checkpoints` for a model whose parameters are DTensors. All but tensors is kept as JSON."""

    def __init__(self, run, folder, result, resume):
        if resume and folder is None:
            raise UserError("--resume needs --output-dir")
        super().__init__(run, folder, result, resume)

    @staticmethod
    def load(folder):
        """Return (path, record, warnings) of the newest good checkpoint; None if there is none."""
        path, warnings = newest(folder)
        record = path and json.loads((path / "record.json").read_text())
        if record and "sums" not in record:
            raise UserError(f"{path}: written by another version of this program")
        return path and (path, record, warnings)

    def resume(self, model, optimizer, schedule):
        """Set all state as found, from whatever mesh saved it. Return the losses so far."""
        run = self.run
        path, record, warnings = run.broadcast(self.found) or (None, None, [])
        for warning in warnings:
            run.print0(f"note: skipped a damaged checkpoint: {warning}")
        if record is None:
            if self.resumes:
                run.print0("note: no checkpoint yet: starting at step 0")
            return []
        step = len(record["losses"])
        states = {name: (STATES, {"step": float(step)}) for name in record["parts"]}
        run.together(lambda: read_state(path, model, optimizer, record["parts"], states))
        sums = record["sums"], self.sums(model, optimizer)
        saved, now = (torch.tensor(values) + 1e-300 for values in sums)
        run.check("state as it was saved", [(now / saved, torch.ones_like(saved))], tolerance=1e-9)
        schedule.load_state_dict(record["schedule"])
        optimizer.param_groups[0]["lr"] = record["lr"]
        if record["world_size"] == run.world_size:
            with safe_open(path / f"rank{run.rank}.safetensors", "pt") as file:
                for name, generator in self.generators.items():
                    if name not in file.keys():  # noqa: SIM118  (it was on another device)
                        continue
                    generator.set_rng_state(file.get_tensor(name).clone())
        else:
            run.print0(
                f"note: it was on {record['world_size']} ranks: random states start anew (no "
                "batch needs them)"
            )
        run.print0(f"resumed after {step} steps")
        return record["losses"]

    def sums(self, model, optimizer):
        """Return `sum_by_place`, float64, of each parameter and of each of its states."""
        local = []
        for parameter in model.parameters():
            mesh, placements = parameter.device_mesh, enumerate(parameter.placements)
            apart = math.prod(
                mesh.size(axis) for axis, placement in placements if not placement.is_replicate()
            )
            for tensor in (
                parameter.detach(),
                *(optimizer.state[parameter][key] for key in STATES),
            ):
                local.append(sum_by_place(local_part(tensor), shard_of(parameter)) * apart)
        return (self.run.gather(torch.stack(local)).sum(0) / self.run.world_size).tolist()

    def full_state(self):
        """Return what was found, {name: {key: tensor}}: full parameters, and their Adam states."""
        path, record, _ = self.found
        state = {}
        for name, parts in record["parts"].items():
            region = [slice(0, size) for size in full_shape(parts)]
            state[name] = {
                key: read_region(path, f"{key}.{name}", parts, region)
                for key in ("parameter", *STATES)
            }
        return state

    def save(self, model, optimizer, schedule, losses):
        """Write a checkpoint, all ranks together, whole or not at all; see `Checkpoints.save`."""
        run, step = self.run, len(losses)
        if self.folder is None:
            return
        parts = parts_of(run.gather_objects(regions_of(model)))
        tensors, _ = state_of(model, optimizer, parts, run.rank)
        tensors |= {name: generator.get_rng_state() for name, generator in self.generators.items()}
        record = {"same": self.same, "losses": losses, "world_size": run.world_size}
        record |= {"schedule": schedule.state_dict(), "lr": schedule.get_last_lr()[0]}
        record |= {"parts": parts, "sums": self.sums(model, optimizer)}
        name, part = f"rank{run.rank}.safetensors", None

        def start():
            if run.rank == 0:
                self.claim.check()
                return begin(self.folder, step)
            return None

        try:
            part = run.broadcast(run.together(start))
            written = run.together(lambda: write_part(part / name, tensors))
            digests = dict(run.gather_objects(written))
            run.together(lambda: run.rank == 0 and finish(part, step, record, digests))
            run.print0(f"saved {self.folder}/step-{step:06}")
        except UserError as error:
            if part and run.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            run.print0(f"note: no checkpoint at step {step}: {error}")


def sum_by_place(tensor, region):
    """Sum a tensor's squares, float64, each weighed by its sign and its place in the full tensor.

    So other signs, or the same numbers elsewhere, give another sum. region: see `shard_of`.
    """
    x = tensor.double()
    total = x * (x + x.abs() / 2)
    for part in reversed(region):
        places = torch.arange(part.start, part.stop, dtype=total.dtype, device=total.device)
        total = total @ (1 + places * math.sqrt(2) % 1)
    return total


# ---------------------------------------------------------------- what ranks have of a state


def regions_of(model):
    """Return {name: [[start, stop] for each dim]} of this rank's parameters."""
    return {
        name: [[part.start, part.stop] for part in shard_of(parameter)]
        for name, parameter in parameters_of(model).items()
    }


def parts_of(everyone):
    """Return {name: [[rank, region], ...]}, no region twice: which rank writes what.

    everyone: each rank's `regions_of`.
    """
    parts = {}
    for rank, regions in enumerate(everyone):
        for name, region in regions.items():
            if region not in [other for _, other in parts.setdefault(name, [])]:
                parts[name].append([rank, region])
    return parts


def full_shape(parts):
    """Return the shape of the full tensor of which these are the parts: [[rank, region], ...]."""
    stops = zip(*([stop for _, stop in region] for _, region in parts), strict=True)
    return [max(of_dim) for of_dim in stops]


def state_of(model, optimizer, parts, rank):
    """Return ({key.name: tensor} that this rank writes, {name: (keys, {key: number})}).

    For each parameter there are the parameter itself (key "parameter") and all that the optimizer
    keeps of it: tensors, under `keys`, that are split as the parameter is, and numbers, such as
    Adam's step.
    """
    tensors, states, regions = {}, {}, regions_of(model)
    for name, parameter in parameters_of(model).items():
        state = optimizer.state.get(parameter, {})
        split = {key: value for key, value in state.items() if torch.is_tensor(value)}
        # A scalar parameter's states are scalars, and count as split; Adam's step does not.
        single = parameter.dim() == 0
        split = {k: x for k, x in split.items() if x.dim() or (single and k != "step")}
        for key, tensor in split.items():
            if tensor.shape != parameter.shape:
                shapes = f"{list(tensor.shape)}, the parameter {list(parameter.shape)}"
                raise ValueError(f"{type(optimizer).__name__}: {key} of {name} has shape {shapes}")
        numbers = {key: float(value) for key, value in state.items() if key not in split}
        states[name] = list(split), numbers
        if [rank, regions[name]] in parts[name]:
            for key, tensor in {"parameter": parameter, **split}.items():
                tensors[f"{key}.{name}"] = local_part(tensor.detach()).cpu().contiguous()
    return tensors, states


def write_part(path, tensors):
    """Write a rank's file to the disk. Return (its name, its SHA-256)."""
    try:
        save_file(tensors, path)
    except Exception as error:  # safetensors has an error of its own for a full disk
        raise OSError(str(error)) from error
    flush(path)
    return path.name, digest(path)


@torch.no_grad()
def read_state(path, model, optimizer, parts, states):
    """Fill in this rank's parameters, and the optimizer's states of them; see `state_of`."""
    # Fused and capturable kernels, which never wait for the device, want Adam's step there.
    on_device = {
        parameter
        for settings in optimizer.param_groups
        for parameter in settings["params"]
        if settings.get("fused") or settings.get("capturable")
    }
    for name, parameter in parameters_of(model).items():
        keys, numbers = states[name]
        optimizer.state.pop(parameter, None)  # states of steps taken before do not count
        device = parameter.device if parameter in on_device else torch.device("cpu")
        if keys or numbers:
            # As PyTorch makes Adam's step: in bfloat16 it could not count beyond 256.
            wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
            state = {k: torch.tensor(x, dtype=wide, device=device) for k, x in numbers.items()}
            optimizer.state[parameter] = state
        for key in "parameter", *keys:
            values = read_region(path, f"{key}.{name}", parts[name], shard_of(parameter))
            tensor = parameter
            if key != "parameter":
                tensor = torch.zeros_like(parameter, dtype=values.dtype)
                optimizer.state[parameter][key] = tensor
            local_part(tensor.detach()).copy_(values)


def read_region(path, key, parts, region):
    """Read a region of a tensor, a slice for each dim, from the parts that ranks have written.

    parts: [[rank, its region as [[start, stop] for each dim]], ...], no two with the same values.
    Raises OSError where the parts lack some of it, or cannot be read.
    """
    shape, result = [local.stop - local.start for local in region], None
    left = math.prod(shape)
    for rank, theirs in parts:
        both = [
            (max(local.start, first), min(local.stop, stop))
            for local, (first, stop) in zip(region, theirs, strict=True)
        ]
        if all(first < stop for first, stop in both):
            there = [slice(a - m[0], b - m[0]) for (a, b), m in zip(both, theirs, strict=True)]
            here = [slice(a - m.start, b - m.start) for (a, b), m in zip(both, region, strict=True)]
            piece = read_piece(path, rank, key, tuple(there))
            result = piece.new_empty(shape) if result is None else result
            result[tuple(here)] = piece
            left -= piece.numel()
    if left:
        raise OSError(f"{path}: {key}: not all of it is there")
    if result is None:  # an empty region: the first part tells the dtype
        result = read_piece(path, parts[0][0], key, slice(0, 0)).new_empty(shape)
    return result


def read_piece(path, rank, key, place):
    """Read a slice, or a tuple of slices, of a tensor that a rank has written."""
    try:
        with safe_open(path / f"rank{rank}.safetensors", "pt") as file:
            return file.get_slice(key)[place]
    except Exception as error:  # safetensors has errors of its own
        raise OSError(f"{path}: {key}: {error}") from error


# ---------------------------------------------------------------- in a program of one's own


def save_training_state(model, optimizer, folder, step, more=None, group=None, keep=2):
    """Write folder/step-N, the state after `step` steps, whole or not at all; `keep` of them stay.

    All ranks of `group`, by default all there are, call it together. more: anything that JSON can
    hold, such as a scheduler's state_dict(). Raises OSError, on all ranks, where it cannot be
    written; ValueError for `more` that JSON would change (keys that are no texts, as of
    MultiStepLR), for a folder that has a later step, for an optimizer that keeps only a share
    of the states on each rank (ZeRO-1), for one with parameters that are not the model's, and for
    one whose states have other shapes than its parameters.
    """
    if not isinstance(step, int) or step < 0 or keep < 1:
        raise ValueError(f"step {step!r}, keep {keep!r}: step from 0, keep from 1 on")
    check_json(more)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        raise ValueError("ZeroRedundancyOptimizer: a rank has states of its share alone; use FSDP2")
    own = set(parameters_of(model).values())
    foreign = any(p not in own for settings in optimizer.param_groups for p in settings["params"])
    if any(gather_objects(foreign, group)):
        raise ValueError("the optimizer has other parameters: was it made before the split?")
    folder, rank = Path(folder), rank_in(group)
    parts = parts_of(gather_objects(regions_of(model), group))
    tensors, states = state_of(model, optimizer, parts, rank)
    record = {"step": step, "parts": parts, "more": more, "states": {}}
    record["function"] = function_of(full_config(model))
    for of_rank in gather_objects(states, group):
        record["states"] |= of_rank
    record["optimizer"] = type(optimizer).__name__
    settings = [
        {
            key: value.item() if torch.is_tensor(value) else value
            for key, value in of_group.items()
            if key not in OF_THE_PROGRAM
        }
        for of_group in optimizer.param_groups
    ]
    record["settings"] = max(gather_objects(settings, group), key=len)
    record["groups"] = names_by_group(model, optimizer, group)

    def start():
        folder.mkdir(parents=True, exist_ok=True)
        later = [path for path in list_checkpoints(folder) if step_of(path) > step]
        if good := next((path for path in later if not damage(path)), None):
            raise UserError(f"{good} is of a later step than {step}: name another folder")
        return begin(folder, step)

    part = together(lambda: start() if rank == 0 else None, group)[0]
    try:
        written = together(lambda: write_part(part / f"rank{rank}.safetensors", tensors), group)
        together(lambda: rank == 0 and finish(part, step, record, dict(written), keep), group)
    finally:
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)  # what was not finished


def load_training_state(model, optimizer, folder, group=None):
    """Fill in the newest good checkpoint of `save_training_state`; return (step, more).

    Without a checkpoint it fills in nothing, and returns None. The parameters may be split over any
    ranks by any technique, or not at all. The optimizer's settings, such as its learning rate,
    become what they were, too. Raises UserError, on all ranks, if every checkpoint is damaged, or
    it is of another model or optimizer.
    """

    def find():
        path, warnings = newest(Path(folder))
        for warning in warnings:
            print(f"note: skipped a damaged checkpoint: {warning}", flush=True)
        return path and (path, json.loads((path / "record.json").read_text()))

    found = together(lambda: find() if rank_in(group) == 0 else None, group)[0]
    if found is None:
        return None
    path, record = found
    local = {name: list(full_shape_of(p)) for name, p in parameters_of(model).items()}
    shapes = {}  # of all ranks' parameters
    for of_rank in gather_objects(local, group):
        shapes |= of_rank
    saved = {name: full_shape(parts) for name, parts in record["parts"].items()}
    if "states" not in record or saved != shapes:
        raise UserError(f"{path}: of another model")
    now = function_of(full_config(model))
    for name, value in record.get("function", {}).items():
        if name in now and now[name] != value:
            raise UserError(f"{path}: of another model: {name} was {value}, not {now[name]}")
    if record["optimizer"] != type(optimizer).__name__:
        raise UserError(f"{path}: of the optimizer {record['optimizer']}")
    if names_by_group(model, optimizer, group) != record["groups"]:
        raise UserError(f"{path}: the optimizer had other groups of parameters")
    together(lambda: read_state(path, model, optimizer, record["parts"], record["states"]), group)
    # (A rank may have fewer groups than another: their names are the same, as seen above.)
    for one, settings in zip(optimizer.param_groups, record["settings"], strict=False):
        for key, value in settings.items():
            if torch.is_tensor(one.get(key)):
                one[key].fill_(value)
            else:
                one[key] = tuple(value) if isinstance(one.get(key), tuple) else value
    return record["step"], record["more"]


def check_json(value):
    """Raise ValueError for a value that JSON gives back as another, TypeError if it cannot hold it.

    Tuples may become lists.
    """
    json.dumps(value)
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"more: JSON makes texts of the keys {wrong[:3]}")
        for one in value.values():
            check_json(one)
    elif isinstance(value, list | tuple):
        for one in value:
            check_json(one)


def full_config(model):
    """Return the configuration of the full model, of which this may be a stage; None without."""
    return getattr(model, "original_settings", (getattr(model, "config", None),))[0]


def function_of(config):
    """Return {setting: value} of a configuration: settings that change what its weights compute.

    Values are as JSON has them, the same for transformers 4 and 5. {} without a configuration.
    """
    if config is None:
        return {}
    rope = dict(rope_of(config))
    theta = rope.pop("rope_theta", getattr(config, "rope_theta", None))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    names = "model_type", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "hidden_act"
    names += "layer_types", "no_rope_layers"  # which layers have a window, and which RoPE
    found = {name: getattr(config, name, None) for name in names}
    found |= {"rope_theta": theta, "rope": rope, "sliding_window": window_of(config)}
    if rope["rope_type"] in (*BY_LENGTH, "yarn"):  # their tables may depend on it
        found["max_position_embeddings"] = config.max_position_embeddings
    return json.loads(json.dumps(found))


def names_by_group(model, optimizer, group):
    """Return the sorted names of all ranks' parameters in each of the optimizer's groups."""
    names = {parameter: name for name, parameter in parameters_of(model).items()}
    local = [
        [names[parameter] for parameter in settings["params"] if parameter in names]
        for settings in optimizer.param_groups
    ]
    everyone = zip_longest(*gather_objects(local, group), fillvalue=())
    return [sorted(set(chain.from_iterable(of_ranks))) for of_ranks in everyone]


def together(function, group):
    """Call function() on every rank, and return all results in a list.

    What one rank raises, all raise, as UserError or OSError.
    """
    value, error = None, None
    try:
        value = function()
    except Exception as raised:
        error = raised
    said = None if error is None else (isinstance(error, UserError), str(error))
    everyone = gather_objects((value, said), group)
    failed = [said for _, said in everyone if said]
    if failed:
        by_user, message = failed[0]
        raise (UserError if by_user else OSError)(message) from error
    return [value for value, _ in everyone]
