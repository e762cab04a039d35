"""Count the bytes that a rank sends, in PyTorch's dispatcher and in shared memory's groups."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from guards.agreement import without_comparing

# {operator: (P -> the share of its input's bytes that one of P ranks sends, the input's place)}.
SENT = {
    "c10d::allreduce_": (lambda P: 2 * (P - 1) / P, 0),
    "c10d::allgather_": (lambda P: P - 1, 1),
    "c10d::_allgather_base_": (lambda P: P - 1, 1),
    "c10d::_reduce_scatter_base_": (lambda P: (P - 1) / P, 1),
    "c10d::broadcast_": (lambda P: (P - 1) / P, 0),  # on average
    "c10d::send": (lambda P: 1, 0),
    "_c10d_functional::all_reduce": (lambda P: 2 * (P - 1) / P, 0),
    "_c10d_functional::all_gather_into_tensor": (lambda P: P - 1, 0),
    "_c10d_functional::reduce_scatter_tensor": (lambda P: (P - 1) / P, 0),
}
SPLIT = {"c10d::alltoall_base_": (1, 4), "_c10d_functional::all_to_all_single": (0, 2)}
NOTHING = {"c10d::barrier", "c10d::recv_", "_c10d_functional::wait_tensor",
           "_c10d_functional::_wrap_tensor_autograd"}  # fmt: skip
METERS = []  # meters that count now; shared memory's groups tell them what PyTorch does not see


class Meter(TorchDispatchMode):
    """Add up, as a context, the bytes that this rank sends: `sent`.

    An all-reduce sends 2 (P-1)/P of its input, as in a ring. A meter sees the collectives of
    forward and backward, also functional ones and those that C++ calls. Raises NotImplementedError
    for unknown ones.
    """

    def __init__(self):
        super().__init__()
        self.sent = 0.0

    def __enter__(self):
        METERS.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        METERS.remove(self)
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes operators of ordinary tensors, which come here
        name = function._schema.name
        if name in SENT:
            at = SENT[name][1]
            self.see(group_of(args), name, args[at] if isinstance(args[at], list) else [args[at]])
        elif name in SPLIT:
            at, splits = SPLIT[name]
            self.see(group_of(args), name, [args[at]], args[splits])
        elif name.startswith(("c10d::", "_c10d_functional::")) and name not in NOTHING:
            raise NotImplementedError(f"{name}: its bytes sent are not known")
        return function(*args, **(kwargs or {}))

    def see(self, group, name, tensors, pieces=None):
        if not hasattr(group, "count_sent"):
            self.count(name, tensors[0], bytes_of(group, name, tensors, pieces))

    def count(self, name, tensor, sent):
        """Add up what a collective sends. name: its operator's; tensor: its input; sent: bytes."""
        self.sent += sent


def bytes_of(group, name, tensors, pieces=None):
    """Return the bytes that this rank sends.

    pieces: rows for each rank, of an all-to-all; None or empty: equal shares.
    """
    if name in SENT:
        return SENT[name][0](group.size()) * sum(tensor.nbytes for tensor in tensors)
    (tensor,) = tensors
    pieces = pieces or [len(tensor) // group.size()] * group.size()
    return (sum(pieces) - pieces[group.rank()]) * tensor[:1].nbytes


def group_of(args):
    """Return the process group that an operator's arguments have, as itself or by its name."""
    for arg in reversed(args):
        if isinstance(arg, str):
            return _resolve_process_group(arg)
    return ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))


def bytes_sent(run, function, group=None):
    """Return the bytes that a rank sends, on average, in function(): (counted, on the wire).

    All ranks call it. On the wire: what all processes of this machine put on the loopback device,
    gloo's headers included, by its counters; None for other backends. group: the one by which
    function() talks.
    """
    counters = Path("/proc/net/dev")

    def total():
        return int(counters.read_text().split("lo:")[1].split()[8])  # what it transmitted

    by_gloo = run.device.type == "cpu" and dist.get_backend(group) == "gloo"
    wire = by_gloo and counters.exists()
    dist.barrier()
    before = total() if wire else 0
    dist.barrier()  # all have read before any begins
    with Meter() as meter, without_comparing():
        function()
    dist.barrier()
    wire = run.broadcast((total() - before) / run.world_size if wire else None)
    counted = torch.tensor(meter.sent, dtype=torch.float64, device=run.device)
    dist.all_reduce(counted)
    return counted.item() / run.world_size, wire
