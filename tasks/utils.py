"""Plumbing that every task script shares: starting, flags, printing, ending.

The techniques are in the task scripts. What several of them build on comes through here too:
Megatron's f and g and the dealing out of heads (`sharding.py`), weights (`loading.py`), and the
checks (`comparing.py`, `model_checks.py`).

Shapes, in the whole repo: B batch, S sequence, H hidden, N query heads, K key/value heads,
D head dim, F MLP units, V vocabulary, P ranks. Local sizes are written S/P, N/P and so on, also
where the shares are uneven. A tensor has dims, a mesh has axes.
"""

import argparse
import ctypes
import datetime
import faulthandler
import json
import os
import platform
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch._tensor_str import printoptions

from comparing import Comparison, kind_of  # noqa: F401
from data import load_tokens  # noqa: F401
from loading import (  # noqa: F401 - a task script imports utils alone
    PRESETS,
    Rotary64,
    Source,
    UserError,
    compute_in_float64,
    download,
    fill,
    is_hub_id,
)
from measuring import (  # noqa: F401
    bytes_sent,
    interleave,
    kept_memory,
    limited_memory,
    median_ratio,
    peak_memory,
)
from model_checks import (  # noqa: F401
    add_model_flags,
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
    copy_to_ranks,
    gather_shares,
    keep_shard,
    local_part,
    shard_of,
    share,
    share_heads,
    sum_over_ranks,
)

# Huge pages for large CPU tensors: touching new memory is else slower than most of what is done
# with it. Read once, when PyTorch allocates for the first time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


# ---------------------------------------------------------------- what a user got wrong


def fail(message, patient=True):
    """Print one `error:` line for the whole job and exit with code 2."""
    if patient and env_rank():
        # torchrun ends the job when the first rank exits; if that were this one, rank 0's line
        # could get lost. Rank 0 sees the same error unless only this rank can see it.
        time.sleep(10)
    sys.stdout.flush()
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    os._exit(2)  # at once: an ordinary exit would wait for the process group


def env_rank():
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


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


def make_parser(doc):
    """The common flags of every script; `doc` is the script's docstring."""
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--model",
        default="tiny",
        help="a Llama: a directory, a hub id such as unsloth/Llama-3.2-1B, 'tiny' (the embedded "
        "trained model), or seeded random weights: "
        + ", ".join(f"random/{p}" for p in PRESETS)
        + "; default tiny",
    )
    add("--num-layers", type=int, help="keep this many layers of a random/ model; default all")
    add("--dtype", choices=DTYPES, default="float32", help="of weights; default float32")
    add(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: CUDA (NCCL) if there is a GPU for each rank, else CPU (gloo); default auto",
    )
    add("--seed", type=seed, default=1337, help="of random weights and inputs; default 1337")
    add("--json", metavar="FILE", type=Path, help="write checks and results there; default none")
    return parser


# ---------------------------------------------------------------- starting and ending


