"""How fast tokens come from a cache, on ranks of one machine: through shared memory and by gloo.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 -m figures.bench.decoding \\
        --model random/llama-3.2-1b --num-layers 4

Compares, in turns and by the slowest rank: one process with the cores of all ranks; Task 2's model,
a DTensor plan and transformers' own plan, each through shared memory and by gloo; and Task 2's
model without its collectives, whose tokens are wrong, to time all else.
"""

from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import DynamicCache

import kv_cache
from figures.bench.contenders import BY_GLOO, TECHNIQUES, split
from figures.bench.records import here_and_now
from harness.flags import make_parser, positive
from harness.job import start
from harness.measure import interleave, threads_alone
from kv_cache import choose_from_full_logits, generate, generation, say_times
from shared_memory.group import NAME
from utils import collectives
from utils.errors import UserError


def alone(tensor, group):
    """No sum, and nothing sent."""
    return tensor.clone()


def own_only(tensor, group):
    """As if all ranks had offered the same."""
    return torch.stack([tensor] * group.size())


def without_collectives(contender):
    """Task 2's model, each rank for itself."""
    sums, choice = (collectives, "all_reduce", alone), (kv_cache, "all_gather", own_only)
    with patch.object(*sums), patch.object(*choice):
        yield from contender()


def main():
    parser = make_parser(__doc__)
    add = parser.add_argument
    names = [*TECHNIQUES, *BY_GLOO]
    add("--techniques", choices=names, nargs="+", default=names, help="default all")
    add("--new-tokens", type=positive, default=32, help="tokens to generate, 2 or more; default 32")
    add("--prompt-len", type=positive, default=128, help="tokens before them; default 128")
    add("--repeats", type=positive, default=7, help="timed generations of each; default 7")
    start(parser.parse_args(), measure)


@torch.no_grad()
def measure(run, args):
    """Seconds of each contender, after a check of what it gives."""
    if dist.get_backend() != NAME:
        raise UserError(f"this is about shared memory, not {dist.get_backend()}: --device cpu")
    if args.new_tokens < 2:
        raise UserError("--new-tokens 1: it comes with the prompt, and none is left to time")
    run.results |= here_and_now(run.device.type, run.world_size)
    threads, reference = torch.get_num_threads(), run.load_reference()
    made, models = split(run, args.techniques)
    ids = run.broadcast(torch.randint(run.source.config.vocab_size, (1, args.prompt_len)))

    def tokens(of, choose):
        return generate(of, ids, ids * 0 + 1, args.new_tokens, choose, DynamicCache())

    references = run.references(reference)
    (expected,) = run.reference_values(lambda of: [tokens(of, choose_from_full_logits)], references)
    for name, model in models.items():
        actual = tokens(model, made[name].choose)
        run.check(f"generated tokens, {name}", [(actual, expected[0])], tolerance=0.0)

    job = ids, args.new_tokens
    every = {
        "one rank": partial(
            generation, reference, *job, choose_from_full_logits, threads_alone(run)
        )
    }
    for name, model in models.items():
        every[name] = partial(generation, model, *job, made[name].choose, threads)
    if "hand-made" in models:
        apart = partial(without_collectives, every["hand-made"])
        every["hand-made, without collectives"] = apart
    say_times(run, interleave(run, every, args.repeats), args.new_tokens)


if __name__ == "__main__":
    main()
