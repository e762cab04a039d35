"""Checkpoints that survive what happens to jobs: whole or not there, verified, two of them kept.

They are of a training whose state all ranks have alike: rank 0 writes it, and reads it for all.

    folder/step-000020/state.safetensors    tensors
                       record.json          everything else
                       manifest.json        SHA-256 of both files, so that no flipped bit is loaded

A checkpoint is written beside its final place, flushed to the disk and renamed, so a job killed at
any moment leaves either all of it or nothing that is ever read. Nothing is unpickled.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file

from utils.errors import UserError

STATE, RECORD, MANIFEST = "state.safetensors", "record.json", "manifest.json"


class Claim:
    """An output folder, made if need be, in which no other job writes while this process lives.

    Raises OSError where it cannot be written, filelock.Timeout while another job has it.
    """

    def __init__(self, folder, patience_s=0):
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        self.path = folder / ".lock"
        self.lock = FileLock(self.path)  # the system frees it when the process ends
        self.lock.acquire(timeout=patience_s)
        self.inode = os.stat(self.path).st_ino

    def check(self):
        """Raise OSError if the folder was removed: one of this name may be another job's by now."""
        if not self.path.exists() or os.stat(self.path).st_ino != self.inode:
            raise OSError(f"{self.path.parent} was removed while this job wrote there")


