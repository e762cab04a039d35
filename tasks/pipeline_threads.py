"""Neighbour course: the pipeline in one process, with a worker thread for each device.

A model is an `nn.Sequential` whose modules are on several devices. Consecutive modules on one
device form a partition, and each partition has a thread that runs it, with a queue of tasks and
one of results. `Pipe` splits a batch by rows; in each tick all (microbatch, partition) pairs work
at once whose microbatch has come that far:

    tick            0       1       2       3       4
    partition 0     m0      m1      m2      m3
    partition 1             m0      m1      m2      m3

PyTorch's kernels run without the interpreter's lock, so threads work at the same time. In the
backward autograd itself has a thread for each GPU, which runs that GPU's partitions. It has none
for CPUs: it would run all partitions in the thread that calls it. So on CPUs the backward goes
through the same queues, tick by tick in reverse.

    OMP_NUM_THREADS=1 python tasks/pipeline_threads.py

splits a Llama over two threads, checks logits, loss and all gradients against the unmodified model,
and to the bit against the same microbatches one after the other, and measures both. (After GPipe,
arXiv 1811.06965, section 2, and torchgpipe, arXiv 2004.09910.)

    OMP_NUM_THREADS=1 python tasks/pipeline_threads.py --model random/gpt2-small-test \\
        --model-parallel-mode both --epochs 4

trains a GPT-2 by epochs, without and with a pipeline, and compares their losses and trained weights
with the unmodified model's.
"""

import copy
import queue
import statistics
import threading
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

import harness
import loading
from utils.errors import UserError
from utils.families import GPT2, base_of, embedding_of, family_of, layers_of, norm_of
from utils.losses import mean_loss, token_losses
from utils.stages import balance, clock_cycles, sum_copies

# ---------------------------------------------------------------- the technique


class WithDevice(nn.Module):
    """A module with the label of a device, where its parameters do not tell.

    It may have none; and on a CPU all tensors are on "cpu", whatever cpu:0 or cpu:1 they went to.
    Without a pipe it takes its input to its device, so that modules on several GPUs can follow one
    another in an nn.Sequential.
    """

    def __init__(self, module, device):
        super().__init__()
        self.module, self.device = module, torch.device(device)

    def forward(self, x):
        return self.module(move(x, self.device))


def move(x, device):
    """x on a device. The labels cpu:0 and cpu:1 name the same CPU: nothing is copied between."""
    return x if x.device.type == device.type == "cpu" else x.to(device)


def device_of(module):
    """Where a module is, by its label or its parameters (none: the CPU). ValueError for several."""
    if isinstance(module, WithDevice):
        return module.device
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise ValueError(f"a module is on several devices: {sorted(map(str, devices))}")
    return devices.pop() if devices else torch.device("cpu")


def split_module(modules):
    """(partitions, devices) of an nn.Sequential: consecutive modules on one device, together."""
    partitions, devices = [], []
    for module in modules:
        device = device_of(module)
        if not devices or device != devices[-1]:
            partitions.append(nn.Sequential())
            devices.append(device)
        partitions[-1].append(module.module if isinstance(module, WithDevice) else module)
    return partitions, devices


# The homework's names of these two.
_split_module, _clock_cycles = split_module, clock_cycles


class Task:
    """A function without arguments, for a worker: in the gradient mode of who asks for it."""

    def __init__(self, compute):
        self.compute, self.grad_mode = compute, torch.is_grad_enabled()

    def run(self):
        """(True, its result), or (False, the exception that it ended with)."""
        try:
            with torch.set_grad_enabled(self.grad_mode):
                return True, self.compute()
        except BaseException as error:  # for the caller, who waits for it
            return False, error


def work(in_queue, out_queue):
    """What a worker thread does: one task after the other, until the process ends."""
    while True:
        task = in_queue.get()
        out_queue.put(task.run())
        del task  # and what it works on, while there is nothing to do


def create_workers(devices):
    """(in_queues, out_queues), of tasks and of results: a queue for each place in `devices`.

    Each different device has a worker thread and two queues, which its places share.
    """
    queues = {}
    for device in devices:
        if device not in queues:
            queues[device] = queue.Queue(), queue.Queue()
            threading.Thread(target=work, args=queues[device], daemon=True).start()
    return tuple(zip(*(queues[device] for device in devices), strict=True))


