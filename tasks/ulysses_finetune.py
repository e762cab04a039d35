"""Task 5: fine-tuning over a sequence that is split over the ranks (prompt tuning, LoRA, or all).

The model is Task 4's, the adapters are PEFT's. What is easily got wrong is done in `shard_loss`:

* The virtual prompt (n tokens) stands before the sequence once, not before each rank's share, where
  PEFT would put it if it were given shares. (Given whole ids, as Task 4's model takes them, PEFT's
  own forward is right, but embeds the whole sequence on every rank.) The n + S embeddings are
  split, so a rank may hold virtual tokens only, some, or none:

      whole   v0 ... v31 t0 t1 ... t127        32 virtual tokens, 128 of the text
      ranks   [ 0          ][ 1           ]    80 positions each

* Labels are shifted by one before they are split: the next token may be on the next rank.
* The loss is the sum over all ranks' tokens, divided by the number of labels on all ranks. A mean
  of the ranks' means would weigh tokens by who holds them. A rank without a label adds 0, and takes
  part in every collective.
* What is trained is replicated. Each rank's gradient is its tokens' part of a sum; one all-reduce
  before the optimizer, and the replicas stay the same to the last bit.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 tasks/ulysses_finetune.py

first trains three steps beside a single-rank run of the unmodified model under plain PEFT, and
compares losses, gradients before the optimizer, and parameters after it. Then it trains. Into
--output-dir goes the adapter, which plain PEFT opens, and checkpoints, from which a killed job goes
on to the same bits, by itself under `torchrun --max-restarts`.
"""

import argparse
import math
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from memory.finetune import choose_techniques, each_alone, load, save_result, warm_up, within_budget
from memory.long_sequence import sequence_loss
from ulysses_forward import sequence_mask, sequence_parallelize, sum_of_losses
from utils.checkpoint import find, identity, open_folder, resume, save
from utils.collectives import all_gather, sum_gradients
from utils.errors import UserError
from utils.flags import make_parser, natural, positive
from utils.job import start
from utils.measure import peak_memory
from utils.shards import shard_range
from utils.text import load_tokens
from utils.training_checks import base_of, check_replicas, check_training, make_optimizer, trained
from utils.watchdog import catch_signals

LR = {"prompt": 1e-3, "lora": 1e-3, "none": 1e-4}
SAVES = {
    "long-sequence": "the techniques of memory/long_sequence.py, else Task 4's own forward",
    "saved-outputs": "of each layer keep attention's outputs alone, and build the rest again in "
    "the backward; --no-saved-outputs: recompute whole layers",
    "selective-checkpoint": "instead, recompute layers but for attention, whose outputs are kept, "
    "too (torch's create_selective_checkpoint_contexts)",
    "tiled-loss": "the loss a few tokens at a time",
    "tiled-mlp": "the MLP a few tokens at a time",
    "head-groups": "attention a few heads at a time",
    "offload": "keep what is kept of layers in host memory; nothing without a GPU",
}

# ---------------------------------------------------------------- the technique


def shard_loss(model, ids, mesh, techniques=None):
    """This rank's part of the mean next-token loss; the ranks' parts add up to it.

    (Task 4's `model(ids, labels=ids).loss` is the sum, on every rank. Backward they are the same:
    each rank's weights get the gradient of its own tokens' losses.)

    model: a sequence-parallel LlamaForCausalLM, alone or under PEFT. ids: (B, S), on all ranks.
    mesh: of the one axis on which the sequence is split.
    techniques: what saves memory, see `memory/long_sequence.py`; None: Task 4's own forward.

                    whole               this rank's
    embeddings      (B, n + S, H)       (B, (n+S)/P, H)     never whole anywhere
    targets         (B, n + S)          (B, (n+S)/P)        virtual tokens are none; shifted once
    logits                              (B, (n+S)/P, V)     or a few tokens', with techniques
    """
    base = base_of(model)
    prompt = virtual_tokens(model, len(ids))
    n, S, embed = len(prompt[0]), ids.shape[1], base.get_input_embeddings()
    first, stop = shard_range(n + S, mesh.size(), mesh.get_local_rank())

    def embeddings():
        tokens = embed(ids[:, max(first - n, 0) : max(stop - n, 0)])
        # Also where this rank has no virtual token, what it has comes to depend on the prompt, by
        # an empty piece: else autograd would see nothing to train here, and skip the collectives.
        return torch.cat([prompt[:, first:stop].to(tokens), tokens], dim=1)

    targets = F.pad(ids, (n, 1), value=-100)[:, 1:]
    count = (targets != -100).sum()
    if techniques:
        mine = targets[:, first:stop]
        return sequence_loss(base, embeddings, mine, n + S, mesh, techniques) / count
    positions = torch.arange(first, stop, device=ids.device)[None]
    mask = sequence_mask(n + S, device=ids.device)
    output = base.model(inputs_embeds=embeddings(), attention_mask=mask, position_ids=positions)
    logits = base.lm_head(output.last_hidden_state)
    return sum_of_losses(logits, targets[:, first:stop]) / count


