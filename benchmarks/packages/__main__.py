"""Models of other people's packages, planned at 80 %, 60 % and the smallest budget, against their unplanned loops.

Each runs in a process of its own, so that a crash is a row. What is not installed is skipped; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.packages.models import MODELS
from benchmarks.packages.one import MARK
from benchmarks.reporting import RESULTS, write_rows

SECONDS = 300  # of one model at all budgets
COLUMNS = [
    "model",
    "budget",
    "stages",
    "unplanned_bytes",
    "smallest_bytes",
    "own",
    "own_bytes",
    "refused",
    "budget_bytes",
    "predicted_bytes",
    "measured_bytes",
    "above_bytes",
    "differs",
    "said",
]


def rows_alone(name: str) -> list[dict[str, Any]]:
    """The rows of a model that is measured in a process of its own; how that ended where it did not end well."""
    command = [sys.executable, "-m", "benchmarks.packages.one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        printed, errors = done.stdout, done.stderr
        ended = _ending(done.returncode, errors) if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        printed, errors, ended = (late.stdout or b"").decode(), "", f"not done in {SECONDS} s"
    rows = [json.loads(line.removeprefix(MARK)) for line in printed.splitlines() if line.startswith(MARK)]
    if ended:
        rows.append({"differs": ended})
    if any(row["differs"] for row in rows):
        print(errors[-4000:], file=sys.stderr)
    return [{"said": "", "own": MODELS[name].own, **row, "model": name} for row in rows]


def _ending(code: int, errors: str) -> str:
    """The exception where there was one, else by which signal the process died."""
    last = errors.strip().splitlines()[-1:] if "Traceback" in errors and code == 1 else []
    return ": ".join([f"exit code {code}", *last])


def all_rows(names: list[str], jobs: int) -> Iterator[dict[str, Any]]:
    """In the order of the names, as they come."""
    with ThreadPoolExecutor(jobs) as pool:
        for rows in pool.map(rows_alone, names):
            yield from rows


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """What the table says about the promises."""
    frame = pd.DataFrame(rows, columns=COLUMNS)
    planned = frame[frame.measured_bytes.notna()]
    above = planned.above_bytes > 0
    own = frame[frame.own_bytes.notna()].groupby("model").first()
    missing = sorted({need for each in MODELS.values() if not each.installed for need in each.needs})
    return [
        f"models: {frame.model.nunique()}; plans: {len(planned)}; with a difference or an error: "
        f"{(frame.differs != '').sum()}; above the budget: {above.sum()}, without having said so: "
        f"{(above & (planned.said == '')).sum()}; measured equals predicted to the byte: "
        f"{(planned.measured_bytes == planned.predicted_bytes).sum()}",
        f"models with a checkpointing of their own: {len(own)}; smallest budget above its peak: "
        f"{(own.smallest_bytes > own.own_bytes).sum()}",
        "refused: the budget is below the smallest one; said: the planner's warnings as the model was profiled and "
        "planned; own: what turns the package's own checkpointing on, and its measured peak",
        "measured: every byte of the process's tensors from before the model is made, the first step included",
        *([f"skipped, since not installed or made for another torch: {', '.join(missing)}"] if missing else []),
    ]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packages", description=__doc__)
    there = [name for name, each in MODELS.items() if each.installed]
    parser.add_argument("--models", nargs="+", default=there, choices=there, metavar="MODEL", help=", ".join(there))
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    title = "Models of other people's packages under a plan"
    write_rows(options.out, "packages", title, all_rows(options.models, options.jobs), summary, COLUMNS)


if __name__ == "__main__":
    main()
