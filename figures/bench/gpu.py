"""What one GPU can show: `make gpu` runs steps 1 to 5, in twenty minutes, `--long` the others.

    python -m figures.bench.gpu                 # steps 1 to 5, in order
    python -m figures.bench.gpu --long          # steps 6 to 10, which take half an hour more
    python -m figures.bench.gpu --step 3        # one of them
    python -m figures.bench.gpu --device cpu    # a rehearsal: small sizes
    python -m figures.bench.gpu --table --out figures/records/gpu  # gpu.md and gpu.png of its files

Each part of a step writes a file into --out; what is there is not run again. A step whose time is
up says what is left of it: call it again, alone, and it has eight minutes. Beside the files,
`gpu.md` is a table of what was seen and `gpu.png` a picture.

What is compared, not timed, runs as several jobs at once, on ranks that are forked from a process
with all imports done. What is timed runs alone.
"""

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import peft
import psutil
import torch
import transformers

import launch
from figures import RECORDS, ROOT
from figures.bench import one_token
from figures.bench.compiled import WAYS
from figures.bench.records import attention_flop, here_and_now, write_record
from figures.plan import longest
from harness.checks import NOT_ROUNDING
from harness.measure import is_for_memory, ratio
from loading.models import Source, cache_folder
from loading.smollm2 import find
from utils.errors import UserError

CUT = "its time is up"
ALONE_S = 480  # for a step that is asked for alone
JOB_S = {"cuda": 150, "cpu": 600}  # for one job of those that run at once; one that hangs is killed
LEAST_S = 15, 60  # that must be left to begin one of these, or what runs alone
GIB_A_RANK = 6  # that tp_mlp.py, which takes most, may need beside others
SCRIPTS = ["tp_mlp", "tp_attention", "tp_llama", "dtensor_llama", "kv_cache", "ulysses_forward",
           "ulysses_finetune", "pipeline_llama", "pipeline_threads", "data_parallel",
           "tp_naive", "tp_training", "pretrain_2d", "ring_attention", "tp_ulysses"]  # fmt: skip
DTYPES = "float32", "bfloat16", "float64"
LARGE = "random/llama-3.2-1b"  # what is measured on a GPU
# Without timed repetitions: they say nothing beside other jobs.
TIMED = ("tp_llama", "dtensor_llama", "kv_cache", "ulysses_forward", "ring_attention",
         "tp_ulysses", "pipeline_threads")  # fmt: skip
GENERATING = TIMED[:-1]
# Sizes for a rehearsal: on a CPU the usual ones would take minutes.
SMALL = {
    "tp_mlp": ["--hidden-size", 260, "--intermediate-size", 509],
    "tp_attention": ["--shapes", "model"],
    "pipeline_threads": ["--batch-size", 5, "--seq-len", 19],
    "pipeline_llama": ["--batch-size", 6, "--microbatches", 3, "--seq-len", 19],
    "data_parallel": ["--batch-size", 7, "--seq-len", 19, "--num-sequences", 19, "--epochs", 1],
    "tp_training": ["--seq-len", 19, "--iterations", 2],
    "pretrain_2d": ["--batch-size", 6, "--seq-len", 15, "--num-documents", 60, "--steps", 3],
    "ulysses_finetune": ["--seq-len", 40, "--steps", 2, "--check-steps", 1],
}  # fmt: skip
# Dense bfloat16 TFLOP/s that the makers' data sheets give, by words of the GPU's name.
PEAKS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "A100": 312, "L40S": 362,
         "L4": 121}  # fmt: skip


# Bytes a second of the GPU's memory, 1e9 of them, from the same sheets.
BANDWIDTHS = {"H100 PCIe": 2000, "H100 NVL": 3900, "H100": 3350, "H200": 4800, "A100": 2039,
              "L40S": 864, "L4": 300}  # fmt: skip
ONE, BY_HAND = list(WAYS)[:2]


@dataclass
class Part:
    """One command. name: of its files. words: what Python runs; `--json FILE` is added.

    ranks: of a script, forked beside other jobs; 0: a process of its own. size: as how many ranks
    it counts among the jobs that run at once; 0: it runs alone.
    """

    step: int
    name: str
    words: list
    ranks: int = 0
    size: int = 0
    json_flag: str = "--json"


