"""What compiled layers cost and save: seconds and memory of a step, with and without.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 -m figures.bench.compiled \\
        --json figures/records/compiled.json

One process and each technique take the same step in turns, of models that have the same weights.
That compiled layers compute the same is what the scripts check, by their flag --compile.
"""

import statistics
import time
from functools import partial

import torch

from dtensor_llama import dtensor_parallelize
from figures.bench.records import here_and_now
from harness.compiling import compile_layers
from harness.flags import make_parser, positive
from harness.job import start
from harness.measure import interleave, num_threads, ratio, threads_alone
from harness.memory_profile import record_memory
from ring_attention import ring_parallelize
from tp_llama import tensor_parallelize
from ulysses_forward import sequence_parallelize
from utils.replicas import sum_gradients

WAYS = {  # name: (what splits the model, whether gradients are summed)
    "one process": (None, False),
    "by hand (Task 2)": (tensor_parallelize, False),
    "DTensor plan (Task 3)": (dtensor_parallelize, False),
    "Ulysses (Task 4)": (sequence_parallelize, True),
    "ring": (ring_parallelize, True),
}


def main():
    parser = make_parser(__doc__, model="random/balanced")
    add = parser.add_argument
    add("--batch-size", type=positive, default=2, help="sequences; default 2")
    add("--seq-len", type=positive, default=256, help="tokens of each; default 256")
    add("--repeats", type=positive, default=7, help="timed turns; default 7")
    add("--ways", choices=WAYS, nargs="+", default=list(WAYS), help="default all")
    start(parser.parse_args(), measure)


def measure(run, args):
    config, size, ways = run.source.config, (args.batch_size, args.seq_len), args.ways
    ids = run.broadcast(torch.randint(config.vocab_size, size)).to(run.device)
    steps = {(name, how): Step(run, name, how) for name in ways for how in (False, True)}
    losses = {way: step.first(ids) for way, step in steps.items()}
    expected = run.broadcast(losses[ways[0], False])
    within = 4 * torch.finfo(run.dtype).eps * expected.item()
    for (name, compiled), loss in losses.items():
        pair = (run.broadcast(loss) if name == "one process" else loss), expected
        run.check(f"{name}{', compiled' * compiled}: loss", [pair], tolerance=within)
    peaks = {way: step.peak(ids) for way, step in steps.items()}
    turns = {way: partial(step.timed, ids) for way, step in steps.items()}
    laps, found = interleave(run, turns, args.repeats), {}
    for name in ways:
        both = [(name, how) for how in (False, True)]
        of = found[name] = {
            "step_s": [laps[way]["step"] for way in both],
            "peak": [peaks[way] for way in both],
            "first_s": max(run.gather_objects(steps[name, True].first_s)),
        }
        seconds = " and ".join(f"{statistics.median(each):.3f}" for each in of["step_s"])
        memory = " and ".join(f"{peak / 2**20:.0f}" for peak in of["peak"])
        run.print0(f"{name}: {seconds} s compiled, {ratio(*of['step_s'][::-1])}; peak beside the "
                   f"weights {memory} MiB; the first step, compiled, "
                   f"{of['first_s']:.1f} s")  # fmt: skip
    run.results |= here_and_now(run.device.type, run.world_size)
    run.results |= {"layers": config.num_hidden_layers, "size": size, "ways": found}


class Step:
    """A way to take a step: forward, backward, and where they are parts the sum of gradients."""

    def __init__(self, run, name, compiled):
        split, self.sums = WAYS[name]
        self.job, self.mesh, self.first_s = run, run.mesh("ranks"), 0.0
        alone = split is None
        self.threads = threads_alone(run) if alone else torch.get_num_threads()
        self.model = None
        if not alone or run.rank == 0:
            self.model = run.load_model(split and partial(split, mesh=self.mesh))
        if self.model and compiled:
            compile_layers(self.model, run.device)

    def run(self, ids):
        """The mean loss of ids (B, S); None where another rank works."""
        if self.model is None:
            return None
        self.model.zero_grad()
        with num_threads(self.threads):
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        if self.sums:
            sum_gradients(self.model.parameters(), self.mesh)
        return loss.detach()

    def first(self, ids):
        """The loss of the first step, in which layers are compiled."""
        begin = time.perf_counter()
        loss = self.run(ids)
        self.first_s = time.perf_counter() - begin
        return loss

    def timed(self, ids):
        """A contender of `interleave`."""
        self.run(ids)
        yield "step"

    def peak(self, ids):
        """Bytes that tensors hold at most beside the weights, of the rank that holds most."""
        if self.model:
            self.model.zero_grad()
        held = record_memory(partial(self.run, ids), self.job.device)[1] if self.model else {}
        return max(self.job.gather_objects(sum(held.values())))


if __name__ == "__main__":
    main()
