"""What attention costs in a ring, by zigzag and by contiguous shares of the tokens.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 -m figures.bench.ring_speed \\
        --json figures/records/ring_speed.json

Both take turns with the forward and the backward of one layer's attention, on the same queries,
keys and values. Beside the seconds until all ranks are done it counts the CPU's of the rank that
has most to do: where ranks are more than cores, these alone say how even the shares are.

On a CPU with a core a rank it also writes down what each rank does when in a zigzag ring: kernels,
messages, waiting; and again by gloo, whose threads carry messages while kernels run.
"""

import os
import statistics
import time
from functools import partial
from threading import Thread
from unittest import mock

import torch
import torch.distributed as dist

import ring_attention
from figures.bench.mesh_diagrams import knowing
from figures.bench.records import here_and_now
from harness.flags import make_parser, positive
from harness.job import start
from harness.measure import interleave, ratio
from ring_attention import Ring, RingAttention
from shared_memory.traffic import bytes_sent
from utils.errors import UserError
from utils.kernels import attend
from utils.partition import shard_range

LAYOUTS = {"contiguous": False, "zigzag": True}


def main():
    parser = make_parser(__doc__, model="random/balanced")
    add = parser.add_argument
    add("--seq-len", type=positive, default=8192, help="tokens of the sequence; default 8192")
    add("--repeats", type=positive, default=7, help="timed turns; default 7")
    start(parser.parse_args(), measure)


def measure(run, args):
    """Seconds, the CPU's seconds of each rank, and bytes, of each layout; the same outputs."""
    config, P, S = run.source.config, run.world_size, args.seq_len
    if S < P:
        raise UserError(f"--seq-len {S}: each of {P} ranks needs a token")
    heads = config.num_attention_heads, *[config.num_key_value_heads] * 2
    whole = [torch.randn(1, n, S, config.head_dim) for n in heads]  # alike on all, by the seed
    whole = [run.broadcast(x).to(run.device, run.dtype) for x in whole]
    run.results |= here_and_now(run.device.type, P) | {"tokens": S, "bytes": {}}
    cpu, outputs, contenders = {}, {}, {}

    def both(name, ring, mine):
        begin = time.process_time()
        output = RingAttention.apply(*mine, ring)
        yield "forward"
        output.backward(torch.ones_like(output))
        outputs[name] = output.detach()
        cpu.setdefault(name, []).append(time.process_time() - begin)
        yield "backward"

    first, stop = shard_range(S, P, run.rank)
    orders = {}
    for name, zigzag in LAYOUTS.items():
        ring = Ring(run.mesh("sp").get_group(), S, zigzag)
        orders[name] = ring.order()[first:stop].to(run.device)
        mine = [x[:, :, orders[name]].requires_grad_() for x in whole]
        contenders[name] = partial(both, name, ring, mine)
    phases = interleave(run, contenders, args.repeats)
    for name, of in contenders.items():
        run.results["bytes"][name] = bytes_sent(run, lambda of=of: list(of()))[0]
    expected = attend(*whole)[0]
    for name, output in outputs.items():
        run.check(f"output: {name}", [(output, expected[:, :, orders[name]])], tolerance=1e-5)
    # On a GPU a kernel's begin is not the call's; ranks that share cores wait for these.
    if run.device.type == "cpu" and os.cpu_count() >= P:
        groups = {dist.get_backend(): run.mesh("sp").get_group()}
        groups["gloo"] = dist.new_group(backend="gloo")
        run.results["hops"] = {
            name: timeline(run, group, S, mine) for name, group in groups.items()
        }
    say(run, phases, {name: torch.tensor(of[-args.repeats - 1 : -1]) for name, of in cpu.items()})


def say(run, phases, cpu):
    """Print and keep: the steps' seconds, and CPU seconds, [rank][turn] each."""
    seconds = run.results["step_s"] = {
        name: [sum(both) for both in zip(*of.values(), strict=True)] for name, of in phases.items()
    }
    everyone = {name: run.gather(laps.to(run.device)) for name, laps in cpu.items()}
    run.results["cpu_s"] = {name: of.tolist() for name, of in everyone.items()}
    most = {name: of.max(0).values.tolist() for name, of in everyone.items()}
    for name, laps in seconds.items():
        of_ranks = ", ".join(f"{of:.3f}" for of in everyone[name].median(1).values.tolist())
        run.print0(f"{name}: {statistics.median(laps):.3f} s; CPU seconds of the ranks {of_ranks}; "
                   f"{run.results['bytes'][name] / 1e6:.2f} MB sent by a rank")  # fmt: skip
    run.print0(f"contiguous takes {ratio(*(seconds[name] for name in LAYOUTS))} times zigzag's "
               f"seconds, its busiest rank {ratio(*(most[name] for name in LAYOUTS))} times the "
               "CPU seconds of zigzag's")  # fmt: skip


# ---------------------------------------------------------------- what happens when


class Arrival(Thread):
    """Waits for a message of gloo's, which tells nobody else when it has come."""

    def __init__(self, work):
        super().__init__()
        self.work = work
        self.start()

    def run(self):
        self.work.wait()
        self.at = time.perf_counter()

    wait = Thread.join


def timeline(run, group, length, mine):
    """A zigzag ring, twice; of the second time, on each rank, [[what, begin, end, of], ...].

    what: "forward" and "backward" of a block, whose chunks (i, j) are `of`; of the messages of a
    hop, whose bytes are `of`, "post", "wait", and "way" from the first on until the last has come.
    """
    log, works, chunks = [], [], {}
    ring = knowing(chunks)(group, length, zigzag=True)

    def timed(what, at, function, *args):
        begin = time.perf_counter()
        result = function(*args)
        names = [chunks[args[i].data_ptr()] for i in (at, at + 1)]
        log.append([what, begin, time.perf_counter(), names])
        return result

    def post(begin_messages, operations):
        works[:] = begin_messages(operations)
        if dist.get_backend(group) == "gloo":
            works[:] = map(Arrival, works)
        return list(works)

    def exchange(function, sends, receives, group):
        begin, works[:] = time.perf_counter(), []
        wait, size = function(sends, receives, group), sum(x.nbytes for x, _ in sends)
        posted, arrivals = time.perf_counter(), list(works)

        def waited():
            waits = time.perf_counter()
            wait()
            end = time.perf_counter()
            came = max([getattr(arrival, "at", end) for arrival in arrivals], default=posted)
            log.extend([["post", begin, posted, size], ["wait", waits, end, size],
                        ["way", begin, came, size]])  # fmt: skip

        return waited

    mine = [x.detach().clone().requires_grad_() for x in mine]
    watched = mock.patch.multiple(
        ring_attention,
        attend=partial(timed, "forward", 0, ring_attention.attend),
        attend_backward=partial(timed, "backward", 1, ring_attention.attend_backward),
        exchange=partial(exchange, ring_attention.exchange),
    )
    begun = mock.patch.object(dist, "batch_isend_irecv", partial(post, dist.batch_isend_irecv))
    with watched, begun:
        for _ in range(2):
            log.clear()
            dist.barrier()
            origin = run.broadcast(time.perf_counter())  # one clock, of the machine
            output = RingAttention.apply(*mine, ring)
            output.backward(torch.ones_like(output))
            run.synchronize()
    return run.gather_objects([[what, begin - origin, end - origin, of]
                               for what, begin, end, of in log])  # fmt: skip


if __name__ == "__main__":
    main()
