"""Pretraining's parts: the mesh, documents, what is exported; and that it learns."""

import json
import random
import re
import shutil
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import launch
from checkpoints.checkpoint import list_checkpoints, step_of
from checkpoints.sharded_checkpoint import STATES, read_region, sum_by_place
from conftest import make_llama
from loading.documents import BOT, EOT, PAD, Rows, bigram_loss, load_rows
from loading.models import TINY, Source
from planting import plant
from runs import QUICK, checks, passed, refused
from utils.errors import UserError

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
QUICK_MESHES = [(1, 2, False), (2, 1, True)]  # (2, 2) is in test_tasks.py


@pytest.mark.parametrize(
    ("dp", "tp", "replicate"),
    [
        pytest.param(*m, more, marks=[] if (*m, more) in QUICK_MESHES else STRESS)
        for m in MESHES for more in (False, True)
    ],
)  # fmt: skip
def test_meshes(dp, tp, replicate, tmp_path):
    """Steps as the single rank takes them, to 1e-10; 9 query and 3 KV heads go over 2 and 4."""
    path = tmp_path / "record.json"
    sizes = dict(hidden_size=45, num_attention_heads=9, num_hidden_layers=2)
    model = make_llama(tmp_path / "llama", **sizes)
    steps = 4 if (dp, tp, replicate) in QUICK_MESHES else 10
    args = ["--model", model, *SHORT, "--batch-size", 4, "--steps", steps, "--dtype", "float64"]
    args += ["--dp", dp, "--tp", tp, "--json", path, *["--replicate"] * replicate]
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
        (["--num-documents", 9], 1, "9 documents: a tenth of them"),
        (["--seq-len", 2], 1, "--seq-len 2: too short"),
        (["--output-dir", "/no/such/folder"], 2, "--output-dir /no/such/folder: cannot be written"),
        (["--resume"], 1, "--resume needs --output-dir"),
        (["--text", "/no/such"], 2, "--text /no/such: cannot be read"),
        (["--text", __file__, "--num-documents", 1000], 2, "documents, but --num-documents 1000"),
        (["--memory-budget", 1, "--epochs", 2], 1, "and keeps nothing: no --epochs"),
    ],
)
def test_refused(flags, nproc, message, tmp_path):
    launch.ranks(FILE, *flags, nproc=nproc, folder=tmp_path).assert_refused(message)


LONG = ["--model", "random/small-8k", "--steps", 2, "--num-layers", 1, "--batch-size", 1]
LONG += ["--seq-len", 3000, "--memory-budget", 0.3]  # one rank takes some 0.43, each of two 0.22


@pytest.mark.skipif(sys.platform != "linux", reason="only there can a process's memory be limited")
@pytest.mark.parametrize(
    ("nproc", "more"),
    [(1, []), (2, ["--tp", 2]), pytest.param(4, ["--batch-size", 2, "--dp", 2], marks=STRESS)],
)
def test_a_context_that_does_not_fit(nproc, more, tmp_path):
    """One rank is refused, and more train, by steps whose first is the unmodified model's."""
    result = launch.ranks(FILE, *LONG, *more, nproc=nproc, folder=tmp_path, timeout=600)
    if nproc == 1:
        result.assert_refused("out of memory", 300)
    else:
        passed(result, nproc)
        assert re.search(
            r"tokens_per_second=\d+.* max_mem=.*\ncheck loss of the first long", result.out
        )


def test_a_mean_over_the_first_tokens(tmp_path):
    """What only a long sequence shows is found by its first loss."""
    right, wrong = "(labels[:, 1:] != -100).sum()", "(labels[:, 1:100] != -100).sum()"
    plant(tmp_path, "pretrain_2d.py", right, wrong)
    refused(tmp_path, "pretrain_2d", 2, [*LONG, "--seq-len", 300], "^loss of the first long step")


def test_nothing_held_out_is_trained_on(tmp_path):
    """Also where documents differ only behind the place at which they are cut off."""
    text = tmp_path / "text.txt"
    begins = ["One day it rained.", "A dog barked.", "My bag is blue.", "We went home."]
    text.write_text("\n\n".join(f"{begins[i // 20]} {i} more" for i in range(80)))
    said = []
    run = SimpleNamespace(rank=0, seed=0, source=Source("tiny"), print0=said.append)
    run.together, run.once = (lambda function: function()), (lambda _, function: function())
    _, rows, held = load_rows(run, str(text), None, 64, 4)
    assert (len(rows), len(held)) == (72, 8) and len(said) == 1
    _, rows, held = load_rows(run, str(text), 60, 5, 2)
    parts = [{tuple(ids.tolist()) for ids, _ in of} for of in (rows, held)]
    assert len(held) == 6 and parts[0] and not parts[0] & parts[1]
    assert any("left out" in line for line in said)
    with pytest.raises(UserError, match="--seq-len 5: all but 0 documents"):
        load_rows(run, str(text), 20, 5, 2)


