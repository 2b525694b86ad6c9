"""Fidelity of plans of ten networks, chains or not: predicted against measured peak, and values bit for bit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import planner
from benchmarks.branching_models import BUILDERS
from benchmarks.budgets import even_budgets
from benchmarks.reporting import RESULTS, result_name, write_rows
from planner.runtime.applier import Backend
from planner.zoo import build
from profiler.workload.snapshot import preserved

OWN = ("windows", "branches")
MODELS = ("gpt2", "bert", "vit", "llama", "t5", "resnet50", "unet", "densenet", *OWN)
BACKENDS = ("eager", "inductor")
BUDGETS = 6


def workload_of(name: str, device: str = "cpu") -> planner.Workload:
    """Of the zoo, or one of ``branching_models``, which are built on the CPU alone."""
    torch.manual_seed(0)
    return BUILDERS[name]() if name in BUILDERS else build(name, device=device)


def rows_of(name: str, backend: Backend, device: str) -> Iterator[dict[str, Any]]:
    """One row per budget, from the unplanned peak down to the smallest feasible one."""
    workload = workload_of(name, device)
    expected = values_of(workload)
    profile = planner.profile(workload)
    for budget in even_budgets(profile, BUDGETS):
        plan = planner.solve(profile, budget)
        with planner.apply(workload.model, plan, backend=backend):
            measured_bytes = planner.measure(workload, repeats=1).peak_bytes
            as_unplanned = is_same(expected, values_of(workload))
        yield {
            "model": name,
            "stages": len(profile.stages),
            "budget_bytes": budget,
            "backend": backend,
            "as_unplanned": as_unplanned,
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


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = (row for name in options.models for row in rows_of(name, options.backend, options.device))
    name = "graph-fidelity" if options.backend == BACKENDS[0] else f"graph-fidelity-{options.backend}"
    title = "Fidelity of chains and of networks that are none"
    write_rows(options.out, result_name(name, options.device), title, rows, summary)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """What the table says about the promises."""
    errors = [row["error_percent"] for row in rows]
    return [
        f"plans measured: {len(rows)}; above the budget: {sum(row['over_budget'] for row in rows)}; "
        f"above the prediction: {sum(error < 0 for error in errors)}; equal to it to the byte: {errors.count(0.0)}; "
        f"largest |predicted - measured| of the peak: {max(map(abs, errors), default=0.0):.4f} % of measured",
        "loss and gradients those of the unplanned step, bit for bit: "
        f"{sum(row['as_unplanned'] for row in rows)} of {len(rows)}",
    ]


if __name__ == "__main__":
    main()
