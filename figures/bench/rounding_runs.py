"""What other roundings do to the checks: right runs that pass, and wrong ones that do not.

`python -m figures.bench.tolerance --rounding` makes the record, rounding.json, and `--table` its
table.
A run that is in the record is not made again; `--only WORD ...` takes those with these words.
"""

import re
import subprocess
import tempfile
import textwrap
import time
from pathlib import Path

import torch

from conftest import make_llama
from figures.bench.few_tokens import LAYERS, TOKENS, WRONG, gradients, make_wrong, share
from figures.bench.records import add, machine, resume, torchrun
from harness.tolerance import LIMITS
from launch import SCRIPTS, TASKS
from test_planted_bugs import BUGS, arguments, refuse_planted

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SEEDS = 200
README = "tp_mlp, README's command"  # at full size, where it once refused 11 of these 16 runs
README_SEEDS = 1337, 1, 2, 3, 4, 5, 6, 7
SCRIPT_SEEDS = {"tiny": (1, 2), "smollm2": (1,)}  # minutes a run with the second
ROUNDING = Path(__file__).with_name("rounding.py")


def plan():
    """All runs, (key, function): from the quickest to the longest."""
    runs = []
    for dtype in DTYPES:
        for layer in LAYERS:
            for tokens in TOKENS:
                key = {"what": "few tokens", "layer": layer, "tokens": tokens, "dtype": dtype}
                runs.append((key, few_tokens))
    for ranks in (2, 4):
        for seed in README_SEEDS:
            key = {"what": "script", "script": README, "model": "tiny", "dtype": "float32"}
            runs.append((key | {"ranks": ranks, "seed": seed}, script_run))
    for model, seeds in SCRIPT_SEEDS.items():
        for seed in seeds:
            for dtype in DTYPES:
                for script in SCRIPTS:
                    key = {"what": "script", "script": script, "model": model, "dtype": dtype}
                    runs.append((key | {"ranks": 2, "seed": seed}, script_run))
    for name, (script, *_) in BUGS.items():
        runs.append(
            ({"what": "planted bug", "script": script, "bug": name, "seed": 1}, planted_bug)
        )
    return runs


def is_of(run, key):
    return all(run.get(name) == value for name, value in key.items())


def few_tokens(key):
    """SEEDS right runs of a layer, and for each tenth seed the wrong ones."""
    layer, tokens, dtype = key["layer"], key["tokens"], DTYPES[key["dtype"]]
    found = {"checks": 0, "refused": 0, "nearest": 0.0}
    wrong = {what: [0, 0] for what in WRONG}  # how many, and how many of them are refused
    for seed in range(SEEDS):
        right = gradients(layer, seed, tokens, dtype=dtype)
        for pairs in right.values():
            of_limit = share(pairs, dtype)
            found["checks"] += 1
            found["refused"] += of_limit > 1
            found["nearest"] = max(found["nearest"], of_limit)
        for what in WRONG if seed % 10 == 0 else ():
            for pairs in make_wrong(right, what, dtype).values():
                wrong[what][0] += 1
                wrong[what][1] += share(pairs, dtype) > 1
    return found | {"seeds": SEEDS, "wrong": wrong}


def script_run(key):
    """One run of a script: all its checks pass, or what it said last."""
    script, flags = key["script"], []
    if script == README:
        script = "tp_mlp"
    else:
        flags = [*arguments(script, key["model"]), "--model", key["model"]]
    flags += ["--dtype", key["dtype"], "--device", "cpu"]
    words = [key["seed"], TASKS / f"{script}.py", *flags]
    data, done = torchrun(ROUNDING, key["ranks"], *words, stderr=subprocess.PIPE)
    if not data:
        failed = re.findall(r"^(?:FAILED|error:) .*", done.stdout + done.stderr, re.MULTILINE)
        return {"checks": 0, "refused": 1, "nearest": None, "said": failed or done.stderr[-2000:]}
    checks = [check for check in data["checks"] if check.get("times_reference")]
    nearest = max((check["share"] for check in checks), default=0.0)
    return {"checks": len(checks), "refused": 0, "nearest": nearest}