def forward_backward(model, ids, mesh, techniques=None, norms=None):
    """Fill in the gradients of what is trained, whole on every rank; `shard_loss`, detached.

    norms: a list that gets the norm of each gradient before the sum, of this rank's tokens alone.
    """
    loss = shard_loss(model, ids, mesh, techniques)
    loss.backward()
    if norms is not None:
        norms += [p.grad.norm() for p in trained(model).values()]
    sum_gradients(trained(model).values(), mesh)
    return loss.detach()


def virtual_tokens(model, batch_size):
    """The virtual prompt, (B, n, H); n is 0 without prompt tuning."""
    configs = getattr(model, "peft_config", {})
    if any(config.is_prompt_learning for config in configs.values()):
        return model.get_prompt(batch_size)
    return torch.empty(batch_size, 0, model.config.hidden_size, device=model.device)


def train(run, model, optimizer, forward_backward, batches, losses, save):
    """Train until `losses`, one a step, is as long as --steps; those of before a restart are in it.

    batches(i): the ids of step i. save(): called every --save-every steps. A signal to stop reaches
    all ranks among which the sequence is split, here all there are, at the same step.
    """
    parameters, stopped, seconds = trained(model), catch_signals(), []
    bar = tqdm(total=run.args.steps, initial=len(losses), disable=run.rank > 0 or None, unit="step")
    for i in range(len(losses), run.args.steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        norms = []
        loss = forward_backward(model, batches(i), norms=norms)
        mine = torch.stack([x.double() for x in (loss, loss.new_tensor(len(stopped)), *norms)])
        parts, stops, *norms = all_gather(mine, base_of(model).group).T.tolist()
        refuse_nan(i, "the loss", parts)
        for name, of_ranks in zip(parameters, norms, strict=True):
            refuse_nan(i, f"the gradient of {name}", of_ranks)
        optimizer.step()
        losses.append(sum(parts))
        run.synchronize()
        seconds.append(time.perf_counter() - begin)
        with bar.external_write_mode():
            run.print0(f"i={i}\tloss.item()={losses[-1]!r}")
        bar.update()
        interrupted = max(stops) > 0
        if len(losses) == run.args.steps or interrupted or len(losses) % run.args.save_every == 0:
            save()
        if interrupted:
            bar.close()
            how = (
                "--resume goes on from the newest checkpoint"
                if run.args.output_dir
                else "nothing saved: no --output-dir"
            )
            run.print0(f"interrupted after {len(losses)} steps; {how}")
            run.exit(130)
    bar.close()
    return seconds


def refuse_nan(i, what, values):
    """values: each rank's. All ranks have the same, so all stop here, before the optimizer."""
    for rank, value in enumerate(values):
        if not math.isfinite(value):
            raise UserError(f"step {i}: {what} is {value} on rank {rank}; stopped before the "
                            "optimizer. A smaller --lr may help")  # fmt: skip


# ---------------------------------------------------------------- what is shown with it


def rate(text):
    """argparse type: a learning rate."""
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be above 0, and no more than a million, not {text}")
    return value


def gib(text):
    """argparse type: GiB, as bytes."""
    value = float(text)
    if not 0 < value < 2**20:
        raise argparse.ArgumentTypeError(f"must be above 0, in GiB, not {text}")
    return max(1, int(value * 2**30))


def main():
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--peft", choices=LR, default="prompt", help="what is trained: a virtual prompt, LoRA of "
        "the attention's projections, or (none) all weights; default prompt")  # fmt: skip
    add("--num-virtual-tokens", type=positive, default=32, help="of --peft prompt; default 32")
    add("--lora-rank", type=positive, default=8, help="of --peft lora; default 8")
    add("--text", help="a UTF-8 file or a URL; default: Ulysses from Project Gutenberg, or for "
        "tiny, smollm2 and random/ models the project's own stories")  # fmt: skip
    add("--seq-len", type=positive, default=128, help="tokens of text a sequence; default 128")
    add("--batch-size", type=positive, default=1, help="sequences a step; default 1")
    add("--num-sequences", type=positive, help="to cut from the start of the text, which steps "
        "take in turn; default the batch size: every step has the same")  # fmt: skip
    add("--steps", type=positive, default=10, help="of Adam; default 10")
    add("--lr", type=rate, help="Adam's learning rate; default "
        + ", ".join(f"{lr:g} ({peft})" for peft, lr in LR.items()))  # fmt: skip
    add(
        "--gradient-checkpointing",
        action="store_true",
        help="Task 4's own forward, and Hugging Face's recomputation of layers; default no",
    )
    title = "memory (results change by rounding alone; all but the first are parts of it)"
    add_saving = parser.add_argument_group(title).add_argument
    for name, what in SAVES.items():
        default = name not in ("offload", "selective-checkpoint")
        what += f"; default {'yes' if default else 'no'}"
        add_saving(f"--{name}", action=argparse.BooleanOptionalAction, default=default, help=what)
    add_saving("--tile-mib", type=positive, help="MiB that a tile's logits, or MLP, may take; "
        "default 8, or 1024 on a GPU")  # fmt: skip
    add("--check-steps", type=natural, default=3, help="steps to compare with a single-rank run; "
        "0 saves its time and memory; default 3")  # fmt: skip
    add("--memory-budget", type=gib, help="GiB that training may take on each rank, beyond the "
        "loaded model; default all there is")  # fmt: skip
    add("--output-dir", type=Path, help="for the result and the checkpoints; default none")
    add("--save-every", type=positive, default=10, help="steps between checkpoints; default 10")
    add(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --output-dir; default no",
    )
    args = parser.parse_args()
    args.lr = args.lr or LR[args.peft]
    args.num_sequences = args.num_sequences or args.batch_size
    args.long_sequence &= not args.gradient_checkpointing
    if args.selective_checkpoint and args.gradient_checkpointing:
        parser.error("--selective-checkpoint and --gradient-checkpointing exclude each other")
    if args.resume and args.output_dir is None:
        parser.error("--resume needs --output-dir")
    with start(args) as run:
        run.mark = "S"
        finetune(run)


