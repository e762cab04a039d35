"""From a neighbouring course: the pipeline in one process, with a worker thread for each device.

A model is an `nn.Sequential` whose modules are on several devices. Consecutive modules on one
device form a partition. Each device has a thread that runs its partitions, with a queue of tasks
and one of results. `Pipe` splits a batch by rows into microbatches. In each tick all partitions
work at once, each on the microbatch that has come to it:

    tick            0       1       2       3       4
    partition 0     m0      m1      m2      m3
    partition 1             m0      m1      m2      m3

PyTorch's kernels run without the interpreter's lock, so threads work at the same time. In the
backward, autograd itself has a thread for each GPU, which runs the partitions on this GPU. For CPUs
it has no threads: it would run all partitions in the thread that calls it. So on CPUs the backward
goes through the same queues, tick by tick in reverse.

    OMP_NUM_THREADS=1 python tasks/pipeline_threads.py

splits a Llama over two threads, checks logits, loss and all gradients against the unmodified model,
and to the bit against the same microbatches one after the other, and measures the time with and
without threads. (After GPipe, arXiv 1811.06965, section 2, and torchgpipe, arXiv 2004.09910.)

    OMP_NUM_THREADS=1 python tasks/pipeline_threads.py --model random/gpt2-small-test \\
        --model-parallel-mode both --epochs 4

trains a GPT-2 by epochs, without and with a pipeline, and compares the losses and the trained
weights of both trainings with the unmodified model's.
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
from utils.stages import balance, clock_cycles, sum_copies_once

# ---------------------------------------------------------------- the technique


class WithDevice(nn.Module):
    """A module labelled with its device, where its parameters do not tell it.

    A module may have no parameters; and on a CPU all tensors are on "cpu", also after a move to
    cpu:0 or cpu:1. Without a `Pipe`, the forward moves its input to the device, so that modules on
    several GPUs can follow one another in an nn.Sequential.
    """

    def __init__(self, module, device):
        super().__init__()
        self.module, self.device = module, torch.device(device)

    def forward(self, x):
        return self.module(move(x, self.device))


def move(x, device):
    """Move x to a device. The labels cpu:0 and cpu:1 name the same CPU: then nothing is copied."""
    return x if x.device.type == device.type == "cpu" else x.to(device)


def device_of(module):
    """Return a module's device, by its label or its parameters; the CPU if it has neither.

    Raises ValueError for parameters on several devices.
    """
    if isinstance(module, WithDevice):
        return module.device
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise ValueError(f"a module is on several devices: {sorted(map(str, devices))}")
    return devices.pop() if devices else torch.device("cpu")


def split_module(modules):
    """Return (partitions, devices): consecutive modules on one device form a partition."""
    partitions, devices = [], []
    for module in modules:
        device = device_of(module)
        if not devices or device != devices[-1]:
            partitions.append(nn.Sequential())
            devices.append(device)
        partitions[-1].append(module.module if isinstance(module, WithDevice) else module)
    return partitions, devices


# The homework's names of these two functions.
_split_module, _clock_cycles = split_module, clock_cycles


class Task:
    """A function without arguments, which a worker runs in the gradient mode of the caller."""

    def __init__(self, compute):
        self.compute, self.grad_mode = compute, torch.is_grad_enabled()

    def run(self):
        """Return (True, the function's result), or (False, the exception that it raised)."""
        try:
            with torch.set_grad_enabled(self.grad_mode):
                return True, self.compute()
        except BaseException as error:  # for the caller, who waits for it
            return False, error


def work(in_queue, out_queue):
    """Run one task after the other, in a worker thread, until None comes or the process ends."""
    while (task := in_queue.get()) is not None:
        out_queue.put(task.run())
        del task  # its tensors need not stay in memory while there is nothing to do
    out_queue.put(None)


def create_workers(devices):
    """Return (in_queues, out_queues), of tasks and of results, with a queue for each of `devices`.

    Each different device has one worker thread and two queues, however often it is in `devices`.
    """
    queues = {}
    for device in devices:
        if device not in queues:
            queues[device] = queue.Queue(), queue.Queue()
            threading.Thread(target=work, args=queues[device], daemon=True).start()
    return tuple(zip(*(queues[device] for device in devices), strict=True))


def outcomes(schedule, task, in_queues, out_queues):
    """Run task(i, j) for all pairs of a tick at once, by worker j; return what `Task.run` does."""
    for i, j in schedule:
        in_queues[j].put(Task(partial(task, i, j)))
    return [out_queues[j].get() for _, j in schedule]


class Pipe(nn.Module):
    """Runs an nn.Sequential as a pipeline: split by `split_module`, with batches split by rows.

    split_size: rows of a microbatch. The forward takes a batch (B, ...), and returns the output on
    the last device. The output's backward can run only once. It adds each microbatch's gradients to
    the parameters' .grad, the last microbatch first; `autograd.grad` does not return them. The
    threads know neither the caller's autocast nor its current CUDA stream. Call it from one thread
    at a time; a deep copy has threads of its own. Raises ValueError for no modules, for a
    split_size below 1, for a batch or an output that is not one tensor (B, ...), and for outputs
    whose number of rows is not the batch's.
    """

    def __init__(self, module, split_size=1):
        super().__init__()
        if not isinstance(split_size, int) or split_size < 1:
            raise ValueError(f"split_size {split_size}: rows of a microbatch, 1 or more")
        partitions, self.devices = _split_module(module)
        if not partitions:
            raise ValueError("no modules: a Pipe needs one or more")
        self.partitions, self.split_size = nn.ModuleList(partitions), split_size
        self.in_queues, self.out_queues = create_workers(self.devices)
        # Who runs the partitions' backwards: the workers, or else autograd's own threads.
        self.backward_by_workers = all(device.type == "cpu" for device in self.devices)

    def __getstate__(self):
        """Leave out the queues, which cannot be copied."""
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

    def run_tick(self, schedule, task):
        """Run task(i, j) for all pairs of a tick at once, by worker j; return results, in order.

        An exception in a task is raised here, after the tick, when nothing is left in the queues.
        """
        try:
            results = outcomes(schedule, task, self.in_queues, self.out_queues)
        except BaseException:
            # Ctrl-C: what is still on its way is not the next tick's, nor for later gradients.
            workers = {*zip(self.in_queues, self.out_queues, strict=True)}
            self.in_queues, self.out_queues = create_workers(self.devices)
            for in_queue, out_queue in workers:
                in_queue.put(None)
                while out_queue.get() is not None:
                    pass
            raise
        for done, error in results:
            if not done:
                raise error
        return [result for _, result in results]

    def compute(self, batches, schedule, record=None):
        """Run a tick: for all its pairs (i, j) at once, partition j's output replaces batches[i].

        batches: the list of microbatches. record: the `Record` for the backward of all ticks;
        without a record, autograd runs the backward of this tick by itself.
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

        outputs = self.run_tick(schedule, task)
        for (i, _), y in zip(schedule, outputs, strict=True):
            batches[i] = y


class Record:
    """What a forward leaves for its backward: the `Part` of each (microbatch, partition).

    turns: for each partition, the `turn` of its latest `PartNode`. by_workers: whether the workers
    run the parts' backwards.
    """

    def __init__(self, partitions, by_workers):
        self.parts, self.by_workers = {}, by_workers
        self.turns = [torch.zeros((), requires_grad=True) for _ in range(partitions)]


class Part:
    """One microbatch in a partition: y = partition(x), in a graph of its own, which begins at x."""

    def __init__(self, partition, x):
        self.x = x.detach().requires_grad_(x.requires_grad)
        # Autograd lets no operation change in place what a graph begins at.
        in_place = any(getattr(module, "inplace", False) for module in partition.modules())
        self.y = partition(self.x.clone() if in_place else self.x)
        if not torch.is_tensor(self.y) or not self.y.dim():
            returned = type(self.y).__name__
            raise ValueError(f"a partition's output, a {returned}, is not one tensor (B, ...)")

    def backward(self, dy):
        """Run the graph's backward, once: add to the parameters' .grad, and make x.grad.

        dy: the gradient of y, or None where nothing depends on y. Raises RuntimeError if it is
        called again.
        """
        if self.y is None:
            raise RuntimeError("a Pipe's backward runs once: its graphs are gone")
        y, self.y = self.y, None
        if dy is not None and y.requires_grad:
            y.backward(dy)

    def take_dx(self):
        """Return the gradient of x, or None, and forget x."""
        x, self.x = self.x, None
        return x.grad


class PartNode(torch.autograd.Function):
    """A `Part` as one node of autograd's graph.

                per microbatch i and partition j
    forward     x_ij = y_i(j-1), on device j        y_ij = partition j of x_ij
    backward    dy_ij = dx_i(j+1)                   the part's own graph, to x_ij and its weights

    turn: a dummy tensor, which is there only for its edge in the graph. In partition j, the node of
    microbatch i takes it from the node of microbatch i - 1. So in the backward microbatch i - 1 has
    to wait for microbatch i, and gradients are added in this order.

    This cannot deadlock, since no thread of autograd waits. Autograd has one thread for each GPU,
    and runs this node in the thread of y's GPU. The part's graph is on that GPU, too, so its
    backward is run by the thread that calls it here. (If a worker called that backward and this
    node waited for the worker, the backward would never begin: its thread would be waiting here.)
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
    """Lets the workers run all parts' backwards, on CPUs, before autograd reaches the parts' nodes.

    This is the identity after the last partition. Its backward waits for the workers, which cannot
    deadlock: a worker runs a part's backward on the CPU in its own thread, and needs no other
    thread.
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
            ctx.pipe.run_tick(schedule, compute)
        return dy, None, None, None


# ---------------------------------------------------------------- a model in a Sequential


class LlamaBlock(nn.Module):
    """A Llama's layer that takes and returns hidden states alone, (B, S, H)."""

    def __init__(self, layer, rotary_emb):
        super().__init__()
        self.layer, self.rotary_emb = layer, rotary_emb

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)[None]
        tables = self.rotary_emb(x, positions)
        return hidden_states(self.layer(x, position_embeddings=tables, position_ids=positions))


