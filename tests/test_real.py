"""Every task on a publicly trained Llama, SmolLM2-135M (`make test-real`), fetched if need be.

Each script runs on 2 ranks and more, and in each dtype: in float32 twice, if it is quick.
"""

import hashlib

import pytest
import torch

import launch
from harness.checks import NOT_ROUNDING
from loading import smollm2
from loading.models import Source, cache_folder
from runs import QUICK, WHOLE_MODEL, checks
from utils.llama import rope_of

pytestmark = pytest.mark.real
TEXT = "A quick brown fox with a fluffy white coat"
# {job: flags}: its script comes first in a job's name.
SHORT = ["--repeats", 0, "--new-tokens", 7]
STEP = ["--steps", 1, "--check-steps", 1, "--seq-len", 32, "--no-long-sequence", "--peft"]
JOBS = {
    **{script: QUICK.get(script, []) for script in launch.SCRIPTS},
    **{script: [*SHORT, "--seq-len", 32] for script in WHOLE_MODEL},
    "kv_cache": SHORT,
    "pipeline_llama": ["--batch-size", 4, "--microbatches", 2, "--seq-len", 24],
    "data_parallel": ["--batch-size", 4, "--num-sequences", 10, "--seq-len", 19, "--epochs", 0],
    "pretrain_2d": ["--batch-size", 6, "--seq-len", 16, "--num-documents", 60, "--steps", 2],
    **{f"ulysses_finetune {peft}": [*STEP, peft] for peft in ("prompt", "lora", "none")},
}
del JOBS["ulysses_finetune"]
LONG = ("dtensor_llama", "kv_cache", "ulysses_forward", "ring_attention", "tp_ulysses",
        "pipeline_threads")  # fmt: skip
WHOLE = "pipeline_threads", "data_parallel"  # each rank has the whole model there
CASES = [("ulysses_finetune", "float32", 2)]  # as it is by default: with all memory techniques
for i, job in enumerate(JOBS):
    more = 3 if job in (*LONG, *WHOLE, "pipeline_llama") else 4 - i % 2
    most = 2 if job in WHOLE else 4
    CASES += [(job, "float32", 2), (job, "float64", min(7 - more, most))]
    CASES += [(job, "bfloat16", min(6 - more, most))]
    CASES += [(job, "float32", more)] * (job not in LONG)
JOBS["ulysses_finetune"] = ["--steps", 1, "--check-steps", 1, "--seq-len", 32]


@pytest.fixture(scope="session", autouse=True)
def model():
    """Its directory, in the cache."""
    return smollm2.find(cache_folder())


@pytest.mark.parametrize(("job", "dtype", "nproc"), CASES)
def test_task(job, dtype, nproc, tmp_path):
    path, script = tmp_path / "record.json", job.split()[0]
    args = ["--model", "smollm2", "--dtype", dtype, *JOBS[job], "--json", path]
    if job.endswith("none") and (nproc == 4 or dtype == "float64"):
        # All weights' gradients, and those of the reference, on every rank, before and after a step
        # (5 GiB a rank in float32): more than 24 GiB. So they train, and stay alike.
        args += ["--check-steps", 0]
    if "--new-tokens" in args and dtype != "float32":  # slower
        args += ["--new-tokens", 2]
    file = launch.TASKS / f"{script}.py"
    result = launch.ranks(file, *args, nproc=nproc, folder=tmp_path, timeout=400)
    assert result.code == 0 and result.out.count("Tests passed") == nproc, result.tail()
    every = checks(path, nproc, dtype)[1]
    if dtype == "float64":
        for check in every:
            bound = 0 if "bits" in check["name"] else 1e-10 * max(1, check["max_abs_reference"])
            exempt = check["name"].startswith(NOT_ROUNDING)
            assert check["max_abs_diff"] <= bound or exempt, check
    if "--new-tokens" in args and dtype == "float32":
        assert TEXT in result.out, result.tail()


def digest(source):
    """As `save_weights` has it; the LM head is the embedding."""
    embedding = source.read("model.embed_tokens.weight")
    values = {name: source.read(name) for name in source.shapes} | {"lm_head.weight": embedding}
    found = hashlib.sha256()
    for name in sorted(values):
        found.update(name.encode() + values[name].numpy().tobytes())
    return found.hexdigest()


def test_model():
    """It is the one that it claims to be, and its tokenizer gives text back as it was."""
    source = Source("smollm2")
    assert source.config.tie_word_embeddings
    theta = rope_of(source.config).get("rope_theta") or source.config.rope_theta
    assert theta == 100000
    sizes = [torch.Size(shape).numel() for shape in source.shapes.values()]
    assert sum(sizes) == 134_515_008 and digest(source) == smollm2.WEIGHTS
    tokenizer, text = source.tokenizer(), "A quick brown fox,  it's 12\n\nin 2024 — ünï日本"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and tokenizer.bos_token_id not in ids
    assert [tokenizer.decode(i) for i in ids[:4]] == ["A", " quick", " brown", " fox"]


def test_fetched(tmp_path):
    """As on a machine that never had it, by two ranks, of which one fetches it."""
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    args = ["--model", "smollm2", "--hidden-size", 8, "--intermediate-size", 8]
    result = launch.torchrun("tp_mlp", *args, nproc=2, env=env, timeout=600)
    assert result.code == 0 and result.err.count("smollm2: fetching") == 1, result.tail()
    folder = tmp_path / "parallel_llama"
    left = [path.name for path in folder.iterdir() if path.suffix != ".lock"]
    assert left == [smollm2.MODEL]
    assert digest(Source(str(folder / smollm2.MODEL))) == smollm2.WEIGHTS
