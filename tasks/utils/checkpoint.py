"""Checkpoints that survive what happens to jobs: whole or not there, verified, two of them kept.

Of training whose state is replicated: rank 0 writes it, and reads it for all.

    folder/step-000020/state.safetensors    tensors
                       record.json          everything else
                       manifest.json        SHA-256 of both, without which a flipped bit would load

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


def open_folder(run, folder, resumes, result):
    """Claim an output folder for this job, before any work. Returns whether to resume.

    folder: a Path, or None for no output. result: the name of what will be written there at the
    end. Ranks that torchrun starts again resume without being asked, if the folder was theirs
    before. Raises UserError, on all ranks, where it cannot be written, another job writes there,
    checkpoints are there that nobody asked to go on from, or a result that is not of such
    checkpoints.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # torchrun, which outlives its ranks: not every job that comes here again was here before.
    job = f"{os.environ.get('TORCHELASTIC_RUN_ID')} {os.getppid()}"

    def claim():
        if run.rank or folder is None:
            return False
        try:
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            run.lock = FileLock(folder / ".lock")  # the system frees it when the process ends
            run.lock.acquire(timeout=0 if restart == "0" else 10)
            run.claimed = os.stat(folder / ".lock").st_ino
            owner = folder / ".job"
            again = restart != "0" and owner.exists() and owner.read_text() == job
        except Timeout:
            raise UserError(f"--output-dir {folder}: another run is writing there") from None
        except OSError as error:
            raise UserError(f"--output-dir {folder}: cannot be written ({error.strerror}); name "
                            "another folder") from None  # fmt: skip
        if list_checkpoints(folder) and not (resumes or again):
            raise UserError(f"--output-dir {folder} has checkpoints: add --resume to go on from "
                            "them, or name another folder")  # fmt: skip
        of_model = run.source.directory and run.source.directory.resolve()
        own = list_checkpoints(folder) and (folder / result).resolve() != of_model
        if (folder / result).exists() and not own:
            raise UserError(f"--output-dir {folder}: the {result} there is not of a run that can "
                            "be resumed: name another folder")  # fmt: skip
        owner.write_text(job)
        clean(folder)
        return again

    again = run.broadcast(run.together(claim))
    if restart != "0":
        run.print0(f"note: restart {restart}, after a rank had failed")
    return folder is not None and (resumes or again)


def check_claim(run):
    """OSError where --output-dir has been removed; what is there by now may be another job's."""
    lock = run.args.output_dir / ".lock"
    if not lock.exists() or os.stat(lock).st_ino != run.claimed:
        raise OSError(f"{run.args.output_dir} was removed while this job wrote there")


def save(run, parameters, optimizer, losses, same):
    """Write a checkpoint to --output-dir: all that training needs to go on to the same bits.

    parameters: {name: parameter}; losses: one a step so far, so the step, and the position in the
    data, is their number; same: what must be the same for it to be continued, for JSON. Each rank's
    random state goes with it. On a full disk the job goes on, and tries again at the next interval.
    """
    if run.args.output_dir is None:
        return
    tensors = {"random.cpu": run.gather(torch.get_rng_state().to(run.device))}
    if run.device.type == "cuda":
        tensors["random.cuda"] = run.gather(torch.cuda.get_rng_state().to(run.device))
    if run.rank:
        return
    for name, parameter in parameters.items():
        tensors[f"parameter.{name}"] = parameter
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = value
    record = {"same": same, "losses": losses, "world_size": run.world_size}
    try:
        check_claim(run)
        save_checkpoint(run.args.output_dir, len(losses), tensors, record)
    except OSError as error:
        folder = run.args.output_dir
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        needed = sum(tensor.nbytes for tensor in tensors.values())
        run.print0(f"note: no checkpoint at step {len(losses)}: {error} (more than {needed} bytes "
                   f"needed, {free} free)")  # fmt: skip


def find(run, same):
    """The newest good checkpoint, on rank 0. Raises UserError if it is of another run."""

    def read():
        found = None if run.rank else load_checkpoint(run.args.output_dir)
        before = found[1]["same"] if found else same
        other = [name for name in same if before.get(name) != same[name]]
        if other:
            said = ", ".join(
                f"{name} was {before.get(name)}, is {same[name]}" if name[0] == "-" else
                f"another {name}" for name in other
            )  # fmt: skip
            raise UserError(f"--resume: {run.args.output_dir} is of another run: {said}")
        return found

    return run.together(read)