def run_tick(schedule, task, in_queues, out_queues):
    """task(i, j) for all pairs of a tick at once, by worker j. Returns their results, in order.

    An exception in one is raised here, after the tick: nothing is left in the queues.
    """
    for i, j in schedule:
        in_queues[j].put(Task(partial(task, i, j)))
    results = [out_queues[j].get() for _, j in schedule]
    for done, error in results:
        if not done:
            raise error
    return [result for _, result in results]


class Pipe(nn.Module):
    """Runs an nn.Sequential as a pipeline: module as in `split_module`, batches in rows.

    split_size: rows of a microbatch. Takes a batch (B, ...) and gives the output on the last
    device. The output's backward runs once. It adds each microbatch's gradients to the parameters'
    .grad, the last microbatch first; `autograd.grad` does not give them. The threads know neither
    the caller's autocast nor its current CUDA stream. A deep copy has threads of its own.
    Raises ValueError for no modules, for a split_size below 1, and for what is not rows: a batch,
    or an output of other rows than the batch's.
    """

    def __init__(self, module, split_size=1):
        super().__init__()
        if not isinstance(split_size, int) or split_size < 1:
            raise ValueError(f"split_size {split_size}: rows of a microbatch, 1 or more")
        partitions, self.devices = _split_module(module)
        if not partitions:
            raise ValueError("no modules: a Pipe is of one or more")
        self.partitions, self.split_size = nn.ModuleList(partitions), split_size
        self.in_queues, self.out_queues = create_workers(self.devices)
        # Who runs the partitions' backwards: the workers, or else autograd's own threads.
        self.backward_by_workers = all(device.type == "cpu" for device in self.devices)

    def __getstate__(self):
        """Without the queues, which cannot be copied."""
        queues = "in_queues", "out_queues"
        return {name: value for name, value in self.__dict__.items() if name not in queues}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.in_queues, self.out_queues = create_workers(self.devices)

    def forward(self, x):
        if not torch.is_tensor(x) or not x.dim():
            raise ValueError("a batch is one tensor, (B, ...)")
        batches = list(x.split(self.split_size))
        sizes = [batch.shape[:1] for batch in batches]
        ticks = list(_clock_cycles(len(batches), len(self.partitions)))
        record = Record(len(self.partitions), self.backward_by_workers)
        for schedule in ticks:
            self.compute(batches, schedule, record)
        if [y.shape[:1] for y in batches] != sizes:
            raise ValueError(f"outputs of {sum(map(len, batches))} rows, from a batch of {len(x)}")
        y = torch.cat(batches)
        if not self.backward_by_workers:
            return y
        return BackwardByWorkers.apply(y, self, ticks, record.parts)

    def compute(self, batches, schedule, record=None):
        """One tick: batches[i] becomes what partition j makes of it, of all its (i, j) at once.

        batches: the list of microbatches. record: what the backward of all ticks needs; without
        one, autograd runs the backward of this tick by itself.
        """
        if record is None:
            record = Record(len(self.partitions), by_workers=False)

        def task(i, j):
            x = move(batches[i], self.devices[j])
            part = record.parts[i, j] = Part(self.partitions[j], x)
            if not part.y.requires_grad:
                return part.y
            y, record.turns[j] = PartNode.apply(x, record.turns[j], part, record.by_workers)
            return y

        outputs = run_tick(schedule, task, self.in_queues, self.out_queues)
        for (i, _), y in zip(schedule, outputs, strict=True):
            batches[i] = y


class Record:
    """What a forward leaves for its backward: the `Part` of each (microbatch, partition).

    turns: see `PartNode`, a partition's last one. by_workers: who runs the parts' backwards.
    """

    def __init__(self, partitions, by_workers):
        self.parts, self.by_workers = {}, by_workers
        self.turns = [torch.zeros((), requires_grad=True) for _ in range(partitions)]


class Part:
    """What a partition made of one microbatch: y of x, in a graph of its own, cut off before x."""

    def __init__(self, partition, x):
        self.x = x.detach().requires_grad_(x.requires_grad)
        self.y = partition(self.x)
        if not torch.is_tensor(self.y) or not self.y.dim():
            kind = type(self.y).__name__
            raise ValueError(f"a partition's output, a {kind}, is not one tensor (B, ...)")

    def backward(self, dy):
        """Runs the graph, once: adds to the parameters' .grad and makes x.grad.

        dy: None where nothing depends on y. RuntimeError: for the second time.
        """
        if self.y is None:
            raise RuntimeError("a Pipe's backward runs once: its graphs are gone")
        y, self.y = self.y, None
        if dy is not None and y.requires_grad:
            y.backward(dy)

    def take_dx(self):
        """The gradient of x, or None. Lets go of both."""
        x, self.x = self.x, None
        return x.grad


