"""From a neighbouring course: data parallelism. Ranks take different samples, and the same step.

Each rank computes the gradients of its part of a batch. Their average over the ranks is the
gradient of the batch's mean loss, if each rank scales its loss for that: see
`local_forward_backward`. This is what each of P ranks holds after a step, and sends during the
step, in bytes; the weights are W bytes:

                weights     gradients   Adam's states   bytes sent
    by-hand     W           W           2 W             2 (P-1)/P W, after the backward
    ddp         W           W           2 W             2 (P-1)/P W, during the backward
    zero1       W           W           2 W / P         3 (P-1)/P W; each state on one rank
    fsdp2       W / P       W / P       2 W / P         3 (P-1)/P W; a full layer while it runs

(PyTorch's ZeRO-1 sums all gradients on all ranks; the paper's scatters the sums, and sends
2 (P-1)/P W. FSDP2's embedding, last norm and head stay full from the forward to the backward, so
they are sent twice, not three times. DDP: arXiv 2006.15704, section 3. ZeRO: arXiv 1910.02054,
section 5. FSDP: arXiv 2304.11277.)

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 tasks/data_parallel.py

checks each of the four against a single-rank run of the unmodified model, and trains by each.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 tasks/data_parallel.py \\
        --memory-budget 0.7 --model random/balanced --batch-size 4 --seq-len 32

trains with FSDP2 a model that does not fit on a single rank, nor on two with `--strategy zero1`.

    python tasks/data_parallel.py --spawn 2 --epochs 3 --gradients-dir gradients
    python tasks/data_parallel.py --compare-gradients gradients

The first command starts processes as the course does, without torchrun. They average gradients by
hand, with the same checks, and write the first batch's gradients. The second compares these files
to the bit.
"""

import math
import os
import random
import sys
from functools import partial, singledispatch
from itertools import accumulate, pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing import Process, set_start_method
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import checkpoints
import harness
import loading
from utils.collectives import all_reduce, group_of_axis
from utils.errors import UserError
from utils.families import layers_of
from utils.gradients import check_mesh, sum_in_place
from utils.losses import token_losses
from utils.partition import shard_range

# ---------------------------------------------------------------- the technique: data


class Partition(Dataset):
    """The samples of `data` at the places `index`."""

    def __init__(self, data, index):
        self.data, self.index = data, index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        return self.data[self.index[i]]


class DataPartitioner:
    """Deals the samples of `data`, shuffled, to partitions. sizes: their shares of all samples.

    The ends of partitions are rounded, not their sizes, and the last takes what is left: so each
    sample is in exactly one. All ranks deal alike: the shuffle has a random generator of its own.
    Raises ValueError for a share below 0, and for shares that do not add up to 1.
    """

    def __init__(self, data, sizes=(0.7, 0.2, 0.1), seed=1234):
        if min(sizes) < 0 or abs(sum(sizes) - 1) > 1e-6:
            raise ValueError(f"sizes of partitions must be 0 or more, and add up to 1: {sizes}")
        index = list(range(len(data)))
        random.Random(seed).shuffle(index)
        ends = [round(share * len(data)) for share in accumulate(sizes[:-1], initial=0)]
        self.data, self.parts = data, [index[i:j] for i, j in pairwise([*ends, len(data)])]

    def use(self, partition):
        return Partition(self.data, self.parts[partition])


def partition_of_rank(rank, world_size, dataset, batch_size=128, collate_fn=None):
    """Return the DataLoader of a rank's samples, in batches of the rank's share of batch_size.

    Where the ranks' shares of a batch are unequal, so are their partitions. So all ranks have
    equally many batches, except that some may lack the last one. Raises ValueError for a batch_size
    below world_size.
    """
    if batch_size < world_size:
        raise ValueError(f"a batch of {batch_size} samples, but {world_size} ranks")
    ranges = [shard_range(batch_size, world_size, r) for r in range(world_size)]
    shares = [stop - first for first, stop in ranges]
    partitioner = DataPartitioner(dataset, [share / batch_size for share in shares])
    return DataLoader(partitioner.use(rank), shares[rank], collate_fn=collate_fn)


