"""Time and memory, measured so that the numbers mean something.

Contenders take turns in one run, the device is synchronised, and the slowest rank counts. A quoted
ratio of times is the median of the ratios within each turn.
"""

import copy
import ctypes
import gc
import os
import re
import resource
import statistics
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shared_memory.traffic import bytes_sent
from utils.errors import UserError
from utils.families import base_of, embedding_of, norm_of

REPEATS, LIMIT_S = 7, 120
REPEATS_HELP = (
    f"timed turns, after 2 to warm up; 0: measure nothing; default {REPEATS}, or fewer, "
    f"at least 1, where all take more than {LIMIT_S} s"
)


@contextmanager
def kept_memory():
    """Let this process keep the memory that it frees, so that only computing is timed.

    Else glibc hands large blocks back to the system at once. To touch them anew, as every step's
    gradients do, takes as long as a good part of the step; how long depends on what the machine
    does with free memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: no end of the heap is handed back
    try:
        yield
    finally:
        if mallopt:
            mallopt(-4, 65536)
            mallopt(-1, 128 * 1024)
            ctypes.CDLL(None).malloc_trim(0)


def interleave(run, contenders, repeats=None, warmup=2, keep=True):
    """Time contenders in turns, after a warm-up: {contender: {phase: [seconds, ...]}}.

    The slowest rank's seconds count. repeats: how many turns are timed. None: REPEATS; fewer, but
    at least 1, when the turns take more than LIMIT_S seconds in all.

    contenders: {name: function}; a function yields a phase's name when the phase is done. All ranks
    run all contenders; in one that works on rank 0 alone, the other ranks yield at once. Each turn
    begins with another contender, because what ran before may matter.

    keep: whether to use `kept_memory`: not if the contenders' memory does not fit side by side.
    """
    seconds, names = {name: {} for name in contenders}, list(contenders)
    limit, spent = float("inf") if repeats else LIMIT_S, 0.0
    with kept_memory() if keep else nullcontext():
        for turn in range(warmup + (repeats or REPEATS)):
            if turn > warmup and spent > limit:
                break
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                dist.barrier()
                run.synchronize()
                begin = time.perf_counter()
                for phase in contenders[name]():
                    run.synchronize()
                    lap = torch.tensor(time.perf_counter() - begin, device=run.device)
                    dist.all_reduce(lap, op=dist.ReduceOp.MAX)
                    spent += lap.item()  # the same on all ranks, which so stop together
                    if turn >= warmup:
                        seconds[name].setdefault(phase, []).append(lap.item())
                    begin = time.perf_counter()
    return seconds


def threads_alone(run):
    """Return the threads for one process alone: those of all ranks, up to the number of cores."""
    own_threads = torch.get_num_threads()
    return min(own_threads * run.world_size, max(own_threads, os.cpu_count()))


@contextmanager
def num_threads(count):
    """Give kernels on the CPU `count` threads, as a context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def training_step(model, ids, threads, reduce=None):
    """Run, as a contender, the forward and the backward of the loss; then `reduce`, if given.

    model: None on ranks that only wait, because rank 0 runs alone. ids: (B, S). reduce(parameters):
    sums gradients.
    """
    with num_threads(threads):
        loss = model(ids, labels=ids).loss if model else None
        yield "forward"
        if model:
            loss.backward()
        yield "backward"
        if reduce:
            reduce(model.parameters())
            yield "sum of gradients"
    if model:
        model.zero_grad()


