"""What a step of pretraining costs on different meshes of the same ranks.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 -m figures.bench.mesh_speed \\
        --json figures/records/mesh_speed.json

All meshes, dp x tp, take turns with steps of forward, backward and AdamW on the same batch. Beside
the seconds of the slowest rank it counts the CPU's, of all ranks together: where ranks are more
than cores, these say what a mesh costs. (Who waits for another rank spins a while, then sleeps.)
"""

import statistics
import time
from functools import partial

import torch
from torch.distributed.tensor.parallel import loss_parallel

from figures.bench.records import here_and_now
from harness.flags import make_parser, positive
from harness.job import start
from harness.measure import interleave, ratio
from pretrain_2d import forward_backward, make_optimizer, parallelize_2d
from shared_memory.traffic import bytes_sent


def main():
    parser = make_parser(__doc__, model="random/balanced")
    add = parser.add_argument
    add("--seq-len", type=positive, default=256, help="tokens a sequence; default 256")
    add("--batch-size", type=positive, default=4, help="sequences of a step; default 4")
    add("--repeats", type=positive, default=7, help="timed turns; default 7")
    start(parser.parse_args(), measure)


def measure(run, args):
    """Seconds, the CPU's seconds, and bytes of each mesh; the same loss on all."""
    P, size = run.world_size, (args.batch_size, args.seq_len)
    ids = run.broadcast(torch.randint(run.source.config.vocab_size, size)).to(run.device)
    run.results |= here_and_now(run.device.type, P) | {"tokens": ids.numel(), "bytes": {}}
    contenders, losses, cpu = {}, {}, {}

    def step(name, model, optimizer, mesh):
        begin = time.process_time()
        optimizer.zero_grad()
        batch = ids.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        loss = forward_backward(model, (batch, batch), mesh)
        optimizer.step()
        losses.setdefault(name, loss)
        cpu.setdefault(name, []).append(time.process_time() - begin)
        yield "step"

    for tp in (tp for tp in range(1, P + 1) if P % tp == 0):
        mesh, name = run.mesh_2d("dp", "tp", tp), f"{P // tp} x {tp}"
        model = run.load_model(partial(parallelize_2d, mesh=mesh)).to(run.device)
        optimizer, _ = make_optimizer(model, 1e-4, 10**6, 0)
        contenders[name] = partial(step, name, model, optimizer, mesh)
    with loss_parallel():
        seconds = interleave(run, contenders, args.repeats)
        for name, of in contenders.items():
            run.results["bytes"][name] = bytes_sent(run, lambda of=of: list(of()))[0]
    run.results["step_s"] = {name: of["step"] for name, of in seconds.items()}
    # Of all ranks together, turn by turn; the last is the one whose bytes were counted.
    turns = {name: torch.tensor(laps[-args.repeats - 1 : -1]) for name, laps in cpu.items()}
    total = {name: run.gather(laps.to(run.device)).sum(0).tolist() for name, laps in turns.items()}
    run.results["cpu_s"] = total
    for name, laps in total.items():
        wall, sent = statistics.median(run.results["step_s"][name]), run.results["bytes"][name]
        run.print0(f"mesh {name}: {wall:.3f} s a step, {statistics.median(laps):.3f} s of CPUs, "
                   f"{sent / 1e6:.1f} MB sent by a rank")  # fmt: skip
    first, *between, last = total
    for name in between:
        ends = [(a + b) / 2 for a, b in zip(total[first], total[last], strict=True)]
        run.print0(f"CPU seconds of {name}: {ratio(total[name], ends)} of the mean of {first}'s "
                   f"and {last}'s")  # fmt: skip
    for name, loss in losses.items():
        run.check(f"loss: {name}", [(loss, losses[first])], 1e-5 * losses[first].item())


if __name__ == "__main__":
    main()