def planted_bug(key):
    """A copy of the scripts with one wrong line must fail, with the name of a check."""
    with tempfile.TemporaryDirectory() as folder:
        odd_llama = str(make_llama(Path(folder) / "odd_llama"))
        (Path(folder) / "tasks").mkdir()
        try:
            refuse_planted(key["bug"], Path(folder) / "tasks", odd_llama, key["seed"])
            return {"wrong": 1, "refused": 1}
        except AssertionError as error:
            return {"wrong": 1, "refused": 0, "said": str(error)[-2000:]}


def record(path, only):
    """Make the runs that `path` does not have yet, one by one."""
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    setting = {"machine": machine(), "versions": versions, "limits": LIMITS}
    records = resume(path, setting)
    torch.set_num_threads(1)
    for key, function in plan():
        name = ", ".join(map(str, key.values()))
        there = any(is_of(run, key) for run in records["runs"])
        if there or not all(word in name for word in only):
            continue
        began = time.monotonic()
        found = function(key)
        print(name, found, flush=True)
        add(path, records, key, found | {"minutes": (time.monotonic() - began) / 60})


INTRODUCTION = f"""## With other roundings

By `python -m figures.bench.tolerance --rounding`. Linear layers add their products in another
order, one for each shape of a weight, as another computer's kernels would
(`figures/bench/rounding.py`).

Weights' gradients from few tokens, as two ranks compute them, {SEEDS} seeds. For right runs the
table has the largest share of a limit ("nearest"); for wrong ones, how many were refused. Wrong
values are 1 % off in float32, doubled or zero in bfloat16. The gradient of a faint head is 1e-4 of
the others'. With one token, queries and keys are left out: their gradient should be zero, and is
the rounding of one number a head.
"""
BUGS_SAID = """
Planted bugs (`tests/test_planted_bugs.py`) with other roundings: {done} of {all} were run;
{refused} of these were refused.
"""


def row(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def table(records):
    """The record as lines of tolerance.md. Of bugs that have another name by now, nothing."""
    kinds, left = {"few tokens": [], "script": [], "planted bug": []}, 0
    for key, _ in plan():
        found = [run for run in records["runs"] if is_of(run, key)]
        kinds[key["what"]] += found
        left += not found
    columns = ["layer", "tokens", "dtype", "right: checks", "refused", "nearest"]
    columns += [f"wrong: {what}" for what in WRONG]
    lines = [INTRODUCTION, row(*columns), "|---" * len(columns) + "|"]
    for run in kinds["few tokens"]:
        wrong = [f"{seen} of {number}" for number, seen in run["wrong"].values()]
        right = f"{run['checks']:,}", run["refused"], f"{run['nearest']:.0%}"
        lines.append(row(run["layer"], run["tokens"], run["dtype"], *right, *wrong))
    columns = ["script", "model", "dtype", "runs", "checks", "refused", "nearest"]
    lines += ["", "The scripts:", "", row(*columns), "|---" * len(columns) + "|"]
    groups = {}
    for run in kinds["script"]:
        groups.setdefault((run["script"], run["model"], run["dtype"]), []).append(run)
    for names, runs in sorted(groups.items()):
        checks, refused = (sum(run[what] for run in runs) for what in ("checks", "refused"))
        nearest = max(run["nearest"] or 0.0 for run in runs)
        lines.append(row(*names, len(runs), f"{checks:,}", refused, f"{nearest:.0%}"))
    bugs = kinds["planted bug"]
    refused = sum(run["refused"] for run in bugs)
    lines.append(BUGS_SAID.format(done=len(bugs), all=len(BUGS), refused=refused))
    lines += [f"Not refused: {run['bug']}." for run in bugs if not run["refused"]]
    minutes, number = sum(run["minutes"] for run in records["runs"]), len(plan())
    versions, dates = records["versions"], sorted({run["date"] for run in records["runs"]})
    said = (
        f"({dates[0]} to {dates[-1]}, in {minutes:.0f} minutes on the same machine, PyTorch "
        f"{versions['torch']}, transformers {versions['transformers']}; {left} of {number} runs "
        "are left.)"
    )
    return [*lines, *textwrap.wrap(said, 100)]
