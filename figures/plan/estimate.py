"""How much memory a training step would take, and how many ranks: by technique, up to thousands.

    python -m figures.plan.estimate --model random/llama-3.2-1b --seq-len 4096 --device-memory 80

says of each technique how many ranks it takes until a step fits, and with --technique prints a row
for each power of two of ranks. On a mesh of two axes it shows the split that fits and sends least,
or, where none fits, the one that takes least. By closed forms (`techniques.py`): nothing is run.

    python -m figures.plan.estimate --model random/7b --seq-len 256 --batch-size 1 --article

puts the closed form of one process beside the formula of an article on training in parallel, and
says what that leaves out.
"""

import argparse

from figures.plan.formulas import Work
from figures.plan.techniques import TECHNIQUES, estimates
from harness.epochs import activations_by_article
from harness.flags import DTYPES, gib, positive
from loading.models import Source
from utils.errors import UserError

GIB = 2**30
COLUMNS = "parameters", "gradients", "Adam's", "kept", "peak", "sent"
LEGEND = """
kept: by a forward for its backward; without --tile nothing is recomputed. peak: the most that
tensors take. sent: in a step. All numbers, Adam's too, are of --dtype. Where data are parallel (dp)
each rank has its own --batch-size sequences. finetune trains a prompt alone; kv-cache is a forward.
usp, ring R x U: each U neighbours exchange heads; a ring has one of each such group, R ranks. The
scripts' own checks need more: rank 0 holds the whole model for its reference."""

DIFFERENCE = """
The article counts what is not there at once: gradients of all activations (a backward has those of
one layer at a time), and activations beside all gradients. It counts {:.2f} GB of scores, twice; a
fused kernel keeps none. It leaves out what an MLP keeps, {:.2f} GB, what norms keep in float32, and
what the optimizer makes for its largest parameter, {:.2f} GB. Here the peak is in: {}."""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="random/llama-3.2-1b", help="as of the tasks; default %(default)s")
    add("--technique", nargs="+", choices=TECHNIQUES, help="a row for each number of ranks; "
        "default of each technique the fewest ranks that fit")  # fmt: skip
    add("--seq-len", type=positive, default=4096, help="tokens a sequence; default 4096")
    add("--batch-size", type=positive, default=4, help="sequences of all ranks that share a model; "
        "along dp each has as many; default 4")  # fmt: skip
    add("--microbatches", type=positive, default=4, help="of a pipeline; default 4")
    add("--tile", type=positive, metavar="TOKENS", help="layers are recomputed, and logits come in "
        "tiles of so many; default neither")  # fmt: skip
    add("--dtype", choices=DTYPES, default="bfloat16", help="default bfloat16")
    add("--device-memory", type=gib, default=24 * GIB, metavar="GIB", help="default 24")
    add("--max-ranks", type=positive, default=4096, help="of 1, 2, 4, ...; default 4096")
    add("--article", action="store_true", help="beside the formula of an article, for one process; "
        "default no")  # fmt: skip
    args = parser.parse_args()
    try:
        (beside_article if args.article else show)(args)
    except UserError as error:
        parser.error(error)


def work_of(args):
    return Work(Source(args.model).config, args.seq_len, args.batch_size,
                DTYPES[args.dtype].itemsize, args.microbatches, args.tile)  # fmt: skip


def beside_article(args):
    """Print both formulas for a step of one process, part by part, and what makes the difference.

    The article's peak is the sum of its parts, as if all of them were there at once.
    """
    work = work_of(args)
    e, T, L, gb = work.e, work.T, work.L, 1e9
    (ours,) = estimates("one process", work, 1)
    activations = activations_by_article(work.config, work.B, work.S) * e
    weights = work.parameters() * e
    rows = [
        ("weights", weights, ours.parameters),
        ("gradients", weights, ours.gradients),
        ("Adam's two states", 2 * weights, ours.states),
        ("kept by the forward", activations, ours.kept),
        ("gradients of what is kept", activations, work.backward() * T),
        ("peak", 4 * weights + 2 * activations, ours.peak),
    ]
    print(f"{args.model}: {work.parameters():,} parameters, {args.dtype}, AdamW; "
          f"{work.B} x {work.S} tokens; one process; GB of 1e9 bytes:")  # fmt: skip
    print(f"{'':26}{'article':>10}{'here':>10}")
    for name, theirs, own in rows:
        print(f"{name:26}{theirs / gb:10.2f}{own / gb:10.2f}")
    scores = L * work.N * work.S * T * e
    mlp = L * 4 * work.F * T * e
    temporary = 2 * max(work.table(), work.unit()) * e
    moment = max(ours.moments, key=ours.moments.get)
    print(DIFFERENCE.format(scores / gb, mlp / gb, temporary / gb, moment))


def show(args):
    work = work_of(args)
    print(f"{args.model}: {work.parameters():,} parameters, {args.dtype}, AdamW; "
          f"{work.B} x {work.S} tokens; "
          f"a device of {args.device_memory / GIB:g} GiB; GiB of a rank:")  # fmt: skip
    print(f"{'technique':12} {'ranks':>5} {'mesh':>14}" + "".join(f"{c:>11}" for c in COLUMNS))
    powers = [2**i for i in range(args.max_ranks.bit_length())]
    for name in args.technique or TECHNIQUES:
        fewest, why = None, f"more memory than that, up to {powers[-1]} ranks"
        shown = False
        for P in powers:
            try:
                ways = estimates(name, work, P)
            except UserError as error:
                if P == 1:
                    why = str(error)
                elif name == "one process":
                    why = "more memory than that"
                else:
                    why = f"more memory than that on {P // 2}; not on more: {error}"
                break
            fit = [way for way in ways if way.peak <= args.device_memory]
            best = (
                min(fit, key=lambda way: way.sent) if fit else min(ways, key=lambda way: way.peak)
            )
            if args.technique:
                print(row(name, P, best) + ("  fits" if fit else ""))
                shown = True
            elif fit:
                fewest = row(name, P, best)
                break
        if not shown:
            print(fewest or f"{name:12} {why}")
    print(LEGEND)


def row(name, P, rank):
    sizes = (rank.parameters, rank.gradients, rank.states, rank.kept, rank.peak, rank.sent)
    return f"{name:12} {P:5} {rank.mesh:>14}" + "".join(f"{size / GIB:11.2f}" for size in sizes)


if __name__ == "__main__":
    main()
