"""Starting the task scripts as a user would, with a timeout, and with nothing left behind."""

import contextlib
import functools
import itertools
import json
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
TASKS, FIGURES = ROOT / "tasks", ROOT / "figures"
HELPERS = ROOT / "tests" / "helpers"  # this folder: also programs that tests start
RECORDS = FIGURES / "records"
SCRIPTS = sorted(p.stem for p in TASKS.glob("*.py") if '__name__ == "__main__"' in p.read_text())
# What torchrun, Slurm and the launch scripts are told by; the user's must not reach the tests.
OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "TORCHELASTIC_", "SLURM", "SBATCH",
          "HEAD", "IS_HEAD", "NNODES", "NPROC", "PORT", "JOB", "IFACE", "MAX_RESTARTS")  # fmt: skip
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# Which GPU a test of one GPU takes: the first that this user may see.
ONE_GPU = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
STARTED = set()  # the scripts that were started since somebody emptied this: see conftest.py
MARK = "PARALLEL_LLAMA_TEST"  # set to a job's own id in all its processes, to find survivors by


@dataclass
class Result:
    """How a job ended: its exit code, what it printed, how long it took, who survived it."""

    code: int
    out: str
    err: str
    seconds: float
    survivors: list

    def errors(self):
        """The lines that tell a user what was wrong."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]

    def assert_refused(self, message, seconds=60):
        """The contract of what a user got wrong: one line, in time, nothing left behind."""
        assert self.code == 2 and self.seconds < seconds and not self.survivors, self.tail()
        assert len(self.errors()) == 1 and message in self.errors()[0], self.tail()
        assert "Traceback" not in self.err, self.tail()

    def tail(self):
        """For an assertion's message: the last 50 lines."""
        lines = (self.out + "\n--- stderr\n" + self.err).splitlines()
        return f"exit code {self.code}, {self.seconds:.1f} s\n" + "\n".join(lines[-50:])


def environment(job, extra=None):
    """The user's environment, with one thread a rank, no hub, no GPUs, and the job's mark."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(OTHERS)}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    env |= {MARK: job}
    env |= {"CUDA_VISIBLE_DEVICES": ""}  # else the device would depend on the number of ranks
    return env | (extra or {})


def processes(job):
    """The live processes of a job."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(MARK) == job:
                found.append(process)
        except psutil.Error:
            pass
    return found


