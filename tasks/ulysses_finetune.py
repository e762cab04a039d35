"""Task 5: fine-tuning over a sequence that is split over the ranks (prompt tuning, LoRA, or all).

The model is Task 4's, the adapters are PEFT's. What is easy to get wrong is in `shard_loss` and
`forward_backward`:

* The virtual prompt (n tokens) stands before the sequence once, not before each rank's share, where
  PEFT would put it if it were given shares. (Given full ids, as Task 4's model takes them, PEFT's
  own forward is right, but embeds the full sequence on every rank.) The n + S embeddings are
  split, so a rank may hold virtual tokens only, some, or none:

      full    v0 ... v31 t0 t1 ... t127        32 virtual tokens, 128 of the text
      ranks   [ 0          ][ 1           ]    80 positions each

* Labels are shifted by one before they are split: the next token may be on the next rank.
* With --pack a row holds several documents, each after a copy of the virtual prompt, and what is
  left is filler. Positions restart, and a token sees only its own document. Packing changes
  nothing but speed: loss and gradients are those of the documents one by one.

      row     v0 ... v31 t0 ... t40 | v0 ... v31 t0 ... t22 | filler, without a label

* The loss is the sum over all ranks' tokens, divided by the number of labels on all ranks. A mean
  of the ranks' means would weigh a token by the rank that holds it. A rank without a label adds 0,
  and takes part in every collective.
* What is trained is replicated. Each rank's gradient is a partial sum, over its tokens. One
  all-reduce before the optimizer completes it, and the replicas stay the same to the last bit.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 tasks/ulysses_finetune.py

first trains three steps beside a single-rank run of the unmodified model under plain PEFT, and
compares losses, gradients before the optimizer, and parameters after it. Then it trains. In
--output-dir it leaves the adapter, which plain PEFT opens, and checkpoints. From these a killed job
resumes, with the same results to the bit; under `torchrun --max-restarts` it does so by itself.
"""

import math
import weakref
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import checkpoints
import harness
import loading
from ulysses_forward import sequence_parallelize
from utils.collectives import all_gather
from utils.errors import UserError
from utils.gradients import new_gradients
from utils.llama import PROMPTED, llama_of, trained_parameters
from utils.replicas import sum_gradients
from utils.sequence import documents_of

LR = {"prompt": 1e-3, "lora": 1e-3, "none": 1e-4}
# Flags that must be the same when a checkpoint is continued.
SAME = (
    "peft",
    "attention",
    "num_virtual_tokens",
    "lora_rank",
    "seq_len",
    "pack",
    "batch_size",
    "num_sequences",
    "lr",
    "dtype",
    "seed",
)

# ---------------------------------------------------------------- the technique: the loss


def local_loss(model, ids, embed=None, labels=None, position_ids=None, attention_mask=None):
    """Return this rank's part of the mean next-token loss; the ranks' parts add up to it.

    ids are the same on all ranks. With one document a row, and no virtual tokens, model and ids are
    all it needs. For packed documents and prompts `shard_loss` gives the other arguments.
    Nothing is gathered: a rank has the hidden states and the logits of its own tokens.

                    full                local
    ids             (B, S)              (B, S/P)
    embeddings                          (B, S/P, H)
    targets         (B, S)              (B, S/P)        labels, shifted by one, then split
    logits                              (B, S/P, V)
    """
    length = ids.shape[1]
    local = model.tokens(length)  # which tokens this rank has
    embed = embed or model.get_input_embeddings()
    if position_ids is None:
        position_ids = torch.arange(length, device=ids.device)[None]
    if attention_mask is None:
        attention_mask = model.attention_mask_info(length, device=ids.device)  # causal
    targets, count = shift_and_split(model, ids if labels is None else labels)
    output = model.model(
        inputs_embeds=embed(ids[:, local]),
        position_ids=position_ids[:, local],
        attention_mask=attention_mask,
    )
    return model.sum_of_losses(model.lm_head(output.last_hidden_state), targets) / count


def shift_and_split(model, labels):
    """Return the targets of this rank's tokens, (B, S/P), and how many targets all ranks have.

    Labels are shifted before they are split: a token's next token may be on another rank.
    """
    from guards.agreement import check_forward

    check_forward(model, {"labels": labels})  # raises ValueError where ranks have others
    local = model.tokens(labels.shape[1])
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    count = (targets != -100).sum()
    return targets[:, local], count


