"""Training by epochs, of ranks that each have other samples: what it prints, and its memory."""

import math
import os
import statistics
import time
from functools import partial
from itertools import chain

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from harness.measure import peak_memory
from harness.model_checks import number_of_parameters, plain_loss
from harness.step_checks import check_copies, sum_of_parts
from harness.wider import WIDER, wider_copy
from loading.architectures import count_parameters
from loading.batches import gather_batch
from utils.gradients import local_part
from utils.losses import token_losses

COPIED = {  # whether each rank has all parameters, all gradients, and both of all Adam's states
    "by-hand": (True, True, True), "ddp": (True, True, True),
    "zero1": (True, True, False), "fsdp2": (False, False, False),
}  # fmt: skip


def estimate(run, batch_size, seq_len):
    """Print and check the number of parameters; print, in closed form, the memory of a step.

    An article's formula: 4 numbers a parameter, for weights, gradients and Adam's two states; for
    activations, and as much again for their gradients, those of `activations_by_article`.
    """
    c, count = run.source.config, number_of_parameters(run.source)
    run.print0(f"Model has {count} parameters")
    numbers = count, count_parameters(c)
    pair = [torch.tensor(float(number), dtype=torch.float64) for number in numbers]
    run.check("number of parameters, by its formula", [pair], tolerance=0.0)
    gb, P = run.dtype.itemsize / 1e9, run.world_size
    activations = 2 * activations_by_article(c, batch_size, seq_len)
    total = (4 * count + activations) * gb
    run.print0(f"an article's formula for a step's memory, {batch_size} x {seq_len} tokens: "
               f"{total:.2f} GB on one rank, {activations * gb:.2f} of it activations and their "
               "gradients")  # fmt: skip
    if P > 1:
        each = []
        for strategy, whole in COPIED.items():
            shares = [1 if all_of_it else 1 / P for all_of_it in whole]
            numbers = shares[0] + shares[1] + 2 * shares[2]
            each.append(f"{strategy} {(numbers * count + activations / P) * gb:.2f}")
        run.print0(f"on each of {P} ranks, GB: {', '.join(each)}")


def activations_by_article(config, batch_size, seq_len):
    """Return how many numbers a forward keeps, by an article's formula: B S (2 V + L (6 H + N S)).

    It has the scores of N heads, which fused kernels do not keep, and nothing of what is in the
    MLP. `figures/plan/estimate.py --article` puts it beside this project's own.
    """
    scores = config.num_attention_heads * seq_len
    of_layers = config.num_hidden_layers * (6 * config.hidden_size + scores)
    return batch_size * seq_len * (2 * config.vocab_size + of_layers)


