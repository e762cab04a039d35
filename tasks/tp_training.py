"""Neighbour: training with tensor parallelism: the same five losses, and a part of the memory.

After the tensor-parallel README of a neighbour, on our Llama. First what all of it is made of, a
product, and two linear layers:

    x @ w       columns of w on each rank   a part of the columns: all-gather
                rows of w                   a part of each sum: all-reduce
    fc2(fc1 x)  fc1 by columns, fc2 by rows: what one gives is what the other takes (`--naive`)

Then five iterations of SGD, of a sentence and of a padded batch, with Task 2's two splits, one at a
time and together, each against the unmodified model on one rank:

                            TP              loss parallel   both
    attention, MLP          1/P on a rank   whole           1/P
    embedding, LM head      whole           1/P             1/P
    logits, their gradient  whole           1/P             1/P
    sent: f, g of a block   yes             no              yes
    of the vocabulary       no              yes             yes

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 tasks/tp_training.py

`--profile` records instead what tensors hold over a step. With a large vocabulary it is the logits,
T x V numbers for T tokens: Hugging Face's loss has three such at once, Task 2's two of 1/P each.
`--memory-budget` trains on one long sequence, for which a rank alone may have no room.
"""

import copy
from functools import partial

import torch
from torch import nn
from torch.optim import SGD

from tp_llama import split_vocabulary, tensor_parallelize
from utils.collectives import copy_to_ranks, gather_shares, group_of_axis, sum_over_ranks
from utils.errors import UserError
from utils.flags import gib, make_parser, positive, rate
from utils.job import start
from utils.measure import limited_memory
from utils.memory_profile import PARTS, record_step
from utils.model_checks import (
    compared_layers,
    error_of_mean,
    make_batch,
    mean_loss,
    own_loss,
    plain_loss,
    token_losses,
    train,
)
from utils.shards import keep_shard, refuse_as_whole, shard_range
from utils.step_checks import check_copies, compare_gradients, keep_changes, refuse_if_endless
from utils.tolerance import LIMITS
from utils.wider import WIDER, wider_copy

# ---------------------------------------------------------------- the technique


def multiply_by_columns(x, w, group):
    """x (m, k) times w (k, n), of which a rank has n/P columns: its part (m, n/P), and all."""
    first, stop = shard_range(w.shape[1], group.size(), group.rank())
    part = x @ w[:, first:stop]
    return part, gather_shares(part, dim=1, size=w.shape[1], group=group)


def multiply_by_rows(x, w, group):
    """The same, of which a rank has k/P rows: its part of the sum (m, n), and the sum."""
    first, stop = shard_range(len(w), group.size(), group.rank())
    part = x[:, first:stop] @ w[first:stop]
    return part, sum_over_ranks(part, group)


