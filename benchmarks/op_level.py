"""Op-level plans against stage-level ones of the same profile: seconds and peaks, predicted and measured."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

import planner
from benchmarks.peer_turns import Turns, in_turns, timed_step
from benchmarks.reporting import MIB, RESULTS, result_name, write_result
from planner.zoo import build
from profiler.workload.snapshot import preserved

MODELS = ("gpt2", "bert", "vit", "llama")
LAYERS = 12
# The zoo's own sizes are small: a block computes for 2 to 4 ms, and what Python does beside the ops weighs much.
# So also at the width of ViT-Small, 384 with 6 heads, where kernels weigh more.
_WIDE = {"hidden": 384, "heads": 6}
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "zoo": {name: {} for name in MODELS},
    "wide": {
        "gpt2": {**_WIDE, "seq": 128},
        "bert": {**_WIDE, "seq": 128},
        "vit": {**_WIDE, "batch": 8},
        "llama": {**_WIDE, "seq": 128},
    },
}
# Places between the peak of per-stage recomputation and the unplanned peak.
PLACES = {"0": 0.0, "1/4": 0.25, "1/2": 0.5, "3/4": 0.75}
TUTORIAL = "mindspore_blocks"
# Recomputing every block takes the tutorial's own step from 167 MB to 69 MB of dynamic memory (its log, MindSpore 2.5).
TUTORIAL_REDUCTION = 1 - 69 / 167


def smallest_budget(profile: planner.Profile) -> int:
    """The smallest budget that any plan of the profile meets."""
    try:
        planner.solve(profile, 1)
    except planner.Infeasible as error:
        return error.minimum_budget_bytes
    raise AssertionError("a budget of one byte cannot be feasible")


def recomputing_all(stages: planner.Profile) -> planner.Plan:
    """Every stage recomputed: what per-block checkpointing does."""
    return planner.solve(stages, 2**50, solver="recompute_all")


def budgets_of(profile: planner.Profile) -> dict[str, int]:
    """Budgets from the peak of per-stage recomputation up, and the smallest of op-level plans."""
    low = recomputing_all(profile.stage_level()).predicted_peak_bytes
    high = profile.unplanned_peak_bytes
    places = {name: int(low + place * (high - low)) for name, place in PLACES.items()}
    return {"op-level minimum": smallest_budget(profile), **places}


def plan_or_none(profile: planner.Profile, budget_bytes: int) -> planner.Plan | None:
    """The plan; None where none fits."""
    try:
        return planner.solve(profile, budget_bytes)
    except planner.Infeasible:
        return None


def measured_peak(workload: planner.Workload, plan: planner.Plan | None) -> int | None:
    """The peak of a step under the plan; None without one."""
    if plan is None:
        return None
    with planner.apply(workload.model, plan):
        return planner.measure(workload, repeats=1).peak_bytes


def timed(workload: planner.Workload, plans: dict[str, planner.Plan | None], rounds: int) -> Turns:
    """Plain steps and steps under each plan in turns."""
    ways = {name: timed_step(workload, plan) for name, plan in plans.items() if plan is not None}
    with preserved(workload):
        return in_turns({"plain": timed_step(workload), **ways}, rounds)


def rows_of(name: str, device: str, rounds: int, **settings: Any) -> Iterator[dict[str, Any]]:
    """One row per budget."""
    workload = build(name, device=device, **settings)
    profile = planner.profile(workload)
    for place, budget in budgets_of(profile).items():
        plans = {"stage": plan_or_none(profile.stage_level(), budget), "op": plan_or_none(profile, budget)}
        peaks = {kind: measured_peak(workload, plan) for kind, plan in plans.items()}
        yield {
            "model": name,
            "place": place,
            "budget_MiB": budget / MIB,
            **columns(plans, peaks, timed(workload, plans, rounds)),
        }


def columns(plans: dict[str, planner.Plan | None], peaks: dict[str, int | None], times: Turns) -> dict[str, Any]:
    """Seconds and peaks of both plans, beside each other."""
    both = [*plans.items()]
    extra = {kind: math.nan if plan is None else plan.slowdown - 1 for kind, plan in both}
    slowdown = {kind: math.nan if plan is None else times.ratio(kind, "plain") for kind, plan in both}
    return {
        **{f"{kind}_predicted_seconds": math.nan if p is None else p.predicted_seconds for kind, p in both},
        "predicted_extra_ratio": ratio(extra["op"], extra["stage"]),
        **{f"{kind}_peak_MiB": mib(peaks[kind]) for kind, _ in both},
        "largest_error_percent": max(error_percent(p, peaks[kind]) for kind, p in both),
        "over_budget": any(p is not None and (peaks[kind] or 0) > p.budget_bytes for kind, p in both),
        "plain_seconds": times.median("plain"),
        **{f"{kind}_measured_slowdown": slowdown[kind] for kind, _ in both},
        "measured_extra_ratio": ratio(slowdown["op"] - 1, slowdown["stage"] - 1),
    }


def ratio(one: float, other: float) -> float:
    """Their quotient; NaN where there is nothing to divide by."""
    return one / other if other > 0 else math.nan


def mib(size_bytes: int | None) -> float:
    """In MiB; NaN where there is none."""
    return math.nan if size_bytes is None else size_bytes / MIB


def error_percent(plan: planner.Plan | None, peak_bytes: int | None) -> float:
    """How far the predicted peak is from the measured one, in percent of it."""
    if plan is None or peak_bytes is None:
        return 0.0
    return 100 * abs(plan.predicted_peak_bytes - peak_bytes) / peak_bytes


def tutorial_rows(device: str, rounds: int, **settings: Any) -> Iterator[dict[str, Any]]:
    """The tutorial's network: full recomputation, its reduction met by plans, and the smallest peaks."""
    workload = build(TUTORIAL, device=device, **settings)
    profile = planner.profile(workload)
    stages, resident = profile.stage_level(), profile.resident.total
    target = resident + int((1 - TUTORIAL_REDUCTION) * (profile.unplanned_peak_bytes - resident))
    full = recomputing_all(stages)
    plans = {
        "everything kept": planner.solve(stages, 2**50, solver="keep_all"),
        "every block recomputed": full,
        "stage-level at the tutorial's reduction": plan_or_none(stages, target),
        "op-level at the tutorial's reduction": plan_or_none(profile, target),
        "op-level at the peak of every block recomputed": plan_or_none(profile, full.predicted_peak_bytes),
        "stage-level at its smallest peak": plan_or_none(stages, smallest_budget(stages)),
        "op-level at its smallest peak": plan_or_none(profile, smallest_budget(profile)),
    }
    times = timed(workload, plans, rounds)
    for name, plan in plans.items():
        if plan is not None:
            yield tutorial_row(workload, profile, name, plan, times.ratio(name, "plain"))


