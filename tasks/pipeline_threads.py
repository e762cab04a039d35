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
"""

import copy
import queue
import statistics
import threading
from functools import partial

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline_llama import clock_cycles
from utils.collectives import sum_copies
from utils.flags import make_parser, natural, positive
from utils.job import start
from utils.measure import REPEATS_HELP, interleave, measure_costs, ratio, say_if_short
from utils.model_checks import make_batch, mean_loss, token_losses
from utils.shards import balance
from utils.step_checks import Reference

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


class Worker:
    """A thread that does tasks, functions without arguments, one after the other.

    It ends with the process. A task has the gradient mode of the thread that asked for it, and as
    its result None, or the exception that it ended with.
    """

    def __init__(self):
        self.tasks, self.results = queue.Queue(), queue.Queue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            task, grad_mode = self.tasks.get()
            try:
                with torch.set_grad_enabled(grad_mode):
                    task()
                self.results.put(None)
            except BaseException as error:  # for the caller, who waits for it
                self.results.put(error)
            del task  # and what it works on, while there is nothing to do

    def begin(self, task):
        self.tasks.put((task, torch.is_grad_enabled()))

    def __reduce__(self):
        return Worker, ()  # a copy, of a `Pipe` as well, has a thread of its own


def run_ticks(ticks, task, workers):
    """In each tick, task(i, j) for all of its pairs at once, by worker j.

    An exception in one is raised here, after the tick: nothing is left in the queues.
    """
    for pairs in ticks:
        for i, j in pairs:
            workers[j].begin(partial(task, i, j))
        for error in filter(None, [workers[j].results.get() for _, j in pairs]):
            raise error


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
        partitions, self.devices = split_module(module)
        if not partitions:
            raise ValueError("no modules: a Pipe is of one or more")
        self.partitions, self.split_size = nn.ModuleList(partitions), split_size
        of_device = {device: Worker() for device in self.devices}
        self.workers = [of_device[device] for device in self.devices]
        # Who runs the partitions' backwards: the workers, or else autograd's own threads.
        self.backward_by_workers = all(device.type == "cpu" for device in self.devices)

    def forward(self, x):
        if not torch.is_tensor(x) or not x.dim():
            raise ValueError("a batch is one tensor, (B, ...)")
        rows, last = x.split(self.split_size), len(self.partitions) - 1
        ticks = list(clock_cycles(len(rows), last + 1))
        turns = [torch.zeros((), requires_grad=True) for _ in self.partitions]
        parts, outputs = {}, {}

        def compute(i, j):
            x = move(outputs.pop((i, j - 1)) if j else rows[i], self.devices[j])
            part = parts[i, j] = Part(self.partitions[j], x)
            outputs[i, j] = part.y
            if part.y.requires_grad:
                by_workers = self.backward_by_workers
                outputs[i, j], turns[j] = PartNode.apply(x, turns[j], part, by_workers)

        run_ticks(ticks, compute, self.workers)
        ys = [outputs[i, last] for i in range(len(rows))]
        if [y.shape[:1] for y in ys] != [row.shape[:1] for row in rows]:
            raise ValueError(f"outputs of {sum(map(len, ys))} rows, from a batch of {len(x)}")
        y = torch.cat(ys)
        return BackwardByWorkers.apply(y, self, ticks, parts) if self.backward_by_workers else y


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

    turn: a number without a meaning. Partition j's node of microbatch i takes it from that of
    microbatch i - 1, so in the backward i - 1 has to wait for i. Gradients are added in this order.

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

        run_ticks(reversed(ctx.ticks), compute, ctx.pipe.workers)
        return dy, None, None, None


# ---------------------------------------------------------------- a Llama in a Sequential


class Block(nn.Module):
    """A decoder layer that takes and gives hidden states alone, (B, S, H)."""

    def __init__(self, layer, rotary_emb):
        super().__init__()
        self.layer, self.rotary_emb = layer, rotary_emb

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)[None]
        tables = self.rotary_emb(x, positions)
        y = self.layer(x, position_embeddings=tables, position_ids=positions)
        return y[0] if isinstance(y, tuple) else y


def as_sequential(model, stops, devices):
    """A LlamaForCausalLM, without a mask, as an nn.Sequential of its own modules, labelled.

    stops: of each device, the layer before which its share ends. A tied LM head gets a copy of the
    embedding: two threads would add to one gradient in whatever order.
    """
    base, modules = model.model, []
    if model.lm_head.weight is base.embed_tokens.weight:
        model.lm_head.weight = nn.Parameter(base.embed_tokens.weight.detach().clone())
    for device, first, stop in zip(devices, (0, *stops), stops, strict=False):
        rotary_emb = copy.deepcopy(base.rotary_emb).to(device)
        blocks = [Block(layer.to(device), rotary_emb) for layer in base.layers[first:stop]]
        modules += [WithDevice(block, device) for block in blocks]
    embedding, head = base.embed_tokens.to(devices[0]), nn.Sequential(base.norm, model.lm_head)
    ends = WithDevice(embedding, devices[0]), WithDevice(head.to(devices[-1]), devices[-1])
    return nn.Sequential(ends[0], *modules, ends[1])


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
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--batch-size", type=positive, default=8, help="sequences in a batch; default 8")
    add("--split-size", type=positive, default=2, help="sequences in a microbatch; default 2")
    add("--seq-len", type=positive, default=64, help="tokens a sequence; default 64")
    add("--threads", type=positive, default=2, help="devices, one thread each; default 2")
    add("--repeats", type=natural, help=REPEATS_HELP)
    start(parser.parse_args(), show)


def show(run, args):
    """All checks of a Llama in a `Pipe`, and its time. (More ranks do the same, each by itself.)"""
    run.mark, ids = "P", make_batch(run, args.batch_size, args.seq_len)[0]
    devices = choose_devices(run, args.threads)
    stops = balance(measure_costs(run, args.seq_len), len(devices))
    reference, model = Reference(run, (ids, torch.ones_like(ids), ids)), run.load_model()
    whole = as_sequential(model, stops, devices)
    pipe, rows = Pipe(whole, args.split_size), ids.split(args.split_size)
    tied = run.source.config.tie_word_embeddings
    ends = model.model.embed_tokens.weight, model.lm_head.weight

    def loss(logits):
        labels = ids.to(logits.device)
        return mean_loss(token_losses(logits, labels), labels)

    def by_threads():
        logits = pipe(ids)
        value = loss(logits)
        value.backward()
        return value.detach(), logits.detach()

    def step(by):
        value, logits = by()
        if tied:
            sum_copies(*ends)
        return value if run.rank == 0 else 0.0, logits.to(run.device)

    reference.check_step(run, "threads", model, partial(step, by_threads), model.model.embed_tokens)
    by_one, results = partial(one_after_the_other, whole, rows, loss), []
    with sdpa_kernel(SDPBackend.MATH):  # adds in one order; on GPUs the others' backwards do not
        for by in by_threads, by_one:
            model.zero_grad()
            results.append([*step(by), *(parameter.grad for parameter in model.parameters())])
    pairs = [(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*results, strict=True)]
    run.check("threads: the bits of one microbatch after another", pairs, tolerance=0.0)

    def turn(by):
        by()
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        yield "step"

    if args.repeats != 0:
        turns = {"one": partial(turn, by_one), "threads": partial(turn, by_threads)}
        alone, together = (of["step"] for of in interleave(run, turns, args.repeats).values())
        run.print0(f"time of a step: {statistics.median(alone):.4f} s one after the other, "
                   f"{statistics.median(together):.4f} s by threads, "
                   f"{ratio(alone, together)} times as fast")  # fmt: skip
        run.results |= {"one_after_the_other_s": alone, "threads_s": together}
        say_if_short(run, alone)


if __name__ == "__main__":
    main()
