"""Messages from one rank to another: one tensor, a stream of them, or several at once."""

from functools import partial

import torch
import torch.distributed as dist


def send(tensor, target, group):
    """Begin to send to a rank of `group`; return (work, tensor); keep the tensor till it is sent.

    With gloo a tensor on a GPU is copied to host memory first: gloo sends from there only.
    """
    if tensor.is_cuda and dist.get_backend(group) == "gloo":
        tensor = tensor.cpu()
    return dist.isend(tensor, group=group, group_dst=target), tensor


def receive(source, group, shapes, like):
    """Yield tensors of these shapes, sent by a rank of `group`; meanwhile the next is on its way.

    like: a tensor of their dtype and device.
    """
    device = "cpu" if dist.get_backend(group) == "gloo" else like.device

    def post(shape):
        tensor = torch.empty(shape, dtype=like.dtype, device=device)
        return tensor, dist.irecv(tensor, group=group, group_src=source)

    coming = post(shapes[0])
    for shape in [*shapes[1:], None]:
        tensor, work = coming
        work.wait()
        coming = shape and post(shape)
        yield tensor.to(like.device)


def exchange(sends, receives, group):
    """Begin messages to and from ranks of `group`, all at once; return a function that waits.

    sends, receives: [(contiguous tensor, rank)]; messages between two ranks are in the same order
    on both. Do not touch the tensors before the wait. By gloo they go through host memory.
    """
    host = dist.get_backend(group) == "gloo"
    there = [torch.empty_like(x, device="cpu") if host and x.is_cuda else x for x, _ in receives]
    here = [x.cpu() if host else x for x, _ in sends]
    message = partial(dist.P2POp, group=group)
    sending, receiving = zip(here, sends, strict=True), zip(there, receives, strict=True)
    ops = [message(dist.isend, x, group_peer=rank) for x, (_, rank) in sending]
    ops += [message(dist.irecv, x, group_peer=rank) for x, (_, rank) in receiving]
    works = dist.batch_isend_irecv(ops) if ops else []

    def wait():
        for work in works:
            work.wait()
        for x, (tensor, _) in zip(there, receives, strict=True):
            if x is not tensor:
                tensor.copy_(x)
        here.clear()  # until now they had to be kept

    return wait
