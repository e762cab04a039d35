"""How fast the tensor parallelisms are: by hand, by a DTensor plan, and transformers' own plan.

    python -m figures.bench.tp_speed                # all of it, into figures/records/tp_speed.json
    python -m figures.bench.tp_speed --ranks 2 --seq-lens 512 --output /tmp/mine.json

All are measured beside one process that has as many cores (or one GPU): forward, backward, and
cached generation, in turns, on the same weights, after a check that each gives the same loss. On a
CPU ranks talk through shared memory, and at the shortest length also by gloo, in turns, too; more
ranks than cores are measured at the shortest length only. What is quoted is the slowest rank's
seconds, and medians of the ratios within a turn. A step is also run under the profiler, and its
bytes on the wire are held against the formula.

Without torchrun this is the driver, which starts itself under torchrun for every number of ranks
and of tokens.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import transformers

from figures import RECORDS
from figures.bench.contenders import BY_GLOO, TECHNIQUES, Single, local_weights, split
from figures.bench.records import add, machine, resume, threads_of, torchrun
from harness.environment import count_gpus
from harness.flags import DTYPES, make_parser, natural, positive
from harness.job import start
from harness.measure import interleave, kept_memory, ratio, threads_alone, training_step
from harness.model_checks import expect_loss
from kv_cache import generation
from loading.models import Source, is_remote
from shared_memory.group import NAME
from shared_memory.traffic import bytes_sent
from utils.errors import UserError

MODEL = "random/llama-3.2-1b"
PROMPT, NEW_TOKENS = 128, 32
LONG = 1024  # tokens; beyond, half of the layers: else 4 ranks do not fit into 24 GiB
# Names in the profile under which a rank waits for others: the collectives, and the functions of
# Task 2 that call them and do nothing else.
WAITING = ("nccl", "c10d::", "_c10d_functional::", "CopyToRegion", "ReduceFromRegion",
           "GatherShares",
           "VocabParallelCrossEntropy")  # fmt: skip


# ---------------------------------------------------------------- one measurement, under torchrun


def measure(run, args):
    """Everything about the techniques at one length, on the ranks of this job."""
    config, models = run.source.config, {"single": run.load_reference()}
    techniques, parallel = split(run, args.techniques)
    models |= parallel
    in_files = args.giving_back and run.device.type == "cpu"
    for model in models.values() if in_files else ():
        into_file(model)
    ids = run.broadcast(torch.randint(config.vocab_size, (1, args.seq_len)))
    threads = dict.fromkeys(models, torch.get_num_threads()) | {"single": threads_alone(run)}
    contenders = {"single": Single(run), **techniques}

    def train(name):
        yield from read_back(models[name] if in_files else None)
        with contenders[name].context():
            yield from training_step(models[name], ids, threads[name])

    def decode(name):
        yield from read_back(models[name] if in_files else None)
        prompt, choose = ids[:, :PROMPT], contenders[name].choose
        list(generation(models[name], prompt, args.new_tokens, choose, threads[name]))
        yield "generate"

    expected, least_error = expect_loss(run, run.references(models["single"]), ids)
    for name, technique in techniques.items():
        with technique.context(), torch.no_grad():
            loss = models[name](ids, labels=ids).loss
        run.check(f"{name}: loss", [(loss, *expected)], least_error=least_error)
        formula = technique.formula(
            config.num_hidden_layers, args.seq_len, config.hidden_size, config.vocab_size,
            run.world_size, run.dtype.itemsize,
        )  # fmt: skip
        phases = train(name)
        next(phases)
        send = [partial(next, phases)] * 2
        both = [bytes_sent(run, each, technique.mesh.get_group()) for each in send]
        list(phases)
        run.results[name] = {
            "sent_bytes": [counted for counted, _ in both], "formula_bytes": formula,
            "wire_bytes": [wire for _, wire in both], "giving_back": args.giving_back,
            "num_layers": config.num_hidden_layers,
            "threads": {"single": threads["single"], "parallel": threads[name]},
        }  # fmt: skip
    times, profiles = {name: {} for name in models}, {}
    for task in (train, decode) if args.new_tokens else (train,):
        parts = {name: partial(task, name) for name in models}
        timed = interleave(run, parts, args.repeats, 1, not args.giving_back)
        for name, seconds in timed.items():
            times[name] |= {k: laps for k, laps in seconds.items() if k != "reading back"}
    if args.new_tokens:  # the shortest length: both take minutes, and tell the same at others
        profiles = {name: profile(run, partial(train, name)) for name in models}
    for name in techniques:
        sides = {"single": "single", "parallel": name}
        run.results[name] |= {side: times[of] for side, of in sides.items()}
        if profiles:
            run.results[name]["profile"] = {k: profiles[of] for k, of in sides.items()}


def into_file(model):
    """Weights in a file that is mapped into memory: dropped from there while others need it."""
    for weight in local_weights(model):
        with tempfile.NamedTemporaryFile() as file:  # gone with the process
            mapped = torch.from_file(file.name, True, weight.numel(), dtype=weight.dtype)
        weight.data = mapped.view_as(weight).copy_(weight.data)


def read_back(model):
    """A phase of its own: what others have driven out of memory comes back to it."""
    for weight in local_weights(model):
        weight.detach().sum()
    yield "reading back"


@kept_memory()
def profile(run, function):
    """Seconds of a step, rank 0's: in kernels, in collectives, and elsewhere (Python, dispatch)."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if run.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    list(function())  # to touch the memory that it takes
    torch.distributed.barrier()
    run.synchronize()
    step = function()
    next(step)  # its first phase reads weights back, and is none of a step
    with torch.profiler.profile(activities=activities) as profiler:
        begin = time.perf_counter()
        for _ in step:
            run.synchronize()
        total = time.perf_counter() - begin
    on_gpu, kernels, collectives = run.device.type == "cuda", 0.0, 0.0
    for event in profiler.key_averages():
        if on_gpu and (event.device_type.name != "CUDA" or event.is_user_annotation):
            continue  # a kernel's time is credited to what launched it, too
        spent = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        if event.key.startswith(f"{NAME}::"):  # with the kernels that copy and add there
            collectives += event.cpu_time_total / 1e6
            kernels -= event.cpu_time_total / 1e6 - spent
        elif event.key.startswith(WAITING):
            collectives += spent
        elif on_gpu or event.key.startswith("aten::"):
            kernels += spent
    return {"total_s": total, "kernels_s": kernels, "collectives_s": collectives,
            "elsewhere_s": total - kernels - collectives}  # fmt: skip


