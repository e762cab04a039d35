"""A process group for ranks of one machine: they meet in shared memory, not over sockets.

Each rank has a slot in each of two halves of the memory, and a counter. In its n-th step a rank
writes into its slot of half n % 2, sets its counter to n, waits until no rank's is below n, and
reads the others' slots. No second barrier has to tell that all have read: a half is written again
in step n + 2, which a rank begins when all counters are at n + 1; and each rank sets its own to
n + 1 when it has read what it wants of step n.

A collective is a few such steps, of a long message a few for each piece. Sums add in the order of
the ranks, so that all get the same bits, each time; half precision in float32, rounded once. A
message from one rank to another has two slots of its own, which its receiver reads in place, with a
counter of those filled and one of those emptied.

The counters tell a rank that waits who has not come, and each rank has left there which process it
is, and when it last waited: so one that hangs, or has ended, is named without asking anyone.

On x86 other processors see stores in the order in which they were made, the data before the
counter. Elsewhere a fence would have to be between them, and Python has none: gloo is used there.
"""

import math
import mmap
import os
import platform
import time
from collections import deque
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.autograd import profiler

from traffic import METERS, bytes_of

NAME = "shared_memory"
SLOT = 2**20  # bytes that a rank can give in one step
SMALL = 2**15  # of a sum of so many bytes each rank adds all, not a share, in one step, not two
LINE = 8  # words of 8 bytes in a cache line: no two ranks write into one
SAID, BEAT, PROCESS = 1, 3, 4  # what is in a rank's line behind its counter
TAG = 3  # and in a pair's, behind SAID; of these two there are two, of two steps in turns
SPIN_S, YIELD_S, LOOK_S = 2e-4, 1e-3, 0.1  # see `until`
REDUCE = [(dist.ReduceOp.SUM, torch.add), (dist.ReduceOp.PRODUCT, torch.mul),
          (dist.ReduceOp.MIN, torch.minimum), (dist.ReduceOp.MAX, torch.maximum)]  # fmt: skip
