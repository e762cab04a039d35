"""The losses of an article's model, pretrained on a mesh of 2 x 2 ranks in bfloat16 and float32.

    python -m figures.bench.pretraining_loss  # writes figures/records/pretraining_loss.json

The model is `random/179m`: 768 hidden, 12 layers, 12 query and 3 KV heads, 50,000 tokens, rows of
512. The text is stories of the project's own, several a document, as JSON lines; a tokenizer is
trained on it first. Both runs of `tasks/pretrain_2d.py` have the same weights, batches and rates,
and are held against the single rank's first steps as always. The single rank's float32 steps want
15 GB of memory.
"""

import argparse
import json
import sys
import tempfile
from itertools import islice
from pathlib import Path

from figures import RECORDS, TASKS
from figures.bench.records import here_and_now, torchrun, write_record
from loading.text import own_stories

DTYPES = "bfloat16", "float32"
STORIES = 4  # a document: about 512 tokens
KEPT = "losses", "held_out_loss", "bigram_loss", "tokens_per_second", "peak_memory_bytes"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="random/179m", help="default %(default)s")
    add("--seq-len", type=int, default=512, help="tokens a row; default 512")
    add("--batch-size", type=int, default=2, help="rows a step, of all ranks; default 2")
    add("--steps", type=int, default=18, help="of training; default 18")
    add("--vocabulary", type=int, default=50_000, help="tokens at most; default 50000")
    path = RECORDS / "pretraining_loss.json"
    add("--output", type=Path, default=path, help="default %(default)s")
    args = parser.parse_args()
    documents = args.batch_size * max(20, args.steps * 10 // 9 + 2)  # a tenth is held out
    whole, runs = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "stories.jsonl"
        write_text(text, documents)
        for dtype in DTYPES:
            print(f"{args.model}, {dtype}, 4 ranks", flush=True)
            flags = ["--model", args.model, "--dtype", dtype, "--dp", 2, "--tp", 2]
            flags += ["--text", text, "--tokenizer", Path(folder) / "tokenizer"]
            flags += ["--train-tokenizer", args.vocabulary, "--num-workers", 1]
            flags += ["--seq-len", args.seq_len, "--batch-size", args.batch_size]
            flags += ["--steps", args.steps, "--warm-up", args.steps // 6]
            run, done = torchrun(TASKS / "pretrain_2d.py", 4, *flags)
            if not run:
                sys.exit(f"{done.stdout[-3000:]}\nerror: pretrain_2d.py failed")
            print(*done.stdout.splitlines()[-7:], sep="\n", flush=True)
            names = ("torch", "transformers")
            whole = {"model": run["model"], **{name: run["versions"][name] for name in names}}
            runs[dtype] = {name: run["results"][name] for name in KEPT}
            runs[dtype]["checks"] = {c["name"]: c["passed"] for c in run["checks"]}
    sizes = {name: getattr(args, name) for name in ("seq_len", "batch_size", "steps")}
    record = whole | here_and_now() | sizes | {"documents": documents, "runs": runs}
    write_record(args.output, record)


def write_text(path, documents):
    """So many documents, each of some stories, as JSON lines."""
    stories = own_stories(1337)
    with path.open("w") as file:
        for _ in range(documents):
            file.write(json.dumps({"text": "\n\n".join(islice(stories, STORIES))}) + "\n")


if __name__ == "__main__":
    main()
