"""What people reported of other codebases, or of this one from outside. Each test names its kind.

(Of directories that are read as another model than transformers', test_loading.py; of steps that
add up, test_pipeline.py.)
"""

import json
import shutil

import pytest
import torch
from transformers import LlamaForCausalLM

import launch
from loading.models import TRANSFORMERS_4
from planting import plant

REPLICAS = """
import sys
sys.path.insert(0, {tasks!r})
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM
from tp_llama import tensor_parallelize
from ulysses_forward import sequence_parallelize
from utils.replicas import sum_gradients
from utils.shards import shard_of

if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica, _ = mesh.get_coordinate()
    whole = LlamaForCausalLM.from_pretrained({model!r}).float()
    ids = torch.arange(4 * 16).view(4, 16) * 7 % 1500 + 2
    labels = ids.clone()
    labels[2:, :10] = -100  # the second replica has fewer labels
    count = (labels[:, 1:] != -100).sum()
    whole(ids, labels=labels).loss.backward()
    rows = slice(2 * replica, 2 * replica + 2)
    given = dict(input_ids=ids[rows], labels=labels[rows], num_items_in_batch=count)
    for split in tensor_parallelize, sequence_parallelize:
        for by_ddp in False, True:
            model = LlamaForCausalLM.from_pretrained({model!r}).float()
            split(model, mesh["tp"])
            if by_ddp:
                called = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
                (called(**given).loss * mesh["dp"].size()).backward()
            else:
                model(**given).loss.backward()
                sum_gradients(model.parameters(), mesh["dp"])
            if split is sequence_parallelize:
                sum_gradients(model.parameters(), mesh["tp"])
            for name, parameter in model.named_parameters():
                expected = whole.get_parameter(name).grad
                bound = 1e-5 * expected.abs().max().item()
                mine = expected[shard_of(parameter)]
                torch.testing.assert_close(parameter.grad, mine, rtol=0, atol=bound)
    dist.barrier()
    print("replicated")
"""


def test_replicas_of_a_split_model(tmp_path):
    """A recipe of the pages, to the letter: gradients of replicas, summed or by DDP."""
    model = str(launch.TASKS / "tiny_llama")
    (tmp_path / "replicas.py").write_text(REPLICAS.format(tasks=str(launch.TASKS), model=model))
    result = launch.ranks(tmp_path / "replicas.py", nproc=4, folder=tmp_path)
    assert result.code == 0 and result.out.count("replicated") == 4, result.tail()


