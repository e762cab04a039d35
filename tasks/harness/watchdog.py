"""Noticing who is missing. A rank that hangs closes no connection, nor does a machine that is lost.

torchrun sees only that a process of its own machine ends, and signals the others. On a GPU these
may wait in C, where Python runs no signal's handler. Two threads on each rank see the rest:

* torchrun, or a rank of this machine, is gone: this one ends, too.
* A rank does not come to a collective (it sleeps, is stopped, or computes). Each process group
  counts the collectives that a rank has begun. A rank whose counts stand still puts them into the
  ranks' store. After --timeout seconds, a rank that has begun more than another is waiting for it,
  and names it. (The backend's own timeout, which names nobody, is later. In shared memory a rank
  sees by itself who is late, and raises `Missing`.)
* A machine is cut off: between several nodes, one rank of each tells the others every second that
  it is alive. Silence for NODE_TIMEOUT seconds (the environment's; default 15) ends the job.
"""

import datetime
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress

import psutil
import torch.distributed as dist

from harness.environment import end_sibling, when_stopped
from shared_memory.slots import Missing, in_words

STOPPED = []  # when this process was asked to stop
SPARE_S = 30  # seconds by which the backend's timeout is later than --timeout

# What gloo, NCCL, shared memory's group and the ranks' store say of a rank that has ended.
ENDED = (
    r"[Cc]onnection (closed|reset) by (remote )?peer|[Bb]roken pipe|Socket closed"
    r"|remote process exited|^rank [\d, ]+ has ended$"
)


def catch_signals():
    """Return a list that gets an entry when this process is asked to stop.

    Asked a second time, the process ends. (Within a second, two signals count as one: Slurm signals
    torchrun and its ranks, and torchrun signals its ranks, too.)
    """

    def handler(number, frame):
        if STOPPED and time.monotonic() - STOPPED[0] > 1:
            os._exit(128 + number)
        STOPPED.append(time.monotonic())

    when_stopped(handler)
    return STOPPED


