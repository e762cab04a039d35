"""Ring attention: who has what when, blocks and kernels, any length on any number of ranks."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import launch
from ring_attention import Ring, merge
from runs import checks, passed
from utils.kernels import attend, attend_backward, plain, plain_backward
from utils.partition import shard_range
from utils.sequence import MaskInfo

FILE = launch.TASKS / "ring_attention.py"
STRESS = pytest.mark.stress


def rings(P, length, zigzag):
    """The ring as each of P ranks sees it."""
    groups = [SimpleNamespace(size=lambda: P, rank=lambda r=r: r) for r in range(P)]
    return [Ring(group, length, zigzag) for group in groups]


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("P", range(1, 10))
def test_who_has_what(P, zigzag):
    """Each query meets each key that it may see once, on the way; no chunk goes where it is of no
    use; each rank has the tokens that `shard_range` says, and of P ranks all have the same work.
    """
    for length in (P, P + 1, 2 * P, 53, 120 * P):
        every, met, hops = rings(P, length, zigzag), [], 0
        order = every[0].order()
        assert sorted(order.tolist()) == list(range(length))
        for ring in every:
            rank, mine = ring.rank, ring.chunks(ring.rank)
            first, stop = shard_range(length, P, rank)
            assert sum(map(ring.size, mine)) == stop - first
            tokens = torch.cat([torch.arange(length)[ring.tokens[chunk]] for chunk in mine])
            assert torch.equal(order[first:stop], tokens)
            for hop in range(P):
                here = ring.chunks_at(rank, hop)
                pairs = [(i, j) for i, j in product(mine, here) if j <= i]
                met.append((rank, pairs))
                assert not hop or length < 2 * P or {j for _, j in pairs} == set(here)
                hops += hop and sum(map(ring.size, here))
                # What comes is what the rank before had, and has not been the last to need.
                before = ring.along(rank, -1)
                assert set(ring.chunks_at(rank, hop + 1) if hop + 1 < P else []) <= set(
                    ring.chunks_at(before, hop)
                )
        chunks = [c for c in range(len(ring.tokens)) if ring.size(c)]
        assert sorted(pair for _, pairs in met for pair in pairs) == [
            (i, j) for i in chunks for j in chunks if j <= i
        ]
        if length == 120 * P and P > 1:
            assert hops / ((P - 1) * length) == (0.75 if zigzag else 0.5)
            work = [0] * P
            for rank, pairs in met:
                work[rank] += sum(1 if i > j else 0.5 for i, j in pairs)
            most = max(work) / (sum(work) / P)
            assert most == pytest.approx(1 if zigzag else 2 - 1 / P)


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_documents(P, zigzag):
    """Each query meets all keys of its document; other blocks are left out, and not waited for."""
    length = 60
    for starts in ([0], [0, 30], [0, 7, 8, 59], range(0, 60, 5), range(60)):
        places = torch.arange(length)
        documents = torch.stack([(places >= start) for start in starts]).sum(0)[None]
        groups = [SimpleNamespace(size=lambda: P, rank=lambda r=r: r) for r in range(P)]
        mask = MaskInfo(length, documents=documents)
        every, met = [Ring(group, length, zigzag, mask) for group in groups], []
        for ring in every:
            mine = ring.chunks(ring.rank)
            for hop in range(P):
                here = ring.chunks_at(ring.rank, hop)
                met += [(i, j) for i, j in product(mine, here) if ring.needs(i, j)]
        assert len(set(met)) == len(met)
        seen = torch.zeros(length, length, dtype=torch.bool)
        for i, j in met:
            bias = every[0].bias(i, j, torch.zeros(()))
            block = torch.ones(1) if bias is None else bias[0, 0] == 0
            seen[ring.tokens[i], ring.tokens[j]] = block.bool()
        wanted = (documents.mT == documents).tril()
        assert torch.equal(seen.tril(), wanted), (starts, P)
        chunks = range(len(ring.tokens))
        needed = {(i, j) for i, j in product(chunks, repeat=2)
                  if wanted[ring.tokens[i], ring.tokens[j]].any()}  # fmt: skip
        assert set(met) == needed
        if len(starts) == length:
            assert not any(ring.last_hop)  # nothing is sent


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_blocks(dtype):
    """Keys in two parts, some hidden: outputs merge into those of all, gradients add up to them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 13, 8, dtype=dtype, requires_grad=True) for heads in (6, 3, 3))
    bias = torch.zeros(2, 1, 1, 13, dtype=dtype)
    bias[1, ..., :4] = -torch.inf
    whole = F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    grad = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, (q, k, v), grad)
    near = dict(rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
    cuts = slice(0, 4), slice(4, 13)
    with torch.no_grad():
        for forward, backward in ((attend, attend_backward), (plain, plain_backward)):
            biases = [bias[..., cut].expand(-1, -1, 13, -1) for cut in cuts]
            parts = []
            for cut, hidden in zip(cuts, biases, strict=True):
                o, lse, *_ = forward(q, k[:, :, cut], v[:, :, cut], False, hidden)
                nothing = (hidden == -torch.inf).all(-1)
                parts.append((o, lse.masked_fill(nothing, -torch.inf)))
            o, lse = merge(parts[1], parts[0])
            torch.testing.assert_close(o, whole.detach(), **near)
            dq, dkv = 0, []
            for cut, hidden in zip(cuts, biases, strict=True):
                rest = [()] if backward is attend_backward else []
                more, *both = backward(
                    grad, q, k[:, :, cut], v[:, :, cut], o, lse, *rest, False, hidden
                )
                dq, dkv = dq + more, [*dkv, both]
            found = dq, *(torch.cat(of, 2) for of in zip(*dkv, strict=True))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, **near)


