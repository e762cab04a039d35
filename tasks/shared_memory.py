"""A process group for ranks of one machine: they meet in shared memory, not over sockets.

Each rank has a slot in each of two halves of the memory, and a counter. In its n-th step a rank
writes into its slot of half n % 2, sets its counter to n, waits until no rank's is below n, and
reads the others' slots. No second barrier has to tell that all have read: a half is written again
in step n + 2, which a rank begins when all counters are at n + 1; and each rank sets its own to
n + 1 when it has read what it wants of step n.

A collective is a few such steps, and of a long message a few for each piece. Sums add in the order
of the ranks, so that all get the same bits, each time. A message from one rank to another has two
slots of its own, in turns, with a counter of those filled and one of those emptied.

On x86 other processors see stores in the order in which they were made, the data before the
counter. Elsewhere a fence would have to be between them, and Python has none: gloo is used there.
"""

import itertools
import math
import mmap
import os
import platform
import time
from collections import deque

import torch
import torch.distributed as dist

from traffic import METERS, bytes_of

NAME = "shared"
WAITING = []  # groups with messages on their way, which go on while a rank waits for anything
SLOT = 2**20  # bytes that a rank can give in one step
SMALL = 2**15  # of a sum of so many bytes each rank adds all, not a share, in one step, not two
LINE = 8  # counters of 8 bytes a cache line: no two ranks write into one
REDUCE = [(dist.ReduceOp.SUM, torch.add), (dist.ReduceOp.PRODUCT, torch.mul),
          (dist.ReduceOp.MIN, torch.minimum), (dist.ReduceOp.MAX, torch.maximum)]  # fmt: skip
