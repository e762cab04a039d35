"""Importing a technique loads the technique: little else of the project, and nothing is changed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import launch

# Of the project's modules that are loaded, all lines together, docstrings and comments, too.
LINES = 1000
TECHNIQUES = {
    # {public function: (its module, at most so many lines)}
    "tensor_parallelize_mlp": ("tp_mlp", LINES),
    "tensor_parallelize_attention": ("tp_attention", LINES),
    "tensor_parallelize": ("tp_llama", LINES),
    "dtensor_parallelize": ("dtensor_llama", 1050),
    "sequence_parallelize": ("ulysses_forward", LINES),
    "shard_loss": ("ulysses_finetune", 1620),  # with Task 4's
    "generate": ("kv_cache", LINES),
    "ring_parallelize": ("ring_attention", 1600),  # twice: simplest form, and whole
    "parallelize_tp_sp": ("tp_ulysses", 1850),  # Tasks 2 and 4
    "Pipeline": ("pipeline_llama", 1200),
    "Pipe": ("pipeline_threads", LINES),
    "average_gradients": ("data_parallel", 1100),  # with the course's samples, and an epoch
    "partition_dataset": ("data_parallel", 1100),
    "split_loss_alone": ("tp_training", 1300),  # Task 2's
    "parallelize_2d": ("pretrain_2d", 1550),  # Task 3's
    "sequence_loss": ("memory.long_sequence", 2700),  # Task 4's, the ring's, and its own 800
    "SavedOutputs": ("memory.saved_outputs", 1800),
    "sum_gradients": ("utils.replicas", LINES),
    "save_pretrained": ("utils.full_model", 1100),
    "attend": ("utils.kernels", LINES),
}
# One process has the libraries, for what they load and set is not the project's. Each technique is
# imported by a child of it, which has nothing of the project.
IMPORT = """
import json, os, sys
sys.path.insert(0, {tasks!r})
import torch, transformers
from torch.distributed import fsdp, optim, pipelining
from torch.distributed.tensor import parallel
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
import safetensors.torch

def state():
    return {{
        "environment": dict(os.environ),
        "backends": sorted(torch.distributed.Backend.backend_list),
        "attention": sorted(ALL_ATTENTION_FUNCTIONS),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": str(torch.get_default_dtype()),
    }}

before, loaded = state(), set(sys.modules)
for name, module in {techniques!r}.items():
    if os.fork():
        assert not os.wait()[1], name
        continue
    getattr(__import__(module, fromlist=[name]), name)
    new = {{n: sys.modules[n] for n in set(sys.modules) - loaded}}
    paths = {{n: str(getattr(m, "__file__", "")) for n, m in new.items()}}
    files = {{n: path for n, path in paths.items() if path.startswith({tasks!r})}}
    packages = sorted({{n.partition(".")[0] for n in new}})
    print(json.dumps([name, files, packages, before == state()]), flush=True)
    os._exit(0)
"""
HARNESS = "harness", "loading", "checkpoints", "shared_memory"


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    return done.stdout


def test_techniques():
    """All in one test: what each import has loaded, and whether nothing else has changed."""
    modules = {name: module for name, (module, _) in TECHNIQUES.items()}
    said = run(IMPORT.format(tasks=str(launch.TASKS), techniques=modules))
    imported = list(map(json.loads, said.splitlines()))
    assert len(imported) == len(TECHNIQUES)
    for name, files, packages, unchanged in imported:
        assert unchanged, f"{name}: the import changed the environment, a backend or a registry"
        unwanted = {"psutil", "matplotlib", "peft", "tqdm", "pytest"} & set(packages)
        assert not unwanted, (name, unwanted)
        of_harness = {file for file in files if file.startswith(tuple(f"{p}." for p in HARNESS))}
        assert not of_harness, (name, of_harness)
        lines = {file: len(Path(path).read_text().splitlines()) for file, path in files.items()}
        assert sum(lines.values()) <= TECHNIQUES[name][1], (name, sum(lines.values()), lines)


def test_names():
    """Every name that a package shares is there, is used by a script, and no other is used."""
    texts = [script.read_text() for script in launch.TASKS.glob("*.py")]
    said = run(f"""
import sys
sys.path.insert(0, {str(launch.TASKS)!r})
from importlib import import_module
for package in {HARNESS[:3]}:
    modules = import_module(package + ".names").NAMES_BY_MODULE
    names = [name for room in modules.values() for name in room.split()]
    assert len(names) == len(set(names)), names
    for name in names:
        getattr(import_module(package), name)
    print(package, *names)
""")
    for line in said.splitlines():
        package, *names = line.split()
        used = {name for text in texts for name in re.findall(rf"\b{package}\.(\w+)", text)}
        assert set(names) == used
