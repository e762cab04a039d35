"""How fast a pipeline is, by schedule and number of microbatches, and what each rank does when.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 -m figures.bench.pipeline \\
        --json figures/records/pipeline.json

All take turns: plain model parallelism (one microbatch), every schedule of
`tasks/pipeline_llama.py` on 2, 4 and 8 microbatches, one process alone, and as many processes as
ranks that each work for themselves. The last two say what the machine has to give: two processes
do less than twice the work of one. Then each schedule is run once more, for the timeline, and its
bytes on the wire are counted.
"""

import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from figures.bench.records import here_and_now
from harness.flags import make_parser, positive
from harness.job import start
from harness.measure import interleave, measure_costs, ratio
from pipeline_llama import BY_HAND, BY_TORCH, SEVERAL, Pipeline, Stage, load_stages
from shared_memory.traffic import bytes_sent
from utils.losses import mean_loss, token_losses

PLAIN, ALONE, EACH = "plain model parallelism", "one process", "as many processes, each for itself"


def main():
    parser = make_parser(__doc__, model="random/balanced")
    add = parser.add_argument
    add("--seq-len", type=positive, default=256, help="tokens a sequence; default 256")
    add("--batch-size", type=positive, default=8, help="sequences; default 8")
    add("--microbatches", type=positive, nargs="+", default=[2, 4, 8], help="default 2 4 8")
    add("--repeats", type=positive, default=7, help="timed turns; default 7")
    start(parser.parse_args(), measure)


def measure(run, args):
    """Seconds of each contender's steps; timelines; bytes."""
    config, P = run.source.config, run.world_size
    ids = run.broadcast(torch.randint(config.vocab_size, (args.batch_size, args.seq_len)))
    batch = ids, torch.ones_like(ids), ids
    costs, pipes, losses = measure_costs(run, args.seq_len), {}, {}
    mesh, whole = run.mesh("pp"), run.load_model()
    run.results |= here_and_now(run.device.type, P) | {"costs": costs}
    stages = {number: load_stages(run, costs, number) for number in (P, 2 * P)}
    for name in [*BY_HAND, *BY_TORCH]:
        number = 2 * P if name in SEVERAL else P
        pipes[name] = Pipeline(mesh, name, stages[number], number)

    def piped(pipe, m):
        losses[f"{pipe.schedule}, {m}"] = pipe.step(*batch, [args.batch_size // m] * m)[0]
        yield "step"
        for _, parameter in pipe.named_parameters():
            parameter.grad = None

    def single(works):
        if works:
            loss = mean_loss(token_losses(whole(ids).logits, ids), ids)
            loss.backward()
            losses[ALONE] = loss.detach()
        yield "step"
        whole.zero_grad()

    contenders = {ALONE: partial(single, run.rank == 0), EACH: partial(single, True)}
    contenders[PLAIN] = partial(piped, pipes["gpipe"], 1)
    for m in args.microbatches:
        contenders |= {f"{name}, {m}": partial(piped, pipe, m) for name, pipe in pipes.items()}
    seconds = {name: of["step"] for name, of in
               interleave(run, contenders, args.repeats, warmup=1).items()}  # fmt: skip
    run.results |= {"step_s": seconds, "tokens": ids.numel()}
    print_times(run, seconds)
    for key, value in losses.items():
        pair = [run.gather(torch.as_tensor(x).double().to(run.device)).max() for x in
                (value, losses[ALONE] if run.rank == 0 else 0.0)]  # fmt: skip
        run.check(f"loss: {key}", [pair], 1e-5 * pair[1].item())
    m = args.microbatches[len(args.microbatches) // 2]
    run.results["timelines"] = {}
    for name, pipe in pipes.items():

        def once(pipe=pipe):
            list(piped(pipe, m))

        log = timeline(run, BY_HAND_WORK if name in BY_HAND else BY_TORCH_WORK, once)
        # PyTorch's functions are given the microbatch's number; ours go by the list.
        numbers = [args[0] for _, args, *_ in log] if name in BY_TORCH else []
        numbers = numbers or [i for _, i in BY_HAND[name](m, P, run.rank)]
        log = [(kind, i, *at) for (kind, _, *at), i in zip(log, numbers, strict=True)]
        run.results["timelines"][name] = run.gather_objects(log)
        sent, wire = bytes_sent(run, once)
        formula = formula_of(config, pipe, ids, run.dtype.itemsize)
        run.print0(f"{name}: bytes sent per rank {sent:,.0f}, formula {formula:,.0f}")
        run.results.setdefault("bytes", {})[name] = [sent, formula, wire]


def print_times(run, seconds):
    """Each contender's, beside plain model parallelism and the bubble's formula."""
    P = run.world_size
    work = [P * a / b for a, b in zip(seconds[ALONE], seconds[EACH], strict=True)]
    shared = run.results["work"] = statistics.median(work)
    run.print0(f"{P} processes do {shared:.2f} times the work of one in the same time")
    for name, laps in seconds.items():
        of = f"{statistics.median(laps):.3f} s"
        of += f", {ratio(seconds[PLAIN], laps)} times as fast as {PLAIN}"
        if name not in (ALONE, EACH, PLAIN):
            m = int(name.split(", ")[1])
            of += f"; by the bubble's formula {shared * m / (m + P - 1):.2f}"
        run.print0(f"time {name}: {of}")


def formula_of(config, pipe, ids, element):
    """Bytes that a rank sends in a step, on average: hidden states down and their gradients up."""
    boundaries = 2 * (pipe.number - 1) * ids.numel() * config.hidden_size * element
    tied = 2 * config.vocab_size * config.hidden_size * element * config.tie_word_embeddings
    return (boundaries + tied) / pipe.ranks


# What computes, by the letter that stands for it: F forward, B backward, W that of weights alone.
BY_HAND_WORK = {(Stage, "forward"): "F", (torch.Tensor, "backward"): "B"}
BY_TORCH_WORK = {
    (PipelineStage, "forward_one_chunk"): "F", (PipelineStage, "backward_one_chunk"): "B",
    (PipelineStage, "backward_weight_one_chunk"): "W",
}  # fmt: skip


def timeline(run, work, step):
    """What this rank does in a step: [(F, B or W, arguments, second of its begin, of its end)]."""
    log, kept = [], {}

    def logged(kind, function):
        def call(*args, **kwargs):
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            log.append((kind, args[1:2], begin - origin, time.perf_counter() - origin))
            return result

        return call

    for (owner, name), kind in work.items():
        kept[owner, name] = getattr(owner, name)
        setattr(owner, name, logged(kind, kept[owner, name]))
    dist.barrier()
    origin = time.perf_counter()
    step()
    for (owner, name), function in kept.items():
        setattr(owner, name, function)
    return log


if __name__ == "__main__":
    main()
