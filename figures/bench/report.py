"""Record every task's checks and outputs, and write the tables of the README and the pages.

    python -m figures.bench.report           # run every task, record its checks, write the tables
    python -m figures.bench.report tp_mlp    # only this one, or these: the others' records stay
    python -m figures.bench.report tp_mlp_float64  # one file of outputs/ of other commands (`MORE`)
    python -m figures.bench.report --tables  # write the tables from the records that are there

Into report.json goes, for each claim of a task, the worst of its checks; the other tables are of
other files in figures/records/. In its page each table stands between two comments that name it.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
from functools import partial
from pathlib import Path

from figures import FIGURES, OUTPUTS, RECORDS, ROOT, TASKS
from figures.bench import gpu
from figures.bench.claims import TASK
from figures.bench.records import here_and_now, torchrun, write_record
from figures.bench.strategies import ARTICLE_GB, rows
from harness.checks import NOT_ROUNDING
from harness.measure import ratio

PAGES = [ROOT / "README.md"]
PAGES += [FIGURES / f"{name}.md" for name in ("checks", "speed", "long_sequence")]
DTYPES = "float64", "float32"
START = "$ OMP_NUM_THREADS=1 torchrun --standalone"
ON_2, ON_4 = (f"torchrun --standalone --nproc_per_node {ranks} tasks/" for ranks in (2, 4))
ON_1 = "torchrun --standalone --nproc_per_node 1 tasks/"
TOO_LARGE = "pipeline_llama.py --model random/llama-3.2-1b --num-layers 8 --dtype bfloat16 " \
    "--batch-size 2 --microbatches 2 --seq-len 64 --memory-budget 5.9"  # fmt: skip
LONG = "pretrain_2d.py --model random/small-8k --num-layers 4 --batch-size 4 --seq-len 10000 " \
    "--steps 2 --warm-up 0 --memory-budget 7"  # fmt: skip
SHARDED = "data_parallel.py --memory-budget 0.7 --model random/balanced --batch-size 4 " \
    "--seq-len 32 --num-sequences 20 --epochs 1 --strategy"  # fmt: skip
# script: {file in outputs/: the commands whose outputs it has, one after the other}. "! " before a
# command: it is refused, with one line.
MORE = {
    "tp_mlp": {"tp_mlp_float64": [f"{ON_4}tp_mlp.py --dtype float64"]},
    "tp_attention": {"tp_attention_float64": [f"{ON_2}tp_attention.py --dtype float64"]},
    "tp_llama": {"tp_llama_smollm2": [f"{ON_2}tp_llama.py --model smollm2"]},
    "dtensor_llama": {"dtensor_llama_smollm2": [f"{ON_2}dtensor_llama.py --model smollm2"]},
    "ulysses_forward": {"ulysses_forward_smollm2": [f"{ON_2}ulysses_forward.py --model smollm2"]},
    "ulysses_finetune": {
        "ulysses_finetune_smollm2": [f"{ON_2}ulysses_finetune.py --model smollm2"],
    },
    "kv_cache": {"kv_cache_smollm2": [f"{ON_2}kv_cache.py --model smollm2"]},
    "pipeline_llama": {"pipeline_llama_budget": [f"! {ON_1}{TOO_LARGE}", f"{ON_2}{TOO_LARGE}"]},
    "pretrain_2d": {"pretrain_2d_budget": [f"! {ON_1}{LONG}", f"{ON_2}{LONG}"]},
    "data_parallel": {
        "estimate_article": [
            "python -m figures.plan.estimate --model random/7b --batch-size 1 --seq-len 256 "
            "--article",
        ],
        "data_parallel_spawn": [
            "python tasks/data_parallel.py --spawn 2 --epochs 3 --model random/gpt2-small-test "
            "--gradients-dir gradients",
            "python tasks/data_parallel.py --compare-gradients gradients",
        ],
        "data_parallel_budget": [
            f"! {ON_1}{SHARDED} fsdp2",
            *(f"! {ON_2}{SHARDED} {strategy}" for strategy in ("by-hand", "ddp", "zero1")),
            f"{ON_2}{SHARDED} fsdp2",
        ],
    },
    "pipeline_threads": {
        "pipeline_threads_gpt2": [
            "python tasks/pipeline_threads.py --model random/gpt2-small-test --repeats 0",
            "python tasks/pipeline_threads.py --model random/gpt2-small-test "
            "--model-parallel-mode both",
        ],
    },
}


# ---------------------------------------------------------------- recording


def record(path, scripts=()):
    """Run every task in both dtypes, on the CPU: of each claim the worst check, and what it prints.

    The latter, in float32 and without notes, which depend on the machine, goes to outputs/.
    scripts: only these, into the records that are there.
    """
    whole = {"summary": {}, "tasks": {}, "dates": {}}
    if scripts:
        whole = json.loads(path.read_text())
    now = here_and_now()
    for script in scripts or TASK:
        _, ranks, flags, claims = TASK[script]
        for dtype in DTYPES:
            print(f"{script}, {dtype}, {ranks} ranks", flush=True)
            words = [*flags, *(["--dtype", dtype] if dtype != "float32" else [])]
            run, done = torchrun(TASKS / f"{script}.py", ranks, *words, CUDA_VISIBLE_DEVICES="")
            if not run:
                sys.exit(f"{done.stdout[-3000:]}\nerror: {script} failed")
            setting = {key: run[key] for key in ("versions", "model", "backend")}
            setting["machine"] = now["machine"]
            if any(whole.get(key, value) != value for key, value in setting.items()):
                sys.exit(f"error: {path} was recorded with another setting: record all scripts")
            whole |= setting
            found = {claim: worst(run["checks"], pattern) for claim, pattern in claims}
            whole["tasks"].setdefault(script, {})[dtype] = found
            whole["summary"].setdefault(script, {})[dtype] = overall(run["checks"])
        whole["dates"][script] = now["date"]
        for name in MORE.get(script, ()):
            record_more(script, name)
        lines = [line for line in done.stdout.splitlines() if not line.startswith("note: ")]
        text = "\n".join([f"{START} {command_of(script)}", *lines]) + "\n"
        (OUTPUTS / f"{script}.txt").write_text(text)
    for kind in "summary", "tasks", "dates":  # in the order of the tables
        whole[kind] = {script: whole[kind][script] for script in TASK if script in whole[kind]}
    write_record(path, whole)


def record_more(script, name):
    """Write a file of outputs/ that has what other commands print."""
    (OUTPUTS / f"{name}.txt").write_text(outputs_of(MORE[script][name]))


def outputs_of(commands):
    """Commands, and behind each what it prints but notes. They run in a folder of their own.

    Of a command that is to be refused, its line that begins with "error: ", too.
    """
    programs = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
    text = ""
    with tempfile.TemporaryDirectory() as folder:
        for code in TASKS, FIGURES:
            (Path(folder) / code.name).symlink_to(code)
        for command in commands:
            print(command, flush=True)
            refused, command = command.startswith("! "), command.removeprefix("! ")
            env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            program, *words = command.split()
            done = subprocess.run(
                [sys.executable, *programs[program], *words],
                capture_output=True, text=True, env=env, cwd=folder,
            )  # fmt: skip
            if bool(done.returncode) != refused:
                sys.exit(f"{done.stdout[-3000:]}{done.stderr[-3000:]}\nerror: {command} "
                         f"ended with exit code {done.returncode}")  # fmt: skip
            of_machine = "note: ", "smollm2 is cached in "
            lines = [line for line in done.stdout.splitlines() if not line.startswith(of_machine)]
            if refused:
                lines += [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            text += "\n".join([f"$ OMP_NUM_THREADS=1 {command}", *lines]) + "\n"
    return text


def command_of(script):
    """What of its command stands behind START: the ranks, the script, its flags."""
    _, ranks, flags, _ = TASK[script]
    return " ".join([f"--nproc_per_node {ranks} tasks/{script}.py", *flags])


def worst(checks, pattern):
    """Of the checks of a claim: how many, all passed, and the one nearest to its tolerance."""
    found = [check for check in checks if re.search(pattern, check["name"])]
    if not found:
        sys.exit(f"error: no check is named {pattern!r}")
    last = max(found, key=lambda check: check["share"])
    largest = last["max_abs_reference"] or 1.0
    return {"checks": len(found), "passed": all(check["passed"] for check in found),
            "measured": last["max_abs_diff"] / largest, "allowed": last["tolerance"] / largest,
            "for_example": last["name"]}  # fmt: skip


def overall(checks):
    """Of all checks of a run: how many, all passed, and the one that is farthest off."""
    shares = {
        check["name"]: check["max_abs_diff"] / (check["max_abs_reference"] or 1.0)
        for check in checks
        if not check["name"].startswith(NOT_ROUNDING)
    }
    name = max(shares, key=shares.get)
    return {"checks": len(checks), "passed": all(check["passed"] for check in checks),
            "measured": shares[name], "for_example": name}  # fmt: skip


# ---------------------------------------------------------------- the tables


def head(*titles):
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


def summary(report):
    """Each task in a line: of all its differences from the single rank the largest."""
    rows = head("task", "command", "checks", "farthest off in float64", *DTYPES, "status")
    for script, (title, *_) in TASK.items():
        of = [report["summary"][script][dtype] for dtype in DTYPES]
        status = "ok" if all(one["passed"] for one in of) else "**FAILED**"
        cells = [f"`{command_of(script)}`", str(of[0]["checks"]), of[0]["for_example"]]
        cells += [*(f"{one['measured']:.0e}" for one in of), status]
        rows.append(f"| **{title}** | {' | '.join(cells)} |")
    return [*rows, "", on(report, f"model `{report['model']}`, {report['backend']}")]


def checks(report):
    """Each task's claims: the difference that came nearest to its tolerance, and that tolerance."""
    measured = [f"{dtype}: measured (allowed)" for dtype in DTYPES]
    rows = head("task", "claim", "printed as `check ...`", *measured, "status")
    for script, (title, _, _, claims) in TASK.items():
        rows.append(f"| **{title}** | `{command_of(script)}` | | | | |")
        for claim, _ in claims:
            of = [report["tasks"][script][dtype][claim] for dtype in DTYPES]
            cells = ["exact" if not c["allowed"] and not c["measured"] else
                     f"{c['measured']:.0e} ({c['allowed']:.0e})" for c in of]  # fmt: skip
            status = "ok" if all(c["passed"] for c in of) else "**FAILED**"
            example, more = of[0]["for_example"], of[0]["checks"] - 1
            example = f"{example}{f' and {more} more' if more else ''}"
            rows.append(f"| | {claim} | {example} | {' | '.join(cells)} | {status} |")
    return [*rows, "", on(report, f"model `{report['model']}`, {report['backend']}")]


