"""Pipes on a device for which autograd has a thread, as it has for each GPU, without a GPU.

The tensors of "fake:0" hold CPU tensors, and what is done with them is done with these. For
autograd they are on another device than the CPU, so it runs their backward in a thread of that
device and not in the calling one. Argument: the name of a function below, which is run.
"""

import sys
import threading
from pathlib import Path

import torch
from torch import nn
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tasks"))
from failing import FailsBack
from pipeline_threads import Pipe, WithDevice, one_after_the_other

_setup_privateuseone_for_python_backend("fake")
CPU, FAKE = torch.device("cpu"), torch.device("fake", 0)
BATCH, SPLIT_SIZE, WIDTH = 7, 2, 5


class Fake(torch.Tensor):
    """A tensor on the fake device, around one on the CPU."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=FAKE
        )

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        device = (kwargs or {}).get("device", FAKE)
        args, kwargs = torch.utils._pytree.tree_map(hold, (args, kwargs or {}))
        result = function(*args, **kwargs)
        if device == CPU:
            return result
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, result)


def hold(x):
    """What an operation on the CPU takes in place of x, an argument of one on the fake device."""
    return x.held if isinstance(x, Fake) else CPU if x == FAKE else x


@torch.library.impl("aten::_to_copy", "privateuseone")
def to_fake(x, **options):
    return Fake(x.clone())


class Noted(nn.Module):
    """A linear layer that notes which threads run its backward."""

    def __init__(self, of):
        super().__init__()
        self.linear, self.threads = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), of

    def forward(self, x):
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.threads.append(threading.get_ident()))
        return y


def build(*devices):
    """(modules, threads that ran a backward of them) of layers on these devices."""
    threads = []
    modules = [WithDevice(Noted(threads).to(device), device) for device in devices]
    return nn.Sequential(*modules), threads


def square(y):
    return y.square().mean()


def step(pipe, x):
    """The values of a step: its output, and the gradients of x and of all parameters."""
    pipe.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = pipe(x)
    square(y).backward()
    values = [y.detach(), x.grad, *(parameter.grad for parameter in pipe.parameters())]
    return [value.to(CPU) for value in values]


def assert_bits(whole, results, x):
    """The results of a step have the bits of the same microbatches one after the other."""
    whole.zero_grad()
    rows = [part.clone().requires_grad_() for part in x.split(SPLIT_SIZE)]
    logits = one_after_the_other(whole, rows, square)[1]
    grad = torch.cat([part.grad for part in rows])
    expected = [logits, grad, *(parameter.grad for parameter in whole.parameters())]
    for one, other in zip(expected, results, strict=True):
        assert one.abs().max() > 0 and torch.equal(one.to(CPU), other)


def check(*devices):
    """A step of a pipe on these devices has the right bits."""
    (whole, threads), x = build(*devices), torch.randn(BATCH, WIDTH, dtype=torch.float64)
    pipe = Pipe(whole, SPLIT_SIZE)
    for _ in range(2):
        assert_bits(whole, step(pipe, x), x)
    return set(threads)


def one_device():
    """And autograd has a thread for it: else this would prove nothing."""
    (of_device,) = check(FAKE)
    assert of_device != threading.get_ident()


def several_devices():
    for devices in (FAKE, CPU), (CPU, FAKE), (FAKE, CPU, FAKE), (CPU, FAKE, CPU):
        assert len(check(*devices)) == 2


def in_a_hook():
    """A whole step in a hook of another backward, which keeps the device's thread busy."""
    for devices in (FAKE,), (FAKE, CPU, FAKE), (torch.device("cpu", 0), torch.device("cpu", 1)):
        outer, threads = torch.ones(3).to(FAKE).requires_grad_(), []

        @torch.enable_grad()
        def hook(_, devices=devices, threads=threads):
            check(*devices)
            threads.append(threading.get_ident())

        y = outer * 2
        y.register_hook(hook)
        y.sum().backward()
        assert threads and threads[0] != threading.get_ident()


def several_pipes():
    """One behind the other, and side by side, in one graph."""
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    wholes = [build(FAKE, CPU)[0], build(CPU, FAKE)[0], build(FAKE)[0]]
    pipes = [Pipe(whole, SPLIT_SIZE) for whole in wholes]

    def run(first, second, third):
        second.zero_grad(), first.zero_grad(), third.zero_grad()
        own = x.clone().requires_grad_()
        (second(first(own)).to(CPU) + third(own).to(CPU)).square().sum().backward()
        modules = nn.ModuleList([first, second, third])
        return [own.grad, *(parameter.grad.to(CPU) for parameter in modules.parameters())]

    for one, other in zip(run(*wholes), run(*pipes), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


class FailsOnce(nn.Module):
    fails = True

    def forward(self, x):
        fails, self.fails = self.fails, False
        return FailsBack.apply(x) if fails else x * 1


def wait_for_device():
    """Wait for autograd's thread of the device: it takes one thing after the other.

    An exception in the thread of one device does not stop what that of another is doing: PyTorch
    gives it to the caller at once.
    """
    torch.ones(1).to(FAKE).requires_grad_().sum().backward()


def an_exception():
    """It reaches the caller, and the pipe goes on after it."""
    for place in range(3):
        whole, _ = build(FAKE, CPU, FAKE)
        whole.insert(place, WithDevice(FailsOnce(), (FAKE, CPU, FAKE)[place]))
        pipe, x = Pipe(whole, SPLIT_SIZE), torch.randn(BATCH, WIDTH, dtype=torch.float64)
        try:
            step(pipe, x)
        except ArithmeticError as error:
            assert str(error) == "planted"
        else:
            raise AssertionError("the exception got lost")
        wait_for_device()
        assert_bits(whole, step(pipe, x), x)


def twice():
    """The second backward of one output is refused."""
    pipe = Pipe(build(FAKE, CPU)[0], SPLIT_SIZE)
    loss = square(pipe(torch.ones(BATCH, WIDTH, dtype=torch.float64)))
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "runs once" in str(error)
    else:
        raise AssertionError("it ran twice")


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
    print(f"{sys.argv[1]}: ok")