class Checkpoints:
    """The output folder of one training, which is claimed before any work.

    folder: a Path, or None for no output. result: the name of what will be written there at the
    end. `resumes`: whether to go on from the newest checkpoint, because it is asked for or because
    torchrun has started these ranks again, and the folder was theirs before. All ranks call every
    method together. Raises UserError, on all of them, where the folder cannot be written, another
    job writes there, checkpoints are there that nobody asked to go on from, or a result is there
    without checkpoints, or is the --model itself.
    """

    load = staticmethod(lambda folder: load_checkpoint(folder))

    def __init__(self, run, folder, result, resume):
        self.run, self.folder, self.result = run, folder, folder and folder / result
        self.model, self.same, self.found = run.source.directory, None, None
        on_gpu = run.device.type == "cuda"
        self.generators = {"random.cpu": torch} | ({"random.cuda": torch.cuda} if on_gpu else {})
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        writes = folder is not None and run.rank == 0
        again = run.broadcast(run.together(lambda: writes and self.open(restart, resume)))
        if restart:
            run.print0(f"note: restart {restart}, after a rank had failed")
        self.resumes = folder is not None and (resume or again)

    def open(self, restart, resume):
        """Claim the folder, on rank 0. Return whether these ranks were started again in it."""
        folder, owner = self.folder, self.folder / ".job"
        # The name of this torchrun, which outlives its ranks: a folder with this .job is theirs.
        job = f"{os.environ.get('TORCHELASTIC_RUN_ID')} {os.getppid()}"
        try:
            self.claim = Claim(folder, 10 if restart else 0)
            again = restart > 0 and owner.exists() and owner.read_text() == job
        except Timeout:
            raise UserError(f"--output-dir {folder}: another run is writing there") from None
        except OSError as error:
            raise UserError(
                f"--output-dir {folder}: cannot be written ({error.strerror}); name another folder"
            ) from None
        found = list_checkpoints(folder)
        if found and not (resume or again):
            raise UserError(
                f"--output-dir {folder} has checkpoints: add --resume to go on from "
                "them, or name another folder"
            )
        is_model = self.model and self.result.resolve() == self.model.resolve()
        if self.result.exists() and (is_model or not found):
            raise UserError(
                f"--output-dir {folder}: the {self.result.name} there is not of a run "
                "that can be resumed: name another folder"
            )
        owner.write_text(job)
        clean(folder)
        return again

    def find(self, same):
        """Read the newest good checkpoint, if the training resumes.

        same: {name: value}, for JSON, of what must be the same for a checkpoint to be continued.
        Raises UserError for a checkpoint of another run.
        """

        def read():
            found = self.load(self.folder) if self.resumes and self.run.rank == 0 else None
            before = found[1]["same"] if found else same
            other = [name for name in same if before.get(name) != same[name]]
            if other:
                said = ", ".join(
                    f"{name} was {before.get(name)}, is {same[name]}"
                    if name[0] == "-"
                    else f"another {name}"
                    for name in other
                )
                raise UserError(f"--resume: {self.folder} is of another run: {said}")
            return found

        self.same, self.found = same, self.run.together(read)

    def resume(self, parameters, optimizer):
        """Set parameters, optimizer and random state as found. Return the losses so far."""
        run = self.run
        if not self.resumes:
            return []
        tensors, record, warnings = self.found or ({}, None, [])
        for warning in warnings:
            run.print0(f"note: skipped a damaged checkpoint: {warning}")
        record = run.broadcast(record)
        if record is None:
            run.print0("note: no checkpoint yet: starting at step 0")
            return []
        names = run.broadcast(list(tensors))
        tensors = {name: run.broadcast(tensors.get(name)) for name in names}
        load_state(tensors, parameters, optimizer)
        now = state_of(parameters, optimizer)
        saved = {name: x for name, x in tensors.items() if not name.startswith("random.")}
        pairs = [(now.get(name, torch.zeros_like(x)).to(x.device), x) for name, x in saved.items()]
        run.check("state as it was saved", pairs, tolerance=0.0)
        if record["world_size"] == run.world_size:
            for name, generator in self.generators.items():
                if name in tensors:
                    # A copy: generators read from the start of a tensor's storage, and may crash.
                    generator.set_rng_state(tensors[name][run.rank].cpu().clone())
        else:
            run.print0(f"note: it was on {record['world_size']} ranks: random numbers start anew")
        run.print0(f"resumed after {len(record['losses'])} steps")
        self.found = None
        return record["losses"]

    def save(self, parameters, optimizer, losses):
        """Write a checkpoint: all that training needs to go on to the same bits.

        parameters: {name: parameter}. losses: one for each step so far; their number is the step,
        and the position in the data. Each rank's random state is saved, too. On a full disk the job
        goes on, and tries again at the next interval.
        """
        run = self.run
        if self.folder is None:
            return
        tensors = {
            name: run.gather(generator.get_rng_state().to(run.device))
            for name, generator in self.generators.items()
        }
        if run.rank:
            return
        tensors |= state_of(parameters, optimizer)
        record = {"same": self.same, "losses": losses, "world_size": run.world_size}
        try:
            self.claim.check()
            save_checkpoint(self.folder, len(losses), tensors, record)
        except OSError as error:
            free = shutil.disk_usage(self.folder).free if self.folder.exists() else 0
            needed = sum(tensor.nbytes for tensor in tensors.values())
            run.print0(
                f"note: no checkpoint at step {len(losses)}: {error} (more than {needed} "
                f"bytes needed, {free} free)"
            )

    def interrupt(self, steps):
        """End the job, which has been asked to stop after so many steps."""
        how = self.folder and "--resume goes on from the newest checkpoint"
        how = how or "nothing saved: no --output-dir"
        self.run.print0(f"interrupted after {steps} steps; {how}")
        self.run.exit(130)