def on(data, what):
    """What it was measured on."""
    where, versions = data["machine"], data.get("versions", data)
    dates = sorted(data.get("dates", {}).values())
    dates = dates or sorted(run["date"] for run in data.get("runs", [data]))
    gpus = ", ".join(where["gpus"]) or "no GPU"
    return (f"({what}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {where['cores']} cores "
            f"of {where['cpu']}, {gpus}, PyTorch {versions['torch']}, transformers "
            f"{versions['transformers']})")  # fmt: skip


NAMES = {"hand-made": "by hand (Task 2)", "DTensor": "DTensor plan (Task 3)",
         "transformers": 'transformers, `tp_plan="auto"`'}  # fmt: skip
NAMES |= {f"{technique}, gloo": f"{name}, by gloo" for technique, name in NAMES.items()}


def seconds(run, phases):
    """Seconds of the ranks and of the single process, of some phases together."""
    return (
        [sum(lap) for lap in zip(*(run["results"][side][p] for p in phases), strict=True)]
        for side in ("parallel", "single")
    )


BOTH = "forward", "backward"
LENGTHS = 512, 2048


def pace(runs, side, data):
    """One contender on so many ranks: median seconds, tokens by them, and of the single process."""

    def laps(length, phases):  # of those that got so far
        found = [r for r in runs if r["seq_len"] == length and phases[-1] in r["results"][side]]
        times = [[s for r in found for s in r["results"][side][phase]] for phase in phases]
        share = ratio(*seconds(found[0], phases)) if found and side == "parallel" else "-"
        return times, [share]

    cells = []
    for length in LENGTHS:
        (forward, backward), share = laps(length, BOTH)
        steps = [sum(both) for both in zip(forward, backward, strict=True)]
        cells += [f"{statistics.median(s):.2f}" if s else "-" for s in (forward, backward)]
        cells += [f"{length / statistics.median(steps):.0f}" if steps else "-", *share]
    (times,), share = laps(LENGTHS[0], ["generate"])
    cells += [f"{data['new_tokens'] / statistics.median(times):.1f}" if times else "-", *share]
    return cells