@singledispatch
def partition_dataset(dataset, batch_size=128, collate_fn=None):
    """Return this rank's DataLoader and its batch size, by the process group's rank and world size.

    128 samples on 4 ranks are 32 on each: see `partition_of_rank`.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader = partition_of_rank(rank, world_size, dataset, batch_size, collate_fn)
    return loader, loader.batch_size


# The course's starter code passes rank and world size first, and wants only the loader back.
partition_dataset.register(int, partition_of_rank)


# ---------------------------------------------------------------- the technique: gradients


def average_gradients(model, mesh=None):
    """Replace every gradient by its mean over the ranks of `mesh` (of one axis), in place.

    Without a mesh, the mean is over all ranks of the process group.
    Call it between the backward and the optimizer; all ranks get the same bits. With several
    microbatches, call it after the last backward, or after each: averaging does not change what is
    equal on all ranks. A parameter that some ranks did not use counts as 0 there; one that no rank
    used keeps no gradient. DTensors may be split over another axis; `check_mesh` raises ValueError
    for DTensors whose mesh has several of these ranks.
    """
    group = group_of_axis(mesh) if mesh else dist.group.WORLD
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        return
    check_mesh(parameters, group)
    used = torch.tensor([parameter.grad is not None for parameter in parameters]).float()
    used = all_reduce(used.to(parameters[0].device), group)
    for parameter, ranks in zip(parameters, used.tolist(), strict=True):
        if ranks and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    sum_in_place([parameter.grad for parameter in parameters], group)
    for parameter in parameters:
        parameter.grad /= group.size()


def local_forward_backward(model, batch, group):
    """Run forward and backward of this rank's samples; return its part of the loss, and the logits.

    batch: ids, mask and labels, (b, S) each. The loss is the mean over all ranks' labels, and the
    ranks' parts add up to it. (A mean of the ranks' means would give more weight to a label whose
    rank has few.) Each rank starts its backward from P times its part, so that the average of the
    gradients over the ranks is the gradient of this loss.
    """
    ids, mask, labels = batch
    count = all_reduce((labels[:, 1:] != -100).sum(), group)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    part = token_losses(logits, labels).sum() / count
    (group.size() * part).backward()
    return part.detach(), logits.detach()


def shard_fully(model, mesh, by_layer=True):
    """Split a model by FSDP2, in place, so that each rank has slices; it may be on the meta device.

    A unit's parameters are gathered while it runs. by_layer: each layer is a unit, and the rest of
    the model another. If not, the model is one unit, and is full during the step: see
    `harness.numbers_at_peak`.
    """
    if by_layer:
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class DataParallelModel:
    """A Llama or a GPT-2 that each rank of a mesh of one axis trains on samples of its own.

    `model` has the parameters and their names; `called` is the module to call: `model`, or the DDP
    around it.
    """

    def __init__(self, run, strategy, mesh):
        self.strategy, self.mesh, self.group = strategy, mesh, group_of_axis(mesh)
        if strategy == "fsdp2":  # each rank reads its slices; .to() lets FSDP2 register them
            self.model = run.load_model(partial(shard_fully, mesh=mesh)).to(run.device)
            run.print0(str(self.model))
        else:
            self.model = run.compile(run.load_model())
        self.called = self.model
        if strategy in ("ddp", "zero1"):
            once = {"gradient_as_bucket_view": True}  # else DDP has all gradients twice
            self.called = DistributedDataParallel(self.model, process_group=self.group, **once)

    def step(self, batch):
        """Run `local_forward_backward`; afterwards the gradients are averages over the ranks."""
        result = local_forward_backward(self.called, batch, self.group)
        if self.strategy == "by-hand":
            average_gradients(self.model, self.mesh)
        return result

    @torch.no_grad()
    def logits(self, ids, mask):
        logits = self.called(input_ids=ids, attention_mask=mask, use_cache=False).logits
        if self.strategy == "fsdp2":
            self.model.reshard()  # else embedding and head stay full until a backward
        return logits

    def optimizer(self, parameters, optimizer_class=torch.optim.SGD, **settings):
        if self.strategy == "zero1":
            return ZeroRedundancyOptimizer(parameters, optimizer_class, self.group, **settings)
        return optimizer_class(parameters, **settings)


STRATEGIES = "by-hand", "ddp", "zero1", "fsdp2"

# ---------------------------------------------------------------- the technique: an epoch


def train_epoch(parallel, optimizer, batches):
    """Take a step of the optimizer with each of this rank's batches: forward, backward, average.

    Yields after each step the batch and this rank's part of its loss: the ranks' parts add up to
    the mean over the labels of all ranks.
    """
    for batch in batches:
        optimizer.zero_grad()
        part, _ = parallel.step(batch)
        optimizer.step()
        yield batch, part


@torch.no_grad()
def validate(parallel, batches, group):
    """Return the mean loss over all labels of all ranks' batches."""
    sums = 0  # the sum of the losses, and the number of labels
    for ids, mask, labels in batches:
        losses = token_losses(parallel.logits(ids, mask), labels)
        sums += torch.stack([losses.sum().double(), (labels[:, 1:] != -100).sum()])
    total, count = all_reduce(sums, group).tolist()
    return total / count


