"""What tensors hold over a training step, where the vocabulary is large: one process beside ranks.

    python -m figures.bench.training_memory  # some minutes, up to 17 GiB

By `--profile` of tasks/tp_training.py: a vocabulary of 128,256, with hidden 256 and 4,096 tokens,
and with hidden 2048 and 512. Then the tensor-parallel README's own size, 256 x 256 tokens with
hidden 256 and two layers, with GPT-2's vocabulary of 50,257 where there is room for it, else 8,192:

    vocabulary   logits     one process   each rank, TP   each of 2 ranks, TP + loss parallel
    50,257       12.3 GiB   40 GiB        39 GiB          14 GiB
    8,192         2.0 GiB    9 GiB         8 GiB           4 GiB
"""

import argparse
import json
import sys
from pathlib import Path

import psutil
import torch

from figures import RECORDS, TASKS
from figures.bench.records import here_and_now, torchrun, write_record
from harness.environment import check_writable

SIZES = {  # model: flags
    "random/small-128k": ["--num-layers", 2, "--batch-size", 1, "--seq-len", 4096],
    "random/llama-3.2-1b": ["--num-layers", 1, "--batch-size", 1, "--seq-len", 512],
}
README = ["--num-layers", 2, "--batch-size", 256, "--seq-len", 256]
VOCABULARIES = {"random/small-50k": 50257, "random/small-8k": 8192}
ARRAYS = 3  # as large as the logits, that Hugging Face's loss has at once
REST_BYTES = 3.5 * 2**30  # of a process: all but the logits, and the interpreter


def needed(vocab_size, ranks, tokens=256 * 256):
    """Bytes of `ranks` ranks at the neighbour's README's size, each with full float32 logits."""
    return ranks * (ARRAYS * tokens * vocab_size * 4 + REST_BYTES)


def readme_model(ranks, room):
    """The model with the largest vocabulary of which `ranks` ranks have room, in bytes."""
    for model, vocab_size in VOCABULARIES.items():
        if needed(vocab_size, ranks) <= room:
            return model
    sys.exit(f"error: {room / 2**30:.0f} GiB of memory: {ranks} ranks need "
             f"{needed(vocab_size, ranks) / 2**30:.0f} for {vocab_size:,} words")  # fmt: skip


def room(ranks):
    """Bytes of memory that the ranks have together: of their GPUs, or of this machine."""
    gpus = torch.cuda.device_count()
    if gpus >= ranks:
        return ranks * min(torch.cuda.get_device_properties(i).total_memory for i in range(gpus))
    return psutil.virtual_memory().total


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="default 2")
    add("--json", type=Path, default=RECORDS / "training_memory.json", help="default %(default)s")
    add("--readme-only", action="store_true", help="the README's size alone, which takes the place "
        "of what the JSON file has of it; default no")  # fmt: skip
    add("--trace", type=Path, help="of the README's size, see tp_training.py; default none")
    args = parser.parse_args()
    check_writable(args.json)
    model = readme_model(args.ranks, room(args.ranks))
    trace = ["--trace", args.trace] if args.trace else []
    sizes = ({} if args.readme_only else SIZES) | {model: [*README, *trace]}
    whole = here_and_now() | {"profiles": []}
    if args.readme_only and args.json.exists():
        whole["profiles"] = [
            profile
            for profile in json.loads(args.json.read_text())["profiles"]
            if profile["model"] not in VOCABULARIES
        ]
    for model, flags in sizes.items():
        words = "--profile", "--model", model, *flags
        record, done = torchrun(TASKS / "tp_training.py", args.ranks, *words)
        print(done.stdout, flush=True)
        if not record:
            sys.exit(f"error: {model} failed")
        whole |= {key: record[key] for key in ("versions", "world_size", "dtype", "device")}
        whole["profiles"].append({"model": model, **record["results"]["memory"]})
    write_record(args.json, whole)


if __name__ == "__main__":
    main()
