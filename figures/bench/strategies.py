"""Tokens per second and peak memory of each strategy of data parallelism alone: an article's table.

    python -m figures.bench.strategies     # some minutes on two cores; writes strategies.json
    make gpu STEP=9                  # the article's own size: 246 M parameters, 128 x 256 tokens

One process, and on `--ranks` ranks by hand, DDP, ZeRO-1 and FSDP2: each is a job of its own, so
that a peak is its own. A rank always has `--batch-size` sequences, without padding, and on a CPU
one thread. The jobs take turns, some rounds of them.

The peak of tensors is by torch.profiler. That of the process is what it has beyond the interpreter
and its libraries; on a GPU it is CUDA's own count of what tensors have. Where ranks are more than
GPUs they share them: that says what memory each needs, and nothing about their speed.
"""

import statistics
import subprocess
import sys

import torch

from figures import RECORDS
from figures.bench.records import here_and_now, torchrun, write_record
from harness.environment import check_writable
from harness.flags import make_parser, positive
from harness.job import start
from harness.measure import interleave

ALONE = "one process"
STRATEGIES = ALONE, "by-hand", "ddp", "zero1", "fsdp2"
PASSED_ON = "model", "dtype", "device", "batch_size", "seq_len", "repeats"


def main():
    parser = make_parser(__doc__, model="random/balanced")
    add = parser.add_argument
    add("--ranks", type=positive, default=2, help="of all but the one process; default 2")
    add("--batch-size", type=positive, default=2, help="sequences on each rank; default 2")
    add("--seq-len", type=positive, default=64, help="tokens a sequence; default 64")
    add("--repeats", type=positive, default=4, help="timed steps of a job; default 4")
    add("--rounds", type=positive, default=2, help="jobs of each strategy; default 2")
    add("--only", choices=STRATEGIES, help="measure this one, on the ranks that there are; default "
        "all, each in a job of its own")  # fmt: skip
    args = parser.parse_args()
    if args.only:
        start(args, measure)
    path = args.json or RECORDS / "strategies.json"
    check_writable(path)
    whole = run_all(args)
    write_record(path, whole)
    for line in rows(whole):
        print(line)


def measure(run, args):
    """The peak of a step, its bytes, and seconds of others."""
    from figures.plan.estimate_check import make_step, measure_step  # which imports every technique

    vocab_size = run.source.config.vocab_size
    generator = torch.Generator().manual_seed(run.seed + run.rank)
    ids = torch.randint(vocab_size, (args.batch_size, args.seq_len), generator=generator)
    ids = ids.to(run.device)
    sent, formula = measure_step(run, args.only, ids)["bytes"]
    step = make_step(run, args.only, ids)[-1]

    def timed():
        step()
        yield "step"

    run.results["step_s"] = interleave(run, {args.only: timed}, args.repeats)[args.only]["step"]
    pair = [torch.tensor(float(size)) for size in (sent, formula)]
    run.check(f"{args.only}: bytes sent, by the formula", [pair], 0.02 * formula)


def run_all(args):
    """The records of all jobs: {strategy: [results, ...]}, and what they have in common."""
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    runs = {strategy: [] for strategy in STRATEGIES}
    words = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in PASSED_ON]
    if args.num_layers:
        words.append(f"--num-layers={args.num_layers}")
    for turn in range(args.rounds):
        first = turn % len(runs)
        for strategy in STRATEGIES[first:] + STRATEGIES[:first]:
            ranks = 1 if strategy == ALONE else args.ranks
            print(f"round {turn}: {strategy}, {ranks} rank(s)", flush=True)
            shared = ["--share-gpus"] * (0 < gpus < ranks)
            record, done = torchrun(
                __file__, ranks, *words, *shared, "--only", strategy, stderr=subprocess.STDOUT
            )
            if not record:
                sys.exit(f"{done.stdout[-3000:]}\nerror: {strategy} failed")
            of = record["results"]
            runs[strategy].append({
                "ranks": ranks, "backend": record["backend"], "shared_gpus": bool(shared),
                "step_s": of["step_s"], **of["techniques"][strategy],
            })  # fmt: skip
    whole = here_and_now(record["device"], args.ranks)
    whole |= {key: record[key] for key in ("model", "dtype", "device", "versions")}
    sizes = {key: getattr(args, key) for key in ("ranks", "batch_size", "seq_len")}
    return whole | sizes | {"strategies": runs}


ARTICLE_GB = {ALONE: 35.37, "ddp": 35.86, "zero1": 35.37}  # of 246 M parameters, on an A40


def not_run(article):
    """The cells of each strategy's row where nothing was measured."""
    for strategy in STRATEGIES:
        known = [str(article.get(strategy, "-"))] if article else []
        yield [strategy, "", "", *["not run"] * 4, *known]


def rows(data, article=None):
    """Lines of a table. article: {strategy: GB of its table}. data: None where nothing was run."""
    titles = ["strategy", "ranks", "batch", "tokens/s", "peak of a rank's tensors, GB",
              "by the formula", "of the process"]  # fmt: skip
    if data and data["device"] == "cuda":
        titles[-1] = "by CUDA's count"
    titles += ["the article's"] * bool(article)
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    if not data:
        return [*lines, *(f"| {' | '.join(cells)} |" for cells in not_run(article or {}))]
    for strategy, jobs in data["strategies"].items():
        ranks, laps = jobs[0]["ranks"], [lap for job in jobs for lap in job["step_s"]]
        batch = ranks * data["batch_size"]
        speed = f"{batch * data['seq_len'] / statistics.median(laps):,.0f}"
        if jobs[0]["shared_gpus"]:
            speed = "a GPU shared"
        sizes = [max(job[key] for job in jobs) for key in ("tensors", "estimate", "process")]
        cells = [strategy, str(ranks), f"{batch} x {data['seq_len']}", speed]
        cells += [f"{size / 1e9:.2f}" for size in sizes]
        cells += [str(article.get(strategy, "-"))] if article else []
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