def ratio(ours, theirs):
    """Return median, least and largest of the ratios of times taken in turns, in words."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


@contextmanager
def limited_memory(device, budget):
    """Limit this process, as a context, to `budget` bytes beyond what it has; None: no limit.

    What does not fit fails as it does when a device is full. On CUDA the limit applies to the
    caching allocator's reserved segments, fragmentation included; free blocks in the segments of
    existing tensors belong to the budget. On a CPU with Linux it applies to the process's private
    memory: every large tensor is a mapping of its own then, which goes back at once when freed.
    (Set THP_MEM_ALLOC_ENABLE=0, else each is rounded up to 2 MiB.) Elsewhere it raises UserError.
    """
    if budget is None:
        yield
    elif device.type != "cuda" and sys.platform != "linux":
        raise UserError("--memory-budget: needs CUDA or Linux")
    elif device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        held = torch.cuda.memory_allocated()
        torch.cuda.set_per_process_memory_fraction(min(1.0, (held + budget) / total))
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    else:
        libc = ctypes.CDLL(None)
        before = resource.getrlimit(resource.RLIMIT_DATA)
        try:
            libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD
            libc.malloc_trim(0)
            resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + int(budget), before[1]))
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
            libc.mallopt(-3, 128 * 1024)


# Messages when memory is short: of PyTorch on CUDA and on the CPU, and for sizes beyond 64 bits; of
# C++, oneDNN (with little memory left), cuBLAS and NCCL; of the system, when it cannot map a file.
SHORT_OF_MEMORY = re.compile(
    r"\bout of memory\b|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|\bCannot allocate memory\b"
    r"|Storage size calculation overflowed|std::bad_alloc"
    r"|could not create a (memory object|primitive)(?! descriptor)"
    r"|CUBLAS_STATUS_ALLOC_FAILED|Failed to CUDA calloc",
    re.IGNORECASE,
)


def is_for_memory(error):
    """Return whether an exception, or a job's last line, says that memory was short."""
    by_type = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return by_type or SHORT_OF_MEMORY.search(str(error)) is not None


def peak_memory(run, function):
    """Return the `peak_memory_of_process` of every rank, on all ranks."""
    peaks = [None] * run.world_size
    dist.all_gather_object(peaks, peak_memory_of_process(run.device, function))
    return peaks


