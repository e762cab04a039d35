"""What is measured and drawn: quickly, on the embedded model."""

import importlib.util
import json
import sys

import pytest
import torch

import launch

sys.path.append(str(launch.ROOT / "figures"))
import draw
import longest
from draw_diagrams import TITLES, Diagram

TECHNIQUES = ["hand-made", "DTensor"]
if importlib.util.find_spec("transformers.distributed"):  # not in the course's version
    TECHNIQUES.append("transformers")
SPEED = launch.ROOT / "figures" / "tp_speed.py"
DIAGRAMS = launch.ROOT / "figures" / "diagrams.json"


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="bytes are not counted on GPUs")
def test_bytes_on_the_wire(tmp_path):
    """Every technique sends what its formula says, within 2 %, and its loss is the reference's."""
    output = tmp_path / "speed.json"
    args = ["--model", "tiny", "--ranks", 2, "--seq-lens", 1024, "--repeats", 1]
    args += ["--techniques", *TECHNIQUES]
    result = launch.run([sys.executable, SPEED, *args, "--output", output])
    assert result.code == 0, result.tail()
    runs = json.loads(output.read_text())["runs"]
    assert [run["technique"] for run in runs] == TECHNIQUES
    for run in runs:
        results = run["results"]
        assert results["parallel"].keys() == {"forward", "backward", "generate"}
        assert results["sent_bytes"] == pytest.approx(results["formula_bytes"], rel=0.02)
        assert run["checks"][0]["name"] == "loss" and run["checks"][0]["passed"]
    # Another setting must not go into the same file.
    result = launch.run([sys.executable, SPEED, *args, "--output", output, "--dtype", "float64"])
    assert result.code != 0 and "another setting" in result.err, result.tail()


@pytest.mark.parametrize("name", ["tp_speed", "longest"])
def test_drawing(name, tmp_path):
    """The committed measurements can be drawn."""
    data = json.loads((SPEED.parent / f"{name}.json").read_text())
    getattr(draw, f"draw_{name}")(data, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_diagrams(tmp_path):
    """What a run holds and sends is what is committed; both pictures are drawn from that."""
    output = tmp_path / "record.json"
    flags = ["--device", "cpu", "--json", output]
    result = launch.torchrun(str(DIAGRAMS.with_suffix(".py")), *flags, nproc=2)
    assert result.code == 0, result.tail()
    data = json.loads(DIAGRAMS.read_text())
    assert json.loads(output.read_text())["results"] == data["results"]
    draw.draw_diagrams(data, tmp_path / "picture.png")
    for technique in TITLES:
        assert (tmp_path / f"{technique}_diagram.png").stat().st_size > 100_000


@pytest.mark.parametrize(("technique", "count"), [("tp", 7), ("ulysses", 6)])
def test_diagrams_show_every_collective(technique, count, tmp_path):
    """None is left out: each has its place between two rows, and every such place is drawn."""
    diagram = Diagram(json.loads(DIAGRAMS.read_text()), technique)
    assert sum(map(len, diagram.sent.values())) == count

    class Asked(dict):
        def get(self, key):
            drawn.add(key)
            return super().get(key)

    drawn, diagram.sent = set(), Asked(diagram.sent)
    diagram.draw(tmp_path / "picture.png")
    assert drawn >= diagram.sent.keys() and (0, True) not in diagram.sent


@pytest.mark.parametrize("limit", [0, 45, 1000, 1040, 5000, 123456])
@pytest.mark.parametrize("estimate", [50, 1000, 130000])
def test_search(limit, estimate, monkeypatch):
    """From any estimate to a length that fits, while 5 % more does not; few runs if it was good."""
    tried = []

    def fits(name, ranks, length, budget):
        tried.append(length)
        return {"length": length} if length <= limit else None

    monkeypatch.setattr(longest, "fits", fits)
    found, record = longest.search("ours", 1, 64, estimate)
    if limit < 34:
        assert (found, record) == (0, None)
    else:
        assert found <= limit <= found * longest.GRAIN + 1 and record == {"length": found}
        assert len(tried) == len(set(tried))
    if estimate * 0.95 < limit < estimate * 1.05:
        assert len(tried) <= 3


def test_longest_as_estimated():
    """What is committed: all found within 10 % of the closed form."""
    for run in json.loads((SPEED.parent / "longest.json").read_text())["runs"]:
        assert run["found"] == pytest.approx(run["estimate"], rel=0.1), run
