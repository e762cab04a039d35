"""Every task script, started as the README starts it, on 1 to 4 ranks."""

import json

import pytest
import torch

import launch
from conftest import make_llama
from harness.checks import NOT_ROUNDING
from harness.environment import SHARING_ALLOWED, nccl_version
from pages import CODE, SHOWN, same
from places import NCCL, ON_GPUS, why_not_nccl
from runs import QUICK, WHOLE_MODEL, checks, passed

LITERAL = "tp_mlp", "tp_attention", "dtensor_llama"  # where the assignment asserts it
DEEP = *WHOLE_MODEL, "ulysses_finetune"  # the gradients that they compare come through 5 layers


@pytest.mark.parametrize("script", launch.SCRIPTS)
def test_as_shown(script, tmp_path):
    """The README's command prints what stands in figures/outputs."""
    ranks, flags, printed = SHOWN[script]
    path = tmp_path / "record.json"
    result = launch.torchrun(script, *flags, "--json", path, nproc=ranks)
    passed(result, ranks)
    same(printed, result.out)
    every = float32(script, ranks, result, path)
    if script == "tp_mlp":
        assert {"golden output", "golden input grad"} <= {check["name"] for check in every}
    if script in LITERAL:  # in float32 only a verdict, of which the outputs' should be True
        verdicts = json.loads(path.read_text())["results"]["verdicts"]
        assert all(v["passed"] for v in verdicts if "output" in v["name"]), verdicts


STRESS = pytest.mark.stress


# (In `make test-all` `test_as_shown` runs the commands of the README, most on two ranks, on one
# there is `test_without_torchrun`, and on three and four `test_odd_llama`.)
@STRESS
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
@pytest.mark.parametrize("script", launch.SCRIPTS)
def test_float32(script, nproc, tmp_path):
    """On all rank counts, a little shortened; on three by torchrun, as others are elsewhere."""
    path = tmp_path / "record.json"
    args = [*QUICK.get(script, []), "--json", path]
    if nproc == 3:
        result = launch.torchrun(script, *args, nproc=nproc)
    else:
        file = launch.TASKS / f"{script}.py"
        result = launch.ranks(file, *args, nproc=nproc, folder=tmp_path)
    passed(result, nproc)
    float32(script, nproc, result, path)


def float32(script, nproc, result, path):
    """What the record of such a run must say."""
    record, every = checks(path, nproc, "float32")
    for check in every:
        # What is measured comes to less on the embedded model and these layers.
        bound = 2e-4 * max(1, check["max_abs_reference"])
        exempt = check["name"].startswith(NOT_ROUNDING)
        assert check["tolerance"] <= bound or exempt, check
    for verdict in record["results"].get("verdicts", []):  # of the assignment's own assertion
        missed, elements = verdict["elements_missed"], verdict["elements"]
        assert verdict["passed"] == (missed == 0) and missed <= 5 + 1e-4 * elements, verdict
    assert ("verdicts" in record["results"]) == (script in LITERAL)
    if script in (*WHOLE_MODEL, "kv_cache"):
        assert "A quick brown fox jumps over the lazy dog" in result.out
    if script in WHOLE_MODEL:
        assert record["results"].keys() >= {"single_forward_s", "parallel_peak_memory_bytes"}
    return every


# (In `make test-all` it is `test_odd_llama` that runs in float64; on two ranks this is `quick`.)
@pytest.mark.stress
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
@pytest.mark.parametrize("script", launch.SCRIPTS)
def test_float64(script, nproc, tmp_path):
    """No bug can hide in rounding: everything to 1e-10 of the largest reference value."""
    path = tmp_path / "record.json"
    args = [] if (script, nproc) == ("tp_attention", 3) else QUICK.get(script, [])
    args = [*args, "--dtype", "float64", "--json", path]
    file = launch.TASKS / f"{script}.py"
    passed(launch.ranks(file, *args, nproc=nproc, folder=tmp_path), nproc)
    for check in checks(path, nproc, "float64")[1]:
        bound = 0 if "bits" in check["name"] else 1e-10 * max(1, check["max_abs_reference"])
        exempt = check["name"].startswith(NOT_ROUNDING)
        assert check["max_abs_diff"] <= bound or exempt, check


