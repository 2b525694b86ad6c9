"""Fidelity of plans of single ops: predicted against measured peak, from the unplanned peak to the smallest."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

import planner
from benchmarks.branching_models import BUILDERS
from benchmarks.reporting import RESULTS, result_name, write_rows
from planner.compiled.applying import Backend
from planner.zoo import build
from profiler.workload.snapshot import preserved

OWN = ("windows", "branches")
MODELS = ("gpt2", "bert", "vit", "llama", "t5", "resnet50", "unet", "densenet", *OWN)
BUDGETS = 6


def workload_of(name: str, device: str = "cpu") -> planner.Workload:
    """Of the zoo, or one of ``branching_models``, which are built on the CPU alone."""
    torch.manual_seed(0)
    return BUILDERS[name]() if name in BUILDERS else build(name, device=device)


def rows_of(name: str, backend: Backend, seconds: float, device: str = "cpu") -> Iterator[dict[str, Any]]:
    """One row per budget, from the unplanned peak down to the smallest known to be feasible."""
    workload = workload_of(name, device)
    expected = values_of(workload)
    profile = planner.profile(workload, graph=True)
    options: dict[str, Any] = {"time_limit_seconds": seconds}
    if backend != "eager":
        options["offload"] = "never"  # Only the eager programs send values to host memory.
    for budget in budgets_of(profile, **options):
        row: dict[str, Any] = {"model": name, "budget_bytes": budget, "backend": backend, "rounds": 1}
        try:
            plan = planner.solve(profile, budget, **options)
            if backend == "eager":
                with planner.apply(workload.model, plan):
                    measured_bytes = planner.measure(workload, repeats=1).peak_bytes
                    row["as_unplanned"] = is_same(expected, values_of(workload))
            else:
                verified = planner.verify(workload, plan, backend=backend, profile=profile)
                plan, measured_bytes = verified.plan, verified.rounds[-1].peak_bytes
                row["rounds"] = len(verified.rounds)
        except planner.NothingFound as error:
            yield {**row, "refused": f"least known: {error.minimum_budget_bytes}"}
            continue
        yield {
            **row,
            "gap": round(plan.gap, 4),
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "measured_peak_bytes": measured_bytes,
            "error_percent": 100 * (plan.predicted_peak_bytes - measured_bytes) / measured_bytes,
            "over_budget": measured_bytes > budget,
            "recomputed_ops": plan.recomputed_ops,
            "predicted_slowdown": plan.slowdown,
        }


def values_of(workload: planner.Workload) -> list[torch.Tensor]:
    """Loss and gradients of a step, which is undone."""
    with preserved(workload):
        torch.manual_seed(0)
        workload.zero_grad()
        loss = torch.tensor(workload.step())
        return [loss, *(p.grad.clone() for p in workload.model.parameters() if p.grad is not None)]


def is_same(expected: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(expected) == len(found) and all(map(torch.equal, expected, found))


def budgets_of(profile: planner.GraphProfile, **options: Any) -> list[int]:
    """Equal steps from the peak of every op once to the smallest budget that is known; ``options`` as for solving."""
    try:
        planner.solve(profile, 1, **options)
    except (planner.Infeasible, planner.NothingFound) as error:
        smallest = error.minimum_budget_bytes
        return [int(b) for b in np.linspace(profile.unplanned_peak_bytes, smallest, BUDGETS, dtype=np.int64)]
    raise AssertionError("a budget of one byte cannot be feasible")


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--backend", choices=get_args(Backend), default="eager")
    parser.add_argument("--seconds", type=float, default=10.0, help="for the search, of each budget")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    settings = (options.backend, options.seconds, options.device)
    rows = (row for name in options.models for row in rows_of(name, *settings))
    name = "graph-fidelity" if options.backend == "eager" else f"graph-fidelity-{options.backend}"
    title = "Plans of single ops: predicted against measured"
    write_rows(options.out, result_name(name, options.device), title, rows, summary)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """What the table says about the promises."""
    measured = [row for row in rows if "error_percent" in row]
    errors = [row["error_percent"] for row in measured]
    same = [row["as_unplanned"] for row in measured if "as_unplanned" in row]
    return [
        f"plans measured: {len(measured)} of {len(rows)}; "
        f"above the budget: {sum(row['over_budget'] for row in measured)}; "
        f"above the prediction: {sum(error < 0 for error in errors)}; equal to it to the byte: {errors.count(0.0)}; "
        f"largest |predicted - measured| of the peak: {max(map(abs, errors), default=0.0):.4f} % of measured",
        *([f"loss and gradients those of the unplanned step, bit for bit: {sum(same)} of {len(same)}"] if same else []),
    ]


if __name__ == "__main__":
    main()
