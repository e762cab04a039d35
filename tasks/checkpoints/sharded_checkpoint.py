"""Checkpoints of a state that is split: each rank writes its parts, and any mesh reads them.

    folder/step-000020/rank0.safetensors    of a parameter and Adam's states the regions of rank 0
                       rank1.safetensors    (of what several ranks hold, the first one's alone)
                       record.json          who has which region; losses, learning rate; sums
                       manifest.json        SHA-256 of all of these

On several machines the folder must be one that all of them see. See `checkpoint.py`.
"""

import json
import math
import shutil

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from checkpoints.checkpoint import Checkpoints, begin, digest, finish, flush, newest
from utils.errors import UserError
from utils.gradients import local_part
from utils.shards import shard_of

STATES = "exp_avg", "exp_avg_sq"  # Adam's


class ShardedCheckpoints(Checkpoints):
    """As `Checkpoints`, of a model whose parameters are DTensors. Record: what JSON can hold."""

    def __init__(self, run, folder, result, resume):
        if resume and folder is None:
            raise UserError("--resume needs --output-dir")
        super().__init__(run, folder, result, resume)

    @staticmethod
    def load(folder):
        """(path, record, warnings) of the newest good checkpoint; None if there is none at all."""
        path, warnings = newest(folder)
        record = path and json.loads((path / "record.json").read_text())
        if record and "sums" not in record:
            raise UserError(f"{path}: written by another version of this program")
        return path and (path, record, warnings)

    def resume(self, model, optimizer, schedule):
        """Take all state from what was found, on whatever mesh that was: the losses so far."""
        run = self.run
        path, record, warnings = run.broadcast(self.found) or (None, None, [])
        for warning in warnings:
            run.print0(f"note: skipped a damaged checkpoint: {warning}")
        if record is None:
            if self.resumes:
                run.print0("note: no checkpoint yet: starting at step 0")
            return []
        step = len(record["losses"])

        def read():
            for name, parameter in model.named_parameters():
                state = {key: torch.zeros_like(parameter) for key in STATES}
                optimizer.state[parameter] = {"step": torch.tensor(float(step)), **state}
                for key, tensor in {"parameter": parameter.detach(), **state}.items():
                    region, parts = shard_of(parameter), record["parts"][name]
                    local_part(tensor).copy_(read_region(path, f"{key}.{name}", parts, region))

        run.together(read)
        saved, now = (
            torch.tensor(of) + 1e-300 for of in (record["sums"], self.sums(model, optimizer))
        )
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
                f"note: it was on {record['world_size']} ranks: what is drawn by chance (no "
                "batch is) starts anew"
            )
        run.print0(f"resumed after {step} steps")
        return record["losses"]

    def sums(self, model, optimizer):
        """Of each parameter and each of its states the sum of all squares, float64."""
        local = []
        for parameter in model.parameters():
            mesh, kinds = parameter.device_mesh, enumerate(parameter.placements)
            apart = math.prod(mesh.size(axis) for axis, kind in kinds if not kind.is_replicate())
            for tensor in (
                parameter.detach(),
                *(optimizer.state[parameter][key] for key in STATES),
            ):
                local.append(local_part(tensor).double().square().sum() * apart)
        return (self.run.gather(torch.stack(local)).sum(0) / self.run.world_size).tolist()

    def full_state(self):
        """What was found, {name: {key: tensor}}: each parameter, and Adam's states of it, full."""
        path, record, _ = self.found
        state = {}
        for name, parts in record["parts"].items():
            stops = zip(*([stop for _, stop in region] for _, region in parts), strict=True)
            region = [slice(0, max(of_dim)) for of_dim in stops]
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
        local, parts, tensors = {}, {}, {}
        for name, parameter in model.named_parameters():
            local[name] = [[part.start, part.stop] for part in shard_of(parameter)]
        for rank, regions in enumerate(run.gather_objects(local)):
            for name, region in regions.items():
                if region not in [other for _, other in parts.setdefault(name, [])]:
                    parts[name].append([rank, region])
        for name, parameter in model.named_parameters():
            if [run.rank, local[name]] in parts[name]:
                state = {key: optimizer.state[parameter][key] for key in STATES}
                for key, tensor in {"parameter": parameter, **state}.items():
                    tensors[f"{key}.{name}"] = local_part(tensor.detach()).cpu().contiguous()
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

        def write():
            try:
                save_file(tensors, part / name)
            except Exception as error:  # safetensors has an error of its own for a full disk
                raise OSError(str(error)) from error
            flush(part / name)
            return name, digest(part / name)

        try:
            part = run.broadcast(run.together(start))
            digests = dict(run.gather_objects(run.together(write)))
            run.together(lambda: run.rank == 0 and finish(part, step, record, digests))
            run.print0(f"saved {self.folder}/step-{step:06}")
        except UserError as error:
            if part and run.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            run.print0(f"note: no checkpoint at step {step}: {error}")


def read_region(path, key, parts, region):
    """A region, a slice for each dim, of a tensor of which ranks have written parts.

    parts: [[rank, its region as [[start, stop] for each dim]], ...], no two with the same values.
    Raises OSError where they do not have all of it, or cannot be read.
    """
    shape, result = [local.stop - local.start for local in region], None
    left = math.prod(shape)
    for rank, theirs in parts:
        both = [
            (max(local.start, first), min(local.stop, stop))
            for local, (first, stop) in zip(region, theirs, strict=True)
        ]
        if all(first < stop for first, stop in both):
            there = [(slice(a - of[0], b - of[0])) for (a, b), of in zip(both, theirs, strict=True)]
            here = [slice(a - m.start, b - m.start) for (a, b), m in zip(both, region, strict=True)]
            try:
                with safe_open(path / f"rank{rank}.safetensors", "pt") as file:
                    piece = file.get_slice(key)[tuple(there)]
            except Exception as error:  # safetensors has errors of its own
                raise OSError(f"{path}: {key}: {error}") from error
            result = piece.new_empty(shape) if result is None else result
            result[tuple(here)] = piece
            left -= piece.numel()
    if left:
        raise OSError(f"{path}: {key}: not all of it is there")
    return torch.empty(shape) if result is None else result
