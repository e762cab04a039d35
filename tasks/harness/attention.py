"""Which attention kernels a run uses on a GPU, also inside Hugging Face's models."""

import threading
from contextlib import nullcontext
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from utils.kernels import bias_of, cudnn_is_right, kernel_of

# In this order: each takes what those before it do not.
WITH_CUDNN = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
TURN = threading.RLock()
NAMES = {"cudnn": "cuDNN", "plain": "matrix products"}


def use_cudnn_where_right():
    """Let Hugging Face's attention use cuDNN's kernels where `cudnn_is_right`, and nowhere else.

    PyTorch would take them elsewhere, too. Changes a setting of PyTorch and an entry of
    transformers, for the whole process.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = partial(sdpa, before)


def sdpa(before, module, query, key, value, attention_mask, *args, is_causal=None, **kwargs):
    """Call Hugging Face's attention, `before`, with its own arguments; choose the kernel here."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    attend = partial(before, module, query, key, value, attention_mask, *args, **kwargs)
    plain = not kwargs.get("dropout") and kwargs.get("position_bias") is None
    compiling = torch.compiler.is_compiling()
    # Where flash is off, a caller has chosen another kernel. (While compiling, it cannot be read.)
    chosen = not compiling and not torch.backends.cuda.flash_sdp_enabled()
    right = plain and not chosen and cudnn_is_right(query, key, causal, attention_mask)
    kernels = partial(sdpa_kernel, WITH_CUDNN, set_priority=True) if right else nullcontext
    # The setting is the process's: threads of `pipeline_threads.py` take turns to call. (Compiled,
    # a call has its kernel from when it was traced.)
    with nullcontext() if compiling else TURN, kernels():
        return attend(is_causal=is_causal)


def kernels_of(device, dtype, head_dim):
    """Return {kind of call: its kernel, in words} for a model's heads on a GPU; see `kernel_of`."""
    long, short = (torch.empty(1, 1, S, head_dim, dtype=dtype, device=device) for S in (1024, 16))
    seen = torch.ones(1, 1, 16, 16, dtype=torch.bool, device=device)
    kernels = {
        "causal": kernel_of(long, long),
        "causal, short": kernel_of(short, short),
        "masked": kernel_of(short, short, bias=bias_of(seen, short)),
    }
    return {calls: NAMES.get(kernel, kernel) for calls, kernel in kernels.items()}
