"""How fast data parallelism is, what it sends, and what each rank has in memory.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 -m figures.bench.data_speed \\
        --json figures/records/data_parallel.json

All take turns with steps of forward, backward and AdamW, on as many sequences a rank: one process
alone, as many processes as ranks that each train for themselves, and every strategy of
`tasks/data_parallel.py`. The first two say what the machine has to give: two processes do less than
twice the work of one.
"""

import statistics
from functools import partial

import torch

from data_parallel import STRATEGIES, DataParallelModel
from figures.bench.records import here_and_now
from harness.epochs import bytes_kept, check_memory
from harness.flags import make_parser, positive
from harness.job import start
from harness.measure import interleave, ratio
from harness.model_checks import number_of_parameters
from loading.batches import pad
from shared_memory.traffic import bytes_sent
from utils.losses import mean_loss, token_losses

ALONE, EACH = "one process", "as many processes, each for itself"


def main():
    parser = make_parser(__doc__, model="random/balanced")
    add = parser.add_argument
    add("--seq-len", type=positive, default=256, help="tokens a sequence; default 256")
    add("--batch-size", type=positive, default=8, help="sequences on each rank; default 8")
    add("--repeats", type=positive, default=7, help="timed turns; default 7")
    start(parser.parse_args(), measure)


def measure(run, args):
    """Seconds of each contender's steps; bytes; memory."""
    config, P, mesh = run.source.config, run.world_size, run.mesh("dp")
    generator = torch.Generator().manual_seed(run.seed + run.rank)
    size = args.batch_size, args.seq_len
    batch = [t.to(run.device) for t in pad(list(
        torch.randint(config.vocab_size, size, generator=generator)), args.seq_len
    )]  # fmt: skip
    run.results |= here_and_now(run.device.type, P)
    run.results |= {"tokens": batch[0].numel(), "bytes": {}}
    alone = run.load_model()
    own = torch.optim.AdamW(alone.parameters(), lr=1e-4)
    replicas = {strategy: DataParallelModel(run, strategy, mesh) for strategy in STRATEGIES}
    optimizers = {
        name: replica.optimizer(replica.model.parameters(), torch.optim.AdamW, lr=1e-4)
        for name, replica in replicas.items()
    }
    losses = {}

    def together(name):
        optimizers[name].zero_grad()
        losses.setdefault(name, replicas[name].step(batch)[0])
        yield "gradients"
        optimizers[name].step()
        yield "optimizer"

    def single(works):
        if works:
            own.zero_grad()
            ids, mask, labels = batch
            logits = alone(input_ids=ids, attention_mask=mask, use_cache=False).logits
            loss = mean_loss(token_losses(logits, labels), labels)
            losses.setdefault(EACH, loss.detach() / P)
            loss.backward()
        yield "gradients"
        if works:
            own.step()
        yield "optimizer"

    # EACH before ALONE, which trains the same model: its first loss is of the first weights.
    contenders = {EACH: partial(single, True), ALONE: partial(single, run.rank == 0)}
    contenders |= {name: partial(together, name) for name in STRATEGIES}
    phases = interleave(run, contenders, args.repeats)
    seconds = run.results["step_s"] = {
        name: [sum(both) for both in zip(*of.values(), strict=True)] for name, of in phases.items()
    }
    work = [P * a / b for a, b in zip(seconds[ALONE], seconds[EACH], strict=True)]
    run.results["work"] = statistics.median(work)
    run.print0(f"{P} processes do {run.results['work']:.2f} times the work of one in the same time")
    for name, laps in seconds.items():
        run.print0(f"time {name}: {statistics.median(laps):.3f} s, {ratio(seconds[EACH], laps)} of "
                   f"what {EACH}, do")  # fmt: skip
    total = {name: run.gather(loss.double()).sum() for name, loss in losses.items()}
    for name in STRATEGIES:
        run.check(f"loss: {name}", [(total[name], total[EACH])], 1e-5 * total[EACH].item())
    for name, replica in replicas.items():
        kept = bytes_kept(replica.model, lambda replica=replica: replica.step(batch))
        check_memory(run, name, replica.model, optimizers[name], kept)
        sent, wire = bytes_sent(run, lambda name=name: list(together(name)))
        formula = formula_of(run, name)
        pair = [torch.tensor(float(n)) for n in (sent, formula)]
        run.check(f"{name}: bytes sent, by the formula", [pair], 0.02 * formula)
        run.results["bytes"][name] = [sent, formula, wire]


def formula_of(run, strategy):
    """Bytes that a rank sends in a step, as the docstring of `tasks/data_parallel.py` has them."""
    config, W = run.source.config, number_of_parameters(run.source) * run.dtype.itemsize
    times = {"by-hand": 2, "ddp": 2, "zero1": 3, "fsdp2": 3}[strategy]
    ends = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    once = (ends + config.hidden_size) * run.dtype.itemsize if strategy == "fsdp2" else 0
    return (run.world_size - 1) / run.world_size * (times * W - once)


if __name__ == "__main__":
    main()
