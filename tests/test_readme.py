"""The README's commands do what is shown of them, and the tables of all pages what was recorded."""

import json
import re
import shlex
import sys

import pytest

import launch
from figures.bench import report
from pages import (
    FENCED,
    LESS,
    MORE_SHOWN,
    OTHERS,
    OWN_COMMANDS,
    PAGES,
    SHOWN,
    START,
    TEXT,
    TEXTS,
    alike,
    same,
)


def test_alike():
    """It can fail: another word, another number, another order."""
    check = "check loss of 3 steps  1.0e-07 of 8.4e-05  ok"
    assert alike(check, check.replace("1.0e-07", "0.0e+00"))
    assert alike(check, check.replace("8.4e-05", "2.4e-05"))
    assert not alike(check, check.replace("8.4e-05", "8.4e-01"))
    assert not alike(check, check.replace("8.4e-05", "0.0e+00"))
    assert not alike(check.replace("8.4e-05", "0.0e+00"), check)
    exact = check.replace("1.0e-07 of 8.4e-05", "exact             ")
    assert alike(exact, exact) and not alike(exact, check) and not alike(check, exact)
    for line in check, exact:
        assert not alike(line, line.replace("loss", "logits"))
        assert not alike(line, line.replace("3 steps", "4 steps"))
    assert not alike("x: tensor([ 0.51, -5.87])", "x: tensor([ 0.51, -5.80])")
    assert alike("torch.allclose(output, x): True", "torch.allclose(output, x): False, 1 of 2")
    assert not alike("torch.allclose(output, x): True", "torch.allclose(input_grad, x): True")
    assert alike("Starting worker 0/2 at localhost:1", "Starting worker 0/2 at 127.0.0.1:23")
    same("a\n...\nc\n", "a\nb\nc\n")
    for shown in ("c\na\n", "a\nc\n"):
        with pytest.raises(pytest.fail.Exception, match="is shown: c"):
            same(shown, "a\nb\nc\n")


def test_every_task_is_shown():
    """By the README's command, and in a file that it points to."""
    assert SHOWN.keys() == set(launch.SCRIPTS)
    fenced = [command.rstrip() for command, _ in FENCED]
    assert all(fenced.count(command) == 1 for command in OWN_COMMANDS)
    assert all(f"(figures/outputs/{script}.txt)" in TEXTS[PAGES[0]] for script in SHOWN)
    assert all("Tests passed (rank=0)" in printed for *_, printed in SHOWN.values())
    assert {name for of_script in report.MORE.values() for name in of_script} == MORE_SHOWN.keys()
    for path in launch.FIGURES.glob("outputs/*.txt"):
        lines = [line for line in path.read_text().splitlines() if line.startswith("check ")]
        assert all(
            len(line) < 100 and re.search(r" (exact|\S+ of \S+) +ok$", line) for line in lines
        )


# What these do, other tests do, too.
LONG = re.compile(
    "long_speed|ulysses_speed|decoding|tp_training|--peft lora|tp_llama.* random/|"
    "(data_parallel|pipeline_llama|pretrain_2d|ulysses_finetune).*memory-budget"
)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            c,
            marks=[pytest.mark.stress] * bool(LONG.search(c))
            + [pytest.mark.real] * ("--model smollm2" in c),
        )
        for c in OTHERS
    ],
    ids=lambda command: re.split(r"tasks/|-m figures\.", command)[1][:40],
)
def test_other_commands(command, tmp_path):
    printed = OTHERS[command]
    for pattern, less in LESS:
        command = re.sub(pattern, less, command)
    words = shlex.split(command.replace("--output-dir out", f"--output-dir {tmp_path / 'out'}"))
    assert words[:3] == START.split()
    timed = ("seq-len" in command or "figures" in command) and "memory-budget" not in command
    more = ["--repeats", 1] if timed else []
    more += ["--seq-len", 64] if "long_speed" in command else []
    result = launch.run([sys.executable, "-m", "torch.distributed.run", *words[2:], *more])
    assert result.code == 0 and "Tests passed (rank=1)" in result.out, result.tail()
    same(printed, result.out)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake\s([a-z-]+)", TEXT))))