def peak_memory_of_process(device, function):
    """Return the largest memory of this process while it runs function(), in bytes.

    On CUDA it is what tensors held, on a CPU the resident memory of the process, interpreter
    included. Peaks before the call do not count, except on macOS.
    """
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # give back what is free before counting
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # 5: start the high-water mark anew
    function()
    if on_gpu:
        return torch.cuda.max_memory_allocated()
    if sys.platform == "linux":
        return status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def status(name):
    """Return a number of bytes that Linux keeps about this process, by its name."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def measure_time(run, reference, parallel, ids, repeats=None, reduce=None):
    """Print seconds of the forward and the backward of the reference and the parallel model.

    The reference is on rank 0, alone, with as many threads as all ranks: see `threads_alone`.
    """
    single, ranks, own_threads = "one rank", f"{run.world_size} rank(s)", torch.get_num_threads()
    if reference:
        run.compile(reference)
    all_threads = threads_alone(run)
    contenders = {
        single: partial(training_step, reference, ids, all_threads),
        ranks: partial(training_step, parallel, ids, own_threads, reduce),
    }
    seconds = interleave(run, contenders, repeats)
    for phases in seconds.values():
        both = zip(phases["forward"], phases["backward"], strict=True)
        phases["forward + backward"] = [sum(pair) for pair in both]
    if reduce:
        lap = seconds[ranks]["sum of gradients"]
        run.print0(f"time sum of gradients: {statistics.median(lap):.4f} s on {ranks}")
        run.results["sum_of_gradients_s"] = lap
    for phase in ("forward", "backward", "forward + backward"):
        alone, together = (seconds[name][phase] for name in (single, ranks))
        run.print0(
            f"time {phase}: {statistics.median(alone):.4f} s on one rank, "
            f"{statistics.median(together):.4f} s on {ranks}, "
            f"median ratio {ratio(together, alone)}"
        )
        key = phase.replace(" + ", "_")
        run.results |= {f"single_{key}_s": alone, f"parallel_{key}_s": together}
    run.print0(
        f"({len(alone)} steps of {list(ids.shape)} tokens each, in turns, slowest rank; "
        f"{own_threads} thread(s) a rank, {all_threads} for one rank alone"
        f"{'; layers compiled, of both' if run.compiles else ''})"
    )
    say_if_short(run, alone)


def measure_costs(run, seq_len, repeats=5):
    """Return the seconds of each layer's forward and backward, as measured on rank 0.

    The first layer's include the embedding, the last one's the LM head, because a pipeline's stages
    do. All ranks return the same list.
    """
    costs, config = [], copy.deepcopy(run.source.config)
    if run.rank == 0:
        config.num_hidden_layers = 1
        model = run.place(run.source.family.model_class(config))
        ids = torch.zeros(1, seq_len, dtype=torch.long, device=run.device)
        x = torch.randn(1, seq_len, config.hidden_size).to(run.device, run.dtype).requires_grad_()
        base, norm = base_of(model), norm_of(model)
        setattr(base, run.source.family.norm, nn.Identity())
        for part in (
            lambda: base(inputs_embeds=x, use_cache=False).last_hidden_state,
            lambda: embedding_of(model)(ids),
            lambda: model.lm_head(norm(x)).logsumexp(-1),
        ):
            times = []
            for _ in range(repeats):
                run.synchronize()
                begin = time.perf_counter()
                part().sum().backward()
                run.synchronize()
                times.append(time.perf_counter() - begin)
            costs.append(min(times))
    layer, embedding, head = run.broadcast(costs)
    run.print0(
        f"time of a layer {layer * 1e3:.2f} ms; the embedding takes {embedding / layer:.2f} "
        f"of it, the LM head {head / layer:.2f}"
    )
    costs = [layer] * run.source.config.num_hidden_layers
    costs[0], costs[-1] = costs[0] + embedding, costs[-1] + head
    return costs


def say_if_short(run, seconds):
    """Print a note if times are too short, or too uneven, to say anything about speed.

    seconds: of one process, a measurement each.
    """
    if statistics.median(seconds) < 0.5:
        run.print0("note: times this short say nothing about speed: they are mostly latency")
    elif max(seconds) > 3 * min(seconds):
        run.print0("note: times this uneven say nothing about speed: the machine does other work")


def measure_memory(run, parallelize, ids, reduce=None):
    """Print the peak memory of loading the model and of a step: one rank alone, and each rank."""

    def load_and_step(parallelize=None):
        model = run.load_model(parallelize)
        if not parallelize:
            run.compile(model)
        model(ids, labels=ids).loss.backward()
        if parallelize and reduce:
            reduce(model.parameters())

    idle = peak_memory(run, lambda: None)
    single = peak_memory(run, load_and_step if run.rank == 0 else lambda: None)[0]
    peaks = peak_memory(run, lambda: load_and_step(parallelize))
    each = ", ".join(f"{peak / 2**20:.0f}" for peak in peaks)
    run.print0(
        f"peak memory, MiB: one rank alone {single / 2**20:.0f}; of {run.world_size} ranks {each} "
        f"({max(peaks) / single:.0%}); idle {idle[0] / 2**20:.0f}"
    )
    run.results |= {"idle_memory_bytes": idle, "single_peak_memory_bytes": single,
                    "parallel_peak_memory_bytes": peaks}  # fmt: skip


def measure_bytes(run, forward, layers, formula, exact=True):
    """Check that a layer sends, in a forward and its backward, as many bytes as a formula says.

    forward(): runs the forward of all layers, and returns what the backward starts from. formula:
    bytes that a rank sends, on average: one number for either direction, or (forward, backward).
    exact: whether the formula holds for this backend; else the numbers are printed, not checked.
    """
    result, pair = [], isinstance(formula, tuple)
    of_forward = bytes_sent(run, lambda: result.append(forward()))
    both = [of_forward, bytes_sent(run, lambda: result[0].sum().backward())]
    sent, wires = ([n and n / layers for n in numbers] for numbers in zip(*both, strict=True))
    said, wanted = (
        " and ".join(f"{n:,.0f}" for n in numbers)
        for numbers in (sent, formula if pair else [formula])
    )
    run.print0(
        f"bytes sent per rank and layer, forward and backward: {said}; formula {wanted}"
        f"{'' if pair else ' each'}"
    )
    run.results |= {"sent_bytes": sent, "formula_bytes": formula, "wire_bytes": wires}
    if exact:  # whole numbers: those of all ranks and layers together
        both = torch.tensor([sent, formula if pair else [formula] * 2], dtype=torch.float64)
        totals = (both * layers * run.world_size).round()
        run.check("bytes sent, as the formula has them", [tuple(totals)], tolerance=0.0)
