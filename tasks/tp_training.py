"""From a neighbouring tutorial: training with TP, with the same losses and a part of the memory.

It runs the tutorial's experiments on our Llama: five iterations of SGD, on a sentence and on a
padded batch, each compared with the unmodified model on one rank. Task 2's two splits are used one
at a time and together. (The tutorial's product and two layers are in tp_naive.py.)

                            TP              loss parallel   both
    attention, MLP          1/P on a rank   full            1/P
    embedding, LM head      full            1/P             1/P
    logits, their gradient  full            1/P             1/P
    sent: f, g of a block   yes             no              yes
    sent: vocabulary's f, g no              yes             yes

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 tasks/tp_training.py

`--profile` records instead how many bytes tensors take over a step. With a large vocabulary,
logits take most, T x V numbers for T tokens: Hugging Face's loss has three such tensors at once,
Task 2's loss has two, of 1/P each.
`--trace FILE` keeps what torch.profiler recorded, to be looked at in Perfetto or chrome://tracing.
"""

from functools import partial
from pathlib import Path

import torch
from torch.optim import SGD

import harness
from tp_llama import split_vocabulary, tensor_parallelize
from utils.collectives import group_of_axis
from utils.errors import UserError
from utils.llama import expect_same_batches
from utils.losses import mean_loss, token_losses
from utils.partition import shard_range
from utils.shards import refuse_on_slices

# ---------------------------------------------------------------- the technique


def split_loss_alone(model, mesh):
    """Split the vocabulary alone (loss parallel): each rank has the same, full layers."""
    group = group_of_axis(mesh)
    refuse_on_slices(model, group.size(), of_heads=False)
    expect_same_batches(model, group)
    split_vocabulary(model, group)


VOCABULARY, LAYERS = ("embed_tokens", "lm_head"), ("self_attn", "mlp")
SPLITS = {  # {name: (what splits a LlamaForCausalLM in place, what stays full)}
    "TP": (partial(tensor_parallelize, vocab_parallel=False), VOCABULARY),
    "loss parallel": (split_loss_alone, LAYERS),
    "TP + loss parallel": (tensor_parallelize, ()),
}


# ---------------------------------------------------------------- what is shown with it


def main():
    parser = harness.make_parser(__doc__)
    add = parser.add_argument
    add("--text", default="i love tensor parallelism.", help="the sentence; default '%(default)s'")
    add("--batch-size", type=harness.positive, default=2, help="of the padded batch; default 2")
    add("--seq-len", type=harness.positive, default=64, help="its tokens a sequence; default 64")
    add("--iterations", type=harness.positive, default=5, help="of each training; default 5")
    add("--lr", type=harness.rate, help="of SGD; default 3 / the model's width")
    add(
        "--profile",
        action="store_true",
        help="in place of the checks: memory over a step "
        "of --batch-size x --seq-len tokens (of --model random/small-8k); default no",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="with --profile: write rank 0's Chrome traces, "
        "one for each split, whose names are FILE's with the split's; default none",
    )
    args = parser.parse_args()
    if args.trace and not args.profile:
        parser.error("--trace: of what --profile records, give that, too")
    harness.check_writable(args.trace, "--trace")
    harness.start(args, show)


def show(run, args):
    """Show the trainings, or with --profile the memory."""
    mesh = run.mesh("tp")
    if args.profile:
        return profile(run, mesh, args)
    lr = args.lr or 3 / run.source.config.hidden_size  # a much larger one diverges
    if run.dtype == torch.bfloat16:  # it loses small changes
        run.print0("note: in bfloat16 only the first iteration's loss and gradients are compared")
    references = [one for one in [run.load_reference()] if one]
    for name, (split, _) in SPLITS.items():
        check_split(run, name, run.load_model(partial(split, mesh=mesh)), references)
    del references
    tokens = len(harness.tokens_of(run.tokenizer, args.text, "--text")) if run.tokenizer else 9
    if tokens < 3:
        raise UserError(f"--text {args.text!r}: {tokens} tokens, too short, use 3 or more")
    sentence = harness.make_batch(run, 1, tokens, args.text)
    for batch in sentence, harness.make_batch(run, args.batch_size, args.seq_len):
        show_training(run, mesh, batch, lr, args.iterations)


def check_split(run, name, model, references=None):
    """Check that a model's weights are slices of the full model's, where its split has slices."""
    if references is None:
        references = [one for one in [run.load_reference()] if one]
    run.check_weights(name, model, references, unsplit=("norm", *SPLITS[name][1]))


