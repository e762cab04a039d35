"""The tolerance of float32 and bfloat16: what it measures, refuses, and must not refuse."""

import contextlib
import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import launch
from figures.bench import few_tokens
from harness import float64, tolerance
from harness.checks import Comparison, nearest_of
from harness.float64 import compute_in_float64
from harness.generation import check_text
from harness.model_checks import model_step, plain_loss
from harness.tolerance import independent_roundings, judge, measure, worst_relative
from harness.wider import widen
from loading.models import Source
from planting import plant
from utils.losses import token_losses

DTYPES = torch.float32, torch.bfloat16


def share(*pairs, dtype=torch.float32, least_error=0.0):
    """The largest share of a limit; more than 1 is refused."""
    many = [measure(*pair, least_error) for pair in pairs]
    return max(judged[0] for judged in judge(many, dtype, worst_relative(many)))


def three(*shape, size=1.0, noise=1e-6, seed=0):
    """A run, a reference and exact values, both as far off."""
    generator = torch.Generator().manual_seed(seed)
    exact, *errors = torch.randn(3, *shape, generator=generator) * size
    return *(exact + noise * error for error in errors), exact


@pytest.mark.parametrize("chunk", [1, 100, 2**22])
def test_norms(chunk, monkeypatch):
    """They are what their names say, however many rows are taken at a time."""
    monkeypatch.setattr(tolerance, "CHUNK", {"cpu": chunk})
    actual, reference, exact = three(2, 9, 11)
    norms = measure(actual, reference, exact).norms
    for i, values in enumerate((actual - exact, reference - exact, exact)):
        rows = values.view(18, 11).double()
        assert norms["rms"][i].item() == pytest.approx(rows.square().mean().sqrt().item())
        if i != 1:  # the reference's is at least what is to be expected
            assert norms["max"][i].item() == pytest.approx(rows.abs().max().item())
        torch.testing.assert_close(norms["row"][i], rows.square().mean(1).sqrt())
        torch.testing.assert_close(norms["column"][i], rows.square().mean(0).sqrt())
    error, values = (actual - exact).view(18, 11).double(), exact.view(18, 11).double()
    for kind, dims in {"scale": (0, 1), "row scale": 1, "column scale": 0}.items():
        slope = ((error * values).sum(dims) / values.square().sum(dims)).abs().flatten()
        torch.testing.assert_close(norms[kind][0], slope)


# ---------------------------------------------------------------- other roundings, few tokens


@pytest.fixture
def own_roundings(monkeypatch):
    """Linear layers add as before once the test is over."""
    monkeypatch.setattr(F, "linear", F.linear)


@pytest.mark.parametrize("tokens", few_tokens.TOKENS)
@pytest.mark.parametrize("layer", few_tokens.LAYERS)
def test_other_roundings(layer, tokens, own_roundings):
    """Right gradients pass, however a kernel adds; wrong ones do not, where values are small."""
    for seed in range(6 if tokens == 1 else 2):
        right = few_tokens.gradients(layer, seed, tokens)
        for weight, pairs in right.items():
            assert few_tokens.share(pairs) < 1, (weight, seed)
    for what in few_tokens.WRONG:
        for name, pairs in few_tokens.make_wrong(right, what, torch.float32).items():
            assert few_tokens.share(pairs) > 1, (what, name)


def test_one_rounding_a_head(own_roundings):
    """A head whose reference is 20 times nearer to the exact values than the run, by chance."""
    right = few_tokens.gradients("Task 1, packed", 99, 3)
    assert few_tokens.share(right["q_proj.weight"]) < 0.5


@pytest.mark.parametrize("seed", [7, 1])
def test_one_token_with_other_roundings(seed, tmp_path):
    """The README's first command, smaller, as another computer would add."""
    flags = ["--hidden-size", 512, "--intermediate-size", 1792, "--device", "cpu"]
    path = launch.TASKS / "tp_mlp.py"
    result = launch.ranks(path, *flags, nproc=2, folder=tmp_path, rounding=seed)
    assert result.code == 0 and result.out.count("Tests passed") == 2, result.tail()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_few_tokens(tokens, dtype):
    """A row of a weight's gradient is a number for each token, off by chance, times its input."""
    torch.manual_seed(tokens)
    exact, (numbers, of_reference, of_run) = torch.randn(tokens, 64), torch.randn(3, 256, tokens)
    noise = torch.finfo(dtype).eps
    numbers[7], of_reference[7] = noise / 10, 0.0  # almost nothing; the reference is right
    numbers[64:128] *= 1e-4  # a head whose values are small
    of_run[64:128], of_reference[64:128] = 1e-4 * of_run[64:128], 1e-4 * of_reference[64:128]
    run, *others = [(numbers + noise * error) @ exact for error in (of_run, of_reference, 0.0)]
    assert share((run, *others), dtype=dtype) < 1
    for rows in (slice(0, 64), slice(64, 128), slice(200, 201)):  # heads, and one row
        wrong = run.clone()
        wrong[rows] *= 1.01 if dtype == torch.float32 else 2
        assert share((wrong, *others), dtype=dtype) > 1, rows


