"""What README and pages show: commands, and whether a run prints what is shown of it."""

import re
from itertools import takewhile

import pytest

import launch

PYTHON = r"^```python\n(.*?)^```\n"
PAGES = [launch.ROOT / "README.md", launch.TASKS / "tiny_llama" / "README.md"]
TEXTS = {page: page.read_text() for page in PAGES + sorted(launch.FIGURES.glob("*.md"))}
TEXT = "".join(TEXTS.values())
CODE = re.findall(PYTHON, TEXT, re.M | re.S)
TEXT = re.sub(PYTHON, "", TEXT, flags=re.M | re.S)
FENCED = re.findall(r"^```\n(.*?)^```\n(?=(?:```\n(.*?)^```\n)?)", TEXT, re.M | re.S)
NUMBER = r"(?<![\w.])-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?"
START = "OMP_NUM_THREADS=1 torchrun --standalone "
# What lines begin with whose numbers differ from run to run.
VARIES = (
    r"time|median step|peak|bytes sent|text:|\(\d+ steps of|Epoch|tokens_per_sec|Starting worker"
)
OWN = rf"{START}--nproc_per_node (\d) tasks/(\w+)\.py([^\\]*)"
# Each task's own command, which test_tasks.py runs, and what is shown of what that prints.
SHOWN, OWN_COMMANDS, MORE_SHOWN = {}, [], {}
for path in (launch.FIGURES / "outputs").iterdir():
    if path.stem not in launch.SCRIPTS:  # of other commands: see `report.MORE`
        MORE_SHOWN[path.stem] = path.read_text()
        continue
    command, printed = path.read_text().removeprefix("$ ").split("\n", 1)
    nproc, script, flags = re.fullmatch(OWN, command).groups()
    SHOWN[script] = int(nproc), flags.split(), printed
    OWN_COMMANDS.append(command)
# The others, which would take long as they stand: the same with less to do.
LESS = [
    (r"--model random/\S+", "--model tiny"), (r"--num-layers \d+", ""),
    (r"--seq-len \d+", "--seq-len 64"), (r"--steps \d+", "--steps 3"),
]  # fmt: skip
OTHERS = {
    command.replace("\\\n", " "): printed
    for command, printed in [(c, "") for c in re.findall(rf"`({START}[^`]*)`", TEXT)] + FENCED
    if command.startswith(START) and command.rstrip() not in OWN_COMMANDS
}


def same(shown, printed):
    """Whether the lines that are shown are printed, one after another.

    Others may come before the first, behind the last, and where it has "...". Words are the same,
    numbers nearly: tensors and losses to the digits that kernels may change, differences not at
    all, times and sizes of memory not at all. (Notes are left out: small models have more.)
    """
    lines, at = [line for line in printed.splitlines() if not line.startswith("note: ")], 0
    for part in re.split(r"^\.\.\.\n", shown, flags=re.M):
        wanted = part.splitlines()
        # How many lines are as shown, from each line on that may be the first.
        found = [
            (len(list(takewhile(bool, map(alike, wanted, lines[first:])))), -first)
            for first in range(at, len(lines) - len(wanted) + 1)
        ]
        alike_lines, first = max(found, default=(0, -len(lines)))
        if alike_lines < len(wanted):
            near = lines[-first:][alike_lines : alike_lines + 1]
            pytest.fail(f"{printed}\nis printed, {near} where this is shown: {wanted[alike_lines]}")
        at = len(wanted) - first


def alike(wanted, line):
    line = line.replace("127.0.0.1", "localhost")  # as `make` has it
    if wanted.startswith("torch.allclose("):  # how many elements miss it depends on the kernels
        return wanted.split("): ")[0] == line.split("): ")[0]
    if " checks, nearest to its tolerance: " in wanted:  # so does which it is
        return wanted.split(",")[0] == line.split(",")[0]
    if wanted.startswith("check "):  # not: its difference
        parts = [re.sub(r"\S+ of (?=\S+ +ok$)", "of ", text) for text in (wanted, line)]
    else:
        parts = [wanted, line]
    if re.sub(NUMBER, "#", parts[0]) != re.sub(NUMBER, "#", parts[1]):
        return False
    if re.match(VARIES, wanted):
        return True
    a, b = ([float(x.replace(",", "")) for x in re.findall(NUMBER, text)] for text in parts)
    if wanted.startswith("check "):
        if wanted.endswith(" exact               ok"):
            return a == b
        # Its last number is the tolerance of the tensor that came nearest to it; which one of
        # several that is depends on the machine's kernels.
        (*a, tolerance), (*b, other) = a, b
        return a == b and (tolerance == other or tolerance < 10 * other < 100 * tolerance)
    return a == pytest.approx(b, rel=1e-3, abs=2e-3)
