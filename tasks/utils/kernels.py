"""Attention by the device's own kernels, with the log-sum-exps that `scaled_dot_product_attention`
keeps to itself. So a backward needs no second forward, and results for blocks of keys can merge.

Shapes as in `utils/__init__.py`. Source: FlashAttention-2, arXiv 2307.08691, section 3.1.
"""

from functools import cache

import torch
import torch.nn.functional as F

aten = torch.ops.aten
# What a selective checkpoint keeps: the outputs of attention's kernels, on the CPU and on CUDA.
# (Lists that are made for CUDA leave out the CPU's kernel: then the CPU runs attention twice.)
ATTENTION_OPS = [
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]
EFFICIENT_ROWS = 32  # the efficient kernel's log-sum-exps are padded to a multiple of it
CUDNN_TILE = 128  # rows that cuDNN's kernels take at a time


def kernel_of(q, k, causal=True, bias=None):
    """Return which kernel takes q (B, n, S, D) and k (B, k, T, D), in forward and backward.

        device  dtype               heads       what is seen                kernel
        cpu     any                 any         anything                    cpu
        cuda    float64             any         anything                    plain, written out below
                any                 D % 8 != 0  anything                    plain
                bfloat16            any         anything, GPUs before 8.0   plain
                bfloat16            D <= 128    see `cudnn_is_right`        cudnn
                bfloat16, float16   D <= 256    no bias; GPUs from 8.0 on   flash
                others                                                      efficient

    (8.0: the GPU's compute capability. Where causal attention has more or fewer keys than queries,
    flash would align the last ones, not the first: there "efficient" is taken.)
    """
    if q.device.type == "cpu":
        return "cpu"
    if q.dtype == torch.float64 or q.shape[-1] % 8:
        return "plain"
    new = torch.cuda.get_device_capability(q.device) >= (8, 0)
    if q.dtype == torch.bfloat16 and not new:  # older GPUs have no kernel for it
        return "plain"
    if cudnn_is_right(q, k, causal, bias):
        return "cudnn"
    half = q.dtype.itemsize == 2 and bias is None and q.shape[-1] <= 256
    from_start = not causal or q.shape[2] == k.shape[2]
    return "flash" if half and new and from_start else "efficient"


def cudnn_is_right(q, k, causal=True, bias=None):
    """Tell whether cuDNN's kernels are right here; they are quicker, by a third or more on an H200.

    They are right for bfloat16 without a bias, D <= 128, and 128 queries or more: if causal, with
    as many keys; else with whole tiles of 128. Elsewhere they may go wrong, without an error.
    Gradients may be NaN where log-sum-exps are far below 0: with a bias, with keys that end within
    a tile (pytorch issue 196678), or with few queries (cudnn-frontend issue 1072). On Blackwell few
    KV heads may give wrong numbers (pytorch issue 193893): so only GPUs of capability 9 use them.
    As their backward adds in any order, they are not used with deterministic algorithms.
    """
    if q.device.type != "cuda" or q.dtype != torch.bfloat16 or bias is not None:
        return False
    if torch.cuda.get_device_capability(q.device)[0] != 9 or q.shape[-1] > 128 or q.shape[-1] % 8:
        return False
    S, T = q.shape[2], k.shape[2]
    whole_tiles = S % CUDNN_TILE == 0 and T % CUDNN_TILE == 0
    shapes = S >= CUDNN_TILE and (S == T if causal else whole_tiles)
    return shapes and not torch.are_deterministic_algorithms_enabled()


def repeat_kv_heads(keys, heads):
    """Repeat KV heads (B, k, S, D), each for all its query heads; if k is 1, without a copy."""
    if keys.shape[1] == 1:
        return keys.expand(-1, heads, -1, -1)
    return keys.repeat_interleave(heads // keys.shape[1], 1)


def sum_over_heads(num_kv_heads, *gradients):
    """Sum gradients of repeated KV heads, (B, heads, S, D), into `num_kv_heads`."""
    if gradients[0].shape[1] == num_kv_heads:
        return gradients
    return [gradient.unflatten(1, (num_kv_heads, -1)).sum(2) for gradient in gradients]


@cache
def cpu_kernel_supports_gqa():
    """Tell whether the CPU's kernel is right for fewer KV heads than query heads.

    PyTorch 2.7's kernel accepts them, but reads past the last KV head, where this test has ones.
    """
    q, kv = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8)
    kv[:, 1] = 1
    o, _ = aten._scaled_dot_product_flash_attention_for_cpu(q, kv[:, :1], kv[:, :1])
    return not o.any()


def bias_of(seen, like):
    """Return what is added to scores: 0 where `seen`, bool (..., T), else minus infinity."""
    T = seen.shape[-1]
    # Rows of a multiple of 16 numbers: the efficient kernel takes no others.
    bias = like.new_zeros(*seen.shape[:-1], T + -T % 16)[..., :T]
    return bias.masked_fill_(~seen, -torch.inf)


def as_taken(kernel, heads, *keys):
    """Return KV heads (B, k, T, D) as a kernel takes them: as they are, or one per query head."""
    grouped = kernel in ("flash", "cudnn") or (kernel == "cpu" and cpu_kernel_supports_gqa())
    return keys if grouped else [repeat_kv_heads(t, heads) for t in keys]


