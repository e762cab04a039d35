"""How every task script starts, prints and ends: `start`, and the `Run` that it makes."""

import datetime
import faulthandler
import json
import os
import platform
import signal
import sys
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.device_mesh import DeviceMesh

from harness.attention import kernels_of, use_cudnn_where_right
from harness.checks import Comparison
from harness.compiling import compile_layers, time_first_forward
from harness.environment import (
    agree,
    check_writable,
    choose_device,
    end_with_torchrun,
    fail,
    join_store,
    nccl_version,
    read_environment,
    share_gpus,
)
from harness.flags import DTYPES
from harness.measure import is_for_memory
from harness.terminal import styled
from harness.watchdog import SPARE_S, Watch
from loading.architectures import mlp_units
from loading.models import Source, download, is_remote
from shared_memory.group import NAME, USABLE
from utils import collectives
from utils.collectives import all_gather, subgroup
from utils.errors import UserError

# Huge pages for large CPU tensors: else touching new memory is slower than most of what is done
# with it. PyTorch reads this once, when it first allocates.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# Compiled collectives of a group written in Python hang in PyTorch 2.7, and work in 2.13.
COMPILES_SHARED_MEMORY = Version(torch.__version__) >= Version("2.13")


# ---------------------------------------------------------------- starting and ending


def start(args, body, init_process_group=dist.init_process_group):
    """Join the other ranks, call body(run, args), and end the process as every script has to.

    Works under torchrun and, as world size 1, without it. It never returns: if all checks of the
    body passed, each rank prints `Tests passed` and exits with code 0. A `UserError` becomes one
    error line and exit code 2. A rank that waits --timeout seconds in a collective gives up, and
    names the rank that it waits for. init_process_group: a script's own, called as
    `torch.distributed`'s is.
    """
    prepare_process(args.deterministic)
    world_size = read_environment()
    check_writable(args.json)
    device, notice = choose_device(args.device, args.share_gpus)
    if device.type == "cuda":
        use_cudnn_where_right()
    end_with_torchrun()
    store, rank = join_store() if world_size > 1 else (dist.HashStore(), 0)
    if world_size == 1:
        notice = notice or "1 rank: nothing is split; start more with torchrun --nproc_per_node"
    notes, share_memory, sharing = agree(store, rank, world_size, args, device)
    backend, why = choose_backend(args, device, share_memory, sharing)
    watch = Watch(store, rank, world_size, args.timeout)
    # The watch names who is late, before the backend gives up; shared memory names them itself.
    timeout = datetime.timedelta(seconds=args.timeout + SPARE_S * (backend != NAME))
    try:
        init_process_group(
            backend=backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        run = Run(args, device, watch)
        for note in filter(None, [notice, *notes, why]):
            run.print0(f"note: {note}")
        run.print_in_order(f"Initialized rank={rank}")
        where = f"on {device.type} ({dist.get_backend()})"
        run.print0(styled(f"model {args.model}, {args.dtype}, {where}", "bold"))
        body(run, args)
        run.finish()
    except UserError as error:
        fail(error)
    except BaseException as error:  # some libraries' errors are no Exception
        watch.explain(error)
        if is_for_memory(error):
            fail(
                f"out of memory: {' '.join(str(error).split())[:200]}; take shorter or fewer "
                "sequences, a smaller model, or more ranks"
            )
        sys.stdout.flush()
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)  # at once: NCCL's end would wait for the other ranks
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # no ordinary exit: gloo's threads may outlive the interpreter, and abort