# ---------------------------------------------------------------- as the course starts it


def setup(rank, world_size, backend, **settings):
    """Join the other processes, at localhost:11868 unless the environment names another place.

    settings: more arguments of `dist.init_process_group`.
    """
    os.environ.setdefault("MASTER_ADDR", harness.ADDRESS)
    os.environ.setdefault("MASTER_PORT", str(harness.PORT))
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, rank=rank, world_size=world_size, **settings)


def train_in_process(args):
    """Run one process: set up, train and check, as each rank under torchrun does."""
    harness.start(args, show, setup)


def spawn(world_size, args):
    """Create, start and join the processes; return the exit code of the first to fail, or 0."""
    set_start_method("spawn", force=True)  # a forked process could not use CUDA
    store, note = harness.open_store()
    if note:
        print(f"note: {note}", flush=True)
    if world_size > 1:  # as torchrun does: processes share the cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    processes = []
    with harness.ended_together(processes):
        for rank in range(world_size):
            process = Process(target=train_in_process, args=(args,), name=f"rank {rank}")
            with harness.environment_of(harness.variables(rank, world_size, store.port)):
                process.start()
            processes.append(process)
        return harness.wait_for_all(processes)  # joins them


# ---------------------------------------------------------------- what is shown with it


def main():
    parser = harness.make_parser(__doc__, model_types=loading.LLAMA_AND_GPT2)
    add = parser.add_argument
    add("--strategy", choices=["all", *STRATEGIES], help="default all; with --spawn by-hand")
    add("--batch-size", type=harness.positive, default=8, help="sequences, of all ranks; default 8")
    add("--seq-len", type=harness.positive, default=64, help="tokens of the longest; default 64")
    add(
        "--num-sequences", type=harness.positive, default=40, help="7 of 10 to train on; default 40"
    )
    add(
        "--epochs", type=harness.natural, default=2, help="of training, after the checks; default 2"
    )
    add("--lr", type=harness.rate, default=1e-4, help="AdamW's learning rate; default 1e-4")
    add("--text", help="a file, plain or JSON lines, or a URL; default own stories, or a book")
    add("--tokenizer", help="tokenizer.json or its folder, see pretrain_2d.py; default the model's")
    add(
        "--train-only",
        action="store_true",
        help="train the model as shipped, with its dropout; "
        "compare it with no single rank, but copies with each other; default no",
    )
    add(
        "--spawn",
        type=harness.positive,
        metavar="N",
        help="train in so many processes, started here, "
        "without torchrun; they meet at localhost:11868, at the next port that is free, or at "
        "MASTER_PORT; default none",
    )
    add(
        "--gradients-dir",
        type=Path,
        metavar="DIR",
        help="each rank writes there the averaged "
        "gradients of the first batch, model{rank}_gradients.safetensors; of by-hand; default "
        "none",
    )
    add(
        "--compare-gradients",
        type=Path,
        metavar="DIR",
        help="compare the files that "
        "--gradients-dir has written there, on one rank, and stop; default none",
    )
    add(
        "--memory-budget",
        type=harness.gib,
        metavar="GIB",
        help="in place of the other checks: train with "
        "so much memory on each rank beyond what it has before the model; --strategy is fsdp2 by "
        "default then; default none",
    )
    add("--estimate", action="store_true", help="say what memory it wants, and stop; default no")
    harness.add_compile_flag(parser)
    args = parser.parse_args()
    # With --spawn, MASTER_PORT may be set without torchrun's other variables: it says where to
    # meet.
    world_size = 1 if args.spawn and "RANK" not in os.environ else harness.read_environment()
    if args.compare_gradients:
        if world_size > 1 or args.spawn:
            harness.fail(
                "--compare-gradients compares files in one process, without torchrun or --spawn"
            )
        args.model = "none"
        harness.start(args, harness.compare_files)
    if args.spawn and world_size > 1:
        harness.fail("--spawn starts processes itself: without torchrun")
    world_size = args.spawn or world_size
    if args.batch_size < world_size and not args.estimate:
        harness.fail(f"--batch-size {args.batch_size}: fewer sequences than {world_size} ranks")
    if args.memory_budget and (args.gradients_dir or not args.epochs):
        harness.fail("--memory-budget trains: with 1 or more --epochs, and without --gradients-dir")
    if args.memory_budget and args.train_only:
        harness.fail("--memory-budget trains without dropout: it cannot be with --train-only")
    default = "fsdp2" if args.memory_budget else "by-hand" if args.spawn else "all"
    args.strategy = args.strategy or default
    if args.gradients_dir and args.strategy not in ("all", "by-hand"):
        harness.fail("--gradients-dir writes the gradients of --strategy by-hand")
    if args.spawn:
        sys.exit(spawn(args.spawn, args))
    harness.start(args, show)


