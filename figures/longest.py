"""The longest sequence for three steps of prompt tuning, on a GPU one, under a limit on memory.

    python figures/longest.py                 # all of it, into figures/longest.json
    python figures/longest.py --budgets 64 --only ours --ranks 1 4
    python figures/longest.py --model random/llama-3.2-1b --dtype bfloat16 --device cuda --only ours

For each contender: a closed-form estimate, from the tensors that it holds when it holds most; then
runs in fresh processes, whose memory beyond the loaded model is limited, so that what does not fit
fails. Lengths go up and down from the estimate until one fits and one 5 % longer does not.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tasks"))

import torch
import transformers

from memory.finetune import default_tile_mib
from records import add, machine, resume, threads_of, torchrun
from utils.environment import count_gpus
from utils.flags import positive
from utils.measure import is_for_memory
from utils.models import Source
from utils.presets import PRESETS

MODELS, PROMPT, GRAIN, STEPS = [f"random/{name}" for name in PRESETS], 32, 1.05, 3
# What libraries keep for themselves, and what small tensors add up to: seen, not counted. More of
# it where operators pass through Python to be told apart.
OTHER = 8 * 2**20
OTHER_SELECTIVE = 13 * 2**20


# ---------------------------------------------------------------- the contenders


def hugging_face(c, ranks, e, checkpointing):
    """Bytes a token when the loss is differentiated: what all layers keep, and three times logits.

    With frozen weights a linear layer keeps nothing. Kept are the inputs of two norms; q and k
    after RoPE, v, and attention's output; the MLP's gate, its activation, and what it multiplies.
    The logits' log-softmax, its gradient, and theirs.
    """
    H, F, V, ND, KD = sizes(c)
    layer = H if checkpointing else 2 * H + 2 * ND + 2 * KD + 3 * F
    return e * (c.num_hidden_layers * layer + 3 * H) + max(e, 4) * 3 * V


def ours(c, ranks, e, left_out):
    """Bytes for each of a rank's own tokens when the last layer's backward holds most."""
    H, F, V, ND, _ = sizes(c)
    L, D, groups = c.num_hidden_layers, c.head_dim, "head-groups" not in left_out
    N, K = c.num_attention_heads, c.num_key_value_heads
    # Attention's outputs and their log-sum-exps; the layer's input.
    kept = L * (ND + N) + H
    if "offload" in left_out:  # two on their way to the host, or back, and the one that is used
        kept = min(3, L) * (ND + N) + 2 * H
    # Heads in flight, on all ranks together.
    n, k = (max(N // K, ranks), ranks) if groups else (N, max(K, ranks))
    # The gradients behind the layer and of attention's outputs; q, k, v; dq; dk and dv, as the
    # kernel gives them for each query head, and summed.
    most = H + ND + (4 * n + (4 if n > k else 2) * k) * D
    if k > ranks:  # several KV heads of a rank, each repeated for its query heads
        most += 2 * n * D
    if "saved-outputs" in left_out:
        # All layers' inputs. For one round: the gradients behind the layer, before it, and of all
        # outputs; q, k and v in one piece, and sent; the output, and gradients of it, q, k and v.
        kept = L * H
        most = 2 * H + ND + 2 * (n + 2 * k) * D + 5 * n * D
    if "tiled-loss" in left_out:  # three times logits; x and its gradient, before and behind a norm
        most = max(most, 3 * V * max(e, 4) // e + 4 * H)
    if "tiled-mlp" in left_out:
        # d, do, o; gate, its activation, what it multiplies, and gradients; the norm's, and y.
        most = max(most, H + 2 * ND + 6 * F + 3 * H)
    return e * (kept + most)


def selective(c, ranks, e):
    """Bytes for each of a rank's tokens in the backward of the last layer's attention.

    Kept are layers' inputs, attention's outputs and their log-sum-exps. Then, the layer being run
    again: q, k and v in one piece, keys and values repeated for their queries; the gradients behind
    the layer and before it, of the outputs, and of q, k and v as the kernel gives them.
    """
    H, _, _, ND, KD = sizes(c)
    kept = c.num_hidden_layers * (H + ND + c.num_attention_heads)
    repeated = 2 * ND if KD < ND else 0
    return e * (kept + ND + 2 * KD + repeated + 2 * H + ND + 3 * ND)


def sizes(c):
    D = c.head_dim
    return (c.hidden_size, c.intermediate_size, c.vocab_size, c.num_attention_heads * D,
            c.num_key_value_heads * D)  # fmt: skip


TRICKS = ("saved-outputs", "tiled-loss", "tiled-mlp", "head-groups")
LEFT_OUT = {f"ours, no {trick}": trick for trick in TRICKS}
CONTENDERS = {
    # name: (bytes a token, flags)
    "Hugging Face + PEFT": (lambda *a: hugging_face(*a, False), []),
    "with checkpointing": (lambda *a: hugging_face(*a, True), ["--gradient-checkpointing"]),
    # PyTorch's own, of the layers; loss and MLP in parts as ours.
    "selective checkpoint": (selective, ["--selective-checkpoint", "--no-head-groups"]),
    "ours": (lambda *a: ours(*a, ()), []),
    "ours, offload": (lambda *a: ours(*a, ("offload",)), ["--offload"]),
    **{
        name: (lambda *a, t=trick: ours(*a, (t,)), [f"--no-{trick}"])
        for name, trick in LEFT_OUT.items()
    },
}


PLAIN = "Hugging Face + PEFT", "with checkpointing"  # nothing of theirs is in parts
ON_GPU = ("ours, offload",)  # the others, anywhere


def command(name, length, budget, model):
    """What one run starts, and its flags: the plain script, or Task 5's. model: flags of both."""
    flags = [*CONTENDERS[name][1], *model, "--seq-len", length - PROMPT]
    flags += ["--steps", 1 if "cuda" in model else STEPS, "--memory-budget", budget / 2**10]
    if name in PLAIN:
        return HERE / "plain_finetune.py", *flags
    # What ranks share the limit does not see: by gloo all is a rank's own.
    flags += ["--num-virtual-tokens", PROMPT, "--check-steps", 0, "--gloo"]
    return HERE.parent / "tasks" / "ulysses_finetune.py", *flags