class Watch:
    """Watches over the job on each rank, from start to end. store: the one that all ranks share."""

    def __init__(self, store, rank, world_size, timeout_s):
        self.store, self.rank, self.world_size = store, rank, world_size
        self.timeout_s, self.over = timeout_s, threading.Event()
        self.node, nodes = (os.environ.get(n, "0") for n in ("GROUP_RANK", "GROUP_WORLD_SIZE"))
        # With several nodes, one rank of each watches all nodes.
        among = int(nodes) > 1 and os.environ.get("LOCAL_RANK") == "0"
        self.nodes = range(int(nodes)) if among else ()
        self.silence_s = float(os.environ.get("NODE_TIMEOUT", "15"))
        self.torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.processes = {}  # {rank: (its node, its process)}
        self.counts, self.moved = {}, time.monotonic()  # when the counts last changed
        self.contact = time.monotonic()  # when the store last answered
        if world_size > 1:
            for loop in (self.look, self.report):
                threading.Thread(target=loop, daemon=True).start()

    def look(self):
        """Notice processes that are gone and a store that is silent, until all is over.

        It asks no other rank, so it never waits for one.
        """
        gone = 0
        while not self.over.wait(1):
            now, counts = time.monotonic(), collectives_begun()
            if counts != self.counts:
                self.counts, self.moved = counts, now
            if self.torchrun:
                # At the end, when all go, one may be gone a moment before this one.
                gone = 0 if all(map(psutil.pid_exists, self.here())) else gone + 1
                if gone > 1 or os.getppid() != self.torchrun:
                    os._exit(1)  # the one that is gone has said why, or torchrun does
            silent_s = now - self.contact
            if self.nodes and silent_s > self.silence_s + 2:
                self.lost(f"the node of rank 0 ({os.environ['MASTER_ADDR']})", cut_off=True)
            # If rank 0 holds the store, and is stopped, the store does not answer.
            late_s = self.timeout_s + 0.5 * min(self.rank, 10)  # one rank speaks first
            if now - self.moved > late_s and silent_s > 5:
                if self.rank:
                    end_sibling(0)  # torchrun would wait half a minute for one that is stopped
                end(f"rank 0 is late, and its store at {os.environ['MASTER_ADDR']} does not answer")

    def report(self):
        """Tell the store what this rank has begun, and hear of the others, until all is over."""
        # A connection of this thread's own: on the other one, a request may be blocking.
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        patience = datetime.timedelta(seconds=self.silence_s)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        told, heard, suspects = None, {}, None
        with suppress(dist.DistError):  # if the store is gone: `look` notices
            store = dist.TCPStore(*address, is_master=False, timeout=patience)
            store = dist.PrefixStore(f"watch/{attempt}", store)
            store.set(f"process/{self.rank}", f"{self.node} {os.getpid()}")
            processes = {}
            for rank in range(self.world_size):
                store.wait([f"process/{rank}"], datetime.timedelta(seconds=self.timeout_s))
                node, process = store.get(f"process/{rank}").decode().split()
                processes[rank] = node, int(process)
            self.processes = processes
            while not self.over.wait(1):
                for node in self.nodes:
                    own = str(node) == self.node
                    count, now = store.add(f"alive/{node}", int(own)), time.monotonic()
                    before, since = heard.setdefault(node, (count, now))
                    heard[node] = (count, now if count > before else since)
                    if now - heard[node][1] > self.silence_s:
                        self.lost(f"node {node}")
                still_s = time.monotonic() - self.moved
                if still_s > 1 and told != self.counts:  # a rank at work sends nothing
                    told = self.counts
                    store.set(f"begun/{self.rank}", json.dumps(told))
                if still_s > self.timeout_s:
                    before, suspects = suspects, self.late(store)
                    if suspects == before:  # seen twice: they have not come meanwhile
                        frame = sys._current_frames()[threading.main_thread().ident]
                        self.blame(*suspects, traceback.extract_stack(frame))
                self.contact = time.monotonic()

    def here(self, ranks=None):
        """Return the processes of this machine's ranks, or of those among `ranks`."""
        return [
            process
            for rank, (node, process) in self.processes.items()
            if node == self.node and (ranks is None or rank in ranks)
        ]

    # ------------------------------------------------ several nodes

    def lost(self, what, cut_off=False):
        """End this node's part of the job, since another node is silent. what: that node, in words.

        cut_off: end torchrun, too, which would wait for its store.
        """
        if not self.over.is_set():
            others = self.here()
            if cut_off and self.torchrun:
                others.append(self.torchrun)
            end(
                f"no sign of life from {what} for {self.silence_s:g} s: it, or the network between,"
                f" is gone; this is node {self.node}, which stops",
                others,
            )

    def wait_for_all(self, what):
        """Wait until all ranks have come here, however long it takes.

        what: a name that is used only once.
        """
        keys = [f"{what}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], "")
        while not self.store.check(keys):
            time.sleep(0.1)

    def stop(self):
        """End the watch. All ranks call it together, at the end of their work."""
        dist.barrier()
        self.over.set()

    # ------------------------------------------------ a rank that does not come

    def late(self, store):
        """Return (ranks that do not wait, ranks that wait), by what all have told the store."""
        begun = {}
        for rank in range(self.world_size):
            key = f"begun/{rank}"
            begun[rank] = json.loads(store.get(key)) if store.check([key]) else {}

        def waits(rank):
            return any(
                begun[other].get(group, (0,))[0] < count
                for group, (count, members) in begun[rank].items()
                for other in members
            )

        waiting = [rank for rank in begun if waits(rank)]
        return [rank for rank in begun if rank not in waiting], waiting

    def blame(self, late, waiting, frames):
        """End the job with a line that names the late ranks, if this rank waits for them.

        frames: this rank's stack.
        """
        if not late or self.rank not in waiting:
            return  # all wait, each for something else: a bug, with its traceback later
        if self.rank != waiting[0]:
            time.sleep(10)  # torchrun ends this one meanwhile
        end(
            f"rank {in_words(late)} did not come, in {self.timeout_s:g} s, to what rank "
            f"{in_words(waiting)} waited for at {place(frames)}:"
            " it hangs, or needs a longer --timeout",
            self.here(late),
        )

    def explain(self, error):
        """If a collective failed because a rank is late or gone, say so and end the job; or return.

        For a rank that is gone, the error itself is printed first: what is concluded may be wrong.
        """
        if isinstance(error, Missing) and error.waiting:
            late, waiting = error.late, error.waiting
            if time.monotonic() - self.contact < 5:  # the store answers
                more = self.late(self.store)  # a late rank may be waiting, but not in shared memory
                if self.rank in more[1]:
                    late = [rank for rank in late if rank in more[0]] or more[0]
            self.blame(late, waiting, traceback.extract_tb(error.__traceback__))
        if self.world_size == 1 or not speaks_of_an_end(error):
            return
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(f"rank {self.rank}: {said:.500}", file=sys.stderr, flush=True)
        when_stopped(signal.SIG_DFL)
        with suppress(dist.DistError):  # if the store went with rank 0: on to the last line
            self.store.set(f"waited/{self.rank}", "")
            # The others give up now, too; or one has ended and said why, and torchrun, which sees
            # it, ends this one meanwhile.
            time.sleep(3)
            if STOPPED:  # all were asked to stop, and the missing ranks did so at once
                os._exit(130)
            everyone = range(self.world_size)
            waited = [rank for rank in everyone if self.store.check([f"waited/{rank}"])]
            known = isinstance(error, Missing)
            missing = error.late if known else [rank for rank in everyone if rank not in waited]
            if not missing:
                return  # a bug, with its traceback
            if self.rank != waited[0]:
                time.sleep(10)
            end(
                f"rank {in_words(missing)} ended, and did not come to what rank "
                f"{in_words(waited)} waited for at "
                f"{place(traceback.extract_tb(error.__traceback__))}"
            )
        time.sleep(3 + 0.5 * min(self.rank, 10))
        end("rank 0 ended, and the ranks' store with it")


def collectives_begun():
    """Return {process group: (collectives that this rank has begun, the group's ranks)}."""
    if not dist.is_initialized():
        return {}
    counts = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError, KeyError):  # it is being made
            count = group._get_sequence_number_for_group()
            counts[group.group_name] = [count, dist.get_process_group_ranks(group)]
    return counts


def speaks_of_an_end(error):
    """Return whether an exception says that another rank has ended.

    Only gloo's, NCCL's, the store's and shared memory's words are believed: other errors speak of
    peers, too (CUDA's "peer access is not supported").
    """
    # NCCL's errors and the store's have types.
    known = "/gloo/transport/" in str(error) or isinstance(error, dist.DistError)
    return bool(known and re.search(ENDED, str(error)))


def place(frames):
    """Return, in words, a stack's innermost lines: in the script, and in its whole folder."""
    script = os.path.abspath(sys.argv[0])
    frames = [frame for frame in frames if os.path.dirname(script) in frame.filename]
    shown = [frame for frame in frames if frame.filename == script][-1:] + frames[-1:]
    words = [f"{os.path.basename(f.filename)}:{f.lineno} ({f.name})" for f in shown]
    return " > ".join(dict.fromkeys(words))


def end(message, others=()):
    """Print one error line and end this process, from whatever thread; kill the others, too."""
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    for process in others:
        if process != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    os._exit(1)