def odd_flags(script, nproc, folder, odd_llama, shallow_llama):
    """A run on sizes that divide by nothing, and that so many ranks can share all the same."""
    model = shallow_llama if nproc in (4, 5) else odd_llama
    if script.startswith("pipeline") and nproc > 3:  # a layer for each rank
        model = make_llama(folder / "llama", num_hidden_layers=6, tie_word_embeddings=True)
    args = ["--model", model, *QUICK.get(script, [])]
    args += ["--batch-size", 3, "--seq-len", 23] if script in DEEP else []
    args += ["--tp", nproc] if script == "pretrain_2d" and nproc != 4 else []
    return args


NO_HEADS = "data_parallel", "pipeline_llama", "pipeline_threads", "pretrain_2d", "tp_training"
ODD = [  # each once in `make test-all`: where heads are split, on more ranks than KV heads
    pytest.param(script, nproc, marks=[STRESS] * (nproc != (3 if script in NO_HEADS else 4)))
    for script in launch.SCRIPTS for nproc in (3, 4, 5, 6)
]  # fmt: skip


@pytest.mark.parametrize(("script", "nproc"), ODD)
def test_odd_llama(script, nproc, tmp_path, odd_llama, shallow_llama):
    """Sizes that divide by nothing, biases, an untied head, more ranks than KV heads; one layer."""
    path, file = tmp_path / "record.json", launch.TASKS / f"{script}.py"
    args = odd_flags(script, nproc, tmp_path, odd_llama, shallow_llama)
    args += ["--dtype", "float64", "--json", path]
    result = launch.ranks(file, *args, nproc=nproc, folder=tmp_path)
    assert result.code == 0 and result.out.count("Tests passed") == nproc, result.tail()
    names = {check["name"] for check in checks(path, nproc, "float64")[1]}
    for what in ("output", "input_grad"):  # the assignment's own assertion, here a gate
        literal = f"torch.allclose({what}, reference, atol=1e-6)"
        assert any(name.endswith(f" {literal}") for name in names) == (script in LITERAL)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradient_that_should_be_zero(dtype, tmp_path):
    """Of queries and keys where all values are alike: what is computed is rounding, on any rank."""
    from transformers import LlamaForCausalLM

    directory = make_llama(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(directory)
    model.model.layers[1].self_attn.v_proj.weight.data.zero_()
    model.save_pretrained(directory)
    args = ["--model", directory, "--dtype", dtype, "--repeats", 0]
    passed(launch.ranks(launch.TASKS / "tp_llama.py", *args, nproc=2, folder=tmp_path), 2)


@pytest.mark.parametrize(
    "script",
    [pytest.param(s, marks=STRESS) for s in ("tp_llama", "dtensor_llama", "ulysses_forward")],
)
def test_eight_ranks(script, tmp_path):
    """One query head a rank, and each of the 4 KV heads on two of them."""
    args = QUICK.get(script, [])
    file = launch.TASKS / f"{script}.py"
    result = launch.ranks(file, *args, nproc=8, folder=tmp_path, timeout=200)
    assert result.code == 0 and result.out.count("Tests passed") == 8, result.tail()


# Of these in bfloat16 others have the technique or the loop, too.
ELSEWHERE = {"dtensor_llama", "kv_cache", "pipeline_llama", "pretrain_2d", "ulysses_forward"}


@pytest.mark.parametrize(
    "script", [pytest.param(s, marks=[STRESS] * (s in ELSEWHERE)) for s in launch.SCRIPTS]
)
def test_bfloat16(script, tmp_path):
    """And nothing on the way has no --deterministic implementation."""
    args = ["--dtype", "bfloat16", "--deterministic", *QUICK.get(script, [])]
    args += ["--epochs", 0] if script == "data_parallel" else []  # not compared in it
    file = launch.TASKS / f"{script}.py"
    result = launch.ranks(file, *args, nproc=2, folder=tmp_path)
    assert result.code == 0 and result.out.count("Tests passed") == 2, result.tail()


@pytest.mark.stress  # with 2 ranks `test_as_shown` does it
@pytest.mark.parametrize("nproc", [1, 2])
def test_overfitting(nproc, tmp_path):
    """Task 3's fallback: one batch to almost no loss, along the single rank's curve."""
    args = ["--overfit", 40, "--dtype", "float64", "--repeats", 0]
    file = launch.TASKS / "dtensor_llama.py"
    result = launch.ranks(file, *args, nproc=nproc, folder=tmp_path)
    assert result.code == 0 and "check losses while overfitting" in result.out, result.tail()
    assert ("*** ONE DEVICE: ONE BATCH IS OVERFITTED ***" in result.out) == (nproc == 1)


@pytest.mark.alone
@pytest.mark.stress  # each run of the script compares the formula with the tensors that are sent
def test_bytes_of_the_all_to_alls(tmp_path):
    """As the formula has it, a layer and direction, also where nothing divides; on the wire, too.

    (There with headers, within 2 %. Other processes' bytes count, too: one run of three without.)
    """
    sizes = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32)
    model = make_llama(tmp_path / "llama", max_position_embeddings=2048, **sizes)
    args = ["--model", model, "--batch-size", 1, "--seq-len", 1201]
    args += ["--repeats", 0, "--json", tmp_path / "record.json", "--gloo"]
    file = launch.TASKS / "ulysses_forward.py"
    for _ in range(3):
        result = launch.ranks(file, *args, nproc=3, folder=tmp_path)
        assert result.code == 0, result.tail()
        record = json.loads((tmp_path / "record.json").read_text())["results"]
        assert record["sent_bytes"] == [record["formula_bytes"]] * 2, record
        ratios = [wire / record["formula_bytes"] for wire in record["wire_bytes"]]
        assert min(ratios) >= 1, record
        if max(ratios) < 1.02:
            break
    assert max(ratios) < 1.02, record


