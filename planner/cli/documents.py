"""The JSON documents of the command line beside solutions: profiles, refusals, training runs and comparisons."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from planner.plans.plan import Plan
from planner.plans.refusals import Infeasible
from planner.training.oom_report import failure_document
from profiler.records import OpRecord, Profile, StageRecord

if TYPE_CHECKING:
    import pandas as pd

    from planner.explain.measured_step import MeasuredStep
    from planner.training.solver_comparison import ComparisonRow
    from planner.training.training import OutOfMemory, TrainingInterrupted, TrainingRun
    from planner.training.verification import VerifiedRound

_UNKNOWN_WITHOUT_PLAN = ("predicted_peak_bytes", "predicted_seconds", "gap", "recomputed_seconds")


def refusal_document(
    refusal: Infeasible, *, unplanned_peak_bytes: int, unplanned_seconds: float, resident_bytes: int
) -> dict[str, Any]:
    """The document of ``solve --json`` without a schedule: the smallest feasible budget known, and its cause."""
    return {
        "solver": refusal.solver,
        "status": refusal.status,
        "budget_bytes": refusal.budget_bytes,
        "minimum_budget_bytes": refusal.minimum_budget_bytes,
        "reason": refusal.reason,
        "unplanned_peak_bytes": unplanned_peak_bytes,
        "unplanned_seconds": unplanned_seconds,
        "resident_bytes": resident_bytes,
        "lower_bound_seconds": refusal.lower_bound_seconds,
        "solve_seconds": refusal.solve_seconds,
        **dict.fromkeys(_UNKNOWN_WITHOUT_PLAN),
        "left_out": [dataclasses.asdict(record) for record in refusal.left_out],
        "stages": [],
    }


def profile_document(profile: Profile, path: Path, ops: Sequence[OpRecord] | None = None) -> dict[str, Any]:
    """The document of ``profile --json``: the step and its stages in short, and where all of it is.

    Args:
        profile: of one step.
        path: its file.
        ops: records of single ops to add.
    """
    kept = ("model_class", "device", "device_name", "torch_version", "precision", "target", "input_shapes")
    measured = ("unplanned_peak_bytes", "unplanned_seconds", "evaluations", "resident", "optimizer")
    found = ("fingerprint", "frugal", "unsteady", "left_out")
    plain = {name: msgspec.to_builtins(getattr(profile, name)) for name in (*kept, *measured, *found)}
    document = {"status": "profiled", "file": str(path), **plain, "resident_bytes": profile.resident.total}
    document["stages"] = [_stage_document(stage) for stage in profile.stages]
    return document if ops is None else {**document, "op_records": [record._asdict() for record in ops]}


def _stage_document(stage: StageRecord) -> dict[str, Any]:
    document = {name: getattr(stage, name) for name in ("name", "kind", "module_class", "kept_bytes", "boundary_bytes")}
    seconds = {"forward_seconds": stage.forward.seconds, "backward_seconds": stage.backward.seconds}
    again = {name: getattr(stage, name) for name in ("recompute_seconds", "recompute_ops", "recomputable")}
    return {**document, **seconds, **again}


def frontier_document(frame: pd.DataFrame, title: str) -> dict[str, Any]:
    """The document of ``pareto --json``: a row for each point, with the columns of ``--csv``; None where unknown."""
    known = frame.astype(object).where(frame.notna(), None)
    return {"status": "drawn", "title": title, "rows": known.to_dict("records")}


def nothing_yet_document(solver: str, **unplanned: float) -> dict[str, Any]:
    """The document of ``solve --json`` after Ctrl-C before any schedule; ``unplanned`` holds the known fields."""
    unknown = (*_UNKNOWN_WITHOUT_PLAN, "budget_bytes", "lower_bound_seconds", "solve_seconds")
    return {
        "solver": solver,
        "status": "interrupted",
        "interrupted": True,
        **unplanned,
        **dict.fromkeys(unknown),
        "stages": [],
    }


def training_document(run: TrainingRun, allocator_advice: str = "") -> dict[str, Any]:
    """The document of ``train --json``: predictions and measurements, losses, and allocator advice."""
    return {
        **_of_plan(run.plan),
        "status": "trained",
        "solver": run.plan.solver,
        "fingerprint": run.plan.fingerprint,
        "measured_peak_bytes": run.measured_peak_bytes,
        "ranks": [{"measured_peak_bytes": peak} for peak in run.rank_peak_bytes or (run.measured_peak_bytes,)],
        "allocated_bytes": run.allocated_bytes,
        "reserved_bytes": run.reserved_bytes,
        "faulted_bytes": run.faulted_bytes,
        "measured_seconds": run.measured_seconds,
        "losses": _finite(run.losses),
        "step_seconds": list(run.step_seconds),
        "retries": len(run.failures),
        "out_of_memory": [failure_document(report) for report in run.failures],
        "allocator_advice": allocator_advice,
    }


def interrupted_training_document(interrupt: TrainingInterrupted) -> dict[str, Any]:
    """The document of ``train --json`` where Ctrl-C ended it."""
    return {
        **_of_plan(interrupt.plan),
        "status": "interrupted",
        "interrupted": True,
        "losses": _finite(interrupt.losses),
        "step_seconds": list(interrupt.step_seconds),
    }


def _of_plan(plan: Plan) -> dict[str, Any]:
    """Fields of all training documents: the plan's claims, and nulls for missing measurements."""
    claimed = ("model_class", "device", "budget_bytes", "headroom_bytes", "predicted_peak_bytes", "predicted_seconds")
    claimed += ("unplanned_peak_bytes", "unplanned_seconds", "frugal")
    measured = ("measured_peak_bytes", "allocated_bytes", "reserved_bytes", "faulted_bytes", "measured_seconds")
    return {**{name: getattr(plan, name) for name in claimed}, **dict.fromkeys(measured)}


