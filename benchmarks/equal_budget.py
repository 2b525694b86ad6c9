"""Plans against those of an earlier commit at the same budgets, timed in turns, each in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.graph_fidelity import MODELS
from benchmarks.peer_turns import in_turns
from benchmarks.reporting import RESULTS, result_name, write_rows

BUDGETS = 5
_HERE = Path(__file__).parent.parent
# What each is profiled with: the plain step, this version's own choice, and the two kinds of plans of release 0.2.
NOW, STAGES, GRAPH = "now", "stages", "graph"
_EARLIER: dict[str, dict[str, Any]] = {STAGES: {}, GRAPH: {"graph": True}}


class Contender:
    """A process that holds one model, and plans and steps as it is told.

    Args:
        folder: of the version to import.
        model: of ``graph_fidelity``.
        profile: further arguments of ``planner.profile``; None for the plain step.
    """

    def __init__(self, folder: Path, model: str, profile: Mapping[str, Any] | None) -> None:
        command = [sys.executable, "-P", str(Path(__file__).with_name("planned_steps.py")), model, json.dumps(profile)]
        own = {**os.environ, "PYTHONPATH": str(folder)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=own, cwd=folder, text=True
        )
        self.bounds = self._answer()

    def __call__(self, order: str, *values: float) -> dict[str, Any]:
        """What the process answers to an order of ``planned_steps``."""
        assert self.process.stdin is not None
        print(order, *values, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"expected an answer of {self.process.args}, got its end")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def rows_of(model: str, earlier: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """One row per budget, from where all fit at all to just below the unplanned peak."""
    with contextlib.ExitStack() as opened:

        def start(folder: Path, profile: Mapping[str, Any] | None) -> Contender:
            return opened.enter_context(contextlib.closing(Contender(folder, model, profile)))

        plain = start(_HERE, None)
        plans = {NOW: start(_HERE, {}), **{name: start(earlier, each) for name, each in _EARLIER.items()}}
        least = max(each.bounds["smallest_bytes"] for each in plans.values())
        most = plans[NOW].bounds["unplanned_bytes"]
        smallest = {f"{name}_smallest_bytes": each.bounds["smallest_bytes"] for name, each in plans.items()}
        for budget in map(int, np.linspace(least, most, BUDGETS + 1, dtype=np.int64)[:-1]):
            found = {name: each("plan", budget) for name, each in plans.items()}
            ways = {"plain": plain, **plans}
            times = in_turns({name: (lambda each=each: each("step")["seconds"]) for name, each in ways.items()}, rounds)
            row: dict[str, Any] = {"model": model, **smallest, "budget_bytes": budget}
            for name in plans:
                row[f"{name}_peak_bytes"] = found[name]["peak_bytes"]
                row[f"{name}_predicted"] = found[name]["slowdown"]
                row[f"{name}_slowdown"] = times.ratio(name, "plain")
            yield {**row, "now_over_best": max(times.ratio(NOW, name) for name in _EARLIER)}


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """How plans do against the better of the earlier ones, and against the earlier plans of stages."""
    if not rows:
        return []
    ratios = [row["now_over_best"] for row in rows]
    dear = [row for row in rows if row["stages_slowdown"] > 1.1]
    halved = sum(row["now_slowdown"] - 1 <= (row["stages_slowdown"] - 1) / 2 for row in dear)
    larger = [row["model"] for row in rows if row["now_smallest_bytes"] > row["stages_smallest_bytes"]]
    return [
        "slowdowns over the plain step: medians over rounds of all four in turn, each a process of its own",
        "now_over_best: over the faster of the two earlier plans",
        f"now over the better of the earlier two: {statistics.median(ratios):.3f} (median), {max(ratios):.3f} (most); "
        f"slower by more than 2 % in {sum(ratio > 1.02 for ratio in ratios)} of {len(ratios)}",
        f"at most half the extra time of the earlier plans of stages in {halved} of {len(dear)} budgets where that is "
        "above 10 %",
        f"above the budget: {sum(row['now_peak_bytes'] > row['budget_bytes'] for row in rows)}; smallest budget larger "
        f"than that of earlier stages: {', '.join(dict.fromkeys(larger)) or 'none'}",
    ]


def checked_out(commit: str, folder: Path) -> Path:
    """The folder, with the files of a commit in it."""
    packed = subprocess.run(["git", "archive", commit], cwd=_HERE, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
    return folder


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--commit", default="953ef40", help="the version to compare with")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        earlier = checked_out(options.commit, Path(folder))
        rows = (row for name in options.models for row in rows_of(name, earlier, options.rounds))
        title = f"Plans against those of commit {options.commit} at the same budgets"
        write_rows(options.out, result_name("equal-budget", "cpu"), title, rows, summary)


if __name__ == "__main__":
    main()