def test_whole_vocabulary(tmp_path):
    """Task 2's own scope, transformer layers only: embedding and LM head stay whole."""
    args = ["--no-vocab-parallel", "--dtype", "float64", "--repeats", 0]
    file = launch.TASKS / "tp_llama.py"
    result = launch.ranks(file, *args, nproc=3, folder=tmp_path)
    assert result.code == 0 and result.out.count("Tests passed") == 3, result.tail()


# One of each kind in `make test-all`.
ALONE_ONCE = {"tp_llama", "kv_cache", "pipeline_threads"}


@pytest.mark.parametrize(
    "script",
    [pytest.param(s, marks=[] if s in ALONE_ONCE else pytest.mark.stress) for s in launch.SCRIPTS],
)
def test_without_torchrun(script, tmp_path):
    """Plain python is world size 1, and says so."""
    file, path = launch.TASKS / f"{script}.py", tmp_path / "record.json"
    args = [*QUICK.get(script, []), "--json", path]
    result = launch.ranks(file, *args, nproc=1, folder=tmp_path, torchrun=False)
    passed(result, 1)
    float32(script, 1, result, path)
    assert "note: 1 rank: nothing is split" in result.out


NCCL_RUNS = [
    # On one rank all; on several these. `test_shared_gpu` adds the odd Llama in float32.
    pytest.param(
        nproc, model, dtype,
        marks=[] if nproc == 1 or (nproc, model, dtype) in (
            (2, "tiny", "float32"), (2, "tiny", "bfloat16"), (3, "odd llama", "float64"),
            (4, "tiny", "bfloat16"), (4, "odd llama", "float64"),
        ) else STRESS,
    )
    for nproc in (1, 2, 3, 4)
    for model in ("tiny", "odd llama")
    for dtype in ("float32", "bfloat16", "float64")
]  # fmt: skip