def show_training(run, mesh, batch, lr, iterations):
    """Compare each split with the unmodified model: all losses, and the changes of parameters.

    In bfloat16, which has no digits for small changes: the first iteration's loss and gradients.
    Raises UserError for a learning rate with which rounding alone changes what is compared.
    """
    ids, mask, _ = batch
    only, exactly = harness.compared_layers(run), run.dtype != torch.bfloat16
    references = [one for one in [run.load_reference()] if one]
    references += [harness.wider_copy(one) for one in references if run.dtype in harness.WIDER]

    def trained(model, loss):
        """Train; return the losses. Each parameter's .grad is then its change by the training."""
        optimizer = SGD(model.parameters(), lr)
        steps = partial(harness.train_on_batch, model, loss, batch, optimizer, iterations)
        return harness.keep_changes(list(model.parameters()), steps)[1]

    def first_gradients(model, loss):
        """Fill in the gradients of the first iteration."""
        harness.train_on_batch(model, loss, batch, SGD(model.parameters(), lr=0.0), 1)

    def expect(model):
        """Return an unmodified model's losses, and the tokens' losses of which they are means.

        Each parameter's .grad is then its change by the training, or in bfloat16 its gradient.
        """
        kept = []
        if not exactly:
            first_gradients(model, harness.plain_loss)
            gradients = [parameter.grad for parameter in model.parameters()]

        def loss(model, labels, **inputs):
            kept.append(token_losses(model(**inputs).logits, labels))
            return mean_loss(kept[-1], labels)

        losses = trained(model, loss)
        if not exactly:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
        return losses, torch.stack(kept).detach()

    expected, tokens = run.reference_values(expect, references)
    harness.refuse_not_finite(torch.cat(expected), lr)
    if exactly:
        # Rounding of weights shifts all later losses the same way: errors do not average out.
        least_error = harness.LIMITS["rms"] * harness.error_of_mean(*tokens)
        changes = [[parameter.grad for parameter in one.parameters()] for one in references]
        harness.refuse_rounding(run, [[[losses] for losses in expected], changes], lr)
    else:
        least_error = harness.error_of_mean(*(losses[:1] for losses in tokens))
    for wide in references[1:]:
        for parameter, exact in zip(references[0].parameters(), wide.parameters(), strict=True):
            parameter.exact_grad = exact.grad.float()
    del references[1:]
    table, title = {"no TP": expected[0]}, f"{len(ids)} x {ids.shape[1]} tokens"
    for name, (split, _) in SPLITS.items():
        model = run.load_model(partial(split, mesh=mesh))
        loss = harness.plain_loss if name == "TP" else harness.own_loss
        if not exactly:
            first_gradients(model, loss)
            gradients = f"{name}, {title}: gradients of the first iteration"
            harness.compare_gradients(run, gradients, model, references, only)
        table[name] = trained(model, loss)
        compared = [values if exactly else values[:1] for values in (table[name], *expected)]
        run.check(f"{name}, {title}: losses", [compared], least_error=least_error)
        if exactly:
            changes = f"{name}, {title}: changes by {iterations} iterations"
            harness.compare_gradients(run, changes, model, references, only)
        harness.check_copies(run, f"{name}, {title}: copies of a parameter, after them", model)
    padding = (mask == 0).sum().item()
    for i in range(iterations):
        said = ", ".join(f"{name} {losses[i]:.6f}" for name, losses in table.items())
        run.print0(f"iter {i}, input {title}, {padding} of padding; loss: {said}")
    off = max((losses / expected[0] - 1).abs().max().item() for losses in table.values())
    run.print0(f"losses differ by up to {off:.1e} of the loss")
    run.results[title] = {name: losses.tolist() for name, losses in table.items()}


# ---------------------------------------------------------------- memory


def profile(run, mesh, args):
    """Record tensors' bytes over a step: in one process, with TP, and with split logits, too."""
    ids, _, _ = harness.make_batch(run, args.batch_size, args.seq_len)
    V, memory = run.source.config.vocab_size, {}
    size = f"{args.batch_size} x {args.seq_len} tokens"
    first, stop = shard_range(V, run.world_size, run.rank)
    bound = 1e-2 if run.dtype == torch.bfloat16 else 1e-5  # Hugging Face's loss is in float32
    for name, columns in ("one process", V), ("TP", V), ("TP + loss parallel", stop - first):
        split, local = SPLITS.get(name, [None])[0], None
        trace = harness.trace_of(args.trace, name) if args.trace and run.rank == 0 else None
        if split or run.rank == 0:
            model = run.load_model(split and partial(split, mesh=mesh))
            if split:
                check_split(run, name, model)
            local, recorded = harness.record_step(model, ids, columns)
            del model
        run.together(partial(harness.write_trace, recorded, trace) if trace else lambda: None)
        memory[name] = [one for one in run.gather_objects(local) if one]
        if split:
            losses = local["loss"], memory["one process"][0]["loss"]
            loss, expected = (torch.tensor(loss, dtype=torch.float64) for loss in losses)
            run.check(f"{name}: loss", [(loss, expected)], tolerance=bound * expected.item())
        most = max(memory[name], key=lambda one: one["peak"])
        weights, peak = (f"{most[key] / 2**20:.1f}" for key in ("weights", "peak"))
        parts = ", ".join(f"{most[part] / 2**20:.1f} {part}" for part in harness.PARTS_OF_PEAK)
        run.print0(
            f"memory, MiB, {name}: weights {weights}; at the peak of a step of {size} "
            f"{peak} more: {parts}"
        )
        if trace:
            print(f"trace of rank 0, {name}: {trace}", flush=True)
    alone, tp, both = (max(local["peak"] for local in one) for one in memory.values())
    run.print0(
        f"peak beyond the weights, of one process's: TP {tp / alone:.0%}, TP + loss "
        f"parallel {both / alone:.0%}, which is {both / tp:.0%} of TP's"
    )
    sizes = {"batch_size": args.batch_size, "seq_len": args.seq_len, "tokens": ids.numel()}
    run.results["memory"] = memory | sizes | {"vocab_size": V}


if __name__ == "__main__":
    main()
