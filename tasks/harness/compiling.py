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
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and not shutil.which(compiler):
        raise UserError(f"--compile: on a CPU it needs a C++ compiler; there is no {compiler}")
    # With a KV cache each layer would be compiled anew, for its own part of the cache.
    model.config.use_cache = model.generation_config.use_cache = False
    # A function is compiled anew for each kind of input. Too many compilations are made an error:
    # else PyTorch would run the function uncompiled, and the checks would not be of compiled code.
    # (Older PyTorch warns.)
    for name, value in RECOMPILING.items():
        if hasattr(torch.compiler.config, name):
            setattr(torch.compiler.config, name, value)
    for layer in layers_of(model):
        layer.compile()


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