STEPS = {
    # step: (what it shows, minutes that it has)
    1: ("every task in three dtypes, on 1, 2 and 4 ranks of the GPU", 4),
    2: ("the kernels' tests; SmolLM2, every task, in float32 and bfloat16", 3),
    3: ("Llama-3.2-1B's shapes, bfloat16: time of a step and of a token", 5),
    4: ("the longest sequence in 1 GiB beyond the model, of ours and others", 4),
    5: ("one step of 262,144 tokens, with and without --offload", 4),
    6: ("one step of 524,288 tokens", 8),
    7: ("one step of 1,048,576 tokens, as far as it comes", 15),
    8: ("the tests of every task on the odd Llama: NCCL, and ranks that share the GPU", 15),
    9: ("each strategy of data parallelism alone: 246 M parameters, 128 x 256 tokens a rank", 5),
    10: ("8,192 tokens: compiled layers of Tasks 3, 4 and the ring; --overlap on 2 ranks", 6),
}
LONG = 6, 7, 8, 9, 10


def parts(device, smollm2="smollm2"):
    """All of it. smollm2: what --model says for SmolLM2."""
    on_gpu = device == "cuda"
    small, place = ["--model", "random/small"], ["--device", device]
    # Before compute capability 8.0 no kernel gives what Task 5's techniques need in bfloat16.
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    dtype = "bfloat16" if on_gpu and not old else "float32"
    large = ["--model", LARGE, "--dtype", dtype] if on_gpu else small
    yield from every_task(on_gpu, place)
    test = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    test += ["-n", 4] if importlib.util.find_spec("xdist") else []
    tests = partial(Part, size=4, json_flag="--junitxml")
    words = [*test, "tests", "-m", "gpu", "-k", "not nccl and not shared and not fewer"]
    yield tests(2, "tests_gpu", words)
    for script in SCRIPTS:
        model = ["--model", smollm2 if on_gpu else "tiny"]
        for kind in DTYPES[:2]:
            words = [*task(script, on_gpu), *place, *model, "--dtype", kind]
            words += ["--new-tokens", 2] * (script in GENERATING)
            yield Part(2, f"smollm2_{script}_{kind}", words, 1, 1)
    lengths = (2048, 8192) if on_gpu else (512,)
    words = ["-m", "figures.bench.tp_speed", *large, "--ranks", 1, "--techniques", "hand-made"]
    words += ["--seq-lens", *lengths, *(["--num-layers", 16] if on_gpu else ["--repeats", 1])]
    yield Part(3, "step_time", words, json_flag="--output")
    compiled = ["-m", "figures.bench.compiled", *large, *place, "--batch-size", 1, "--repeats", 7]
    compiled += ["--seq-len", 8192 if on_gpu else 64, "--ways"]
    yield Part(3, "step_compiled", [*compiled, ONE, BY_HAND])
    words = ["-m", "figures.bench.one_token", *large, *place]
    words += [] if on_gpu else ["--prompt-len", 32, "--new-tokens", 4, "--repeats", 2]
    yield Part(3, "token_time", words)
    for name in LONGEST if on_gpu else LONGEST[:1] + LONGEST[3:]:
        words = ["-m", "figures.bench.longest", *large, *place, "--ranks", 1]
        words += ["--budgets", 1024 if on_gpu else 24, "--only", name]
        yield Part(4, f"longest_{slug(name)}", words, json_flag="--output")
    for step, positions in (5, 2**18), (6, 2**19), (7, 2**20):
        positions = positions if on_gpu else positions // 256
        for offload in ([], ["--offload"]) if step == 5 else (["--offload"],):
            words = ["-m", "figures.bench.one_step", *large, *place]
            words += ["--positions", positions, *offload]
            # What is before the step takes some time, too.
            words += ["--limit", 95 if step == 5 else 60 * STEPS[step][1] - 150]
            yield Part(step, f"step_{positions}{'_offload' * len(offload)}", words)
    for kind, selected in ("nccl", "test_nccl"), ("shared", "test_shared_gpu"):
        for script in SCRIPTS if on_gpu else SCRIPTS[:1]:
            words = [*test, "tests/test_tasks.py", "-k", f"{selected} and {script}"]
            yield tests(8, f"tests_{kind}_{script}", words)
    sizes = ("random/246m", 128, 256) if on_gpu else ("tiny", 2, 16)
    words = ["-m", "figures.bench.strategies", *place, "--dtype", dtype, "--rounds", 1]
    for flag, size in zip(("--model", "--batch-size", "--seq-len"), sizes, strict=True):
        words += [flag, size]
    yield Part(9, "strategies", words)
    others = [name for name in WAYS if name not in (ONE, BY_HAND)]
    yield Part(10, "compiled", [*compiled, ONE, *others])
    words = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    words += ["--nproc_per_node", 2, "-m", "figures.bench.overlap", *large, *place]
    words += ["--share-gpus"] * on_gpu + ["--batch-size", 1, "--seq-len", 8192 if on_gpu else 64]
    yield Part(10, "overlap", words)