def test_make_targets(target):
    """Every target that it names is there."""
    assert launch.run(["make", "-n", target]).code == 0


STARTED = """
import json, sys
print("started", *sys.argv[1:], flush=True)
checks = [{"name": "the first", "share": 0.1}, {"name": "the second", "share": 0.2}]
with open(sys.argv[-1], "w") as file:
    json.dump({"checks": checks}, file)
sys.exit(3 * ("tasks/tp_llama.py" in sys.argv))
"""


def test_make_demo(tmp_path):
    """It starts every script, once, with what MODEL, DTYPE, DEVICE and NPROC say, and shows so."""
    for name in ("Makefile", "requirements.txt", "tasks", "launch"):
        (tmp_path / name).symlink_to(launch.ROOT / name)
    torchrun = tmp_path / ".venv" / "bin" / "torchrun"
    torchrun.parent.mkdir(parents=True)
    torchrun.write_text(f"#!{sys.executable}\n{STARTED}")
    torchrun.chmod(0o755)
    (torchrun.parent / "python").symlink_to(sys.executable)
    (tmp_path / ".venv" / "ready").write_text(f"{tmp_path.resolve()}\n")
    values = {"MODEL": "my model", "DTYPE": "float64", "DEVICE": "cpu", "NPROC": "3"}
    words = [f"{name}={value}" for name, value in values.items()]
    result = launch.run(["make", "demo", *words], cwd=tmp_path)
    assert result.code == 2, result.tail()  # make's own: one task has failed, and hides no other
    args = "--model my model --dtype float64 --device cpu"
    for script in launch.SCRIPTS:
        line = f"--standalone --nproc_per_node 3 tasks/{script}.py {args}"
        assert result.out.count(f"\nstarted {line} --json ") == 1, result.tail()
        assert result.out.count(f"torchrun {line}\n") == 1, result.tail()
        row = re.search(rf"^{script} .*", result.out, re.M)[0]
        assert row.endswith("FAILED (3)" if script == "tp_llama" else "ok"), row
        assert "the second" in row and "20%" in row, row
    result = launch.run(["make", "help", *words], cwd=tmp_path)
    assert "DTYPE=float64" in result.out and "make test-real" in result.out, result.tail()


PINS = dict(re.findall(r"^([\w-]+)==(.*)$", (launch.ROOT / "requirements.txt").read_text(), re.M))
OTHER_PINS = re.findall(r"^([a-z_]+)$", (launch.ROOT / "requirements.txt").read_text(), re.M)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"transformers": "4.50.0", "ruff": None, "pytest-xdist": None},
         "(No matching distribution found for transformers=={transformers}): going on with torch "
         "{torch}, transformers 4.50.0, peft {peft}; without pytest-xdist: tests run one after "
         "another; without ruff: no make lint"),
        ({"peft": None, "transformers": "4.40.0"}, "transformers 4.48.3, peft 0.14.0"),
    ],
)  # fmt: skip
def test_environment_of_another(changed, said, tmp_path):
    """Offline, with the Python of a virtual environment: what that has is used, nothing fetched."""
    for name in ("Makefile", "requirements.txt", "launch"):
        (tmp_path / name).symlink_to(launch.ROOT / name)
    other = tmp_path / "other"
    launch.run([sys.executable, "-m", "venv", "--without-pip", other])
    (site,) = other.glob("lib/python*/site-packages")
    versions = PINS | dict.fromkeys(OTHER_PINS, "1.0") | changed
    for name, version in versions.items():
        if version:
            info = site / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
    (site / "torch.py").write_text(f"__version__ = '{PINS['torch']}+made.up'\n")
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": ""}
    make = ["make", ".venv/ready", f"PYTHON={other / 'bin' / 'python'}"]
    elsewhere = tmp_path / "environment of another checkout"
    elsewhere.mkdir()
    (elsewhere / "ready").touch()
    (tmp_path / ".venv").symlink_to(elsewhere)
    result = launch.run(make, cwd=tmp_path, env=offline)
    assert f".venv: using the PyTorch {PINS['torch']}+made.up of " in result.out, result.tail()
    python = tmp_path / ".venv" / "bin" / "python"
    assert (elsewhere / "ready").exists()
    refused = "peft" in changed
    if refused:
        lines = [line for line in result.errors() if said in line]
        assert result.code == 2 and len(lines) == 1, result.tail()
        assert not (tmp_path / ".venv" / "ready").exists()
        return
    assert result.code == 0 and not result.err, result.tail()
    assert result.out.count("note: ") == bool(said), result.tail()
    assert not said or said.format(**PINS) in result.out, result.tail()
    found = launch.run([python, "-c", "import torch; print(torch.__file__)"])
    assert found.out.strip() == str(site / "torch.py"), found.tail()
    assert (tmp_path / ".venv" / "bin" / "torchrun").exists()
    # Made anew by itself, as where it is active, it would look for PyTorch in its own past.
    again = launch.run([python, "launch/packages.py", "torch", ".venv"], cwd=tmp_path)
    assert again.code == 1 and not again.out, again.tail()