class GPT2Block(nn.Module):
    """A GPT-2's layer that takes and returns hidden states alone, (B, S, H)."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return hidden_states(self.layer(x))


def hidden_states(y):
    """Return the hidden states from a layer's output: in transformers 4 it may be a tuple."""
    return y[0] if isinstance(y, tuple) else y


class GPT2Embedding(nn.Module):
    """ids (B, S) -> (B, S, H): the embeddings of tokens and of their positions, added up."""

    def __init__(self, base):
        super().__init__()
        self.wte, self.wpe, self.drop = base.wte, base.wpe, base.drop

    def forward(self, ids):
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.drop(self.wte(ids) + self.wpe(positions))


def as_sequential(model, stops, devices):
    """Return a Llama or a GPT-2, without a mask, as an nn.Sequential of its labelled modules.

    stops: for each device, the layer before which its share ends. A tied LM head gets a copy of the
    embedding: else two threads would add to one gradient, in an order that may vary. Raises
    ValueError for stops that do not divide all layers among the devices, and for attention that
    would need a mask: eager, flex, or with a sliding window.
    """
    from guards.refusals import check_stops, refuse_masks

    check_stops(stops, len(layers_of(model)), len(devices))
    refuse_masks(model.config)
    base, embedding, modules = base_of(model), embedding_of(model), []
    weight = embedding.weight
    if model.lm_head.weight is weight:
        model.lm_head.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
        model.has_tied_copies = True
    of_gpt2 = family_of(model) is GPT2
    for device, first, stop in zip(devices, (0, *stops[:-1]), stops, strict=True):
        layers = [layer.to(device) for layer in layers_of(model)[first:stop]]
        if of_gpt2:
            blocks = [GPT2Block(layer) for layer in layers]
        else:
            rotary_emb = copy.deepcopy(base.rotary_emb).to(device)
            blocks = [LlamaBlock(layer, rotary_emb) for layer in layers]
        modules += [WithDevice(block, device) for block in blocks]
    start = GPT2Embedding(base) if of_gpt2 else embedding
    end = nn.Sequential(norm_of(model), model.lm_head)
    start = WithDevice(start.to(devices[0]), devices[0])
    end = WithDevice(end.to(devices[-1]), devices[-1])
    return nn.Sequential(start, *modules, end)


