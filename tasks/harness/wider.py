"""The reference once more, in the next wider dtype: what its own rounding is measured against.

No second model is held for it: a weight is widened where it is used, and again in the backward. So
it takes one layer's wide weights at a time, and a float32 gradient for each gradient compared.
"""

import copy
from functools import partial

import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from harness.float64 import compute_in_float64
from utils.families import FAMILIES

LAYERS = {family.layer: family for family in FAMILIES.values()}
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}


def widen(module):
    """Return a module that computes in the next wider dtype with the very weights of `module`.

    Its gradients become `parameter.exact_grad`, in float32, beside the module's own
    `parameter.grad`; its `zero_grad` clears them. Decoder layers are recomputed in the backward.
    """
    dtype = WIDER[next(module.parameters()).dtype]
    parameters = list(module.parameters())
    wide = copy.deepcopy(module, {id(parameter): parameter for parameter in parameters})
    if dtype == torch.float64:
        compute_in_float64(wide)
    for part in list(wide.modules()):
        for name in [name for name, _ in part.named_parameters(recurse=False)]:
            register_parametrization(part, name, Wide(dtype), unsafe=True)
        family = LAYERS.get(type(part).__name__)
        if family:
            attention = getattr(part, family.attention)
            attention.config.use_cache = False  # a cache would get each token twice
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    wide.zero_grad = partial(forget, parameters)
    wide.zero_grad()
    return wide


def wider_copy(module):
    """Return an ordinary module in the next wider dtype, with weights of its own."""
    dtype = WIDER[next(module.parameters()).dtype]
    wide = copy.deepcopy(module).to(dtype)
    if dtype == torch.float64:
        compute_in_float64(wide)
    return wide


def forget(parameters):
    for parameter in parameters:
        parameter.exact_grad = None


class Wide(nn.Module):
    """A parametrization: the weight in another dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, parameter):
        return Widen.apply(parameter, self.dtype)


class Widen(torch.autograd.Function):
    """parameter.to(dtype), whose gradient is kept in float32, whatever the parameter's dtype."""

    @staticmethod
    def forward(ctx, parameter, dtype):
        ctx.parameter = parameter
        return parameter.to(dtype)

    @staticmethod
    def backward(ctx, grad):
        before = ctx.parameter.exact_grad
        grad = grad.float()
        ctx.parameter.exact_grad = grad if before is None else before + grad
        return None, None