def run(command, timeout=300, env=None, cwd=ROOT):
    """Run a command to its end, or past `timeout` seconds to its stacks and its death."""
    job, begin = uuid.uuid4().hex, time.monotonic()
    process = subprocess.Popen(
        [str(part) for part in command],
        env=environment(job, env),
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for member in processes(job):
            if member.pid != process.pid:
                member.send_signal(signal.SIGUSR1)  # job.start: faulthandler prints the stacks
        time.sleep(2)
        for member in processes(job):
            member.kill()
        out, err = process.communicate()
        err += f"\nTIMEOUT: killed after {timeout} s"
    seconds = time.monotonic() - begin
    return Result(process.returncode, out, err, seconds, survivors(job))


def survivors(job, seconds=3):
    """The processes of a job that live after so many seconds more; then they are killed."""
    deadline = time.monotonic() + seconds
    while processes(job) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = processes(job)
    for process in left:
        process.kill()
    return [process.pid for process in left]


def program(name):
    """The words that start a program of figures/, "bench.tp_speed" or the like, from ROOT."""
    return [sys.executable, "-m", f"figures.{name}"]


def command(script, *args, nproc, restarts=0):
    """The words of that command line."""
    path = script if str(script).endswith(".py") else TASKS / f"{script}.py"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    STARTED.add(Path(path).stem)
    words += ["--max-restarts", restarts, "--nproc_per_node", nproc, path, *args]
    return list(map(str, words))


def copy_tasks(folder):
    """All of tasks/, but for the model, which is linked.

    What is compiled goes along, to save time: Python takes it where a file's time and size are the
    same. (Not what another test is just compiling.)
    """
    ignored = shutil.ignore_patterns("*.pyc.*", "tiny_llama")
    shutil.copytree(TASKS, folder, ignore=ignored, dirs_exist_ok=True)
    (folder / "tiny_llama").symlink_to(TASKS / "tiny_llama")


def torchrun(script, *args, nproc, restarts=0, **kwargs):
    """`torchrun --standalone --nproc_per_node nproc tasks/script.py args`, as the README has it."""
    return run(command(script, *args, nproc=nproc, restarts=restarts), **kwargs)


# ---------------------------------------------------------------- many short jobs


# An import that asks for GPUs there asks the driver's library, which leaves CUDA as it is.
UNTOUCHED = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Nursery:
    """A process that has all imports done, from which ranks are forked (nursery.py).

    env: changes to its environment, which differs from the ranks'. Several threads may use it.
    """

    cpu_s = 0.0  # of its ranks so far

    def __init__(self, env=None):
        words = [sys.executable, Path(__file__).with_name("nursery.py")]
        self.process = subprocess.Popen(
            words, env=environment("nursery", UNTOUCHED | (env or {})), cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.lock, self.numbers, self.waiting = threading.Lock(), itertools.count(), {}
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        """Hand each job's end to who waits for it; None where the process itself is gone."""
        for line in self.process.stdout:
            ended = json.loads(line)
            self.waiting.pop(ended.pop("number")).put(ended)
        with self.lock:
            for one in self.waiting.values():
                one.put(None)
            self.waiting = None

    def run(self, **job):
        mine = queue.SimpleQueue()
        with self.lock:
            if self.waiting is None:
                raise RuntimeError("the process that ranks are forked from is gone")
            number = next(self.numbers)
            self.waiting[number] = mine
            print(json.dumps({"number": number, **job}), file=self.process.stdin, flush=True)
        ended = mine.get()
        if ended is None or "error" in ended:
            raise RuntimeError(ended["error"] if ended else "where ranks are forked from is gone")
        with self.lock:
            Nursery.cpu_s += ended["cpu_s"]
        return ended

    def ranks(self):
        """The processes of all ranks that are running now."""
        found = []
        for job in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                found += job.children()
        return found


nursery = functools.cache(Nursery)  # started where it is needed, once


@functools.cache
def ports():
    """An endless iterator over ports that only this process of the tests asks for.

    They are below those that a system gives to connections, from 32768 or 49152 on: between the
    choice of a port and rank 0's use of it no connection of another job can take it.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
    first, begin = 16000 + 1000 * worker, random.randrange(1000)  # tests elsewhere begin elsewhere
    return itertools.cycle(first + (begin + i) % 1000 for i in range(1000))


def free_port():
    """A port on which nobody listens, and which nobody else is about to take."""
    for port in itertools.islice(ports(), 1000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port on 127.0.0.1")


def ranks(
    path, *args, nproc, folder, timeout=300, torchrun=True, env=None, each=None, mother=None,
    rounding=None,
):  # fmt: skip
    """A script's ranks without torchrun, forked from a process with all imports done.

    Saves the seconds that every start costs, where many jobs are needed. Ends like torchrun: when
    one rank fails, the others are killed. Returns a Result with the worst exit code.

    torchrun: whether they see what torchrun would set; else it is as after plain `python`. env:
    changes to that. each: [flags, ...] of each rank, instead of args for all. mother: the Nursery;
    default the tests' own. rounding: the seed of other roundings (figures/bench/rounding.py), by
    default this machine's own.
    """
    STARTED.add(Path(path).stem)
    if rounding is not None:
        path, args = FIGURES / "bench" / "rounding.py", [rounding, path, *args]
    mother, job, environments = mother or nursery(), uuid.uuid4().hex, []
    port = free_port()
    for rank in range(nproc):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = {name: str(value) for name, value in own.items()} if torchrun else {}
        environments.append(environment(job, own | (env or {})))
    words = [list(map(str, each[rank] if each else args)) for rank in range(nproc)]
    begin = time.monotonic()
    ended = mother.run(
        path=str(path), words=words, environments=environments, folder=str(folder), timeout=timeout
    )
    out, err = (
        "".join((folder / f"rank{r}.{kind}").read_text() for r in range(nproc))
        for kind in ("out", "err")
    )
    failed = [code for code in ended["codes"] if code]
    code = failed[0] if failed else 0
    if ended["late"] and not failed:
        code, err = 1, err + f"\nTIMEOUT: killed after {timeout} s"
    return Result(code, out, err, time.monotonic() - begin, ended["survivors"])
