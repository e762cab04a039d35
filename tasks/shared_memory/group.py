"""A process group for ranks of one machine: its collectives go through shared memory.

Each collective is a few steps of `slots.py`; a long message takes a few for each piece. Sums add in
the order of the ranks, so that all ranks get the same bits, each time; half precision is added in
float32, and rounded once. Use it as any backend: `dist.init_process_group("shared_memory")`.
"""

import math
from functools import cache, partial, wraps

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.autograd import profiler
from torch.distributed.distributed_c10d import Work

from shared_memory.slots import SLOT, SharedMemory, beginning
from shared_memory.traffic import METERS, bytes_of
from utils.collectives import SHARED_MEMORY

NAME = SHARED_MEMORY
# In functional collectives, which DTensor uses, PyTorch 2.6 lets go of the Python half of a `Work`,
# and its other half then waits for ever.
USABLE = Version(torch.__version__) >= Version("2.7")
SMALL = 2**15  # bytes; up to here each rank adds the full sum, in one step, else its share, in two
REDUCE = [  # (operator, (function of two parts, whether to divide by the number of parts))
    (dist.ReduceOp.SUM, (torch.add, False)), (dist.ReduceOp.AVG, (torch.add, True)),
    (dist.ReduceOp.PRODUCT, (torch.mul, False)), (dist.ReduceOp.MIN, (torch.minimum, False)),
    (dist.ReduceOp.MAX, (torch.maximum, False)),
]  # fmt: skip
DTYPES = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}  # the same on all ranks


class Done(Work):
    """The work of a collective, which is over when the call returns."""

    def __init__(self, tensors):
        super().__init__()
        self.tensors = tensors

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True

    def result(self):
        return self.tensors

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(self.tensors)
        return future


