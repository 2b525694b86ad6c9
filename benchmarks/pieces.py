"""Plans in pieces: smallest budgets with and without, peaks, and gradients against those in double precision."""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import planner
from benchmarks.pieces_models import MODELS
from benchmarks.reporting import MIB, RESULTS, write_rows
from planner.plans.solving import least_budget_bytes
from profiler.workload.tensor_trees import map_tensors
from profiler.workload.workload import Workload

_PARTS = (0.0, 0.5, 1.0)  # of the way from the smallest budget in pieces up to the smallest without


def gradients(workload: Workload) -> list[Tensor]:
    """Of one step, by parameter."""
    workload.zero_grad()
    workload.step(until="optimizer")
    found = [p.grad.double().clone() for p in workload.model.parameters() if p.grad is not None]
    workload.zero_grad()
    return found


def in_double(workload: Workload) -> list[Tensor]:
    """Gradients of the same step in double precision."""
    model = copy.deepcopy(workload.model).double()
    inputs = map_tensors(lambda t: t.double() if t.is_floating_point() else t, workload.inputs)
    return gradients(Workload(model=model, inputs=inputs, loss=workload.loss))


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The relative error of all gradients together, by norm."""
    off = sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True))
    return math.sqrt(off / sum(float(b.square().sum()) for b in exact))


def worst_error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest relative error of a parameter's gradient; those that should be zero are left out."""
    least = 1e-6 * max(float(b.norm()) for b in exact)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True) if b.norm() > least)


def rows_of(names: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each model and budget."""
    for name in names:
        torch.manual_seed(0)
        workload = MODELS[name]()
        exact, plain = in_double(workload), gradients(workload)
        profile = planner.profile(workload, numerics="rounding")
        least = min(map(least_budget_bytes, profile.in_pieces))
        without = least_budget_bytes(profile)
        for part in _PARTS:
            budget = least + int(part * (without - least))
            plan = planner.solve(profile, budget, numerics="rounding")
            with planner.apply(workload.model, plan):
                peak = planner.measure(workload, repeats=1).peak_bytes
                planned = gradients(workload)
            yield {
                "model": name,
                "states_mib": profile.states_bytes / MIB,
                "smallest_mib": without / MIB,
                "smallest_in_pieces_mib": least / MIB,
                "budget_mib": budget / MIB,
                "in_pieces": "" if plan.pieces is None else "; ".join(map(str, _what(plan))),
                "predicted_peak_bytes": plan.predicted_peak_bytes,
                "measured_minus_predicted_bytes": peak - plan.predicted_peak_bytes,
                "above_budget_bytes": max(0, peak - budget),
                "gradient_error": error(planned, exact),
                "plain_gradient_error": error(plain, exact),
                "worst_gradient_error": worst_error(planned, exact),
                "plain_worst_gradient_error": worst_error(plain, exact),
            }


def _what(plan: planner.Plan) -> list[str]:
    assert plan.pieces is not None
    head = [f"{plan.pieces.head} x{plan.pieces.count}"] if plan.pieces.head else []
    return [*head, *(f"{each.name or 'the model'} x{each.count}" for each in plan.pieces.modules)]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    notes = [
        "budgets: the smallest in pieces, the smallest without, and half way between",
        "gradient errors: by norm, of all gradients together, and the worst of any parameter's, against the same step "
        "in double precision",
    ]
    write_rows(options.out, "pieces", "Plans in pieces", rows_of(options.models), lambda _: notes)


if __name__ == "__main__":
    main()
