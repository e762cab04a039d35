"""Write each rank's gradients to a file, and compare such files."""

from functools import partial

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from checkpoints.checkpoint import fingerprint
from utils.errors import UserError

GRADIENTS_FILE = "model{rank}_gradients.safetensors"


def write_together(run, folder, function):
    """Call function() on every rank; if one cannot write to `folder`, all raise UserError."""

    def attempt():
        try:
            function()
        except (OSError, SafetensorError) as error:
            raise UserError(f"--gradients-dir {folder}: cannot be written ({error})") from None

    run.together(attempt)


def empty_folder(run, folder):
    """Make the folder, without the files of an earlier run, which may have had more ranks."""

    def prepare():
        if run.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob(GRADIENTS_FILE.format(rank="*")):
                path.unlink()

    write_together(run, folder, prepare)


def write_gradients(run, folder, model):
    """Write this rank's gradients to a file of `folder`. Called by all ranks."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    path = folder / GRADIENTS_FILE.format(rank=run.rank)
    write_together(run, folder, partial(save_file, grads, path))
    run.print_in_order(f"gradients of the first batch (rank={run.rank}): {path}")


def read_gradients(folder):
    """Return {rank: {parameter's name: gradient}} of the files of `folder`.

    Raises UserError for files that are missing or cannot be read.
    """
    paths, before, files = sorted(folder.glob(GRADIENTS_FILE.format(rank="*"))), len("model"), {}
    for path in paths:
        try:
            files[int(path.name[before:].split("_")[0])] = load_file(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from None
    if sorted(files) != list(range(len(files))) or len(files) < 2:
        raise UserError(
            f"--compare-gradients {folder}: {len(files)} files {GRADIENTS_FILE.format(rank='N')},"
            "; needed: one of each rank from 0 on, at least two"
        )
    return dict(sorted(files.items()))


def compare_files(run, args):
    """Check that the files of all ranks have the same gradients, to the bit."""
    folder = args.compare_gradients
    first, *others = read_gradients(folder).values()
    run.print0(f"{folder}: gradients of {len(first)} parameters, by {1 + len(others)} ranks")
    for rank, grads in enumerate(others, 1):
        if {n: (g.shape, g.dtype) for n, g in grads.items()} != {
            n: (g.shape, g.dtype) for n, g in first.items()
        }:
            raise UserError(f"{folder}: the file of rank {rank} has other tensors than rank 0's")
        pairs = [(grads[name], grad) for name, grad in first.items()]
        differ = sum(fingerprint([a]) != fingerprint([b]) for a, b in pairs)  # -0 and 0 differ
        pairs.append((torch.tensor(float(differ)), torch.tensor(0.0)))
        run.check(f"process {rank}: the gradients' bits are process 0's", pairs, tolerance=0.0)
