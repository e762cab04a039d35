"""What runs beside messages: Task 2's step with f's all-reduces behind the weights' gradients, and
without; on GPUs Ulysses and the ring, too.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 -m figures.bench.overlap

Both models of Task 2 have the same weights, and must give the same, on a CPU to the bit. On GPUs
one step of each technique is recorded as well: for how much of the time of NCCL's kernels other
kernels ran. (Of ranks that share one GPU this shows the order, not the speed; by gloo, nothing.) On
a CPU nothing overlaps: see utils/overlap.py.
"""

import statistics
from functools import partial

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from figures.bench.records import here_and_now
from harness.flags import make_parser, positive
from harness.job import start
from harness.measure import interleave, ratio, training_step
from ring_attention import ring_parallelize
from tp_llama import tensor_parallelize
from ulysses_forward import sequence_parallelize


def main():
    parser = make_parser(__doc__, model="random/balanced")
    add = parser.add_argument
    add("--batch-size", type=positive, default=2, help="sequences; default 2")
    add("--seq-len", type=positive, default=256, help="tokens of each; default 256")
    add("--repeats", type=positive, default=7, help="timed turns; default 7")
    start(parser.parse_args(), measure)


def measure(run, args):
    mesh, size = run.mesh("tp"), (args.batch_size, args.seq_len)
    ids = run.broadcast(torch.randint(run.source.config.vocab_size, size)).to(run.device)
    models = {
        name: run.load_model(partial(tensor_parallelize, mesh=mesh, overlap=overlap))
        for name, overlap in (("one after the other", False), ("overlapped", True))
    }
    results = []
    for model in models.values():
        loss = model(ids, labels=ids).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad()
    # On a GPU attention's backward adds in any order.
    largest = max(x.abs().max().item() for x in results[0])
    bound = 0.0 if run.device.type == "cpu" else 2**-7 * largest
    run.check("loss and gradients, with and without", zip(*results, strict=True), bound)
    threads = torch.get_num_threads()
    turns = {name: partial(training_step, of, ids, threads) for name, of in models.items()}
    laps = interleave(run, turns, args.repeats)
    before, after = (laps[name]["backward"] for name in models)
    run.print0(f"backward: {statistics.median(before):.4f} s, overlapped {ratio(after, before)}")
    run.results |= here_and_now(run.device.type, run.world_size)
    run.results |= {"size": size, "backward_s": {name: laps[name]["backward"] for name in models}}
    found = run.results["beside"] = {}
    if dist.get_backend(mesh.get_group()) == "nccl":
        found |= {name: share_beside(of, ids) for name, of in models.items()}
        for name, split in {"Ulysses": sequence_parallelize, "ring": ring_parallelize}.items():
            found[name] = share_beside(run.load_model(partial(split, mesh=mesh)), ids)
    for name, (seconds, share) in found.items():
        run.print0(f"{name}: NCCL's kernels {seconds:.4f} s, other kernels beside {share:.0%}")


def share_beside(model, ids):
    """Return NCCL's kernels' seconds in a step, and for how much of them other kernels ran, too.

    The step is forward and backward, without the sum of Ulysses' and the ring's gradients. The
    times are of this rank's own kernels. A first step, which is not recorded, makes connections.
    """
    model(ids, labels=ids).loss.backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        model(ids, labels=ids).loss.backward()
        torch.cuda.synchronize()
    model.zero_grad()
    kernels = [
        (event.name.startswith("nccl"), event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return beside(kernels)


def beside(kernels):
    """Return (seconds, share) of `share_beside`. kernels: [(whether NCCL's, begin, end)], in us."""
    total = both = 0.0
    others = merged([(begin, end) for nccl, begin, end in kernels if not nccl])
    for first, last in merged([(begin, end) for nccl, begin, end in kernels if nccl]):
        total += last - first
        both += sum(max(0.0, min(last, end) - max(first, begin)) for begin, end in others)
    return total / 1e6, both / total if total else 0.0


def merged(spans):
    """Return spans of time, [(begin, end)], without overlaps."""
    found = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


if __name__ == "__main__":
    main()
