"""What the measurements keep: one JSON file of runs, all of one setting, that can be added to."""

import contextlib
import json
import os
import platform
import sys
import time
from pathlib import Path

import torch


def machine():
    """What the numbers were measured on."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":")[1].strip()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": name, "cores": os.cpu_count(), "gpus": gpus}


def resume(path, setting):
    """The records of an earlier time in `path`, or new ones; exits where the setting was another.

    It also finds out now, before the work, whether the file can be written.
    """
    whole = setting | {"runs": []}
    try:
        path.open("a").close()
        if path.stat().st_size:
            whole = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {path}: {error}")
    if {key: whole.get(key) for key in setting} != setting:
        sys.exit(f"error: {path} was measured under another setting: name another file")
    return whole


def add(path, whole, key, record):
    """Put a run in the place of an earlier one of the same key, and write all, whole or not."""
    record = record | key | {"date": time.strftime("%Y-%m-%d")}
    whole["runs"] = [r for r in whole["runs"] if {k: r[k] for k in key} != key] + [record]
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(whole, indent=1) + "\n")
    part.replace(path)
