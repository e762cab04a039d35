"""How long a step of Task 4 takes, and how much memory, beside one process with as many threads.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 -m figures.bench.ulysses_speed \\
        --model random/llama-3.2-1b-32k --num-layers 4 --batch-size 1 --seq-len 4096

As `tasks/ulysses_forward.py` does at the end, but after a check of the loss only: at this length
the other checks would take longer than the measurement, and more memory.
"""

from functools import partial

import torch

from figures.bench.records import here_and_now
from harness.flags import make_parser, positive
from harness.job import start
from harness.measure import measure_memory, measure_time
from harness.model_checks import expect_loss
from ulysses_forward import sequence_parallelize
from utils.replicas import sum_gradients


def main():
    parser = make_parser(__doc__, model="random/llama-3.2-1b-32k")
    add = parser.add_argument
    add("--batch-size", type=positive, default=1, help="sequences; default 1")
    add("--seq-len", type=positive, default=4096, help="tokens of each; default 4096")
    add("--repeats", type=positive, default=7, help="timed steps of each; default 7")
    start(parser.parse_args(), measure)


def measure(run, args):
    """Time and memory of both, after a check of the loss."""
    mesh = run.mesh("sp")
    parallelize, reduce = (partial(f, mesh=mesh) for f in (sequence_parallelize, sum_gradients))
    run.results |= here_and_now(run.device.type, run.world_size)
    reference = run.load_reference()
    parallel = run.load_model(parallelize)
    shape = args.batch_size, args.seq_len
    ids = run.broadcast(torch.randint(run.source.config.vocab_size, shape))
    with torch.no_grad():
        loss = parallel(ids, labels=ids).loss
    expected, least_error = expect_loss(run, run.references(reference), ids)
    run.check("loss", [(loss, *expected)], least_error=least_error)
    measure_time(run, reference, parallel, ids, args.repeats, reduce)
    del reference, parallel
    measure_memory(run, parallelize, ids, reduce)


if __name__ == "__main__":
    main()