def collective(function):
    """Return a method that a profiler sees, as it sees other backends' collectives.

    It runs in inference mode: a tensor or view that one call makes and keeps for later calls can be
    written to in that mode only.
    """
    function = torch.inference_mode()(function)

    @wraps(function)
    def method(self, *args, **kwargs):
        if not profiler._is_profiler_enabled:  # naming it costs as much as a small collective
            return function(self, *args, **kwargs)
        with profiler.record_function(f"{NAME}::{function.__name__}"):
            return function(self, *args, **kwargs)

    return method


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group by shared memory. What is not overridden here goes to gloo: see `by_gloo`.

    A collective in shared memory is over when its call returns, also with async_op. A send or a
    receive goes on only while its rank waits in shared memory, not while it waits in gloo, or
    computes.
    """

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        members = partial(dist.get_process_group_ranks, self)
        self.memory = SharedMemory(store, rank, size, timeout, members)
        store = dist.PrefixStore(self.memory.name, store)
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._devices = timeout, [loopback()]
        self.gloo = dist.ProcessGroupGloo(store, rank, size, options)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.me, self.P = rank, size
        self.room = SLOT // size // 64 * 64  # bytes that a slot has for each rank
        self.own_slot, self.meet = self.memory.own_slot, self.memory.meet

    def getBackendName(self):
        return NAME

    def _get_sequence_number_for_group(self):
        return self.memory.steps + self.gloo._get_sequence_number_for_group()

    def count_sent(self, name, tensors, pieces=None):
        """Tell the meters what PyTorch's operator of this name would have sent."""
        for meter in METERS:
            meter.count(name, tensors[0], bytes_of(self, name, tensors, pieces))

    @collective
    def barrier(self, opts=None):
        self.meet("barrier")
        return Done([])

    @collective
    def broadcast(self, tensors, opts):
        self.count_sent("c10d::broadcast_", tensors)
        for tensor in tensors:
            data = as_bytes(tensor)
            for piece in pieces(data):
                if self.me == opts.rootRank:
                    self.own_slot(piece).copy_(piece)
                slots = self.meet("broadcast", data.nbytes, piece, opts.rootRank)
                if self.me != opts.rootRank:
                    piece.copy_(slots[opts.rootRank])
            give_back(data, tensor)
        return Done(tensors)

    @collective
    def allreduce(self, tensors, opts):
        self.count_sent("c10d::allreduce_", tensors)
        if (how := operator_of(opts)) is None or tensors[0].layout != torch.strided:
            return self.gloo.allreduce(tensors, opts)
        for tensor in tensors:
            flat = flatten(tensor)
            for piece in pieces(flat):
                self.reduce_piece(how, piece, flat.nbytes)
            give_back(flat, tensor)
        return Done(tensors)

    def reduce_piece(self, how, piece, nbytes):
        meet = partial(self.meet, "all_reduce", nbytes, piece, told(how, piece))
        if piece.nbytes <= SMALL:
            self.own_slot(piece).copy_(piece)
            reduce_into(piece, how, meet())
            return
        cuts = [rank * len(piece) // self.P for rank in range(1, self.P)]
        shares, me = piece.tensor_split(cuts), self.me
        others = [rank for rank in range(self.P) if rank != me]
        slots = self.own_slot(piece).tensor_split(cuts)
        for rank in others:
            slots[rank].copy_(shares[rank])
        parts = [part.tensor_split(cuts)[me] for part in meet()]
        parts[me] = shares[me]
        total = self.own_slot(piece).tensor_split(cuts)[me]
        reduce_into(total, how, parts)
        shares[me].copy_(total)
        sums = meet()
        for rank in others:
            shares[rank].copy_(sums[rank].tensor_split(cuts)[rank])

    @collective
    def _allgather_base(self, output, tensor, opts=None):
        flat = flatten(output)
        self.gather_into(flat.chunk(self.P), tensor)
        give_back(flat, output)
        return Done([output])

    @collective
    def allgather(self, outputs, tensors, opts=None):
        for parts, tensor in zip(outputs, tensors, strict=True):
            flats = [flatten(part) for part in parts]
            self.gather_into(flats, tensor)
            for flat, part in zip(flats, parts, strict=True):
                give_back(flat, part)
        return Done(outputs)

    def gather_into(self, outputs, tensor):
        """Gather the tensor of each rank r into outputs[r], which is flat and of its size."""
        self.count_sent("c10d::_allgather_base_", [tensor])
        flat = flatten(tensor)
        for out in outputs:
            must_be(out, flat.numel(), flat.dtype)
        for piece, *parts in zip(pieces(flat), *map(pieces, outputs), strict=True):
            self.own_slot(piece).copy_(piece)
            slots = self.meet("all_gather", flat.nbytes, piece)
            for part, slot in zip(parts, slots, strict=True):
                part.copy_(slot)

    @collective
    def _reduce_scatter_base(self, output, tensor, opts):
        self.count_sent("c10d::_reduce_scatter_base_", [tensor])
        if (how := operator_of(opts)) is None:
            return self.gloo._reduce_scatter_base(output, tensor, opts)
        flat = flatten(output)
        must_be(tensor, self.P * flat.numel(), flat.dtype)
        size = self.room // flat.element_size()
        parts = [part.split(size) for part in flatten(tensor).chunk(self.P)]
        for piece, *given in zip(flat.split(size), *parts, strict=True):
            for rank, part in enumerate(given):
                self.room_for(rank, self.own_slot(), part).copy_(part)
            slots = self.meet("reduce_scatter", flat.nbytes, how=told(how, flat))
            reduce_into(piece, how, [self.room_for(self.me, slot, piece) for slot in slots])
        give_back(flat, output)
        return Done([output])

    def reduce_scatter(self, outputs, tensors, opts):
        uneven = any(part.numel() != parts[0].numel() for parts in tensors for part in parts)
        if uneven or operator_of(opts) is None:
            return self.gloo.reduce_scatter(outputs, tensors, opts)
        for output, parts in zip(outputs, tensors, strict=True):
            self._reduce_scatter_base(output, torch.cat([flatten(part) for part in parts]), opts)
        return Done(outputs)

    @collective
    def alltoall_base(self, output, tensor, received, given, opts=None):
        """Give each rank its rows, in as many steps as the largest share needs.

        In the first step each tells how much it gives to each, which sets the number of steps.
        """
        self.count_sent("c10d::alltoall_base_", [tensor], given)
        P, inputs, outputs = self.P, as_bytes(tensor), as_bytes(output)
        given, received = bytes_for_each(tensor, given, P), bytes_for_each(output, received, P)
        sources, targets = inputs.split(given), outputs.split(received)
        steps, step = 1, 0
        table, words = self.memory.table(), self.memory.words
        for rank in range(P):
            words[table + P * self.me + rank] = given[rank]
        while step < steps:
            at = slice(step * self.room, (step + 1) * self.room)
            for rank, source in enumerate(sources):
                self.room_for(rank, self.own_slot(), source[at]).copy_(source[at])
            slots = self.meet("all_to_all")
            if not step:
                steps = math.ceil(max(words[table : table + P * P]) / self.room)
                for rank in range(P):
                    self.memory.agree_on(words[table + P * rank + self.me], received[rank], rank)
            for slot, target in zip(slots, targets, strict=True):
                target[at].copy_(self.room_for(self.me, slot, target[at]))
            step += 1
        give_back(outputs, output)
        return Done([output])

    # The functional collectives of DTensor and transformers come here.
    def allgather_into_tensor_coalesced(self, outputs, tensors, opts=None):
        for output, tensor in zip(outputs, tensors, strict=True):
            self._allgather_base(output, tensor)
        return Done(outputs)

    def reduce_scatter_tensor_coalesced(self, outputs, tensors, opts):
        for output, tensor in zip(outputs, tensors, strict=True):
            self._reduce_scatter_base(output, tensor, opts).wait()
        return Done(outputs)

    # The names by which PyTorch calls them from 2.13 on.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def room_for(self, rank, slot, like):
        """Return a rank's room in a slot, with the size and dtype of a flat tensor, `like`."""
        return beginning(slot[rank * self.room :], like)

    # ------------------------------------------------ from one rank to another

    @torch.inference_mode()
    def send(self, tensors, dst, tag=0):
        self.count_sent("c10d::send", tensors)
        return self.memory.begin(("to", dst), self.memory.push(as_bytes(tensors[0]), dst, tag))

    @torch.inference_mode()
    def recv(self, tensors, src, tag=0):
        data = as_bytes(tensors[0])

        def steps():
            yield from self.memory.pull(data, src, tag)
            give_back(data, tensors[0])

        return self.memory.begin(("from", src), steps())

    def recv_anysource(self, tensors, tag=0):
        raise NotImplementedError("recv from any rank: name one, or use gloo")


@cache
def loopback():
    """Return gloo's device, one for all groups of a process.

    Each device has a thread that wakes up 100 times a second, also where nothing is sent, and a
    mesh of transformers makes six groups.
    """
    return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")


def by_gloo(name):
    """Return a method that calls gloo's method of this name.

    The base class would call it as well. But in PyTorch 2.14 and 2.15 it does so while it holds
    Python's lock, and waits for gloo's lock, whose holder may wait for Python's: a deadlock.
    """

    def method(self, *args, **kwargs):
        if METERS:
            raise NotImplementedError(f"{name}: its bytes sent are not known")
        return getattr(self.gloo, name)(*args, **kwargs)

    return method


for name in ("reduce", "gather", "scatter", "alltoall", "allreduce_coalesced"):
    setattr(SharedMemoryGroup, name, by_gloo(name))


# ---------------------------------------------------------------- tensors


def flatten(tensor):
    """Return a tensor in one dimension: its very memory, or a copy where it is not contiguous."""
    if not tensor.numel():
        return tensor.new_empty(0)  # its stride is 1
    return tensor.resolve_neg().contiguous().view(-1)


def pieces(flat):
    """Split a flat tensor into pieces of at most a slot each."""
    return [flat] if flat.nbytes <= SLOT else flat.split(SLOT // flat.element_size())


def as_bytes(tensor):
    return flatten(tensor).view(torch.uint8)


def give_back(flat, tensor):
    """Copy what was written into `flat` to the tensor, unless both are the same memory.

    flat: `flatten(tensor)`, or its bytes.
    """
    if flat.data_ptr() != tensor.data_ptr() and tensor.numel():
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def must_be(tensor, numel, dtype):
    if (tensor.numel(), tensor.dtype) != (numel, dtype):
        raise ValueError(
            f"a tensor has {tensor.numel()} values of {tensor.dtype}, where {numel} "
            f"of {dtype} are expected"
        )


def reduce_into(out, how, parts):
    """Reduce the parts into `out`, in the order of ranks: the same bits, whoever does it."""
    _, op, mean = how
    if len(parts) == 1:
        out.copy_(parts[0])
    elif out.is_floating_point() and out.element_size() < 4 and len(parts) > 2:
        total = op(parts[0].float(), parts[1].float())
        for part in parts[2:]:
            op(total, part, out=total)
        out.copy_(total.div_(len(parts)) if mean else total)
    else:
        op(parts[0], parts[1], out=out)
        for part in parts[2:]:
            op(out, part, out=out)
        if mean:
            out.div_(len(parts))


def operator_of(opts):
    """Return how to reduce: a number, and what REDUCE says. None: by gloo, if it can."""
    wanted = opts.reduceOp
    return next(((i, *how) for i, (operator, how) in enumerate(REDUCE) if wanted == operator), None)


def told(how, tensor):
    """Return one number for the operator and the dtype."""
    return how[0] << 8 | NUMBERS[tensor.dtype]


def bytes_for_each(tensor, sizes, number):
    """Return the bytes of each rank's rows. sizes: how many rows each has; empty: equal shares."""
    row = tensor.nbytes // max(len(tensor), 1)
    return [row * size for size in sizes or [len(tensor) // number] * number]


dist.Backend.register_backend(NAME, SharedMemoryGroup, devices=["cpu"])
