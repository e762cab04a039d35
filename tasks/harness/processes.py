"""Ranks that a script starts itself, as `torch.multiprocessing.Process`es of this machine.

Each gets the variables that torchrun would set, so that `job.start` works in it as under torchrun.
The script's process holds the store at which the ranks meet, and ends all of them when one fails.
"""

import os
import signal
import sys
from contextlib import contextmanager
from multiprocessing.connection import wait

import torch.distributed as dist

from harness.environment import fail, when_stopped

ADDRESS, PORT = "localhost", 11868  # by default, as in the neighbour course
TRIED = 100  # how many ports are tried, from PORT on
PATIENCE_S = 5  # seconds between asking a process to stop and killing it


def open_store():
    """Return the store at which the processes meet, and a note if its port is not the expected one.

    MASTER_PORT is obeyed, and `fail` ends the script if that port is taken. Without it the store is
    at PORT, or at the next port that is free, so that two jobs can run side by side.
    """
    wanted = os.environ.get("MASTER_PORT")
    if wanted is not None and not (wanted.isdigit() and 0 < int(wanted) < 2**16):
        fail(f"MASTER_PORT={wanted}: no such port")
    first = int(wanted or PORT)
    for port in range(first, first + (1 if wanted else TRIED)):
        try:
            store = dist.TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False)
        except dist.DistNetworkError as error:
            if "address already in use" not in str(error).lower():
                fail(f"{ADDRESS}:{port}: no store there ({error})")
        else:
            taken = f"port {first} is taken: the processes meet at port {port}"
            return store, taken if port != first else None
    fail(
        f"port {port} is taken"
        if wanted
        else f"the ports from {first} to {port} are taken: set MASTER_PORT to one that is free"
    )


def variables(rank, world_size, port):
    """Return {name: value} of what torchrun would set for this rank, on one machine."""
    values = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0,
        "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": ADDRESS, "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": f"processes of {os.getpid()}", "TORCHELASTIC_RESTART_COUNT": 0,
        # The store is in this process: rank 0 connects to it, as the others do.
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


@contextmanager
def environment_of(values):
    """Add values to the environment, as a context; processes started in it inherit them."""
    before = os.environ.copy()
    os.environ |= values
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


@contextmanager
def ended_together(processes):
    """End the processes when this context ends, in whatever way: ask each to stop, then kill it.

    A signal that would stop this process raises SystemExit in it, and so ends them, too.
    """

    def handler(number, frame):
        sys.exit(128 + number)

    when_stopped(handler)
    try:
        yield
    finally:
        when_stopped(signal.SIG_IGN)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(PATIENCE_S)
            process.kill()
            process.join()
        when_stopped(signal.SIG_DFL)


def wait_for_all(processes):
    """Wait until all processes have ended, or one has failed. Return its exit code, else 0.

    processes: by rank. One error line names who failed and how. A process that has ended with code
    2 has written its error line itself.
    """
    running = list(processes)
    while running:
        wait([process.sentinel for process in running])
        # Asked once each: one may end at any moment.
        codes = [(process.exitcode, process) for process in running]
        failed = [(code, process) for code, process in codes if code]
        if failed:
            return report(processes, *min(failed, key=lambda pair: pair[0]))
        running = [process for code, process in codes if code is None]
    return 0


def report(processes, code, failed):
    """Print how a process ended, unless it said so (code 2). Return its code, 1 for a signal."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    if code != 2:
        print(
            f"error: process {processes.index(failed)} of {len(processes)} ({failed.pid}) {how}; "
            "the others are ended, too",
            file=sys.stderr,
            flush=True,
        )
    return max(code, 1)
