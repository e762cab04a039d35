"""Which split of a long sequence costs what: seconds, memory and bytes of a step.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 -m figures.bench.sequence_speed \\
        --num-layers 2 --json figures/records/sequence_speed.json

Ulysses, a ring of contiguous or zigzag shares, tensor parallelism, and that with norms split by
tokens; on 4 ranks also both axes, and USP. Each makes the same step, in turns, beside one process
with the cores of all: layers are recomputed in the backward, and logits come in tiles. And of each
the longest sequence whose step's tensors, beside the weights, stay within --budget.
"""

import statistics
import time
import warnings
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from figures.bench.records import here_and_now
from figures.plan.formulas import Work
from figures.plan.techniques import split_sequence
from harness.flags import make_parser, positive
from harness.job import start
from harness.measure import interleave, num_threads, ratio, threads_alone
from harness.memory_profile import record_memory
from shared_memory.traffic import bytes_sent
from tp_ulysses import parallelize_tp_sp
from utils.errors import UserError
from utils.llama import next_tokens
from utils.replicas import sum_gradients

TILE = 512  # tokens whose logits are there at once
WAYS = {  # name: (tp, flags of `parallelize_tp_sp`); tp -1: all ranks
    "ulysses": (1, {}),
    "ring, contiguous": (1, {"sequence": "ring", "zigzag": False}),
    "ring, zigzag": (1, {"sequence": "ring"}),
    "tp": (-1, {}),
    "tp, megatron-sp": (-1, {"megatron_sp": True}),
}
ON_FOUR = {
    "tp x ulysses": (2, {}),
    "tp x ring": (2, {"sequence": "ring"}),
    "usp": (1, {"sequence": "usp", "ulysses": 2}),
}


def main():
    parser = make_parser(__doc__, model="random/balanced")
    add = parser.add_argument
    add("--seq-len", type=positive, nargs="+", default=[2048, 4096, 8192], help="tokens, a "
        "multiple of the ranks; default 2048 4096 8192")  # fmt: skip
    add("--budget", type=positive, default=256, metavar="MIB", help="of the longest sequence; "
        "default 256")  # fmt: skip
    add("--repeats", type=positive, default=7, help="timed turns; default 7")
    start(parser.parse_args(), measure)


def measure(run, args):
    run.results |= here_and_now(run.device.type, run.world_size) | {"lengths": {}}
    for S in args.seq_len:
        if S < 2 or S % run.world_size:
            raise UserError(f"--seq-len {S}: use multiples of {run.world_size}, of 2 or more")
    ways = WAYS | (ON_FOUR if run.world_size == 4 else {})
    steps = {name: Step(run, *way) for name, way in ways.items()}
    one = Step(run, 1, {}, alone=True)
    run.results["layers"] = len(one.model.model.layers)
    for S in args.seq_len:
        ids = ids_of(run, S)
        expected = run.broadcast(one.run(ids) if run.rank == 0 else None)
        found = {"one process": {"bytes": [0, 0], "peak": [one.peak(ids), one.said(S)[1]]}}
        for name, step in steps.items():
            within = 1e-5 * expected.item()
            run.check(f"{name}, {S} tokens: loss", [(step.run(ids), expected)], tolerance=within)
            sent, (said, peak) = bytes_sent(run, partial(step.run, ids))[0], step.said(S)
            pair = [torch.tensor(float(size)) for size in (sent, said)]
            run.check(f"{name}, {S} tokens: bytes sent", [pair], tolerance=0.02 * said)
            found[name] = {"bytes": [sent, said], "peak": [step.peak(ids), peak]}
        run.print0(f"{S} tokens; {run.results['layers']} layers:")
        check_ring(run, found, one.model.config, S)
        take_turns(run, {"one process": one, **steps}, ids, found, args.repeats)
        run.results["lengths"][S] = found
    run.results |= {"budget_mib": args.budget, "longest": {}}
    for name, step in {"one process": one, **steps}.items():
        found, said = longest(run, step, args.budget * 2**20)
        run.results["longest"][name] = [found, said]
        run.print0(f"{name}: {found} tokens in {args.budget} MiB; by the formula {said}")


def ids_of(run, S):
    return run.broadcast(torch.randint(run.source.config.vocab_size, (1, S))).to(run.device)


def check_ring(run, found, config, S):
    """Check that a ring's peak is above Ulysses' by k, v and their gradients, which travel."""
    shard = 2 * S // run.world_size * config.num_key_value_heads * config.head_dim * 4
    for name in "ring, contiguous", "ring, zigzag":
        more = torch.tensor(float(found[name]["peak"][0] - found["ulysses"]["peak"][0]))
        run.check(f"{name}, {S} tokens: peak beside Ulysses'", [(more.clamp(min=0), 0 * more)],
                  tolerance=(2 + 3) * shard)  # fmt: skip


