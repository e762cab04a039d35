"""Everything that one GPU can show, in steps of at most eight minutes: `make gpu`.

    python figures/gpu.py                    # all steps, in order; what is there is not run again
    python figures/gpu.py --step 3           # one of them
    python figures/gpu.py --device cpu       # a rehearsal of all: small sizes

Each part of a step writes a file into --out; what is there is not run again. A step whose time is
up says what is left of it: call it again. There, `gpu.md` is a table of what was seen and `gpu.png`
a picture.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "tasks"))

import psutil
import torch
import transformers

from records import attention_flop, here_and_now, launcher
from utils.checks import OTHERWISE
from utils.models import Source

LIMIT_S, CUT = 480, "its time is up"
SCRIPTS = ["tp_mlp", "tp_attention", "tp_llama", "dtensor_llama", "kv_cache", "ulysses_forward",
           "ulysses_finetune", "pipeline_llama", "pipeline_threads", "data_parallel",
           "tp_training", "pretrain_2d", "ring_attention", "tp_ulysses"]  # fmt: skip
DTYPES = "float32", "bfloat16", "float64"
# Without timed repetitions, which are for several ranks.
QUICK = {name: ["--repeats", 0] for name in (
    "tp_llama", "dtensor_llama", "kv_cache", "ulysses_forward", "ring_attention",
    "tp_ulysses")}  # fmt: skip
# Dense bfloat16 TFLOP/s that the makers' data sheets give, by words of the GPU's name.
PEAKS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "A100": 312, "L40S": 362,
         "L4": 121}  # fmt: skip


@dataclass
class Part:
    """One command. name: of its files. words: what Python runs; `--json FILE` is added."""

    step: int
    name: str
    words: list
    ranks: int = 0  # of torchrun; 0: without
    json_flag: str = "--json"


STEPS = {
    # step: (what it shows, about how many minutes on a GPU)
    1: ("tests that want a GPU: kernels, NCCL", 8),
    2: ("tests that want a GPU: ranks that share it", 8),
    3: ("every task on one rank, in three dtypes", 7),
    4: ("every task on 2 and 4 ranks that share the GPU", 6),
    5: ("SmolLM2, every task, in float32 and bfloat16", 7),
    6: ("Llama-3.2-1B's shapes, bfloat16: time of a step", 3),
    7: ("the longest sequence in 1 GiB beyond the model, ours", 8),
    8: ("the same, of Hugging Face + PEFT and of checkpoints", 8),
    9: ("one step of 262,144 tokens, with and without --offload", 5),
    10: ("one step of 524,288 tokens", 8),
    11: ("one step of 1,048,576 tokens, as far as it comes", 8),
}


def parts(device):
    """All of it."""
    on_gpu = device == "cuda"
    small, place = ["--model", "random/small"], ["--device", device]
    # Before compute capability 8.0 no kernel gives what Task 5's techniques need in bfloat16.
    new = on_gpu and torch.cuda.get_device_capability() >= (8, 0)
    dtype = "bfloat16" if new else "float32"
    large = ["--model", "random/llama-3.2-1b", "--dtype", dtype] if on_gpu else small
    shared = ["--share-gpus"] if on_gpu else []
    test = ["-m", "pytest", "-q", "-rs", "tests/test_tasks.py", "tests/test_long_sequence.py"]
    test += [*(["-n", 4] if importlib.util.find_spec("xdist") else []), "-k"]
    yield Part(1, "tests_gpu", [*test, "gpu and not shared"], json_flag="--junitxml")
    for script in SCRIPTS:
        yield Part(1, f"tests_nccl_{script}", [*test, f"nccl and {script}"], json_flag="--junitxml")
        words = [*test, f"shared_gpu and {script}"]
        yield Part(2, f"tests_shared_{script}", words, json_flag="--junitxml")
        words = [f"tasks/{script}.py", *QUICK.get(script, []), *place]
        if not on_gpu and script == "tp_attention":
            words += ["--shapes", "model"]  # a CPU may take minutes for the others in bfloat16
        for dtype in DTYPES:
            yield Part(3, f"{script}_{dtype}", [*words, "--dtype", dtype], 1)
        for ranks in (2, 4):
            yield Part(4, f"{script}_{ranks}_ranks", [*words, *shared], ranks)
        for dtype in DTYPES[:2]:
            more = ["--model", "smollm2" if on_gpu else "tiny", "--dtype", dtype]
            more += ["--new-tokens", 2] * (script in QUICK)
            yield Part(5, f"smollm2_{script}_{dtype}", [*words, *more], 1)
    lengths = (2048, 8192) if on_gpu else (512,)
    words = ["figures/tp_speed.py", *large, "--ranks", 1, "--techniques", "hand-made"]
    words += ["--seq-lens", *lengths, *(["--num-layers", 16] if on_gpu else ["--repeats", 1])]
    yield Part(6, "step_time", words, json_flag="--output")
    budget = 1024 if on_gpu else 32
    for step, contenders in ((7, ["ours", *["ours, offload"] * on_gpu]),
                             (8, ["selective checkpoint", "with checkpointing",
                                  "Hugging Face + PEFT"])):  # fmt: skip
        for name in contenders:
            words = ["figures/longest.py", *large, *place, "--ranks", 1, "--budgets", budget]
            slug = re.sub(r"\W+", "_", name).lower()
            yield Part(step, f"longest_{slug}", [*words, "--only", name], json_flag="--output")
    for step, positions in (9, 2**18), (10, 2**19), (11, 2**20):
        positions = positions if on_gpu else positions // 256
        for offload in ([], ["--offload"]) if step == 9 else (["--offload"],):
            words = ["figures/one_step.py", *large, *place, "--positions", positions, *offload]
            words += ["--limit", LIMIT_S - 150]  # what is before the step takes some time, too
            yield Part(step, f"step_{positions}{'_offload' * len(offload)}", words)


# ---------------------------------------------------------------- running


def file_of(part, out):
    return out / f"{part.name}.{'xml' if part.json_flag == '--junitxml' else 'json'}"


def run(part, out, seconds):
    """Run a part for at most so many seconds: what is to be said of it."""
    path, log = file_of(part, out), out / f"{part.name}.log"
    began = path.with_name(f"began_{path.name}")  # what is not whole has another name
    start = launcher(part.ranks) if part.ranks else [sys.executable]
    words = [*start, *part.words, part.json_flag, began]
    begin = time.monotonic()
    with log.open("w") as said:
        job = subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=said, stderr=said)
        try:
            code = job.wait(seconds)
        except subprocess.TimeoutExpired:
            others = psutil.Process(job.pid).children(recursive=True)
            job.terminate()
            with suppress(subprocess.TimeoutExpired):
                job.wait(30)
            for process in [job, *others]:  # ranks that a test had started, too
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            job.wait()
            return CUT
    if began.exists() and (not code or path.suffix == ".xml"):  # which says what failed
        began.replace(path)
    failed = code or not path.exists()
    return f"FAILED, see {log}" if failed else f"{time.monotonic() - begin:.0f} s"


def drive(step, out, device):
    """Run what is missing of a step, or of all; the names of what failed."""
    from draw import draw_gpu  # which wants the report's words, and the report this table

    refuse_mixture(out, here_and_now(device, 1))
    failed = []
    for number in STEPS if step is None else [step]:
        of_step, begin = [part for part in parts(device) if part.step == number], time.monotonic()
        left = [part for part in of_step if not file_of(part, out).exists()]
        print(
            f"step {number}: {STEPS[number][0]}: {len(left)} of {len(of_step)} to run", flush=True
        )
        while left:
            seconds = LIMIT_S - (time.monotonic() - begin)
            if seconds < 60:
                again = f"make gpu STEP={number}"
                print(f"    time is up; {again} goes on: {', '.join(p.name for p in left)}")
                break
            part = left[0]
            said = run(part, out, seconds)
            print(f"    {part.name}: {said}", flush=True)
            if said == CUT:
                continue  # with no seconds left
            left.pop(0)
            if said.startswith("FAILED"):
                failed.append(part.name)
                if number == 5 and part is of_step[0]:
                    break  # the model cannot be fetched
        data, records = record(out, device)
        (out / "gpu.md").write_text("\n".join(table(data)) + "\n")
    draw_gpu(data, records, out / "gpu.png")
    return failed


# ---------------------------------------------------------------- what was seen


def refuse_mixture(out, here):
    """What another machine or GPU showed must not stand beside what this one shows."""
    earlier = out / "gpu.json"
    if earlier.exists() and json.loads(earlier.read_text())["machine"] != here["machine"]:
        sys.exit(f"error: {out} is of another machine: name another folder with OUT=, or remove it")


def record(out, device):
    """gpu.json: of every part that was run, in a few words, what its file says; and the files."""
    seen, records = {}, []
    for part in parts(device):
        path = file_of(part, out)
        if path.exists():
            seen.setdefault(str(part.step), {})[part.name] = summary(path)
            if path.suffix == ".json":
                records.append(json.loads(path.read_text()))
    data = here_and_now(device, 1) | {
        "device": device, "torch": torch.__version__, "transformers": transformers.__version__,
        "seen": seen,
    }  # fmt: skip
    (out / "gpu.json").write_text(json.dumps(data, indent=1) + "\n")
    return data, records


def table(data):
    """The lines of gpu.md, and of speed.md, from `record`'s; None: nothing was run."""
    lines = ["| step | `make gpu` shows | seen |", "|---|---|---|"]
    for number, (what, _) in STEPS.items():
        seen = (data or {"seen": {}})["seen"].get(str(number), {})
        words = "; ".join(f"{name}: {said}" for name, said in seen.items()) or "not run"
        lines.append(f"| {number} | {what} | {words} |")
    if data:
        lines += ["", "(FLOP are those executed: 2 a weight and token forward, 4 backward, and "
                  "attention's 2 and 5 products of the causal half. They are divided by the whole "
                  "step's time.)"]  # fmt: skip
        on = data["machine"]["gpus"] or [data["machine"]["cpu"]]
        lines += ["", f"({data['date']}, {on[0]}, PyTorch {data['torch']})"]
    return lines