KINDS = ["barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
WAITING = []  # groups with messages on their way, which go on while a rank waits for anything


class Missing(dist.DistBackendError):
    """Ranks that others wait for. late, waiting: those; nobody is named as waiting for one that has
    ended, since that is seen by whoever looks first."""

    def __init__(self, said, late, waiting=()):
        super().__init__(said)
        self.late, self.waiting = late, waiting


class Done(dist._Work):
    """The work of a collective, which is over when the call returns."""

    def __init__(self, tensors):
        super().__init__()
        self.future = torch.futures.Future()
        self.future.set_result(tensors)

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True

    def get_future(self):
        return self.future


class Transfer(dist._Work):
    """A message on its way: a generator, which yields where it has to wait for the other rank."""

    def __init__(self, group, steps, other):
        super().__init__()
        self.group, self.steps, self.other, self.over = group, steps, other, False

    def is_completed(self):
        self.group.advance()
        return self.over

    def wait(self, timeout=None):
        self.group.until(self.is_completed, lambda: [self.other])
        return True


def recorded(collective):
    """A method that a profiler sees, as it sees other backends' collectives."""

    @wraps(collective)
    def method(self, *args, **kwargs):
        if not profiler._is_profiler_enabled:  # then it would cost as much as a small collective
            return collective(self, *args, **kwargs)
        with profiler.record_function(f"{NAME}::{collective.__name__}"):
            return collective(self, *args, **kwargs)

    return method


class SharedMemory(dist.ProcessGroup):
    """What is not overridden here goes to gloo, which the base class hands it to."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.me, self.ranks, self.steps, self.timeout = rank, range(size), 0, timeout
        self.crowded = int(os.environ.get("LOCAL_WORLD_SIZE", size)) > CORES
        self.queues = {}  # of messages on their way, by pair and direction
        # In words: a line for each rank, two for each pair, and what an all-to-all gives to whom.
        self.pairs, self.given = LINE * size, LINE * (size + 2 * size * size)
        words = LINE * math.ceil((self.given + 2 * size * size) / LINE)
        sizes = [8 * words, 2 * size * SLOT, 2 * size * size * SLOT]
        with common_memory(store, rank, size, sum(sizes)) as memory:
            self.words = memoryview(memory)[: sizes[0]].cast("q")
            self.words[LINE * rank + PROCESS] = os.getpid()
        _, slots, boxes = torch.frombuffer(memory, dtype=torch.uint8).split(sizes)
        self.slots = [half.split(SLOT) for half in slots.chunk(2)]
        self.boxes = boxes.view(size, size, 2, SLOT)

    def getBackendName(self):
        return NAME

    @property
    def pg_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self):
        return self.pg_name

    def _get_sequence_number_for_group(self):
        return self.steps

    def tell(self, name, tensors, pieces=None):
        """What PyTorch's operator of this name would have sent."""
        for meter in METERS:
            meter.count(name, tensors[0], bytes_of(self, name, tensors, pieces))

    # ------------------------------------------------ steps, and waiting

    def mine(self):
        """The slot that this rank writes into in its next step."""
        return self.slots[(self.steps + 1) % 2][self.me]

    def meet(self, kind, nbytes=0):
        """A step, after `mine` was written: all ranks' slots, until the next step.

        kind, nbytes: what this rank believes that all do. Raises RuntimeError where another does
        something else, and `Missing`.
        """
        self.steps += 1
        words, n = self.words, self.steps
        words[LINE * self.me + SAID + n % 2] = said = KINDS.index(kind) << 56 | nbytes
        words[LINE * self.me] = n
        for rank in self.ranks:
            if words[LINE * rank] < n:
                self.until(
                    lambda counter=LINE * rank: words[counter] >= n,
                    lambda: [other for other in self.ranks if words[LINE * other] < n],
                )
            other = words[LINE * rank + SAID + n % 2]
            if other != said:
                raise RuntimeError(
                    f"rank {self.me} is in {kind} of {nbytes} bytes, but rank {rank} of this group "
                    f"in {KINDS[other >> 56]} of {other & 2**56 - 1}"
                )
        return self.slots[n % 2]

    def until(self, condition, late):
        """Wait: at first in haste, then giving the core to others, then asleep.

        late(): the ranks that it is for. Where ranks are more than cores, haste would keep them.
        """
        begin, looked = time.monotonic(), 0.0
        while not condition():
            for group in list(WAITING):
                group.advance()
            waited = time.monotonic() - begin
            if waited < SPIN_S and not self.crowded:
                continue
            if waited < YIELD_S:
                os.sched_yield()
                continue
            if waited - looked > LOOK_S:
                looked = waited
                self.look_for(late(), waited)
            time.sleep(min(max(waited / 100, 5e-5), 1e-3))

    def look_for(self, late, waited):
        """Say that this rank waits. Raises `Missing` if one of those that it is for has ended, or
        if it has waited long enough."""
        world = dist.group.WORLD if isinstance(dist.group.WORLD, SharedMemory) else self
        if world is not self:
            late = [dist.get_process_group_ranks(self)[rank] for rank in late]
        words, now = world.words, time.monotonic_ns()
        words[LINE * world.me + BEAT] = now
        ended = [rank for rank in late if has_ended(words[LINE * rank + PROCESS])]
        if ended:
            raise Missing(f"rank {in_words(ended)} has ended", ended)
        limit = self.timeout.total_seconds()
        if waited > limit:
            waiting = [r for r in world.ranks if now - words[LINE * r + BEAT] < limit * 1e9 / 2]
            # Those late may themselves wait for others, in other groups.
            hanging = [rank for rank in world.ranks if rank not in waiting]
            late = [rank for rank in late if rank in hanging] or hanging
            if not late:
                raise RuntimeError(f"rank {world.me} and all others wait, each for something else")
            raise Missing(f"rank {in_words(late)} did not come, in {limit:g} s, to what rank "
                          f"{in_words(waiting)} waited for", late, waiting)  # fmt: skip

    # ------------------------------------------------ collectives

    @recorded
    def barrier(self, opts=None):
        self.meet("barrier")
        return Done([])

    @recorded
    def broadcast(self, tensors, opts):
        self.tell("c10d::broadcast_", tensors)
        for tensor in tensors:
            data = as_bytes(tensor)
            for piece in data.split(SLOT):
                if self.me == opts.rootRank:
                    self.mine()[: len(piece)].copy_(piece)
                slots = self.meet("broadcast", data.numel())
                if self.me != opts.rootRank:
                    piece.copy_(slots[opts.rootRank][: len(piece)])
            give_back(data, tensor)
        return Done(tensors)

    @recorded
    def allreduce(self, tensors, opts):
        self.tell("c10d::allreduce_", tensors)
        if (op := operator_of(opts)) is None:
            return self.gloo.allreduce(tensors, opts)
        for tensor in tensors:
            flat = flatten(tensor)
            for piece in flat.split(SLOT // flat.element_size()):
                self.reduce_piece(op, piece, flat.nbytes)
            give_back(flat, tensor)
        return Done(tensors)

    def reduce_piece(self, op, piece, nbytes):
        as_typed(self.mine(), piece).copy_(piece)
        parts = [as_typed(slot, piece) for slot in self.meet("all_reduce", nbytes)]
        if piece.nbytes <= SMALL:
            reduce_into(piece, op, parts)
            return
        P = len(parts)
        cuts = [rank * len(piece) // P for rank in range(1, P)]
        own = [part.tensor_split(cuts)[self.me] for part in parts]
        reduce_into(as_typed(self.mine(), piece).tensor_split(cuts)[self.me], op, own)
        sums = self.meet("all_reduce", nbytes)
        for rank, share in enumerate(piece.tensor_split(cuts)):
            share.copy_(as_typed(sums[rank], piece).tensor_split(cuts)[rank])

    @recorded
    def _allgather_base(self, output, tensor, opts=None):
        self.gather_into(output.view(-1).chunk(len(self.ranks)), tensor)
        return Done([output])

    @recorded
    def allgather(self, outputs, tensors, opts=None):
        for parts, tensor in zip(outputs, tensors, strict=True):
            flats = [flatten(part) for part in parts]
            self.gather_into(flats, tensor)
            for flat, part in zip(flats, parts, strict=True):
                give_back(flat, part)
        return Done(outputs)

    def gather_into(self, outputs, tensor):
        """outputs: flat, of this tensor's size, of each rank's."""
        self.tell("c10d::_allgather_base_", [tensor])
        flat = flatten(tensor)
        size = SLOT // flat.element_size()
        for piece, *parts in zip(flat.split(size), *(out.split(size) for out in outputs),
                                 strict=True):  # fmt: skip
            as_typed(self.mine(), piece).copy_(piece)
            slots = self.meet("all_gather", flat.nbytes)
            for part, slot in zip(parts, slots, strict=True):
                part.copy_(as_typed(slot, piece))

    @recorded
    def _reduce_scatter_base(self, output, tensor, opts):
        self.tell("c10d::_reduce_scatter_base_", [tensor])
        if (op := operator_of(opts)) is None:
            return self.gloo._reduce_scatter_base(output, tensor, opts)
        flat = flatten(output)
        size = self.rooms(self.mine())[0].numel() // flat.element_size()
        parts = [part.split(size) for part in flatten(tensor).chunk(len(self.ranks))]
        for piece, *given in zip(flat.split(size), *parts, strict=True):
            for room, part in zip(self.rooms(self.mine()), given, strict=True):
                as_typed(room, part).copy_(part)
            slots = self.meet("reduce_scatter", flat.nbytes)
            reduce_into(piece, op, [as_typed(self.rooms(s)[self.me], piece) for s in slots])
        give_back(flat, output)
        return Done([output])

    def reduce_scatter(self, outputs, tensors, opts):
        for output, parts in zip(outputs, tensors, strict=True):
            self._reduce_scatter_base(output, torch.stack(parts), opts)
        return Done(outputs)

    @recorded
    def alltoall_base(self, output, tensor, received, given, opts=None):
        """What each gives to each is told in the first step: so all know how many there are."""
        self.tell("c10d::alltoall_base_", [tensor], given)
        P, inputs, outputs = len(self.ranks), as_bytes(tensor), as_bytes(output)
        given, received = bytes_for_each(tensor, given, P), bytes_for_each(output, received, P)
        sources, targets = inputs.split(given), outputs.split(received)
        size, steps, step = self.rooms(self.mine())[0].numel(), 1, 0
        table = self.given + (self.steps + 1) % 2 * P * P
        for rank in self.ranks:
            self.words[table + P * self.me + rank] = given[rank]
        while step < steps:
            at = slice(step * size, (step + 1) * size)
            for room, source in zip(self.rooms(self.mine()), sources, strict=True):
                piece = source[at]
                room[: len(piece)].copy_(piece)
            slots = self.meet("all_to_all")
            if not step:
                steps = math.ceil(max(self.words[table : table + P * P]) / size)
                for rank in self.ranks:
                    sent = self.words[table + P * rank + self.me]
                    self.agree_on(sent, received[rank], rank)
            for slot, target in zip(slots, targets, strict=True):
                piece = target[at]
                piece.copy_(self.rooms(slot)[self.me][: len(piece)])
            step += 1
        give_back(outputs, output)
        return Done([output])

    all_to_all_single = alltoall_base

    def rooms(self, slot):
        """A slot in equal pieces, one for each rank."""
        return slot.split(SLOT // len(self.ranks) // 64 * 64)[: len(self.ranks)]

    def agree_on(self, sent, expected, rank):
        if sent != expected:
            raise RuntimeError(f"rank {rank} of this group sends {sent} bytes to rank {self.me}, "
                               f"which expects {expected}")  # fmt: skip

    # ------------------------------------------------ from one rank to another

    def send(self, tensors, dst, tag=0):
        self.tell("c10d::send", tensors)
        return self.begin(("to", dst), self.push(as_bytes(tensors[0]), dst, tag))

    def recv(self, tensors, src, tag=0):
        return self.begin(("from", src), self.pull(tensors[0], src, tag))

    def recv_anysource(self, tensors, tag=0):
        raise NotImplementedError("to receive from any rank: name one, or use gloo")

    def begin(self, key, steps):
        """Messages of a pair go in order: in each queue only the first is on its way."""
        transfer = Transfer(self, steps, key[1])
        self.queues.setdefault(key, deque()).append(transfer)
        if self not in WAITING:
            WAITING.append(self)
        self.advance()
        return transfer

    def advance(self):
        """Go on with all messages as far as they come without waiting."""
        for key, queue in list(self.queues.items()):
            while queue and next(queue[0].steps, self) is self:
                queue.popleft().over = True
            if not queue:
                del self.queues[key]
        if not self.queues and self in WAITING:
            WAITING.remove(self)

    def box(self, src, dst):
        """A pair's two slots, and the places of its counters: of those filled, and emptied."""
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

    def pull(self, tensor, src, tag):
        box, filled, emptied = self.box(src, self.me)
        data = as_bytes(tensor)
        for piece in data.split(SLOT):
            number = self.words[emptied] + 1
            while self.words[filled] < number:
                yield
            self.agree_on(self.words[filled + SAID + number % 2], data.numel(), src)
            if (other := self.words[filled + TAG + number % 2]) != tag:
                raise RuntimeError(f"rank {src} of this group sent a message of tag {other} first, "
                                   f"not of {tag}: they come in order here")  # fmt: skip
            piece.copy_(box[number % 2][: len(piece)])
            self.words[emptied] = number
        give_back(data, tensor)


# ---------------------------------------------------------------- tensors


def flatten(tensor):
    """Its values in one dimension: the very memory, or a copy where it is not contiguous."""
    return tensor.detach().contiguous().view(-1)


def as_bytes(tensor):
    return flatten(tensor).view(torch.uint8)


def give_back(flat, tensor):
    """What was written into `flatten(tensor)`, or its bytes, if that is a copy."""
    if flat.data_ptr() != tensor.data_ptr() and tensor.numel():
        tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))


def as_typed(slot, like):
    """The beginning of a slot as a tensor of the size and dtype of another, a flat one."""
    return slot[: like.nbytes].view(like.dtype)


def reduce_into(out, op, parts):
    """The parts, in the order of ranks: the same bits, whoever does it."""
    if len(parts) == 1:
        out.copy_(parts[0])
    elif out.is_floating_point() and out.element_size() < 4 and len(parts) > 2:
        total = op(parts[0].float(), parts[1].float())
        for part in parts[2:]:
            op(total, part, out=total)
        out.copy_(total)
    else:
        op(parts[0], parts[1], out=out)
        for part in parts[2:]:
            op(out, part, out=out)


def operator_of(opts):
    return next((op for kind, op in REDUCE if opts.reduceOp == kind), None)


def bytes_for_each(tensor, sizes, number):
    """Of rows of a tensor for each of a number of ranks; no sizes: as many for each."""
    row = tensor.nbytes // max(len(tensor), 1)
    return [row * size for size in sizes or [len(tensor) // number] * number]


# ---------------------------------------------------------------- memory and processes


def neighbourhood():
    """The same for all ranks that can share memory here; None for one that cannot."""
    if platform.machine() != "x86_64" or not hasattr(os, "memfd_create"):
        return None
    with suppress(OSError):  # /proc may be closed
        file = os.memfd_create("probe")
        for number in (file, os.open(f"/proc/{os.getpid()}/fd/{file}", os.O_RDWR)):
            os.close(number)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        node = os.environ.get("GROUP_RANK", "0")  # torchrun's name for a torchrun
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()} {node}"
    return None


@contextmanager
def common_memory(store, rank, size, nbytes):
    """Memory of zeros that all ranks of a group see, of rank 0's making; at the end all have it.

    It is a file without a name: it goes when the last process that has it ends, however it ends,
    and the size of /dev/shm does not bound it. Of its pages only those are there that were used.
    """
    if rank == 0:
        file = os.memfd_create("parallel-llama")
        os.ftruncate(file, nbytes)
        store.set("memory", f"/proc/{os.getpid()}/fd/{file}")
    else:
        file = os.open(store.get("memory").decode(), os.O_RDWR)
    yield mmap.mmap(file, nbytes)
    if store.add("mapped", 1) == size:
        store.set("all mapped", "")
    store.wait(["all mapped"])
    os.close(file)


def in_words(ranks):
    return ", ".join(map(str, ranks))


def has_ended(process):
    """Whether a process of this number has; its parent need not know yet."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


dist.Backend.register_backend(NAME, SharedMemory, devices=["cpu"])
