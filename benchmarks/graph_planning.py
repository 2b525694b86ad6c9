"""From a model to a plan of single ops: seconds to capture and measure, and how good plans are after how long."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import planner
from benchmarks.graph_fidelity import workload_of
from benchmarks.graph_stages import smallest_of
from benchmarks.reporting import RESULTS, write_result
from planner.steps.graph_problem import StepSurroundings, step_problem
from planner.zoo import build
from solvers.graph.liveness import IndexedGraph
from solvers.graph.moments import rerunnable_nodes

BUDGETS = 5
# Of each budget the seconds that the search may take, and the gap at which it ends before.
SEARCHES = {"gpt2-12": (10.0, 0.005), "gpt2-48": (30.0, 0.005)}
OTHERS = (60.0, 0.01)
MODELS: dict[str, Callable[[], planner.Workload]] = {
    "gpt2-12": functools.partial(build, "gpt2", layers=12),
    "gpt2-48": functools.partial(build, "gpt2", layers=48),
    **{
        name: functools.partial(workload_of, name)
        for name in ("windows", "densenet", "unet", "resnet50", "t5", "bert", "swin", "convnext", "whisper")
    },
}


def rows_of(name: str, seconds: float, gap: float) -> Iterator[dict[str, Any]]:
    """One row per budget, in equal steps from the smallest to just below the peak of every op once."""
    torch.manual_seed(0)
    workload = MODELS[name]()
    begin = time.perf_counter()
    profile = planner.profile(workload, graph=True)
    profile_seconds = time.perf_counter() - begin
    smallest = smallest_of(profile, seconds)
    head = {"model": name, "ops": len(profile.graph.ops), "profile_seconds": profile_seconds}
    head |= {"smallest_bytes": smallest, "floor_bytes": floor_of(profile)}
    for share in np.arange(BUDGETS) / BUDGETS:
        budget = smallest + int(share * (profile.unplanned_peak_bytes - smallest))
        begin = time.perf_counter()
        plan = planner.solve(profile, budget, time_limit_seconds=seconds, gap=gap)
        yield {
            **head,
            "share_of_range": share,
            "budget_bytes": budget,
            "solve_seconds": time.perf_counter() - begin,
            "predicted_slowdown": plan.slowdown,
            "gap_percent": 100 * plan.gap,
        }


def floor_of(profile: planner.GraphProfile) -> int:
    """Bytes that all orders take whose first runs come as in the problem, and whose backward ops run once.

    At its first run an op has what it reads, makes and takes beside; gradients that something still needs are there.
    """
    indexed = IndexedGraph(step_problem(profile.graph, StepSurroundings.of(profile)).graph)
    stays = ~rerunnable_nodes(indexed)
    floors = []
    for t in range(indexed.count):
        waiting = stays[:t] & (indexed.needed_until[:t] > t)
        waiting[[v for v in indexed.inputs[t] if v < t]] = False
        floors.append(int(indexed.working_bytes[t]) + int(indexed.output_bytes[:t][waiting].sum()))
    return max(floors)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """What the table says about each model."""
    notes = [
        "gap: of the step's seconds to the bound that the search proved for its order of first runs",
        "a search ends at a gap of 1 %, of gpt2 at 0.5 %",
        "floor_bytes: of all orders whose first runs come in that order, and whose backward ops run once",
    ]
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        gaps = ", ".join(f"{row['gap_percent']:.2f}" for row in own)
        longest = max(row["solve_seconds"] for row in own)
        above = 100 * (own[0]["smallest_bytes"] / own[0]["floor_bytes"] - 1)
        notes.append(
            f"{name}: profiled in {own[0]['profile_seconds']:.1f} s; gaps from the smallest budget up {gaps} %, each "
            f"within {longest:.1f} s; the smallest is {above:.1f} % above what all such orders take"
        )
    return notes


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seconds", type=float, help="for the search, of each budget; else 10 to 60, by model")
    parser.add_argument("--gap", type=float, help="to the bound, at which it ends before; else 0.005 or 0.01, by model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.models:
        seconds, gap = SEARCHES.get(name, OTHERS)
        for row in rows_of(name, options.seconds or seconds, options.gap or gap):
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    title = "From a model to a plan of single ops"
    write_result(options.out, "graph-planning", title, pd.DataFrame(rows), summary(rows))


if __name__ == "__main__":
    main()