# (What needs the GPU's allocator or its host memory comes second and third: a rehearsal lacks it.)
LONGEST = ["ours", "ours, expandable segments", "ours, offload", "selective checkpoint",
           "with checkpointing", "Hugging Face + PEFT"]  # fmt: skip


def slug(name):
    return re.sub(r"\W+", "_", name).lower()


def every_task(on_gpu, place):
    """Of each script, dtype and number of ranks a part; first what most users will run.

    A rehearsal has several ranks in float32 only: `make test-all` has them in all dtypes.
    """
    for ranks in (1, 2, 4):
        shared = ["--share-gpus"] if on_gpu and ranks > 1 else []
        for dtype in DTYPES if on_gpu or ranks == 1 else DTYPES[:1]:
            for script in SCRIPTS:
                name = f"{script}_{dtype}" if ranks == 1 else f"{script}_{ranks}_ranks"
                name += f"_{dtype}" if ranks > 1 and dtype != "float32" else ""
                words = [*task(script, on_gpu), *place, *shared, "--dtype", dtype]
                yield Part(1, name, words, ranks, ranks)


def task(script, on_gpu):
    words = [f"tasks/{script}.py", *["--repeats", 0] * (script in TIMED)]
    return words if on_gpu else [*words, *SMALL.get(script, [])]


# ---------------------------------------------------------------- running


def file_of(part, out):
    return out / f"{part.name}.{'xml' if part.json_flag == '--junitxml' else 'json'}"


def failed_of(part, out):
    """A file that says why a part failed; it is run again then."""
    return out / f"{part.name}.failed"