def test_no_document_twice(tmp_path):
    """Else one that is held out might be trained on, too."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(["The same.", "Another.", "A third."] * 100))
    result = launch.ranks(FILE, "--text", text, nproc=1, folder=tmp_path)
    result.assert_refused("3 documents: a tenth of them")


def test_sum_by_place():
    """It tells signs and places apart, and is the same for all ways to split a tensor."""
    x = torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(0))
    full = [slice(0, size) for size in x.shape]
    total = sum_by_place(x, full)
    halves = [
        sum_by_place(x[:4], [slice(0, 4), *full[1:]]),
        sum_by_place(x[4:], [slice(4, 6), *full[1:]]),
    ]
    torch.testing.assert_close(sum(halves), total, rtol=1e-13, atol=0)
    for other in -x, x.flip(0), x.flip(1), x.flip(2), x.roll(1, 1), 1.001 * x:
        assert abs(sum_by_place(other, full) / total - 1) > 1e-4
    assert sum_by_place(torch.tensor(2.0), []) == 6


def test_more_columns_than_heads(odd_llama, tmp_path):
    args = ["--model", odd_llama, "--tp", 7]
    result = launch.ranks(FILE, *args, nproc=7, folder=tmp_path)
    result.assert_refused("--tp 7: the model has 6 query heads")


def test_export(tmp_path):
    """Plain transformers loads it, with its tokenizer, from texts of one's own."""
    folder, text = tmp_path / "out" / "model", tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Line {i} of a text.\nIt goes on." for i in range(60)))
    args = [*SHORT, "--text", text, "--output-dir", tmp_path / "out"]
    result = launch.ranks(FILE, *args, nproc=2, folder=tmp_path)
    assert result.code == 0 and "check held-out loss of what was exported" in result.out
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer(BOT + "Line", return_tensors="pt").input_ids
    assert ids[0, 0] == model.config.bos_token_id and model.config.vocab_size == 1534
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert model.generate(ids, max_new_tokens=3).shape[1] > ids.shape[1]
    assert not list((tmp_path / "out").glob(".*.part*"))


def test_another_model_is_exported(tmp_path):
    plant(
        tmp_path,
        "pretraining.py",
        "full_state[name] = full.cpu()",
        "full_state[name] = 1.01 * full.cpu()",
    )
    args = [*SHORT, "--steps", 1, "--output-dir", tmp_path / "out"]
    refused(tmp_path, "pretrain_2d", 1, args, "what was exported")


# ---------------------------------------------------------------- checkpoints

FROM = [*SHORT, "--batch-size", 4, "--seq-len", 16, "--steps", 7, "--save-every", 4]


def train(folder, *args, mesh=(2, 1), code=0, file=FILE):
    """Run it in a folder, and return its losses and how it ended."""
    path, (dp, tp) = folder / "record.json", mesh
    args = [*FROM, "--dp", dp, "--tp", tp, "--output-dir", folder / "out", "--json", path, *args]
    result = launch.ranks(file, *args, nproc=dp * tp, folder=folder, timeout=400)
    assert result.code == code, result.tail()
    return json.loads(path.read_text())["results"]["losses"] if code == 0 else None, result


def whole(folder):
    """All that the newest checkpoint of a folder has, made whole: {key.name: tensor}."""
    path = list_checkpoints(folder)[0]
    parts, found = json.loads((path / "record.json").read_text())["parts"], {}
    for name, of_ranks in parts.items():
        stops = [
            max(stop for _, stop in ends) for ends in zip(*(r for _, r in of_ranks), strict=True)
        ]
        for key in ("parameter", *STATES):
            region = [slice(0, stop) for stop in stops]
            found[f"{key}.{name}"] = read_region(path, f"{key}.{name}", of_ranks, region)
    return found


