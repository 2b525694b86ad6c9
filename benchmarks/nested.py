"""Nested segments: how far below per-block checkpointing a 12-layer GPT goes when gradients are there already."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planner
from benchmarks.budgets import smallest_budget
from benchmarks.interleaving import interleaved
from benchmarks.reporting import MIB, RESULTS, result_name, write_rows
from planner.zoo import build

METHODS = ("keep_all", "recompute_all", "chen_sqrt", "chen_greedy")


def row(workload: planner.Workload, profile: planner.Profile, plan: planner.Plan, why: str) -> dict[str, Any]:
    """One plan, predicted and measured."""
    times = interleaved(workload, plan, rounds=15)
    with planner.apply(workload.model, plan):
        measured = planner.measure(workload, repeats=1).peak_bytes
    resident = profile.resident.total
    return {
        "plan": why,
        "solver": plan.solver,
        "peak_beyond_resident_MiB": (measured - resident) / MIB,
        "predicted_beyond_resident_MiB": (plan.predicted_peak_bytes - resident) / MIB,
        "predicted_slowdown": plan.slowdown,
        "measured_slowdown": times.ratio,
    }


def rows_of(workload: planner.Workload) -> Iterator[dict[str, Any]]:
    """A row for each method, each with the best nested plan at its peak; last the smallest budget."""
    profile = planner.profile(workload)
    for method in METHODS:
        plan = planner.solve(profile, 2**50, solver=method)
        yield row(workload, profile, plan, method)
        if method != "keep_all":
            best = planner.solve(profile, plan.predicted_peak_bytes, solver="rotor")
            yield row(workload, profile, best, f"rotor at the peak of {method}")
    smallest = planner.solve(profile, smallest_budget(profile, solver="rotor"), solver="rotor")
    yield row(workload, profile, smallest, "rotor at its smallest budget")


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    # 12 layers of width 128, batch 8, 64 tokens: the zoo's defaults.
    workload = build("gpt2", device=options.device)
    workload.accumulate = True  # Parameters, optimizer states and gradients are all resident.
    notes = ["resident: parameters, optimizer states, gradients, batch", "slowdowns are of the whole step"]
    name, title = result_name("nested", options.device), "A 12-layer GPT below per-block checkpointing"
    write_rows(options.out, name, title, rows_of(workload), lambda _: notes)


if __name__ == "__main__":
    main()