def speed(data):
    """Task 2, Task 3 and transformers' own plan, beside the single process."""
    runs = {(r["technique"], r["world_size"], r["seq_len"]): r for r in data["runs"]}
    rows = head("2 ranks, 512 tokens", "forward", "backward", "both", "32 tokens, cached",
                "bytes sent, beyond the formula")  # fmt: skip
    for technique, name in NAMES.items():
        run = runs.get((technique, 2, 512))
        if run is None:  # a comparison that was interrupted
            continue
        kinds = ["forward"], ["backward"], BOTH, ["generate"]
        there = run["results"]["parallel"]
        cells = [ratio(*seconds(run, phases)) if phases[0] in there else "-" for phases in kinds]
        sent, formula = (run["results"][key] for key in ("sent_bytes", "formula_bytes"))
        cells.append("not counted" if None in sent else f"{sum(sent) / sum(formula) - 1:+.1%}")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    layers = {run["seq_len"]: run["results"]["num_layers"] for run in data["runs"]}
    step, share = ("forward, s", "backward, s", "tokens/s"), "of one process's time"
    titles = [f"{length:,} tokens, {layers.get(length)} layers: {what}" if what == step[0] else what
              for length in LENGTHS for what in (*step, share)]  # fmt: skip
    rows += ["", *head("ranks", "", *titles, "generation, tokens/s", share)]
    for p in sorted({run["world_size"] for run in data["runs"]}):
        here = [run for run in data["runs"] if run["world_size"] == p]
        threads = here[0]["results"]["threads"]["single"]
        cells = pace(here, "single", data)
        rows.append(f"| {p} | one process, threads: {threads} | {' | '.join(cells)} |")
        for technique, name in NAMES.items():
            if of := [run for run in here if run["technique"] == technique]:
                rows.append(f"| {p} | {name} | {' | '.join(pace(of, 'parallel', data))} |")
    slow = {}
    for run in data["runs"]:
        if run["results"]["giving_back"]:
            slow.setdefault((run["world_size"], run["seq_len"]), []).append(NAMES[run["technique"]])
    for (p, length), names in slow.items():
        of = " and ".join(names)
        rows += ["", f"With {p} ranks at {length:,} tokens memory was short for {of}: it was given "
                     "back when freed, and touched anew in every step: slower."]  # fmt: skip
    return [*rows, "", on(data, f"`{data['model']}`, {data['dtype']}")]