class PartNode(torch.autograd.Function):
    """A `Part` as one node of autograd's graph.

                per microbatch i and partition j
    forward     x_ij = y_i(j-1), on device j        y_ij = partition j of x_ij
    backward    dy_ij = dx_i(j+1)                   the part's own graph, to x_ij and its weights

    turn: a dummy, for its edge in the graph only. Partition j's node of microbatch i takes it from
    that of microbatch i - 1, so in the backward i - 1 has to wait for i. Gradients are added in
    this order.

    This cannot deadlock, since no thread of autograd waits. Autograd has one thread for each GPU,
    and runs this node in the thread of y's GPU. The part's graph is on that GPU, too, so its
    backward is run by the thread that calls it here. (If a worker called it and this node waited
    for the worker, the backward would never begin: its thread is the one that waits.)
    """

    @staticmethod
    def forward(ctx, x, turn, part, by_workers):
        ctx.part, ctx.by_workers = part, by_workers
        ctx.set_materialize_grads(False)
        return part.y.detach(), turn.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        if not ctx.by_workers:
            ctx.part.backward(dy)
        return ctx.part.take_dx(), None, None, None


class BackwardByWorkers(torch.autograd.Function):
    """On CPUs: the workers run the backward of all parts, before autograd comes to their nodes.

    This is the identity behind the last partition. Its backward waits for the workers, and may:
    each runs a backward on the CPU in its own thread, and needs no other one.
    """

    @staticmethod
    def forward(ctx, y, pipe, ticks, parts):
        ctx.pipe, ctx.ticks, ctx.parts = pipe, ticks, parts
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        parts, dy_of_last = ctx.parts, dy.split(ctx.pipe.split_size)
        last = len(ctx.pipe.partitions) - 1

        def compute(i, j):
            parts[i, j].backward(dy_of_last[i] if j == last else parts[i, j + 1].x.grad)

        for schedule in reversed(ctx.ticks):
            run_tick(schedule, compute, ctx.pipe.in_queues, ctx.pipe.out_queues)
        return dy, None, None, None


# ---------------------------------------------------------------- a model in a Sequential


class LlamaBlock(nn.Module):
    """A Llama's layer that takes and gives hidden states alone, (B, S, H)."""

    def __init__(self, layer, rotary_emb):
        super().__init__()
        self.layer, self.rotary_emb = layer, rotary_emb

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)[None]
        tables = self.rotary_emb(x, positions)
        return hidden_states(self.layer(x, position_embeddings=tables, position_ids=positions))


class GPT2Block(nn.Module):
    """GPT-2's layer that takes and gives hidden states alone, (B, S, H)."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return hidden_states(self.layer(x))


def hidden_states(y):
    """Of what a layer gives: a tuple in transformers 4, the tensor in 5."""
    return y[0] if isinstance(y, tuple) else y


class GPT2Embedding(nn.Module):
    """ids (B, S) -> (B, S, H): the words' embeddings, and those of their positions."""

    def __init__(self, base):
        super().__init__()
        self.wte, self.wpe, self.drop = base.wte, base.wpe, base.drop

    def forward(self, ids):
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.drop(self.wte(ids) + self.wpe(positions))


def as_sequential(model, stops, devices):
    """A Llama or a GPT-2, without a mask, as an nn.Sequential of its own modules, labelled.

    stops: of each device, the layer before which its share ends. A tied LM head gets a copy of the
    embedding: two threads would add to one gradient in whatever order.
    """
    base, embedding, modules = base_of(model), embedding_of(model), []
    if model.lm_head.weight is embedding.weight:
        model.lm_head.weight = nn.Parameter(embedding.weight.detach().clone())
    of_gpt2 = family_of(model) is GPT2
    for device, first, stop in zip(devices, (0, *stops), stops, strict=False):
        layers = [layer.to(device) for layer in layers_of(model)[first:stop]]
        if of_gpt2:
            blocks = [GPT2Block(layer) for layer in layers]
        else:
            rotary_emb = copy.deepcopy(base.rotary_emb).to(device)
            blocks = [LlamaBlock(layer, rotary_emb) for layer in layers]
        modules += [WithDevice(block, device) for block in blocks]
    start = GPT2Embedding(base) if of_gpt2 else embedding
    end = nn.Sequential(norm_of(model), model.lm_head)
    ends = (
        WithDevice(start.to(devices[0]), devices[0]),
        WithDevice(end.to(devices[-1]), devices[-1]),
    )
    return nn.Sequential(ends[0], *modules, ends[1])