class ModelParallel(nn.Module):
    """A Llama or a GPT-2 whose layers are on several devices: ids (B, S) -> logits (B, S, V).

    A batch goes through the devices in one piece, one device at a time: plain model parallelism.
    After `_prepare_pipeline_parallel`, it goes in microbatches, all devices at a time. model: its
    parameters move to the devices, and keep their names in it. stops, devices: as in
    `as_sequential`.
    """

    def __init__(self, model, stops, devices):
        super().__init__()
        self.model, self.pipe = model, None
        self.sequential = as_sequential(model, stops, devices)
        self.tied = getattr(model, "has_tied_copies", False)

    def _prepare_pipeline_parallel(self, split_size=1):
        """Become a pipeline of microbatches of `split_size` rows. (The homework's name.)"""
        self.pipe = Pipe(self.sequential, split_size)

    def forward(self, ids):
        return self.sequential(ids) if self.pipe is None else self.pipe(ids)

    def sum_tied(self):
        """Give both copies of a tied embedding the sum of their gradients, after the last backward.

        Raises ValueError for gradients that are this sum already. So does a backward that adds to
        the sum, unless the gradients are None or 0 by then.
        """
        if self.tied:
            sum_copies_once(embedding_of(self.model).weight, self.model.lm_head.weight)


