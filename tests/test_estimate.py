"""`make estimate`: its formulas beside steps that are run, what it prints, and bad input."""

import json
import shutil

import pytest

import launch
from figures.plan.estimate_check import BUILD
from figures.plan.formulas import Work
from figures.plan.techniques import TECHNIQUES, TILED, estimates
from harness.model_checks import number_of_parameters
from loading.models import Source
from loading.presets import PRESETS
from utils.errors import UserError

FILES = launch.FIGURES / "plan"
SMALL = ["--model", "random/small", "--num-layers", 4]


@pytest.mark.parametrize("model", [*(f"random/{preset}" for preset in PRESETS), "odd"])
def test_number_of_parameters(model, odd_llama):
    """odd: one with biases, and more odd sizes."""
    source = Source(str(odd_llama) if model == "odd" else model)
    assert Work(source.config, 8).parameters() == number_of_parameters(source)


def check(tmp_path, *flags, nproc=2, files=FILES, **more):
    path = tmp_path / "record.json"
    words = [*SMALL, *flags, "--json", path]
    file = files / "estimate_check.py"
    return launch.ranks(file, *words, nproc=nproc, folder=tmp_path, **more), path


@pytest.mark.parametrize("names", [["tp"], pytest.param(["fsdp2"], marks=pytest.mark.stress)])
def test_peaks(names, tmp_path):
    """Within 10 % of what tensors and the process hold, and 2 % of the bytes."""
    result, path = check(tmp_path, "--technique", *names)
    assert result.code == 0 and result.out.count("Tests passed") == 2, result.tail()
    checked = [one["name"] for one in json.loads(path.read_text())["checks"]]
    assert sum("peak of" in name for name in checked) == 2 * len(names), checked  # all are large


@pytest.mark.stress
@pytest.mark.parametrize(("flags", "nproc"), [
    ([], 3), (["--dtype", "float64", "--technique", "tp", "1f1b", "ddp", "ulysses"], 2),
    (["--seq-len", 2048, "--batch-size", 1, "--technique", "tp", "2d"], 3),
    # Few layers: logits are the most. Few tokens and a tied embedding: parameters are.
    (["--num-layers", 3, "--seq-len", 600, "--technique", "megatron-sp", "usp", "1f1b"], 2),
    (["--model", "random/llama-3.2-1b-32k", "--num-layers", 3, "--seq-len", 32,
      "--technique", "tp", "fsdp2"], 2),
])  # fmt: skip
def test_all_peaks(flags, nproc, tmp_path):
    """Three ranks share neither heads nor words nor tokens evenly."""
    result, path = check(tmp_path, *flags, nproc=nproc, timeout=1800)
    assert result.code == 0 and result.out.count("Tests passed") == nproc, result.tail()
    compared = [one["name"] for one in json.loads(path.read_text())["checks"]]
    assert any("peak of process" in name for name in compared), compared  # they were large enough
    if "--technique" not in flags:
        assert set(json.loads(path.read_text())["results"]["techniques"]) == set(BUILD)


@pytest.mark.stress
def test_peaks_of_two_axes(tmp_path):
    """Where neither is all ranks."""
    names = ["usp", "tp x ulysses", "tp x ring", "2d"]
    result, _ = check(tmp_path, "--technique", *names, nproc=4, timeout=600)
    assert result.code == 0 and result.out.count("Tests passed") == 4, result.tail()


@pytest.mark.parametrize("name", ["sequence_speed", "sequence_speed_4"])
def test_splits_as_estimated(name):
    """What is committed, of recomputed layers and tiles: peaks, bytes and longest sequences."""
    results = json.loads((launch.RECORDS / f"{name}.json").read_text())["results"]
    for ways in results["lengths"].values():
        for of in ways.values():
            assert of["peak"][1] == pytest.approx(of["peak"][0], rel=0.1)
            assert of["bytes"][1] == pytest.approx(of["bytes"][0], rel=0.02)
    for found, said in results["longest"].values():
        assert said == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(("old", "new"), [
    ("4 * up(self.F, P) * e", "0"), pytest.param(
        "return work.e + work.w + work.e", "return 0 * work.e", marks=pytest.mark.stress
    ),
])  # fmt: skip
def test_a_formula_that_is_wrong(old, new, tmp_path):
    """What a layer keeps, and what the loss takes."""
    ignored = shutil.ignore_patterns("__pycache__", "*.png", "records", "outputs")
    shutil.copytree(launch.FIGURES, tmp_path / "figures", ignore=ignored)
    launch.copy_tasks(tmp_path / "tasks")
    path = tmp_path / "figures" / "plan" / "formulas.py"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    flags = ["--technique", "one process", "--num-layers", 8]
    result, _ = check(tmp_path, *flags, nproc=1, files=path.parent)
    assert result.code != 0 and "FAILED one process: peak of" in result.out, result.tail()