class ModelParallel(nn.Module):
    """A Llama or a GPT-2 whose layers are on several devices: ids (B, S) -> logits (B, S, V).

    A batch goes through them in one piece, one device at a time: plain model parallelism. After
    `_prepare_pipeline_parallel`, it goes in microbatches, all devices at a time. model: its
    parameters move, and keep their names there. stops, devices: as in `as_sequential`.
    """

    def __init__(self, model, stops, devices):
        super().__init__()
        self.model, self.pipe = model, None
        self.sequential = as_sequential(model, stops, devices)

    def _prepare_pipeline_parallel(self, split_size=1):
        """From now on a pipeline, of microbatches of so many rows. (The homework's name.)"""
        self.pipe = Pipe(self.sequential, split_size)

    def forward(self, ids):
        return self.sequential(ids) if self.pipe is None else self.pipe(ids)

    def sum_tied(self):
        """After a backward: the copies of a tied embedding get the sum of their gradients."""
        if self.model.config.tie_word_embeddings:
            sum_copies(embedding_of(self.model).weight, self.model.lm_head.weight)


MODES = MODEL_PARALLEL, PIPELINE_PARALLEL = "model_parallel", "pipeline_parallel"

# ---------------------------------------------------------------- what is shown with it


def choose_devices(run, number):
    """On CPUs, labels for so many threads; on GPUs all that one process has, up to as many."""
    if run.device.type == "cpu":
        return [torch.device("cpu", i) for i in range(number)]
    if run.world_size > 1:
        return [run.device]  # the others are other ranks'
    return [torch.device("cuda", i) for i in range(min(number, torch.cuda.device_count()))]


def one_after_the_other(whole, rows, loss):
    """Forward and backward of the same microbatches without threads, as `Pipe` orders them."""
    outputs = [whole(x) for x in rows]
    logits = torch.cat([y.detach() for y in outputs]).requires_grad_()
    value = loss(logits)
    value.backward()
    for y, grad in reversed(list(zip(outputs, logits.grad.split(len(rows[0])), strict=True))):
        y.backward(grad)
    return value.detach(), logits.detach()


def main():
    parser = harness.make_parser(__doc__, kinds=loading.LLAMA_AND_GPT2)
    add = parser.add_argument
    add("--batch-size", type=harness.positive, default=8, help="sequences in a batch; default 8")
    add(
        "--split-size",
        type=harness.positive,
        default=2,
        help="sequences in a microbatch; default 2",
    )
    add("--seq-len", type=harness.positive, default=64, help="tokens a sequence; default 64")
    add("--threads", type=harness.positive, default=2, help="devices, one thread each; default 2")
    add("--repeats", type=harness.natural, help=harness.REPEATS_HELP)
    add(
        "--model-parallel-mode",
        choices=[*MODES, "both"],
        help="in place of the checks of a step: "
        "train, a batch through one device after the other, or by a pipeline, or take turns, an "
        "epoch each; default none",
    )
    add("--epochs", type=harness.positive, default=2, help="of training; default 2")
    add("--lr", type=harness.rate, default=1e-4, help="AdamW's learning rate; default 1e-4")
    add(
        "--num-sequences",
        type=harness.positive,
        default=40,
        help="7 of 10 to train on, 2 to validate with; default 40",
    )
    add(
        "--dropout",
        action="store_true",
        help="train with GPT-2's dropout as shipped; no two "
        "runs are alike then: only that the loss falls is checked; default no",
    )
    args = parser.parse_args()
    for name in "epochs", "lr", "num_sequences", "dropout":
        if not args.model_parallel_mode and getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')}: of --model-parallel-mode, give that, too")
    harness.start(args, show)


