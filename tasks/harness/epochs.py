"""Around training by epochs: the losses of a single rank, what is printed, and memory."""

import math
import os
import statistics
import time
from functools import partial
from itertools import chain

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from harness.model_checks import error_of_mean, number_of_parameters, plain_loss
from harness.step_checks import keep_changes, refuse_not_finite, sum_of_parts
from harness.wider import WIDER, wider_copy
from loading.architectures import count_parameters
from loading.batches import gather_batch
from utils.gradients import local_part
from utils.losses import token_losses

COPIED = {  # whether each rank has all parameters, all gradients, all of Adam's states
    "by-hand": (True, True, True), "ddp": (True, True, True),
    "zero1": (True, True, False), "fsdp2": (False, False, False),
}  # fmt: skip


def estimate(run, batch_size, seq_len):
    """Print and check the number of parameters; print, in closed form, the memory of a step.

    It is an article's formula: 4 numbers a parameter, for weights, gradients and Adam's two states,
    and twice `activations_by_article`, for activations and their gradients.
    """
    c, count = run.source.config, number_of_parameters(run.source)
    run.print0(f"Model has {count} parameters")
    numbers = count, count_parameters(c)
    pair = [torch.tensor(float(number), dtype=torch.float64) for number in numbers]
    run.check("number of parameters, by its formula", [pair], tolerance=0.0)
    gb, P = run.dtype.itemsize / 1e9, run.world_size
    activations = 2 * activations_by_article(c, batch_size, seq_len)
    total = (4 * count + activations) * gb
    run.print0(
        f"an article's formula for a step's memory, {batch_size} x {seq_len} tokens: "
        f"{total:.2f} GB on one rank, {activations * gb:.2f} of it activations and their "
        "gradients"
    )
    if P > 1:
        each = []
        for strategy, copied in COPIED.items():
            shares = [1 if full else 1 / P for full in copied]
            numbers = shares[0] + shares[1] + 2 * shares[2]
            each.append(f"{strategy} {(numbers * count + activations / P) * gb:.2f}")
        run.print0(f"on each of {P} ranks, GB: {', '.join(each)}")


def activations_by_article(config, batch_size, seq_len):
    """Return how many numbers a forward keeps, by an article's formula: B S (2 V + L (6 H + N S)).

    The formula counts the scores of N heads, which fused kernels do not keep, and nothing inside
    the MLP. `figures/plan/estimate.py --article` puts it beside this project's own.
    """
    scores = config.num_attention_heads * seq_len
    of_layers = config.num_hidden_layers * (6 * config.hidden_size + scores)
    return batch_size * seq_len * (2 * config.vocab_size + of_layers)


def print_workers(run):
    """Print each rank's number and where the ranks meet: "none" without torchrun."""
    meet = [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    address = ":".join(meet) or "none"
    run.print_in_order(f"Starting worker {run.rank}/{run.world_size} with master address {address}")


def expect_training(run, reference, batches, epochs, lr):
    """Return `losses_alone`; None without epochs, or where changes by steps are not compared.

    reference: a `step_checks.Reference`; its `compares_changes` says whether they are compared.
    """
    return losses_alone(run, batches, epochs, lr) if epochs and reference.compares_changes else None


def losses_alone(run, batches, epochs, lr):
    """Return the references' losses on all ranks' batches: see `losses_of_training`."""
    steps, validation = ([gather_batch(run, batch)[1] for batch in each] for each in batches)

    def curve(model):
        return [losses_of_training(model, steps, validation, epochs, lr)]

    model = run.load_reference()
    wide = [wider_copy(model)] if model and run.dtype in WIDER else []
    losses = run.reference_values(curve, [model, *wide] if model else [])[0]
    refuse_not_finite(torch.cat(losses), lr)
    return losses


def losses_of_training(model, steps, validation, epochs, lr):
    """Train an unsplit model by AdamW. Return the losses of steps and of each epoch's validation.

    steps, validation: batches of ids, mask and labels, (B, S) each; the loss of validation is that
    of all its batches as one.
    """
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr), []
    for _ in range(epochs):
        for ids, mask, labels in steps:
            optimizer.zero_grad()
            loss = plain_loss(model, labels, input_ids=ids, attention_mask=mask)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        ids, mask, labels = map(torch.cat, zip(*validation, strict=True))
        with torch.no_grad():
            losses.append(plain_loss(model, labels, input_ids=ids, attention_mask=mask))
    return torch.stack(losses)


def expect_epochs(run, batches, epochs, lr):
    """Train the unmodified model in the same way; return (losses, least error, [the model]).

    losses: those of all steps and each epoch's validation, as a list: the model's and, unless it is
    float64, a wider copy's. least error: the least to assume for the reference's loss. Each
    parameter's .grad is set to its change by the training, for `compare_gradients`.
    """
    model = run.load_reference()
    models = [model, *([wider_copy(model)] if run.dtype in WIDER else [])]
    steps, validation = (list(each) for each in batches)

    def train(model):
        return losses_of_training(model, steps, validation, epochs, lr)

    curves = [keep_changes(list(one.parameters()), partial(train, one))[1] for one in models]
    for parameter, *exact in zip(*(one.parameters() for one in models), strict=True):
        parameter.exact_grad = exact[0].grad.float() if exact else None
    ids, _, labels = steps[0]
    with torch.no_grad():
        least_error = error_of_mean(*(token_losses(one(ids).logits, labels) for one in models))
    return curves, least_error, [model]