def longest(run, step, budget, grain=TILE):
    """The longest sequence, in tiles, whose step stays within the budget; and the formulas' one."""

    def fits(S):
        return step.peak(ids_of(run, S)) <= budget

    said = 0
    while step.said(said + grain)[1] <= budget:
        said += grain
    found = said
    while found and not fits(found):
        found -= grain
    while fits(found + grain):
        found += grain
    return found, said


def take_turns(run, steps, ids, found, repeats):
    """Add to what is `found` of each way the seconds of its steps; print it all."""
    turns = {name: partial(step.timed, ids) for name, step in steps.items()}
    laps = interleave(run, turns, repeats)
    for name, of in found.items():
        of["step_s"] = laps[name]["step"]
        of["cpu_s"] = run.gather(torch.tensor(steps[name].cpu_s[-repeats:])).sum(0).tolist()
        steps[name].cpu_s.clear()
        shares = ratio(of["step_s"], laps["one process"]["step"])
        seconds, cpu = (statistics.median(of[what]) for what in ("step_s", "cpu_s"))
        peak, said = (size / 2**20 for size in of["peak"])
        sent, formula = (size / 1e6 for size in of["bytes"])
        run.print0(f"  {name}: {seconds:.3f} s, {shares} of one process's; CPU seconds of all "
                   f"{cpu:.2f}; peak beyond weights {peak:.1f} MiB, by the formula {said:.1f}; "
                   f"sent {sent:.2f} MB, by the formula {formula:.2f}")  # fmt: skip


class Step:
    """A way to split a step. Layers are recomputed; logits come, twice, in tiles of tokens."""

    def __init__(self, run, tp, flags, alone=False):
        """alone: on rank 0, with the threads of all."""
        self.job, self.flags, self.alone, self.cpu_s = run, flags, alone, []
        self.works = not alone or run.rank == 0
        self.threads = threads_alone(run) if alone else torch.get_num_threads()
        self.mesh = run.mesh_2d("sp", "tp", run.world_size if tp < 0 else tp)
        if alone:  # tp is 1: the row of one rank is both axes
            self.mesh = {"sp": self.mesh["tp"], "tp": self.mesh["tp"]}
        self.model = run.load_model(partial(parallelize_tp_sp, mesh=self.mesh, **flags)).train()
        with warnings.catch_warnings(action="ignore"):  # its name will be another in transformers 6
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def run(self, ids):
        """Forward, backward, sum of gradients; the mean loss of ids (1, S)."""
        model, S, tp = self.model, ids.shape[1], self.mesh["tp"].size()
        model.zero_grad()
        tokens = model.tokens(S)
        positions = torch.arange(S, device=ids.device)[None, tokens]
        hidden = model.model(
            ids[:, tokens], model.attention_mask_info(S, device=ids.device), positions
        )[0]
        targets = next_tokens(ids, ids.shape, model.config.vocab_size)[:, tokens]
        # Norms split by tokens: a rank has some of a row's, and the head gathers those of all.
        parts = targets.unflatten(1, (tp if "megatron_sp" in self.flags else 1, -1))
        loss = 0

        def of_tile(hidden, targets):
            return model.sum_of_losses(model.lm_head(hidden), targets) / (S - 1)

        for part, target in zip(hidden.split(TILE, 1), parts.split(TILE, 2), strict=True):
            loss = loss + checkpoint(of_tile, part, target.flatten(1), use_reentrant=False)
        loss.backward()
        sum_gradients(model.parameters(), self.mesh["sp"])
        total = loss.detach().clone()
        torch.distributed.all_reduce(total, group=self.mesh["sp"].get_group())
        return total

    def timed(self, ids):
        """A contender of `interleave`."""
        begin = time.process_time()
        with num_threads(self.threads):
            if self.works:
                self.run(ids)
        yield "step"
        self.cpu_s.append(time.process_time() - begin)

    def peak(self, ids):
        """Bytes that tensors hold at most beside the weights, of the rank that holds most."""
        self.model.zero_grad()
        step = partial(self.run, ids)
        mine = record_memory(step, self.job.device)[1].values() if self.works else []
        return max(self.job.gather_objects(sum(mine)))

    def said(self, S):
        """Of a rank, by the formulas: what it sends in a step, and its peak beside the weights."""
        P, tp = (1, 1) if self.alone else (self.job.world_size, self.mesh["tp"].size())
        sequence, e = self.flags.get("sequence", "ulysses"), self.model.dtype.itemsize
        u = {"ulysses": None, "ring": 1, "usp": self.flags.get("ulysses")}[sequence]
        work = Work(self.job.source.config, S, 1, e, tile=TILE)
        zigzag = self.flags.get("zigzag", True)
        rank = split_sequence(work, P, tp, u, "megatron_sp" in self.flags, zigzag)
        rank.moments.pop("optimizer")
        return rank.sent, max(rank.moments.values())


if __name__ == "__main__":
    main()
