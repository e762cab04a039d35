"""A property test of the loader and the losses: see random_models.py."""

import re

import pytest

import launch
from planting import plant

FILE = launch.HELPERS / "random_models.py"


def check(first, count, folder, tasks=launch.TASKS):
    """The Result of so many seeds, on 2 ranks, with what their directories hold in `folder`."""
    return launch.ranks(FILE, tasks, folder, first, count, nproc=2, folder=folder, timeout=600)


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 20), *(pytest.param(first, 50, marks=pytest.mark.stress) for first in (20, 70, 120, 170))],
)
def test_random_models(first, count, tmp_path):
    """Each loaded by `from_pretrained` and by us, each through Tasks 2 and 4 in float64."""
    result = check(first, count, tmp_path)
    said = f"{count} models, from seed {first} on"
    assert result.code == 0 and result.out.count(said) == 2, result.tail()


BUGS = {
    # name: (file, right, wrong, what is said)
    "a setting is not read": (
        "models.py", '"output_hidden_states", "output_attentions",',
        '"output_hidden_states", "output_attentions", "rms_norm_eps",', "AssertionError",
    ),
    "an index goes before one file": (
        "models.py", "if index.exists() and not single:", "if index.exists():", "AssertionError",
    ),
    "a slice begins too early": (
        "shards.py", "region[dim] = slice(first + start, first + stop)",
        "region[dim] = slice(first + start - (start > 0), first + stop - (start > 0))",
        "logits: off",
    ),
    "padding learns": (
        "tp_llama.py", "self.num_embeddings, self.padding_idx)", "self.num_embeddings, None)",
        "gradient of model.embed_tokens.weight",
    ),
    "a KV head's gradient is one rank's": (
        "shards.py", "return copy_to_region(self.weight, group), bias",
        "return self.weight, bias", "gradient of .*k_proj.weight|v_proj.weight",
    ),
    "a mean over tokens without labels, too": (
        "sequence.py", "(targets != -100).sum()", "targets.numel()", "loss: off",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_random_models_with_a_bug(name, tmp_path):
    """The seed is printed where one fails."""
    *edit, said = BUGS[name]
    plant(tmp_path / "tasks", *edit)
    result = check(0, 10, tmp_path, tmp_path / "tasks")
    assert result.code == 1 and re.search(said, result.err), result.tail()
    assert re.search(r"^seed \d: \{", result.out, re.MULTILINE), result.tail()