def prepare_process(deterministic):
    """Set what holds for the whole process: signals, output, and PyTorch's algorithms."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # kill -USR1: where does it hang?
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C also ends a rank that waits, in silence
    for stream in sys.stdout, sys.stderr:  # a text or a path that they cannot show ends no job
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False


def choose_backend(args, device, share_memory, sharing):
    """Return the ranks' backend, and a note if it is not what one would expect.

    share_memory, sharing: what `agree` returns, the same on all ranks.
    """
    if device.type == "cuda":
        return share_gpus(sharing) if args.share_gpus else ("nccl", None)
    if args.gloo:
        return "gloo", None
    if share_memory and not USABLE:
        why = f"PyTorch {torch.__version__}: ranks talk by gloo; from 2.7 on they share memory"
        return "gloo", why
    if share_memory and getattr(args, "compile", False) and not COMPILES_SHARED_MEMORY:
        return "gloo", f"PyTorch {torch.__version__}: compiled layers talk by gloo"
    if share_memory:
        return NAME, None
    return "gloo", (
        "no memory that all ranks could share (several machines, not Linux on x86-64, "
        "or /proc closed): they talk by gloo"
    )


# ---------------------------------------------------------------- the run


class Run(Comparison):
    """One run of a script: where it runs, what it checked, and what it measured.

    Attributes: `rank`, `world_size`, `device`, `dtype`, `seed`, `results` (goes to the JSON file),
    `mark` (T, S, P or D, before "Parallel" in printed lines). Methods that communicate are called
    by all ranks together. `load_model` communicates in its first call only.
    """

    def __init__(self, args, device, watch):
        self.model, self.num_layers, self.json = args.model, args.num_layers, args.json
        self.model_types, self.verbose = args.model_types, args.verbose
        self.compiles = getattr(args, "compile", False)
        self.device, self.dtype, self.seed = device, DTYPES[args.dtype], args.seed
        self.watch = watch
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.checks, self.compared, self.results = [], {}, {}
        self.mark, self.kernels = "T", None
        collectives.PRECISE = args.precise
        torch.manual_seed(args.seed)

    def mesh(self, axis):
        """Return a DeviceMesh of one axis, named `axis`: all ranks, in the existing process group.

        A technique takes one axis: this one, or one of a mesh of two, such as mesh["tp"].
        """
        world = dist.group.WORLD
        return DeviceMesh.from_group(world, self.device.type, mesh_dim_names=(axis,))

    def mesh_2d(self, outer, inner, columns):
        """Return all ranks as a DeviceMesh of two axes; the inner one has neighbouring ranks."""
        world, first = dist.group.WORLD, self.rank // columns * columns
        of_column = subgroup(world, "column", self.rank - first, self.world_size, columns)
        groups = [of_column, subgroup(world, "row", first, first + columns)]
        ranks = torch.arange(self.world_size).view(-1, columns)
        names = outer, inner
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=names)

    def gather(self, tensor):
        """Return every rank's tensor, all of one shape, on all ranks: (world size, *shape)."""
        return all_gather(tensor, dist.group.WORLD)

    def gather_objects(self, value):
        """Return every rank's value, in a list, on all ranks."""
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, value)
        return everyone

    def print_in_order(self, text):
        """Print every rank's own text, rank 0's first."""
        for rank in range(self.world_size):
            if rank == self.rank:
                print(text, flush=True)
            dist.barrier()

    def show(self, name, reference, actual):
        """Print `... name (rank=r): tensor([first, ..., last])` of the reference and every rank.

        actual: None where another rank has it.
        """
        local = "another rank has it" if actual is None else brief(actual)
        self.show_texts(name, brief(reference), local)

    def show_as_asked(self, title, name, reference, actual):
        """Print both tensors as the assignment does, and run its assertion: `check_allclose`.

        A blank line comes first. A batch of one is printed in its own shape; a larger one, which
        the assignment does not have, is printed flat: see `brief`.
        """
        self.print0("")
        self.show_texts(
            name,
            *(
                str(tensor.detach().clone().cpu()) if len(tensor) == 1 else brief(tensor)
                for tensor in (reference, actual)
            ),
        )
        what = {"outputs": "output", "input grad": "input_grad"}[name]
        self.check_allclose(title, what, actual, reference)

    def show_texts(self, name, reference, actual):
        """Print what the reference has under this name, and what every rank has."""
        self.print0(f"Reference {name} (rank=0): {reference}")
        self.print_in_order(f"{self.mark}Parallel {name} (rank={self.rank}): {actual}")

    def print0(self, text):
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def announce(self, text):
        """Print on rank 0 what the assignment wants announced in bold capitals."""
        text = text.upper()
        bold = styled(text, "bold")
        self.print0(bold if bold != text else f"*** {text} ***")

    def broadcast(self, value):
        """Return rank 0's tensor, number or object on every rank; others pass None or their own."""
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
        """Call function() on every rank; for a UserError or OSError on one, all raise UserError."""
        result = error = None
        try:
            result = function()
        except (UserError, OSError) as failure:
            error = str(failure) or repr(failure)
        if errors := list(filter(None, self.gather_objects(error))):
            raise UserError(errors[0])
        return result

    def once(self, what, function):
        """Call function() on rank 0 alone; all ranks wait for its result, and return it.

        They wait without limit. what: a name that is used once. Raises UserError as `together`.
        """

        def work():
            try:
                return function() if self.rank == 0 else None
            finally:
                self.watch.wait_for_all(what)

        return self.broadcast(self.together(work))

    @cached_property
    def source(self):
        """The `Source` that --model names; one rank of each machine downloads it."""
        name = self.model

        def fetch():
            try:
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    download(name)
            finally:
                self.watch.wait_for_all("downloaded")  # a download may take longer than --timeout

        if is_remote(name):
            self.together(fetch)
        source = self.together(lambda: Source(name, self.num_layers, self.seed, self.model_types))
        config = source.config
        self.longest_sum = max(config.vocab_size, mlp_units(config), config.hidden_size)
        if self.device.type == "cuda":
            head_dim = getattr(config, "head_dim", None)
            head_dim = head_dim or config.hidden_size // config.num_attention_heads
            self.kernels = kernels_of(self.device, self.dtype, head_dim)
            said = ", ".join(f"{calls}: {kernel}" for calls, kernel in self.kernels.items())
            self.print0(f"note: attention's kernels are {said}")
        if is_remote(name):
            self.print0(f"{name} is cached in {source.directory}")
        if any(source.dropout.values()):
            rates = ", ".join(f"{key} {rate}" for key, rate in source.dropout.items())
            self.print0(f"note: dropout is 0, so that runs can be compared; as shipped: {rates}")
        return source

    @cached_property
    def tokenizer(self):
        """The model's tokenizer, or None if it has none."""
        return self.together(self.source.tokenizer)

    def load_model(self, parallelize=None):
        """Load the model on this rank, full or what parallelize(model) leaves of it.

        See `Source.load_model`. With --compile, a model that was parallelized is compiled.
        """
        model = self.source.load_model(self.dtype, self.device, parallelize)
        return self.compile(model) if parallelize else model

    def compile(self, model):
        """With --compile, have each layer compiled when it is first run. Returns the model."""

        def tell(seconds):
            self.results["compile_s"] = seconds
            self.print0(f"note: layers are compiled: the first forward took {seconds:.1f} s")

        if self.compiles:
            compile_layers(model, self.device)
            if "compile_s" not in self.results:
                time_first_forward(model, tell)
        return model

    def load_reference(self):
        """Return the unmodified model on rank 0; None elsewhere."""
        source = self.source  # the first time, all ranks must ask for it together
        return source.load_model(self.dtype, self.device) if self.rank == 0 else None

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def finish(self):
        """End a run whose checks have all passed: write the record, and print what was checked."""
        assert self.checks, "a script that checks nothing must not pass"
        assert not self.compared, f"without a verdict: {', '.join(self.compared)}"
        self.write_json()
        self.print0(
            f"{len(self.checks)} checks, nearest to its tolerance: {self.nearest()}"
            f"{self.furthest_off()}"
        )
        self.print_in_order(f"Tests passed (rank={self.rank})")
        self.watch.stop()

    def exit(self, code):
        """End the job without `Tests passed`; all ranks come here together."""
        self.write_json()
        self.watch.stop()
        os._exit(code)

    def write_json(self):
        """Write the record to --json, whole or not at all."""
        if self.json is None or self.rank:
            return
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions |= {name: version(name) for name in ("transformers", "peft")}
        record = {
            "task": Path(sys.argv[0]).stem, "world_size": self.world_size,
            "backend": dist.get_backend(), "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."), "model": self.model,
            "flags": sys.argv[1:], "versions": versions, "checks": self.checks,
            "results": self.results,
        }  # fmt: skip
        if self.device.type == "cuda":  # see `choose_device`
            record |= {"gpu": torch.cuda.get_device_name(self.device),
                       "attention": self.kernels,
                       "nccl": nccl_version() if dist.get_backend() == "nccl" else None,
                       "NCCL_NVLS_ENABLE": os.environ["NCCL_NVLS_ENABLE"]}  # fmt: skip
        path = self.json.resolve()
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_text(in_lines(record) + "\n")
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            fail(f"--json {path}: cannot be written there ({error.strerror})", patient=False)


def in_lines(data, indent="\n"):
    """Format data as JSON, with a line for each object that holds no other object.

    JSON has no infinity and no NaN: they become null.
    """
    text = json.dumps(data)
    data = json.loads(text, parse_constant=lambda name: None)  # now all keys are strings
    if not isinstance(data, dict | list) or "{" not in text[1:]:
        return json.dumps(data)
    inner = f"{indent} "
    if isinstance(data, dict):
        parts = [f"{json.dumps(key)}: {in_lines(value, inner)}" for key, value in data.items()]
    else:
        parts = [in_lines(value, inner) for value in data]
    return text[0] + inner + f",{inner}".join(parts) + indent + text[-1]


def brief(tensor):
    """Return a tensor's first and last three values, flat, as text."""
    values = tensor.detach().clone().cpu().flatten()  # cloning waits for a DTensor's collective
    torch.set_printoptions(precision=4, edgeitems=3, threshold=6, linewidth=120, sci_mode=False)
    text = str(values)
    torch.set_printoptions(profile="default")
    return text