def show(run, args):
    """All checks of a model in a `Pipe`, and its time. (More ranks do the same, each by itself.)"""
    run.mark, devices = "P", choose_devices(run, args.threads)
    if args.model_parallel_mode:
        return show_training(run, args, devices)
    ids = harness.make_batch(run, args.batch_size, args.seq_len)[0]
    stops = balance(harness.measure_costs(run, args.seq_len), len(devices))
    reference, model = (harness.Reference(run, (ids, torch.ones_like(ids), ids)), run.load_model())
    split = ModelParallel(model, stops, devices)
    split._prepare_pipeline_parallel(args.split_size)
    whole, rows = split.sequential, ids.split(args.split_size)

    def loss(logits):
        labels = ids.to(logits.device)
        return mean_loss(token_losses(logits, labels), labels)

    def by_threads():
        logits = split(ids)
        value = loss(logits)
        value.backward()
        return value.detach(), logits.detach()

    def step(by):
        value, logits = by()
        split.sum_tied()
        return value if run.rank == 0 else 0.0, logits.to(run.device)

    reference.check_step(run, "threads", model, partial(step, by_threads), embedding_of(model))
    by_one, results = partial(one_after_the_other, whole, rows, loss), []
    with sdpa_kernel(SDPBackend.MATH):  # adds in one order; on GPUs the others' backwards do not
        for by in by_threads, by_one:
            model.zero_grad()
            results.append([*step(by), *(parameter.grad for parameter in model.parameters())])
    pairs = [(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*results, strict=True)]
    run.check("threads: the bits of one microbatch after another", pairs, tolerance=0.0)

    def turn(by):
        by()
        synchronize(devices)
        yield "step"

    if args.repeats != 0:
        turns = {"one": partial(turn, by_one), "threads": partial(turn, by_threads)}
        alone, together = (
            of["step"] for of in harness.interleave(run, turns, args.repeats).values()
        )
        run.print0(
            f"time of a step: {statistics.median(alone):.4f} s one after the other, "
            f"{statistics.median(together):.4f} s by threads, "
            f"{harness.ratio(alone, together)} times as fast"
        )
        run.results |= {"one_after_the_other_s": alone, "threads_s": together}
        harness.say_if_short(run, alone)


# ---------------------------------------------------------------- training by epochs


