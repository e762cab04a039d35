"""Hugging Face's models have float32 parts whatever their dtype; here they are made float64."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from utils.llama import mixed_in


def library_class(module):
    """Return a module's class in transformers, of which a technique may have made a subclass."""
    bases = type(module).__mro__
    return next((base for base in bases if base.__module__.startswith("transformers.")), nn.Module)


def compute_in_float64(model):
    """Make a float64 model's norms and rotary tables compute in float64, too.

    Otherwise a float64 comparison is blunt: the final norm rounds differences below 1e-8 away. The
    reference and the parallel model are changed alike. Works on any module.
    """
    for name, module in list(model.named_modules()):
        parent = model.get_submodule(name.rpartition(".")[0])
        library = library_class(module)
        if library.__name__.endswith("RMSNorm") and not isinstance(module, RMSNorm64):
            x = torch.linspace(-1, 1, len(module.weight), dtype=torch.float64)
            weights, x = {"weight": x + 2}, x * torch.tensor([[1.0], [1e-3]])
            fresh = library(
                len(module.weight), module.variance_epsilon
            )  # without the module's hooks
            before = functional_call(fresh, weights, x)
            # The module stays the same object, because FSDP2 may hold it.
            module.__class__ = mixed_in(RMSNorm64, type(module))
            fresh.__class__ = mixed_in(RMSNorm64, library)
            same_function(module, functional_call(fresh, weights, x), before)
        elif type(module).__name__ == "GPT2Model":
            module.__class__ = mixed_in(GPT2Model64, type(module))
        elif library.__name__.endswith("RotaryEmbedding") and not isinstance(parent, Rotary64):
            rotary = Rotary64(module)
            if module.inv_freq.device.type != "meta":
                x = torch.zeros((), device=module.inv_freq.device)
                args = x, torch.arange(8, device=x.device)[None]
                for ours, theirs in zip(rotary(*args), module(*args), strict=True):
                    same_function(module, ours, theirs)
            setattr(parent, name.rpartition(".")[2], rotary)


def same_function(module, ours, theirs):
    """Raise RuntimeError if the replacement of `module` gives other values, beyond rounding.

    A mistake in a replacement would be in all float64 results alike, so no check would see it. And
    it would make float32's tolerance, which is the distance to float64, allow everything.
    """
    if not (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max():  # so a NaN fails, too
        raise RuntimeError(f"{type(module).__name__}: in float64 it is another function")


class RMSNorm64:
    """LlamaRMSNorm's forward, with mean and root in float64; mixed into a module's class."""

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)


class GPT2Model64:
    """GPT2Model whose mask is float64.

    transformers 4 makes the mask in the default dtype, where float64's lowest number does not fit.
    """

    def forward(self, *args, **kwargs):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return super().forward(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)


class Rotary64(nn.Module):
    """LlamaRotaryEmbedding with its angles, sines and cosines in float64."""

    def __init__(self, rotary):
        super().__init__()
        self.rotary = rotary

    def forward(self, x, position_ids):
        """Return cos, sin (B, S, D). x: for its dtype only; position_ids: (B, S)."""
        self.rotary(x, position_ids)  # some kinds of RoPE set their frequencies by the length
        angles = (position_ids[..., None] * self.rotary.inv_freq.double()).repeat(1, 1, 2)
        scaling = self.rotary.attention_scaling
        return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)