MODES = MODEL_PARALLEL, PIPELINE_PARALLEL = "model_parallel", "pipeline_parallel"

# ---------------------------------------------------------------- what is shown with it


def choose_devices(run, number):
    """Return labels for `number` threads on CPUs, or else this process's GPUs, up to `number`."""
    if run.device.type == "cpu":
        return [torch.device("cpu", i) for i in range(number)]
    if run.world_size > 1:
        return [run.device]  # other GPUs are other ranks'
    return [torch.device("cuda", i) for i in range(min(number, torch.cuda.device_count()))]


def one_after_the_other(sequential, rows, loss):
    """Run forward and backward of the microbatches without threads, in the order of `Pipe`."""
    outputs = [sequential(x) for x in rows]
    logits = torch.cat([y.detach() for y in outputs]).requires_grad_()
    value = loss(logits)
    value.backward()
    for y, grad in reversed(list(zip(outputs, logits.grad.split(len(rows[0])), strict=True))):
        y.backward(grad)
    return value.detach(), logits.detach()


def main():
    parser = harness.make_parser(__doc__, model_types=loading.LLAMA_AND_GPT2)
    add = parser.add_argument
    add("--batch-size", type=harness.positive, default=8, help="sequences in a batch; default 8")
    add("--split-size", type=harness.positive, default=2, help="of a microbatch; default 2")
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
            parser.error(f"--{name.replace('_', '-')} needs --model-parallel-mode")
    harness.start(args, show)