def test_one_word(monkeypatch):
    """Where all keys are alike, a head of the queries' gradient has one rounding, along the head.

    So the reference may be right in all rows of two faint heads by chance.
    """
    torch.manual_seed(0)
    keys, (inputs, of_run, of_reference) = torch.randn(8 * 32), torch.randn(3, 8)
    of_run[:2], of_reference[:2] = 1.0, 0.01

    def gradient(roundings=0.0):
        heads = torch.ones(8)
        heads[:2] = 0.01  # and as far off as the others
        heads += 1e-5 * roundings
        return (heads.repeat_interleave(32) * keys)[:, None] * inputs

    three = gradient(of_run), gradient(of_reference), gradient()
    assert share(three) < 1
    wrong = three[0].clone()
    wrong[64:96] *= 1.01
    assert share((wrong, *three[1:])) > 1
    monkeypatch.setattr(tolerance, "SHARED", 2)
    assert share(three) > 1


def test_one_column():
    """Of LoRA of rank 1: one token's rounding is a scale. Its rms and its largest value count."""
    torch.manual_seed(0)
    exact = torch.randn(64, 1)
    run, reference = exact * (1 + 2e-6), exact + 3e-7 * torch.randn(64, 1)
    assert share((run, reference, exact)) < 1 < share((run.mT[0], reference.mT[0], exact.mT[0]))
    assert share((exact * 1.01, reference, exact)) > 1


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_sums_of_few_rows(tokens):
    """A kernel of few rows may add one by one, where the reference's of more adds in blocks."""
    torch.manual_seed(0)
    weight, grad = torch.randn(32_000, 64), torch.randn(32_000)
    exact = (grad.double() @ weight.double()).float().expand(tokens, 64)
    one_by_one = torch.zeros(64)
    for products in grad[:, None] * weight:
        one_by_one += products
    run, reference = one_by_one.expand(tokens, 64), (grad.expand(8, -1) @ weight)[:tokens]
    many = [measure(run, reference, exact)]

    def nearest(longest_sum):
        judged = judge(many, torch.float32, worst_relative(many), longest_sum)
        return max(judged[0] for judged in judged)

    assert nearest(len(weight)) < 1
    many = [measure(exact * (1 + 1e-3), reference, exact)]
    assert nearest(len(weight)) > 1


def test_largest_share():
    """Of all tensors of a check, and not of the one that is nearest to a limit."""
    actual, reference, exact = three(40, 50)
    run, rounded, right = three(40, 50, noise=1e-3)
    pairs = (actual * (1 + 1e-4), reference, exact), (run, rounded, right)
    many = [measure(*pair) for pair in pairs]
    record = nearest_of(many, torch.float32, worst_relative(many[:1]), 1)
    assert record["max_abs_diff"] / record["max_abs_reference"] < 2e-4  # it is the first
    expected = ((run - right).abs().max() / right.abs().max()).item()
    assert record["largest_share"] == pytest.approx(expected, rel=1e-3) and expected > 5e-4
    nothing = three(40, 50, noise=1e3)  # only rounding
    assert measure(*nothing).largest_share == 0.0


def test_independent_roundings():
    """They are as many as tokens took part, in rows and in columns; or as a row has values."""
    torch.manual_seed(0)
    for tokens in (1, 2, 4, 8, 16):
        error = torch.randn(1000, tokens) @ torch.randn(tokens, 500)
        for dim in (0, 1):
            number = independent_roundings(error, 0 * error, dim, torch.arange(32))
            assert number == pytest.approx(tokens, rel=0.3)
    error = torch.randn(100, 9)
    assert independent_roundings(error, 0 * error, 0, torch.arange(32)) == pytest.approx(9, rel=0.2)
    error[1:] = 0  # all in one row
    assert independent_roundings(error, 0 * error, 0, torch.arange(32)) == math.inf


