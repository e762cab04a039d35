"""What is measured and drawn: quickly, on the embedded model."""

import importlib.util
import json
import sys

import pytest
import torch

import launch

sys.path.append(str(launch.ROOT / "figures"))
import draw

TECHNIQUES = ["hand-made", "DTensor"]
if importlib.util.find_spec("transformers.distributed"):  # not in the course's version
    TECHNIQUES.append("transformers")
SPEED = launch.ROOT / "figures" / "tp_speed.py"


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


def test_drawing(tmp_path):
    """The committed measurements can be drawn."""
    data = json.loads((SPEED.parent / "tp_speed.json").read_text())
    draw.draw_tp_speed(data, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000