def shard_loss(model, ids, mesh, techniques=None):
    """Return this rank's part of the mean next-token loss, with PEFT and packed documents, too.

    It prepares virtual tokens and packed documents, and calls `local_loss`, or `sequence_loss` if
    `techniques` are given. Virtual tokens stand before each document. They and filler have no
    label, nor has a document's first position, which nothing predicts. Positions restart with each
    document, and a token sees only its own document.

    (Task 4's `model(ids, labels=ids).loss` is the sum of all ranks' parts, on every rank. Both
    losses give a rank the same gradients: the part that its own tokens contribute.)

    model: a sequence-parallel LlamaForCausalLM, alone or under PEFT. mesh: of the one axis on which
    the sequence is split. ids: (B, S), on all ranks; or packed by `documents.pack`, (B, 2, n + S).
    techniques: what saves memory, see `memory/long_sequence.py`; None: Task 4's own forward.
    Raises ValueError for fewer positions than ranks, and for PEFT's methods that do not treat each
    token alone (`check_by_token`).

                    full                local
    ids             (B, n + S)          (B, (n+S)/P)        -100: a virtual token, or filler
    positions       (B or 1, n + S)     (B or 1, (n+S)/P)   in its document, virtual tokens first
    embeddings                          (B, (n+S)/P, H)     never full anywhere
    targets         (B, n + S)          (B, (n+S)/P)        never a virtual token
    logits                              (B, (n+S)/P, V)     or a few tokens', with techniques
    """
    base, prompt = llama_of(model), virtual_tokens(model, len(ids))
    n, embed_tokens = prompt.shape[1], base.get_input_embeddings()
    if ids.dim() == 3:
        ids, positions = ids.unbind(1)
    else:  # each row is one document
        ids = F.pad(ids, (n, 0), value=-100)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
    length = ids.shape[1]
    if length < base.sequence_parts:  # on all ranks, so that all raise
        raise ValueError(
            f"{length} positions for {base.sequence_parts} ranks: some would have none"
        )
    local = base.tokens(length)
    local_positions = positions[:, local].expand(len(ids), -1)
    virtual = (local_positions < n).nonzero(as_tuple=True)

    def embed(local_ids):
        tokens = embed_tokens(local_ids.clamp(min=0))
        # With no virtual token here, an empty index_put still links the output to the prompt: else
        # autograd would see nothing to train on this rank, and skip the collectives.
        return tokens.index_put(virtual, prompt[virtual[0], local_positions[virtual]].to(tokens))

    labels = ids.masked_fill(positions == 0, -100)
    if techniques:  # sequence_loss checks the adapters
        from memory.long_sequence import sequence_loss

        targets, count = shift_and_split(base, labels)
        embeddings = partial(embed, ids[:, local])
        return sequence_loss(base, embeddings, targets, length, mesh, techniques, positions) / count
    documents = documents_of(positions)
    attention_mask = documents[:, None, None] if documents.any() else None
    return local_loss(base, ids, embed, labels, positions, attention_mask)


def virtual_tokens(model, batch_size):
    """Return the virtual prompt, (B, n, H); n is 0 without prompt tuning.

    Raises ValueError for PEFT's prompts other than PROMPT_TUNING and P_TUNING.
    """
    config = getattr(model, "active_peft_config", None)
    enabled = getattr(model.forward, "__self__", model) is model  # not under `disable_adapter`
    if config and config.is_prompt_learning and enabled:
        if (peft_type := config.peft_type) not in ("PROMPT_TUNING", "P_TUNING"):
            raise ValueError(f"{peft_type.value}: of PEFT's prompts only PROMPT_TUNING, P_TUNING")
        PROMPTED[llama_of(model)] = weakref.ref(model)  # whose prompt is compared between ranks
        return model.get_prompt(batch_size)
    return torch.empty(batch_size, 0, model.config.hidden_size, device=model.device)


# ---------------------------------------------------------------- the technique: step and loop


