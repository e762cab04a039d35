"""Prompt tuning of a random Llama as the assignment's own script has it: Hugging Face and PEFT.

    python -m figures.bench.plain_finetune --seq-len 300 --memory-budget 0.25

On one device, with nothing of this project but the sizes and the limit on memory: what
`longest.py` compares with.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from harness.attention import use_cudnn_where_right
from harness.environment import check_writable
from harness.measure import is_for_memory, limited_memory, peak_memory_of_process
from loading.presets import PRESETS


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-len", type=int, required=True, help="tokens of text")
    parser.add_argument("--steps", type=int, default=3, help="default 3")
    parser.add_argument("--memory-budget", type=float, required=True, help="GiB beyond the model")
    parser.add_argument(
        "--gradient-checkpointing", action="store_true", help="in train mode, so that it works"
    )
    models = [f"random/{name}" for name in PRESETS]
    parser.add_argument("--model", choices=models, default=models[0], help=f"default {models[0]}")
    parser.add_argument("--dtype", default="float32", help="of weights; default float32")
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--json", type=Path, help="write times and memory there")
    args = parser.parse_args()
    check_writable(args.json)
    device = torch.device(args.device)
    use_cudnn_where_right()  # as in the scripts that it is compared with
    torch.manual_seed(1337)
    config = LlamaConfig(**PRESETS[args.model.removeprefix("random/")])
    torch.set_default_dtype(getattr(torch, args.dtype))  # made in another, it would leave holes
    with torch.device(args.device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=32))
    model.train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)
    ids = torch.randint(config.vocab_size, (1, args.seq_len), device=args.device)

    def step(ids):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    step(ids[:, :2])  # so that libraries and threads have what they keep
    aside = torch.nn.Parameter(torch.zeros(1, device=args.device))
    aside.grad = torch.zeros_like(aside)
    torch.optim.Adam([aside]).step()  # what it imports is more than what it keeps
    seconds = []

    def train():
        for _ in range(args.steps):
            begin = time.perf_counter()
            step(ids)
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)

    idle = peak_memory_of_process(device, lambda: None)
    try:
        with limited_memory(device, 2**30 * args.memory_budget):
            peak = peak_memory_of_process(device, train)
    except (RuntimeError, MemoryError) as error:
        if not is_for_memory(error):
            raise
        sys.exit(f"error: {args.seq_len + 32} positions do not fit: out of memory ({error})")
    print(f"{args.steps} steps of {args.seq_len + 32} positions fit: {min(seconds):.2f} s a step, "
          f"{(peak - idle) / 2**20:.0f} MiB beyond the loaded model")  # fmt: skip
    if args.json:
        results = {"step_s": seconds, "idle_memory_bytes": [idle], "peak_memory_bytes": [peak]}
        args.json.write_text(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