def profile(data):
    """Where a step's seconds go, on rank 0."""
    runs = {r["technique"]: r for r in data["runs"] if (r["world_size"], r["seq_len"]) == (2, 512)}
    rows = head("seconds of a step", "kernels", "collectives, waiting included",
                "Python and dispatch")  # fmt: skip
    kept = {NAMES[t]: r["results"]["profile"] for t, r in runs.items() if "profile" in r["results"]}
    sides = [("one process", profile["single"]) for profile in list(kept.values())[:1]]
    sides += [(name, kept[name]["parallel"]) for name in NAMES.values() if name in kept]
    keys = "kernels_s", "collectives_s", "elsewhere_s"
    return rows + [f"| {n} | {' | '.join(f'{p[k]:.2f}' for k in keys)} |" for n, p in sides]


def longest(data):
    """The longest sequences that were found."""
    rows = head("limit on each rank", "contender", "ranks", "positions", "estimate")
    for run in sorted(data["runs"], key=lambda r: r["budget_mib"]):
        name = f"**{run['contender']}**" if run["contender"] == "ours" else run["contender"]
        rows.append(f"| {run['budget_mib']} MiB | {name} | {run['world_size']} | "
                    f"{run['found']:,} | {run['estimate']:,} |")  # fmt: skip
    return [*rows, "", on(data, f"`{data['model']}`, {data['dtype']}")]


