"""Task 5's plumbing: the model with its adapter, which techniques it uses, what is saved."""

import copy
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import save_file

from memory.long_sequence import Techniques, possible
from utils.checkpoint import check_claim, swap
from utils.errors import UserError
from utils.measure import is_for_memory, limited_memory
from utils.models import is_hub_id
from utils.training_checks import base_of, trained

# What is checked by itself: backward, tiled_loss, tiled_mlp, head_groups, offload.
ALONE = {
    "layers taken apart": ("plain", False, False, False),
    "tiled loss alone": ("plain", True, False, False),
    "tiled MLP alone": ("plain", False, True, False),
    "head groups alone": ("plain", False, False, True),
    "checkpointing alone": ("checkpoint", False, False, False),
    "selective checkpoint": ("selective", True, True, False),
    "saved outputs alone": ("saved-outputs", False, False, False),
    "saved outputs in host memory": ("saved-outputs", False, False, False, True),  # of a GPU's
    "checkpointing and tiles": ("checkpoint", True, True, True),
    "all together": ("saved-outputs", True, True, True),
}


def load(run, parallelize=None):
    """The model of --model with the adapter of --peft, seeded: the same on every rank."""
    args = run.args
    run.source.config.use_cache = False  # there is nothing to generate
    model = run.source.load_model(run.dtype, run.device, parallelize)
    with warnings.catch_warnings():  # PEFT and the newest transformers disagree on names
        warnings.simplefilter("ignore", FutureWarning)
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if args.peft != "none":
            config = PromptTuningConfig(num_virtual_tokens=args.num_virtual_tokens)
            if args.peft == "lora":
                targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
                config = LoraConfig(r=args.lora_rank, lora_alpha=16, target_modules=targets)
            config.task_type = "CAUSAL_LM"
            config.base_model_name_or_path = args.model if is_hub_id(args.model) else None
            torch.manual_seed(args.seed)
            model = get_peft_model(model, config)
    if run.dtype == torch.float64:  # PEFT makes some adapters float32
        for parameter in trained(model).values():
            parameter.data = parameter.data.double()
    return model.train()  # PEFT leaves it in eval, where checkpointing does nothing


def default_tile_mib(device, budget=None):
    """MiB of a tile; of a budget, in bytes, a small part."""
    mib = 1024 if device.type == "cuda" else 8
    return mib if budget is None else max(8, min(mib, budget // 2**25))


def choose_techniques(run, model):
    """What saves memory: as the flags and the model have it; None for Task 4's own forward."""
    args = run.args
    if not args.long_sequence:
        return None
    backward = "saved-outputs" if args.saved_outputs else "checkpoint"
    backward = "selective" if args.selective_checkpoint else backward
    mib = args.tile_mib or default_tile_mib(run.device, args.memory_budget)
    flags = args.tiled_loss, args.tiled_mlp, args.head_groups, args.offload
    techniques, why = possible(base_of(model), Techniques(backward, *flags, mib * 2**20))
    if why:
        run.print0(f"note: {why}: only some of the memory techniques are left")
    parts = [name.replace("_", "-") for name, on in asdict(techniques).items() if on is True]
    run.print0(f"layers: {techniques.backward}; {', '.join(parts)}; tiles of {mib} MiB")
    if run.world_size == 1 and techniques.head_groups:
        run.announce("One device: the heads of attention are computed sequentially, group by group")
    return techniques


def each_alone(run, model):
    """Yield (name, techniques) of what is checked by itself, where device and model allow it."""
    for name, flags in ALONE.items():
        techniques = Techniques(*flags, tile_tokens=7)
        if techniques.offload and run.device.type != "cuda":
            continue
        if why := possible(base_of(model), techniques)[1]:
            run.print0(f"note: {name}: not checked, {why}")
        else:
            yield name, techniques


def save_result(run, model, final):
    """Rank 0 writes the adapter, or model and tokenizer, as PEFT and transformers have them."""
    if run.rank == 0:
        try:
            check_claim(run)
            write_result(run, model, final)
        except Exception as error:  # PEFT's and safetensors' own, too
            message = f"--output-dir {final.parent}: the {final.name} was not saved ({error}); "
            raise UserError(message + "--resume with the same --steps would") from None


def write_result(run, model, final):
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".result-", suffix=".part") as part:
        part = Path(part) / "result"
        if run.args.peft != "none":
            model.save_pretrained(part, save_embedding_layers=False)
        else:
            config = copy.deepcopy(run.source.config)
            config.architectures, config.use_cache = ["LlamaForCausalLM"], True
            config.save_pretrained(part)
            tensors = {name: p.detach().cpu() for name, p in trained(model).items()}
            save_file(tensors, part / "model.safetensors", {"format": "pt"})
            if tokenizer := run.source.tokenizer():
                tokenizer.save_pretrained(part)
        for file in part.iterdir():
            file.chmod(0o644)  # safetensors lets nobody else read it
        swap(part, final)
    print(f"saved {final}", flush=True)


def warm_up(run, model, forward_backward, ids):
    """A step of as few tokens as can be, so that threads and libraries have what they keep."""
    if run.args.memory_budget or run.device.type == "cuda":
        forward_backward(model, ids[:1, : max(2, run.world_size)])
        model.zero_grad()
        aside = torch.nn.Parameter(torch.zeros(1, device=run.device))
        aside.grad = torch.zeros_like(aside)
        torch.optim.Adam([aside]).step()  # what it imports is more than what it keeps


def within_budget(run, length, function):
    """function(), under --memory-budget; what does not fit is one line."""
    try:
        with limited_memory(run.device, run.args.memory_budget):
            function()
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_for_memory(error):
            raise
        raise UserError(f"out of memory: {run.args.batch_size} x {length} positions on "
                        f"{run.world_size} rank(s) do not fit; a shorter --seq-len, more ranks, or "
                        "more --memory-budget") from None  # fmt: skip