def contiguous_last_dim(*tensors):
    """Return the tensors (..., D) with stride 1 in their last dim, as every kernel needs them.

    The CPU's kernel does not look at this stride, and gives wrong numbers for another stride, such
    as that of an expanded gradient, which `.sum()` gives.
    """
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def materialized(*tensors):
    """Return the tensors without strides of 0, such as expanded ones have: cuDNN takes none."""
    return [t.contiguous() if 0 in t.stride() else t for t in tensors]


def heads_last(t):
    """Lay out t, (B, n, S, D), as (B, S, n, D) in memory; no copy if it lies so already."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def attend(q, k, v, causal=True, bias=None):
    """Attend from q (B, n, S, D) to k, v (B, k, T, D): (o, log-sum-exps (B, n, S), rest).

    causal: token i sees keys 0 to i. bias: (B, 1, S, T), of q's dtype, is added to the scores (see
    `bias_of`); with a bias, `causal` is ignored. rest: more arguments for `attend_backward`. A
    query that sees nothing gets 0, and a log-sum-exp that means nothing.
    """
    causal = causal and bias is None
    kernel = kernel_of(q, k, causal, bias)
    q, k, v = contiguous_last_dim(q, k, v)
    if kernel == "plain":
        return *plain(q, k, v, causal, bias), ()
    k, v = as_taken(kernel, q.shape[1], k, v)
    if kernel == "cpu":
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return *flash(q, k, v, 0.0, causal, attn_mask=bias), ()
    if kernel == "flash":
        o, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:8]
        return o, lse, rest
    if kernel == "cudnn":
        cudnn = aten._scaled_dot_product_cudnn_attention
        o, lse, *rest = cudnn(*materialized(q, k, v), None, True, 0.0, causal)[:8]
        return o, lse[..., 0], rest  # (B, n, S, 1)
    bias = None if bias is None else bias.expand(len(q), q.shape[1], -1, -1)
    efficient = aten._scaled_dot_product_efficient_attention
    o, lse, *rest = efficient(q, k, v, bias, True, 0.0, causal)
    return o, lse[..., : q.shape[2]], rest


def attend_backward(grad, q, k, v, o, lse, rest=(), causal=True, bias=None):
    """Compute the gradients of q, k, v; attention is not run again.

    o, lse: over all keys that the queries see. k, v may be a block of these keys: dk, dv and this
    block's part of dq are exact, as exp(scores - lse) with the lse of all keys is the true softmax.
    Each tensor may lie in memory in any way.
    """
    num_kv_heads, causal = k.shape[1], causal and bias is None
    kernel = kernel_of(q, k, causal, bias)
    grad, q, k, v, o = contiguous_last_dim(grad, q, k, v, o)
    if kernel == "plain":
        return plain_backward(grad, q, k, v, o, lse, causal, bias)
    k, v = as_taken(kernel, q.shape[1], k, v)
    if kernel == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(grad, q, k, v, o, lse, 0.0, causal, attn_mask=bias)
        return dq, *sum_over_heads(num_kv_heads, dk, dv)
    lse = lse.contiguous()
    if kernel == "flash":
        backward = aten._scaled_dot_product_flash_attention_backward
        return backward(grad, q, k, v, o, lse, *rest[:4], 0.0, causal, *rest[4:])
    if kernel == "cudnn":
        backward = aten._scaled_dot_product_cudnn_attention_backward
        tensors, seeds = materialized(grad, q, k, v, o), rest[4:]
        return backward(*tensors, lse[..., None], *seeds, None, *rest[:4], 0.0, causal)
    bias = None if bias is None else bias.expand(len(q), q.shape[1], -1, -1)
    lse = F.pad(lse, (0, -lse.shape[-1] % EFFICIENT_ROWS), value=torch.inf)
    o = heads_last(o)  # for bfloat16 the kernel reads it so, whatever its strides
    backward = aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    dq, dk, dv, _ = backward(grad, q, k, v, bias, o, lse, *rest, 0.0, wanted, causal)
    return dq, *sum_over_heads(num_kv_heads, dk, dv)


# ---------------------------------------------------------------- without a kernel


def wide(*tensors):
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def scores(q, k, causal, bias):
    """Compute all scores at once: (B, k, n/k, S, T)."""
    q = q.unflatten(1, (k.shape[1], -1)) / q.shape[-1] ** 0.5
    s = q @ k[:, :, None].mT
    if causal:
        later = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(later, -torch.inf)
    return s if bias is None else s + bias[:, :, None]


def plain(q, k, v, causal, bias):
    """Do what `attend` does, written out."""
    (k, v), s = wide(k, v), scores(*wide(q, k), causal, bias)
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp().nan_to_num(0)
    return (p @ v[:, :, None]).flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def plain_backward(grad, q, k, v, o, lse, causal, bias):
    """Do what `attend_backward` does, written out."""
    heads = k.shape[1], -1
    q, k, v, *others = wide(q, k, v, grad, o, lse)
    do, o, lse = (t.unflatten(1, heads) for t in others)
    p = (scores(q, k, causal, bias) - lse[..., None]).exp()
    dv = (p.mT @ do).sum(2)
    ds = p * (do @ v[:, :, None].mT - (do * o).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    return (ds @ k[:, :, None]).flatten(1, 2), (ds.mT @ q.unflatten(1, heads)).sum(2), dv
