"""What a precise sum of half-precision numbers costs, beside gloo's own: error, bytes and time.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 -m figures.bench.precise_sums \\
        --dtype bfloat16 --gloo --json figures/records/precise_sums.json

Both sum the same tensors in turns. The error is the rms over all numbers, beside the sum in
float64, as a share of that sum's own rms. Rounding the exact sum once costs 0.0017 in bfloat16.
"""

import statistics
from functools import partial

import torch
import torch.distributed as dist

from figures.bench.records import here_and_now
from harness.flags import make_parser, positive
from harness.job import start
from harness.measure import interleave, ratio
from shared_memory.traffic import bytes_sent
from utils import collectives

KIB = [8, 64, 512, 4096, 32768]


def main():
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--kib", type=positive, nargs="+", default=KIB, help="sizes; default " + str(KIB)[1:-1])
    add("--repeats", type=positive, default=15, help="timed turns; default 15")
    start(parser.parse_args(), measure)


def measure(run, args):
    run.results |= here_and_now(run.device.type, run.world_size) | {"sizes": {}}
    for kib in args.kib:
        torch.manual_seed(run.rank)
        x = torch.randn(kib * 1024 // run.dtype.itemsize).to(run.device, run.dtype)
        exact = run.gather(x).double().sum(0)
        ways = {name: partial(summed, x, name == "precise") for name in ("precise", "library")}
        errors = {name: error(way(), exact) for name, way in ways.items()}
        rounded = error(exact.to(run.dtype), exact)
        pair = [torch.tensor([errors["precise"] / rounded]), torch.ones(1)]
        run.check(f"{kib} KiB: the precise sum's error, of one rounding's", [pair], tolerance=0.01)
        sent = {name: bytes_sent(run, way)[0] for name, way in ways.items()}
        laps = interleave(run, {name: partial(timed, way) for name, way in ways.items()},
                          args.repeats)  # fmt: skip
        seconds = {name: of["sum"] for name, of in laps.items()}
        run.results["sizes"][kib] = {"error": errors, "bytes": sent, "sum_s": seconds}
        medians = {name: statistics.median(of) for name, of in seconds.items()}
        for name in ways:
            run.print0(f"{kib} KiB, {name}: error {errors[name]:.2e}, {sent[name]:,.0f} bytes, "
                       f"{1e3 * medians[name]:.2f} ms")  # fmt: skip
        run.print0(f"  precise by the library's time: {ratio(*seconds.values())}")


def summed(x, precise):
    """The sum of all ranks' x, a new tensor."""
    total = x.clone()
    collectives.PRECISE = precise
    collectives.all_reduce_(total, dist.group.WORLD)
    collectives.PRECISE = True
    return total


def error(tensor, exact):
    """The rms of what it is off, as a share of the exact one's."""
    difference = tensor.double() - exact
    return (difference.norm() / exact.norm()).item()


def timed(way):
    """A contender of `interleave`."""
    way()
    yield "sum"


if __name__ == "__main__":
    main()