def forward_backward(model, ids, mesh, techniques=None, norms=None):
    """Run forward and backward, all-reduce gradients; return this rank's part of the loss.

    Gradients of microbatches accumulate: each call all-reduces only those that it has made.
    norms: a list that gets the norm of each gradient, of this rank's tokens, before the sum.
    """
    parameters = trained_parameters(model).values()
    loss = shard_loss(model, ids, mesh, techniques)
    with new_gradients(parameters):
        loss.backward()
        if norms is not None:
            norms += [p.grad.norm() for p in parameters]
        sum_gradients(parameters, mesh)
    return loss.detach()


def make_optimizer(model, lr):
    """Return Adam over the trained parameters; they and its states are the same on all ranks."""
    return torch.optim.Adam(trained_parameters(model).values(), lr)


def train(model, optimizer, forward_backward, batches, first, steps, stopped=()):
    """Take the steps from `first` to `steps` - 1; yield each one's loss, and whether to stop there.

    forward_backward(model, ids, norms): the function above, with mesh and techniques bound.
    batches(i): the ids of step i. stopped: the signals to stop that this rank has got so far. All
    ranks learn of them with the step's loss, and end after the same step. Raises UserError where a
    loss or a gradient is not finite.
    """
    parameters, group = trained_parameters(model), llama_of(model).get_group()
    for i in range(first, steps):
        norms = []
        optimizer.zero_grad()
        loss = forward_backward(model, batches(i), norms=norms)
        local = torch.stack([x.double() for x in (loss, loss.new_tensor(len(stopped)), *norms)])
        parts, stops, *norms = all_gather(local, group).T.tolist()
        refuse_nan(i, "the loss", parts)
        for name, of_ranks in zip(parameters, norms, strict=True):
            refuse_nan(i, f"the gradient of {name}", of_ranks)
        optimizer.step()
        interrupted = max(stops) > 0
        yield sum(parts), interrupted
        if interrupted:
            return


def refuse_nan(i, what, values):
    """Raise UserError if one of `values`, those of all ranks, is not finite.

    All ranks have the same list, so all stop here, before the optimizer.
    """
    for rank, value in enumerate(values):
        if not math.isfinite(value):
            raise UserError(
                f"step {i}: {what} is {value} on rank {rank}; stopped before the "
                "optimizer. A smaller --lr may help"
            )


# ---------------------------------------------------------------- what is shown with it


def main():
    parser = harness.make_parser(__doc__, model_types=loading.LLAMAS)
    add = parser.add_argument
    add(
        "--peft",
        choices=LR,
        default="prompt",
        help="what is trained: a virtual prompt, LoRA of "
        "the attention's projections, or (none) all weights; default prompt",
    )
    add(
        "--attention",
        choices=["ulysses", "ring"],
        default="ulysses",
        help="Task 4's, or that of ring_attention.py, zigzag; default ulysses",
    )
    add(
        "--num-virtual-tokens",
        type=harness.positive,
        default=32,
        help="of --peft prompt; default 32",
    )
    add("--lora-rank", type=harness.positive, default=8, help="of --peft lora; default 8")
    add(
        "--text",
        help="a UTF-8 file or a URL; default: Ulysses from Project Gutenberg, or for "
        "tiny, smollm2 and random/ models the project's own stories",
    )
    add(
        "--seq-len",
        type=harness.positive,
        default=128,
        help="tokens of text a sequence; default 128",
    )
    add(
        "--pack",
        action="store_true",
        help="fill sequences with whole documents, stories or a "
        "text's paragraphs, each as if alone; default no: cut the text",
    )
    add("--batch-size", type=harness.positive, default=1, help="sequences a step; default 1")
    add(
        "--num-sequences",
        type=harness.positive,
        help="to cut from the start of the text, which steps "
        "take in turn; default the batch size: every step has the same",
    )
    add("--steps", type=harness.positive, default=10, help="of Adam; default 10")
    add(
        "--lr",
        type=harness.rate,
        help="Adam's learning rate; default "
        + ", ".join(f"{lr:g} ({peft})" for peft, lr in LR.items()),
    )
    add(
        "--gradient-checkpointing",
        action="store_true",
        help="Task 4's own forward, and Hugging Face's recomputation of layers; default no",
    )
    harness.add_memory_flags(parser)
    add(
        "--check-steps",
        type=harness.natural,
        default=3,
        help="steps to compare with a single-rank run; 0 saves its time and memory; default 3",
    )
    add("--output-dir", type=Path, help="for the result and the checkpoints; default none")
    add(
        "--save-every",
        type=harness.positive,
        default=10,
        help="steps between checkpoints; default 10",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --output-dir; default no",
    )
    harness.add_compile_flag(parser)
    args = parser.parse_args()
    args.lr = args.lr or LR[args.peft]
    args.num_sequences = args.num_sequences or args.batch_size
    if args.selective_checkpoint and args.gradient_checkpointing:
        parser.error("--selective-checkpoint and --gradient-checkpointing exclude each other")
    if args.compile and args.long_sequence and not args.gradient_checkpointing:
        parser.error("--compile needs whole layers: add --no-long-sequence")
    if args.resume and args.output_dir is None:
        parser.error("--resume needs --output-dir")
    harness.start(args, finetune)


