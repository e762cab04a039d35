"""What a rank finds at its start: torchrun's variables, a device, the other ranks and their flags.

And how it ends with one error line for all ranks.
"""

import ctypes
import datetime
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from glob import glob
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from packaging.version import Version

from shared_memory.slots import neighbourhood

TESTED = {  # oldest, newest
    "torch": ("2.7", "2.15.0"), "transformers": ("4.48.3", "5.24.0"), "peft": ("0.14.0", "0.21.2"),
}  # fmt: skip

GPU_FILES = "/dev/nvidia[0-9]*", "/proc/driver/nvidia/gpus/*"
# From this version on NCCL lets several ranks have one GPU, where this variable is 1.
SHARING_NCCL, SHARING_ALLOWED = Version("2.30"), "NCCL_MULTI_RANK_GPU_ENABLE"
START_S = 120  # seconds by which the ranks' starts may differ
STOPPING = [signal.SIGINT, signal.SIGTERM]
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup wants a closed terminal ignored
    STOPPING.append(signal.SIGHUP)


def fail(message, patient=True):
    """Print one `error:` line for the whole job and exit with code 2."""
    when_stopped(signal.SIG_DFL)  # with Task 5's handler, the sleep below would go on
    if patient and env_rank():
        # torchrun ends the job when the first rank exits; if that were this one, rank 0's line
        # could get lost. So wait: rank 0 mostly has the same error, and ends the job meanwhile.
        time.sleep(10 + 0.5 * min(env_rank(), 10))
    sys.stdout.flush()
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    os._exit(2)  # at once: an ordinary exit would wait for the process group


def when_stopped(handler):
    """Set what happens when this process is asked to stop; handler: as `signal.signal` takes it."""
    for number in STOPPING:
        signal.signal(number, handler)


def env_rank():
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


def read_environment():
    """Return the world size that torchrun set, or 1 without torchrun."""
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


def join_store():
    """Return the store that only this torchrun attempt's ranks share, and this rank's number."""
    try:
        timeout = datetime.timedelta(seconds=START_S)
        store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
    except (dist.DistError, ValueError, RuntimeError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        fail(f"no other ranks at {place} ({error}): start with torchrun --standalone")
    # torchrun keeps one store for all its attempts; a restarted rank must not read the dead
    # attempt's addresses (pytorch issue 135712).
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store), rank


def end_with_parent(signal_number=signal.SIGTERM):
    """Have Linux send this process a signal when the process that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal_number)  # 1 = PR_SET_PDEATHSIG


def end_with_torchrun():
    """End this process when torchrun ends; on Linux.

    Each worker has a session of its own, and would outlive a killed torchrun. The same holds for a
    script that starts its ranks itself: see `processes`.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
        script = multiprocessing.parent_process()  # None under torchrun
        if script:
            orphan = os.getppid() != script.pid
        else:
            first = Path("/proc/1/cmdline").read_bytes()  # in a container it may be torchrun
            orphan = os.getppid() == 1 and not re.search(b"torch|python", first)
        if orphan:
            fail("torchrun, or the script that started this rank, has ended", patient=False)


def end_sibling(rank):
    """Kill another rank of this machine: torchrun would wait half a minute for a stopped one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        for process in psutil.Process(os.getppid()).children():
            with suppress(psutil.Error):
                if process.environ().get("RANK") == str(rank):
                    process.kill()


def check_writable(path, flag="--json"):
    """Refuse an output file that cannot be written, before any work is done.

    flag: its name in the error message.
    """
    if path is None:
        return
    try:
        if path.exists() and not path.is_file():
            fail(f"{flag} {path}: not a file")
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        fail(f"{flag} {path}: cannot be written there ({error.strerror}); name another file")


def unusable_gpu():
    """Return what to say if a GPU is here that PyTorch cannot use; else None."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or torch.cuda.is_available() or not any(glob(pattern) for pattern in GPU_FILES):
        return None
    return (
        f"a GPU is here, but PyTorch {torch.__version__} cannot use it (built for CUDA "
        f"{torch.version.cuda}): install another driver, or another build"
    )