@pytest.mark.parametrize(("nproc", "model", "dtype"), NCCL_RUNS)
@pytest.mark.parametrize("script", launch.SCRIPTS)
def test_nccl(script, nproc, model, dtype, tmp_path, odd_llama, shallow_llama):
    """With a GPU for each rank, or with fewer that they share."""
    place, path = NCCL.flags(nproc), tmp_path / "record.json"
    if model == "odd llama":
        flags = odd_flags(script, nproc, tmp_path, odd_llama, shallow_llama)
    else:
        flags = QUICK.get(script, []) if nproc > 1 else []
    flags = [*flags, "--dtype", dtype, "--json", path]
    result = launch.torchrun(script, *flags, *place, nproc=nproc, env=NCCL.env)
    passed(result, nproc)
    record = checks(path, nproc, dtype)[0]
    assert (record["backend"], record["nccl"]) == ("nccl", nccl_version())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: cannot have too few of them")
@pytest.mark.parametrize("script", ["tp_mlp", "dtensor_llama", "kv_cache"])  # with meshes, too
def test_fewer_gpus_than_ranks(script):
    nproc = torch.cuda.device_count() + 1
    result = launch.torchrun(script, *QUICK.get(script, []), nproc=nproc, env=ON_GPUS)
    passed(result, nproc)
    assert "running on the CPU" in result.out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: none can be shared")
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("nproc", [2, 3, 4])
@pytest.mark.parametrize("script", launch.SCRIPTS)
def test_shared_gpu(script, nproc, backend, tmp_path, odd_llama, shallow_llama):
    """Several ranks on one GPU: collectives and splits on CUDA's kernels."""
    if backend == "nccl" and (why := why_not_nccl(nproc, gpus=1)):
        pytest.skip(why)
    flags, path = odd_flags(script, nproc, tmp_path, odd_llama, shallow_llama), tmp_path / "r.json"
    if (script, backend) == ("pretrain_2d", "gloo"):  # which takes no --tp, so --dp is nproc
        flags += ["--tp", 1, "--batch-size", 12]
    flags += ["--share-gpus", "--json", path]
    env = launch.ONE_GPU | {SHARING_ALLOWED: str(int(backend == "nccl"))}
    result = launch.torchrun(script, *flags, nproc=nproc, env=env)
    passed(result, nproc)
    record = checks(path, nproc, "float32")[0]
    assert (record["backend"], record["device"]) == (backend, "cuda")
    said = f"NCCL {nccl_version()}" if backend == "nccl" else "gloo, through the host: "
    assert f"note: {nproc} ranks share 1 GPU(s) by {said}" in result.out


SUBGROUPS = """
import datetime, sys
sys.path.insert(0, {tasks!r})
import torch.distributed as dist
from utils.collectives import subgroup

if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=77))
    rank = dist.get_rank()
    mine = (0, 2) if rank < 2 else (2, 3)
    pair = subgroup(dist.group.WORLD, "pair", *mine)
    assert pair.size() == (2 if rank < 2 else 1)
    assert subgroup(dist.group.WORLD, "pair", *mine) is pair  # a communicator is made once
    # One alike, of another split, is not: all ranks make one, or the next would be waited for.
    alone = subgroup(dist.group.WORLD, "each", rank, rank + 1)
    assert subgroup(dist.group.WORLD, "all", 0, 3).size() == 3 and alone.size() == 1
    backend = pair._get_backend(__import__("torch").device("cpu"))
    assert backend.options._timeout == datetime.timedelta(seconds=77)
    dist.barrier()
    print("grouped")
"""


def test_subgroups(tmp_path):
    (tmp_path / "groups.py").write_text(SUBGROUPS.format(tasks=str(launch.TASKS)))
    result = launch.ranks(tmp_path / "groups.py", nproc=3, folder=tmp_path)
    assert result.out.count("grouped") == 3, result.tail()


