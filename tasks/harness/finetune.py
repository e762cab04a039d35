"""Around Task 5's training: the adapter, the text, what saves memory, steps, and the result."""

import argparse
import copy
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tqdm import tqdm

from checkpoints.checkpoint import fingerprint, fingerprint_of_config, swap
from harness.flags import gib, positive
from harness.measure import is_for_memory, limited_memory
from loading.documents import load_documents, pack
from loading.models import is_hub_id, quiet
from loading.text import load_sequences
from memory.long_sequence import Techniques, supported_techniques
from utils.errors import UserError
from utils.llama import llama_of, trained_parameters

SAVES = {
    "long-sequence": "the techniques of memory/long_sequence.py, else Task 4's own forward",
    "saved-outputs": "of each layer keep attention's outputs alone, and build the rest again in "
    "the backward; --no-saved-outputs: recompute whole layers",
    "selective-checkpoint": "instead, keep layers' inputs and attention's outputs, and recompute "
    "the rest (torch's create_selective_checkpoint_contexts)",
    "tiled-loss": "the loss a few tokens at a time",
    "tiled-mlp": "the MLP a few tokens at a time",
    "head-groups": "attention a few heads at a time",
    "offload": "keep layers' saved tensors in host memory; no effect without a GPU",
}
# {name: (backward, tiled_loss, tiled_mlp, head_groups, offload)} of what is checked by itself.
ALONE = {
    "layers taken apart": ("plain", False, False, False),
    "tiled loss alone": ("plain", True, False, False),
    "tiled MLP alone": ("plain", False, True, False),
    "head groups alone": ("plain", False, False, True),
    "checkpointing alone": ("checkpoint", False, False, False),
    "selective checkpoint": ("selective", True, True, False),
    "saved outputs alone": ("saved-outputs", False, False, False),
    "saved outputs in host memory": ("saved-outputs", False, False, False, True),  # on a GPU
    "checkpointing and tiles": ("checkpoint", True, True, True),
    "all together": ("saved-outputs", True, True, True),
}


def adapter_config(peft, num_virtual_tokens=32, lora_rank=8):
    """Return PEFT's configuration of what --peft trains; None if it trains all weights."""
    if peft == "prompt":
        return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=num_virtual_tokens)
    targets, of_lora = ["q_proj", "k_proj", "v_proj", "o_proj"], {"r": lora_rank, "lora_alpha": 16}
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **of_lora)
    return lora if peft == "lora" else None


def load_adapted(run, config, parallelize=None, checkpointing=False):
    """Load the model of --model with an adapter, seeded: the same on every rank.

    config: see `adapter_config`. checkpointing: whether to use Hugging Face's own checkpointing.
    """
    model = run.load_model(parallelize)
    model.config.use_cache = False  # there is nothing to generate
    with warnings.catch_warnings():  # PEFT and the newest transformers disagree on names
        warnings.simplefilter("ignore", FutureWarning)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if config:
            config, name = copy.deepcopy(config), run.source.name  # PEFT will fill it in
            config.base_model_name_or_path = name if is_hub_id(name) else None
            torch.manual_seed(run.seed)
            model = get_peft_model(model, config)
    if run.dtype == torch.float64:  # PEFT makes some adapters float32
        for parameter in trained_parameters(model).values():
            parameter.data = parameter.data.double()
    return model.train()  # PEFT leaves it in eval, where checkpointing does nothing


