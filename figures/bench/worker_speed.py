"""Training time and tokens per second of data parallelism, by the neighbour course's metrics.

    python -m figures.bench.worker_speed

One worker takes batches of 64 sequences, two workers 128 and four 256, of the same data: a worker
always has 64. Each setting is a job of its own, `tasks/data_parallel.py --spawn`, as the course
starts it, with one thread a worker. The jobs take turns, some rounds of them, and the first epoch
of each job warms up. Of the others the time is the mean over epochs and workers, and tokens per
second are the sum over workers, its mean over epochs. (Tokens are counted without padding.)

Every worker's record of every epoch is kept in one JSON file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import RECORDS, TASKS
from figures.bench.records import here_and_now, write_record
from harness.environment import check_writable
from harness.epochs import mean_and_deviation
from harness.flags import positive

SCRIPT = TASKS / "data_parallel.py"
KEPT = "rank", "epoch", "training_time_s", "tokens_per_second", "validation_loss"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="random/gpt2-mini", help="as of the script; default %(default)s")
    add("--workers", type=positive, nargs="+", default=[1, 2, 4], help="default 1 2 4")
    add("--batch-size", type=positive, default=64, help="sequences of a worker; default 64")
    add("--seq-len", type=positive, default=128, help="tokens of the longest; default 128")
    add("--num-sequences", type=positive, default=366, help="7 of 10 to train on; default 366: "
        "one batch of four workers' 256, four of one worker's 64")  # fmt: skip
    add("--epochs", type=positive, default=4, help="of a job, the first to warm up; default 4")
    add("--rounds", type=positive, default=2, help="jobs of each setting; default 2")
    add("--json", type=Path, default=RECORDS / "worker_speed.json", help="default %(default)s")
    args = parser.parse_args()
    check_writable(args.json)
    if args.epochs < 2:
        parser.error("--epochs: 2 or more, since the first warms up")
    runs = {workers: [] for workers in args.workers}
    for turn in range(args.rounds):
        first = turn % len(args.workers)
        for workers in args.workers[first:] + args.workers[:first]:
            print(f"round {turn}: {workers} worker(s)", flush=True)
            record = train(workers, args)
            of_epochs = record["results"]["epochs"]["by-hand"]
            runs[workers].append([[{key: mine[key] for key in KEPT} for mine in everyone]
                                  for everyone in of_epochs])  # fmt: skip
    whole = here_and_now(record["device"], max(args.workers))
    whole |= {key: record[key] for key in ("model", "dtype", "backend", "versions")}
    whole |= {key: getattr(args, key) for key in ("batch_size", "seq_len", "num_sequences")}
    whole["workers"] = runs
    write_record(args.json, whole)
    for workers, jobs in runs.items():
        seconds, tokens = metrics(jobs)
        print(f"{workers} worker(s), batch {workers * args.batch_size}: training time "
              f"{mean_and_deviation(seconds, '.2f')} s, tokens per second "
              f"{mean_and_deviation(tokens, '.0f')}, of {len(seconds)} epochs")  # fmt: skip


def train(workers, args):
    """Train with so many workers; the job's JSON record. Its errors end this program."""
    flags = {
        "spawn": workers, "model": args.model, "batch-size": workers * args.batch_size,
        "seq-len": args.seq_len, "num-sequences": args.num_sequences, "epochs": args.epochs,
    }  # fmt: skip
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        done = subprocess.run(
            [sys.executable, SCRIPT, *words, "--train-only", "--json", path],
            stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{done.stdout[-3000:]}\nerror: {workers} worker(s) failed")
        return json.loads(path.read_text())


def metrics(jobs):
    """Of each epoch but the jobs' first: [mean seconds of the workers], [sum of their tokens/s].

    jobs: of each a list of epochs, of each a list of the workers' records.
    """
    counted = [epoch for job in jobs for epoch in job[1:]]
    seconds = [statistics.mean(mine["training_time_s"] for mine in epoch) for epoch in counted]
    tokens = [sum(mine["tokens_per_second"] for mine in epoch) for epoch in counted]
    return seconds, tokens


if __name__ == "__main__":
    main()