class Trainer:
    """A model on several devices, in one of the MODES, for data_parallel's `train_epoch`."""

    def __init__(self, run, args, mode, stops, devices):
        self.model, self.devices, self.records = run.load_model(), devices, []
        self.split = ModelParallel(self.model, stops, devices)
        if mode == PIPELINE_PARALLEL:
            self.split._prepare_pipeline_parallel(args.split_size)
        self.model.train(args.dropout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.optimizer.register_step_post_hook(lambda *_: synchronize(devices))

    def step(self, batch):
        """Fills in the gradients. Returns the mean loss over the batch's labels, and the logits.

        No mask: padding is on the right, where no token sees it, and has no label.
        """
        ids, _, labels = batch
        logits = self.split(ids)
        labels = labels.to(logits.device)
        loss = mean_loss(token_losses(logits, labels), labels)
        loss.backward()
        self.split.sum_tied()
        return loss.detach().cpu(), logits.detach()

    @torch.no_grad()
    def logits(self, ids, mask):
        training = self.model.training
        self.model.eval()
        logits = self.split(ids).to(ids.device)
        self.model.train(training)
        return logits

    def validate(self, batches):
        from data_parallel import validate

        return validate(self, batches, dist.group.WORLD)


def synchronize(devices):
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def show_training(run, args, devices):
    """Train in a mode, or in both by turns, and hold it against the unmodified model's training."""
    batches = make_epochs(run, args)
    stops = balance(harness.measure_costs(run, args.seq_len), len(devices))
    names = MODES if args.model_parallel_mode == "both" else [args.model_parallel_mode]
    expected, trained = None, []
    if args.dropout and not any(run.source.dropout.values()):
        raise UserError(f"--dropout: {args.model} has none")
    if args.dropout:
        loading.restore_dropout(run.source)
        run.print0("note: dropout as shipped: nothing is compared, but that the loss falls")
    elif harness.number_of_parameters(run.source) > harness.LARGE:
        run.print0(
            f"note: training is compared of models up to {harness.LARGE / 1e6:.0f} M parameters"
        )
    else:
        expected, own_error, trained = expect_epochs(run, batches, args.epochs, args.lr)
    trainers = {mode: Trainer(run, args, mode, stops, devices) for mode in names}
    before = {
        mode: [p.detach().clone() for p in trainer.model.parameters()]
        for mode, trainer in trainers.items()
        if trained
    }
    # Of the same samples: a step's loss, or the validation's, is of others.
    first = {mode: trainer.validate(batches[0]) for mode, trainer in trainers.items()}
    for epoch in range(args.epochs):
        for mode in names if epoch % 2 == 0 else reversed(names):  # for what ran before may matter
            run.print0(f"mode {mode}:")
            train_one(run, trainers[mode], batches, epoch)
    for mode, trainer in trainers.items():
        if expected:
            losses = harness.losses_of_epochs(trainer.records)
            harness.check_losses(run, mode, losses, expected, own_error)
            for parameter, old in zip(trainer.model.parameters(), before[mode], strict=True):
                parameter.grad = parameter.detach() - old
            harness.compare_gradients(
                run, f"{mode}: changes by the training", trainer.model, trained
            )
        fallen = torch.tensor(float(trainer.validate(batches[0]) < first[mode]))
        run.check(f"{mode}: last loss, below the first", [(fallen, torch.ones(()))], tolerance=0.0)
        if run.source.config.tie_word_embeddings:
            ends = embedding_of(trainer.model).weight, trainer.model.lm_head.weight.to(run.device)
            run.check(f"{mode}: copies of the tied embedding, trained", [ends], tolerance=0.0)
    summarize(run, trainers)


def make_epochs(run, args):
    """Batches to train on, and to validate with: `Batches` of text, as in data_parallel.py."""
    if run.world_size > 1:
        raise UserError("--model-parallel-mode trains in one process: without torchrun")
    data, collate = (
        loading.read_samples(run, args.num_sequences, args.seq_len),
        partial(loading.pad, size=args.seq_len),
    )
    from data_parallel import DataPartitioner

    parts = [DataPartitioner(data).use(i) for i in range(2)]
    if not all(map(len, parts)):
        raise UserError(
            f"--num-sequences {args.num_sequences}: {len(parts[0])} to train on and "
            f"{len(parts[1])} to validate with; each needs one"
        )
    return [
        loading.Batches(run, DataLoader(part, args.batch_size, collate_fn=collate), collate)
        for part in parts
    ]


def expect_epochs(run, batches, epochs, lr):
    """The unmodified model, trained alike: its losses, their error at least, and the model.

    The losses are of each step and of each epoch's validation, of each reference: see
    `checks.Comparison.references`. The model's gradients are what the training has changed.
    """
    model = run.load_reference()
    models = [model, *([harness.wider_copy(model)] if run.dtype in harness.WIDER else [])]
    steps, validation = (list(each) for each in batches)

    def train(model):
        return harness.losses_of_training(model, steps, validation, epochs, lr)

    curves = [
        harness.keep_changes(list(one.parameters()), partial(train, one))[1] for one in models
    ]
    for parameter, *exact in zip(*(one.parameters() for one in models), strict=True):
        parameter.exact_grad = exact[0].grad.float() if exact else None
    ids, _, labels = steps[0]
    with torch.no_grad():
        own_error = harness.error_of_mean(
            *(token_losses(one(ids).logits, labels) for one in models)
        )
    return curves, own_error, [model]


def train_one(run, trainer, batches, epoch):
    """An epoch of a mode, its validation, and their lines."""
    from data_parallel import train_epoch

    steps = train_epoch(trainer, trainer.optimizer, batches[0])
    record = harness.record_epoch(run, steps, epoch, len(batches[0]))
    record["validation_loss"] = trainer.validate(batches[1])
    harness.print_epoch(run, record)
    trainer.records.append(record)


def summarize(run, trainers):
    """Of each mode the mean over its epochs but the first, which warms up; of two the speedup."""
    run.results["epochs"] = {mode: trainer.records for mode, trainer in trainers.items()}
    times = {}
    for mode, trainer in trainers.items():
        records = [[record] for record in trainer.records]  # of each epoch, those of all ranks
        times[mode] = harness.print_pace(run, mode, records, mode)
    if len(times) == 2:
        speedup = harness.ratio(times[MODEL_PARALLEL], times[PIPELINE_PARALLEL])
        run.print0(f"time by the pipeline, speedup: {speedup} times as fast")
    harness.say_if_short(run, next(iter(times.values())))


if __name__ == "__main__":
    main()