def test_part_below_the_noise():
    """A column's values are half of the reference's error in it: its scale is nothing."""
    actual, reference, exact = three(200, 40, noise=0.05)
    values, noise = torch.randn(2, 200, generator=torch.manual_seed(1))
    exact[:, 0] = 0.005 * values
    reference[:, 0], actual[:, 0] = exact[:, 0] + 0.01 * noise, exact[:, 0] + 0.07 * values
    assert 0.3 < share((actual, reference, exact)) < 1
    actual[:, 0] *= 4
    assert share((actual, reference, exact)) > 1


def test_tensor_below_the_noise():
    """Of a whole tensor the errors average out also then: what is left out is refused."""
    actual, reference, exact = three(64, 576, noise=1.2)
    assert share((actual, reference, exact)) < 1 < share((actual - exact, reference, exact))


def test_rounding_hides_nothing():
    """A gradient that should be zero, and is rounding: others of its kind are held as ever."""
    actual, reference, exact = three(30, 40, seed=1)
    noise = three(30, 40, noise=1e-9, size=1e-17)
    assert share((actual, reference, exact), noise) < 1
    assert share((-exact, reference, exact), noise) > 1
    assert share((actual, reference, exact), (noise[0] * 30, *noise[1:])) > 1


@pytest.mark.parametrize("what", ["norm", "RoPE"])
def test_float64_is_the_same_function(what, monkeypatch):
    """A mistake there would be in both sides of float64, and allow float32 everything."""
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=8, vocab_size=10,
    ))  # fmt: skip
    compute_in_float64(copy.deepcopy(model).double())
    if what == "norm":
        monkeypatch.setattr(
            float64.RMSNorm64, "forward", lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight)
        )
    else:
        turn = float64.Rotary64.forward
        monkeypatch.setattr(
            float64.Rotary64, "forward", lambda *args: tuple(1.01 * x for x in turn(*args))
        )
    with pytest.raises(RuntimeError, match="another function"):
        compute_in_float64(model.double())


@pytest.mark.parametrize("shape", [(300, 400), (1, 40), (4, 3), (7,), (1,)])
def test_right_runs_pass(shape):
    """A hundred of them; of a single value only where its usual error is known from others."""
    for seed in range(100):
        least_error = 1e-6 if shape == (1,) else 0.0
        assert share(three(*shape, seed=seed), least_error=least_error) < 1


def test_a_lucky_reference_refuses_nobody():
    """Of two alike tensors it is exact in one."""
    (a, _, x), pair = three(30, 40), three(30, 40, seed=1)
    assert share((a, x, x), pair) < 1 < share((a, x, x))
    assert share((x + 2**-24 * x.abs(), x, x)) < 1  # but for one rounding


@pytest.mark.parametrize("value", [0.0, 1.01, torch.nan, torch.inf])
@pytest.mark.parametrize("part", ["row", "column", "element"])
def test_small_and_wrong(part, value):
    """What is small beside the rest, and wrong, is seen."""
    actual, reference, exact = three(50, 60)
    where = {"row": (7,), "column": (slice(None), 7), "element": (7, 7)}[part]
    if part != "element":
        for tensor in (actual, reference, exact):
            tensor[where] *= 1e-5  # 1 % of it is less than any bound by the largest value sees
    assert share((actual, reference, exact)) < 1
    actual[where] *= value
    assert share((actual, reference, exact)) > 1


@pytest.mark.parametrize(("part", "value"), [("all", 0), ("all", 1.2), ("row", 0), ("row", 1.8)])
def test_large_errors_hide_no_scale(part, value):
    """Where each value may be 20 % off, as in bfloat16 after many layers, on every rank."""
    pairs = [three(64, 576, noise=0.2, seed=seed) for seed in range(3)]
    assert share(*pairs) < 1
    where = {"all": slice(None), "row": 5}[part]
    pairs[1][0][where] *= value
    assert share(*pairs) > 1


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_reference_must_be_finite(value):
    """Else there is nothing to be right by."""
    actual, reference, exact = three(5)
    reference[0] = value
    assert share((actual, reference, exact)) > 1


def test_zeros_must_be_zeros():
    zeros = torch.zeros(10, 10)
    assert share((zeros, zeros, zeros)) == 0
    assert share((zeros + 1e-30, zeros, zeros)) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_widened(dtype):
    """The very weights, wider: a gradient beside the module's own, which stays as it was."""
    source, ids = Source("tiny"), torch.arange(20).view(2, 10)
    model = source.load_model(dtype, torch.device("cpu"))
    wide = widen(model)
    copied = copy.deepcopy(model).to(torch.float64 if dtype == torch.float32 else torch.float32)
    if dtype == torch.float32:
        compute_in_float64(copied)

    def loss(module, inputs):
        value = plain_loss(module, ids, **inputs)
        return value, value

    model_step(model, ids, torch.ones_like(ids), loss)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    results = [model_step(module, ids, torch.ones_like(ids), loss) for module in (wide, copied)]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * theirs.abs().max().item())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, before[name])
        exact = copied.get_parameter(name).grad.float()
        bound = 1e-6 * exact.abs().max().item()
        torch.testing.assert_close(parameter.exact_grad, exact, rtol=0, atol=bound)
    assert {id(p) for p in wide.parameters()} == {id(p) for p in model.parameters()}