def long_speed(data):
    """Seconds of a long step."""
    results = {name: r["step_s"] for name, r in data["results"].items() if "step_s" in r}
    first, second, *_ = results.values()
    rows = head("a step of 16,384 positions", "seconds", "of the first", "of the second")
    for name, laps in results.items():
        shares = f"{ratio(laps, first)} | {ratio(laps, second)}"
        rows.append(f"| {name} | {statistics.median(laps):.1f} | {shares} |")
    what = f"`{data['model']}`, {data['dtype']}, {data['backend']}"
    return [*rows, "", on(data | data["results"], what)]


def memory(data):
    """The formulas of `make estimate` beside what was measured."""
    rows = head("technique", "peak by the formula, GiB", "of tensors", "of the process",
                "sent by the formula, MB", "counted")  # fmt: skip
    for name, of in data["results"]["techniques"].items():
        peaks = [f"{of[peak] / 2**30:.3f}" for peak in ("estimate", "tensors", "process")]
        sent = [f"{size / 1e6:.2f}" for size in reversed(of["bytes"])]
        rows.append(f"| {name} | {' | '.join(peaks + sent)} |")
    what = f"`{data['model']}`, 4 x 256 tokens, {data['dtype']}, {data['world_size']} ranks"
    return [*rows, "", on(data | data["results"], what)]


def sequence(data):
    """Each split of a sequence's step; without seconds where ranks are more than cores."""
    timed = data["world_size"] <= data["results"]["machine"]["cores"]
    rows = head("tokens", "split", *["seconds", "of one process's"] * timed,
                "CPU seconds, all ranks", "peak beside the weights, MiB", "by the formula",
                "MB sent by a rank", "by the formula")  # fmt: skip
    for tokens, ways in data["results"]["lengths"].items():
        for name, of in ways.items():
            laps, cpu = of["step_s"], f"{statistics.median(of['cpu_s']):.1f}"
            of_one = ratio(laps, ways["one process"]["step_s"])
            sizes = [f"{size / 2**20:.0f}" for size in of["peak"]]
            sizes += [f"{size / 1e6:.1f}" for size in of["bytes"]]
            row = [f"{statistics.median(laps):.2f}", of_one] * timed + [cpu, *sizes]
            rows.append(f"| {int(tokens):,} | {name} | {' | '.join(row)} |")
    return [*rows, "", *longest_splits(data)]


def longest_splits(data):
    """And the longest sequences."""
    results = data["results"]
    rows = head("split", f"longest sequence in {results['budget_mib']} MiB", "by the formula")
    rows += [f"| {name} | {found:,} | {said:,} |"
             for name, (found, said) in results["longest"].items()]  # fmt: skip
    what = f"`{data['model']}`, {results['layers']} layers, {data['dtype']}"
    return [*rows, "", on(data | results, f"{what}, {data['world_size']} ranks")]


def compiled(data):
    """Steps with compiled layers, beside those without."""
    results = data["results"]
    rows = head("step", "seconds", "compiled", "of the time without",
                "peak beside the weights, MiB", "compiled", "the first step, s")  # fmt: skip
    for name, of in results["ways"].items():
        laps = of["step_s"]
        medians = [f"{statistics.median(each):.2f}" for each in laps]
        sizes = [f"{size / 2**20:.0f}" for size in of["peak"]]
        row = [name, *medians, ratio(laps[1], laps[0]), *sizes, f"{of['first_s']:.0f}"]
        rows.append(f"| {' | '.join(row)} |")
    what = f"`{data['model']}`, {results['layers']} layers, {data['dtype']}"
    size = " x ".join(map(str, results["size"]))
    return [*rows, "", on(data | results, f"{what}, {size} tokens, {data['world_size']} ranks")]


def precise_sums(data):
    """A sum that is rounded once, beside the library's own."""
    results = data["results"]
    rows = head("KiB", "error, rounded once", "the library's", "bytes sent", "the library's",
                "ms", "the library's", "of its time")  # fmt: skip
    for kib, of in results["sizes"].items():
        laps = [of["sum_s"][name] for name in ("precise", "library")]
        row = [f"{int(kib):,}", *(f"{of['error'][name]:.2e}" for name in of["error"])]
        row += [f"{of['bytes'][name]:,.0f}" for name in of["bytes"]]
        row += [f"{1e3 * statistics.median(each):.2f}" for each in laps]
        rows.append(f"| {' | '.join([*row, ratio(*laps)])} |")
    what = f"{data['dtype']}, {data['world_size']} ranks by {data['backend']}"
    return [*rows, "", on(data | results, what)]