def read_text(run, args):
    """Return --num-sequences rows of the text, each row's documents, and a row's size.

    The rows are as `shard_loss` takes them. A row that is not packed has one document, all its
    tokens. The size is in positions, those of virtual tokens included.
    """
    config, seq_len, most = run.source.config, args.seq_len, 2**20
    virtual = args.num_virtual_tokens if args.peft == "prompt" else 0
    if args.memory_budget and run.device.type != "cuda" and sys.platform != "linux":
        raise UserError("--memory-budget: needs CUDA or Linux")
    if args.num_virtual_tokens > most:
        raise UserError(f"--num-virtual-tokens {args.num_virtual_tokens}: at most {most}")
    # With two tokens, some gradients are 0.
    if virtual + seq_len < run.world_size or seq_len < 3:
        raise UserError(f"--seq-len {seq_len}: too short: 3 or more, and a position for each rank")
    if args.pack:
        documents = load_documents(run, args.text, args.num_sequences, virtual + seq_len, virtual)
        rows = pack(documents, virtual + seq_len, virtual).to(run.device)
    else:
        rows = load_sequences(run, args.text, args.num_sequences, seq_len)
        documents = [[row] for row in rows]
    longest = virtual + max(len(document) for row in documents for document in row)
    if longest > config.max_position_embeddings:
        run.print0(
            f"note: {longest} positions, but {run.source.name} was made for "
            f"{config.max_position_embeddings}"
        )
    if config.attention_dropout:
        run.print0(f"note: attention dropout {config.attention_dropout} is left out")
        config.attention_dropout = 0.0
    return rows, documents, virtual + seq_len


# ---------------------------------------------------------------- saving memory


def add_memory_flags(parser):
    """Add to a parser the flags that save or limit memory, which `techniques_of` reads."""
    title = "memory (results change by rounding alone; the rest are parts of the first)"
    add = parser.add_argument_group(title).add_argument
    for name, what in SAVES.items():
        default = name not in ("offload", "selective-checkpoint")
        what += f"; default {'yes' if default else 'no'}"
        add(f"--{name}", action=argparse.BooleanOptionalAction, default=default, help=what)
    add(
        "--tile-mib",
        type=positive,
        help="MiB that a tile's logits, or MLP, may take; default 8, on a GPU up to 1024",
    )
    parser.add_argument(
        "--memory-budget",
        type=gib,
        help="GiB that training may take on each "
        "rank, beyond the loaded model; default all there is",
    )


def techniques_of(args, device):
    """Return the memory techniques that the flags ask for; None for Task 4's own forward."""
    if not args.long_sequence or args.gradient_checkpointing:
        return None
    backward = "saved-outputs" if args.saved_outputs else "checkpoint"
    backward = "selective" if args.selective_checkpoint else backward
    mib = args.tile_mib or default_tile_mib(device, args.memory_budget)
    flags = args.tiled_loss, args.tiled_mlp, args.head_groups, args.offload
    return Techniques(backward, *flags, mib * 2**20)