# ---------------------------------------------------------------- the search


def fits(name, ranks, length, budget, model):
    """The record of a run of STEPS, on a GPU of one; or None where memory ran out."""
    begin = time.monotonic()
    script, *flags = command(name, length, budget, model)
    record, job = torchrun(
        script, ranks, *flags, threads=threads_of(ranks), stderr=subprocess.STDOUT,
        THP_MEM_ALLOC_ENABLE="0", MALLOC_MMAP_THRESHOLD_="65536", MALLOC_ARENA_MAX="1",
    )  # fmt: skip
    said, took = "fits" if record else "does not fit", time.monotonic() - begin
    print(f"    {length} positions: {said} ({took:.0f} s)", flush=True)
    errors = [line for line in job.stdout.splitlines() if line.startswith("error: ")]
    if not record and not (errors and all(map(is_for_memory, errors))):
        sys.exit(f"{job.stdout[-3000:]}\nerror: that job failed, and not for want of memory")
    return record


def search(name, ranks, budget, estimate, model=()):
    """The longest length that fits while GRAIN times as much does not, and its record."""
    length, best, too_long, stride = max(estimate, PROMPT + 2 * ranks), None, None, GRAIN
    while best is None or too_long is None or too_long > best[0] * GRAIN + 1:
        record = fits(name, ranks, length, budget, model)
        if record:
            best = length, record
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
    flag("--output", type=Path, default=HERE / "longest.json", help="default %(default)s")
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
                a_token = CONTENDERS[name][0](config, ranks, element)
                tile = default_tile_mib(device, budget * 2**20) * (name not in PLAIN)
                other = OTHER_SELECTIVE if name == "selective checkpoint" else OTHER
                estimate = int(((budget - tile) * 2**20 - other) / a_token) * ranks
                print(f"{name}, {ranks} rank(s), {budget} MiB: {a_token / 1024:.1f} KiB a token of "
                      f"a rank, estimate {estimate}", flush=True)  # fmt: skip
                found, record = search(name, ranks, budget, estimate, model)
                print(
                    f"  found {found}, {found / max(estimate, 1):.2f} of the estimate", flush=True
                )
                key = {"contender": name, "world_size": ranks, "budget_mib": budget}
                entry = {"estimate": estimate, "found": found, "predicted_bytes": a_token,
                         "threads": threads_of(ranks)}  # fmt: skip
                if record:
                    results = record["results"]
                    idle, peak = results["idle_memory_bytes"], results["peak_memory_bytes"]
                    used = max(b - a for a, b in zip(idle, peak, strict=True))
                    entry |= {"measured_bytes": used * ranks / found, "step_s": results["step_s"]}
                add(args.output, whole, key, entry)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