def count_gpus():
    """Return how many GPUs PyTorch can use. (`device_count` also counts those without a driver.)"""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def count_local_ranks():
    """Return how many ranks this machine has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def choose_device(wanted, shared=False):
    """Return this rank's device, and a notice if it is not what one would expect.

    shared: several ranks may have one GPU.
    """
    gpus, local = count_gpus(), count_local_ranks()
    if wanted == "cuda" and not gpus:
        fail(f"--device cuda: {unusable_gpu() or 'PyTorch sees no GPU'}; use --device cpu")
    if shared and (wanted == "cpu" or not gpus):
        fail(f"--share-gpus: {unusable_gpu() or 'there is no GPU to share'}")
    if wanted == "cuda" and gpus < local and not shared:
        fail(
            f"--device cuda: {local} ranks but {gpus} GPU(s) on this machine; use --device cpu, "
            "or --share-gpus"
        )
    if wanted == "cpu":
        return torch.device("cpu"), None
    if not gpus:
        notice = unusable_gpu()
        return torch.device("cpu"), notice and f"{notice}; running on the CPU"
    if gpus < local and not shared:
        notice = f"{local} ranks but {gpus} GPU(s) on this machine: running on the CPU"
        return torch.device("cpu"), notice
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # else it would beat what is set below
    try:
        torch.cuda.set_device(device)
        # Gives autograd's thread a CUDA context from the start: else cuBLAS warns there.
        torch.ones((), device=device, requires_grad=True).exp().backward()
    except RuntimeError as error:
        fail(f"{device}: {error}; use --device cpu", patient=False)
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # an environment may allow TF32
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    else:
        torch.set_float32_matmul_precision("highest")  # deprecated in newer PyTorch
    # PyTorch 2.7.0 may hang in NCCL's non-blocking mode (pytorch issue 153960). NVSwitch's sums may
    # differ from one call to the next: what is compared to the bit would not agree.
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # It warns that a group's messages wait for one another: pipeline_llama.py has groups enough.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        # Else a timeout of the last attempt, noted in torchrun's store, would end this one, too.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    return device, None


def nccl_version():
    """Return the version of the NCCL that PyTorch calls, such as "2.32.3"; None if there is none.

    `torch.cuda.nccl.version()` says which one PyTorch was built with. Another may have been loaded
    in its place, by LD_PRELOAD, so the library itself is asked.
    """
    if not dist.is_nccl_available():
        return None
    number = ctypes.c_int()
    try:
        # The function is in this library or in one that it needs, such as libnccl.so.2. What is
        # loaded already is not loaded again.
        library = find_spec("torch._C").origin
        ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # NCCL is linked into PyTorch, hidden: no other is called
        return ".".join(map(str, torch.cuda.nccl.version()[:3]))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


@dataclass
class Sharing:
    """What decides whether a rank on a GPU can talk by NCCL, where ranks may share GPUs.

    local_ranks, gpus: of its machine. allowed: whether NCCL_MULTI_RANK_GPU_ENABLE is 1. nccl: what
    `nccl_version` says.
    """

    local_ranks: int
    gpus: int
    allowed: bool
    nccl: str | None

    @classmethod
    def of_this_rank(cls):
        allowed = os.environ.get(SHARING_ALLOWED) == "1"
        return cls(count_local_ranks(), count_gpus(), allowed, nccl_version())

    @property
    def shared(self):
        return self.gpus < self.local_ranks

    def why_not_nccl(self):
        """Return why NCCL refuses ranks that share a GPU, in words; empty if it takes them."""
        reasons = [] if self.allowed else [f"{SHARING_ALLOWED} is not 1"]
        if self.nccl is None:
            reasons.append("this PyTorch has no NCCL")
        elif Version(self.nccl) < SHARING_NCCL:
            reasons.append(f"NCCL {self.nccl} is older than {SHARING_NCCL}")
        return " and ".join(reasons)


def share_gpus(ranks):
    """Return the backend of --share-gpus, and a note that names it and says why.

    The note is None if no GPU is shared. ranks: the `Sharing` of each rank. All ranks decide from
    the same list, so they decide alike.
    """
    sharing = next((rank for rank in ranks if rank.shared), None)
    if sharing is None:
        return "nccl", None
    reasons, versions = [rank.why_not_nccl() for rank in ranks], {rank.nccl for rank in ranks}
    why = next(filter(None, reasons), None)
    if why and len(set(reasons)) > 1:
        why = f"on rank {reasons.index(why)} {why}"
    if not why and len(versions) > 1:
        why = f"the ranks have different versions of NCCL, {' and '.join(sorted(versions))}"
    note = f"{sharing.local_ranks} ranks share {sharing.gpus} GPU(s) by"
    if why:
        return "gloo", f"{note} gloo, through the host: {why}"
    return "nccl", f"{note} NCCL {sharing.nccl}"


def agree(store, rank, world_size, args, device):
    """Refuse ranks that were started with different flags or libraries; torchrun cannot tell.

    The ranks compare through the store, before any collective: ranks of different devices would
    never meet in a collective. Returns notes on GPUs that differ and on versions of libraries that
    are not tested, whether all ranks can share memory, and each rank's `Sharing`.
    """
    local = {f"--{name.replace('_', '-')}": str(value) for name, value in vars(args).items()}
    local |= {name: version(name) for name in TESTED} | {"the device": device.type}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    sharing = asdict(Sharing.of_this_rank())
    store.set(f"started/{rank}", json.dumps([local, gpu, neighbourhood(), sharing]))
    everyone, of_ranks = [], []
    gpus, places = {}, set()
    patience = max(START_S, args.timeout)
    for other in range(world_size):
        try:
            store.wait([f"started/{other}"], datetime.timedelta(seconds=patience))
            theirs, gpu, place, sharing = json.loads(store.get(f"started/{other}"))
            everyone.append(theirs)
            of_ranks.append(Sharing(**sharing))
            places.add(place)
            gpus.setdefault(gpu, other)
        except dist.DistError:  # it is late, or rank 0, which may hold the store, has refused
            end_sibling(other)
            fail(
                f"rank {other} did not start within {patience} s: it hangs, or needs a longer "
                "--timeout"
            )
    for rank, theirs in enumerate(everyone):
        for name in sorted(everyone[0].keys() | theirs.keys()):
            first, other = everyone[0].get(name), theirs.get(name)
            if first != other:
                fail(
                    f"{name} is {first} on rank 0, but {other} on rank {rank}: start all ranks "
                    "with the same command and libraries"
                )
    several = "different GPUs, whose bits may differ: " + ", ".join(
        f"{gpu} from rank {first}" for gpu, first in gpus.items()
    )
    notes = [several] * (len(gpus) > 1) + [
        f"{name} {local[name]}; tested with {oldest} to {newest}"
        for name, (oldest, newest) in TESTED.items()
        if not Version(oldest) <= Version(Version(local[name]).public) <= Version(newest)
    ]
    return notes, len(places) == 1 and None not in places, of_ranks