def summary(path):
    """A file's content in a few words."""
    text = path.read_text()
    if path.suffix == ".xml":
        counts = {name: int(re.search(f'{name}="(\\d+)"', text)[1])
                  for name in ("tests", "failures", "errors", "skipped")}  # fmt: skip
        return ", ".join(f"{count} {name}" for name, count in counts.items())
    data = json.loads(text)
    if "checks" in data:
        last = max(c["share"] for c in data["checks"] if not c["name"].startswith(OTHERWISE))
        return (f"{len(data['checks'])} checks passed on {data['world_size']} rank(s), "
                f"{data['device']} ({data['backend']}); nearest {last:.0%}")  # fmt: skip
    if "positions" in data:
        return summary_of_step(data)
    if "prompt_tokens" in data:
        return "; ".join(map(summary_of_speed, data["runs"], [data] * len(data["runs"])))
    return "; ".join(f"{run['found']:,} positions in {run['budget_mib']} MiB"
                     for run in data["runs"])  # fmt: skip


def summary_of_step(data):
    forward = data["done_s"]["run_attention"]
    came = f"{len(forward)} of {data['layers']} layers forward in {forward[-1]:.0f} s"
    if data["step_s"] is None:
        return came
    rate = sum(data["attention_flop"].values()) / data["step_s"] / 1e12
    more = ", extrapolated" if data["extrapolated"] else ""
    return (f"{data['step_s']:.0f} s{more}, {rate:.0f} TFLOP/s by attention's FLOP alone; "
            f"peak {data['peak_bytes'] / 2**30:.1f} GiB")  # fmt: skip


