"""Noticing who is missing. A rank that hangs closes no connection, nor does a machine that is lost.

What torchrun sees is a process of its own machine that ends. Left are two cases, which would else
take the collectives' whole timeout, or not end, or end without a name:

* A rank does not come to a collective (it sleeps, is stopped, or computes): those that waited
  --timeout seconds say so in the ranks' store, and who did not say so is late.
* A machine is cut off: between several nodes, one rank of each tells the others every second that
  it is alive. Silence for NODE_TIMEOUT seconds (the environment's; default 15) ends the job.
"""

import datetime
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

from starting import end_sibling

STOPPED = []  # when this process was asked to stop

# What gloo, NCCL and the ranks' store say of a rank that does not come in time, or has ended.
LATE = (
    r"Timed out waiting \d+ms for (send|recv) operation|Application timeout caused pair closure"
    r"|timed out connecting|Read timeout|collective operation timeout|wait timeout after \d+"
    r"|[Ss]ocket.* timed out after|Socket Timeout"
)
ENDED = (
    r"[Cc]onnection (closed|reset) by (remote )?peer|[Bb]roken pipe|Socket closed"
    r"|remote process exited"
)


def catch_signals():
    """A list that gets an entry when this process is asked to stop; the second time it does.

    (Within a second it is the same time: Slurm signals torchrun and its ranks, and torchrun too.)
    """

    torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def handler(number, frame):
        killed = torchrun not in (None, os.getppid())  # nobody is left to end a step that is long
        if killed or (STOPPED and time.monotonic() - STOPPED[0] > 1):
            os._exit(128 + number)
        STOPPED.append(time.monotonic())

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)
    return STOPPED