def finetune(run, args):
    """Do all that the script does: check some steps, then train."""
    run.mark, result = "S", "model" if args.peft == "none" else "adapter"
    store = checkpoints.Checkpoints(run, args.output_dir, result, args.resume)
    rows, documents, positions = harness.read_text(run, args)

    def turn(i):
        return [(i * args.batch_size + j) % len(rows) for j in range(args.batch_size)]

    def batches(i):
        return rows[turn(i)]

    adapter = harness.adapter_config(args.peft, args.num_virtual_tokens, args.lora_rank)
    load_model = partial(
        harness.load_adapted, run, adapter, checkpointing=args.gradient_checkpointing
    )
    mesh = run.mesh("sp")
    from ring_attention import ring_parallelize

    split = ring_parallelize if args.attention == "ring" else sequence_parallelize
    model = run.together(lambda: load_model(partial(split, mesh=mesh)))
    parameters, total = (trained_parameters(model), sum(p.numel() for p in model.parameters()))
    count = sum(p.numel() for p in parameters.values())
    run.print0(f"Parameters: {count} trainable / {total} total")
    harness.check_replicas(run, parameters, "before")
    same = {f"--{name.replace('_', '-')}": getattr(args, name) for name in SAME}
    store.find(harness.identity_of_finetuning(same, run.source.config, llama_of(model), rows))
    if techniques := harness.techniques_of(args, run.device):
        techniques = harness.possible_techniques(run, model, techniques)
    compute, checked = partial(forward_backward, mesh=mesh, techniques=techniques), None
    optimizer_of = partial(make_optimizer, lr=args.lr)
    if args.check_steps:
        reference = load_model() if run.rank == 0 else None
        recomputes = None if techniques else 2 if args.gradient_checkpointing else 1
        first = [
            (batches(i), loading.one_by_one([documents[row] for row in turn(i)], run.device))
            for i in range(min(args.check_steps, args.steps))
        ]
        alone = harness.each_alone(run, model)
        checked = harness.check_training(
            run, model, reference, compute, first, optimizer_of, recomputes, alone
        )
        del reference

    optimizer = optimizer_of(model)
    losses = store.resume(parameters, optimizer)
    resumed = bool(losses)
    if len(losses) > args.steps:
        run.print0(f"note: that is more than --steps {args.steps}: nothing is left to train")

    def save(now):
        if now or len(losses) % args.save_every == 0:
            store.save(parameters, optimizer, losses)

    def training():
        stopped = harness.catch_signals()
        steps = train(model, optimizer, compute, batches, len(losses), args.steps, stopped)
        seconds, interrupted = harness.follow(run, steps, losses, args.steps, save)
        run.results["step_s"] = seconds
        if interrupted:
            store.interrupt(len(losses))

    limited = args.memory_budget or run.device.type == "cuda"
    idle = harness.peak_memory(run, lambda: limited and harness.warm_up(run, model, compute))
    within = partial(harness.within_budget, run, args.memory_budget, (args.batch_size, positions))
    peaks = harness.peak_memory(run, lambda: within(training))
    run.results |= {
        "losses": losses,
        "sha256": harness.check_replicas(run, parameters, "after"),
        "idle_memory_bytes": idle,
        "peak_memory_bytes": peaks,
    }
    if checked is not None:
        harness.check_again(run, losses, checked, resumed, args.deterministic)
    harness.report_training(run, args.batch_size * positions)
    if args.output_dir:
        run.together(lambda: harness.save_result(run, model, store))


if __name__ == "__main__":
    main()