def print_workers(run):
    """Who is who, and where they meet; nowhere without torchrun."""
    meet = [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    address = ":".join(meet) or "none"
    run.print_in_order(f"Starting worker {run.rank}/{run.world_size} with master address {address}")


def expect_training(run, reference, batches, epochs, lr):
    """`losses_alone`, or None where what three steps change is not compared, either.

    reference: a `step_checks.Reference`.
    """
    return losses_alone(run, batches, epochs, lr) if epochs and reference.three else None


def losses_alone(run, batches, epochs, lr):
    """The references' losses on the ranks' batches, of each step and each epoch's validation."""
    steps, validation = ([gather_batch(run, batch)[1] for batch in each] for each in batches)

    def curve(model):
        return [losses_of_training(model, steps, validation, epochs, lr)]

    model = run.load_reference()
    wide = [wider_copy(model)] if model and run.dtype in WIDER else []
    return run.expect(curve, [model, *wide] if model else [])[0]


def losses_of_training(model, steps, validation, epochs, lr):
    """Train an unsplit model by AdamW: the losses of each step and each epoch's validation.

    steps, validation: batches of ids, mask and labels, (B, S) each; those of validation as one.
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


def train_by_epochs(run, strategy, replica, batches, epochs, lr, expected=None, own=0.0):
    """So many epochs of AdamW; time, throughput, losses, and memory, which is checked.

    Returns the losses of all steps, and after those of each epoch its validation's.

    replica: `step(batch)` fills in the gradients and returns this rank's part of the loss first;
    `optimizer(parameters, kind, ...)`, `logits(ids, mask)`, and `model`, which has the parameters.
    batches: to train on, and to validate with. expected, own: the references' losses, and their
    error at least, see `Run.compare`. Without them the model has its configuration's dropout.
    """
    dropout = not expected
    if dropout:
        torch.manual_seed(run.seed + run.rank)  # ranks drop out other numbers
    replica.model.train(dropout)
    optimizer = replica.optimizer(replica.model.parameters(), torch.optim.AdamW, lr=lr)
    activations = bytes_kept(replica.model, partial(replica.step, next(iter(batches[0]))))
    records = run.results.setdefault("epochs", {})[strategy] = []

    def all_epochs():
        for epoch in range(epochs):
            replica.model.train(dropout)
            mine = train_epoch(run, replica, optimizer, batches[0], epoch)
            replica.model.eval()
            mine["validation_loss"] = validate(run, replica, batches[1])
            run.print_in_order(
                f"Epoch {epoch} (rank={run.rank}): Training Time = {mine['training_time_s']:.3f} s,"
                f" Tokens_per_sec = {mine['tokens_per_second']:.0f}"
            )
            run.print0(f"validation loss: {mine['validation_loss']:.4f}")
            records.append(run.gather_objects(mine))

    peaks = peak_memory(run, all_epochs)
    of_epochs = (ranks[0]["losses"] + [ranks[0]["validation_loss"]] for ranks in records)
    losses = list(chain(*of_epochs))
    if expected:
        check_losses(run, strategy, losses, expected, own)
    check_copies(run, f"{strategy}: copies of a parameter, trained", replica.model)
    check_memory(run, strategy, replica.model, optimizer, activations)
    counted = records[1:] or records  # the first epoch warms up
    times = [statistics.mean(r["training_time_s"] for r in ranks) for ranks in counted]
    speeds = [sum(r["tokens_per_second"] for r in ranks) for ranks in counted]
    run.print0(f"time of an epoch, {strategy}: {mean_and_deviation(times, '.3f')} s, of "
               f"{len(counted)} after {len(records) - len(counted)} to warm up")  # fmt: skip
    run.print0(f"tokens_per_second={mean_and_deviation(speeds, '.0f')}, "
               f"max_mem={max(peaks) / 1e9:.2f}gb")  # fmt: skip
    return losses


def check_losses(run, strategy, losses, expected, own):
    """Those of a training are the references', in the same order. own: see `Run.compare`."""
    losses = expected[0].new_tensor(losses)
    run.check(f"{strategy}: losses of the training", [(losses, *expected)], own=own)


def train_epoch(run, replica, optimizer, batches, epoch):
    """This rank's record of an epoch. Loss: the mean over the labels of a step's whole batch."""
    tokens, losses = 0, []
    run.synchronize()
    begin = time.perf_counter()
    for i, batch in enumerate(batches):
        optimizer.zero_grad()
        part = replica.step(batch)[0]
        optimizer.step()
        losses.append(sum_of_parts(run, part).item())
        run.print0(f"Update={epoch * len(batches) + i}, Loss={losses[-1]:.4f}")
        tokens += (batch[2] != -100).sum().item()
    run.synchronize()
    seconds = time.perf_counter() - begin
    return {"rank": run.rank, "epoch": epoch, "training_time_s": seconds,
            "tokens_per_second": tokens / seconds, "losses": losses}  # fmt: skip


@torch.no_grad()
def validate(run, replica, batches):
    """Mean loss over all labels of all ranks' batches."""
    sums = torch.zeros(2, dtype=torch.float64, device=run.device)
    for ids, mask, labels in batches:
        losses = token_losses(replica.logits(ids, mask), labels)
        sums += torch.stack([losses.sum().double(), (labels[:, 1:] != -100).sum()])
    total, count = run.gather(sums).sum(0).tolist()
    return total / count


def mean_and_deviation(values, form):
    spread = f" +- {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}"


# ---------------------------------------------------------------- memory


def bytes_kept(model, step):
    """Bytes of tensors, but for parameters, that step()'s forward keeps for its backward."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        # Asked each time: FSDP2's are whole, and no DTensors, only while their layer runs.
        whole = (p for p in model.parameters() if not isinstance(p, DTensor))
        if storage.data_ptr() not in {p.untyped_storage().data_ptr() for p in whole}:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(kept.values())


def bytes_held(model, optimizer):
    """Of parameters, gradients and the optimizer's states, on this rank; not of single numbers."""
    parameters = list(model.parameters())
    inner = getattr(optimizer, "optim", optimizer)  # ZeRO's has this rank's share
    states = [value for state in inner.state.values() for value in state.values()]
    held = parameters, [p.grad for p in parameters], [s for s in states if s.dim()]
    return [sum(local_part(tensor).nbytes for tensor in tensors) for tensors in held]


def check_memory(run, strategy, model, optimizer, activations):
    """Check that sharded state exists once and replicated state on every rank, to the byte.

    And no rank has more of it than its share and a parameter: ZeRO-1 deals whole ones.
    """
    held = bytes_held(model, optimizer)
    everyone, P = run.gather_objects([*held, activations]), run.world_size
    weights = number_of_parameters(run.source) * run.dtype.itemsize
    largest = max(map(math.prod, run.source.shapes.values())) * run.dtype.itemsize
    kinds = list(zip((1, 1, 2), COPIED[strategy], strict=True))
    actual = [sum(column) for column in zip(*everyone, strict=True)]
    expected = [weights * n * (P if copied else 1) for n, copied in kinds]
    most = [n * (weights if copied else weights / P + largest) for n, copied in kinds]
    above = [max(0, mine - limit) for mine, limit in zip(held, most, strict=True)]
    pairs = [(actual[:3], expected), (above, [0, 0, 0])]
    pairs = [[torch.tensor(of, dtype=torch.float64) for of in pair] for pair in pairs]
    run.check(f"{strategy}: bytes of weights, gradients, states, on all ranks", pairs, 0.0)
    for rank, numbers in enumerate(everyone):
        mib = [f"{number / 2**20:.2f}" for number in numbers]
        run.print0(f"memory, MiB (rank={rank}): weights {mib[0]}, gradients {mib[1]}, Adam's "
                   f"states {mib[2]}; a forward keeps {mib[3]}")  # fmt: skip
    run.results.setdefault("memory_bytes", {})[strategy] = everyone