FORGOTTEN = {
    # what: (file, right, wrong, the check that sees it)
    "Adam": (
        "sharded_checkpoint.py", "local_part(tensor.detach()).copy_(",
        'key == "parameter" and local_part(tensor.detach()).copy_(', "state as it was saved",
    ),
    "parameters": (
        "sharded_checkpoint.py", "local_part(tensor.detach()).copy_(",
        'key != "parameter" and local_part(tensor.detach()).copy_(', "state as it was saved",
    ),
    "what was saved": (
        "sharded_checkpoint.py", "local_part(tensor.detach()).cpu()",
        "(0 * local_part(tensor.detach())).cpu()", "state as it was saved",
    ),
    "Adam's steps": (
        "sharded_checkpoint.py", '{"step": float(step)}', '{"step": 0.0}',
        "(losses|norms) .*from step 4",
    ),
    "rate": (
        "sharded_checkpoint.py", 'schedule.load_state_dict(record["schedule"])', "pass",
        "(losses|norms|rates) .*from step 4",
    ),
    "place": (
        "pretrain_2d.py", "batches(rows, first=len(losses), num", "batches(rows, num",
        "(losses|norms) .*from step 4",
    ),
}  # fmt: skip


def test_resume(tmp_path, odd_llama):
    """It goes on to the same bits, and on another mesh from the same; not without Adam's states."""
    args, out = ["--model", odd_llama], tmp_path / "out"
    losses, _ = train(tmp_path, *args)
    end = whole(out)
    assert len(losses) == 7 and [step_of(path) for path in list_checkpoints(out)] == [7, 4]
    assert all(tensor.isfinite().all() for tensor in end.values())
    assert all(tensor.any() for name, tensor in end.items() if "exp_avg" in name)
    forgets_at_4(tmp_path, "Adam", *args)
    shutil.rmtree(out / "step-000007")  # workers read from the middle of the epoch on
    again, result = train(tmp_path, *args, "--resume", "--num-workers", 2)
    assert "resumed after 4 steps" in result.out and again == losses
    assert not result.survivors
    same_tensors(end, whole(out))
    again, result = train(tmp_path, *args, "--resume", mesh=(1, 2))
    assert "resumed after 7 steps" in result.out and again == losses
    assert "check losses of 7 steps" in result.out and "check norms" not in result.out
    same_tensors(end, whole(out))
    train(tmp_path, *args, code=2)[1].assert_refused("add --resume to go on")
    other = train(tmp_path, *args, "--resume", "--lr", 1e-4, code=2)[1]
    other.assert_refused("is of another run: --lr was 0.001, is 0.0001")


def same_tensors(some, others):
    assert some.keys() == others.keys()
    assert all(torch.equal(some[name], others[name]) for name in some)


def forgets_at_4(folder, what, *args, mesh=(2, 1)):
    """A copy that does not restore it is refused when it goes on from the checkpoint of step 4."""
    *change, check = FORGOTTEN[what]
    plant(folder / what, *change)
    out, file = folder / what / "out", folder / what / FILE.name
    if what == "what was saved":
        train(folder / what, *args, mesh=mesh, file=file)
    else:
        shutil.copytree(folder / "out", out)
    shutil.rmtree(out / "step-000007")
    _, result = train(folder / what, *args, "--resume", mesh=mesh, code=1, file=file)
    assert re.search(f"^FAILED .*{check}", result.out, re.M), (what, result.tail())


@STRESS
@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)])
def test_what_is_not_restored(mesh, tmp_path, odd_llama):
    train(tmp_path, "--model", odd_llama, mesh=mesh)
    for what in FORGOTTEN:
        forgets_at_4(tmp_path, what, "--model", odd_llama, mesh=mesh)


@STRESS
def test_what_a_run_is_known_by(tmp_path, odd_llama):
    """A run is not continued where any of it would be another: its flags, its text, its model."""
    text, model = tmp_path / "text.txt", ["--model", odd_llama]
    text.write_text("\n\n".join(f"Line {i} of another text." for i in range(300)))
    train(tmp_path, *model)
    others = {"--steps": 8, "--lr": 1e-4, "--warm-up": 1, "--batch-size": 2, "--dtype": "float64"}
    others |= {"--seed": 7, "--seq-len": 18, "--num-documents": 70}
    others |= {"--text": text, "--model": "tiny"}
    names = {
        "--text": "another text",
        "--model": "another config",
    }
    for flag, value in others.items():
        result = train(tmp_path, *model, "--resume", flag, value, code=2)[1]
        result.assert_refused(f"is of another run: {names.get(flag, flag)}")


@STRESS
def test_a_full_disk(tmp_path, odd_llama):
    """A rank that cannot write costs a checkpoint, not the run; nothing is left half written."""
    wrong = 'if "4.part/rank1" in str(path): raise OSError(28, "No space left")'
    right = "    try:\n        save_file(tensors, path)"
    plant(tmp_path, "sharded_checkpoint.py", right, f"    {wrong}\n{right}")
    _, result = train(tmp_path, "--model", odd_llama, file=tmp_path / FILE.name)
    assert "note: no checkpoint at step 4: " in result.out and "No space left" in result.out
    assert sorted(p.name for p in (tmp_path / "out").glob("*step*")) == ["step-000007"]