def resume(run, parameters, optimizer, found):
    """Take parameters, optimizer and random state from what `find` gave: the losses so far."""
    tensors, record, warnings = found or ({}, None, [])
    for warning in warnings:
        run.print0(f"note: skipped a damaged checkpoint: {warning}")
    record = run.broadcast(record)
    if record is None:
        run.print0("note: no checkpoint yet: starting at step 0")
        return []
    tensors = {name: run.broadcast(tensors.get(name)) for name in run.broadcast(list(tensors))}
    places, state = {name: place for place, name in enumerate(parameters)}, {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "parameter":
            parameters[rest].data.copy_(tensor)
        elif kind == "optimizer":
            key, _, rest = rest.partition(".")
            state.setdefault(places[rest], {})[key] = tensor if tensor.dim() else tensor.cpu()
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    if record["world_size"] == run.world_size:
        # Copies: these functions read from the beginning of a tensor's storage, and may crash.
        torch.set_rng_state(tensors["random.cpu"][run.rank].cpu().clone())
        if run.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"][run.rank].cpu().clone())
    else:
        run.print0(f"note: it was on {record['world_size']} ranks: random numbers start anew")
    run.print0(f"resumed after {len(record['losses'])} steps")
    if len(record["losses"]) > run.args.steps:
        run.print0(f"note: that is more than --steps {run.args.steps}: nothing is left to train")
    return record["losses"]


def identity(run, model, ids):
    """What must be the same for a checkpoint to be continued; of the weights some values each.

    model: without its adapter. ids: all that it is trained on.
    """
    args = run.args
    kept = [p for p in model.parameters() if args.peft == "none" or not p.requires_grad]
    sample = [p.detach().flatten()[:: 1 + p.numel() // 256] for p in kept]
    flags = ("peft", "num_virtual_tokens", "lora_rank", "seq_len", "batch_size", "num_sequences",
             "lr", "dtype", "seed")  # fmt: skip
    same = {f"--{name.replace('_', '-')}": getattr(args, name) for name in flags}
    same |= {"weights": fingerprint(sample), "text": fingerprint([ids])}
    settings = run.source.config.to_dict() | {"transformers_version": ""}
    settings = repr(sorted(settings.items()))
    return same | {"config": hashlib.sha256(settings.encode()).hexdigest()}


def fingerprint(tensors):
    """SHA-256 of the tensors' bits, in hex."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return total.hexdigest()


# ---------------------------------------------------------------- files


def save_checkpoint(folder, step, tensors, record, keep=2):
    """Write folder/step-N, then remove all but `keep`, this one and those before it. By one rank.

    Any of a later step go too: they were damaged, or this one would not have been trained.

    tensors: {name: tensor}; record: what JSON can hold. Raises OSError, say of a full disk, and
    leaves the older ones as they were.
    """
    final = folder / f"step-{step:06}"
    part = folder / f".{final.name}.part"
    clean(folder)
    try:
        part.mkdir()
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in tensors.items()}, part / STATE
        )
        (part / RECORD).write_text(json.dumps(record))
        manifest = {name: digest(part / name) for name in (STATE, RECORD)} | {"step": step}
        (part / MANIFEST).write_text(json.dumps(manifest))
        for path in (*part.iterdir(), part):
            flush(path)
    except Exception as error:
        shutil.rmtree(part, ignore_errors=True)
        if not isinstance(error, OSError):  # safetensors has an error of its own for a full disk
            raise OSError(str(error)) from error
        raise
    swap(part, final)
    found = list_checkpoints(folder)
    place = found.index(final)
    for other in found[:place] + found[place + keep :]:
        shutil.rmtree(other, ignore_errors=True)


def load_checkpoint(folder):
    """(tensors, record, warnings) of the newest good checkpoint; None if there is none at all.

    Warnings say which newer ones are damaged, and how. Raises UserError if all are: starting anew
    instead would be a surprise.
    """
    warnings, found = [], list_checkpoints(folder)
    for path in found:
        reason = damage(path)
        if not reason:
            return load_file(path / STATE), json.loads((path / RECORD).read_text()), warnings
        warnings.append(f"{path}: {reason}")
    if found:
        raise UserError(f"no good checkpoint: {'; '.join(warnings)}; name another --output-dir, or "
                        "remove them")  # fmt: skip
    return None


def list_checkpoints(folder):
    """The checkpoints of a folder, newest first."""
    paths = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(paths, key=step_of, reverse=True)


def step_of(path):
    return int(path.name.removeprefix("step-"))


def damage(path):
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name in (STATE, RECORD):
            if digest(path / name) != manifest[name]:
                return f"{name} is not what was written"
        if manifest["step"] != step_of(path):
            return f"it is of step {manifest['step']}"
    except OSError as error:
        return f"{Path(error.filename or path).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is damaged"
    return None


def digest(path):
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            total.update(block)
    return total.hexdigest()


def flush(path):
    """Have a file or a folder on the disk, not only in memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def swap(part, final):
    """Put a finished folder in its place, in which an older one may be."""
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
    """Remove what a killed job left half written: our own, by their names."""
    for path in folder.iterdir():
        if re.fullmatch(r"\.(step-\d{6,}|result-\w+)\.part|\.[\w-]+\.part\.old", path.name):
            shutil.rmtree(path, ignore_errors=True)