def variant(folder, generation=None, **changes):
    """The embedded model in a directory of its own, with settings changed."""
    shutil.copytree(
        launch.TASKS / "tiny_llama", folder, ignore=shutil.ignore_patterns("*.py", "__pycache__")
    )
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
SETTINGS = {
    # name: (generation_config.json, changes of config.json, scripts)
    "use_cache false": (None, {"use_cache": False}, ["kv_cache"]),
    "a repetition penalty, several ends": (
        {"eos_token_id": [0, 15], "repetition_penalty": 1.5, "do_sample": True, "top_p": 0.9,
         "stop_strings": ["."], "max_time": 0.1}, {}, ["tp_llama", "dtensor_llama"],
    ),
    "dynamic RoPE": (
        None, {"rope_scaling": DYNAMIC, "max_position_embeddings": 64}, ["kv_cache"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_folder(name, tmp_path):
    """Settings inherited from a folder: a right run is not refused for them."""
    generation, changes, scripts = SETTINGS[name]
    model = variant(tmp_path / "model", generation, **changes)
    args = ["--model", model, "--dtype", "float64", "--repeats", 0]
    for script in scripts:
        file = launch.TASKS / f"{script}.py"
        result = launch.ranks(file, *args, nproc=2, folder=tmp_path)
        assert result.code == 0 and result.out.count("Tests passed") == 2, result.tail()
        said = "max_time, repetition_penalty, stop_strings of"
        assert result.out.count(said) == ("penalty" in name), result.tail()


def test_cached_keys_keep_their_factors(tmp_path):
    """RoPE that depends on the length: where cached text would mean nothing, that is said."""
    factors = {"short_factor": [1.0] * 12, "long_factor": [1.0] * 6 + [4.0] * 6, "factor": 4.0}
    rope = factors | {"rope_type": "longrope", "original_max_position_embeddings": 20}
    model, file = variant(tmp_path / "model", rope_scaling=rope), launch.TASKS / "kv_cache.py"
    args = ["--model", model, "--repeats", 0, "--prompt", "A quick brown fox", "--new-tokens"]
    result = launch.ranks(file, *args, 30, nproc=2, folder=tmp_path)
    result.assert_refused("RoPE longrope has other factors beyond 20 tokens")
    result = launch.ranks(file, *args, 4, nproc=2, folder=tmp_path)
    assert result.code == 0 and result.out.count("Tests passed") == 2, result.tail()


def test_end_of_a_text_is_kept(tmp_path):
    """What a folder says goes along when all weights are trained and written, as by the library."""
    generation = {"eos_token_id": [0, 15], "pad_token_id": 1, "temperature": 0.7}
    changes = {"use_cache": False, "attention_dropout": 0.1, "dtype": "bfloat16", "made_by": "us"}
    model = variant(tmp_path / "model", generation, **changes)
    args = ["--model", model, "--peft", "none", "--steps", 1, "--check-steps", 1, "--seq-len", 32]
    file = launch.TASKS / "ulysses_finetune.py"
    args += ["--output-dir", tmp_path / "out"]
    result = launch.ranks(file, *args, nproc=2, folder=tmp_path)
    assert result.code == 0, result.tail()
    dtype = {"torch_dtype" if TRANSFORMERS_4 else "dtype": torch.float32}
    LlamaForCausalLM.from_pretrained(model, **dtype).save_pretrained(tmp_path / "plain")
    for name in "config.json", "generation_config.json":
        ours, theirs = (
            json.loads((tmp_path / folder / name).read_text()) for folder in ("out/model", "plain")
        )
        theirs.pop("_name_or_path", None)  # transformers 4's, of this machine
        assert ours == theirs
    assert ours.items() >= generation.items()


FEW_TOKENS = {
    # name: (text, ranks, flags)
    "one token": ("a" * 200, 3, ["--seq-len", 5]),
    "one token, longer": ("a" * 200, 2, ["--seq-len", 23, "--batch-size", 2]),
    "two tokens": ("ab" * 100, 2, ["--seq-len", 7]),
    "one token, packed": ("\n\n".join("a" * (3 + n % 9) for n in range(60)), 2,
                          ["--pack", "--seq-len", 41]),
}  # fmt: skip


def train_on(text, folder, nproc, flags, tasks=launch.TASKS):
    """The Result of a step of Task 5, in float32: each memory technique by itself, and all."""
    (folder / "text.txt").write_text(text)
    args = ["--model", "random/small", "--num-layers", 2, "--peft", "lora", "--steps", 1]
    args += ["--check-steps", 1, "--seed", 107151, "--text", folder / "text.txt", *flags]
    return launch.ranks(tasks / "ulysses_finetune.py", *args, nproc=nproc, folder=folder)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.stress] * n.startswith("one token,")) for n in FEW_TOKENS],
)
def test_text_of_few_tokens(name, tmp_path):
    """All tokens have the same rounding, which no sum averages out: a right run passes."""
    text, nproc, flags = FEW_TOKENS[name]
    result = train_on(text, tmp_path, nproc, flags)
    assert result.code == 0 and result.out.count("Tests passed") == nproc, result.tail()


def test_text_of_one_token_with_a_bug(tmp_path):
    """A wrong one does not."""
    summed = "sum_gradients(parameters, mesh)"
    mean = f"{summed}\n        for p in parameters:\n            p.grad.div_(mesh.size())"
    plant(tmp_path / "tasks", "ulysses_finetune.py", summed, mean)
    text, nproc, flags = FEW_TOKENS["one token"]
    result = train_on(text, tmp_path, nproc, flags, tmp_path / "tasks")
    assert result.code == 1 and "FAILED" in result.out, result.tail()