class TwoLayers(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.fc1 = nn.Linear(size, size, bias=False)
        self.fc2 = nn.Linear(size, size, bias=False)

    def forward(self, x):
        """(B, size) -> (B, size)."""
        return self.fc2(self.fc1(x))


def split_two_layers(model, group):
    """fc1 by columns, its outputs, and fc2 by rows, its inputs; f in front and g behind."""
    units = shard_range(model.fc1.out_features, group.size(), group.rank())
    keep_shard(model.fc1, 0, *units)
    keep_shard(model.fc2, 1, *units)
    model.register_forward_pre_hook(lambda _, x: (copy_to_ranks(x[0], group),))
    model.register_forward_hook(lambda _, x, y: sum_over_ranks(y, group))


def split_loss_alone(model, mesh):
    """Loss parallel: the vocabulary split, and the layers whole, on each rank the same."""
    refuse_as_whole(model)
    split_vocabulary(model, group_of_axis(mesh))


VOCABULARY, LAYERS = ("embed_tokens", "lm_head"), ("self_attn", "mlp")
SPLITS = {  # {name: (what splits a LlamaForCausalLM in place, its loss then, what stays whole)}
    "TP": (partial(tensor_parallelize, vocab_parallel=False), plain_loss, VOCABULARY),
    "loss parallel": (split_loss_alone, own_loss, LAYERS),
    "TP + loss parallel": (tensor_parallelize, own_loss, ()),
}


# ---------------------------------------------------------------- what is shown with it


def main():
    parser = make_parser(__doc__)
    add, instead = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    instead("--naive", action="store_true", help="the product and two layers alone; default no")
    add("--text", default="i love tensor parallelism.", help="the sentence; default '%(default)s'")
    add("--batch-size", type=positive, default=2, help="of the padded batch; default 2")
    add("--seq-len", type=positive, default=64, help="its tokens a sequence; default 64")
    add("--iterations", type=positive, default=5, help="of each training; default 5")
    add("--lr", type=rate, default=0.02, help="of SGD; default 0.02")
    instead("--profile", action="store_true", help="memory over a step of 1 x --seq-len tokens, "
            "instead (of --model random/small-128k, say); default no")  # fmt: skip
    instead("--memory-budget", type=gib, metavar="GIB", help="in place of the checks: train "
        "on one sequence of --seq-len tokens, each rank with so much memory beyond its weights; "
        "default none")  # fmt: skip
    start(parser.parse_args(), show)


def show(run, args):
    """The product, two layers, and the trainings; or the memory."""
    mesh = run.mesh("tp")
    if args.profile:
        return profile(run, mesh, args.seq_len)
    if args.memory_budget:
        return train_within(run, mesh, args)
    show_product(run, group_of_axis(mesh))
    show_two_layers(run, group_of_axis(mesh))
    if args.naive:
        return
    whole = [one for one in [run.load_reference()] if one]
    for name, (split, *_) in SPLITS.items():
        check_split(run, name, run.load_model(partial(split, mesh=mesh)), whole)
    del whole
    tokens = len(run.tokenizer(args.text)["input_ids"]) if run.tokenizer else 9
    if tokens < 3:
        raise UserError(f"--text {args.text!r}: {tokens} tokens, too short, use 3 or more")
    sentence = make_batch(run, 1, tokens, args.text)
    for batch in sentence, make_batch(run, args.batch_size, args.seq_len):
        show_training(run, mesh, batch, args.lr, args.iterations)


def check_split(run, name, model, references=None):
    """A model's weights are slices of the whole one's, all that its split is of."""
    if references is None:
        references = [one for one in [run.load_reference()] if one]
    run.check_weights(name, model, references, whole=("norm", *SPLITS[name][2]))


def show_product(run, group):
    """(3, 4) times (4, 6), whole numbers, so that it is exact."""
    x = torch.arange(12.0, device=run.device).view(3, 4)
    w = torch.arange(24.0, device=run.device).view(4, 6)
    run.print0(f"x @ w: {(x @ w).long().tolist()}")
    for how, multiply in ("columns", multiply_by_columns), ("rows", multiply_by_rows):
        part, whole = multiply(x, w, group)
        run.print_in_order(f"by {how} (rank={run.rank}): {part.long().tolist()}")
        run.check(f"product by {how}", [(whole, x @ w)], tolerance=0.0)


def show_two_layers(run, group, size=128, lr=0.002):
    """Two iterations of SGD on the sum of squares: output, loss, and gradients."""
    model = run.place(TwoLayers(size))  # alike on all ranks, by the seed
    x = torch.randn(1, size, dtype=torch.float32).to(run.device, run.dtype)
    references = [copy.deepcopy(model)] if run.rank == 0 else []
    references += [wider_copy(one) for one in references if run.dtype in WIDER]
    split_two_layers(model, group)

    def iteration(model):
        model.zero_grad()
        inputs = x.to(model.fc1.weight.dtype, copy=True).requires_grad_()
        y = model(inputs)
        loss = y.square().sum()
        loss.backward()
        SGD(model.parameters(), lr).step()
        return y.detach(), loss.detach(), inputs.grad, model.fc1.weight.grad

    for number in range(2):
        run.print0(f"--- two layers, iteration {number}")
        expected, (y, *others, grad) = run.expect(iteration, references), iteration(model)
        actual = y, *others, gather_shares(grad, dim=0, size=size, group=group)
        kinds = "outputs", "loss", "input grad", "fc1 grad"
        for kind, ours, of in zip(kinds, actual, expected, strict=True):
            run.show(kind, of[0], ours)
            # A single number's error is a matter of chance: as large as that of what it is of.
            own = 2 * error_of_mean(*expected[0]) * y.norm().item() if kind == "loss" else 0.0
            run.check(f"two layers, iteration {number}: {kind}", [(ours, *of)], own=own)


def show_training(run, mesh, batch, lr, iterations, splits=SPLITS):
    """The splits beside the unmodified model: each loss, and what the iterations change."""
    ids, mask, _ = batch
    only, exactly = compared_layers(run), run.dtype != torch.bfloat16
    references = [one for one in [run.load_reference()] if one]
    references += [wider_copy(one) for one in references if run.dtype in WIDER]

    def trained(model, loss):
        """The losses; and each parameter's gradient is what training has changed."""
        steps = partial(train, model, loss, batch, SGD(model.parameters(), lr), iterations)
        return keep_changes(list(model.parameters()), steps)[1]

    def expect(model):
        """Those of the unmodified model, and the tokens' losses that they are the means of."""
        kept = []

        def loss(model, labels, **inputs):
            kept.append(token_losses(model(**inputs).logits, labels))
            return mean_loss(kept[-1], labels)

        return trained(model, loss), torch.stack(kept).detach()

    expected, tokens = run.expect(expect, references)
    own = LIMITS["rms"] * error_of_mean(*tokens)  # which weights, off by one step, share
    refuse_if_endless(expected[0], lr)
    for wide in references[1:]:
        for parameter, of in zip(references[0].parameters(), wide.parameters(), strict=True):
            parameter.exact_grad = of.grad.float()
    del references[1:]
    table, title = {"no TP": expected[0]}, f"{len(ids)} x {ids.shape[1]} tokens"
    for name, (split, loss, _) in splits.items():
        model = run.load_model(partial(split, mesh=mesh))
        table[name] = trained(model, loss)
        compared = [of if exactly else of[:1] for of in (table[name], *expected)]
        run.check(f"{name}, {title}: losses", [compared], own=own)
        if exactly:
            changes = f"{name}, {title}: changes by {iterations} iterations"
            compare_gradients(run, changes, model, references, only)
        check_copies(run, f"{name}, {title}: copies of a parameter, after them", model)
    padding = (mask == 0).sum().item()
    for i in range(iterations):
        said = ", ".join(f"{name} {losses[i]:.6f}" for name, losses in table.items())
        run.print0(f"iter {i}, input {title}, {padding} of padding; loss: {said}")
    off = max((of / expected[0] - 1).abs().max().item() for of in table.values())
    run.print0(f"losses differ by up to {off:.1e} of the loss")
    run.results[title] = {name: losses.tolist() for name, losses in table.items()}


# ---------------------------------------------------------------- memory


def train_within(run, mesh, args):
    """Iterations on one long sequence, each rank with no more memory than it is given."""
    ids, _, labels = make_batch(run, 1, args.seq_len)
    name = "TP + loss parallel"  # beside the reference first, on few tokens
    few = make_batch(run, 1, min(args.seq_len, 64))
    show_training(run, mesh, few, args.lr, 2, {name: SPLITS[name]})
    model = run.load_model(partial(tensor_parallelize, mesh=mesh))
    check_split(run, name, model)
    with limited_memory(run.device, args.memory_budget):
        optimizer = SGD(model.parameters(), args.lr)
        losses = train(model, own_loss, (ids, None, labels), optimizer, args.iterations)
    run.print0(f"losses: {', '.join(f'{loss:.4f}' for loss in losses)}")
    refuse_if_endless(losses, args.lr)
    references = run.references(run.load_reference())
    with torch.no_grad():  # of which rank 0 has memory for the forward, without a limit
        expected = run.expect(
            lambda model: [token_losses(model(ids, use_cache=False).logits, labels)], references
        )[0]
    means = [mean_loss(of, labels) for of in expected]
    run.check("loss of the first iteration", [(losses[0], *means)], own=error_of_mean(*expected))


def profile(run, mesh, seq_len):
    """What tensors hold over a step of 1 x seq_len tokens: one process, whole and split logits."""
    ids, _, _ = make_batch(run, 1, seq_len)
    V, memory = run.source.config.vocab_size, {}
    first, stop = shard_range(V, run.world_size, run.rank)
    bound = 1e-2 if run.dtype == torch.bfloat16 else 1e-5  # Hugging Face's loss is in float32
    for name, columns in ("one process", V), ("TP", V), ("TP + loss parallel", stop - first):
        split, mine = SPLITS.get(name, [None])[0], None
        if split or run.rank == 0:
            model = run.load_model(split and partial(split, mesh=mesh))
            if split:
                check_split(run, name, model)
            mine = record_step(model, ids, columns)
            del model
        memory[name] = [one for one in run.gather_objects(mine) if one]
        if split:
            losses = mine["loss"], memory["one process"][0]["loss"]
            loss, expected = (torch.tensor(of, dtype=torch.float64) for of in losses)
            run.check(f"{name}: loss", [(loss, expected)], tolerance=bound * expected.item())
        most = max(memory[name], key=lambda one: one["peak"])
        weights, peak = (f"{most[key] / 2**20:.1f}" for key in ("weights", "peak"))
        parts = ", ".join(f"{most[part] / 2**20:.1f} {part}" for part in PARTS)
        run.print0(f"memory, MiB, {name}: weights {weights}; at the peak of a step of {seq_len} "
                   f"tokens {peak} more: {parts}")  # fmt: skip
    alone, whole, split = (max(of["peak"] for of in one) for one in memory.values())
    run.print0(f"peak beyond the weights, of one process's: TP {whole / alone:.0%}, TP + loss "
               f"parallel {split / alone:.0%}, which is {split / whole:.0%} of TP's")  # fmt: skip
    run.results["memory"] = memory | {"tokens": seq_len, "vocab_size": V}


if __name__ == "__main__":
    main()
