"""Attention's kernels: right however their tensors lie in memory, on each device."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from utils import kernels
from utils.kernels import attend, attend_backward, bias_of, plain, plain_backward

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