def state_of(parameters, optimizer):
    """Return {name in a checkpoint: tensor} of parameters and of the optimizer's state of them."""
    tensors = {}
    for name, parameter in parameters.items():
        tensors[f"parameter.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value
    return tensors


def load_state(tensors, parameters, optimizer):
    """Set parameters and the optimizer's state to a checkpoint's tensors."""
    places, state = {name: place for place, name in enumerate(parameters)}, {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part == "parameter":
            parameters[rest].data.copy_(tensor)
        elif part == "optimizer":
            key, _, rest = rest.partition(".")
            state.setdefault(places[rest], {})[key] = tensor if tensor.dim() else tensor.cpu()
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def fingerprint_of_config(config):
    """Return the SHA-256 of a model's configuration, in hex, whichever transformers wrote it."""
    settings = repr(sorted((config.to_dict() | {"transformers_version": ""}).items()))
    return hashlib.sha256(settings.encode()).hexdigest()


def fingerprint(tensors):
    """Return the SHA-256 of the tensors' bits, in hex."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return total.hexdigest()


# ---------------------------------------------------------------- files


def save_checkpoint(folder, step, tensors, record, keep=2):
    """Write folder/step-N. Called by one rank.

    tensors: {name: tensor}. record: what JSON can hold. Raises OSError, say of a full disk, and
    leaves older checkpoints as they were.
    """
    part = begin(folder, step)
    try:
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in tensors.items()}, part / STATE
        )
        finish(part, step, record, {STATE: digest(part / STATE)}, keep)
    except Exception as error:
        shutil.rmtree(part, ignore_errors=True)
        if not isinstance(error, OSError):  # safetensors has an error of its own for a full disk
            raise OSError(str(error)) from error
        raise


def begin(folder, step):
    """Make an empty folder beside folder/step-N, for the files of that step, and return it."""
    clean(folder)
    part = folder / f".step-{step:06}.part"
    part.mkdir()
    return part


def finish(part, step, record, digests, keep=2):
    """Complete a folder and move it to its place.

    digests: {name: SHA-256} of the files. Then remove all checkpoints but `keep`: this one and
    those before it. Those of later steps go, too: they were damaged, otherwise this step would not
    have been trained again.
    """
    (part / RECORD).write_text(json.dumps(record))
    manifest = digests | {RECORD: digest(part / RECORD), "step": step}
    (part / MANIFEST).write_text(json.dumps(manifest))
    final = part.with_name(f"step-{step:06}")
    swap(part, final)
    found = list_checkpoints(part.parent)
    place = found.index(final)
    for other in found[:place] + found[place + keep :]:
        shutil.rmtree(other, ignore_errors=True)


def load_checkpoint(folder):
    """Return (tensors, record, warnings) of the newest good checkpoint; None if there is none."""
    path, warnings = newest(folder)
    return path and (load_file(path / STATE), json.loads((path / RECORD).read_text()), warnings)


def newest(folder):
    """Return the newest good checkpoint, or None if there is none, and warnings.

    Warnings say which newer checkpoints are damaged, and how. Raises UserError if all are damaged:
    starting anew instead would be a surprise.
    """
    warnings, found = [], list_checkpoints(folder)
    for path in found:
        reason = damage(path)
        if not reason:
            return path, warnings
        warnings.append(f"{path}: {reason}")
    if found:
        raise UserError(
            f"no good checkpoint: {'; '.join(warnings)}; name another folder, or remove them"
        )
    return None, warnings


def list_checkpoints(folder):
    """Return the checkpoints of a folder, newest first."""
    paths = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(paths, key=step_of, reverse=True)


def step_of(path):
    return int(path.name.removeprefix("step-"))


def damage(path):
    """Return what is wrong with a checkpoint, in words; None if it is good."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        step = manifest.pop("step")
        for name in manifest.keys() | {RECORD}:
            if digest(path / name) != manifest[name]:
                return f"{name} is not what was written"
        if step != step_of(path):
            return f"it is of step {step}"
    except OSError as error:
        return f"{Path(error.filename or path).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path):
    """Have the system write a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def swap(part, final):
    """Move a finished folder, all of which is then on the disk, to where an older one may be."""
    for path in *part.iterdir(), part:
        flush(path)
    if final.exists():
        old = final.with_name(f".{final.name}.part.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        part.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        part.rename(final)
    flush(final.parent)


def clean(folder):
    """Remove what a killed job left half written: only what has a name of ours. See `swap`."""
    for path in list(folder.iterdir()):
        old = re.fullmatch(r"\.([\w-]+)\.part\.old", path.name)
        if old and not (folder / old[1]).exists():
            path.rename(folder / old[1])  # the job was killed between the two renames
        elif re.fullmatch(r"\.(step-\d{6,}|result-\w+)\.part|\.[\w-]+\.part\.old", path.name):
            shutil.rmtree(path, ignore_errors=True)