def check_losses(run, strategy, losses, expected, least_error):
    """Compare a training's losses with the references'. least_error: see `Run.compare`."""
    losses = expected[0].new_tensor(losses)
    run.check(f"{strategy}: losses of the training", [(losses, *expected)], least_error=least_error)


def record_epoch(run, steps, epoch, count):
    """Take an epoch's steps, print their losses, and return this rank's record of the epoch.

    steps: yields the batch and this rank's part of the loss, `count` times.
    """
    tokens, losses = 0, []
    run.synchronize()
    begin = time.perf_counter()
    for i, ((_, _, labels), part) in enumerate(steps, epoch * count):
        losses.append(sum_of_parts(run, part).item())
        run.print0(f"Update={i}, Loss={losses[-1]:.4f}")
        tokens += (labels != -100).sum().item()
    run.synchronize()
    seconds = time.perf_counter() - begin
    return {
        "rank": run.rank,
        "epoch": epoch,
        "training_time_s": seconds,
        "tokens_per_second": tokens / seconds,
        "losses": losses,
    }


def print_epoch(run, record):
    """Print each rank's time and speed of an epoch, and the validation's loss after it."""
    run.print_in_order(
        f"Epoch {record['epoch']} (rank={run.rank}): "
        f"Training Time = {record['training_time_s']:.3f} s, "
        f"Tokens_per_sec = {record['tokens_per_second']:.0f}"
    )
    run.print0(f"validation loss: {record['validation_loss']:.4f}")


def losses_of_epochs(records):
    """Return all losses in one list: for each epoch its steps', then its validation loss."""
    of_epochs = ([*record["losses"], record["validation_loss"]] for record in records)
    return list(chain.from_iterable(of_epochs))


def print_pace(run, name, records, more):
    """Print mean time and speed of the epochs but the first, which warms up; return the times.

    records: for each epoch, the list of all ranks' records. more: text after the speed.
    """
    counted = records[1:] or records
    times = [statistics.mean(record["training_time_s"] for record in ranks) for ranks in counted]
    speeds = [sum(record["tokens_per_second"] for record in ranks) for ranks in counted]
    run.print0(
        f"time of an epoch, {name}: {mean_and_deviation(times, '.3f')} s, of "
        f"{len(counted)} after {len(records) - len(counted)} to warm up"
    )
    run.print0(f"tokens_per_second={mean_and_deviation(speeds, '.0f')}, {more}")
    return times


def mean_and_deviation(values, form):
    spread = f" +- {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}"


# ---------------------------------------------------------------- memory


def bytes_kept(model, step):
    """Return the bytes of tensors, without parameters, that step()'s forward keeps."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        # Asked each time: with FSDP2 a parameter is full while its layer runs, else a DTensor.
        full = (p for p in model.parameters() if not isinstance(p, DTensor))
        if storage.data_ptr() not in {p.untyped_storage().data_ptr() for p in full}:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(kept.values())


def bytes_held(model, optimizer):
    """Return this rank's bytes of [parameters, gradients, the optimizer's states].

    States that are single numbers do not count.
    """
    parameters = list(model.parameters())
    inner = getattr(optimizer, "optim", optimizer)  # ZeRO's inner one has this rank's share
    states = [value for state in inner.state.values() for value in state.values()]
    held = parameters, [p.grad for p in parameters], [s for s in states if s.dim()]
    return [sum(local_part(tensor).nbytes for tensor in tensors) for tensors in held]


def check_memory(run, strategy, model, optimizer, activations):
    """Check that sharded state exists once and replicated state on every rank, to the byte.

    Check also that no rank has more than its share plus one parameter: ZeRO-1 deals whole
    parameters.
    """
    held = bytes_held(model, optimizer)
    everyone, P = run.gather_objects([*held, activations]), run.world_size
    weights = number_of_parameters(run.source) * run.dtype.itemsize
    largest = max(map(math.prod, run.source.shapes.values())) * run.dtype.itemsize
    counts = list(zip((1, 1, 2), COPIED[strategy], strict=True))
    actual = [sum(column) for column in zip(*everyone, strict=True)]
    expected = [weights * n * (P if copied else 1) for n, copied in counts]
    most = [n * (weights if copied else weights / P + largest) for n, copied in counts]
    above = [max(0, local - limit) for local, limit in zip(held, most, strict=True)]
    pairs = [(actual[:3], expected), (above, [0, 0, 0])]
    pairs = [[torch.tensor(values, dtype=torch.float64) for values in pair] for pair in pairs]
    run.check(f"{strategy}: bytes of weights, gradients, states, on all ranks", pairs, 0.0)
    for rank, numbers in enumerate(everyone):
        mib = [f"{number / 2**20:.2f}" for number in numbers]
        run.print0(
            f"memory, MiB (rank={rank}): weights {mib[0]}, gradients {mib[1]}, Adam's "
            f"states {mib[2]}; a forward keeps {mib[3]}"
        )
    run.results.setdefault("memory_bytes", {})[strategy] = everyone
