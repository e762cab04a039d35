"""How long a sum over the ranks takes, by its size: through shared memory, and by gloo.

    python -m figures.bench.collectives     # 2 and 4 ranks, into figures/records/collectives.json

In one job and in turns: a block of sums through the one, then as many by the other. What is quoted
is rank 0's time of a sum, the median of all. Without torchrun this is the driver, which starts
itself under torchrun for every number of ranks.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from figures import RECORDS
from figures.bench.records import add, machine, resume, torchrun
from harness.flags import make_parser, positive
from harness.job import start
from shared_memory.group import NAME
from utils.errors import UserError

KIB = [1, 8, 64, 512, 4096, 16384]
TURNS, BLOCK = 9, 30  # sums in a block; the first block of each only warms up
GROUPS = "shared memory", "gloo"


def measure(run, args):
    """Seconds of each sum: {"8" (KiB): {group: [s, ...]}}, after a check of what it gives."""
    if dist.get_backend() != NAME:
        raise UserError(f"this is about shared memory, not {dist.get_backend()}")
    groups = dict(zip(GROUPS, (dist.group.WORLD, dist.new_group(backend="gloo")), strict=True))
    for kib in args.kib:
        x = torch.randn(kib * 256)
        first, second = (x.clone() for _ in groups)
        dist.all_reduce(first, group=groups["shared memory"])
        dist.all_reduce(second, group=groups["gloo"])
        run.check(f"a sum of {kib} KiB", [(first, second)], tolerance=1e-5)
        laps = {name: [] for name in groups}
        for turn in range(1 + args.turns):
            for name, group in groups.items():
                dist.barrier()
                for _ in range(args.block):
                    begin = time.perf_counter()
                    dist.all_reduce(x, group=group)
                    if turn:
                        laps[name].append(time.perf_counter() - begin)
                    x.div_(run.world_size)  # else it would grow beyond all bounds
        run.results[str(kib)] = laps


def brief(laps):
    """What is kept of so many sums' seconds."""
    return {
        "sums": len(laps), "least": min(laps), "median": statistics.median(laps),
        "mean": statistics.mean(laps), "most": max(laps),
    }  # fmt: skip


def drive(args):
    setting = {"machine": machine(), "dtype": "float32", "torch": torch.__version__,
               "transformers": transformers.__version__}  # fmt: skip
    whole = resume(args.output, setting)
    for ranks in args.ranks:
        words = ["--turns", args.turns, "--block", args.block, "--device", "cpu"]
        record, _ = torchrun(__file__, ranks, *words, "--kib", *args.kib)
        if not record:
            sys.exit(f"error: on {ranks} ranks it failed")
        for kib, laps in record.pop("results").items():
            key = {"world_size": ranks, "sum_bytes": 1024 * int(kib)}
            kept = {name: brief(of) for name, of in laps.items()}
            add(args.output, whole, key, {"sum_s": kept})
            said = ", ".join(
                f"{name} {1e6 * of['median']:,.0f} (mean {1e6 * of['mean']:,.0f})"
                for name, of in kept.items()
            )
            print(f"{ranks} ranks, {kib} KiB, microseconds: {said}", flush=True)
    print(f"wrote {args.output}")


def main():
    ranked = "RANK" in os.environ
    parser = make_parser(__doc__) if ranked else argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    flag = parser.add_argument
    flag("--kib", type=positive, nargs="+", default=KIB, help=f"sizes; default {KIB}")
    flag("--turns", type=positive, default=TURNS, help=f"of a block of each; default {TURNS}")
    flag("--block", type=positive, default=BLOCK, help=f"sums in a block; default {BLOCK}")
    if not ranked:
        flag("--ranks", type=positive, nargs="+", default=[2, 4], help="default 2 4")
        path = RECORDS / "collectives.json"
        flag("--output", type=Path, default=path, help="default %(default)s")
    args = parser.parse_args()
    start(args, measure) if ranked else drive(args)


if __name__ == "__main__":
    main()
