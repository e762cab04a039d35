"""What was measured, the pages that tell of it, and the code that measures, plans and draws.

Programs run as modules, from the repository's root, so that all of them find one another:

    python -m figures.bench.tp_speed
    torchrun --standalone --nproc_per_node 2 -m figures.bench.pipeline

*.md, *.png   pages and their pictures
outputs/      what the tasks' commands print
records/      what was measured, as JSON; records/gpu/ is of a GPU
bench/        measures and records, and writes the pages' tables of it
plan/         computes what a step would take, without running it
draw/         draws pictures of records
"""

import sys
from pathlib import Path

FIGURES = Path(__file__).resolve().parent
ROOT = FIGURES.parent
RECORDS, OUTPUTS = FIGURES / "records", FIGURES / "outputs"
TASKS, TESTS = ROOT / "tasks", ROOT / "tests"

# What is measured is in tasks/. Some programs plant the tests' bugs, or start jobs as the tests do.
sys.path.insert(0, str(TASKS))
sys.path += [str(TESTS), str(TESTS / "helpers")]