def show(run, args):
    """Run all checks of each strategy, and train with it."""
    run.mark = "D"
    B, S = args.batch_size, args.seq_len
    harness.estimate(run, B, S)
    if args.estimate:
        return
    if args.gradients_dir:  # before the work: it may not be writable
        harness.empty_folder(run, args.gradients_dir)
    data = loading.read_samples(run, args.num_sequences, S, args.text, args.tokenizer)
    collate = partial(loading.pad, size=S)
    parts = [DataPartitioner(data).use(i) for i in range(2)]
    if not all(map(len, parts)):
        raise UserError(
            f"--num-sequences {args.num_sequences}: {len(parts[0])} to train on and "
            f"{len(parts[1])} to validate; each needs one"
        )
    harness.print_workers(run)
    loaders = [partition_dataset(part, B, collate)[0] for part in parts]
    mesh = run.mesh("dp")
    batches = [loading.Batches(run, loader, collate) for loader in loaders]
    loading.check_partitions(run, data, parts, batches)
    steps = list(batches[0])
    reference, expected = None, None
    if args.memory_budget:
        return train_within(run, args, mesh, batches)
    if args.train_only:
        loading.restore_dropout(run.source)
        if any(run.source.dropout.values()):
            run.print0("note: nothing is compared with one rank: dropout is as shipped")
    else:
        # In the last batch ranks may have unequal numbers of sequences, or none.
        batch = steps[0] if args.gradients_dir else steps[-1]
        local, full = loading.gather_batch(run, batch)
        reference = harness.Reference(run, full)
        expected = harness.expect_training(run, reference, batches, args.epochs, args.lr)
    for strategy in STRATEGIES if args.strategy == "all" else [args.strategy]:
        parallel = DataParallelModel(run, strategy, mesh)
        if reference:
            unsplit = () if strategy == "fsdp2" else ("",)
            run.check_weights(strategy, parallel.model, reference.models, unsplit=unsplit)
        if strategy == "by-hand":
            check_average(run, parallel, steps[0])
            if args.gradients_dir:
                check_files(run, parallel, steps[0], args.gradients_dir, reference)
        if reference:
            check_step(run, reference, strategy, parallel, batch, local)
        if args.epochs:
            least_error = reference.least_error if reference else 0.0
            train_by_epochs(
                run, strategy, parallel, batches, args.epochs, args.lr, expected, least_error
            )
        del parallel  # free it before the next one is made


def check_step(run, reference, strategy, parallel, batch, rows):
    """Compare a step of this rank's `rows` of a batch, and three of them, with the reference."""
    embedding = parallel.model.get_input_embeddings()
    given = parallel.model, partial(parallel.step, batch), embedding, rows, run.world_size
    reference.check_step(run, strategy, *given, parallel.optimizer)


def train_by_epochs(run, strategy, parallel, batches, epochs, lr, expected=None, least_error=0.0):
    """Train by AdamW; check losses and memory. Return each epoch's losses: steps, then validation.

    batches: those to train on, and those to validate with. expected: the references' losses;
    least_error: see `Run.compare`. Without `expected`, the model trains with the dropout of its
    configuration.
    """
    dropout = not expected
    if dropout:
        torch.manual_seed(run.seed + run.rank)  # each rank drops other numbers
    model = parallel.model.train(dropout)
    optimizer = parallel.optimizer(model.parameters(), torch.optim.AdamW, lr=lr)
    activations = harness.bytes_kept(model, partial(parallel.step, next(iter(batches[0]))))
    records = run.results.setdefault("epochs", {})[strategy] = []  # for each epoch, all ranks'

    def all_epochs():
        for epoch in range(epochs):
            model.train(dropout)
            steps = train_epoch(parallel, optimizer, batches[0])
            record = harness.record_epoch(run, steps, epoch, len(batches[0]))
            model.eval()
            record["validation_loss"] = validate(parallel, batches[1], parallel.group)
            harness.print_epoch(run, record)
            records.append(run.gather_objects(record))

    peaks = harness.peak_memory(run, all_epochs)
    losses = harness.losses_of_epochs(ranks[0] for ranks in records)
    if expected:
        harness.check_losses(run, strategy, losses, expected, least_error)
    else:
        harness.refuse_not_finite(torch.tensor(losses, dtype=torch.float64), lr)
    harness.check_copies(run, f"{strategy}: copies of a parameter, trained", model)
    harness.check_memory(run, strategy, model, optimizer, activations)
    harness.print_pace(run, strategy, records, f"max_mem={max(peaks) / 1e9:.2f}gb")
    return losses


