"""Hold the formulas of `make estimate` against steps that are run and measured.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 -m figures.plan.estimate_check

Of a step of AdamW by each technique: what tensors hold at most, by torch.profiler; what the process
has at most, beyond what it has when the model is gone; and the bytes that a rank sends.
"""

import ctypes
import gc
import sys
from contextlib import nullcontext
from functools import partial

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import loss_parallel

import pretrain_2d
from data_parallel import STRATEGIES, DataParallelModel
from dtensor_llama import dtensor_parallelize
from figures.bench.records import here_and_now
from figures.plan.formulas import Work
from figures.plan.techniques import estimates
from harness.epochs import bytes_held
from harness.flags import make_parser, positive
from harness.job import start
from harness.measure import measure_costs, peak_memory_of_process, status
from harness.memory_profile import record_memory
from harness.model_checks import plain_loss
from pipeline_llama import BY_HAND, Pipeline, load_stages
from ring_attention import ring_parallelize
from shared_memory.traffic import bytes_sent
from tp_llama import tensor_parallelize
from tp_ulysses import parallelize_tp_sp
from ulysses_forward import sequence_parallelize
from utils.partition import shard_range
from utils.replicas import sum_gradients

GIB, LARGE = 2**30, 2**28  # bytes from which on the peaks are compared


def main():
    parser = make_parser(__doc__, model="random/balanced")
    add = parser.add_argument
    add("--seq-len", type=positive, default=256, help="tokens a sequence, rounded "
        "up to a multiple of the ranks; default 256")  # fmt: skip
    add("--batch-size", type=positive, default=4, help="sequences; along dp, of each; default 4")
    add("--technique", nargs="+", default=list(BUILD), choices=BUILD, help="default all of them")
    start(parser.parse_args(), measure)