def test_every_technique_is_known():
    assert {"finetune", "kv-cache"} == set(TECHNIQUES) - set(BUILD)  # not a training of weights


def test_thousands_of_ranks():
    """Each technique has numbers for them, or says why not."""
    config = Source("random/llama-3.1-8b").config
    work = Work(config, 4096, 4)
    whole = estimates("by-hand", work, 1)[0]
    for name in TECHNIQUES:
        for P in 1, 2, 4096:
            try:
                ways = estimates(name, work, P)
            except UserError:
                assert P > 1
                continue
            for way in ways:
                assert way.peak > 0 and (P == 1 or way.sent > 0)
    many = estimates("fsdp2", work, 4096)[0]
    assert whole.parameters <= many.parameters * 4096 < 1.2 * whole.parameters  # rows are padded
    assert many.kept == whole.kept and many.peak < whole.peak


@pytest.fixture
def planner(tmp_path):
    """A function that runs it with these flags."""
    alone = dict(nproc=1, folder=tmp_path, torchrun=False)
    return lambda *flags: launch.ranks(FILES / "estimate.py", *flags, **alone)


def table(planned):
    """What stands before the legend."""
    return planned.out.split("\n\n")[0].splitlines()


def test_fewest_ranks_that_fit(planner):
    """Half as many do not."""
    flags = ["--model", "random/llama-3.1-8b", "--device-memory", 80, "--dtype", "bfloat16"]
    summary = planner(*flags)
    assert summary.code == 0, summary.tail()
    rows = {line[:12].strip(): line for line in table(summary)[2:]}
    assert set(rows) == set(TECHNIQUES) and "more memory than that" in rows["ddp"]
    ranks = int(rows["2d"][12:].split()[0])
    each = planner(*flags, "--technique", "2d", "--max-ranks", ranks)
    *_, before, last = table(each)
    assert ranks > 1 and last == rows["2d"] + "  fits" and not before.endswith("fits")


def test_with_tiles(planner):
    """Recomputed layers: far less is kept, and more is sent; what is not known is refused."""
    work = dict(config=Source("random/llama-3.2-1b").config, S=4096)
    for name in TILED:
        P = 1 if name == "one process" else 2
        plain, tiled = (estimates(name, Work(**work, tile=tile), P)[0] for tile in (None, 512))
        assert tiled.kept < plain.kept / 4 and tiled.peak < plain.peak, name
        assert tiled.sent > plain.sent or P == 1
    with pytest.raises(UserError, match="not worked out"):
        estimates("1f1b", Work(**work, tile=512), 2)
    shown = planner("--technique", "1f1b", "tp", "--tile", 512, "--max-ranks", 2)
    assert "1f1b         not worked out" in shown.out and len(table(shown)) == 5


@pytest.mark.parametrize(("flags", "message"), [
    (["--model", "random/none"], "--model random/none: no such preset"),
    (["--device-memory", "0"], "--device-memory"), (["--technique", "magic"], "--technique"),
])  # fmt: skip
def test_refused(flags, message, planner):
    result = planner(*flags)
    assert result.code == 2 and message in result.err.splitlines()[-1], result.tail()


def test_heads_that_do_not_divide():
    """The rank with most of them: 9 query and 3 KV heads on 8 ranks."""
    config = Source("random/small").config
    config.num_attention_heads, config.num_key_value_heads = 9, 3
    assert Work(config, 8).heads(8) == [2, 1]


def test_beside_the_article():
    """The article's own number for its own model, and this project's."""
    flags = ["--model", "random/7b", "--batch-size", 1, "--seq-len", 256, "--article"]
    result = launch.run([*launch.program("plan.estimate"), *flags])
    peak = next(line for line in result.out.splitlines() if line.startswith("peak")).split()
    assert result.code == 0 and peak == ["peak", "59.77", "58.88"], result.tail()
