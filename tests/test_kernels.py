"""Attention's kernels: right however their tensors lie in memory, on each device."""

import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from harness import attention
from utils import kernels
from utils.kernels import (
    attend,
    attend_backward,
    bias_of,
    cudnn_is_right,
    kernel_of,
    plain,
    plain_backward,
)

B, N, K, S, D = 2, 6, 3, 37, 16
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: its kernels are not run")
# Of each dtype, how far a kernel may be off, by rms, as a share of the values' rms.
NEAR = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}
LAYOUTS = {
    "contiguous": torch.Tensor.contiguous,
    "heads last": kernels.heads_last,
    "numbers apart": lambda t: torch.stack([t, 9 * t], dim=-1)[..., 0],
    "numbers first": lambda t: t.mT.contiguous().mT,
    "a slice of longer ones": lambda t: F.pad(t, (0, 0, 3, 5), value=9)[:, :, 3:-5],
}


def problem(dtype, device, masked, expanded=False):
    """(q, k, v), the output's gradient, and a bias or None.

    expanded: all heads are one, and all numbers of the gradient are one, without memory.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(heads):
        if expanded:
            return draw_one(1).expand(-1, heads, -1, -1)
        return draw_one(heads)

    def draw_one(heads):
        return torch.randn(B, heads, S, D, generator=generator).to(device, dtype)

    q, k, v, grad = draw(N), draw(K), draw(K), draw(N)
    if expanded:
        grad = grad.new_ones(()).expand(B, N, S, D)
    if not masked:
        return (q, k, v), grad, None
    seen = torch.ones(B, 1, S, S, dtype=torch.bool, device=device).tril()
    seen[1, ..., :5] = False  # padding on the left: a query there sees itself
    seen |= torch.eye(S, dtype=torch.bool, device=device)
    return (q, k, v), grad, bias_of(seen, q)


def expected(qkv, grad, bias):
    """Output, log-sum-exps and the gradients of q, k, v, written out in float64."""
    *qkv, grad = (t.double() for t in (*qkv, grad))
    bias = None if bias is None else bias.double()
    o, lse = plain(*qkv, bias is None, bias)
    return o, lse, *plain_backward(grad, *qkv, o, lse, bias is None, bias)


def found(qkv, grad, bias, place=torch.Tensor.contiguous):
    """The same by the kernels; place: how the output lies that the backward is given."""
    o, lse, rest = attend(*qkv, bias is None, bias)
    gradients = attend_backward(grad, *qkv, place(o), lse, rest, bias is None, bias)
    return o, lse, *gradients


def assert_near(results, exact, dtype):
    for name, one, other in zip(("o", "lse", "dq", "dk", "dv"), results, exact, strict=True):
        error = (one.double() - other).square().mean().sqrt()
        assert error <= NEAR[dtype] * other.square().mean().sqrt(), (name, error.item())


DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("device", DEVICES)
def test_layouts(device, dtype, masked):
    """Each tensor in each layout by itself, and all in it."""
    qkv, grad, bias = problem(dtype, device, masked)
    exact = expected(qkv, grad, bias)
    for place in LAYOUTS.values():
        for which in (*range(5), None):
            placed = [place(t) if which in (i, None) else t for i, t in enumerate((*qkv, grad))]
            of_o = place if which in (4, None) else torch.Tensor.contiguous
            assert_near(found(placed[:3], placed[3], bias, of_o), exact, dtype)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("device", DEVICES)
def test_expanded(device, dtype, masked):
    """Heads that are one in memory, and a gradient that is one number there, as of `.sum()`."""
    qkv, grad, bias = problem(dtype, device, masked, expanded=True)
    exact = expected(qkv, grad, bias)
    assert_near(found(qkv, grad, bias, lambda o: o[:, :1].expand_as(o)), exact, dtype)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", NEAR)
def test_old_cpu_kernel(dtype, masked, monkeypatch):
    """As with a PyTorch whose kernel wants a KV head for each query head."""
    monkeypatch.setattr(kernels, "cpu_kernel_supports_gqa", lambda: False)
    test_layouts("cpu", dtype, masked)


# ---------------------------------------------------------------- which kernel

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# (capability, dtype, D, queries, keys, causal, bias): the kernel.
CHOICES = {
    ((9, 0), F64, 64, 512, 512, True, False): "plain",
    ((9, 0), BF16, 60, 512, 512, True, False): "plain",
    ((7, 5), BF16, 64, 512, 512, True, False): "plain",
    ((9, 0), BF16, 64, 512, 512, True, False): "cudnn",
    ((9, 0), BF16, 128, 131, 131, True, False): "cudnn",
    ((9, 0), BF16, 64, 256, 128, False, False): "cudnn",
    ((9, 0), BF16, 64, 256, 192, False, False): "flash",  # keys that end within a tile
    ((9, 0), BF16, 64, 192, 128, False, False): "flash",
    ((9, 0), BF16, 64, 256, 128, True, False): "efficient",  # flash counts from the last key
    ((9, 0), BF16, 64, 1, 128, False, False): "flash",  # a token that is decoded
    ((9, 0), BF16, 64, 127, 127, True, False): "flash",
    ((9, 0), BF16, 136, 512, 512, True, False): "flash",
    ((8, 0), BF16, 64, 512, 512, True, False): "flash",
    ((10, 0), BF16, 64, 512, 512, True, False): "flash",  # wrong there with few KV heads
    ((9, 0), F16, 64, 512, 512, True, False): "flash",
    ((9, 0), BF16, 64, 512, 512, True, True): "efficient",
    ((9, 0), BF16, 264, 512, 512, True, False): "efficient",
    ((9, 0), F32, 64, 512, 512, True, False): "efficient",
    ((7, 5), F16, 64, 512, 512, True, False): "efficient",
}


def on_gpu(dtype, D, *lengths):
    """What `kernel_of` looks at of tensors (1, 2, length, D) on a GPU, without one."""
    device = SimpleNamespace(type="cuda")
    return [SimpleNamespace(device=device, dtype=dtype, shape=(1, 2, S, D)) for S in lengths]


@pytest.mark.parametrize("case", CHOICES)
def test_which_kernel(case, monkeypatch):
    """The table in `kernel_of`, row by row, on GPUs that are not here."""
    capability, dtype, D, S, T, causal, biased = case
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q, k = on_gpu(dtype, D, S, T)
    bias = q if biased else None
    assert kernel_of(q, k, causal, bias) == CHOICES[case]
    assert cudnn_is_right(q, k, causal, bias) == (CHOICES[case] == "cudnn")
    q, k = (torch.empty(t.shape, dtype=dtype) for t in (q, k))
    assert kernel_of(q, k, causal) == "cpu" and not cudnn_is_right(q, k, causal)


def test_not_by_cudnn_where_bits_must_be_the_same(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    q, k = on_gpu(BF16, 64, 512, 512)
    assert kernel_of(q, k) == "flash"


@pytest.mark.parametrize("kind", ["flash", "cudnn", "efficient"])
def test_arguments_of_gpu_kernels(kind, monkeypatch):
    """They are called by their schemas, forward and backward: of shapes alone, without a GPU."""
    monkeypatch.setattr(kernels, "kernel_of", lambda *_: kind)
    q, k, v = (torch.empty(B, n, 256, 64, dtype=BF16, device="meta") for n in (N, K, K))
    o, lse, rest = attend(q, k, v)
    assert o.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == F32
    gradients = attend_backward(torch.empty_like(o), q, k, v, o, lse, rest)
    assert [g.shape for g in gradients] == [t.shape for t in (q, k, v)]


@pytest.mark.parametrize("right", [True, False])
def test_hugging_faces_attention(right, monkeypatch):
    """Its call is the same but for the kernels that PyTorch may take in it."""
    monkeypatch.setattr(attention, "cudnn_is_right", lambda *_: right)
    allowed = []

    def before(*args, **kwargs):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return sdpa_attention_forward(*args, **kwargs)

    (q, k, v), _, _ = problem(F32, "cpu", False)
    module = SimpleNamespace(is_causal=True, num_key_value_groups=N // K)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        o, _ = attention.sdpa(before, module, q, k, v, None, scaling=D**-0.5)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert allowed == [right]
    with sdpa_kernel(SDPBackend.MATH):  # chosen by a caller
        attention.sdpa(before, module, q, k, v, None, scaling=D**-0.5)
    assert allowed == [right, False]
    assert torch.equal(o, sdpa_attention_forward(module, q, k, v, None, scaling=D**-0.5)[0])


@pytest.mark.stress
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler, which torch.compile wants")
def test_the_choice_is_compiled(monkeypatch):
    """A layer with it is one graph, and the setting is as before."""
    monkeypatch.setattr(attention, "cudnn_is_right", lambda *_: True)
    before = modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes, **heads))
    ids = torch.arange(24)[None]
    expected = model(ids, labels=ids).loss
    try:
        attention.use_cudnn_where_right()
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"] = before
        torch.backends.cuda.enable_cudnn_sdp(True)
    torch.testing.assert_close(loss, expected)


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="no GPU of capability 9: cuDNN's kernels are not run",
)


@HOPPER
@pytest.mark.parametrize("lengths", [(131, 131), (192, 192), (256, 256), (256, 128), (128, 384)])
@pytest.mark.parametrize("low", [False, True])
def test_cudnn(lengths, low):
    """Its numbers are the plain ones; also in rows whose log-sum-exps are far below 0.

    There an exponential of what lies behind the last key is infinite (pytorch issue 196678).
    """
    S, T = lengths
    generator = torch.Generator().manual_seed(0)
    shapes = (B, N, S, 64), (B, K, T, 64), (B, K, T, 64), (B, N, S, 64)
    q, k, v, grad = (torch.randn(shape, generator=generator).cuda().bfloat16() for shape in shapes)
    if low:
        q[..., 0], k[..., 0] = 1, -120 * 8
    causal = S == T
    assert kernel_of(q, k, causal) == "cudnn"
    o, lse, rest = attend(q, k, v, causal)
    results = o, lse, *attend_backward(grad, q, k, v, o, lse, rest, causal)
    q, k, v, grad = (t.double() for t in (q, k, v, grad))
    exact = plain(q, k, v, causal, None)
    exact += tuple(plain_backward(grad, q, k, v, *exact, causal, None))
    if low:  # what is the same for all keys takes no part: no gradient, and a part of each lse
        assert (results[2][..., 0].abs() < 1).all() and (exact[2][..., 0].abs() < 1e-9).all()
        results, exact = (
            (o, lse + 120, dq[..., 1:], *others) for o, lse, dq, *others in (results, exact)
        )
    assert_near(results, exact, BF16)


# ---------------------------------------------------------------- a GPU kernel as it reads memory


def as_it_reads(t, strides):
    """The numbers of t where a kernel finds them that takes these strides for granted."""
    return torch.as_strided(t, t.shape, strides)


def rows_of_numbers(t):
    return as_it_reads(t, (*t.stride()[:-1], 1))


def efficient(q, k, v, bias, with_lse, dropout, causal):
    o, lse = plain(*map(rows_of_numbers, (q, k, v)), causal, bias)
    lse = F.pad(lse, (0, -S % kernels.EFFICIENT_ROWS), value=torch.inf)
    return LAYOUTS["heads last"](o), lse, torch.tensor(0), torch.tensor(0)


def efficient_backward(grad, q, k, v, bias, o, lse, seed, offset, dropout, wanted, causal):
    assert lse.shape[-1] % kernels.EFFICIENT_ROWS == 0 and lse.is_contiguous()
    if bias is not None:  # alignment, which the kernel asserts
        assert all(stride % 16 == 0 for stride in bias.stride()[:-1]) and bias.stride(-1) == 1
    o = as_it_reads(o, (S * N * D, D, N * D, 1))
    grad, q, k, v = map(rows_of_numbers, (grad, q, k, v))
    return *plain_backward(grad, q, k, v, o, lse[..., :S], causal, bias), None


def as_on_a_gpu(monkeypatch):
    """The efficient kernel in the CPU's place; it takes memory layouts for granted as that does."""
    fake = {"": efficient, "_backward": efficient_backward}
    name = "_scaled_dot_product_efficient_attention"
    aten = SimpleNamespace(**{name + end: function for end, function in fake.items()})
    monkeypatch.setattr(kernels, "aten", aten)
    monkeypatch.setattr(kernels, "kernel_of", lambda *_: "efficient")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_of_the_efficient_kernel(dtype, masked, monkeypatch):
    """Its backward reads o as (B, S, N, D) in memory: given otherwise, dq and dk were wrong."""
    as_on_a_gpu(monkeypatch)
    test_layouts("cpu", dtype, masked)
    test_expanded("cpu", dtype, masked)


def test_the_imitation_is_as_strict(monkeypatch):
    """Without `heads_last` and `contiguous_last_dim` the tests above would fail."""
    as_on_a_gpu(monkeypatch)
    for name, left_out in (
        ("heads_last", lambda t: t),
        ("contiguous_last_dim", lambda *tensors: tensors),
    ):
        with monkeypatch.context() as without:
            without.setattr(kernels, name, left_out)
            with pytest.raises((AssertionError, RuntimeError)):
                test_layouts("cpu", torch.bfloat16, True)