def train_within(run, args, mesh, batches):
    """Train with no more memory on each rank than --memory-budget allows.

    Two checks need more memory: losses against those of a single rank, and FSDP2's peaks against a
    formula. They come afterwards, without the limit. Where a training's losses cannot be compared
    (see `Reference`), a step's loss and gradients are.
    """
    strategies, losses = STRATEGIES if args.strategy == "all" else [args.strategy], {}
    harness.warm_up_adam(run)
    for strategy in strategies:
        with harness.limited_to_budget(run, strategy, args.memory_budget):
            parallel = DataParallelModel(run, strategy, mesh)
            losses[strategy] = train_by_epochs(
                run, strategy, parallel, batches, args.epochs, args.lr
            )
            del parallel
    batch = next(iter(batches[0]))
    local, full = loading.gather_batch(run, batch)
    if harness.compares_changes(run):
        least_error = harness.error_of_loss(run, full)
        expected = harness.losses_alone(run, batches, args.epochs, args.lr)
        for strategy in strategies:
            harness.check_losses(run, strategy, losses[strategy], expected, least_error)
    else:
        reference = harness.Reference(run, full)
        for strategy in strategies:
            parallel = DataParallelModel(run, strategy, mesh)
            check_step(run, reference, strategy, parallel, batch, local)
    if "fsdp2" in strategies and run.world_size > 1:
        for by_layer in True, False:
            check_peak(run, mesh, by_layer)


def check_peak(run, mesh, by_layer):
    """Compare the peak of tensors' bytes in FSDP2's forward and backward with the formula's."""
    model = run.load_model(partial(shard_fully, mesh=mesh, by_layer=by_layer)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(1, 3, dtype=torch.long, device=run.device)
    step = partial(
        local_forward_backward, model, (ids, torch.ones_like(ids), ids), group_of_axis(mesh)
    )
    step()
    optimizer.step()
    weights, _, states = harness.bytes_held(model, optimizer)
    optimizer.zero_grad()
    peak = weights + states + sum(harness.record_memory(step, run.device)[1].values())
    said = harness.numbers_at_peak(run, by_layer) * run.dtype.itemsize
    copies = 4 * sum(map(math.prod, run.source.shapes.values())) * run.dtype.itemsize
    name = f"fsdp2, {'each layer a unit' if by_layer else 'the model one unit'}"
    mib = [size / 2**20 for size in (peak, said, copies)]
    run.print0(
        f"peak of tensors, MiB, {name}: in a step of 3 tokens {mib[0]:.1f}, by the formula "
        f"{mib[1]:.1f}; with copies of all {mib[2]:.1f} at least"
    )
    pair = [torch.tensor(size) for size in mib[:2]]
    # Tolerance: a tenth, as for every peak by a formula, and 0.25 MiB for the tokens' activations.
    run.check(f"{name}: peak in MiB, by the formula", [pair], tolerance=0.1 * mib[1] + 0.25)
    run.results.setdefault("peak_bytes", {})[name] = [peak, said]


def check_files(run, parallel, batch, folder, reference):
    """Write each rank's gradients of a batch to a file; compare it with the single rank's."""
    parallel.step(batch)
    harness.write_gradients(run, folder, parallel.model)
    if reference:
        grads = load_file(
            folder / harness.GRADIENTS_FILE.format(rank=run.rank), device=str(run.device)
        )
        for name, parameter in parallel.model.named_parameters():
            parameter.grad = grads.get(name)
        reference.compare_gradients(run, "by-hand, in files", parallel.model)
    parallel.model.zero_grad()


def check_average(run, parallel, batch):
    """Check that gradients are each rank's own before the average, and the same bits after it."""
    local_forward_backward(parallel.model, batch, parallel.group)
    grads = [parameter.grad for parameter in parallel.model.parameters()]
    samples, own = (
        len(set(run.gather_objects(checkpoints.fingerprint(tensors)))) for tensors in (batch, grads)
    )
    same = torch.tensor(float(samples - own))
    run.check("by-hand: ranks with the same gradients before the average", [(same, 0 * same)], 0.0)
    average_gradients(parallel.model, parallel.mesh)
    harness.check_copies(
        run, "by-hand: copies of a gradient, averaged", parallel.model, lambda p: p.grad
    )
    parallel.model.zero_grad()


if __name__ == "__main__":
    main()
