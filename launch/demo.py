"""Run every task, whatever one of them does, and end with a table: `make demo`.

    python launch/demo.py --nproc 2 --model tiny --dtype float32 --device auto tasks/*.py

Exit code 0 only where every task has ended with 0.
"""

import argparse
import ast
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tasks"))
from harness.terminal import styled

COLUMNS = "task", "checks", "nearest to its tolerance", "share", "seconds", ""


def run(script, args, record):
    """Start a task as the README shows it. Returns its exit code and its seconds."""
    torchrun = Path(sys.executable).parent / "torchrun"
    shown = ["--standalone", "--nproc_per_node", args.nproc, script, "--model", args.model]
    shown += ["--dtype", args.dtype, "--device", args.device]
    title = ast.get_docstring(ast.parse(Path(script).read_text())).partition("\n")[0]
    print(styled(f"\n=== {title}", "bold"))
    print(f"=== OMP_NUM_THREADS=1 {torchrun} {' '.join(shown)}", flush=True)
    begin = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([torchrun, *shown, "--json", record], env=environment)
    return done.returncode, time.monotonic() - begin


def row_of(script, code, seconds, record):
    """A task's row of the table, of strings."""
    try:
        checks = json.loads(Path(record).read_text())["checks"]
    except (OSError, ValueError, KeyError):
        checks = []  # it has ended before
    name, share = "-", "-"
    # (null: infinitely far off what must be exact)
    shares = [inf if check["share"] is None else check["share"] for check in checks]
    if shares:
        nearest = max(shares)
        name, share = checks[shares.index(nearest)]["name"], f"{nearest:.0%}"
    if len(name) > 56:
        name = f"{name[:53]}..."
    ended = "ok" if code == 0 else f"FAILED ({code})"
    return Path(script).stem, str(len(checks)), name, share, f"{seconds:.0f}", ended


def show_table(rows):
    """Print the rows below their columns' names."""
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]

    def aligned(row):
        return "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()

    print(styled(aligned(COLUMNS), "bold"))
    for *cells, ended in rows:
        print(aligned([*cells, styled(ended, "green" if ended == "ok" else "red")]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scripts", nargs="+", help="the tasks, in this order")
    parser.add_argument("--nproc", default="2", help="ranks; default 2")
    parser.add_argument("--model", default="tiny", help="as of each task; default tiny")
    parser.add_argument("--dtype", default="float32", help="as of each task; default float32")
    parser.add_argument("--device", default="auto", help="as of each task; default auto")
    args = parser.parse_args()
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        for script in args.scripts:
            record = Path(folder) / f"{Path(script).stem}.json"
            try:
                code, seconds = run(script, args, record)
            except KeyboardInterrupt:
                failed = True
                print(f"\ninterrupted in {shlex.quote(script)}: the others are not run")
                break
            failed |= code != 0
            rows.append(row_of(script, code, seconds, record))
    if rows:
        print()
        show_table(rows)
    print("\nPictures and what the tasks print: figures/ (README.md has the links).")
    sys.exit(failed)


if __name__ == "__main__":
    main()
