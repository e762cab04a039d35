"""Memory that the ranks of one machine share, and how they meet in it.

Each rank has a slot in each of two halves of the memory, and a counter. In its n-th step a rank
writes into its slot of half n % 2, sets its counter to n, waits until no counter is below n, and
reads the others' slots. No second barrier has to tell that all have read: a half is written again
in step n + 2, which a rank begins when all counters are at n + 1; and each rank sets its counter
to n + 1 when it has read what it wants of step n.

For messages, each pair of sender and receiver has two more slots, which the receiver reads in
place, and two counters: of the slots filled, and of those emptied.

From the counters a waiting rank sees who has not come. Beside its counter each rank notes its
process and when it last waited: so a rank that hangs, or has ended, is named without asking anyone.

On x86 other processors see stores in the order in which they were made, the data before the
counter. Elsewhere they would need a fence between them, and Python has none: gloo is used there.
"""

import math
import mmap
import os
import platform
import time
import uuid
from collections import deque
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from threading import Lock

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

SLOT = 2**22  # bytes that a rank can give in one step
LINE = 8  # words of 8 bytes in a cache line: no two ranks' counters are in one
SAID, BEAT, PROCESS = 1, 3, 4  # places in a rank's line, after its counter
TAG = 3  # place in a pair's line; SAID and TAG have two words each, for two steps in turns
SPIN_S, YIELD_S, LOOK_S = 2e-4, 1e-3, 0.1  # see `until`
RECENT_S = 2  # a rank that noted within so many seconds that it waits counts as waiting
OPERATIONS = ["barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
WAITING = []  # memories with messages on their way: these go on while a rank waits for anything
GOING_ON = Lock()  # held by the thread that moves the messages on


class Missing(dist.DistBackendError):
    """Raised where ranks wait for others that do not come, or have ended.

    late: the missing ranks. waiting: those that wait for them; empty if a rank has ended, which
    the first rank that looks reports, without knowing who else waits. Both are global ranks.
    """

    def __init__(self, said, late, waiting=()):
        super().__init__(said)
        self.late, self.waiting = late, waiting


class SharedMemory:
    """What the ranks of a process group have in common.

    rank, size: of that group. timeout: how long a rank waits for another, a timedelta. members():
    the ranks' numbers in the job, once all are ready.
    """

    def __init__(self, store, rank, size, timeout, members):
        self.me, self.ranks, self.steps = rank, range(size), 0
        self.timeout_s, self.members = timeout.total_seconds(), members
        self.crowded = int(os.environ.get("LOCAL_WORLD_SIZE", size)) > CORES
        self.queues = {}  # messages on their way, by pair and direction
        # Counted in words: a line for each rank, two for each pair, then the tables of all-to-alls.
        self.pairs, self.given = LINE * size, LINE * (size + 2 * size * size)
        words = LINE * math.ceil((self.given + 2 * size * size) / LINE)
        sizes = [8 * words, 2 * size * SLOT, 2 * size * size * SLOT]
        memory, self.name, file = common(store, rank, sum(sizes), timeout)
        self.words = memoryview(memory)[: sizes[0]].cast("q")
        if rank == 0:  # when all have come it removes its key: the next group must not find it
            self.wait_for_processes(self.ranks[1:])
            store.delete_key("memory")
        self.words[LINE * rank + PROCESS] = os.getpid()
        self.wait_for_processes([0])
        os.close(file)
        _, slots, boxes = torch.frombuffer(memory, dtype=torch.uint8).split(sizes)
        self.slots = [half.split(SLOT) for half in slots.chunk(2)]
        self.boxes = boxes.view(size, size, 2, SLOT)
        self.views = {}

    def wait_for_processes(self, ranks):
        def late():
            return [rank for rank in ranks if not self.words[LINE * rank + PROCESS]]

        def look(waited):
            if waited > self.timeout_s:
                raise dist.DistBackendError(f"rank {in_words(late())} of a new group did not come")

        self.until(lambda: not late(), look)

    # ------------------------------------------------ all together

    def halves(self, like):
        """Return the slots of both halves, or as much of each as flat `like` has, in its dtype."""
        if like is None:
            return self.slots
        key = like.dtype, like.nbytes
        if key not in self.views:  # to make them takes longer than a small sum
            if len(self.views) > 99:
                self.views.clear()
            self.views[key] = [[beginning(slot, like) for slot in half] for half in self.slots]
        return self.views[key]

    def own_slot(self, like=None):
        """Return the slot that this rank writes into in its next step; like: see `halves`."""
        return self.halves(like)[(self.steps + 1) % 2][self.me]

    def meet(self, operation, nbytes=0, like=None, how=0):
        """Take a step, after this rank's slot was written. Return all ranks' slots.

        They may be read until this rank's next step. operation, nbytes, how (a number below 2**16):
        what this rank believes that all ranks do. Raises RuntimeError where another does something
        else, and `Missing`. like: see `halves`.
        """
        self.steps += 1
        words, n = self.words, self.steps
        said = OPERATIONS.index(operation) << 56 | how << 40 | nbytes
        words[LINE * self.me + SAID + n % 2] = said
        words[LINE * self.me] = n
        for rank in self.ranks:
            if words[LINE * rank] < n:
                self.until(
                    lambda counter=LINE * rank: words[counter] >= n,
                    partial(self.look_for, lambda r: words[LINE * r] < n),
                )
            other = words[LINE * rank + SAID + n % 2]
            if other != said:
                theirs = f"{OPERATIONS[other >> 56]} of {other & 2**40 - 1}"
                if theirs == f"{operation} of {nbytes}":
                    theirs += ", with another operator, dtype or root"
                raise RuntimeError(
                    f"rank {self.me} is in {operation} of {nbytes} bytes, but rank "
                    f"{rank} of this group in {theirs}"
                )
        return self.halves(like)[n % 2]

    def agree_on(self, sent, expected, rank):
        if sent != expected:
            raise RuntimeError(
                f"rank {rank} of this group sends {sent} bytes to rank {self.me}, "
                f"which expects {expected}"
            )

    def table(self):
        """Return where the next step's table begins, of what each gives to each: (P, P) words."""
        return self.given + (self.steps + 1) % 2 * len(self.ranks) ** 2

    # ------------------------------------------------ waiting

    def until(self, condition, look):
        """Wait for condition(): at first spinning, then yielding the core to others, then asleep.

        look(seconds waited): called now and then; raises what ends the wait. No rank spins where
        there are more ranks than cores: it would keep the others from coming.
        """
        begin, looked = time.monotonic(), 0.0
        while not condition():
            for memory in list(WAITING):
                memory.advance()
            waited = time.monotonic() - begin
            if waited < SPIN_S and not self.crowded:
                continue
            if waited < YIELD_S:
                os.sched_yield()
                continue
            if waited - looked > LOOK_S:
                looked = waited
                try:
                    look(waited)
                except RuntimeError:
                    if not condition():  # else the other has come in this very moment, and ended
                        raise
            time.sleep(min(max(waited / 100, 5e-5), 1e-3))

    def look_for(self, is_late, waited):
        """Note that this rank waits. Raise `Missing` if it waits for one that ended, or too long.

        is_late(rank): whether this rank waits for that one. waited: for how many seconds so far.
        """
        late = [rank for rank in self.ranks if is_late(rank)]
        world = getattr(dist.group.WORLD, "memory", self)
        if world is not self:
            late = [self.members()[rank] for rank in late]
        words, now, number = world.words, time.monotonic_ns(), world.members()
        words[LINE * world.me + BEAT] = now
        ended = [rank for rank in late if has_ended(words[LINE * rank + PROCESS])]
        if ended:
            ended = [number[rank] for rank in ended]
            raise Missing(f"rank {in_words(ended)} has ended", ended)
        if waited > self.timeout_s:
            recent = now - 1e9 * RECENT_S
            waiting = [number[r] for r in world.ranks if words[LINE * r + BEAT] > recent]
            # Those late may themselves wait for others, in other groups.
            hanging = [rank for rank in number if rank not in waiting]
            late = [number[rank] for rank in late if number[rank] in hanging] or hanging
            if not late:
                raise RuntimeError(
                    "all ranks wait, each for something else (here a collective is finished "
                    "when its call returns, also with async_op)"
                )
            said = f"rank {in_words(late)} did not come, in {self.timeout_s:g} s, to what rank"
            raise Missing(f"{said} {in_words(waiting)} waited for", late, waiting)

    # ------------------------------------------------ from one to another

    def begin(self, key, steps):
        """Queue a message, and return its `Transfer`.

        The messages of a pair go in order: in each queue only the first is on its way. key: of the
        queue, such as ("to", rank). steps: the generator of a `Transfer`.
        """
        transfer = Transfer(self, steps, key[1])
        with GOING_ON:
            self.queues.setdefault(key, deque()).append(transfer)
            if self not in WAITING:
                WAITING.append(self)
        self.advance()
        return transfer

    @torch.inference_mode()
    def advance(self):
        """Move all messages on, as far as they come without waiting, unless another thread does."""
        if not GOING_ON.acquire(blocking=False):
            return
        try:
            for key, queue in list(self.queues.items()):
                while queue and queue[0].go_on():
                    queue.popleft()
                if not queue:
                    del self.queues[key]
            if not self.queues and self in WAITING:
                WAITING.remove(self)
        finally:
            GOING_ON.release()

    def box(self, src, dst):
        """Return a pair's two slots, and the places of its counters of slots filled and emptied."""
        line = self.pairs + 2 * LINE * (src * len(self.ranks) + dst)
        return self.boxes[src, dst], line, line + LINE

    def push(self, data, dst, tag):
        box, filled, emptied = self.box(self.me, dst)
        for piece in data.split(SLOT):
            number = self.words[filled] + 1
            while number - self.words[emptied] > 2:
                yield
            box[number % 2][: len(piece)].copy_(piece)
            self.words[filled + SAID + number % 2] = data.numel()
            self.words[filled + TAG + number % 2] = tag
            self.words[filled] = number

    def pull(self, data, src, tag):
        box, filled, emptied = self.box(src, self.me)
        for piece in data.split(SLOT):
            number = self.words[emptied] + 1
            while self.words[filled] < number:
                yield
            self.agree_on(self.words[filled + SAID + number % 2], data.numel(), src)
            if (other := self.words[filled + TAG + number % 2]) != tag:
                raise RuntimeError(
                    f"rank {src} of this group sent a message of tag {other} first, "
                    f"not of {tag}: they come in order here"
                )
            piece.copy_(box[number % 2][: len(piece)])
            self.words[emptied] = number


def beginning(memory, like):
    """Return the first bytes of `memory`, as a tensor of the size and dtype of flat `like`."""
    return memory[: like.nbytes].view(like.dtype)


class Transfer(Work):
    """A message on its way: a generator, which yields where it has to wait for the other rank."""

    def __init__(self, memory, steps, other):
        super().__init__()
        self.memory, self.steps, self.other = memory, steps, other
        self.over, self.error = False, None

    def go_on(self):
        """Go on. Return whether the transfer is over; if by an error, `wait` raises it."""
        try:
            self.over = next(self.steps, self) is self
        except RuntimeError as error:
            self.over, self.error = True, error
        return self.over

    def is_completed(self):
        self.memory.advance()
        if self.error:
            raise self.error
        return self.over

    def wait(self, timeout=None):
        look = partial(self.memory.look_for, lambda rank: rank == self.other)
        self.memory.until(self.is_completed, look)
        return True


# ---------------------------------------------------------------- machine and processes


@cache  # each new group asks
def neighbourhood():
    """Return a text that is the same on ranks that can share memory; None if this one cannot."""
    if platform.machine() != "x86_64" or not hasattr(os, "memfd_create"):
        return None
    with suppress(OSError):  # /proc may be closed
        file = os.memfd_create("probe")
        for number in (file, os.open(f"/proc/{os.getpid()}/fd/{file}", os.O_RDWR)):
            os.close(number)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        node = os.environ.get("GROUP_RANK", "0")  # which of several torchruns
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()} {node}"
    return None