def finetune(run):
    """All that the script does."""
    args, config = run.args, run.source.config
    if args.memory_budget and run.device.type != "cuda" and sys.platform != "linux":
        raise UserError("--memory-budget: only on CUDA and Linux can memory be limited")
    result = "model" if args.peft == "none" else "adapter"
    resumes = open_folder(run, args.output_dir, args.resume, result)
    needed = args.num_sequences * args.seq_len
    ids = load_tokens(run, args.text, run.together(run.source.tokenizer), needed)
    run.print0(f"Cropping input_ids.shape[1]={ids.shape[1]} to {needed} tokens")
    ids = ids[:, :needed].view(args.num_sequences, args.seq_len)
    length = args.seq_len + (args.num_virtual_tokens if args.peft == "prompt" else 0)
    if args.num_virtual_tokens > 2**20:
        raise UserError(f"--num-virtual-tokens {args.num_virtual_tokens}: at most {2**20}")
    if length < run.world_size or args.seq_len < 3:  # of two tokens, some gradients are 0
        raise UserError(f"--seq-len {args.seq_len}: too short, each rank needs a token, and the "
                        "loss three")  # fmt: skip
    if length > config.max_position_embeddings:
        run.print0(f"note: {length} positions, but {run.source.name} was made for "
                   f"{config.max_position_embeddings}")  # fmt: skip
    if config.attention_dropout:
        run.print0(f"note: attention dropout {config.attention_dropout} is left out")
        config.attention_dropout = 0.0

    def batches(i):
        first = i * args.batch_size
        return ids[[(first + j) % len(ids) for j in range(args.batch_size)]]

    mesh = run.mesh("sp")
    model = run.together(lambda: load(run, lambda model: sequence_parallelize(model, mesh)))
    parameters = trained(model)
    same = identity(run, base_of(model), ids)
    count = sum(p.numel() for p in parameters.values())
    total = sum(p.numel() for p in model.parameters())
    run.print0(f"Parameters: {count} trainable / {total} total")
    check_replicas(run, parameters, "before")
    found = find(run, same) if resumes else None
    techniques = choose_techniques(run, model)
    compute = partial(forward_backward, mesh=mesh, techniques=techniques)
    checked = None
    if args.check_steps:
        reference = load(run) if run.rank == 0 else None
        often = None if args.long_sequence else 2 if args.gradient_checkpointing else 1
        checked = check_training(
            run, model, reference, compute, batches, often, each_alone(run, model)
        )
        del reference

    optimizer = make_optimizer(run, model)
    losses = resume(run, parameters, optimizer, found) if resumes else []
    seconds = []

    def training():
        write = partial(save, run, parameters, optimizer, losses, same)
        seconds.extend(train(run, model, optimizer, compute, batches, losses, write))

    idle = peak_memory(run, lambda: warm_up(run, model, compute, ids))
    peaks = peak_memory(run, lambda: within_budget(run, length, training))
    digest = check_replicas(run, parameters, "after")
    if checked is not None:
        first = checked.new_tensor(losses[: len(checked)])
        # The same steps once more. (Else a GPU's attention may round differently each time.)
        same_bits = run.device.type == "cpu" or args.deterministic
        bound = 0.0 if same_bits else 2**-7 * first.abs().max().item()
        run.check("losses of the training, as checked", [(first, checked)], bound)
    run.print0(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    if seconds:
        median = statistics.median(seconds)
        beyond = [peak - before for peak, before in zip(peaks, idle, strict=True)]
        peak, beyond = (", ".join(f"{x / 2**20:.0f}" for x in sizes) for sizes in (peaks, beyond))
        pace = f"median step {median:.3f} s, {args.batch_size * length / median:.0f} positions/s"
        run.print0(f"{pace}; peak memory, MiB, of each rank: {peak}; beyond the model: {beyond}")
    run.results |= {"losses": losses, "sha256": digest, "step_s": seconds,
                    "idle_memory_bytes": idle, "peak_memory_bytes": peaks}  # fmt: skip
    if args.output_dir:
        run.together(lambda: save_result(run, model, args.output_dir / result))


if __name__ == "__main__":
    main()