def show(run, args):
    """Run all checks of a model in a `Pipe`, and time it. (More ranks do the same, each alone.)"""
    run.mark, devices = "P", choose_devices(run, args.threads)
    if args.model_parallel_mode:
        return show_training(run, args, devices)
    ids = harness.make_batch(run, args.batch_size, args.seq_len)[0]
    stops = balance(harness.measure_costs(run, args.seq_len), len(devices))
    reference, model = (harness.Reference(run, (ids, torch.ones_like(ids), ids)), run.load_model())
    split = ModelParallel(model, stops, devices)
    split._prepare_pipeline_parallel(args.split_size)
    sequential, rows = split.sequential, ids.split(args.split_size)

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
    by_one, results = partial(one_after_the_other, sequential, rows, loss), []
    with sdpa_kernel(SDPBackend.MATH):  # on GPUs other kernels' backwards add in any order
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
        model.zero_grad()  # nothing may be added to the sum of both copies' gradients
        turns = {"one": partial(turn, by_one), "threads": partial(turn, by_threads)}
        times = harness.interleave(run, turns, args.repeats)
        alone, together = (of_turn["step"] for of_turn in times.values())
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
        """Compute the gradients; return the mean loss over the batch's labels, and the logits.

        It needs no mask: padding is on the right, where no other token sees it, and has no label.
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
    """Train in one mode, or in both by turns, and compare with training the unmodified model."""
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
        expected, least_error, trained = harness.expect_epochs(run, batches, args.epochs, args.lr)
    trainers = {mode: Trainer(run, args, mode, stops, devices) for mode in names}
    before = {
        mode: [p.detach().clone() for p in trainer.model.parameters()]
        for mode, trainer in trainers.items()
        if trained
    }
    # The loss on the training samples, before training: at the end it must have fallen.
    first = {mode: trainer.validate(batches[0]) for mode, trainer in trainers.items()}
    for epoch in range(args.epochs):
        for mode in names if epoch % 2 == 0 else reversed(names):  # what ran before may matter
            run.print0(f"mode {mode}:")
            train_one(run, trainers[mode], batches, epoch)
    for mode, trainer in trainers.items():
        if expected:
            losses = harness.losses_of_epochs(trainer.records)
            harness.check_losses(run, mode, losses, expected, least_error)
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
    """Return `Batches` of text to train on, and to validate with, as in data_parallel.py."""
    if run.world_size > 1:
        raise UserError("--model-parallel-mode trains in one process: without torchrun")
    data = loading.read_samples(run, args.num_sequences, args.seq_len)
    collate = partial(loading.pad, size=args.seq_len)
    from data_parallel import DataPartitioner

    parts = [DataPartitioner(data).use(i) for i in range(2)]
    if not all(map(len, parts)):
        raise UserError(
            f"--num-sequences {args.num_sequences}: {len(parts[0])} to train on and "
            f"{len(parts[1])} to validate with; each needs one"
        )
    loader = partial(DataLoader, batch_size=args.batch_size, collate_fn=collate)
    return [loading.Batches(run, loader(part), collate) for part in parts]


def train_one(run, trainer, batches, epoch):
    """Train a mode for one epoch, validate it, and print both results."""
    from data_parallel import train_epoch

    steps = train_epoch(trainer, trainer.optimizer, batches[0])
    record = harness.record_epoch(run, steps, epoch, len(batches[0]))
    record["validation_loss"] = trainer.validate(batches[1])
    harness.print_epoch(run, record)
    trainer.records.append(record)


def summarize(run, trainers):
    """Print each mode's means over its epochs but the first, which warms up, and the speedup."""
    run.results["epochs"] = {mode: trainer.records for mode, trainer in trainers.items()}
    times = {}
    for mode, trainer in trainers.items():
        records = [[record] for record in trainer.records]  # for each epoch, all ranks' records
        times[mode] = harness.print_pace(run, mode, records, mode)
    if len(times) == 2:
        speedup = harness.ratio(times[MODEL_PARALLEL], times[PIPELINE_PARALLEL])
        run.print0(f"time by the pipeline, speedup: {speedup} times as fast")
    harness.say_if_short(run, next(iter(times.values())))


if __name__ == "__main__":
    main()