def measured_document(step: MeasuredStep) -> dict[str, Any]:
    """Fields that ``show --measure --json`` adds."""
    return {
        "measured_peak_bytes": step.planned.peak.peak_bytes,
        "measured_seconds": step.planned.seconds,
        "measured_unplanned_peak_bytes": step.unplanned.peak.peak_bytes,
        "measured_unplanned_seconds": step.unplanned.seconds,
    }


def _finite(losses: Sequence[float]) -> list[float | None]:
    return [loss if math.isfinite(loss) else None for loss in losses]  # JSON knows no NaN


def lost_training_document(plan: Plan, failure: OutOfMemory) -> dict[str, Any]:
    """The document of ``train --json`` where memory ran out for good; ``plan`` is the first one."""
    last = failure.reports[-1]
    return {
        **_of_plan(plan),
        "status": "out_of_memory",
        "budget_bytes": last.budget_bytes,
        "headroom_bytes": last.headroom_bytes,
        "predicted_peak_bytes": last.predicted_peak_bytes,
        "predicted_seconds": plan.predicted_seconds if len(failure.reports) == 1 else None,
        "losses": _finite(failure.losses),
        "retries": len(failure.reports) - 1,
        "out_of_memory": [failure_document(report) for report in failure.reports],
    }


def failed_rank_document(plan: Plan, failure: Exception) -> dict[str, Any]:
    """The document of ``train --json`` where memory ran out on one of several ranks."""
    return {**_of_plan(plan), "status": "out_of_memory", "message": str(failure), "losses": [], "retries": 0}


def comparison_document(profile: Profile, budget_bytes: int, rows: Sequence[ComparisonRow]) -> dict[str, Any]:
    """The document of ``compare --json``: one row per solver, the unplanned model's first.

    Where no solver found a plan, also ``status``, ``minimum_budget_bytes`` and ``reason`` of the least demanding one.
    """
    document = {
        "model_class": profile.model_class,
        "device": profile.device,
        "budget_bytes": budget_bytes,
        "unplanned_peak_bytes": profile.unplanned_peak_bytes,
        "unplanned_seconds": profile.unplanned_seconds,
        "frugal": profile.frugal,
        "resident_bytes": profile.resident.total,
    }
    if (least := least_demanding(rows)) is not None:
        document |= {
            "status": "infeasible" if none_can_fit(rows) else "unknown",
            "minimum_budget_bytes": least.minimum_budget_bytes,
            "reason": least.reason,
        }
    return {**document, "rows": [dataclasses.asdict(row) for row in rows]}


def none_can_fit(rows: Sequence[ComparisonRow]) -> bool:
    """Whether a solver has proven that no plan fits."""
    return any(row.status == "infeasible" for row in rows)


def least_demanding(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """Where no solver found a plan, the one that needs the smallest budget; None where some found one."""
    refused = [row for row in rows if row.minimum_budget_bytes is not None]
    if len(refused) < len(rows) - 1:  # all but the unplanned model
        return None
    return min(refused, key=lambda row: row.minimum_budget_bytes or 0)


def round_document(each: VerifiedRound) -> dict[str, Any]:
    """One round as plain data; seconds are of a whole step, those of corrections of one stage."""
    return {
        "predicted_seconds": each.plan.predicted_seconds,
        "predicted_slowdown": each.plan.slowdown,
        "measured_seconds": each.planned_seconds,
        "measured_unplanned_seconds": each.unplanned_seconds,
        "measured_slowdown": each.measured_slowdown,
        "corrected_seconds": each.corrected_seconds,
        "corrected_slowdown": each.corrected_slowdown,
        "corrections": [
            {
                "option": correction.option,
                "stages": list(correction.stages),
                "predicted_seconds": correction.predicted_seconds,
                "measured_seconds": correction.measured_seconds,
            }
            for correction in each.corrections
        ],
    }
