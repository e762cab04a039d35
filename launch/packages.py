"""What the Makefile asks of a Python about its packages, when it makes an environment.

python launch/packages.py torch .venv         # may its PyTorch be used in .venv, and how?
.venv/bin/python launch/packages.py enough PIP_ERRORS    # nothing can be fetched: is that enough?
"""

import importlib.metadata as metadata
import os
import re
import sys

OLDEST = {"torch": "2.7", "transformers": "4.48.3", "peft": "0.14.0"}
NEEDED = [*OLDEST, "pytest", "filelock", "huggingface_hub", "packaging", "psutil", "safetensors",
          "tokenizers", "tqdm"]  # fmt: skip
WITHOUT = {"pytest-xdist": "tests run one after another", "matplotlib": "nothing is drawn",
           "ruff": "no make lint"}  # fmt: skip


def show_torch(folder):
    """Print the version of this Python's PyTorch, and which folders .venv must look into for it.

    The latter for a virtual environment's Python only: what the system's has is seen by
    `--system-site-packages`. Exit code 1: there is none, or it is too old, or the environment is
    one of this project's, which is about to be made anew.
    """
    prefixes = {os.path.realpath(name) for name in (folder, ".venv", ".venv-course")}
    if os.path.realpath(sys.prefix) in prefixes:
        sys.exit(1)
    import torch

    if numbers(torch.__version__) < numbers(OLDEST["torch"]):
        sys.exit(1)
    print(torch.__version__)
    if sys.prefix != sys.base_prefix:
        print(*(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))), sep="\n")


def show_whether_enough(errors):
    """One line: with which versions it goes on, or what is missing (exit code 1).

    errors: the file with what pip said.
    """
    with open(errors) as file:
        said = [line.removeprefix("ERROR: ").strip() for line in file if line.startswith("ERROR: ")]
    why = f"not all of requirements.txt can be installed ({said[-1] if said else 'no network?'})"
    there = {name: version(name) for name in (*NEEDED, *WITHOUT)}
    missing = [
        f"{name} {OLDEST.get(name, '')}".strip()
        for name in NEEDED
        if not there[name] or numbers(there[name]) < numbers(OLDEST.get(name, "0"))
    ]
    if missing:
        sys.exit(f"error: {why}, and this is missing, or older than here: {', '.join(missing)}")
    lacking = [f"without {name}: {what}" for name, what in WITHOUT.items() if not there[name]]
    using = ", ".join(f"{name} {there[name]}" for name in OLDEST)
    print("; ".join([f"note: {why}: going on with {using}", *lacking]))


def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def numbers(version):
    """(4, 48, 3) of 4.48.3+cpu: the release alone."""
    return tuple(map(int, re.match(r"[\d.]*\d", version)[0].split(".")))


if __name__ == "__main__":
    (show_torch if sys.argv[1] == "torch" else show_whether_enough)(sys.argv[2])
