"""Training time and tokens per second of GPT-2 on two devices, without and with a pipeline.

    python -m figures.bench.thread_speed

One job of `tasks/pipeline_threads.py --model-parallel-mode both` trains in both modes, which take
turns, an epoch each, so that what else the machine does meets both. Plain model parallelism has one
device at work at a time. The pipeline has both: on CPUs, two threads. Dropout is as shipped, and
the first epoch of each mode warms up. Of the others all numbers are kept, and medians are quoted.
(Tokens are counted without padding.)

The neighbour course's batch is the default: 32 sequences of 128 tokens, in four microbatches.
"""

import argparse
import statistics
import sys
from pathlib import Path

from figures import RECORDS, TASKS
from figures.bench.records import here_and_now, torchrun, write_record
from harness.environment import check_writable
from harness.flags import positive

SCRIPT = TASKS / "pipeline_threads.py"
KEPT = "epoch", "training_time_s", "tokens_per_second", "validation_loss"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="random/gpt2", help="as of the script; default %(default)s")
    add("--threads", type=positive, default=2, help="devices; default 2")
    add("--batch-size", type=positive, default=32, help="sequences in a batch; default 32")
    add("--split-size", type=positive, default=8, help="sequences in a microbatch; default 8")
    add("--seq-len", type=positive, default=128, help="tokens of the longest; default 128")
    add("--num-sequences", type=positive, default=92, help="7 of 10 to train on; default 92: two "
        "batches an epoch")  # fmt: skip
    add("--epochs", type=positive, default=4, help="of each mode, one to warm up; default 4")
    add("--json", type=Path, default=RECORDS / "thread_speed.json", help="default %(default)s")
    args = parser.parse_args()
    check_writable(args.json)
    if args.epochs < 2:
        parser.error("--epochs: 2 or more, since the first warms up")
    flags = {
        key: value for key, value in vars(args).items() if key not in ("json", "model", "epochs")
    }
    words = ["--model", args.model, "--epochs", args.epochs, "--model-parallel-mode", "both"]
    for key, value in flags.items():
        words += [f"--{key.replace('_', '-')}", value]
    record, done = torchrun(SCRIPT, 1, *words, "--dropout")
    if not record:
        sys.exit(f"{done.stdout[-3000:]}\nerror: {SCRIPT.name} failed")
    whole = here_and_now(record["device"], args.threads) | flags
    whole |= {key: record[key] for key in ("model", "dtype", "backend", "versions")}
    whole["modes"] = {
        mode: [{key: one[key] for key in KEPT} for one in epochs]
        for mode, epochs in record["results"]["epochs"].items()
    }
    write_record(args.json, whole)
    for mode in whole["modes"]:
        seconds, tokens = (statistics.median(metric(whole, mode, key)) for key in KEPT[1:3])
        print(f"{mode}: training time {seconds:.2f} s, tokens per second {tokens:.0f}, medians of "
              f"{args.epochs - 1} epochs")  # fmt: skip


def metric(data, mode, key):
    """Of each epoch of a mode but the first, which warms up, the number `key`."""
    return [one[key] for one in data["modes"][mode][1:]]


if __name__ == "__main__":
    main()
