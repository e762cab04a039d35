"""Task 5: what is saved, and what becomes of a job that is killed, stopped, or fed nonsense."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import launch
import loading.text
from checkpoints import checkpoint
from loading.documents import fill, one_by_one, pack
from loading.models import TINY
from places import CPU, NCCL, PLACES
from planting import plant
from runs import paragraphs
from utils.errors import UserError

STRESS = pytest.mark.stress
SCRIPT = launch.TASKS / "ulysses_finetune.py"


def finetune(folder, *args, nproc=1, script=SCRIPT, place=CPU):
    """The script on the tiny model: its Result, and its record if it passed."""
    path = folder / "record.json"
    path.unlink(missing_ok=True)
    args = ["--check-steps", 0, *args, "--json", path]
    result = place.run(script, *args, nproc=nproc, folder=folder)
    return result, json.loads(path.read_text())["results"] if path.exists() else None


@pytest.mark.parametrize(
    ("peft", "nproc"),
    [("prompt", 4), *(pytest.param(p, n, marks=STRESS) for p, n in (("lora", 3), ("none", 2)))],
)
def test_float64(peft, nproc, tmp_path):
    """Three ways to fine-tune, a batch of 3 of a prime length; with --seq-len 5, ranks of the
    prompt's tokens alone, without any label."""
    args = ["--dtype", "float64", "--peft", peft, "--batch-size", 3, "--check-steps", 3]
    args += ["--seq-len", 5 if nproc == 4 else 37, "--num-sequences", 5]
    args += ["--gradient-checkpointing"] if nproc == 4 else []
    result, record = finetune(tmp_path, *args, nproc=nproc)
    assert result.code == 0 and result.out.count("Tests passed") == nproc, result.tail()
    assert len(record["losses"]) == 10 and record["losses"][9] < record["losses"][4], result.tail()


@STRESS  # (`test_tasks.test_as_shown` is in float32)
@pytest.mark.parametrize("peft", ["lora", "none"])
def test_float32(peft, tmp_path):
    """On the rank count where Adam, let loose, would amplify a gradient's rounding."""
    args = ["--peft", peft, "--check-steps", 3, "--steps", 3]
    result, _ = finetune(tmp_path, *args, nproc=3)
    assert result.code == 0 and result.out.count("Tests passed") == 3, result.tail()


@STRESS  # (prompt tuning in bfloat16 is one of `test_tasks.test_bfloat16`)
@pytest.mark.parametrize("peft", ["prompt", "lora", "none"])
def test_bfloat16(peft, odd_llama, tmp_path):
    """Of an untrained model, whose gradients are next to nothing here and there."""
    args = ["--model", odd_llama, "--dtype", "bfloat16", "--peft", peft, "--check-steps", 3]
    result, _ = finetune(tmp_path, *args, "--steps", 3, nproc=2)
    assert result.code == 0 and result.out.count("Tests passed") == 2, result.tail()


# Ranks, attention, what is trained, other flags.
PACKED = [
    (1, "ulysses", "lora", "--steps 2"), (2, "ring", "prompt", "--steps 2"),
    (3, "ulysses", "none", "--steps 2"), (4, "ring", "lora", "--gradient-checkpointing"),
    (4, "ulysses", "prompt", "--no-long-sequence"), (1, "ring", "none", "--steps 2"),
    (3, "ulysses", "lora", "--dtype float32"),
]  # fmt: skip
EVERY = (
    "--gradient-checkpointing", "--selective-checkpoint", "--no-saved-outputs", "--no-tiled-loss",
    "--no-tiled-mlp", "--no-head-groups", "--no-long-sequence",
)  # fmt: skip
PACKED += [
    pytest.param(nproc, attention, peft, flag, marks=pytest.mark.stress)
    for nproc, peft, (attention, flag) in zip(
        itertools.cycle((4, 3, 2)), itertools.cycle(("prompt", "none", "lora", "prompt")),
        itertools.product(("ulysses", "ring"), EVERY), strict=False,
    )
]  # fmt: skip