def test_tables():
    """They are what figures/bench/report.py makes of the committed records, of which all passed."""
    assert all(TEXTS[page] == text for page, text in report.filled_in().items())
    tasks = json.loads((launch.RECORDS / "report.json").read_text())["tasks"]
    assert tasks.keys() == set(launch.SCRIPTS)
    for of_dtype in tasks.values():
        for claims in of_dtype.values():
            assert all(claim["passed"] and claim["checks"] for claim in claims.values()), claims


STRESS, REAL = pytest.mark.stress, pytest.mark.real


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=REAL if "smollm2" in n else STRESS) for n in sorted(MORE_SHOWN)]
)
def test_more_outputs(name):
    """What other commands print, in outputs/."""
    (commands,) = [of_script[name] for of_script in report.MORE.values() if name in of_script]
    same(MORE_SHOWN[name], report.outputs_of(commands))


def test_criteria():
    """What the tables of wishes point to is printed as shown, or in a script."""
    tables = TEXT.split("| asked for | where it is |")[1:]
    assert len(tables) == 2
    table = "".join(text.split("\n\n")[0] for text in tables)
    sources = "".join(file.read_text() for file in launch.TASKS.rglob("*.py")).lower()
    printed = "".join([printed for *_, printed in SHOWN.values()] + [*MORE_SHOWN.values()])
    for text in re.findall(r"`([^`]*)`", table):
        if not text.startswith(("tasks/", "tests/", "make ", "--")):
            assert text in printed or text.lower().removeprefix("check ") in sources, text
    for text in re.findall(r"\*\*([A-Z: ,]+)\*\*", table):
        assert text.lower() in sources, text


def test_paths():
    """The files and pictures that are named exist."""
    named = re.findall(r"(?:tasks|figures|tests|launch)/[\w/]+\.\w+", TEXT)
    assert named
    of_gpu = {"figures/records/gpu/strategies.json"}  # written by whoever has one
    for name in named:
        assert (launch.ROOT / name).exists() or name in of_gpu, name
    programs = set(re.findall(r"-m figures\.([\w.]+)", TEXT))
    assert len(programs) > 10
    for name in programs:
        path = launch.FIGURES / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def test_links():
    """They lead to files, and to headings in them."""
    assert "](figures/checks.md)" in TEXTS[PAGES[0]]
    for page, text in TEXTS.items():
        links = re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text)
        for name, heading in links:
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), (page, name)
            titles = re.findall("^#+ (.*)", target.read_text() if heading else "", re.M)
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not heading or heading in anchors, (page, name, heading)


def test_length():
    """The README is read in one sitting."""
    assert TEXTS[PAGES[0]].count("\n") <= 260
