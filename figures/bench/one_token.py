"""Milliseconds that a generated token takes, ours beside Hugging Face's, by one process.

    python -m figures.bench.one_token --device cuda --model random/llama-3.2-1b --dtype bfloat16 \\
        --json token.json

The prompt is not counted: of two texts, one longer by --new-tokens, the difference is divided by
these. On a GPU Hugging Face compiles its forward for a static cache, as `.generate` does by itself.
That tokens are right is what `kv_cache.py` checks.
"""

import statistics
from functools import partial

import torch
from transformers import DynamicCache, GenerationConfig

from figures.bench.records import here_and_now
from harness.compiling import compile_norms_and_mlps
from harness.flags import make_parser, positive
from harness.generation import hf_generate
from harness.job import start
from harness.measure import interleave
from kv_cache import choose_among_ranks, generate, replays
from tp_llama import tensor_parallelize
from utils.errors import UserError

GRAPH, LOOP = "ours, a graph a token", "ours"
PARTS = "ours, norms and MLPs compiled, a graph a token"
EAGER, COMPILED = "Hugging Face", "Hugging Face, static cache, compiled"


def main():
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--batch-sizes", type=positive, nargs="+", default=[1, 8], help="default 1 and 8")
    add("--prompt-len", type=positive, default=512, help="tokens before them; default 512")
    add("--new-tokens", type=positive, default=64, help="tokens to generate; default 64")
    add("--repeats", type=positive, default=7, help="timed turns; default 7")
    start(parser.parse_args(), measure)


@torch.no_grad()
def measure(run, args):
    if run.world_size > 1:
        raise UserError("one process alone: start it by python, not by torchrun")
    whole = run.load_reference()
    split = partial(tensor_parallelize, mesh=run.mesh("tp"))
    ours = run.load_model(split)
    models = {GRAPH: ours}
    if run.device.type == "cuda":  # (on a CPU it would want a C++ compiler)
        models[PARTS] = run.load_model(split)
        compile_norms_and_mlps(models[PARTS], run.device)
    for model in whole, *models.values():
        model.generation_config = GenerationConfig()  # nothing that ends a text
    weights = sum(p.numel() for p in whole.parameters()) * run.dtype.itemsize
    tokens, kv_heads = args.new_tokens, run.source.config.num_key_value_heads
    found = {}
    for batch_size in args.batch_sizes:
        shape = batch_size, args.prompt_len
        ids = torch.randint(run.source.config.vocab_size, shape, device=run.device)
        expected = whole(ids).logits[:, -1]
        within = 32 * torch.finfo(run.dtype).eps * expected.abs().max().item()
        for name, model in models.items():
            what = f"{name}: logits after {batch_size} prompt(s)"
            run.check(what, [(model(ids).logits[:, -1], expected)], tolerance=within)
        ways = {
            name: partial(replays, model, ids, tokens, choose_among_ranks, kv_heads)
            for name, model in models.items()
        }
        ways |= {
            LOOP: partial(both_lengths, partial(by_loop, ours, ids), tokens),
            EAGER: partial(both_lengths, partial(hf_generate, whole, ids), tokens),
        }
        if run.device.type == "cuda":
            compiled = partial(hf_generate, whole, ids, cache_implementation="static")
            ways[COMPILED] = partial(both_lengths, compiled, tokens)
        laps = interleave(run, ways, args.repeats)
        of = found[batch_size] = {name: token_ms(phases, tokens) for name, phases in laps.items()}
        run.print0(f"a token of {batch_size} text(s) after {args.prompt_len}: {in_words(of)}")
    run.results |= here_and_now(run.device.type, run.world_size)
    run.results |= {"token_ms": found, "weights_bytes": weights, "prompt_tokens": args.prompt_len}


def by_loop(model, ids, new_tokens):
    mask = torch.ones_like(ids)
    return generate(model, ids, mask, new_tokens, choose_among_ranks, DynamicCache())


def both_lengths(function, tokens):
    """A contender of `interleave`: a text of few new tokens, and one of more by so many."""
    function(2)
    yield "short"
    function(2 + tokens)
    yield "long"


def token_ms(phases, tokens):
    """Milliseconds a token, by medians."""
    medians = {phase: statistics.median(laps) for phase, laps in phases.items()}
    seconds = medians["generate"] if "generate" in medians else medians["long"] - medians["short"]
    return 1e3 * seconds / tokens


def in_words(of):
    """What each way takes, of {way: milliseconds}."""
    return ", ".join(f"{name} {ms:.2f} ms" for name, ms in of.items())


if __name__ == "__main__":
    main()