@pytest.mark.parametrize(("nproc", "attention", "peft", "flag"), PACKED)
def test_packed(nproc, attention, peft, flag, tmp_path, odd_llama):
    """Rows of several documents: what plain PEFT makes of the same ones as a padded batch."""
    args = ["--model", odd_llama, "--attention", attention, "--peft", peft, "--pack"]
    args += [*paragraphs(tmp_path), "--seq-len", 37, "--batch-size", 2]
    args += ["--num-sequences", 3, "--dtype", "float64", "--check-steps", 2, "--steps", 2]
    result, _ = finetune(tmp_path, *args, *flag.split(), nproc=nproc)
    assert result.code == 0 and result.out.count("Tests passed") == nproc, result.tail()
    documents = int(re.search(r"^text: (\d+) documents of \S+ in 3 rows, ", result.out, re.M)[1])
    assert documents > 6, result.tail()


@pytest.mark.stress
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_stories(dtype, attention, tmp_path):
    """Of the project's own, of which a row of 700 positions has two or three."""
    args = ["--pack", "--seq-len", 668, "--dtype", dtype, "--attention", attention]
    result, _ = finetune(tmp_path, *args, "--check-steps", 1, "--steps", 2, nproc=2)
    assert result.code == 0 and result.out.count("Tests passed") == 2, result.tail()
    assert re.search(r"^text: [23] documents of stories .* in 1 rows, ", result.out, re.M)


def test_rows_of_documents():
    """In order, whole but for what no row can hold; and taken apart again for the reference."""
    lengths = [3, 4, 1, 30, 2, 5, 9]
    documents = [[10 * i + j for j in range(n)] for i, n in enumerate(lengths)]
    rows = fill(documents, 4, 12, 2)
    assert rows == [documents[:2], [documents[3][:10]], documents[4:6], documents[6:]]
    assert fill(documents, 1, 12, 2) == rows[:1]
    rows = [[torch.tensor(document) for document in row] for row in rows]
    ids, places = pack(rows, 12, 2)[0].tolist()
    assert ids == [-100, -100, 0, 1, 2, -100, -100, 10, 11, 12, 13, -100]
    assert places == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0]
    plain = one_by_one(rows[:1], "cpu")
    assert plain["labels"].tolist() == [[0, 1, 2, -100], [10, 11, 12, 13]]
    assert plain["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert "attention_mask" not in one_by_one(rows[3:], "cpu")


def test_printed_lines(tmp_path):
    """What the assignment prints, and a loss that goes down."""
    result, record = finetune(tmp_path, "--steps", 12, nproc=2)
    assert re.search(r"^Cropping input_ids.shape\[1\]=\d+ to 128 tokens$", result.out, re.M)
    assert "\nParameters: 5120 trainable / 1768640 total\n" in result.out
    losses = [float(x) for x in re.findall(r"^i=\d+\tloss.item\(\)=([\d.]+)$", result.out, re.M)]
    assert len(losses) == 12 and losses == sorted(losses, reverse=True), result.tail()
    assert record["losses"] == losses  # to the last digit


PLAIN = """
import sys, torch
from pathlib import Path
from transformers import LlamaForCausalLM
from peft import PeftModel
base, out, ids = sys.argv[1], Path(sys.argv[2]), torch.tensor([list(map(int, sys.argv[3].split()))])
adapter, model = out / "adapter", out / "model"
model = LlamaForCausalLM.from_pretrained(base if adapter.exists() else model).float()
model = PeftModel.from_pretrained(model, adapter) if adapter.exists() else model
print("loss", model(input_ids=ids, labels=ids).loss.item())
"""


@pytest.mark.parametrize(
    "peft", ["lora", *(pytest.param(p, marks=pytest.mark.stress) for p in ("none", "prompt"))]
)
def test_plain_peft_opens_what_was_saved(peft, tmp_path):
    """Without this repo, from the files alone, the loss that training ended at; to the bit
    what it ended at is what was saved."""
    args, out = ["--peft", peft, "--output-dir", tmp_path / "out"], tmp_path / "out"
    result, _ = finetune(tmp_path, *args, "--steps", 6, nproc=2)
    assert result.code == 0, result.tail()
    kept = {name: t for name, t in checkpoint.load_checkpoint(out)[0].items() if "param" in name}
    saved = load_file(next(out.glob("*/*model.safetensors")))
    pairs = zip(sorted(kept.items()), sorted(saved.items()), strict=True)
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in pairs)
    text = loading.text.own_text(128, 1337)[1]
    from transformers import PreTrainedTokenizerFast

    ids = PreTrainedTokenizerFast.from_pretrained(TINY)(text)["input_ids"][:128]
    (tmp_path / "plain.py").write_text(PLAIN)
    opened = launch.run(
        [sys.executable, "plain.py", TINY, out, " ".join(map(str, ids))], cwd=tmp_path
    )
    assert opened.code == 0, opened.tail()
    # Its step 6 begins at what was saved. The first losses were those of two ranks.
    args += ["--steps", 7, "--resume", "--check-steps", 1]
    result, record = finetune(tmp_path, *args, nproc=1)
    plain = re.search(r"^loss ([\d.]+)$", opened.out, re.M)
    assert float(plain[1]) == pytest.approx(record["losses"][6], rel=2e-6), result.tail()
    assert "was on 2 ranks" in result.out
    configs = [path.read_text() for path in out.glob("*/*config.json")]
    assert configs and not any(str(launch.ROOT) in c or str(tmp_path) in c for c in configs)


