"""Plans of single ops against plans of stages: smallest budgets, and both at the same budgets, timed in turns."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import planner
from benchmarks.graph_fidelity import workload_of
from benchmarks.one_step import seconds_of
from benchmarks.peer_turns import in_turns
from benchmarks.reporting import RESULTS, write_result

MODELS = ("densenet", "unet", "windows", "branches", "gpt2", "bert")
BUDGETS = 5


def rows_of(name: str, rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """One row per budget, from where stages fit at all to just below the unplanned peak."""
    stages = planner.profile(workload_of(name))
    graph = planner.profile(workload_of(name), graph=True)
    smallest = {"stages_smallest_bytes": smallest_of(stages), "graph_smallest_bytes": smallest_of(graph, seconds)}
    budgets = np.linspace(smallest["stages_smallest_bytes"], stages.unplanned_peak_bytes, BUDGETS + 1, dtype=np.int64)
    for budget in map(int, budgets[:-1]):
        plans = {
            "stages": planner.solve(stages, budget),
            "graph": planner.solve(graph, budget, time_limit_seconds=seconds),
        }
        yield {"model": name, **smallest, "budget_bytes": budget, **measured(name, plans, rounds)}


def smallest_of(profile: planner.Profile | planner.GraphProfile, seconds: float | None = None) -> int:
    """The smallest budget that is known to be feasible."""
    try:
        planner.solve(profile, 1, time_limit_seconds=seconds)
    except (planner.Infeasible, planner.NothingFound) as error:
        return error.minimum_budget_bytes
    raise AssertionError("a budget of one byte cannot be feasible")


def measured(name: str, plans: dict[str, planner.Plan | planner.GraphPlan], rounds: int) -> dict[str, Any]:
    """Peaks, and seconds over those of the plain step, each plan on a model of its own."""
    works = {"plain": workload_of(name), **{kind: workload_of(name) for kind in plans}}
    row: dict[str, Any] = {}
    with contextlib.ExitStack() as applied:
        for kind, plan in plans.items():
            applied.enter_context(planner.apply(works[kind].model, plan))
            row[f"{kind}_peak_bytes"] = planner.measure(works[kind], repeats=1).peak_bytes
        times = in_turns({kind: (lambda work=work: seconds_of(work)) for kind, work in works.items()}, rounds)
    for kind, plan in plans.items():
        row[f"{kind}_predicted_slowdown"] = plan.slowdown
        row[f"{kind}_slowdown"] = times.ratio(kind, "plain")
    return {**row, "graph_over_stages": times.ratio("graph", "stages")}


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """What the table says about each model."""
    notes = ["slowdowns over the plain step, medians over rounds of all three in turn"]
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        ours, theirs = own[0]["graph_smallest_bytes"], own[0]["stages_smallest_bytes"]
        dear = [row for row in own if row["stages_slowdown"] > 1.1]
        halved = sum(row["graph_slowdown"] - 1 <= (row["stages_slowdown"] - 1) / 2 for row in dear)
        over = sum(row["graph_peak_bytes"] > row["budget_bytes"] for row in own)
        slower = sum(row["graph_over_stages"] > 1 for row in own)
        notes.append(
            f"{name}: smallest budget {100 * (1 - ours / theirs):.1f} % below that of stages; at most half their "
            f"extra time in {halved} of {len(dear)} budgets where that is above 10 %; slower than stages in {slower} "
            f"of {len(own)}; above the budget: {over}"
        )
    return notes


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=10.0, help="for the search, of each budget")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for row in rows_of(name, options.rounds, options.seconds):
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    title = "Plans of single ops against plans of stages"
    write_result(options.out, "graph-stages", title, pd.DataFrame(rows), summary(rows))


if __name__ == "__main__":
    main()