LIFTED = """
import sys
sys.path.insert(0, {tasks!r})
import copy, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from dtensor_llama import dtensor_parallelize
from tp_llama import tensor_parallelize

def refused(call, error, words):
    try:
        call()
    except error as said:
        assert words in str(said), said
    else:
        raise AssertionError(words)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = LlamaForCausalLM.from_pretrained({model!r}).float()
    tokenizer = PreTrainedTokenizerFast.from_pretrained({model!r})
    ids = tokenizer("A quick", return_tensors="pt").input_ids
    whole = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor_parallelize(model, mesh)
    assert sum(p.numel() for p in model.parameters()) < 0.6 * sum(
        p.numel() for p in whole.parameters())
    torch.testing.assert_close(model(ids).logits, whole(ids).logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(model(ids, return_dict=False)[0], model(ids).logits)
    for more in ({{}}, {{"num_items_in_batch": 5}}):
        losses = [m(ids, labels=ids, **more).loss for m in (model, whole)]
        torch.testing.assert_close(*losses)
    assert model(ids, labels=torch.full_like(ids, -100)).loss.isnan()  # nothing valid
    many = [m.generate(ids, max_new_tokens=12, do_sample=False) for m in (model, whole)]
    assert torch.equal(*many), many
    by_plan = dtensor_parallelize(copy.deepcopy(whole), mesh)
    for m in (whole, by_plan, model):  # by_plan without loss_parallel
        m(ids, labels=ids).loss.backward()
    norm, *others = (m.model.norm.weight.grad for m in (whole, by_plan, model))
    for grad in others:
        torch.testing.assert_close(grad, norm, rtol=0, atol=1e-5 * norm.abs().max().item())
    beyond = ids.clone()
    beyond[0, -1] = whole.config.vocab_size
    for m in (model, by_plan):
        for error, words, wrong in (
            (ValueError, "shift_labels", dict(labels=ids, shift_labels=ids)),
            (ValueError, "labels", dict(labels=ids[:, 1:])),
            (IndexError, "out of range", dict(labels=beyond)),
            (IndexError, "out of range", dict(input_ids=beyond)),
        ):
            refused(lambda: m(**dict(input_ids=ids) | wrong), error, words)
        refused(lambda: m.save_pretrained("nowhere"), ValueError, "save_pretrained")
        refused(lambda: m.resize_token_embeddings(9), ValueError, "resize_token_embeddings")
    refused(lambda: tensor_parallelize(model, mesh), ValueError, "already")
    refused(lambda: dtensor_parallelize(by_plan, mesh), ValueError, "already")
    dist.destroy_process_group()
    print("lifted")
"""