@contextmanager
def start(args, timeout_s=600):
    """Start the process group, yield a `Run`, and end the job by the contract.

    Works under torchrun and, as world size 1, without it. When the block ends, so does the process:
    with `Tests passed` and exit code 0, since all checks passed. A `UserError` in it becomes one
    error line and exit code 2. A rank that waits `timeout_s` seconds in a collective gives up.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # kill -USR1: where does it hang?
    world_size = read_environment()
    check_writable(args.json)
    device, notice = choose_device(args.device)
    end_with_torchrun()
    if world_size == 1:
        store, rank = dist.HashStore(), 0
        notice = notice or "1 rank: nothing is split; start more with torchrun --nproc_per_node"
    else:
        store, rank = join_store()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    run = Run(args, device)
    if notice and rank == 0:
        print(f"note: {notice}", flush=True)
    run.print_in_order(f"Initialized rank={rank}")
    try:
        yield run
    except UserError as error:
        fail(error)
    assert run.checks, "a script that checks nothing must not pass"
    run.write_json()
    run.print_in_order(f"Tests passed (rank={rank})")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # not through the interpreter's end, which gloo's threads may outlive and abort


def read_environment():
    """The world size that torchrun set, or 1 without torchrun."""
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    values = {name: os.environ[name] for name in names if os.environ.get(name)}
    if not values:
        return 1
    hint = "unset them, or start with torchrun --standalone"
    missing = ", ".join(name for name in names if name not in values)
    if missing:
        fail(f"{', '.join(values)} set, but not {missing}: {hint}", patient=False)
    numbers = [values[name] for name in names if name != "MASTER_ADDR"]
    if not all(n.isdigit() for n in numbers) or not env_rank() < int(values["WORLD_SIZE"]):
        said = ", ".join(f"{name}={value}" for name, value in values.items())
        fail(f"{said}: no such rank; {hint}", patient=False)
    return int(values["WORLD_SIZE"])


def join_store(seconds=120):
    """The ranks' common store, and this rank; for one start attempt of torchrun's only."""
    try:
        timeout = datetime.timedelta(seconds=seconds)
        store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
    except (dist.DistError, ValueError, RuntimeError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        fail(f"no other ranks at {place} ({error}): start with torchrun --standalone")
    # torchrun keeps one store for all its attempts; a restarted rank must not read the dead
    # attempt's addresses (pytorch issue 135712).
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store), rank


def end_with_torchrun():
    """If torchrun is killed, its workers would live on, each in a session of its own."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 = PR_SET_PDEATHSIG
        if os.getppid() == 1 and b"torch" not in Path("/proc/1/cmdline").read_bytes():
            os._exit(1)  # it is gone already, and we are an orphan


def check_writable(path):
    """Refuse an output file that cannot be written, before any work is done."""
    if path is None:
        return
    try:
        if path.exists() and not path.is_file():
            fail(f"--json {path}: not a file")
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        fail(f"--json {path}: cannot be written there ({error.strerror}); name another file")


def choose_device(wanted):
    """This rank's device, and a notice if it is not what one would expect."""
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if wanted == "cuda" and not gpus:
        fail("--device cuda: PyTorch sees no GPU; use --device cpu")
    if wanted == "cpu" or not gpus:
        return torch.device("cpu"), None
    if gpus < local:
        notice = f"{local} ranks but {gpus} GPU(s) on this machine: running on CPU with gloo"
        return torch.device("cpu"), notice
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device, None


# ---------------------------------------------------------------- the run


class Run(Comparison):
    """One run of a script: where it runs, what it checked, and what it measured.

    Attributes: `args`, `rank`, `world_size`, `group` (all ranks), `device`, `dtype`, `results`
    (goes to the JSON file), `mark` ("T" or "S": the ...Parallel that the lines speak of). Every
    method is called by all ranks together.
    """

    def __init__(self, args, device):
        self.args, self.device, self.dtype = args, device, DTYPES[args.dtype]
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group = dist.group.WORLD
        self.checks, self.results, self.mark = [], {}, "T"
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

    def say(self, text):
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

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
        """function() on every rank; a UserError on one of them is raised on all."""
        result = error = None
        try:
            result = function()
        except UserError as failure:
            error = str(failure)
        errors = [None] * self.world_size
        dist.all_gather_object(errors, error)
        if any(errors):
            raise UserError(next(filter(None, errors)))
        return result

    @cached_property
    def source(self):
        """The `Source` that --model names; one rank of each machine downloads a hub model."""
        name = self.args.model
        if is_hub_id(name):
            first_here = os.environ.get("LOCAL_RANK", "0") == "0"
            self.together(lambda: download(name) if first_here else None)
        return self.together(lambda: Source(name, self.args.num_layers, self.args.seed))

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def exit(self, code):
        """End the job without `Tests passed`; all ranks come here together."""
        self.write_json()
        dist.barrier()
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
        path = path.resolve()
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(record, indent=1) + "\n")
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            fail(f"--json {path}: cannot be written there ({error.strerror})", patient=False)


def brief(tensor):
    """A tensor's first and last three values, flat, as the assignment prints them."""
    values = tensor.detach().clone().cpu().flatten()  # cloning waits for a DTensor's collective
    with printoptions(precision=4, edgeitems=3, threshold=6, linewidth=120, sci_mode=False):
        return str(values)