# ---------------------------------------------------------------- the driver


def drive(args):
    """Start every combination, one after another, and write all records into one file."""
    on_gpu = count_gpus() >= max(args.ranks)  # all of it, or nothing
    if not on_gpu:
        if count_gpus():
            print(f"note: fewer GPUs than {max(args.ranks)}: all on CPU (see --ranks)", flush=True)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cut = args.model.startswith("random/")
    many = args.num_layers
    few = many if on_gpu else max(1, many // 2)
    if not is_remote(args.model):
        try:
            Source(args.model, many if cut else None)
        except UserError as error:
            sys.exit(f"error: {error}")
    setting = {
        "model": args.model, "num_layers": [many, few] if cut else None, "dtype": args.dtype,
        "machine": machine("cuda" if on_gpu else "cpu", max(args.ranks)),
        "threads": args.threads, "repeats": args.repeats,
        "torch": torch.__version__, "transformers": transformers.__version__,
        "prompt_tokens": PROMPT, "new_tokens": NEW_TOKENS,
    }  # fmt: skip
    whole = resume(args.output, setting)
    jobs = list(choose_jobs(args, on_gpu, whole["runs"]))
    if not jobs:  # transformers' plan on one rank, or with --missing all of it
        print(f"nothing to measure, or {args.output} has it")
        return
    failed = []
    for number, (ranks, seq_len, techniques) in enumerate(jobs, 1):
        what = f"{', '.join(techniques)} on {ranks} rank(s) at {seq_len} tokens"
        print(f"[{number}/{len(jobs)}] {time.strftime('%H:%M')} {what}", flush=True)
        flags = {"seq-len": seq_len, "model": args.model, "dtype": args.dtype,
                 "repeats": args.repeats,
                 "new-tokens": NEW_TOKENS if seq_len == min(args.seq_lens) else 0,
                 **({"num-layers": many if seq_len <= LONG else few} if cut else {})}  # fmt: skip
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        words += ["--techniques", *techniques]
        record = job(ranks, args.threads, words)
        if not record and len(techniques) > 1:
            print("    that job failed: again, one by one", flush=True)
            jobs[number:number] = [(ranks, seq_len, [technique]) for technique in techniques]
            continue
        if not record:
            print("    that job failed: again, giving back memory at once", flush=True)
            record = job(ranks, args.threads, [*words, "--giving-back"])
        if not record:
            failed.append(what)
            continue
        for technique, results in record.pop("results").items():
            key = {"technique": technique, "seq_len": seq_len, "world_size": ranks}
            add(args.output, whole, key, record | {"results": results})
            for phase, ours in results["parallel"].items():
                share = ratio(ours, results["single"][phase])
                print(f"    {technique}, {phase}: {statistics.median(ours):.3f} s, of the single "
                      f"process's time {share}", flush=True)  # fmt: skip
    if failed:
        sys.exit(f"error: failed: {'; '.join(failed)}. The rest is in {args.output}")
    print(f"wrote {args.output}")


def choose_jobs(args, on_gpu, runs):
    """Yield (ranks, tokens, techniques) of each job; runs: the records that the output has."""
    there = {(run["world_size"], run["seq_len"], run["technique"]) for run in runs}
    for seq_len, ranks in itertools.product(args.seq_lens, args.ranks):
        # transformers' plan needs two; so does gloo, to be compared.
        wanted = [t for t in args.techniques if ranks > 1 or t in ("hand-made", "DTensor")]
        if on_gpu or seq_len > min(args.seq_lens):
            wanted = [t for t in wanted if t not in BY_GLOO]
            if ranks > os.cpu_count() and not on_gpu:
                continue  # ranks that share cores say little, and take half an hour at this length
        if args.missing:
            wanted = [t for t in wanted if (ranks, seq_len, t) not in there]
        # Else memory is what there is too little of (24 GB were, for 2 ranks at 2,048 tokens).
        together = on_gpu or (ranks <= os.cpu_count() and ranks * seq_len <= 2048)
        pairs = [[t for t in wanted if t.startswith(name)] for name in TECHNIQUES]
        parts = [wanted] if together else pairs
        yield from ((ranks, seq_len, part) for part in parts if part)


def job(ranks, threads, words):
    """The record of one number of ranks and tokens under torchrun; None where it failed."""
    quiet = {"KINETO_LOG_LEVEL": "6"}  # the profiler would announce each start and end of its own
    threads = threads or threads_of(ranks)
    record, done = torchrun(__file__, ranks, *words, threads=threads, **quiet)
    if not record:
        print(done.stdout[-2000:], flush=True)
    return record


def at_least_prompt(text):
    """argparse type: tokens, enough for the prompt that is timed."""
    if positive(text) < PROMPT:
        raise argparse.ArgumentTypeError(f"must be at least {PROMPT}, not {text}")
    return int(text)


def main():
    if "RANK" in os.environ:
        parser = make_parser(__doc__)
        both = [*TECHNIQUES, *BY_GLOO]
        parser.add_argument("--techniques", choices=both, nargs="+", required=True)
        parser.add_argument("--seq-len", type=positive, default=512, help="tokens; default 512")
        parser.add_argument("--repeats", type=positive, default=7, help="default 7")
        parser.add_argument(
            "--new-tokens",
            type=natural,
            default=NEW_TOKENS,
            help=f"to decode; default {NEW_TOKENS}",
        )
        parser.add_argument(
            "--giving-back",
            action="store_true",
            help="hand freed memory back to the system at once, which makes steps slower, and keep "
            "weights in files: for want of memory",
        )
        start(parser.parse_args(), measure)
    else:
        parser = argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        flag = parser.add_argument
        flag("--ranks", type=positive, nargs="+", default=[1, 2, 4], help="default 1 2 4")
        flag(
            "--techniques",
            choices=[*TECHNIQUES, *BY_GLOO],
            nargs="+",
            default=[*TECHNIQUES, *BY_GLOO],
            help="default all",
        )
        flag(
            "--seq-lens",
            type=at_least_prompt,
            nargs="+",
            default=[512, 2048],
            help="default 512 2048",
        )
        flag("--model", default=MODEL, help=f"default {MODEL}")
        flag(
            "--num-layers",
            type=positive,
            default=4,
            help=f"of a random/ model; on CPU half as many beyond {LONG} tokens; default 4",
        )
        flag("--dtype", choices=DTYPES, default="float32", help="default float32")
        flag("--threads", type=positive, help="threads of each rank; default all cores' share")
        flag("--repeats", type=positive, default=7, help="timed runs of each; default 7")
        flag("--missing", action="store_true", help="only what the output lacks; default all")
        flag("--output", type=Path, default=RECORDS / "tp_speed.json", help="default %(default)s")
        drive(parser.parse_args())


if __name__ == "__main__":
    main()