@STRESS
def test_damaged(tmp_path, odd_llama):
    """Of one rank's file a few bytes are others: the one before is taken, to the same bits."""
    losses, _ = train(tmp_path, "--model", odd_llama)
    with (tmp_path / "out" / "step-000007" / "rank1.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"abc")
    again, result = train(tmp_path, "--model", odd_llama, "--resume")
    assert "skipped a damaged checkpoint" in result.out and again == losses


# Each pair in one direction: to more ranks, and to fewer.
TO_ANOTHER = [(0, 1), (0, 3), (1, 2), (2, 3), (2, 0), (3, 1)]


@STRESS
@pytest.mark.parametrize(("a", "b"), [(MESHES[a], MESHES[b]) for a, b in TO_ANOTHER])
def test_another_mesh(a, b, tmp_path, odd_llama):
    """What one mesh wrote, another reads and writes anew: the same bits, when made whole."""
    args = ["--model", odd_llama, "--dtype", "float64"]
    losses, _ = train(tmp_path, *args, mesh=a)
    before = whole(tmp_path / "out")
    again, _ = train(tmp_path, *args, "--resume", mesh=b)
    assert again == losses
    same_tensors(before, whole(tmp_path / "out"))
    shutil.rmtree(tmp_path / "out" / "step-000007")
    again, _ = train(tmp_path, *args, "--resume", mesh=b)
    assert again == pytest.approx(losses, rel=1e-9)


@STRESS
@pytest.mark.soak
def test_fifty_kills(tmp_path, odd_llama):
    """SIGKILL of either rank, at any moment: in the end the undisturbed run's bits."""
    args = ["--model", odd_llama, "--steps", 1600, "--save-every", 5]
    (tmp_path / "alone").mkdir()
    losses, _ = train(tmp_path / "alone", *args)
    chance, kills, reached = random.Random(0), [], []

    def kill():
        ranks = launch.nursery().ranks()
        if len(ranks) == 2:
            chance.choice(ranks).kill()
            kills.append(time.monotonic())

    path = tmp_path / "record.json"
    args = [*FROM, *args, "--dp", 2, "--output-dir", tmp_path / "out", "--resume", "--json", path]
    for _ in range(100):
        killer = threading.Timer(chance.uniform(0, 5) if len(kills) < 50 else 1e6, kill)
        killer.start()
        result = launch.ranks(FILE, *args, nproc=2, folder=tmp_path, timeout=300)
        killer.cancel()
        found = list_checkpoints(tmp_path / "out") if (tmp_path / "out").exists() else []
        reached.append(step_of(found[0]) if found else 0)
        if result.code == 0:
            break
    assert result.code == 0 and len(kills) == 50 and reached == sorted(reached), reached
    assert json.loads(path.read_text())["results"]["losses"] == losses
    ends = [whole(folder / "out") for folder in (tmp_path, tmp_path / "alone")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])
    print(f"50 kills, at steps {reached}")


@STRESS
def test_it_learns(tmp_path):
    """300 steps: the held-out loss is far below a bigram model's."""
    path = tmp_path / "record.json"
    args = ["--dp", 2, "--steps", 300, "--batch-size", 24, "--seq-len", 96, "--lr", 4e-3]
    args += ["--num-documents", 4000, "--warm-up", 30, "--output-dir", tmp_path / "out"]
    result = launch.ranks(FILE, *args, "--json", path, nproc=2, folder=tmp_path, timeout=1800)
    assert result.code == 0, result.tail()
    learnt = json.loads(path.read_text())["results"]
    assert learnt["held_out_loss"] < 0.6 * learnt["bigram_loss"], learnt
    assert re.search(r"which continues: \[BOT\]\w+", result.out)


@STRESS
def test_losses_of_two_dtypes(tmp_path):
    """The recorder of the article's losses, and its figure, of a small model."""
    path = tmp_path / "losses.json"
    args = ["--model", "random/small", "--seq-len", 16, "--steps", 12, "--vocabulary", 400]
    command = [*launch.program("bench.pretraining_loss"), *args, "--output", path]
    result = launch.run(command, timeout=900)
    assert result.code == 0, result.tail()
    runs = json.loads(path.read_text())["runs"]
    assert list(runs) == ["bfloat16", "float32"]
    (low, full) = (run["losses"] for run in runs.values())
    assert len(low) == len(full) == 12 and low != full == pytest.approx(low, abs=0.3)
    assert full[-1] < full[0] and all(all(run["checks"].values()) for run in runs.values())
    drawn = launch.run([*launch.program("draw"), path])
    assert drawn.code == 0 and path.with_suffix(".png").exists(), drawn.tail()
