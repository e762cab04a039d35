"""One training step of a very long sequence, on one rank, layer by layer.

    python -m figures.bench.one_step --device cuda --model random/llama-3.2-1b --dtype bfloat16 \\
        --positions 262144 --offload --json step.json

Prompt tuning as Task 5 does it. The record is written anew as each layer ends, so that a step that
is stopped, by --limit or otherwise, says how far it came. What is missing is extrapolated then,
from the layers that ran: marked as such, and only once a layer has run in both directions. With
--offload, host memory is pinned in it, as in the first step of a training.
"""

import statistics
import time
from functools import partial

import torch

from figures.bench.records import attention_flop, here_and_now, write_record
from figures.plan.longest import most, tensors
from harness.adapter_checks import expect_step
from harness.finetune import adapter_config, default_tile_mib, load_adapted
from harness.flags import make_parser, positive
from harness.job import start
from harness.measure import peak_memory_of_process
from memory import saved_outputs
from memory.long_sequence import Techniques, supported_techniques
from ulysses_finetune import forward_backward
from ulysses_forward import sequence_parallelize
from utils.errors import UserError
from utils.llama import llama_of


class OverTime(Exception):
    """The step has taken --limit seconds."""


class Clock:
    """Seconds since the step began at which each layer was through, forward and backward.

    A GPU is waited for one layer late: so the CPU is ahead of it, as in a training, and pins host
    memory meanwhile.
    """

    def __init__(self, run, limit_s, write):
        self.run, self.limit_s, self.write = run, limit_s, write
        self.on_gpu, self.ahead = run.device.type == "cuda", []
        self.done = {"run_attention": [], "layer_backward": []}
        run.synchronize()
        self.begin = self.now()

    def now(self):
        """Return the time: on a GPU an event of its stream."""
        if self.on_gpu:
            return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return time.perf_counter()

    def timed(self, function, *args):
        """In the place of a function of saved_outputs.py that works on one layer."""
        result = function(*args)
        self.ahead.append((function.__name__, self.now()))
        self.tell(left=self.on_gpu)
        return result

    def tell(self, left=0):
        """Wait for all layers but the last `left`; print and write when each was through."""
        while len(self.ahead) > left:
            name, at = self.ahead.pop(0)
            if self.on_gpu:
                at.synchronize()
            seconds = self.begin.elapsed_time(at) / 1000 if self.on_gpu else at - self.begin
            self.done[name].append(seconds)
            self.run.print0(f"{name} {len(self.done[name])}: {seconds:.1f} s")
            self.write()
            if seconds > self.limit_s:
                raise OverTime


def whole_step(done, layers):
    """(seconds of the step, whether extrapolated) from the layers done; None before there is any.

    From the middle layers of each direction; before the backward began nothing is known of it.
    """
    forward, backward = done["run_attention"], done["layer_backward"]
    if len(backward) == layers:
        return backward[-1], False
    if not backward:
        return None
    laps = [b - a for a, b in zip([forward[-1], *backward], backward, strict=False)]
    return backward[-1] + (layers - len(backward)) * statistics.median(laps), True


def main():
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--positions", type=positive, default=4096, help="with virtual tokens; default 4096")
    add("--offload", action="store_true", help="what is kept of layers goes to host memory, on a "
        "GPU; default no")  # fmt: skip
    add("--limit", type=positive, default=450, help="seconds, after which it stops behind the "
        "layer that it is at; default 450")  # fmt: skip
    args = parser.parse_args()
    path, args.json = args.json, None  # which is written here
    start(args, partial(measure, path=path))


def measure(run, args, path):
    """The step, and its record, into path."""
    adapter, mesh = adapter_config("prompt"), run.mesh("sp")
    model = load_adapted(run, adapter, partial(sequence_parallelize, mesh=mesh))
    config, layers = run.source.config, len(llama_of(model).model.layers)
    tile = default_tile_mib(run.device) * 2**20
    techniques = Techniques(offload=args.offload, tile_bytes=tile)
    if why := supported_techniques(llama_of(model), techniques)[1]:
        raise UserError(f"{why}: not all techniques that this step is to show are possible")
    ids = torch.randint(config.vocab_size, (1, args.positions - 32), device=run.device)
    record = here_and_now(run.device.type, 1) | {
        "model": args.model, "dtype": args.dtype, "device": run.device.type,
        "positions": args.positions, "offload": args.offload, "layers": layers,
        "attention_flop": attention_flop(config, args.positions), "torch": torch.__version__,
    }  # fmt: skip

    def write():
        step = whole_step(clock.done, layers)
        record.update(done_s=clock.done, step_s=step and step[0],
                      extrapolated=bool(step and step[1]))  # fmt: skip
        if path:
            write_record(path, record)

    few, reference = ids[:, :64], load_adapted(run, adapter)
    inputs = dict(input_ids=few, labels=few)
    expected, least_error = expect_step(run, run.references(reference), inputs)
    del reference
    loss = forward_backward(model, few, mesh, techniques)
    run.check(
        "loss of 64 tokens", [(loss, *(x.to(loss) for x in expected))], least_error=least_error
    )
    clock = Clock(run, args.limit, write)
    for name in clock.done:
        function = getattr(saved_outputs, name)
        setattr(saved_outputs, name, partial(clock.timed, function))

    def step():
        try:
            record["loss"] = forward_backward(model, ids, mesh, techniques).item()
            clock.tell()
        except OverTime:
            run.print0(f"note: stopped after {args.limit} s; the rest is not measured")

    on_gpu, weights = run.device.type == "cuda", sum(p.nbytes for p in model.parameters())
    name = "ours, offload" if args.offload and on_gpu else "ours"
    beyond = most(name, config, run.dtype.itemsize, args.positions, tile, tensors, on_gpu)
    record["predicted_bytes"] = weights + beyond  # of tensors, as is the peak on a GPU
    record["peak_bytes"] = peak_memory_of_process(run.device, step)
    if on_gpu:
        record["reserved_bytes"] = torch.cuda.max_memory_reserved()
        pinned = torch.cuda.host_memory_stats()
        record["pinning_s"] = pinned.get("host_alloc_time.total", 0) / 1e6  # the CPU waits for it
    write()
    said = "nothing of the backward" if record["step_s"] is None else f"{record['step_s']:.1f} s"
    run.print0(f"a step of {args.positions:,} positions: {said}"
               + (", extrapolated" if record["extrapolated"] else ""))  # fmt: skip


if __name__ == "__main__":
    main()