class Watch:
    """One for each rank, from its start to its end. store: the ranks' own."""

    def __init__(self, store, rank, world_size, timeout_s):
        self.store, self.rank, self.world_size = store, rank, world_size
        self.timeout_s, self.over = timeout_s, threading.Event()
        self.node, nodes = (os.environ.get(n, "0") for n in ("GROUP_RANK", "GROUP_WORLD_SIZE"))
        store.set(f"process/{rank}", f"{self.node} {os.getpid()}")
        if int(nodes) > 1 and os.environ.get("LOCAL_RANK") == "0":
            self.silence_s = float(os.environ.get("NODE_TIMEOUT", "15"))
            self.contact = time.monotonic()
            for loop in (self.tell, self.listen):
                threading.Thread(target=loop, args=(int(nodes),), daemon=True).start()

    # ------------------------------------------------ several nodes

    def tell(self, nodes):
        """Say that this node is alive, and hear when others last were, until all is over."""
        # A connection of its own: another's may be waiting in the middle of a question.
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        patience = datetime.timedelta(seconds=self.silence_s)
        heard = {}
        with suppress(dist.DistError):  # if the store is gone: `listen` notices
            store = dist.TCPStore(*place, is_master=False, timeout=patience)
            while not self.over.wait(1):
                store.add(f"alive/{attempt}/{self.node}", 1)
                for node in range(nodes):
                    count, now = store.add(f"alive/{attempt}/{node}", 0), time.monotonic()
                    before, since = heard.setdefault(node, (count, now))
                    heard[node] = (count, now if count > before else since)
                    if now - heard[node][1] > self.silence_s:
                        self.lost(f"node {node}")
                self.contact = time.monotonic()

    def listen(self, nodes):
        """Notice when `tell` no longer gets an answer: it may hang, or have failed."""
        while not self.over.wait(1):
            if time.monotonic() - self.contact > self.silence_s + 2:
                self.lost(f"the node of rank 0 ({os.environ['MASTER_ADDR']})", cut_off=True)

    def lost(self, what, cut_off=False):
        """End this node's part of the job. torchrun would wait for its store, too, if cut off."""
        if not self.over.is_set():
            others = []
            if cut_off and "TORCHELASTIC_RUN_ID" in os.environ:
                with suppress(psutil.Error):
                    agent = psutil.Process(os.getppid())
                    others = [*(rank.pid for rank in agent.children()), agent.pid]
            end(f"no sign of life from {what} for {self.silence_s:g} s: it, or the network between,"
                f" is gone; this is node {self.node}, which stops", others)  # fmt: skip

    def wait_for_all(self, what):
        """Wait until all ranks have come here, however long it takes. what: for once."""
        keys = [f"{what}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], "")
        while not self.store.check(keys):
            time.sleep(0.1)

    def stop(self):
        """Called by all ranks together, at the end of their work."""
        dist.barrier()
        self.over.set()

    # ------------------------------------------------ a rank that does not come

    def explain(self, error):
        """Where a collective failed because a rank is late or gone, say who; else return.

        The error itself is said first, in a line: what is made of it might be wrong.
        """
        kind = missing_rank(error)
        if self.world_size == 1 or not kind:
            return
        late = kind == "late"
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(f"rank {self.rank}: {said:.500}", file=sys.stderr, flush=True)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        everyone = range(self.world_size)
        # Where rank 0 holds the store and is stopped or gone, questions are not answered.
        lost = f"rank 0 does not come, and its store at {os.environ['MASTER_ADDR']} does not answer"

        def without_store():
            with suppress(psutil.Error):
                if self.rank:
                    end_sibling(0)  # torchrun would wait half a minute for one that is stopped
            end(lost)

        pause = 2 if late else 3
        patience = pause + 5 + 0.5 * min(self.rank, 10)  # one line, of one
        timer = threading.Timer(patience, without_store)
        timer.daemon = True
        timer.start()
        try:
            self.store.set(f"waited/{self.rank}", "")
            # The others give up now, too; or one has ended and said why, and torchrun, which sees
            # it, ends this one meanwhile.
            time.sleep(pause)
            waited = [rank for rank in everyone if self.store.check([f"waited/{rank}"])]
            missing = [rank for rank in everyone if rank not in waited]
            if STOPPED:  # all were asked to, and the missing did so at once
                os._exit(130)
            timer.cancel()
            if not missing:
                return  # all wait, each for something else: a bug, with its traceback
            if self.rank != waited[0]:
                time.sleep(10)
            for rank in missing:  # torchrun would wait half a minute for one that is stopped
                node, process = self.store.get(f"process/{rank}").decode().split()
                if node == self.node:
                    kill(int(process))
        except dist.DistError:
            time.sleep(3)
            without_store()
        folder = os.path.dirname(os.path.abspath(sys.argv[0]))
        frames = [f for f in traceback.extract_tb(error.__traceback__) if folder in f.filename]
        place = [f"{os.path.basename(f.filename)}:{f.lineno} ({f.name})" for f in frames[:2]]
        what = f"did not come, in {self.timeout_s:g} s," if late else "ended, and did not come"
        end(f"rank {', '.join(map(str, missing))} {what} to what rank "
            f"{', '.join(map(str, waited))} waited for at {' > '.join(place)}"
            + (": it hangs, or needs a longer --timeout" if late else ""))  # fmt: skip


def missing_rank(error):
    """Whether an exception says of another rank that it is "late" or has "ended", else None.

    Only in gloo's own words, NCCL's, or the store's: other errors speak of peers and timeouts, too
    (CUDA's "peer access is not supported", "the launch timed out").
    """
    said = str(error)
    gloos = "/gloo/transport/" in said or said.startswith("Application timeout caused pair closure")
    if gloos or isinstance(error, dist.DistError):  # NCCL's and the store's have types
        for kind, words in ("late", LATE), ("ended", ENDED):
            if re.search(words, said):
                return kind
    return None


def kill(process):
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def end(message, others=()):
    """One line, and the end, from whatever thread; of other processes, too."""
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    for process in others:
        if process != os.getpid():
            kill(process)
    os._exit(1)
