"""How every task script starts, prints and ends: `start`, and the `Run` that it yields."""

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
from torch.distributed.device_mesh import DeviceMesh

from utils.checks import Comparison
from utils.collectives import all_gather
from utils.environment import (
    agree,
    check_writable,
    choose_device,
    end_with_torchrun,
    fail,
    join_store,
    read_environment,
)
from utils.errors import UserError
from utils.flags import DTYPES
from utils.measure import is_for_memory
from utils.models import Source, download, is_remote
from utils.shared_group import NAME
from utils.watchdog import SPARE_S, Watch

# Huge pages for large CPU tensors: touching new memory is else slower than most of what is done
# with it. Read once, when PyTorch allocates for the first time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


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
            run.print0(f"note: {note}")
        run.print_in_order(f"Initialized rank={rank}")
        run.print0(f"model {args.model}, {args.dtype}, on {device.type} ({dist.get_backend()})")
        yield run
        assert run.checks, "a script that checks nothing must not pass"
        assert not run.compared, f"without a verdict: {', '.join(run.compared)}"
        run.write_json()
        run.print0(f"{len(run.checks)} checks, nearest to its tolerance: {run.nearest()}"
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

    Attributes: `args`, `rank`, `world_size`, `device`, `dtype`, `results` (goes to the JSON file),
    `mark` ("T" or "S": the ...Parallel that the lines speak of). Every
    method is called by all ranks together.
    """

    def __init__(self, args, device, watch):
        self.args, self.device, self.dtype = args, device, DTYPES[args.dtype]
        self.watch = watch
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.checks, self.compared, self.results, self.mark = [], {}, {}, "T"
        torch.manual_seed(args.seed)

    def mesh(self, axis):
        """All ranks as a DeviceMesh of one axis of this name, by the process group that is there.

        Of a mesh of two axes a technique would get one, mesh["tp"] say.
        """
        world = dist.group.WORLD
        return DeviceMesh.from_group(world, self.device.type, mesh_dim_names=(axis,))

    def gather(self, tensor):
        """Every rank's tensor, all of one shape: (world size, *shape), on all ranks."""
        return all_gather(tensor, dist.group.WORLD)

    def gather_objects(self, value):
        """Every rank's value, in a list, on all ranks."""
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, value)
        return everyone

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
        self.print0(f"\nReference {kind} (rank=0): {reference}")
        self.print_in_order(f"{self.mark}Parallel {kind} (rank={self.rank}): {actual}")

    def print0(self, text):
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def announce(self, text):
        """Print on rank 0 what the assignment wants announced in bold capitals."""
        text = text.upper()
        self.print0(f"\033[1m{text}\033[0m" if sys.stdout.isatty() else f"*** {text} ***")

    def broadcast(self, value):
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
        if errors := list(filter(None, self.gather_objects(error))):
            raise UserError(errors[0])
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
            self.print0(f"{name} is cached in {source.directory}")
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