def tutorial_row(
    workload: planner.Workload, profile: planner.Profile, name: str, plan: planner.Plan, slowdown: float
) -> dict[str, Any]:
    """One plan: dynamic memory is the peak less what is resident."""
    resident = profile.resident.total
    unplanned = profile.unplanned_peak_bytes - resident
    peak = measured_peak(workload, plan)
    assert peak is not None
    return {
        "plan": name,
        "solver": plan.solver,
        "dynamic_MiB": (peak - resident) / MIB,
        "predicted_dynamic_MiB": (plan.predicted_peak_bytes - resident) / MIB,
        "reduction_percent": 100 * (1 - (peak - resident) / unplanned),
        "over_budget": peak > plan.budget_bytes,
        "predicted_extra_percent": 100 * (plan.slowdown - 1),
        "measured_extra_percent": 100 * (slowdown - 1),
    }


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """What the table says."""
    return [
        f"rows: {len(rows)}; with a peak above the budget: {sum(row['over_budget'] for row in rows)}; "
        f"largest |predicted - measured| of a peak: {max(row['largest_error_percent'] for row in rows):.4f} % "
        "of measured",
        "extra_ratio: seconds that the op-level plan adds to the plain step over those that the stage-level plan adds; "
        f"median predicted {median_of(rows, 'predicted_extra_ratio')}, "
        f"measured {median_of(rows, 'measured_extra_ratio')}",
        "place: from the peak with every stage recomputed (0) to the unplanned peak (1); "
        "nan: no stage-level plan fits, or it adds nothing",
        "slowdowns are of the whole step: medians over rounds of plain, stage-level and op-level steps in turn",
    ]


def said(sizes: dict[str, dict[str, int]]) -> str:
    """The sizes that differ from the zoo's defaults."""
    different = {name: ", ".join(f"{k}={v}" for k, v in size.items()) for name, size in sizes.items() if size}
    return "; ".join(f"{name} {text}" for name, text in different.items()) or "the zoo's defaults"


def median_of(rows: list[dict[str, Any]], column: str) -> str:
    """The median of what is known of a column."""
    known = [row[column] for row in rows if not math.isnan(row[column])]
    return f"{statistics.median(known):.3f}" if known else "unknown"


def main() -> None:
    """Measure, print and write both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[*MODELS, TUTORIAL])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", choices=[*SIZES], default="zoo")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    models = [name for name in options.models if name != TUTORIAL]
    if models:
        sizes = SIZES[options.size]
        rows = [
            row
            for name in models
            for row in rows_of(name, options.device, options.rounds, layers=LAYERS, **sizes[name])
        ]
        title = "Op-level plans against stage-level plans"
        lines = [*summary(rows), f"sizes: {LAYERS} layers, {said(sizes)}"]
        result = "op-level" if options.size == "zoo" else f"op-level-{options.size}"
        write_result(options.out, result_name(result, options.device), title, pd.DataFrame(rows), lines)
    if TUTORIAL in options.models:
        frame = pd.DataFrame(tutorial_rows(options.device, options.rounds))
        notes = [
            "dynamic: the step's peak less parameters, optimizer states and the batch; extra: over the plain step",
            f"the tutorial's reduction: {100 * TUTORIAL_REDUCTION:.1f} %",
            "everything kept is the plain step itself: what is measured of its extra is the run's noise",
        ]
        title = "The network of MindSpore's recomputation tutorial"
        write_result(options.out, result_name("op-level-tutorial", options.device), title, frame, notes)


if __name__ == "__main__":
    main()
