"""Tensor x sequence parallelism: all meshes and ways, odd sizes, and what is refused."""

import itertools
from types import SimpleNamespace

import pytest

import launch
from runs import checks, passed
from tp_ulysses import default_tp, ulysses_degree

FILE = launch.TASKS / "tp_ulysses.py"
WAYS = [[], ["--sequence", "ring"], ["--sequence", "usp"], ["--megatron-sp"],
        ["--megatron-sp", "--sequence", "ring"]]  # fmt: skip
MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (2, 3)]
QUICK = [([], (2, 2), 31), (["--megatron-sp"], (2, 2), 32)]
RUNS = [
    pytest.param(way, mesh, seq_len, marks=[] if (way, mesh, seq_len) in QUICK
                 else pytest.mark.stress, id=f"{' '.join(way)}-{mesh[0]}x{mesh[1]}-{seq_len}")
    for (i, way), (j, mesh) in itertools.product(enumerate(WAYS), enumerate(MESHES))
    for seq_len in [31 + (i + j + 1) % 2]
]  # fmt: skip


def run(tmp_path, model, sp, tp, seq_len, *flags):
    """In float64, a padded batch of 2: all checks pass; the record's results."""
    path = tmp_path / "record.json"
    args = ["--model", model, "--sp", sp, "--tp", tp, "--seq-len", seq_len, "--repeats", 0]
    args += [*flags, "--new-tokens", 3, "--dtype", "float64", "--json", path]
    result = launch.ranks(FILE, *args, nproc=sp * tp, folder=tmp_path)
    passed(result, sp * tp)
    return checks(path, sp * tp, "float64")[0]["results"], result.out


@pytest.mark.parametrize(
    ("heads", "ranks", "sequence", "tp"),
    [
        ((8, 4), 4, "ulysses", 2), ((8, 4), 3, "ulysses", 1), ((8, 4), 1, "ulysses", 1),
        ((6, 3), 6, "ulysses", 3), ((6, 3), 6, "ring", 2), ((6, 3), 8, "ulysses", 2),
        ((9, 3), 9, "ulysses", 1), ((1, 1), 4, "ring", 1),
    ],
)  # fmt: skip
def test_default_mesh(heads, ranks, sequence, tp):
    """One that the heads allow. If none is, the usual one, whose refusal says why."""
    sizes = zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True)
    assert default_tp(SimpleNamespace(**dict(sizes)), ranks, sequence) == tp


@pytest.mark.parametrize(("way", "mesh", "seq_len"), RUNS)
def test_meshes(way, mesh, seq_len, odd_llama, tmp_path):
    """Heads, units, words and tokens that do not divide; bytes as the formula has them."""
    results, _ = run(tmp_path, odd_llama, *mesh, seq_len, *way)
    if "sent_bytes" in results:  # not of a sequence that was padded
        assert results["sent_bytes"] == pytest.approx(results["formula_bytes"], rel=0.02)


@pytest.mark.parametrize(("sp", "tp", "ulysses"), [
    (4, 1, 2), pytest.param(6, 1, 3, marks=pytest.mark.stress),
    pytest.param(6, 1, 2, marks=pytest.mark.stress),
    pytest.param(4, 2, 2, marks=pytest.mark.stress),
])  # fmt: skip
def test_both_at_once(sp, tp, ulysses, odd_llama, tmp_path):
    """USP: heads are exchanged among some, whose tokens together are one of a ring's."""
    flags = ["--sequence", "usp", "--ulysses", ulysses]
    results, out = run(tmp_path, odd_llama, sp, tp, 37, *flags)
    assert f"sequence: {ulysses} neighbours exchange heads, in rings of {sp // ulysses}" in out
    assert results["sent_bytes"] == pytest.approx(results["formula_bytes"], rel=0.02)


def test_how_many_neighbours():
    assert ulysses_degree(8, num_kv_heads=4, machine=8) == 4
    assert (
        ulysses_degree(8, num_kv_heads=8, machine=2) == 2
    )  # the ring goes from machine to machine
    assert ulysses_degree(6, num_kv_heads=4, machine=6) == 3
    assert (
        ulysses_degree(5, num_kv_heads=4, machine=5)
        == ulysses_degree(4, num_kv_heads=1, machine=0)
        == 1
    )


@pytest.mark.parametrize(("flags", "message"), [
    (["--tp", 3], "--sp 1 times --tp 3 is not 2, the number of ranks"),
    (["--sp", 2, "--sequence", "usp", "--ulysses", 3], "--ulysses 3: does not divide --sp 2"),
    (["--ulysses", 2], "--ulysses: not with --sequence ulysses"),
])  # fmt: skip
def test_refused(flags, message, tmp_path):
    launch.ranks(FILE, *flags, nproc=2, folder=tmp_path).assert_refused(message)


@pytest.mark.stress
def test_heads_left_of_tp(odd_llama, tmp_path):
    """6 query heads, 3 KV heads: over tp 2 a rank has one KV head's."""
    args = ["--model", odd_llama, "--sp", 3, "--tp", 2]
    result = launch.ranks(FILE, *args, nproc=6, folder=tmp_path)
    result.assert_refused("2 query heads of a rank (6 over tp 2) for 3 ranks that exchange heads")