def summary_of_speed(run, data):
    """Tokens a second, and executed TFLOP/s: 2 a weight and token forward, 4 backward.

    Beside them attention's, see `attention_flop`; the embedding is a lookup.
    """
    source = Source(data["model"], data["num_layers"][0])
    c, T = source.config, run["seq_len"]
    weights = sum(torch.Size(shape).numel() for name, shape in source.shapes.items()
                  if "embed_tokens" not in name)  # fmt: skip
    weights += c.tie_word_embeddings * c.vocab_size * c.hidden_size
    laps = run["results"]["parallel"]
    seconds = sorted(a + b for a, b in zip(laps["forward"], laps["backward"], strict=True))
    median = seconds[len(seconds) // 2]
    rate = (6 * weights * T + sum(attention_flop(c, T).values())) / median / 1e12
    on = " ".join(data["machine"]["gpus"]) if data["dtype"] == "bfloat16" else ""
    peak = next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", on)), None)
    share = f", {rate / peak:.0%} of {peak}" if peak else ""
    return f"{T} tokens: {median:.3f} s, {T / median:,.0f} tokens/s, {rate:.1f} TFLOP/s{share}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--step", type=int, choices=STEPS, help="default all, in order")
    flag("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal; default cuda")
    flag("--out", type=Path, help="folder; default figures/gpu, or figures/gpu-rehearsal")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU; --device cpu rehearses it")
    args.out = (args.out or HERE / ("gpu" if args.device == "cuda" else "gpu-rehearsal")).resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    for number, (what, minutes) in STEPS.items():
        if args.step in (None, number):
            print(f"step {number:2}: {what} (about {minutes} min on a GPU)", flush=True)
    failed = drive(args.step, args.out, args.device)
    print(f"wrote {args.out / 'gpu.md'}")
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
