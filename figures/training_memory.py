"""What tensors hold over a training step, where the vocabulary is large: one process beside ranks.

    python figures/training_memory.py      # a few minutes, and 11 GiB; writes training_memory.json

By `--profile` of tasks/tp_training.py: a vocabulary of 128,256, with hidden 256 and 4,096 tokens,
and with hidden 2048 and 512. (The 256 x 256 tokens of the README that it follows would be 31 GiB of
logits.)
"""

import argparse
import json
import sys
from pathlib import Path

from records import here_and_now, torchrun

HERE = Path(__file__).resolve().parent
SIZES = {  # model: flags
    "random/small-128k": ["--num-layers", 2, "--seq-len", 4096],
    "random/llama-3.2-1b": ["--num-layers", 1, "--seq-len", 512],
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    add = parser.add_argument
    add("--json", type=Path, default=HERE / "training_memory.json", help="default %(default)s")
    args = parser.parse_args()
    whole = here_and_now() | {"profiles": []}
    for model, flags in SIZES.items():
        words = "--profile", "--model", model, *flags
        record, done = torchrun(HERE.parent / "tasks" / "tp_training.py", args.ranks, *words)
        print(done.stdout, flush=True)
        if not record:
            sys.exit(f"error: {model} failed")
        whole |= {key: record[key] for key in ("versions", "world_size", "dtype", "device")}
        whole["profiles"].append({"model": model, **record["results"]["memory"]})
    args.json.write_text(json.dumps(whole) + "\n")


if __name__ == "__main__":
    main()