class Jobs:
    """Runs parts. room: how many ranks may be at work at once.

    As many as there are cores and memory for, but at least the 4 of one job.
    """

    fork_from = launch.Nursery

    def __init__(self, out, device):
        self.out, self.device, self.mother = out, device, None
        memory = psutil.virtual_memory().total
        if device == "cuda":
            memory = min(memory, torch.cuda.get_device_properties(0).total_memory)
        self.room = max(4, min(os.cpu_count(), memory // (GIB_A_RANK * 2**30)))
        # All ranks have the one GPU. What is said of NCCL reaches them as it is.
        self.env = launch.ONE_GPU if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}

    def run_all(self, left, until):
        """Run parts until it is time.monotonic() `until`: yields (part, what is to be said of it).

        Those that were not begun, or not done, are left in `left`.
        """
        if any(part.ranks for part in left) and self.mother is None:
            self.mother = self.fork_from(self.env)
        running, free, again = {}, self.room, []
        with ThreadPoolExecutor(self.room) as pool:
            waiting = list(left)
            while True:
                if not waiting and not running:  # alone, what had too little memory beside others
                    waiting, again = again, []
                while waiting and (size := waiting[0].size or self.room) <= free:
                    if until - time.monotonic() < LEAST_S[not waiting[0].size]:
                        waiting.clear()
                        break
                    part = waiting.pop(0)
                    free -= size
                    running[pool.submit(self.run, part, until)] = part, size
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    part, size = running.pop(future)
                    free += size
                    said = self.result_of(future, part)
                    if said.startswith("FAILED") and size < self.room and self.was_short(part):
                        again.append(replace(part, size=self.room))
                        failed_of(part, self.out).unlink(missing_ok=True)
                        said = "out of memory beside others: again, alone, at the end"
                    elif said != CUT:
                        left.remove(next(p for p in left if p.name == part.name))
                    yield part, said

    def result_of(self, future, part):
        """What is to be said of a part. Where the process that forks is gone, it is made anew."""
        try:
            return future.result()
        except RuntimeError as error:
            failed_of(part, self.out).write_text(f"{error}\n")
            self.log(part).write_text(f"{error}\n")
            if self.mother.process.poll() is not None:
                self.mother = self.fork_from(self.env)
            return f"FAILED: {error}"

    def was_short(self, part):
        return is_for_memory(self.log(part).read_text())

    def log(self, part):
        return self.out / f"{part.name}.log"

    def run(self, part, until):
        """Run a part, and keep its file if it is whole: what is to be said of it."""
        path = file_of(part, self.out)
        began = path.with_name(f"began_{path.name}")  # what is not whole has another name
        words = list(map(str, [*part.words, part.json_flag, began]))
        begin = time.monotonic()
        code = (self.forked if part.ranks else self.apart)(part, words, until)
        took = time.monotonic() - begin
        if code is None:
            return CUT
        if began.exists() and (not code or path.suffix == ".xml"):  # which says what failed
            began.replace(path)
        failed = failed_of(part, self.out)
        failed.unlink(missing_ok=True)
        if not code and path.exists():
            return f"{took:.0f} s"
        why = reason(self.log(part).read_text())
        failed.write_text(f"{why}\n")
        return f"FAILED, see {self.log(part)}: {why}"

    def forked(self, part, words, until):
        """The exit code of its ranks, forked beside others; None where time was up."""
        seconds = min(until - time.monotonic(), JOB_S[self.device])
        folder = self.out / f"began_{part.name}"
        folder.mkdir(exist_ok=True)
        result = launch.ranks(
            ROOT / words[0], *words[1:], nproc=part.ranks, folder=folder, timeout=seconds,
            env=self.env, mother=self.mother,
        )  # fmt: skip
        shutil.rmtree(folder)
        self.log(part).write_text(f"{result.out}\n{result.err}\n")
        late = "TIMEOUT" in result.err and time.monotonic() >= until
        return None if late else result.code

    def apart(self, part, words, until):
        """The exit code of a process of its own; None where time was up."""
        with self.log(part).open("w") as said:
            job = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=said, stderr=said)
            try:
                return job.wait(max(0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                others = psutil.Process(job.pid).children(recursive=True)
                job.terminate()
                with suppress(subprocess.TimeoutExpired):
                    job.wait(30)
                for process in [job, *others]:  # ranks that it had started, too
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                job.wait()
                return None


def reason(text):
    """Of what a failed job printed the line that says most."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    for wanted in ("error: ", "TIMEOUT", "FAILED", r"\w*Error\b"):
        if found := [line for line in lines if re.match(rf"(check .*)?({wanted})", line)]:
            return found[-1][:200]
    return lines[-1][:200] if lines else "it printed nothing"


def drive(steps, out, device, smollm2=None):
    """Run what is missing of some steps; the names of what failed.

    smollm2: SmolLM2's directory; None: from the cache, or fetched into it.
    """
    refuse_mixture(out, header(device))
    jobs, failed = Jobs(out, device), []
    for number in steps:
        of_step = [part for part in parts(device, smollm2 or "smollm2") if part.step == number]
        left = [part for part in of_step if failed_of(part, out).exists()
                or not file_of(part, out).exists()]  # fmt: skip
        print(
            f"step {number}: {STEPS[number][0]}: {len(left)} of {len(of_step)} to run", flush=True
        )
        if any(part.name.startswith("smollm2") for part in left) and (
            why := missing(device, smollm2)
        ):
            print(f"    SmolLM2 is not there, and its parts are not run: {why}", flush=True)
            left = [part for part in left if not part.name.startswith("smollm2")]
        minutes = STEPS[number][1]
        until = time.monotonic() + (max(ALONE_S, 60 * minutes) if len(steps) == 1 else 60 * minutes)
        until += 3600 * (device == "cpu")  # a rehearsal comes to its end
        for part, said in jobs.run_all(left, until):
            print(f"    {part.name}: {said}", flush=True)
            failed += [part.name] * said.startswith("FAILED")
        if left:
            again = f"make gpu STEP={number}"
            print(f"    time is up; {again} goes on: {', '.join(p.name for p in left)}")
        write(out, device)
    return failed


def missing(device, smollm2):
    """Why SmolLM2 cannot be had, in one line; None: it is there, now at the latest."""
    try:
        if device == "cuda":
            Source(str(smollm2 or find(cache_folder())))
    except UserError as error:
        return str(error)


# ---------------------------------------------------------------- what was seen


def header(device):
    """What the records are of: machine, date, versions, and the commit that made them."""
    found = here_and_now(device, 1) | {"device": device}
    found |= {module.__name__: module.__version__ for module in (torch, transformers, peft)}
    commit = said_by("git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude", "*")
    driver = said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found | {"commit": commit, "driver": driver if device == "cuda" else None}


def said_by(*words):
    """The first line that a program prints; None without it."""
    with suppress(OSError, subprocess.CalledProcessError, IndexError):
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return said.splitlines()[0]


SAME = "machine", "torch", "transformers", "peft"


def refuse_mixture(out, here):
    """What another machine or another PyTorch showed must not stand beside what this one shows."""
    earlier = out / "gpu.json"
    if not earlier.exists():
        return
    there = json.loads(earlier.read_text())
    for name in SAME:
        if there.get(name) != here[name]:
            sys.exit(f"error: {out} is of another {name} ({there.get(name)}, not {here[name]}): "
                     "name another folder with OUT=, or remove it")  # fmt: skip


def write(out, device):
    """gpu.json, gpu.md and gpu.png, of what was run on this machine so far."""
    here, earlier = header(device), out / "gpu.json"
    if earlier.exists():  # another time's commit made a part of it
        commits = str(json.loads(earlier.read_text()).get("commit")).split(", ")
        here["commit"] = ", ".join(dict.fromkeys([*commits, str(here["commit"])]))
    write_tables(out, here)


def write_tables(out, head):
    """The same of files that are there, wherever they were made. head: see `header`."""
    data, records = record(out, head)
    write_record(out / "gpu.json", data)
    (out / "gpu.md").write_text("\n".join(table(data)) + "\n")
    try:
        from figures.draw.kinds import draw_gpu  # by matplotlib
    except ModuleNotFoundError as error:
        print(f"note: gpu.png is not drawn: {error}")
    else:
        draw_gpu(data, records, out / "gpu.png")


def record(out, head):
    """gpu.json: of every step, in a few words, what its parts' files say; and the files."""
    records, planned, groups, failed = [], {}, {}, {}
    for part in parts(head["device"]):
        path, why = file_of(part, out), failed_of(part, out)
        group = group_of(part)
        planned[group] = planned.get(group, 0) + 1
        if why.exists():
            said = f"{part.name}: FAILED: {why.read_text().strip()}"
            failed.setdefault(str(part.step), []).append(said)
        if path.exists():
            one = json.loads(path.read_text()) if path.suffix == ".json" else counts(path)
            groups.setdefault(group, {})[part.name] = one
            records += [one] * (path.suffix == ".json")
    seen = {}
    for group, of in groups.items():
        seen.setdefault(str(group[0]), []).extend(summary(group[1], of, planned[group]))
    for step, lines in failed.items():
        seen.setdefault(step, []).extend(lines)
    return {name: head.get(name) for name in HEAD} | {"seen": seen}, records


def group_of(part):
    """What is told in one line: of tasks, as many ranks and one dtype; of tests, one kind."""
    if part.ranks:
        kind = part.name.startswith("smollm2"), part.ranks, dict(pairwise(part.words))["--dtype"]
    else:
        kind = "_".join(part.name.split("_")[:2]) if part.step == 8 else part.name
    return part.step, kind


HEAD = "machine", "driver", "date", "device", *SAME[1:], "commit", "note"


def table(data):
    """The lines of gpu.md, and of speed.md, from `record`'s; None: nothing was run."""
    lines = ["| step | `make gpu` shows | seen |", "|---|---|---|"]
    for number, (what, _) in STEPS.items():
        seen = (data or {"seen": {}})["seen"].get(str(number)) or ["not run"]
        name = f"{number}{', `make gpu-long`' * (number in LONG)}"
        lines.append(f"| {name} | {what} | {seen[0]} |")
        lines += [f"| | | {words} |" for words in seen[1:]]
    if data:
        lines += ["", "(FLOP are those executed: 2 a weight and token forward, 4 backward, and "
                  "attention's 2 and 5 products of the causal half. They are divided by the whole "
                  "step's time.)"]  # fmt: skip
        lines += ["", f"({on(data)})"]
    return lines


def tasks_table(data, folder=RECORDS / "gpu"):
    """Of each task, in each way in which some ran: how many checks, and the nearest of them."""
    ways, rows = {}, {script: {} for script in SCRIPTS}
    for part in parts(data["device"] if data else "cuda"):
        if part.step == 1 and file_of(part, folder).exists():
            one = json.loads(file_of(part, folder).read_text())
            how = f" ({one['backend']})" if part.ranks > 1 else ""
            way = f"{part.ranks} rank{'s' * (part.ranks > 1)}{how}, {one['dtype']}"
            ways[way] = None
            rows[one["task"]][way] = f"{len(one['checks'])}, {share_of(one):.0%}"
    lines = [f"| task | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    for script, cells in rows.items():
        words = [cells.get(way, "no record") for way in ways]
        lines.append(f"| `{script}.py` | {' | '.join(words)} |")
    return [*lines, "", f"({on(data)})"] if ways else ["Not run yet."]


def long_table(data, folder=RECORDS / "gpu"):
    """The longest sequences and steps that were measured, beside what the formulas say today."""
    records = record(folder, data)[1] if data else []
    lines = [
        "| in 1 GiB beyond the model | positions | by today's formula | KiB of tensors a position "
        "| by today's formula |",
        "|---" * 5 + "|",
    ]
    for one in records:
        for run in (run for run in one.get("runs", []) if run.get("found")):
            c, name = Source(one["model"]).config, run["contender"]
            e, budget = getattr(torch, one["dtype"]).itemsize, run["budget_mib"] * 2**20
            device, found = torch.device(one["device"]), run["found"]
            said = longest.estimate(name, c, run["world_size"], e, budget, device)
            counted = longest.expected(name, c, e, found, budget, device) / found
            sizes = [f"{size / 2**10:,.1f}" for size in (run["measured_bytes"], counted)]
            cells = [name, f"{found:,}", f"{said:,}", *sizes]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| one exact step of | seconds | peak, GiB | by today's formula |",
        "|---|---|---|---|",
    ]
    for one in (one for one in records if "positions" in one):
        source, more = Source(one["model"]), ", `--offload`" * one["offload"]
        e = getattr(torch, one["dtype"]).itemsize
        tile = longest.default_tile_mib(torch.device(one["device"])) * 2**20
        weights = sum(torch.Size(shape).numel() for shape in source.shapes.values()) * e
        said = weights + longest.most("ours, offload" if one["offload"] else "ours", source.config,
                                      e, one["positions"], tile, longest.tensors)  # fmt: skip
        seconds = "not measured" if one["step_s"] is None else f"{one['step_s']:.0f}"
        cells = [
            f"{one['positions']:,} tokens{more}",
            seconds + ", extrapolated" * one["extrapolated"],
        ]
        cells += [f"{size / 2**30:.2f}" for size in (one["peak_bytes"], said)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", f"({on(data)})"] if records else ["Not run yet."]


def overview(data, folder=RECORDS / "gpu"):
    """What a user looks for: ours, Hugging Face's, and what the GPU allows, of `make gpu`'s files.

    The limits: all FLOP at the data sheet's rate; all weights at the memory's.
    """

    def read(name):
        path = folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def row(what, *cells, step):
        return (
            f"| {what} | {' | '.join(of or 'not run' for of in cells)} | `make gpu STEP={step}` |"
        )

    lines = [
        "| | ours | Hugging Face | Hugging Face, compiled | limit | command |",
        "|---" * 6 + "|",
    ]
    card = " ".join(data["machine"]["gpus"]) if data else ""
    peak, rate = of_card(PEAKS, card), of_card(BANDWIDTHS, card)
    lines.append(row("a step of 8,192 tokens", *step_cells(read("step_compiled"), peak), step=3))
    token = read("token_time")
    for size, of in token.get("results", {}).get("token_ms", {"1": {}, "8": {}}).items():
        ours, *theirs = (of.get(name) and f"{of[name]:.2f} ms" for name in TOKEN_WAYS)
        if one_token.PARTS in of:
            ours += f"; {of[one_token.PARTS]:.2f} ms (norms and MLPs compiled)"
        limit = rate and of and f"{token['results']['weights_bytes'] / rate / 1e6:.2f} ms"
        lines.append(row(f"a token, batch {size}", ours, *theirs, limit, step=3))
    longest_of = {
        run["contender"]: run["found"]
        for name in LONGEST
        for run in read(f"longest_{slug(name)}").get("runs", [])
        if run.get("found")
    }
    ours = [f"{longest_of[name]:,} ({name})" for name in LONGEST[:3] if name in longest_of]
    theirs = [f"{longest_of[name]:,} ({name})" for name in LONGEST[3:] if name in longest_of]
    what = "the longest sequence in 1 GiB beyond the model"
    lines.append(row(what, "; ".join(ours), "; ".join(theirs), "-", "-", step=4))
    config = Source(LARGE).config
    for step, positions in (5, 2**18), (7, 2**20):
        ours, flop = [], attention_flop(config, positions)
        for offload in "", "_offload":
            one = read(f"step_{positions}{offload}")
            if one.get("step_s"):
                # What was cut short has not come to its peak.
                peak_gib = f"{one['peak_bytes'] / 2**30:.1f} GiB"
                more = "extrapolated" if one["extrapolated"] else peak_gib
                ours.append(f"{one['step_s']:.0f} s, {more}" + " (--offload)" * bool(offload))
                flop = one["attention_flop"]
        least = peak and f"{sum(flop.values()) / peak / 1e12:.0f} s, of attention alone"
        what = f"one exact step of {positions:,} tokens"
        lines.append(row(what, "; ".join(ours), "-", "-", least, step=step))
    return [*lines, "", f"({on(data)})"] if data else ["Not run yet."]


TOKEN_WAYS = one_token.GRAPH, one_token.EAGER, one_token.COMPILED


def of_card(table, card):
    """A table's number for the GPU of this name, or None."""
    return next((of for name, of in table.items() if re.search(rf"\b{name}\b", card)), None)


def step_cells(data, peak):
    """Of a step, ours compiled, Hugging Face's, that compiled, and the limit: seconds and memory.

    peak: the GPU's TFLOP/s, or None.
    """
    if not data:
        return [None] * 4
    ways = data["results"]["ways"]
    flop = flop_of_step(Source(data["model"]), math.prod(data["results"]["size"]))

    def cell(name, compiled):
        median = middle(ways[name]["step_s"][compiled])
        share = f" ({flop / median / 1e12 / peak:.0%} of the peak)" if peak else ""
        return f"{median:.3f} s{share}, {ways[name]['peak'][compiled] / 2**30:.1f} GiB"

    limit = peak and f"{flop / peak / 1e12:.3f} s"
    return [cell(BY_HAND, True), cell(ONE, False), cell(ONE, True), limit]


def on(data):
    """Where, when, and by what it was seen, in words."""
    where = data["machine"]
    words = [f"{data['date']}", *(where["gpus"] or [where["cpu"]])]
    words += [f"driver {data['driver']}"] * bool(data.get("driver")) + [f"{where['cores']} cores"]
    words += [f"{name} {data[key]}" for name, key in NAMES.items() if data.get(key)]
    return ", ".join(words) + (f"; {data['note']}" if data.get("note") else "")


NAMES = {"PyTorch": "torch", "transformers": "transformers", "peft": "peft", "commit": "commit"}


def counts(path):
    """{kind: how many} of the tests in a JUnit file."""
    kinds = "tests", "failures", "errors", "skipped"
    return {kind: int(re.search(f'{kind}="(\\d+)"', path.read_text())[1]) for kind in kinds}


def summary(kind, records, planned):
    """The lines of one group, {part: its file's content}; planned: how many parts it has."""
    some, ran = next(iter(records.values())), f"{len(records)} of {planned}"
    if "tests" in some:
        total = {what: sum(one[what] for one in records.values()) for what in some}
        said = ", ".join(f"{count} {what}" for what, count in total.items())
        return [f"{kind}{f', {ran} scripts' * (planned > 1)}: {said}"]
    if "ways" in some.get("results", {}):
        return [
            f"{name}: {summary_of_compiled(of)}" for name, of in some["results"]["ways"].items()
        ]
    if "token_ms" in some.get("results", {}):
        return [f"{kind}, batch {size}: {one_token.in_words(of)}"
                for size, of in some["results"]["token_ms"].items()]  # fmt: skip
    if "backward_s" in some.get("results", {}):
        return [f"{kind}, {some['world_size']} ranks: {summary_of_overlap(some['results'])}"]
    if "checks" in some:
        return [summary_of_tasks(records, ran)]
    if "positions" in some:
        return [f"{kind}: {summary_of_step(some)}"]
    if "strategies" in some:
        peaks = {name: max(job["tensors"] for job in jobs)
                 for name, jobs in some["strategies"].items()}  # fmt: skip
        said = ", ".join(f"{name} {peak / 1e9:.2f} GB" for name, peak in peaks.items())
        return [f"{kind}: peak of a rank's tensors: {said}"]
    if "prompt_tokens" in some:
        return [f"{kind}: {summary_of_speed(run, some)}" for run in some["runs"]]
    return [f"{kind}: {run['found']:,} positions in {run['budget_mib']} MiB (estimate "
            f"{run['estimate']:,})" for run in some["runs"]]  # fmt: skip


def share_of(one):
    """How much of its tolerance a task's nearest check took; null: what must be exact was not."""
    shares = [c["share"] for c in one["checks"] if not c["name"].startswith(NOT_ROUNDING)]
    return max((math.inf if share is None else share for share in shares), default=0)


def summary_of_tasks(records, ran):
    """Several tasks' records, on as many ranks and in one dtype."""
    some, nearest = next(iter(records.values())), {}
    for one in records.values():
        nearest[one["task"]] = share_of(one)
    last, ranks = max(nearest, key=nearest.get), some["world_size"]
    how = " by " + " and ".join(sorted({one["backend"] for one in records.values()}))
    return (f"{Path(some['model']).name}, {ranks} rank{'s' * (ranks > 1)}, {some['dtype']}: "
            f"{ran} tasks passed on {some['device']}{how * (ranks > 1)}, "
            f"{sum(len(one['checks']) for one in records.values())} checks, nearest to its "
            f"tolerance {nearest[last]:.0%} ({last})")  # fmt: skip


def middle(laps):
    """The median; of an even number the later of the two in the middle."""
    return sorted(laps)[len(laps) // 2]


def summary_of_compiled(of):
    seconds = list(map(middle, of["step_s"]))
    peaks = [peak / 2**30 for peak in of["peak"]]
    return (f"{seconds[0]:.3f} s, compiled {seconds[1]:.3f} s; peak beside the weights "
            f"{peaks[0]:.1f} GiB, compiled {peaks[1]:.1f} GiB")  # fmt: skip


def summary_of_overlap(results):
    """One backward with all-reduces after the weights' gradients, one with both at once."""
    before, after = results["backward_s"].values()
    said = f"{middle(before):.3f} s, overlapped {ratio(after, before)}"
    for name, (seconds, share) in results["beside"].items():
        said += f"; {name}: NCCL's kernels {seconds:.3f} s, other kernels beside {share:.0%} of it"
    return said


def summary_of_step(data):
    forward = data["done_s"]["run_attention"]
    came = f"{len(forward)} of {data['layers']} layers forward in {forward[-1]:.0f} s"
    if data["step_s"] is None:
        return came
    rate = sum(data["attention_flop"].values()) / data["step_s"] / 1e12
    more = ", extrapolated" if data["extrapolated"] else ""
    return (f"{data['step_s']:.0f} s{more}, {rate:.0f} TFLOP/s by attention's FLOP alone; "
            f"peak {data['peak_bytes'] / 2**30:.1f} GiB")  # fmt: skip


def flop_of_step(source, T):
    """Executed FLOP of a step of one sequence of T tokens; the embedding is a lookup."""
    c = source.config
    weights = sum(torch.Size(shape).numel() for name, shape in source.shapes.items()
                  if "embed_tokens" not in name)  # fmt: skip
    weights += c.tie_word_embeddings * c.vocab_size * c.hidden_size
    return 6 * weights * T + sum(attention_flop(c, T).values())


def summary_of_speed(run, data):
    """Tokens a second, and executed TFLOP/s: 2 a weight and token forward, 4 backward.

    Beside them attention's, see `attention_flop`; the embedding is a lookup. Also the time beside
    the unmodified model's, and of generation.
    """
    source, T = Source(data["model"], data["num_layers"][0]), run["seq_len"]
    ours, theirs = (run["results"][side] for side in ("parallel", "single"))
    steps = [[sum(pair) for pair in zip(laps["forward"], laps["backward"], strict=True)]
             for laps in (ours, theirs)]  # fmt: skip
    median = middle(steps[0])
    rate = flop_of_step(source, T) / median / 1e12
    on = " ".join(data["machine"]["gpus"]) if data["dtype"] == "bfloat16" else ""
    peak = of_card(PEAKS, on)
    share = f", {rate / peak:.0%} of {peak}" if peak else ""
    said = (f"{T} tokens: {median:.3f} s, {T / median:,.0f} tokens/s, {rate:.1f} TFLOP/s{share}, "
            f"{ratio(*steps)} of the unmodified model's time")  # fmt: skip
    if "generate" in ours:
        said += (f"; {data['new_tokens']} tokens after {data['prompt_tokens']}: "
                 f"{middle(ours['generate']) / data['new_tokens'] * 1e3:.1f} ms each, "
                 f"{ratio(ours['generate'], theirs['generate'])} of its time")  # fmt: skip
    return said


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, choices=STEPS, help="default 1 to 5, in order")
    which.add_argument("--long", action="store_true", help="steps 6 to 10; default no")
    which.add_argument("--table", action="store_true", help="run nothing: gpu.md and gpu.png from "
        "the files in --out, wherever they were made; default no")  # fmt: skip
    flag("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal; default cuda")
    flag("--out", type=Path, help="folder; default out/gpu, or out/gpu-rehearsal")
    flag(
        "--smollm2", type=Path, help="SmolLM2's directory; default that in the cache, else fetched"
    )
    args = parser.parse_args()
    name = "gpu" if args.device == "cuda" else "gpu-rehearsal"
    args.out = (args.out or ROOT / "out" / name).resolve()
    if args.table:
        try:
            write_tables(args.out, json.loads((args.out / "gpu.json").read_text()))
        except (OSError, ValueError) as error:
            parser.error(f"--table: {error}")
        return print(f"wrote {args.out / 'gpu.md'}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU; --device cpu rehearses it")
    args.out.mkdir(parents=True, exist_ok=True)
    steps = [args.step] if args.step else [n for n in STEPS if (n in LONG) == args.long]
    for number in steps:
        what, minutes = STEPS[number]
        print(f"step {number}: {what} (at most {minutes} min on a GPU)", flush=True)
    failed = drive(steps, args.out, args.device, args.smollm2 and args.smollm2.resolve())
    print(f"wrote {args.out / 'gpu.md'}")
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