KINDS = ["barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
HASTE, NAP_S = 2000, 5e-5
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


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

    def __init__(self, group, steps):
        super().__init__()
        self.group, self.steps, self.over = group, steps, False

    def is_completed(self):
        self.group.advance()
        return self.over

    def wait(self, timeout=None):
        self.group.until(lambda: self.over)
        return True


class SharedMemory(dist.ProcessGroup):
    """What is not overridden here goes to gloo, which the base class hands it to."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.me, self.ranks, self.steps = rank, range(size), 0
        lines = size + 2 * size * size
        sizes = [8 * LINE * lines, 2 * size * SLOT, size * size * 2 * SLOT]
        memory = common_memory(store, rank, size, sum(sizes))
        counters, slots, boxes = torch.frombuffer(memory, dtype=torch.uint8).split(sizes)
        self.counters = memoryview(memory)[: sizes[0]].cast("q")
        self.slots = [half.split(SLOT) for half in slots.chunk(2)]
        self.boxes = boxes.view(size, size, 2, SLOT)
        self.queues = {}  # of messages on their way, by pair and direction
        self.crowded = int(os.environ.get("LOCAL_WORLD_SIZE", size)) > CORES

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

    # ------------------------------------------------ steps

    def mine(self):
        """The slot that this rank writes into in its next step."""
        return self.slots[(self.steps + 1) % 2][self.me]

    def meet(self, kind, nbytes=0):
        """A step, after `mine` was written: all ranks' slots, until the next step.

        kind, nbytes: what this rank believes that all do. Raises RuntimeError where another does
        something else.
        """
        self.steps += 1
        counters, n, line = self.counters, self.steps, LINE * self.me
        counters[line + 1 + n % 2] = said = KINDS.index(kind) << 56 | nbytes
        counters[line] = n
        for rank in self.ranks:
            place = LINE * rank
            if counters[place] < n:
                self.until(lambda p=place: counters[p] >= n)
            other = counters[place + 1 + n % 2]
            if other != said:
                raise RuntimeError(
                    f"rank {self.me} is in {kind} of {nbytes} bytes, but rank {rank} of this group "
                    f"in {KINDS[other >> 56]} of {other & 2**56 - 1}"
                )
        return self.slots[n % 2]

    def until(self, condition):
        """Wait: at first in haste, then giving the core to others, then asleep."""
        for turn in itertools.count():
            if condition():
                return
            for group in list(WAITING):
                group.advance()
            if turn == HASTE or self.crowded and not turn:
                begin = time.monotonic()
            if turn >= HASTE or self.crowded:
                if time.monotonic() - begin < 1e-3:
                    os.sched_yield()
                else:
                    time.sleep(NAP_S)

    # ------------------------------------------------ collectives

    def barrier(self, opts=None):
        self.meet("barrier")
        return Done([])

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

    def allreduce(self, tensors, opts):
        op = operator_of(opts)
        self.tell("c10d::allreduce_", tensors)
        if op is None:
            return self.gloo.allreduce(tensors, opts)
        for tensor in tensors:
            flat = flatten(tensor)
            for piece in flat.split(SLOT // flat.element_size()):
                self.reduce_piece(op, piece, flat.nbytes)
            give_back(flat, tensor)
        return Done(tensors)

    def allreduce_coalesced(self, tensors, opts):
        return self.allreduce(tensors, opts)

    def reduce_piece(self, op, piece, nbytes):
        mine = view(self.mine(), piece)
        mine.copy_(piece)
        parts = [view(slot, piece) for slot in self.meet("all_reduce", nbytes)]
        if piece.nbytes <= SMALL:
            reduce_into(op, parts, piece)
            return
        bounds = [rank * len(piece) // len(self.ranks) for rank in (*self.ranks, len(self.ranks))]
        shares = [slice(*pair) for pair in itertools.pairwise(bounds)]
        own = shares[self.me]
        reduce_into(op, [part[own] for part in parts], view(self.mine(), piece)[own])
        slots = self.meet("all_reduce", nbytes)
        for share, slot in zip(shares, slots, strict=True):
            piece[share].copy_(view(slot, piece)[share])

    def _allgather_base(self, output, tensor, opts=None):
        self.gather([flatten_out(part) for part in output.chunk(len(self.ranks))], tensor)
        return Done([output])

    def allgather(self, outputs, tensors, opts=None):
        for parts, tensor in zip(outputs, tensors, strict=True):
            flats = [flatten(part) for part in parts]
            self.gather(flats, tensor)
            for flat, part in zip(flats, parts, strict=True):
                give_back(flat, part)
        return Done(outputs)

    def all_gather_single_coalesced(self, outputs, tensors, opts=None):
        for output, tensor in zip(outputs, tensors, strict=True):
            self._allgather_base(output, tensor)
        return Done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs, tensor):
        """outputs: flat, of this tensor's size, of each rank's."""
        self.tell("c10d::_allgather_base_", [tensor])
        flat = flatten(tensor)
        size = SLOT // flat.element_size()
        for piece, *parts in zip(flat.split(size), *(out.split(size) for out in outputs),
                                 strict=True):  # fmt: skip
            view(self.mine(), piece).copy_(piece)
            slots = self.meet("all_gather", flat.nbytes)
            for part, slot in zip(parts, slots, strict=True):
                part.copy_(view(slot, piece))

    def _reduce_scatter_base(self, output, tensor, opts):
        op = operator_of(opts)
        self.tell("c10d::_reduce_scatter_base_", [tensor])
        if op is None:
            return self.gloo._reduce_scatter_base(output, tensor, opts)
        self.scatter(op, output, flatten(tensor).chunk(len(self.ranks)))
        return Done([output])

    def reduce_scatter(self, outputs, tensors, opts):
        op = operator_of(opts)
        for parts in tensors:
            self.tell("c10d::_reduce_scatter_base_", parts)
        if op is None:
            return self.gloo.reduce_scatter(outputs, tensors, opts)
        for output, parts in zip(outputs, tensors, strict=True):
            self.scatter(op, output, [flatten(part) for part in parts])
        return Done(outputs)

    def reduce_scatter_single_coalesced(self, outputs, tensors, opts):
        for output, tensor in zip(outputs, tensors, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return Done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def scatter(self, op, output, parts):
        flat = flatten(output)
        size = SLOT // len(self.ranks) // flat.element_size()
        for piece, *inputs in zip(flat.split(size), *(part.split(size) for part in parts),
                                  strict=True):  # fmt: skip
            for place, part in zip(self.mine()[: size * len(parts) * flat.element_size()].view(flat.dtype).split(size), inputs, strict=True):
                place[: len(part)].copy_(part)
            slots = self.meet("reduce_scatter", flat.nbytes)
            begin = size * self.me * flat.element_size()
            reduce_into(op, [view(slot[begin:], piece) for slot in slots], piece)
        give_back(flat, output)

    def all_to_all_single(self, output, tensor, received, given, opts=None):
        """Each slot begins with how many bytes its rank has for each: so all know how many steps."""
        self.tell("c10d::alltoall_base_", [tensor], given)
        P, inputs, outputs = len(self.ranks), as_bytes(tensor), as_bytes(output)
        given, received = (split_bytes(t, sizes, P) for t, sizes in ((tensor, given), (output, received)))
        head = 8 * max(P, LINE)
        room = (SLOT - head) // P // 64 * 64
        sources, targets = inputs.split(given), outputs.split(received)
        steps, step = 1, 0
        while step < steps:
            mine, at = self.mine(), slice(step * room, (step + 1) * room)
            mine[: 8 * P].view(torch.int64).copy_(torch.tensor(given))
            for rank, source in enumerate(sources):
                piece = source[at]
                mine[head + rank * room :][: len(piece)].copy_(piece)
            slots = self.meet("all_to_all")
            sizes = [slot[: 8 * P].view(torch.int64).tolist() for slot in slots]
            for rank, target in enumerate(targets):
                if sizes[rank][self.me] != len(target):
                    raise RuntimeError(f"rank {rank} of this group sends {sizes[rank][self.me]} bytes "
                                       f"to rank {self.me}, which expects {len(target)}")
                piece = target[at]
                piece.copy_(slots[rank][head + self.me * room :][: len(piece)])
            steps, step = math.ceil(max(map(max, sizes)) / room), step + 1
        give_back(outputs, output)
        return Done([output])

    alltoall_base = all_to_all_single

    # ------------------------------------------------ from one rank to another

    def send(self, tensors, dst, tag=0):
        return self.begin(("to", dst), self.push(as_bytes(tensors[0]), dst))

    def recv(self, tensors, src, tag=0):
        return self.begin(("from", src), self.pull(tensors[0], src))

    def begin(self, key, steps):
        """Messages of a pair go in order: in each queue only the first is on its way."""
        transfer = Transfer(self, steps)
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
        line = LINE * (len(self.ranks) + 2 * (src * len(self.ranks) + dst))
        return self.boxes[src, dst], line, line + LINE

    def push(self, data, dst):
        box, filled, emptied = self.box(self.me, dst)
        head = torch.tensor([data.numel()])
        for piece in data.split(SLOT - 64) or [data]:
            number = self.counters[filled] + 1
            while number - self.counters[emptied] > 2:
                yield
            slot = box[number % 2]
            slot[:8].view(torch.int64).copy_(head)
            slot[64 : 64 + len(piece)].copy_(piece)
            self.counters[filled] = number

    def pull(self, tensor, src):
        box, filled, emptied = self.box(src, self.me)
        data = as_bytes(tensor)
        for piece in data.split(SLOT - 64) or [data]:
            number = self.counters[emptied] + 1
            while self.counters[filled] < number:
                yield
            slot = box[number % 2]
            if (sent := slot[:8].view(torch.int64).item()) != data.numel():
                raise RuntimeError(f"rank {src} of this group sent {sent} bytes to rank {self.me}, "
                                   f"which expects {data.numel()}")
            piece.copy_(slot[64 : 64 + len(piece)])
            self.counters[emptied] = number
        give_back(data, tensor)


# ---------------------------------------------------------------- tensors


def flatten(tensor):
    """Its values in one dimension: the very memory, or a copy where it is not contiguous."""
    return tensor.detach().contiguous().view(-1)


flatten_out = flatten


def as_bytes(tensor):
    return flatten(tensor).view(torch.uint8)


def give_back(flat, tensor):
    """What was written into `flatten(tensor)`, or its bytes, if that is a copy."""
    if flat.data_ptr() != tensor.data_ptr() and tensor.numel():
        tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))


def view(slot, like):
    """The beginning of a slot as a tensor of the size and dtype of another, a flat one."""
    return slot[: like.nbytes].view(like.dtype)


def reduce_into(op, parts, out):
    """The parts, in the order of ranks: the same bits, whoever does it."""
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    op(parts[0], parts[1], out=out)
    for part in parts[2:]:
        op(out, part, out=out)


def operator_of(opts):
    return next((op for kind, op in REDUCE if opts.reduceOp == kind), None)


def split_bytes(tensor, sizes, number):
    """Bytes for each of a number of ranks, of rows of a tensor; no sizes: as many for each."""
    row = tensor.nbytes // max(len(tensor), 1)
    return [row * size for size in sizes or [len(tensor) // number] * number]


# ---------------------------------------------------------------- memory


def choose_backend(device, args, one_machine):
    """How ranks talk: the name of a backend. one_machine: whether all are on one."""
    if device.type == "cuda":
        return "gloo" if args.share_gpus else "nccl"
    here = hasattr(os, "memfd_create") and platform.machine() == "x86_64"
    return NAME if here and one_machine and not args.gloo else "gloo"


def common_memory(store, rank, size, nbytes):
    """Memory of zeros that all ranks of a group see, of rank 0's making.

    It is a file without a name: it goes when the last process that has it ends, however it ends,
    and /dev/shm's limits are not its.
    """
    if rank == 0:
        file = os.memfd_create("parallel-llama")
        os.ftruncate(file, nbytes)
        store.set("memory", f"/proc/{os.getpid()}/fd/{file}")
    else:
        file = os.open(store.get("memory").decode(), os.O_RDWR)
    memory = mmap.mmap(file, nbytes)
    if store.add("mapped", 1) == size:
        store.set("all mapped", "")
    store.wait(["all mapped"])
    os.close(file)
    return memory


dist.Backend.register_backend(NAME, SharedMemory, devices=["cpu"])
