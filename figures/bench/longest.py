"""Find the longest sequence of which three steps of prompt tuning (on a GPU: one) fit into memory.

    python -m figures.bench.longest  # all of it, into figures/records/longest.json
    python -m figures.bench.longest --budgets 64 --only ours --ranks 1 4
    python -m figures.bench.longest --model random/llama-3.2-1b --dtype bfloat16 --device cuda

For each contender: a closed-form estimate (`figures/plan/longest.py`); then runs in fresh
processes, whose memory beyond the loaded model is limited, so that what does not fit fails. Lengths
go up and down from the estimate until one fits and one 5 % longer does not.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from figures import RECORDS, TASKS
from figures.bench.records import add, machine, resume, threads_of, torchrun
from figures.plan.longest import CONTENDERS, LEFT_OUT, ON_GPU, PLAIN, SEGMENTS, a_token, estimate
from harness.environment import count_gpus
from harness.flags import positive
from harness.measure import is_for_memory
from loading.models import Source
from loading.presets import PRESETS

MODELS, PROMPT, GRAIN, STEPS = [f"random/{name}" for name in PRESETS], 32, 1.05, 3
UNEVEN = 0.8  # of a budget tensors fill on a GPU: the rest is between them


def command(name, length, budget, model):
    """What one run starts, and its flags: the plain script, or Task 5's. model: flags of both."""
    flags = [*CONTENDERS[name][1], *model, "--seq-len", length - PROMPT]
    flags += ["--steps", 1 if "cuda" in model else STEPS, "--memory-budget", budget / 2**10]
    if name in PLAIN:
        return Path(__file__).with_name("plain_finetune.py"), *flags
    # The limit does not count memory that ranks share; with gloo all of a rank's is its own.
    flags += ["--num-virtual-tokens", PROMPT, "--check-steps", 0, "--gloo"]
    return TASKS / "ulysses_finetune.py", *flags


# ---------------------------------------------------------------- the search


def fits(name, ranks, length, budget, model):
    """The record of a run of STEPS, on a GPU of one step; None where memory ran out."""
    begin = time.monotonic()
    script, *flags = command(name, length, budget, model)
    # (PyTorch before 2.9 knows the longer name only.)
    conf = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if name == SEGMENTS else ()
    record, job = torchrun(
        script, ranks, *flags, threads=threads_of(ranks), stderr=subprocess.STDOUT,
        THP_MEM_ALLOC_ENABLE="0", MALLOC_MMAP_THRESHOLD_="65536", MALLOC_ARENA_MAX="1",
        **dict.fromkeys(conf, "expandable_segments:True"),
    )  # fmt: skip
    said, took = "fits" if record else "does not fit", time.monotonic() - begin
    print(f"    {length} positions: {said} ({took:.0f} s)", flush=True)
    errors = [line for line in job.stdout.splitlines() if line.startswith("error: ")]
    if not record and not (errors and all(map(is_for_memory, errors))):
        sys.exit(f"{job.stdout[-3000:]}\nerror: that job failed, and not for want of memory")
    return record


def used(record):
    """Bytes that a rank's tensors took beyond the loaded model, of the rank that took most."""
    results = record["results"]
    both = zip(results["idle_memory_bytes"], results["peak_memory_bytes"], strict=True)
    return max(peak - idle for idle, peak in both)


def search(name, ranks, budget, estimate, model=()):
    """The longest length that fits while GRAIN times as much does not, and its record.

    The first run is of the estimate; if it is good, the second, GRAIN away, is the last. Where far
    less of the budget was used than there is, the next length is longer in proportion.
    """
    length, best, too_long, stride = max(estimate, PROMPT + 2 * ranks), None, None, GRAIN
    while best is None or too_long is None or too_long > best[0] * GRAIN + 1:
        record = fits(name, ranks, length, budget, model)
        if record:
            best = length, record
            if (room := UNEVEN * budget * 2**20 / max(1, used(record))) > 1.5:
                stride = max(stride, min(room, 4.0))
        else:
            too_long = length
        if best and too_long:
            length = round((best[0] * too_long) ** 0.5)
            if best[0] in (length, length - 1):
                break
        elif length <= PROMPT + 2 * ranks and not record:
            return 0, None
        else:
            length = round(length * stride if record else max(length / stride, PROMPT + 2 * ranks))
            stride *= stride
    return best


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--model", choices=MODELS, default=MODELS[0], help=f"default {MODELS[0]}")
    flag("--dtype", choices=["float32", "bfloat16"], default="float32", help="default float32")
    flag("--device", choices=["cpu", "cuda"], default="cpu", help="default cpu")
    flag("--budgets", type=positive, nargs="+", help="MiB a rank, beyond the model; default 64 "
        "256, or 1024 on a GPU, all of which would take days")  # fmt: skip
    flag("--ranks", type=positive, nargs="+", help="of ours, with the smallest budget (with others "
        "one rank: time grows with the square); default 1 2 4, or as many GPUs")  # fmt: skip
    flag("--only", choices=CONTENDERS, nargs="+", default=list(CONTENDERS), help="default all, but "
        "what leaves something out with the smallest budget alone; offload on a GPU")  # fmt: skip
    flag("--output", type=Path, default=RECORDS / "longest.json", help="default %(default)s")
    args = parser.parse_args()
    source, device = Source(args.model), torch.device(args.device)
    config = source.config
    element = {"float32": 4, "bfloat16": 2}[args.dtype]
    gpus = count_gpus()
    if args.device == "cuda" and not gpus:
        parser.error("--device cuda: PyTorch sees no GPU")
    args.budgets = args.budgets or ([64, 256] if args.device == "cpu" else [1024])
    args.ranks = args.ranks or [p for p in (1, 2, 4) if args.device == "cpu" or p <= gpus]
    model = ["--model", args.model, "--dtype", args.dtype, "--device", args.device]
    setting = {
        "model": args.model, "dtype": args.dtype, "device": args.device,
        "virtual_tokens": PROMPT, "steps": STEPS if args.device == "cpu" else 1,
        "machine": machine(args.device, max(args.ranks)),
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    whole = resume(args.output, setting)
    for budget in sorted(args.budgets):
        for name in args.only:
            smallest = budget == min(args.budgets)  # with others all takes too long
            if (name in LEFT_OUT and not smallest) or (name in ON_GPU and args.device == "cpu"):
                continue
            for ranks in args.ranks if name == "ours" and smallest else [1]:
                counted = a_token(name, config, ranks, element, args.device == "cuda")
                positions = estimate(name, config, ranks, element, budget * 2**20, device)
                print(f"{name}, {ranks} rank(s), {budget} MiB: {counted / 1024:.1f} KiB a token of "
                      f"a rank, estimate {positions}", flush=True)  # fmt: skip
                found, record = search(name, ranks, budget, positions, model)
                share = found / max(positions, 1)
                print(f"  found {found}, {share:.2f} of the estimate", flush=True)
                key = {"contender": name, "world_size": ranks, "budget_mib": budget}
                entry = {"estimate": positions, "found": found, "predicted_bytes": counted,
                         "threads": threads_of(ranks)}  # fmt: skip
                if record:
                    entry |= {"measured_bytes": used(record) * ranks / found,
                              "step_s": record["results"]["step_s"]}  # fmt: skip
                add(args.output, whole, key, entry)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
