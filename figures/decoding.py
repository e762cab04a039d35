"""What keeps generation on several ranks from being faster: its collectives, on a CPU.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 figures/decoding.py \\
        --model random/llama-3.2-1b --num-layers 4

Tokens from a cache, by one process with the cores of all ranks and by Task 2's model: as it is,
without any collective (and so with wrong tokens), and with gloo's own all-reduce in two steps in
place of an all-gather and a sum: in turns, slowest rank, as everywhere. Then how long such a sum
takes, a thousand times, as rank 0 sees it.
"""

import statistics
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tasks"))

import kv_cache
import sharding
from kv_cache import choose_among_ranks, choose_whole, generate, generation, say_times
from measuring import interleave, threads_alone
from records import here_and_now
from tp_llama import tensor_parallelize
from utils import UserError, make_parser, positive, start

SUMS = 1000


def alone(tensor, group):
    """No sum, and nothing sent."""
    return tensor.clone()


def own_only(tensor, group):
    """As if all ranks had offered the same."""
    return torch.stack([tensor] * group.size())


WAYS = {  # [(module, name, what takes its place), ...]
    "by hand": [],
    "by hand, without collectives": [
        (sharding, "all_reduce", alone), (kv_cache, "all_gather", own_only),
    ],
    "by hand, sums in two steps": [(sharding, "FEW_BYTES", 0)],
}  # fmt: skip


def replaced(places, contender):
    """A contender of `interleave`, with other things in some places."""
    with ExitStack() as stack:
        for module, name, other in places:
            stack.enter_context(patch.object(module, name, other))
        yield from contender()


def main():
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--new-tokens", type=positive, default=32, help="tokens to generate; default 32")
    add("--prompt-len", type=positive, default=128, help="tokens before them; default 128")
    add("--repeats", type=positive, default=7, help="timed generations of each; default 7")
    args = parser.parse_args()
    with start(args) as run, torch.no_grad():
        if run.device.type != "cpu":
            raise UserError("this is about gloo's messages: --device cpu")
        run.results |= here_and_now(run.device.type, run.world_size)
        source, threads = run.source, torch.get_num_threads()
        reference = source.load_model(run.dtype, run.device) if run.rank == 0 else None
        split = partial(tensor_parallelize, group=run.group)
        model = run.together(lambda: source.load_model(run.dtype, run.device, split))
        ids = run.from_rank0(torch.randint(source.config.vocab_size, (1, args.prompt_len)))

        def tokens(of, choose):
            return generate(of, ids, ids * 0 + 1, args.new_tokens, choose, DynamicCache())

        references = run.references(reference)
        (expected,) = run.expect(lambda of: [tokens(of, choose_whole)], references)
        actual = tokens(model, choose_among_ranks)
        run.check("generated tokens", [(actual, expected[0])], tolerance=0.0)

        job = ids, args.new_tokens
        contenders = {
            "one rank": partial(generation, reference, *job, choose_whole, threads_alone(run))
        }
        by_hand = partial(generation, model, *job, choose_among_ranks, threads)
        contenders |= {name: partial(replaced, places, by_hand) for name, places in WAYS.items()}
        say_times(run, interleave(run, contenders, args.repeats), args.new_tokens)
        x, laps = torch.ones(1, 1, source.config.hidden_size, dtype=run.dtype), []
        for _ in range(SUMS):
            begin = time.perf_counter()
            sharding.all_reduce(x, run.group)
            laps.append(time.perf_counter() - begin)
        median, mean = (f"{1e3 * f(laps):.2f} ms" for f in (statistics.median, statistics.mean))
        slow = sum(lap > 3e-3 for lap in laps)
        run.say(f"time of a sum of {x.nbytes} bytes: median {median}, mean {mean}; "
                f"{slow} of {SUMS} take more than 3 ms")  # fmt: skip
        run.results["sum_s"] = laps


if __name__ == "__main__":
    main()
