"""Fidelity: predicted against measured peak and time of real models, from the unplanned peak to the smallest."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planner
from benchmarks.budgets import even_budgets
from benchmarks.interleaving import interleaved
from benchmarks.reporting import RESULTS, result_name, write_rows
from planner.zoo import build
from planner.zoo.training import PRECISIONS

MODELS = ("gpt2", "bert", "vit", "llama", "resnet50", "unet")
BUDGETS = 7
# On a GPU the zoo's defaults are too small to time; memory is then mostly activations as well.
GPU_SETTINGS: dict[str, dict[str, int]] = {
    "gpt2": {"hidden": 768, "heads": 12, "seq": 512, "batch": 16, "vocab": 32000},
    "bert": {"hidden": 768, "heads": 12, "seq": 512, "batch": 16, "vocab": 30522},
    "vit": {"hidden": 768, "heads": 12, "image": 224, "patch": 16, "batch": 64},
    "llama": {"hidden": 1024, "heads": 16, "seq": 512, "batch": 16, "vocab": 32000},
    "resnet50": {"hidden": 64, "image": 224, "batch": 64},
    "unet": {"hidden": 64, "image": 256, "batch": 16},
}


def rows_of(name: str, device: str, precision: str, solver: str, rounds: int) -> Iterator[dict[str, Any]]:
    """One row per budget, from the unplanned peak down to the smallest feasible one."""
    settings = GPU_SETTINGS[name] if device.startswith("cuda") else {}
    workload = build(name, device=device, precision=precision, **settings)
    profile = planner.profile(workload)
    for budget in even_budgets(profile, BUDGETS, solver=solver):
        plan = planner.solve(profile, budget, solver=solver)
        times = interleaved(workload, plan, rounds)
        with planner.apply(workload.model, plan):
            measured = planner.measure(workload, repeats=1)
        yield {
            "model": name,
            "budget_bytes": budget,
            "solver": plan.solver,
            "status": plan.status,
            "gap": round(plan.gap, 4),
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "measured_peak_bytes": measured.peak_bytes,
            "error_percent": 100 * (plan.predicted_peak_bytes - measured.peak_bytes) / measured.peak_bytes,
            "over_budget": measured.peak_bytes > budget,
            "recomputed_ops": plan.recomputed_ops,
            "predicted_slowdown": plan.slowdown,
            "measured_slowdown": times.ratio,
        }


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0])
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    settings = (options.device, options.precision, options.solver, options.rounds)
    rows = (row for name in options.models for row in rows_of(name, *settings))
    suffix = "" if options.precision == PRECISIONS[0] else f"-{options.precision}"
    name = result_name(f"fidelity{suffix}", options.device)
    write_rows(options.out, name, "Fidelity: predicted against measured", rows, summary)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """What the table says about the promises."""
    over = sum(row["over_budget"] for row in rows)
    largest = max((abs(row["error_percent"]) for row in rows), default=0.0)
    return [
        f"plans measured: {len(rows)}; above the budget: {over}; "
        f"largest |predicted - measured| of the peak: {largest:.4f} % of measured",
        "slowdowns are of the whole step; measured ones are medians of plain/planned pairs in turn",
    ]


if __name__ == "__main__":
    main()
