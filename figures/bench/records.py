"""What programs share that measure: ranks that they start, and the JSON files that they keep."""

import contextlib
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from figures import FIGURES, ROOT
from harness.job import in_lines


def program(path):
    """The words that Python or torchrun runs a file by: a program of figures/ is a module."""
    path = Path(path).resolve()
    if not path.is_relative_to(FIGURES):
        return [path]
    return ["-m", ".".join(path.relative_to(ROOT).with_suffix("").parts)]


def torchrun(path, ranks, *flags, threads=1, stderr=None, **env):
    """Run a program under torchrun: its JSON record, or None where it failed; the ended process.

    What it printed is in the process; its errors went to `stderr`, by default this process's own.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        words = [*launcher, "--nproc_per_node", ranks, *program(path), *flags, "--json", record]
        env = os.environ | {"OMP_NUM_THREADS": str(threads)} | env
        done = subprocess.run(
            list(map(str, words)), stdout=subprocess.PIPE, stderr=stderr, text=True, env=env
        )
        return None if done.returncode else json.loads(record.read_text()), done


def threads_of(ranks):
    """All cores, shared out."""
    return max(1, torch.get_num_threads() // ranks)


def machine(device="cpu", ranks=0):
    """What the numbers were measured on; of GPUs those that the ranks used."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":")[1].strip()
    used = min(ranks, torch.cuda.device_count()) if device == "cuda" else 0  # some may be shared
    gpus = [torch.cuda.get_device_name(i) for i in range(used)]
    return {"cpu": name, "cores": os.cpu_count(), "gpus": gpus}


def here_and_now(device="cpu", ranks=0):
    """Machine and date, which stand beside what was measured."""
    return {"machine": machine(device, ranks), "date": time.strftime("%Y-%m-%d")}


def attention_flop(config, positions):
    """What attention alone computes in a step: {direction: FLOP}; half of the scores, causally.

    Forward two products for each pair of a query and a key, backward five (FlashAttention-2, arXiv
    2307.08691, section 3.1).
    """
    width = config.num_attention_heads * config.head_dim
    product = config.num_hidden_layers * positions**2 * width  # 2 FLOP, half of the pairs
    return {"forward": 2 * product, "backward": 5 * product}


def resume(path, setting):
    """The records of an earlier time in `path`, or new ones where those are of another setting.

    (Another machine, versions, or model.) It also finds out now, before the work, whether the file
    can be written.
    """
    whole = setting | {"runs": []}
    try:
        path.open("a").close()
        if path.stat().st_size:
            whole = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {path}: {error}")
    if {key: whole.get(key) for key in setting} != setting:
        print(f"note: {path} was measured under another setting: it will be kept", flush=True)
        return setting | {"runs": []}
    return whole


def add(path, whole, key, record):
    """Put a run in the place of an earlier one of the same key, and write all, whole or not.

    A file of another setting is kept, under another name.
    """
    earlier = json.loads(path.read_text()) if path.stat().st_size else {}
    if earlier and any(earlier.get(name) != whole[name] for name in whole.keys() - {"runs"}):
        names = (path.with_suffix(f".{number}.json") for number in itertools.count(1))
        kept = path.rename(next(name for name in names if not name.exists()))
        print(f"note: what {path} was is {kept} now", flush=True)
    record = record | key | {"date": time.strftime("%Y-%m-%d")}
    whole["runs"] = [r for r in whole["runs"] if {k: r.get(k) for k in key} != key] + [record]
    write_record(path, whole)


def write_record(path, data):
    """Write a record, whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(in_lines(data) + "\n")
    part.replace(path)