def test_token_losses():
    """As PyTorch has them, but for labels of -100 and its rounding."""
    logits, labels = torch.randn(2, 9, 49_152) * 4, torch.randint(49_152, (2, 9))
    labels[1, :4] = -100
    exact = torch.nn.functional.cross_entropy(
        logits[:, :-1].double().flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    )
    found = token_losses(logits, labels)
    torch.testing.assert_close(found.double().flatten(), exact, rtol=2e-7, atol=4e-6)
    assert token_losses(logits.bfloat16(), labels).dtype == torch.float32


class Run(Comparison):
    """As much of `job.Run` as one rank's checks take; a refusal is an exception."""

    rank, world_size, device, tokenizer = 0, 1, torch.device("cpu"), None

    def __init__(self, dtype):
        self.dtype, self.checks, self.compared = dtype, [], {}

    def print0(self, line):
        pass

    def show_texts(self, *texts):
        pass

    def broadcast(self, value):
        return value

    def gather_objects(self, value):
        return [value]

    def exit(self, code):
        raise SystemExit(code)


@pytest.mark.parametrize(("dtype", "gap"), [(d, gap) for d in DTYPES for gap in (0.5, 20)])
def test_ties(dtype, gap):
    """A text may part from the reference's where rounding may have decided, and nowhere else."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = Run(dtype)
        model = run.place(Source("tiny").load_model(dtype, run.device))
        references = run.references(model)
        ids = torch.arange(1, 6)[None]
        logits, exact = (m(ids).logits[0, -1].double() for m in references)
        first, other = logits.topk(2).indices
        with torch.no_grad():  # `other` as far behind as `gap` largest errors of the reference
            want = exact[first] - gap * (logits - exact).abs().max()
            model.lm_head.weight[other] *= (want / exact[other]).to(dtype)
        texts = [torch.cat([ids, token.view(1, 1)], dim=1) for token in (other, first)]
        with contextlib.nullcontext() if gap < 1 else pytest.raises(SystemExit):
            check_text(run, *texts, references, torch.ones_like(ids), show=False)
        assert run.checks[-1]["name"] == "generated tokens, two as likely at token 5"
        assert run.checks[-1]["passed"] == (gap < 1)
    finally:
        dist.destroy_process_group()


SUMS = """
import sys
sys.path.insert(0, {tasks!r})
import torch, torch.distributed as dist
from utils import collectives
from utils.collectives import all_reduce, all_reduce_

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    for size in (7, 50_001):
        mine = torch.randn(size).bfloat16()
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        once = torch.stack(everyone).double().sum(0).bfloat16()
        assert torch.equal(all_reduce(mine, dist.group.WORLD), once)
        all_reduce_(mine, dist.group.WORLD)
        assert torch.equal(mine, once)
        own = everyone[dist.get_rank()]
    collectives.PRECISE = False  # the library's own: other roundings, from three ranks on
    dist.all_reduce(theirs := own.clone())
    all_reduce_(ours := own.clone(), dist.group.WORLD)
    assert torch.equal(ours, theirs) and torch.equal(ours, once) == (dist.get_world_size() < 3)
    dist.destroy_process_group()
    print("summed")
"""


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_half_precision_sums_round_once(nproc, tmp_path):
    (tmp_path / "sums.py").write_text(SUMS.format(tasks=str(launch.TASKS)))
    result = launch.ranks(tmp_path / "sums.py", nproc=nproc, folder=tmp_path)
    assert result.code == 0 and result.out.count("summed") == nproc, result.tail()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("or not PRECISE:", "or True:"), ("or not PRECISE:", "or False:")],
    ids=["each time", "always once"],
)
def test_sums_that_round_otherwise(right, wrong, tmp_path):
    plant(tmp_path / "tasks", "collectives.py", right, wrong)
    (tmp_path / "sums.py").write_text(SUMS.format(tasks=str(tmp_path / "tasks")))
    result = launch.ranks(tmp_path / "sums.py", nproc=3, folder=tmp_path)
    assert result.code == 1 and "AssertionError" in result.err, result.tail()
