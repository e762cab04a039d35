"""f's all-reduce, overlapped with the products that give the weights' gradients.

From the gradient dy of a column-parallel layer y = x W.T the backward computes dx = dy W, which f
sums over the ranks, and dW = dy.T x, for which nobody waits. Autograd computes both before f begins
to sum. Here a layer's backward computes dx alone. Then f begins the sum, on a stream of its own,
computes dW of all these layers meanwhile, and waits. The products are autograd's, so all
bits are the same. Source: Megatron-LM's linear layers with an asynchronous all-reduce
(megatron/core/tensor_parallel/layers.py).

On a CPU the sum comes first and the products follow, because the ranks' cores compute the sum, too.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from utils.collectives import all_reduce, all_reduce_, copy_to_region
from utils.llama import bind, mixed_in
from utils.shards import ReplicatedKVLinear

COLUMN_PARALLEL = "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"


def overlap_f(block, hook, group):
    """Apply f to the input of `block`, attention or MLP; its sum overlaps, see above.

    hook(block, args, kwargs, enter, group): applies enter(x, group) to the input, as a pre-hook.
    Within torch.compile f is the usual one.
    """
    names = [name for name in COLUMN_PARALLEL if hasattr(block, name)]
    for layer in map(block.get_submodule, names):
        layer.__class__ = mixed_in(DeferredLinear, type(layer))
    deferring = bind(defer, hook=hook, names=names, group=group)
    block.register_forward_pre_hook(deferring, with_kwargs=True)


def defer(block, args, kwargs, hook, names, group):
    """Run a block's hook with an f that defers the gradients of its layers' weights."""
    layers = [block.get_submodule(name) for name in names]

    def enter(x, group):
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return copy_to_region(x, group)
        deferred = {}  # {number of a layer: its dy}
        weights, biases = zip(*(layer.parameters_taken() for layer in layers), strict=True)
        x, *weights = CopyAndDefer.apply(x, group, deferred, *weights)
        for number, layer in enumerate(layers):
            layer.given = weights[number], biases[number], deferred, number
        return x

    return hook(block, args, kwargs, enter, group)


class DeferredLinear:
    """A linear layer that leaves its weight's gradient to `CopyAndDefer`, the f before it."""

    def forward(self, x):
        if torch.compiler.is_compiling() or "given" not in vars(self):
            return super().forward(x)
        return LinearWithoutDW.apply(x, *vars(self).pop("given"))

    def parameters_taken(self):
        """Return weight and bias; a `ReplicatedKVLinear`'s are what its f returns."""
        replicated = isinstance(self, ReplicatedKVLinear)
        return self.parameters_after_f() if replicated else (self.weight, self.bias)


class CopyAndDefer(torch.autograd.Function):
    """f of x, and the weights of the layers after it, whose gradients are computed here.

                per rank        forward         backward
    x           (..., H)        x               all-reduce(dy), meanwhile:
    weights     (F/P, H)        weights         dW = dy.T x, of each layer's own dy

    deferred: {number: dy}, filled by `LinearWithoutDW` before this backward begins.
    """

    @staticmethod
    def forward(ctx, x, group, deferred, *weights):
        ctx.group, ctx.deferred = group, deferred
        ctx.dtypes = [weight.dtype for weight in weights]
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x.view_as(x), *(weight.view_as(weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        (x,) = ctx.saved_tensors
        total, wait = None, None
        if ctx.needs_input_grad[0] and grad is not None:
            total, wait = begin_all_reduce(grad, ctx.group)
        grads = [None] * len(ctx.dtypes)
        for number in sorted(ctx.deferred):
            dy = ctx.deferred.pop(number)
            if ctx.needs_input_grad[3 + number]:
                dw = dy.flatten(0, -2).t() @ x.to(dy.dtype).flatten(0, -2)
                grads[number] = dw.to(ctx.dtypes[number])
        if wait:
            wait()
        return total, None, None, *grads


class LinearWithoutDW(torch.autograd.Function):
    """y = x W.T + b. The backward computes dx and db, and leaves dy to `CopyAndDefer`.

    Under autocast dy and the products are in autocast's dtype.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, deferred, number):
        ctx.deferred, ctx.number, ctx.dtype = deferred, number, x.dtype
        ctx.save_for_backward(weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (weight,) = ctx.saved_tensors
        dx = db = None
        if ctx.needs_input_grad[0]:
            dx = (dy @ weight.to(dy.dtype)).to(ctx.dtype)
        if ctx.needs_input_grad[2]:
            db = dy.flatten(0, -2).sum(0).to(weight.dtype)
        ctx.deferred[ctx.number] = dy
        return dx, None, db, None, None


def begin_all_reduce(x, group):
    """Begin to sum x over the ranks of `group`; return the sum, and a function that waits for it.

    On a GPU the kernels of the sum run on a stream of their own.
    """
    if not x.is_cuda:
        return all_reduce(x, group), lambda: None
    compute, side = torch.cuda.current_stream(x.device), stream_of(x.device)
    total = x.clone(memory_format=torch.contiguous_format)
    side.wait_stream(compute)
    with torch.cuda.stream(side):
        all_reduce_(total, group)
    return total, lambda: compute.wait_stream(side)


@cache
def stream_of(device):
    """Return the stream on which this module's sums run."""
    return torch.cuda.Stream(device)
