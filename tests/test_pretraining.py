"""Pretraining's parts: the mesh, documents, what is exported; and that it learns."""

import json
import re

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import launch
from conftest import make_llama
from test_planted_bugs import plant, refused
from test_tasks import QUICK, checks, passed
from utils.documents import BOT, EOT, PAD, Rows
from utils.models import TINY
from utils.pretraining import bigram_loss

FILE = launch.TASKS / "pretrain_2d.py"
SHORT = list(map(str, QUICK["pretrain_2d"]))
STRESS = pytest.mark.stress


def test_rows():
    """Cut off or padded to one length; padding has no label."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    tokenizer.add_special_tokens({"bos_token": BOT, "eos_token": EOT, "pad_token": PAD})
    begin, end, pad = tokenizer.convert_tokens_to_ids([BOT, EOT, PAD])
    assert len({begin, end, pad}) == 3 and min(begin, end, pad) >= 1531
    rows = Rows([[5, 6], [7, 8, 9, 10]], 5, tokenizer)
    assert len(rows) == 2
    ids, labels = rows[0]
    assert ids.tolist() == [begin, 5, 6, end, pad] and labels.tolist() == [begin, 5, 6, end, -100]
    ids, labels = rows[1]
    assert ids.tolist() == labels.tolist() == [begin, 7, 8, 9, 10]


def test_bigram_loss():
    """Of what always follows almost nothing, of what nobody has seen as much as of any word."""
    row = torch.tensor([1, 2, 3, 1, 2, 3, -100])
    seen, unseen = torch.tensor([2, 3, 1, -100]), torch.tensor([4, 4, -100])
    rows, of = [(row, row)] * 50, [[(one, one)] for one in (seen, unseen)]
    assert bigram_loss(rows, of[0], 5) < 0.01 < 4 < bigram_loss(rows, of[1], 5)


MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]


@pytest.mark.parametrize("more", [[], ["--replicate"]], ids=["fsdp2", "replicate"])
@pytest.mark.parametrize(
    ("dp", "tp"), [pytest.param(*m, marks=[] if m == (2, 2) else STRESS) for m in MESHES]
)
def test_meshes(dp, tp, more, tmp_path):
    """Steps as the single rank takes them, to 1e-10; 9 query and 3 KV heads go over 2 and 4."""
    path = tmp_path / "record.json"
    sizes = dict(hidden_size=45, num_attention_heads=9, num_hidden_layers=2)
    model = make_llama(tmp_path / "llama", **sizes)
    steps = 4 if (dp, tp) == (2, 2) else 10
    args = ["--model", model, *SHORT, "--batch-size", 4, "--steps", steps, "--dtype", "float64"]
    args += ["--dp", dp, "--tp", tp, "--json", path, *more]
    result = launch.ranks(FILE, *args, nproc=dp * tp, folder=tmp_path)
    passed(result, dp * tp)
    names = {check["name"] for check in checks(path, dp * tp, "float64")[1]}
    assert {f"losses of {steps} steps", f"parameters after {steps} steps"} <= names
    assert f"mesh: dp={dp} x tp={tp}" in result.out


@pytest.mark.parametrize(
    ("flags", "nproc", "message"),
    [
        (["--dp", 2, "--tp", 2], 2, "--dp 2 times --tp 2 is not 2, the number of ranks"),
        (["--tp", 3], 2, "--dp 1 times --tp 3 is not 2"),
        (["--dp", 2, "--batch-size", 3], 2, "--batch-size 3: not a multiple of --dp 2"),
        (["--num-documents", 9], 1, "--num-documents 9: a tenth of it"),
        (["--seq-len", 2], 1, "--seq-len 2: too short"),
        (["--export", "."], 2, "--export .: is there already"),
        (["--text", "/no/such"], 2, "--text /no/such: cannot be read"),
        (["--text", __file__, "--num-documents", 1000], 2, "paragraphs, but --num-documents 1000"),
    ],
)
def test_refused(flags, nproc, message, tmp_path):
    launch.ranks(FILE, *flags, nproc=nproc, folder=tmp_path).assert_refused(message, 20)


def test_more_columns_than_heads(odd_llama, tmp_path):
    args = ["--model", odd_llama, "--tp", 7]
    result = launch.ranks(FILE, *args, nproc=7, folder=tmp_path)
    result.assert_refused("--tp 7: the model has 6 query heads", 20)


def test_export(tmp_path):
    """Plain transformers loads it, with its tokenizer, from texts of one's own."""
    folder, text = tmp_path / "exported", tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Line {i} of a text.\nIt goes on." for i in range(60)))
    args = [*SHORT, "--text", text, "--export", folder]
    result = launch.ranks(FILE, *args, nproc=2, folder=tmp_path)
    assert result.code == 0 and "check held-out loss of what was exported" in result.out
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer(BOT + "Line", return_tensors="pt").input_ids
    assert ids[0, 0] == model.config.bos_token_id and model.config.vocab_size == 1534
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert model.generate(ids, max_new_tokens=3).shape[1] > ids.shape[1]
    assert [path.name for path in tmp_path.iterdir() if ".part" in path.name] == []


def test_another_model_is_exported(tmp_path):
    plant(tmp_path, "pretraining.py", "whole[name] = full.cpu()", "whole[name] = 1.01 * full.cpu()")
    args = [*SHORT, "--steps", 1, "--export", tmp_path / "exported"]
    refused(tmp_path, "pretrain_2d", 1, args, "what was exported")


@STRESS
def test_it_learns(tmp_path):
    """300 steps: the held-out loss is far below a bigram model's."""
    path = tmp_path / "record.json"
    args = ["--dp", 2, "--steps", 300, "--batch-size", 24, "--seq-len", 96, "--lr", 4e-3]
    args += ["--num-documents", 4000, "--warm-up", 30, "--export", tmp_path / "exported"]
    result = launch.ranks(FILE, *args, "--json", path, nproc=2, folder=tmp_path, timeout=900)
    assert result.code == 0, result.tail()
    learnt = json.loads(path.read_text())["results"]
    assert learnt["held_out_loss"] < 0.6 * learnt["bigram_loss"], learnt
    assert re.search(r"which continues: \[BOT\]\w+", result.out)