def test_causal_block():
    """Without a kernel as with the CPU's."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 7, 8, dtype=torch.float64) for heads in (4, 2, 2))
    grad = torch.randn_like(q)
    (o, lse, _), (plain_o, plain_lse) = attend(q, k, v), plain(q, k, v, True, None)
    torch.testing.assert_close((o, lse), (plain_o, plain_lse), rtol=0, atol=1e-12)
    found = attend_backward(grad, q, k, v, o, lse)
    torch.testing.assert_close(
        found, plain_backward(grad, q, k, v, o, lse, True, None), rtol=0, atol=1e-12
    )


def test_a_ring_is_built_once():
    """One for each forward, not for each layer; and never one of a mask that has changed."""
    result = launch.torchrun(launch.HELPERS / "ring_cache.py", launch.TASKS, nproc=2, timeout=120)
    assert not result.code and result.out.count("counted (rank=") == 2, result.tail()


RUNS = [(2, 31), (3, 31), (4, 31), (5, 29), (6, 7), (7, 37), (4, 3), (1, 31)]
QUICK_RUNS = [("contiguous", 3, 31), ("zigzag", 4, 3)]


@pytest.mark.parametrize(
    ("layout", "nproc", "seq_len"),
    [
        pytest.param(layout, *run, marks=[] if (layout, *run) in QUICK_RUNS else STRESS)
        for layout in ("zigzag", "contiguous")
        for run in RUNS
    ],
)
def test_any_ranks(layout, nproc, seq_len, odd_llama, tmp_path):
    """Prime lengths, a padded batch of 2, more ranks than KV heads, than heads, than tokens."""
    path = tmp_path / "record.json"
    args = ["--model", odd_llama, "--layout", layout, "--seq-len", seq_len, "--repeats", 0]
    args += ["--new-tokens", 4, "--dtype", "float64", "--json", path]
    result = launch.ranks(FILE, *args, nproc=nproc, folder=tmp_path)
    passed(result, nproc)
    record = checks(path, nproc, "float64")[0]["results"]
    if seq_len >= nproc:
        assert record["sent_bytes"] == pytest.approx(record["formula_bytes"], rel=1e-6)


@pytest.mark.parametrize(
    ("peft", "nproc", "more"),
    [
        ("prompt", 3, []),
        pytest.param("lora", 4, [], marks=STRESS),
        pytest.param("none", 2, [], marks=STRESS),
        pytest.param("prompt", 7, ["--num-virtual-tokens", 40], marks=STRESS),
        pytest.param("lora", 2, ["--no-long-sequence"], marks=STRESS),
        pytest.param("prompt", 2, ["--gradient-checkpointing"], marks=STRESS),
    ],
)
def test_training(peft, nproc, more, odd_llama, tmp_path):
    """Task 5 by a ring, and each memory technique: as plain PEFT. More virtual tokens than text."""
    path = tmp_path / "record.json"
    args = ["--attention", "ring", "--model", odd_llama, "--peft", peft, "--seq-len", 23]
    args += ["--batch-size", 2, "--steps", 2, "--check-steps", 2, "--dtype", "float64"]
    file = launch.TASKS / "ulysses_finetune.py"
    result = launch.ranks(file, *args, *more, "--json", path, nproc=nproc, folder=tmp_path)
    passed(result, nproc)
    checks(path, nproc, "float64")