def measure(run, args):
    """Each technique's peaks, and bytes, beside the formulas'."""
    S = -(-args.seq_len // run.world_size) * run.world_size  # as many tokens on each rank
    ids = torch.randint(run.source.config.vocab_size, (args.batch_size, S))
    ids = run.broadcast(ids).to(run.device)
    run.results |= here_and_now(run.device.type, run.world_size) | {"tokens": ids.numel()}
    for name in args.technique:
        dtensor = name in ("dtensor", "2d", "2d, copies")
        with loss_parallel() if dtensor else nullcontext():
            compare(run, name, ids)


def compare(run, name, ids):
    """The largest of the ranks' peaks, and the mean of what they send, are the formulas'."""
    row = measure_step(run, name, ids)
    for of in "tensors", "process":
        if row[of] >= LARGE:
            pair = [torch.tensor(size / GIB) for size in (row["estimate"], row[of])]
            run.check(f"{name}: peak of {of}, GiB", [pair], 0.1 * row[of] / GIB)
    sent, formula = row["bytes"]
    pair = [torch.tensor(size) for size in (formula, float(sent))]
    run.check(f"{name}: bytes sent", [pair], 0.02 * sent)


def measure_step(run, name, ids):
    """Peaks and bytes of a step, beside the formulas'; they are printed, and in the results."""
    tensors, process, sent = peaks_of_step(run, name, ids)
    process -= give_back_what_is_free(run.device)  # code and threads are there by now, too
    P = 1 if name == "one process" else run.world_size
    work = Work(run.source.config, ids.shape[1], len(ids), run.dtype.itemsize)
    ways = estimates(name, work, P)
    two = [way for way in ways if P > 2 and way.mesh.endswith((" x tp 2", " x 2"))]
    said = (two or ways[-1:])[0]
    tensors, process = (max(run.gather_objects(peak)) for peak in (tensors, process))
    row = {"estimate": said.peak, "tensors": tensors, "process": process,
           "bytes": [sent, said.sent]}  # fmt: skip
    run.results.setdefault("techniques", {})[name] = row
    run.print0(f"{name}: peak of tensors {tensors / GIB:.3f} GiB, of the process "
               f"{process / GIB:.3f}; estimate {said.peak / GIB:.3f}, {said.peak / tensors:.3f} "
               f"and {said.peak / process:.3f} of them; bytes sent {sent:,.0f}, estimate "
               f"{said.sent:,.0f}")  # fmt: skip
    return row


def peaks_of_step(run, name, ids):
    """What tensors and this process, all of it, hold at most in a step; and the bytes sent."""
    give_back_what_is_free(run.device)
    model, optimizer, step = make_step(run, name, ids)
    step()  # there are states from now on
    weights, gradients, states = bytes_held(model, optimizer)
    sent, _ = bytes_sent(run, step)
    optimizer.zero_grad()
    process = peak_memory_of_process(run.device, step)
    optimizer.zero_grad()
    tensors = weights + states + sum(record_memory(step, run.device)[1].values())
    tensors += gradients * (name in ("ddp", "zero1"))  # which are there all the time
    return tensors, process, sent


def make_step(run, name, ids):
    """A technique's model, its AdamW, and step(), which trains it by one step."""
    model, forward_backward = BUILD[name](run, ids)
    make_optimizer = torch.optim.AdamW
    if name == "zero1":
        make_optimizer = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
    parameters = [parameter for _, parameter in model.named_parameters()]
    optimizer = make_optimizer(parameters, lr=1e-4)

    def step():
        optimizer.zero_grad()
        forward_backward()
        optimizer.step()

    return model, optimizer, step


def give_back_what_is_free(device):
    """And return the bytes that this process then has; on a GPU, its tensors."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed goes back at once
        ctypes.CDLL(None).malloc_trim(0)
    return status("VmRSS")


# ---------------------------------------------------------------- (model, its forward and backward)


def alone(run, ids):
    model = run.load_model()
    return model, lambda: plain_loss(model, ids, input_ids=ids, use_cache=False).backward()


def split(parallelize, run, ids, axis="tp"):
    mesh = run.mesh(axis)
    model = run.load_model(partial(parallelize, mesh=mesh))

    def forward_backward():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if axis == "sp":
            sum_gradients(model.parameters(), mesh)

    return model, forward_backward


def piped(schedule, run, ids):
    P, ones = run.world_size, torch.ones_like(ids)
    stages = load_stages(run, measure_costs(run, ids.shape[1]), P)
    pipe = Pipeline(run.mesh("pp"), schedule, stages, P)
    ranges = [shard_range(len(ids), Work.microbatches, i) for i in range(Work.microbatches)]
    sizes = [stop - first for first, stop in ranges]
    return stages[0], lambda: pipe.step(ids, ones, ids, sizes)


def data(strategy, run, ids):
    replica, batch = (
        DataParallelModel(run, strategy, run.mesh("dp")),
        (ids, torch.ones_like(ids), ids),
    )
    return replica.model, lambda: replica.step(batch)


def mesh_2d(replicate, run, ids):
    mesh = run.mesh_2d("dp", "tp", pair_of(run.world_size))
    split = partial(pretrain_2d.parallelize_2d, mesh=mesh, replicate=replicate)
    model = run.load_model(split).to(run.device)
    return model, lambda: pretrain_2d.forward_backward(model, (ids, ids), mesh, replicate)


def pair_of(P):
    """How many share a row: of an even number of ranks above 2 pairs, else all."""
    return 2 if P > 2 and P % 2 == 0 else P


def both_axes(run, ids, tp=pair_of, **flags):
    if flags.get("sequence") == "usp":
        flags["ulysses"] = pair_of(run.world_size)
    mesh = run.mesh_2d("sp", "tp", tp(run.world_size))
    model = run.load_model(partial(parallelize_tp_sp, mesh=mesh, **flags))

    def forward_backward():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        sum_gradients(model.parameters(), mesh["sp"])

    return model, forward_backward


BUILD = {
    "one process": alone,
    "tp": partial(split, tensor_parallelize),
    "dtensor": partial(split, dtensor_parallelize),
    "megatron-sp": partial(both_axes, tp=int, megatron_sp=True),
    "ulysses": partial(split, sequence_parallelize, axis="sp"),
    "ring": partial(split, ring_parallelize, axis="sp"),
    "usp": partial(both_axes, tp=lambda _: 1, sequence="usp"),
    "tp x ulysses": both_axes,
    "tp x ring": partial(both_axes, sequence="ring"),
    **{name: partial(piped, name) for name in BY_HAND},
    **{name: partial(data, name) for name in STRATEGIES},
    "2d": partial(mesh_2d, False),
    "2d, copies": partial(mesh_2d, True),
}


if __name__ == "__main__":
    main()