LIFTED_ULYSSES = """
import sys
sys.path.insert(0, {tasks!r})
import copy, tempfile, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from peft import PromptTuningConfig, get_peft_model
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast
from ulysses_forward import sequence_parallelize
from utils.replicas import sum_gradients

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = LlamaForCausalLM.from_pretrained({model!r}).float()
    tokenizer = PreTrainedTokenizerFast.from_pretrained({model!r})
    whole = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sequence_parallelize(model, mesh)
    for text in ("The", "A quick brown fox jumps over"):  # one of 1 token, too
        ids = tokenizer(text, return_tensors="pt").input_ids
        torch.testing.assert_close(model(ids).logits, whole(ids).logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(model(ids, return_dict=False)[0], model(ids).logits)
    for more in ({{}}, {{"num_items_in_batch": 5}}):
        losses = [m(ids, labels=ids, **more).loss for m in (model, whole)]
        torch.testing.assert_close(*losses)
    assert model(ids, labels=torch.full_like(ids, -100)).loss.isnan()  # nothing valid
    tokenizer.padding_side, tokenizer.pad_token = "left", "."
    batch = tokenizer(["A quick brown fox", "One day in July, a"], padding=True,
                      return_tensors="pt", return_token_type_ids=False)
    assert not batch["attention_mask"].all()
    many = [m.generate(**batch, max_new_tokens=12, do_sample=False) for m in (model, whole)]
    assert torch.equal(*many), many
    inside, right = torch.ones_like(ids), torch.ones_like(ids)
    inside[:, 2], right[:, -2:] = 0, 0  # a token that sees any sees those of the whole model
    for mask in inside, right:
        losses = [m(ids, attention_mask=mask, labels=ids).loss for m in (model, whole)]
        torch.testing.assert_close(*losses)
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = LlamaForCausalLM.from_pretrained(folder)
        assert again.config.architectures == ["LlamaForCausalLM"] and again.config.use_cache
        assert again.generation_config.use_cache == whole.generation_config.use_cache
        assert torch.equal(again.float()(ids).logits, whole(ids).logits)
    packed = torch.cat([torch.arange(3), torch.arange(ids.shape[1] - 3)])[None]  # two documents
    apart = [whole(part).logits for part in (ids[:, :3], ids[:, 3:])]
    near = dict(rtol=0, atol=1e-4)
    torch.testing.assert_close(model(ids, position_ids=packed).logits, torch.cat(apart, 1), **near)
    in_order = [m(ids, labels=ids, return_dict=False)[0] for m in (model, whole)]
    torch.testing.assert_close(*in_order)  # the loss, then the logits
    beyond = ids.clone()
    beyond[0, -1] = whole.config.vocab_size
    for wrong in (
        dict(labels=ids[:, 1:]),
        dict(input_ids=beyond),
        dict(labels=beyond),
        dict(past_key_values=DynamicCache()),
        dict(cache=DynamicCache()),
        dict(logits_to_keep=torch.tensor([0, 1])),
        dict(shift_labels=ids),
        dict(ignore_index=7),
        dict(ignore_index=0),
        dict(attention_mask=torch.ones(1, 1, ids.shape[1], ids.shape[1])),
    ):
        try:
            model(**dict(input_ids=ids) | wrong)
        except ValueError as error:
            assert next(iter(wrong)) in str(error)
        except IndexError:
            assert any(x is beyond for x in wrong.values())
        else:
            raise AssertionError(wrong)
    try:
        sequence_parallelize(model, mesh)
    except ValueError as error:
        assert "SequenceParallelLlama" in str(error)
    else:
        raise AssertionError("split twice")
    strided = torch.zeros(3, 2, requires_grad=True)
    strided.grad = torch.arange(12.0).view(3, 4)[:, ::2]
    sum_gradients([strided], mesh)
    assert torch.equal(strided.grad, 2 * torch.arange(12.0).view(3, 4)[:, ::2])
    losses, grads = [], []
    for m in (model, whole):  # PEFT's own forward, on whole embeddings
        torch.manual_seed(0)
        m = get_peft_model(m, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))
        losses.append(m(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
        prompt = [p for p in m.parameters() if p.requires_grad]
        if m.get_base_model() is model:
            sum_gradients(prompt, mesh)
        grads.append(prompt[0].grad)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads, rtol=0, atol=1e-5 * grads[1].abs().max().item())
    dist.destroy_process_group()
    print("lifted")
"""


HEAD = "import torch\npath, ids = {model!r}, torch.arange(9)[None]\n"
# (The others: test_full_model.py, test_trainer.py.)
SHOWN_CODE = [code for code in CODE if "save_pretrained" not in code and "Trainer" not in code]
LIFTED_SHOWN = [
    HEAD + code.replace('"parallel-llama/tasks"', "{tasks!r}") + "print('lifted')\n"
    for code in SHOWN_CODE
]


@pytest.mark.parametrize(
    "code",
    [LIFTED, LIFTED_ULYSSES, *LIFTED_SHOWN],
    ids=["tp_llama", "ulysses_forward", *(f"shown{i}" for i, _ in enumerate(SHOWN_CODE))],
)
def test_lifted_out_of_the_repo(code, tmp_path):
    """What an engineer would do: shard an ordinary, loaded model, and use it as before."""
    model = str(launch.TASKS / "tiny_llama")
    (tmp_path / "lifted.py").write_text(code.format(tasks=str(launch.TASKS), model=model))
    result = launch.ranks(tmp_path / "lifted.py", nproc=2, folder=tmp_path)
    assert result.code == 0 and result.out.count("lifted") == 2, result.tail()