def common(store, rank, nbytes, timeout):
    """Return memory of zeros that rank 0 makes and all ranks of a group see; its name; its file.

    The file has no name in a folder: it goes when the last process that has it ends, however it
    ends, and the size of /dev/shm does not bound it. Only pages that were used take memory. The
    other ranks open rank 0's file: it must stay open until they have. timeout: how long they wait
    for it, a timedelta.
    """
    if (place := neighbourhood()) is None:
        raise RuntimeError(
            "no memory to share here (not Linux on x86-64, or /proc is closed): use gloo"
        )
    if rank == 0:
        file = os.memfd_create("parallel-llama")
        os.ftruncate(file, nbytes)
        name = f"{place} {uuid.uuid4().hex} /proc/{os.getpid()}/fd/{file}"
        store.set("memory", name)
    else:
        store.wait(["memory"], timeout)  # the store's own may be shorter
        name = store.get("memory").decode()
        theirs, _, path = name.rsplit(" ", 2)
        if theirs != place:
            raise RuntimeError(f"rank {rank} shares no memory with rank 0 of its group: use gloo")
        file = os.open(path, os.O_RDWR)
    return mmap.mmap(file, nbytes), name, file


def in_words(ranks):
    return ", ".join(map(str, ranks))


def has_ended(process):
    """Return whether the process of this number has ended; its parent need not know yet."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
