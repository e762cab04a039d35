"""Compile layers by torch.compile, for --compile."""

import os
import shutil
import sys
import time

import torch

from utils.errors import UserError
from utils.families import base_of, layers_of

RECOMPILING = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}


def compile_layers(model, device):
    """Have each layer of a Llama compiled by torch.compile, when it is first run.

    What a technique put into and around a layer is compiled with it, collectives included. Layers
    of one kind are compiled once. Raises UserError where a CPU has no C++ compiler.
    """
    set_up_compiler(device)
    # With a KV cache each layer would be compiled anew, for its own part of the cache.
    model.config.use_cache = model.generation_config.use_cache = False
    for layer in layers_of(model):
        layer.compile()


def compile_norms_and_mlps(model, device):
    """Have norms (not those of heads) and MLPs compiled, for generation with a KV cache.

    These are most of the small kernels of a token's step, and do not touch the cache. One
    compilation serves all layers.
    """
    set_up_compiler(device)
    base_of(model).norm.compile()
    for layer in layers_of(model):
        for part in layer.input_layernorm, layer.post_attention_layernorm, layer.mlp:
            part.compile()


def set_up_compiler(device):
    """Raise UserError where a CPU has no C++ compiler; let too many compilations be an error.

    A function is compiled anew for each kind of input. After too many kinds, PyTorch would run
    it uncompiled, and the checks would not be of compiled code. (Older PyTorch warns.)
    """
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and not shutil.which(compiler):
        raise UserError(f"--compile: on a CPU it needs a C++ compiler; there is no {compiler}")
    for name, value in RECOMPILING.items():
        if hasattr(torch.compiler.config, name):
            setattr(torch.compiler.config, name, value)


def time_first_forward(model, tell):
    """Call tell(seconds) after a model's first forward, the one in which layers are compiled."""
    base, begin = base_of(model), []

    def before(*_):
        begin.append(time.perf_counter())

    def after(*_):
        for hook in hooks:
            hook.remove()
        tell(time.perf_counter() - begin[0])

    hooks = base.register_forward_pre_hook(before), base.register_forward_hook(after)
