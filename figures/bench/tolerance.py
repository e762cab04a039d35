"""Measure whether a right run is ever refused, and the smallest error that is: the evidence.

    python -m figures.bench.tolerance                     # all of it: 40 minutes on 2 cores
    python -m figures.bench.tolerance --only tiny float32 # runs whose names have these words
    python -m figures.bench.tolerance --rounding          # other roundings: rounding_runs.py
    python -m figures.bench.tolerance --table             # the table, of the records that are there

Right runs: the checks of Tasks 2, 3 and 4, in turns, on five texts within one start, for each
model, float32 and bfloat16, 1 to 4 ranks. Recorded: a run's error, divided by the reference's usual
one.
Wrong ones: a part of what is checked is scaled by 1 + d, and the smallest d that is refused is
recorded. tolerance.json has both, tolerance.md is the table.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import textwrap
import time
from bisect import bisect_left
from functools import partial

import torch
from torch.distributed.tensor.parallel import loss_parallel

from conftest import make_llama
from dtensor_llama import dtensor_parallelize
from figures import FIGURES, RECORDS
from figures.bench import rounding_runs
from figures.bench.records import add, machine, resume, threads_of, torchrun
from harness.flags import make_parser, positive
from harness.job import start
from harness.model_checks import check_model, make_batch
from harness.tolerance import LIMITS, judge, measure, worst_relative
from loading.text import own_text
from tp_llama import tensor_parallelize
from ulysses_forward import sequence_parallelize
from utils.replicas import sum_gradients

ODD = "odd Llama"  # of the tests: sizes that divide by nothing, biases, an untied head
MODELS = {  # flags, and on how many ranks
    "tiny": (["--model", "tiny"], (1, 2, 3, 4)),
    ODD: (["--model", ODD], (1, 2, 3, 4)),
    "random/small": (["--model", "random/small"], (1, 2, 3, 4)),
    "smollm2": (["--model", "smollm2"], (1, 2, 3, 4)),
    "random/llama-3.2-1b, 4 layers": (
        ["--model", "random/llama-3.2-1b", "--num-layers", 4, "--seq-len", 24], (2,),
    ),
}  # fmt: skip
DTYPES = "float32", "bfloat16"
# A wrong one: (check, of which tensor, which rows, what it is). Of several tensors, the middle one.
WRONG = {
    "a KV head's gradient": ("loss: model.layers.*.self_attn.v_proj.weight grad", "head"),
    "a norm's gradient": ("loss: model.layers.*.input_layernorm.weight grad", "all"),
    "the smallest vocabulary row's gradient": ("loss: model.embed_tokens.weight grad", "smallest"),
    "the smallest input gradient of a token": ("loss: input embeddings grad", "smallest"),
    "the smallest logits of a token": ("logits", "smallest"),
}
SIZES = [10 ** (step / 8) for step in range(-64, 9)]


# ---------------------------------------------------------------- on the ranks


def work():
    """All runs of one model, dtype and number of ranks."""
    parser = make_parser(__doc__)
    parser.add_argument("--texts", type=positive, default=5, help="for each; default 5")
    parser.add_argument("--batch-size", type=positive, default=2, help="sequences; default 2")
    parser.add_argument("--seq-len", type=positive, default=32, help="tokens of each; default 32")
    start(parser.parse_args(), measure_all)


def measure_all(run, args):
    """The checks of all techniques and texts; what they allow goes to the results."""
    run.exit = lambda code: None  # a refusal is recorded, not the end
    check, run.wrong = run.check, {}
    run.check = partial(check_both, run, check)
    tp, sp = run.mesh("tp"), run.mesh("sp")
    techniques = {
        "Task 2": (partial(tensor_parallelize, mesh=tp), None),
        "Task 3": (partial(dtensor_parallelize, mesh=tp), None),
        "Task 4": (partial(sequence_parallelize, mesh=sp), partial(sum_gradients, mesh=sp)),
    }
    for number, (name, (parallelize, reduce)) in enumerate(techniques.items()):
        reference = run.load_reference()
        references = run.references(reference)
        model = run.load_model(parallelize)
        for seed in range(number, args.texts, len(techniques)):
            run.seed = seed
            torch.manual_seed(seed)
            text = own_text(10**4, seed)[1]
            batch = make_batch(run, args.batch_size, args.seq_len, text)
            with loss_parallel() if name == "Task 3" else torch.enable_grad():
                check_model(run, model, references, batch, reduce=reduce)
        del references, reference, model
        gc.collect()  # their modules hold one another
    measured = [c for c in run.checks if "times_reference" in c]
    run.results |= {
        "measured": len(measured),
        "refused": [check["name"] for check in run.checks if not check["passed"]],
        "times": {
            kind: max(c["times_reference"].get(kind, 0) for c in measured) for kind in LIMITS
        },
        "largest": {
            kind: max(measured, key=lambda c, k=kind: c["times_reference"].get(k, 0))["name"]
            for kind in LIMITS
        },
        "smallest_refused": run.wrong,
    }
    run.checks = run.checks[:1]  # the record is for the results


def check_both(run, check, name, pairs=(), *args, **kwargs):
    """The check, and once for each of the wrong ones what it would refuse."""
    for wrong, (of_check, part) in WRONG.items():
        if name == of_check and wrong not in run.wrong:
            pairs = list(pairs)
            sizes = run.broadcast(smallest_refused(run, pairs, part))
            run.wrong[wrong] = sizes
    check(name, pairs, *args, **kwargs)


def smallest_refused(run, pairs, part):
    """The smallest d of `SIZES` for which scaling a part by 1 + d is refused; None: no d is."""
    pairs = [[tensor.detach() for tensor in pair] for pair in pairs]
    many = [measure(*pair) for pair in pairs]
    worst = worst_relative(many)
    at = len(pairs) // 2
    actual, reference, exact = (t.reshape(-1, t.shape[-1]) for t in pairs[at])
    rows = slice(None)
    if part == "head":
        rows = slice(0, run.source.config.head_dim)
    elif part == "smallest":
        norms = torch.cat([some.double().norm(dim=1) for some in exact.split(4096)])
        rows = norms.masked_fill(norms == 0, torch.inf).argmin()[None]

    def is_refused(size):
        right = actual[rows].clone()
        actual[rows] = right * (1 + size)  # in place: the tensor may be most of the memory
        many[at] = measure(actual, reference, exact)
        actual[rows] = right
        return max(share for share, *_ in judge(many, run.dtype, worst)) > 1

    first = bisect_left(SIZES, True, key=is_refused)
    return SIZES[first] if first < len(SIZES) else None


# ---------------------------------------------------------------- driver and table


def drive():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="WORD", default=[],
                        help="runs with these words in model or dtype; default all")  # fmt: skip
    parser.add_argument("--table", action="store_true", help="write the table alone; default no")
    parser.add_argument("--rounding", action="store_true", help="with sums in another order: "
                        "what rounding.json does not have yet; default no")  # fmt: skip
    args = parser.parse_args()
    path, other = RECORDS / "tolerance.json", RECORDS / "rounding.json"
    if args.rounding:
        rounding_runs.record(other, args.only)
    elif not args.table:
        record(path, args.only)
    text = table(json.loads(path.read_text()), json.loads(other.read_text()))
    (FIGURES / "tolerance.md").write_text(text)


def record(path, only):
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    whole = resume(path, {"machine": machine(), "versions": versions, "limits": LIMITS})
    with tempfile.TemporaryDirectory() as folder:
        odd = str(make_llama(folder))
        for model, (flags, ranks) in MODELS.items():
            for dtype in DTYPES:
                if not all(word in f"{model}, {dtype}" for word in only):
                    continue
                for count in ranks:
                    print(f"{model}, {dtype}, {count} rank(s)", flush=True)
                    words = [odd if flag == ODD else flag for flag in flags]
                    words += ["--dtype", dtype, "--device", "cpu"]
                    began = time.monotonic()
                    found, done = torchrun(__file__, count, *words, threads=threads_of(count))
                    took = {"minutes": (time.monotonic() - began) / 60}
                    if not found:
                        sys.exit(f"{done.stdout[-3000:]}\nerror: {model}, {dtype} failed")
                    key = {"model": model, "dtype": dtype, "ranks": count}
                    add(path, whole, key, found["results"] | took)


def table(whole, other):
    """tolerance.md, of both records."""
    runs = {(run["model"], run["dtype"], run["ranks"]): run for run in whole["runs"]}
    limits = whole["limits"]
    lines = [
        "# How far right runs are off, and how small an error is refused",
        "",
        "By `python -m figures.bench.tolerance`; the rule is in `tasks/harness/tolerance.py`.",
        "",
        *textwrap.wrap(
            "Largest error of right runs, as a multiple of the reference's usual error (five "
            "texts, dealt out to Tasks 2, 3 and 4): "
            f"rms of a tensor (limit {limits['rms']:g}) / rms of a row or column "
            f"({limits['row']:g}) / largest value ({limits['max']:g}) / scale of a tensor "
            f"({limits['scale']:g}) / of a row or column ({limits['row scale']:g}).",
            100,
        ),
        "",
        "| model | dtype | 1 rank | 2 ranks | 3 ranks | 4 ranks | checks | refused |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for dtype in DTYPES:
            cells, of_all = [], [runs.get((model, dtype, ranks)) for ranks in (1, 2, 3, 4)]
            for run in of_all:
                t = run and run["times"]
                most = run and (t["rms"], max(t["row"], t["column"]), t["max"], t["scale"],
                                max(t["row scale"], t["column scale"]))  # fmt: skip
                cells.append(" / ".join(f"{times:.1f}" for times in most) if run else "-")
            there = [run for run in of_all if run]
            if not there:
                continue
            checks, refused = (sum(run["measured"] for run in there),
                               sum(len(run["refused"]) for run in there))  # fmt: skip
            lines.append(f"| {model} | {dtype} | {' | '.join(cells)} | {checks:,} | {refused} |")
    lines += [
        "",
        "Smallest error that is refused, in per cent of a part's values (100: double), on 2 ranks:",
        "",
        f"| model | dtype | {' | '.join(WRONG)} |",
        "|---|---|" + "---|" * len(WRONG),
    ]
    for model in MODELS:
        for dtype in DTYPES:
            if run := runs.get((model, dtype, 2)):
                sizes = [run["smallest_refused"].get(wrong) for wrong in WRONG]
                cells = [f"{100 * size:.2g}" if size else "none is" for size in sizes]
                lines.append(f"| {model} | {dtype} | {' | '.join(cells)} |")
    cpu = f"{whole['machine']['cores']} cores of {whole['machine']['cpu']}"
    dates = " and ".join(sorted({run["date"] for run in whole["runs"]}))
    minutes = sum(run["minutes"] for run in whole["runs"])
    lines += ["", f"({dates}, in {minutes:.0f} minutes, {cpu}, "
              f"PyTorch {whole['versions']['torch']}, "
              f"transformers {whole['versions']['transformers']})", "",
              *textwrap.wrap(
                  f'("none is": of sizes up to {100 * max(SIZES):,.0f} % none was refused. Rows '
                  "from few tokens are measured together with their neighbours, which here are far "
                  "larger.)", 100), ""]  # fmt: skip
    lines += rounding_runs.table(other)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    work() if "RANK" in os.environ else drive()