def default_tile_mib(device, budget=None):
    """Return the MiB of a tile; given a budget, in bytes, a small part of it."""
    mib = 1024 if device.type == "cuda" else 8
    return mib if budget is None else max(8, min(mib, budget // 2**25))


def possible_techniques(run, model, techniques):
    """Return and print those of the techniques that the model allows."""
    techniques, why = supported_techniques(llama_of(model), techniques)
    if why:
        run.print0(f"note: {why}: only some of the memory techniques are left")
    parts = [name.replace("_", "-") for name, on in asdict(techniques).items() if on is True]
    mib = techniques.tile_bytes // 2**20
    run.print0(f"layers: {techniques.backward}; {', '.join(parts)}; tiles of {mib} MiB")
    if run.world_size == 1 and techniques.head_groups:
        run.announce("One device: the heads of attention are computed sequentially, group by group")
    return techniques


def each_alone(run, model):
    """Yield (name, techniques) for each entry of ALONE that the device and the model allow."""
    for name, flags in ALONE.items():
        techniques = Techniques(*flags, tile_tokens=7)
        if techniques.offload and run.device.type != "cuda":
            continue
        if why := supported_techniques(llama_of(model), techniques)[1]:
            run.print0(f"note: {name}: not checked, {why}")
        else:
            yield name, techniques


def warm_up(run, model, compute):
    """Take a step of very few tokens, so that threads and libraries allocate what they keep."""
    compute(model, torch.zeros(1, max(2, run.world_size), dtype=torch.long, device=run.device))
    model.zero_grad()
    aside = torch.nn.Parameter(torch.zeros(1, device=run.device))
    aside.grad = torch.zeros_like(aside)
    torch.optim.Adam([aside]).step()  # its import takes memory, a part of which is freed again


def within_budget(run, budget, shape, function):
    """Call function() within `budget` bytes, if given; too little memory is one error line.

    shape: of a batch, (sequences, positions). Raises UserError where memory is short.
    """
    try:
        with limited_memory(run.device, budget):
            function()
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_for_memory(error):
            raise
        raise UserError(
            "out of memory: {} x {} positions on {} rank(s) do not fit; take a shorter "
            "--seq-len, more ranks, or more --memory-budget".format(*shape, run.world_size)
        ) from None


# ---------------------------------------------------------------- the steps, and the result


def follow(run, training, losses, steps, save):
    """Take the steps of `training`; time and print each, with a bar in a terminal.

    training: yields a step's loss, and whether a signal ends the training there. losses: one for
    each step so far; new ones are appended, until there are `steps`. save(now): called after each
    step; now: whether it is the last. Returns the steps' seconds, and whether a signal ended them.
    """
    seconds, interrupted = [], False
    bar = tqdm(total=steps, initial=len(losses), disable=run.rank > 0 or None, unit="step")
    begin = time.perf_counter()
    for loss, interrupted in training:
        losses.append(loss)
        run.synchronize()
        seconds.append(time.perf_counter() - begin)
        with bar.external_write_mode():
            run.print0(f"i={len(losses) - 1}\tloss.item()={loss!r}")
        bar.update()
        save(interrupted or len(losses) == steps)
        begin = time.perf_counter()
    bar.close()
    return seconds, interrupted


def identity_of_finetuning(flags, config, model, ids):
    """Return what must be the same for a checkpoint to be continued, {name: value}.

    flags: {name: value}. model: without its adapter. A sample of each frozen weight's values is
    hashed; if none is frozen, of every weight's. ids: all that is trained on.
    """
    every = list(model.parameters())
    kept = [p for p in every if not p.requires_grad] or every
    sample = [p.detach().flatten()[:: 1 + p.numel() // 256] for p in kept]
    return flags | {
        "weights": fingerprint(sample),
        "text": fingerprint([ids]),
        "config": fingerprint_of_config(config),
    }


def report_training(run, positions):
    """Print a training's losses, times and memory, which are in `run.results`.

    positions: how many a step has.
    """
    losses, seconds = run.results["losses"], run.results["step_s"]
    run.print0(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    if seconds:
        idle, peaks = run.results["idle_memory_bytes"], run.results["peak_memory_bytes"]
        median = statistics.median(seconds)
        beyond = [peak - before for peak, before in zip(peaks, idle, strict=True)]
        peak, beyond = (", ".join(f"{x / 2**20:.0f}" for x in sizes) for sizes in (peaks, beyond))
        pace = f"median step {median:.3f} s, {positions / median:.0f} positions/s"
        run.print0(f"{pace}; peak memory, MiB, of each rank: {peak}; beyond the model: {beyond}")


def save_result(run, model, checkpoints):
    """Write on rank 0 the adapter, or model and tokenizer, as PEFT or transformers would."""
    if run.rank == 0:
        final = checkpoints.result
        try:
            checkpoints.claim.check()
            write_result(run, model, final)
        except Exception as error:  # PEFT's and safetensors' own, too
            message = f"--output-dir {final.parent}: the {final.name} was not saved ({error}); "
            raise UserError(message + "--resume with the same --steps saves it") from None


def write_result(run, model, final):
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".result-", suffix=".part") as part:
        part = Path(part) / "result"
        if hasattr(model, "peft_config"):
            model.save_pretrained(part, save_embedding_layers=False)
        else:
            tensors = {name: p.detach().cpu() for name, p in trained_parameters(model).items()}
            written = run.source.written_model(run.dtype)
            written.load_state_dict(tensors, strict=False, assign=True)
            written.tie_weights()
            with quiet():
                written.save_pretrained(part)
            if run.tokenizer:
                run.tokenizer.save_pretrained(part)
        for file in part.iterdir():
            file.chmod(0o644)  # safetensors lets nobody else read it
        swap(part, final)
    print(f"saved {final}", flush=True)