@STRESS
def test_result_of_a_bfloat16_model(tmp_path):
    """Trained in float32, its weights are saved so, and opened so, not rounded once more."""
    from transformers import LlamaForCausalLM

    base, args = tmp_path / "base", ["--peft", "none", "--check-steps", 1, "--steps", 2]
    LlamaForCausalLM.from_pretrained(TINY).bfloat16().save_pretrained(base)
    assert '"bfloat16"' in (base / "config.json").read_text()
    result, _ = finetune(tmp_path, *args, "--model", base, "--output-dir", tmp_path / "o", nproc=2)
    assert result.code == 0, result.tail()
    saved = load_file(tmp_path / "o" / "model" / "model.safetensors")
    opened = LlamaForCausalLM.from_pretrained(tmp_path / "o" / "model")
    for name, parameter in opened.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, saved[name])


# ---------------------------------------------------------------- killed and stopped


LONG = ["--model", "random/small", "--num-layers", 2, "--seq-len", 500, "--num-sequences", 3]
LONG += ["--peft", "lora", "--steps", 12, "--save-every", 2, "--check-steps", 0]
LONG += ["--deterministic"]  # a CPU's bits are the same anyway


JOB = uuid.uuid4().hex


def watched(command, act, log, timeout=150, env=None):
    """Run a command, and act(process, output so far) again and again until that returns True."""
    env = launch.environment(JOB, env)
    with open(log, "w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
    done, deadline = False, time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        done = done or act(process, log.read_text())
        time.sleep(0.02)
    if process.poll() is None:
        for member in launch.processes(JOB):
            member.kill()
        process.wait()
    return process.returncode, log.read_text()


@pytest.fixture(scope="module", params=PLACES, ids=str)
def undisturbed(request, tmp_path_factory):
    """A place, and the output folder and the record of a run there that nothing happens to."""
    folder, place = tmp_path_factory.mktemp("undisturbed"), request.param
    args = [*LONG, "--output-dir", folder / "out"]
    result, record = finetune(folder, *args, nproc=2, place=place)
    assert result.code == 0, result.tail()
    return place, folder / "out", record


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=STRESS)])
def test_killed_ranks(kills, undisturbed, tmp_path):
    """SIGKILL of a rank, once or twice; the restarts end at the undisturbed run's bits."""
    (place, folder, record), path = undisturbed, tmp_path / "record.json"
    step = "        loss = forward_backward(model, batches(i), norms=norms)\n"
    # Longer than `act` may wait: on a fast machine nobody would be left to kill.
    pause = f"        __import__('time').sleep({1 if place is NCCL else 0.3})\n"
    plant(tmp_path, SCRIPT.name, step, pause + step)
    chance, state = random.Random(0), {"kills": 0, "seen": 0}

    def act(process, out):
        if "\ni=" not in out[state["seen"] :]:
            return False
        time.sleep(chance.uniform(0, 1.5))
        ranks = [p for p in launch.processes(JOB) if "LOCAL_RANK" in p.environ()]
        if len(ranks) == 2:
            chance.choice(ranks).kill()
            state["kills"] += 1
            time.sleep(0.5)
            state["seen"] = len((tmp_path / "log").read_text())
        return state["kills"] == kills

    args = [*LONG, "--output-dir", tmp_path / "b", "--json", path, *place.flags(2)]
    command = launch.command(tmp_path / SCRIPT.name, *args, nproc=2, restarts=3)
    code, out = watched(command, act, tmp_path / "log", env=place.env)
    assert code == 0 and state["kills"] == kills, out[-3000:]
    again = json.loads(path.read_text())["results"]
    assert again["losses"] == record["losses"] and again["sha256"] == record["sha256"]
    adapters = [out / "adapter" / "adapter_model.safetensors" for out in (folder, tmp_path / "b")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    assert sorted(p.name for p in (tmp_path / "b").glob("step-*")) == ["step-000010", "step-000012"]


@pytest.mark.parametrize(
    ("number", "when"),
    [pytest.param(signal.SIGINT, "i=2", marks=pytest.mark.stress),
     pytest.param(signal.SIGHUP, "i=2", marks=pytest.mark.stress),
     pytest.param(signal.SIGINT, "saving", marks=pytest.mark.stress)],
)  # fmt: skip
def test_interrupted(number, when, undisturbed, tmp_path):
    """Ctrl-C once, in a step or while it saves, or a closed terminal: a checkpoint of that
    step, from which --resume comes to the same bits."""
    place, _, record = undisturbed
    begin = "    part.mkdir()\n"
    slowly = "    print('saving', flush=True), __import__('time').sleep(2)\n"
    is_slow = when == "saving" or place is NCCL  # a GPU's steps are short
    plant(tmp_path, "checkpoint.py", begin, begin + slowly * is_slow)

    def act(process, out):
        if f"\n{when}" in out:
            process.send_signal(number)
            return True
        return False

    script = tmp_path / SCRIPT.name
    args = [*LONG, "--output-dir", tmp_path / "b"]
    command = launch.command(script, *args, *place.flags(2), nproc=2)
    code, out = watched(command, act, tmp_path / "log", env=place.env)
    assert code and "--resume goes on" in out and "Tests passed" not in out, out[-3000:]
    result, again = finetune(tmp_path, *args, "--resume", nproc=2, place=place)
    assert result.code == 0 and "resumed after" in result.out, result.tail()
    assert again["losses"] == record["losses"] and again["sha256"] == record["sha256"]


# ---------------------------------------------------------------- damaged and other checkpoints


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The output folder of a run of 4 steps with a checkpoint at 2 and at 4."""
    folder = tmp_path_factory.mktemp("trained")
    args = ["--steps", 4, "--save-every", 2, "--output-dir", folder / "out"]
    result, _ = finetune(folder, *args)
    assert result.code == 0, result.tail()
    return folder / "out"


@pytest.mark.parametrize(
    "edit",
    [("parameters[rest].data.copy_(tensor)", "pass"), ('{"state": state,', '{"state": {},')],
)
def test_state_that_is_not_restored(edit, trained, tmp_path):
    """Neither parameters nor Adam's states are left out in silence."""
    folder = shutil.copytree(trained, tmp_path / "out")
    plant(tmp_path, "checkpoint.py", *edit)
    args = ["--steps", 6, "--output-dir", folder, "--resume"]
    result, _ = finetune(tmp_path, *args, script=tmp_path / SCRIPT.name)
    assert result.code == 1 and "FAILED state as it was saved" in result.out, result.tail()


def test_from_another_device(trained, tmp_path):
    """A checkpoint that has a GPU's random state, too, goes on where there is no GPU."""
    folder = shutil.copytree(trained, tmp_path / "out")
    newest = max(folder.glob("step-*"))
    tensors = load_file(newest / checkpoint.STATE)
    tensors["random.another"] = torch.full((1, 16), 7, dtype=torch.uint8)
    save_file(tensors, newest / checkpoint.STATE)
    manifest = json.loads((newest / checkpoint.MANIFEST).read_text())
    manifest[checkpoint.STATE] = checkpoint.digest(newest / checkpoint.STATE)
    (newest / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    result, _ = finetune(tmp_path, "--steps", 6, "--output-dir", folder, "--resume")
    assert result.code == 0 and "resumed after 4 steps" in result.out, result.tail()


def flip(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


DAMAGE = {
    "truncated": lambda d: os.truncate(d / checkpoint.STATE, 1000),
    "a flipped bit": lambda d: flip(d / checkpoint.STATE),
    "another loss": lambda d: flip(d / checkpoint.RECORD),
    "no tensors": lambda d: (d / checkpoint.STATE).unlink(),
    "no manifest": lambda d: (d / checkpoint.MANIFEST).unlink(),
    "an empty manifest": lambda d: (d / checkpoint.MANIFEST).write_text(""),
    "a manifest of something else": lambda d: (d / checkpoint.MANIFEST).write_text("[1]"),
    "nothing in it": lambda d: [path.unlink() for path in d.iterdir()],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint(name, trained, tmp_path):
    """The one before is taken, with a warning; if all are damaged, an error lists them."""
    folder = shutil.copytree(trained, tmp_path / "out")
    assert len(checkpoint.load_checkpoint(folder)[1]["losses"]) == 4
    DAMAGE[name](folder / "step-000004")
    _, record, warnings = checkpoint.load_checkpoint(folder)
    assert len(record["losses"]) == 2 and len(warnings) == 1 and "step-000004" in warnings[0]
    DAMAGE[name](folder / "step-000002")
    with pytest.raises(UserError, match=r"step-000004.*step-000002"):
        checkpoint.load_checkpoint(folder)


def test_resumed_past_a_damaged_checkpoint(trained, tmp_path):
    """And training goes on from the one before to the same bits."""
    folder = shutil.copytree(trained, tmp_path / "out")
    flip(folder / "step-000004" / checkpoint.STATE)
    args = ["--steps", 4, "--save-every", 2, "--output-dir", folder, "--resume"]
    result, record = finetune(tmp_path, *args)
    assert result.code == 0 and result.out.count("skipped a damaged checkpoint") == 1
    assert "resumed after 2 steps" in result.out, result.tail()
    whole = json.loads((trained / "step-000004" / checkpoint.RECORD).read_text())
    assert record["losses"] == whole["losses"]
    assert checkpoint.load_checkpoint(folder)[2] == []  # the damaged one has been replaced


def test_damaged_checkpoints_of_later_steps(trained, tmp_path):
    """What is saved next is kept, with the good one before it; the damaged ones go."""
    folder = shutil.copytree(trained, tmp_path / "out")
    for name in ("step-000098", "step-000099"):
        shutil.copytree(folder / "step-000004", folder / name)
    assert "of step 4" in checkpoint.damage(folder / "step-000099")
    args = ["--steps", 6, "--save-every", 1, "--output-dir", folder, "--resume"]
    result, _ = finetune(tmp_path, *args)
    assert result.code == 0 and "resumed after 4 steps" in result.out, result.tail()
    assert sorted(p.name for p in folder.glob("step-*")) == ["step-000005", "step-000006"]
    result, _ = finetune(tmp_path, *args[2:], "--steps", 2)
    assert result.code == 0 and "more than --steps 2" in result.out, result.tail()


def test_result_cannot_be_saved(tmp_path):
    """One line, on all ranks; the checkpoint is there to resume from."""
    right = "        swap(part, final)\n    print"
    plant(tmp_path, "finetune.py", right, "        raise OSError(28, 'No space')\n    print")
    out = tmp_path / "out"
    script = tmp_path / "ulysses_finetune.py"
    result, _ = finetune(tmp_path, "--output-dir", out, nproc=2, script=script)
    result.assert_refused("the adapter was not saved")
    assert sorted(p.name for p in out.iterdir()) == [".job", ".lock", "step-000010"]
    (out / ".user.part").mkdir()  # not ours
    result, _ = finetune(tmp_path, "--output-dir", out, "--resume")
    assert result.code == 0 and (out / "adapter").is_dir() and (out / ".user.part").is_dir()


def test_killed_while_saving(trained, tmp_path, monkeypatch):
    """What is half written, or does not fit on the disk, is never read."""
    folder = shutil.copytree(trained, tmp_path / "out")
    (folder / ".step-000006.part").mkdir()  # by a job that was killed
    assert len(checkpoint.load_checkpoint(folder)[1]["losses"]) == 4

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "flush", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save_checkpoint(folder, 6, {"a": torch.ones(3)}, {"losses": []})
    assert sorted(p.name for p in folder.glob("*step-*")) == ["step-000002", "step-000004"]


def test_killed_between_two_renames(tmp_path):
    """A checkpoint that was to be replaced has moved aside, and the new one has no name yet."""
    checkpoint.save_checkpoint(tmp_path, 1, {"a": torch.ones(9)}, {"n": 1})
    (tmp_path / "step-000001").rename(tmp_path / ".step-000001.part.old")
    (tmp_path / ".step-000001.part").mkdir()
    checkpoint.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoint.load_checkpoint(tmp_path)[1] == {"n": 1}


def test_a_good_checkpoint_at_every_moment(tmp_path):
    """A watcher that reads again and again while others are saved and removed.

    What it reads counts if the saver was at one step meanwhile. (On a busy machine the watcher may
    sleep through two steps, in which all that it had listed is removed, rightly.)
    """
    checkpoint.save_checkpoint(tmp_path, 1, {"a": torch.ones(9)}, {"n": 1})
    problems, views, stop = [], [], threading.Event()
    step = 1

    def watch():
        while not stop.is_set():
            begun = step
            found = checkpoint.list_checkpoints(tmp_path)
            damaged = all(checkpoint.damage(path) for path in found)
            if step == begun:
                views.append(begun)
                problems.extend([found] * damaged)

    thread = threading.Thread(target=watch)
    thread.start()
    while step < 40 or (len(set(views)) < 10 and step < 4000):
        step += 1
        checkpoint.save_checkpoint(tmp_path, step, {"a": torch.ones(9) * step}, {"n": step})
    stop.set()
    thread.join()
    assert not problems and len(checkpoint.list_checkpoints(tmp_path)) == 2
    assert len(set(views)) >= 10, "the watcher saw too few steps"


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [("--seed", 5, "--seed was 1337, is 5"), ("--lr", 0.01, "--lr was 0.001, is 0.01"),
     ("--text", "other.txt", "another text"), ("--model", "random/small", "another weights"),
     ("--pack", "--check-steps=0", "--pack was False, is True")],
)  # fmt: skip
def test_checkpoint_of_another_run(flag, value, named, trained, tmp_path):
    """Refused, with what differs; nothing there is touched but the name of the job that looked."""
    folder = shutil.copytree(trained, tmp_path / "out")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".job"]
    before = {path: path.read_bytes() for path in files}
    if flag == "--text":
        value = tmp_path / value
        value.write_text("One day a fox went to the market. " * 100)
    args = ["--output-dir", folder, "--resume", flag, value, "--num-layers", 1]
    result, _ = finetune(tmp_path, *(args if flag == "--model" else args[:-2]))
    result.assert_refused(named)
    assert "of another run" in result.errors()[0], result.tail()
    assert before == {path: path.read_bytes() for path in before}


# ---------------------------------------------------------------- bad input


def test_not_a_number_on_one_rank(tmp_path):
    """All ranks stop before the optimizer; the line names the rank and the step."""
    right = "        loss = forward_backward(model, batches(i), norms=norms)\n"
    wrong = "        loss = loss * (float('nan') if i == 3 and group.rank() == 1 else 1)\n"
    plant(tmp_path, "ulysses_finetune.py", right, right + wrong)
    args = ["--output-dir", tmp_path / "out", "--save-every", 2]
    result, _ = finetune(tmp_path, *args, nproc=2, script=tmp_path / "ulysses_finetune.py")
    result.assert_refused("step 3: the loss is nan on rank 1")
    assert "i=2" in result.out and "i=3" not in result.out
    tensors, _, _ = checkpoint.load_checkpoint(tmp_path / "out")
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_not_a_number_in_a_gradient(tmp_path):
    """Of one rank alone, and the loss is still a number."""
    right = "        loss.backward()\n"
    wrong = "        [*parameters][-1].grad *= float('inf') ** mesh.get_local_rank()\n"
    plant(tmp_path, "ulysses_finetune.py", right, right + wrong)
    args = ["--peft", "lora", "--check-steps", 0]
    result, _ = finetune(tmp_path, *args, nproc=2, script=tmp_path / "ulysses_finetune.py")
    result.assert_refused("layers.4.self_attn.o_proj.lora_B.default.weight is ")
    assert " on rank 1; stopped before" in result.errors()[0], result.tail()


def own_folder(folder, **kind):
    (folder / "f").touch()
    (folder / "out" / "step-000002").mkdir(parents=True)
    for result in ("adapter", "model"):
        (folder / "mine" / result).mkdir(parents=True)
    return folder


PAIRS = ["--pack", "--peft", "lora", "--model", "random/small", "--num-layers", 1]
BAD_FLAGS = {
    # name: (flags, in which {} is a folder; what the message says)
    "the output folder is a file": (["--output-dir", "{}/f"], "cannot be written"),
    "the output folder's parent is missing": (["--output-dir", "{}/no/out"], "cannot be written"),
    "checkpoints are in the way": (["--output-dir", "{}/out"], "add --resume"),
    "an adapter is there": (["--output-dir", "{}/mine", "--resume"], "the adapter there is not"),
    "a model is there": (["--peft", "none", "--output-dir", "{}/mine"], "the model there is not"),
    "a home that is not there": (["--text", "~nobody-here/x"], "cannot be read"),
    "too many virtual tokens": (["--num-virtual-tokens", 2**30], "at most 1048576"),
    "an absurd rate": (["--lr", "1e39"], "below a million"),
    "nothing to resume from": (["--resume"], "--resume needs --output-dir"),
    "text is missing": (["--text", "{}/none.txt"], "cannot be read"),
    "text is a folder": (["--text", "{}"], "a directory"),
    "text is empty": (["--text", "{}/f"], "no text in it"),
    "text is too short": (["--seq-len", 10, "--text", "{}/short.txt"], "but 10 are needed"),
    "too few documents": (["--pack", "--text", "{}/short.txt", "--batch-size", 2], "fill 1 rows"),
    "documents of a token": (["--pack", "--text", "{}/letters.txt"], "fill 0 rows, but 1 are"),
    "documents of two": ([*PAIRS, "--text", "{}/pairs.txt"], "of 3 tokens or more fill 0 rows"),
    "more than is written": (["--pack", "--num-sequences", 10**9], "more than the project writes"),
    "sequence of two tokens": (["--peft", "lora", "--seq-len", 2], "too short"),
    "no learning rate": (["--lr", 0], "must be above 0"),
    "two ways to recompute": (["--selective-checkpoint", "--gradient-checkpointing"], "exclude"),
}


@pytest.mark.stress
def test_refused_again_and_again(trained, tmp_path):
    """What torchrun starts again is refused again: only a folder of its own is gone on from."""
    folder = shutil.copytree(trained, tmp_path / "out")
    result = launch.torchrun(
        SCRIPT, "--check-steps", 0, "--steps", 5, "--output-dir", folder, nproc=2, restarts=1
    )
    assert result.code and not result.survivors, result.tail()
    assert len(result.errors()) == 2, result.tail()
    assert all("add --resume" in line for line in result.errors()), result.tail()
    assert not (folder / "step-000005").exists()


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags(name, tmp_path):
    own_folder(tmp_path)
    (tmp_path / "short.txt").write_text("A fox.")
    (tmp_path / "pairs.txt").write_text("ab\n\ncd")
    (tmp_path / "letters.txt").write_text("a\n\nb\n\nc")
    flags, message = BAD_FLAGS[name]
    result, _ = finetune(tmp_path, *(str(flag).format(tmp_path) for flag in flags))
    result.assert_refused(message)


@pytest.mark.parametrize("flag", ["--output-dir", "--json"])
def test_read_only(flag, tmp_path, read_only):
    """Found out before any work."""
    (tmp_path / "closed" / "out").mkdir(parents=True)
    read_only(tmp_path / "closed")
    args = [flag, tmp_path / "closed" / ("out" if flag == "--output-dir" else "x.json")]
    result = launch.ranks(SCRIPT, *args, nproc=2, folder=tmp_path)
    result.assert_refused(f"{flag} {tmp_path}")


def test_two_runs_in_one_folder(tmp_path):
    """The second is refused while the first is at work."""
    from filelock import FileLock

    with FileLock(tmp_path / ".lock"):
        result, _ = finetune(tmp_path, "--output-dir", tmp_path)
    result.assert_refused("another run is writing there")


def test_folder_was_replaced(tmp_path):
    """A job whose folder was removed leaves alone what another has put in its place."""
    out, lock = tmp_path / "out", tmp_path / "out" / ".lock"
    claim = checkpoint.Claim(out)  # while it has the lock open, nothing else gets its number
    claim.check()
    shutil.rmtree(out)
    with pytest.raises(OSError, match="was removed"):
        claim.check()
    out.mkdir()
    lock.touch()
    with pytest.raises(OSError, match="was removed"):
        claim.check()


def test_longer_than_the_model_was_made_for(tmp_path, odd_llama):
    """Said, and done; so is training on bytes where there is no tokenizer."""
    args = ["--model", odd_llama, "--seq-len", 310, "--steps", 1]
    result, _ = finetune(tmp_path, *args, nproc=2)
    assert result.code == 0 and "was made for 300" in result.out, result.tail()
    assert "its bytes are the tokens" in result.out


def test_text_as_files_have_it():
    """A byte-order mark, CRLF, NULs and a Gutenberg licence change nothing."""

    def read(content):
        return loading.text.between_marks("x", loading.text.decode(content, "x"))[1]

    clean = "Stately, plump Buck Mulligan\n\ncame from the stairhead"
    book = "*** START OF THE PROJECT GUTENBERG EBOOK ULYSSES ***\n" + clean
    book = f"Licence\n{book}\n*** END OF THE PROJECT GUTENBERG EBOOK ULYSSES ***\nmore licence"
    for text in (clean, "\ufeff" + clean, clean.replace("\n", "\r\n"), clean + "\0", book):
        assert read(text.encode()) == clean
    assert read((book + book + book).encode()) == "\n\n".join([clean] * 3)
    with pytest.raises(UserError, match="not UTF-8: byte 0xe9 at offset 3"):
        loading.text.decode("caf\xe9 noir".encode("latin-1"), "x")
    with pytest.raises(UserError, match="UTF-16"):
        loading.text.decode("text".encode("utf-16"), "x")


def test_text_of_which_some_is_left_out(tmp_path):
    """It is said which."""
    book = "Licence\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\n%s\n*** END OF THE PROJECT "
    book += "GUTENBERG EBOOK X ***\nmore"
    (tmp_path / "books.txt").write_text(book % "One day" + book % "Another day")
    start = "*** START OF THE PROJECT GUTENBERG EBOOK X"
    texts = {
        "books": (book % "One day" + book % "Another day", "One day\n\nAnother day", True),
        "a title of two lines": (f"Licence\n{start}\nAND Y ***\nOne day", "One day", True),
        "plain": ("One day", "One day", False),
    }
    for name, prose in {
        "no closing stars": f"One day\n{start}\nthe fox\n\n***\nslept",
        "stars of a paragraph below": f"One day\n{start}\n\nthe fox *** slept ***\nwell",
        "a mark in the middle of prose": f"One day he read {start} *** and slept\nwell",
    }.items():
        texts[name] = prose, prose, False
    for name, (content, text, some) in texts.items():
        path = str(tmp_path / f"{name}.txt")
        (tmp_path / f"{name}.txt").write_text(content)
        said, found = loading.text.find_text(path, None, 1, 0)
        assert found == text and said.startswith(path) and ("between" in said) == some


@pytest.mark.stress
def test_enormous_text(tmp_path):
    """A line of 100 MB takes neither minutes nor all of the memory."""
    (tmp_path / "line.txt").write_bytes(b"A fox went to the market. " * 4_000_000)
    args = ["--check-steps", 0, "--steps", 2, "--text", tmp_path / "line.txt"]
    limited = ["bash", "-c", 'ulimit -d 3000000; exec "$@"', "bash"]
    result = launch.run([*limited, *launch.command(SCRIPT, *args, nproc=2)])
    assert result.code == 0 and "only the first 10000000 characters" in result.out, result.tail()
    assert result.seconds < 60, result.tail()


def test_fetched_once(tmp_path, monkeypatch):
    """A URL is fetched once, then read from the cache; out of reach, the default falls back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    served = tmp_path / "book.txt"
    served.write_text("a book " * 10)
    urls = []

    def urlopen(url, timeout):
        urls.append(url)
        if len(urls) > 1:
            raise OSError("no network")
        return open(served, "rb")

    monkeypatch.setattr(loading.text.urllib.request, "urlopen", urlopen)
    source = SimpleNamespace(directory=tmp_path, name="mine")  # not the tiny model's
    for _ in range(2):
        assert loading.text.find_text("http://x/book.txt", source, 5, 0)[1].startswith("a book")
    assert urls == ["http://x/book.txt"]
    name, text = loading.text.find_text(None, source, 5, 0)
    assert "out of reach" in name and len(text) >= 100_000 and urls[1] == loading.text.ULYSSES
    with pytest.raises(UserError, match="not fetched"):
        loading.text.find_text("http://x/other.txt", source, 5, 0)