def attention_peers(data):
    """Attention of a split sequence: how far off each is, or in what words it is refused."""
    cases = data["results"]["cases"]
    rows = head(f"{data['world_size']} ranks", *next(iter(cases.values())))
    for case, found in cases.items():
        cells = [f"{of:.1e}" if isinstance(of, float) else f"no: {of}" for of in found.values()]
        rows.append(f"| {case} | {' | '.join(cells)} |")
    what = f"{data['dtype']}, by {data['backend']}, DeepSpeed {data['results'].get('deepspeed')}"
    return [*rows, "", on(data | data["results"], what)]


def strategies(data, article=None):
    """Each strategy of data parallelism alone. article: see `strategies.rows`."""
    lines = rows(data, article)
    if not data:
        return lines
    size = f"{data['batch_size']} x {data['seq_len']} tokens a rank"
    what = f"`{data['model']}`, {data['dtype']}, {size}"
    return [*lines, "", on(data, what)]


TABLES = {  # name in its page: (made by, of)
    "summary": (summary, "report.json"),
    "checks": (checks, "report.json"),
    "speed": (speed, "tp_speed.json"),
    "profile": (profile, "tp_speed.json"),
    "longest": (longest, "longest.json"),
    "long_speed": (long_speed, "long_speed.json"),
    "memory": (memory, "estimate.json"),
    "compiled": (compiled, "compiled.json"),
    "precise_sums": (precise_sums, "precise_sums.json"),
    "attention_peers": (attention_peers, "attention_peers.json"),
    "strategies": (strategies, "strategies.json"),
    "strategies_gpu": (partial(strategies, article=ARTICLE_GB), "gpu/strategies.json"),
    "sequence": (sequence, "sequence_speed.json"),
    "sequence_4": (sequence, "sequence_speed_4.json"),
    "gpu": (gpu.table, "gpu/gpu.json"),
    "gpu_overview": (gpu.overview, "gpu/gpu.json"),
    "gpu_tasks": (gpu.tasks_table, "gpu/gpu.json"),
    "gpu_long": (gpu.long_table, "gpu/gpu.json"),
}


def filled_in():
    """{page: its text with its tables made anew}."""
    texts = {page: page.read_text() for page in PAGES}
    for name, (make, file) in TABLES.items():
        path = RECORDS / file  # of a GPU there need not be one
        lines = make(json.loads(path.read_text()) if path.exists() else None)
        begin = f"<!-- {name}, by figures/bench/report.py of figures/records/{file} -->\n"
        end = f"<!-- end of {name} -->\n"
        counts = {page: text.count(begin) for page, text in texts.items()}
        page = max(counts, key=counts.get)
        if sum(counts.values()) != 1 or texts[page].count(end) != 1:
            sys.exit(f"error: the table {name} has no place in the pages, or several")
        before, rest = texts[page].split(begin)
        table = "".join(f"{part}\n" for line in lines for part in in_lines(line))
        texts[page] = before + begin + table + end + rest.split(end)[1]
    return texts


def in_lines(text, width=120):
    """A line of a table as it is; a note below a table in lines of at most `width` characters."""
    return textwrap.wrap(text, width) if text.startswith("(") else [text]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default all tasks")
    parser.add_argument("--tables", action="store_true", help="run nothing; default no")
    args = parser.parse_args()
    script_of = {name: script for script, names in MORE.items() for name in names}
    known = [*TASK, *script_of]
    if unknown := set(args.names) - set(known):
        parser.error(f"no such task: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    tasks = [name for name in args.names if name in TASK]
    for name in set(args.names) - set(tasks):
        record_more(script_of[name], name)
    if not args.tables and (tasks or not args.names):
        record(RECORDS / "report.json", tasks)
    for page, text in filled_in().items():
        page.write_text(text)
        print(f"wrote the tables of {page}")


if __name__ == "__main__":
    main()
