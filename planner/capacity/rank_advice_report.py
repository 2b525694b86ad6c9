"""What one rank of many would hold, as a person and a program read it: tables, and JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Group, RenderableType

from planner.capacity.advice_report import activation_tables, breakdown_document, memory_table
from planner.capacity.rank_advice import NOTES, RankAdvice
from planner.explain.tables import Facts, PlainTable, facts, plain_table
from planner.plans.plan import Plan
from planner.units import counted, exact_bytes, format_bytes, format_seconds

_WRAPPED = {"ddp": "DistributedDataParallel", "fsdp2": "fully_shard"}


def rank_document_of(advice: RankAdvice) -> dict[str, Any]:
    """What ``advise --world-size --json`` says."""
    profile = advice.profile
    return {
        "model_class": profile.model_class,
        "device": profile.device,
        "precision": profile.precision,
        "optimizer": advice.optimizer,
        "shard": advice.engine,
        "world_size": advice.world_size,
        "samples": advice.samples,
        "predicted": True,
        "resident": {**dataclasses.asdict(profile.resident), "together": profile.resident.total},
        "gradient_bytes": advice.gradient_bytes,
        "kept_gathered_bytes": advice.kept_gathered_bytes,
        "gathered_bytes": advice.gathered_bytes,
        "sent_bytes": advice.sent_bytes,
        "unplanned_peak_bytes": profile.unplanned_peak_bytes,
        "unplanned_seconds": profile.unplanned_seconds,
        "minimum_budget_bytes": advice.minimum_budget_bytes,
        "smallest": _plan_document(advice.smallest),
        "budget_bytes": advice.budget_bytes,
        "fits": advice.fits,
        "plan": None if advice.plan is None else _plan_document(advice.plan),
        "memory": [breakdown_document(breakdown) for breakdown in advice.memory],
        "notes": list(NOTES),
    }


def _plan_document(plan: Plan) -> dict[str, Any]:
    return {
        "solver": plan.solver,
        "status": plan.status,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_seconds": plan.predicted_seconds,
        "stages": [{"name": stage.name, "decision": stage.decision} for stage in plan.stages],
    }


def rank_report_of(advice: RankAdvice) -> RenderableType:
    """Everything, for 100 columns."""
    profile = advice.profile
    title = f"Where the memory of a rank goes, unplanned ({profile.precision}, {advice.optimizer})"
    return Group(
        _held_table(advice),
        memory_table(title, advice.memory),
        *activation_tables(advice.memory),
        _peaks_table(advice),
        _facts(advice),
    )


def _held_table(advice: RankAdvice) -> PlainTable:
    wrapped = f"in {_WRAPPED[advice.engine]} on {advice.world_size} ranks"
    resident = advice.profile.resident
    sharded = ", its part" if advice.engine == "fsdp2" else ""
    rows = {
        f"parameters{sharded}": resident.parameters + resident.other_parameters,
        f"gradients{sharded}": advice.gradient_bytes,
        f"optimizer states{sharded}": resident.optimizer,
        "buffers, those of the wrapper included": resident.buffers,
        "batch": resident.inputs,
        "of the last step, as long as its loop holds it": resident.loop + resident.scaler,
        "parameters gathered from forward to backward": advice.kept_gathered_bytes,
        "parameters gathered while the largest block runs, and the buffer": advice.gathered_bytes,
    }
    table = plain_table(f"What a rank of {advice.profile.model_class} holds, predicted, {wrapped}", ["what"], ["size"])
    for what, size in rows.items():
        if size:
            table.add_row(what, format_bytes(size))
    return table


def _peaks_table(advice: RankAdvice) -> PlainTable:
    profile = advice.profile
    rows = [("unplanned", profile.unplanned_peak_bytes, profile.unplanned_seconds)]
    plans = {"planned for the budget": advice.plan, "smallest that recomputes": advice.smallest}
    rows += [(what, p.predicted_peak_bytes, p.predicted_seconds) for what, p in plans.items() if p is not None]
    table = plain_table("Peak of a rank, predicted", ["step"], ["peak", "of unplanned", "time, no communication"])
    for what, peak_bytes, seconds in rows:
        share = f"{peak_bytes / profile.unplanned_peak_bytes:.0%}"
        table.add_row(what, exact_bytes(peak_bytes), share, format_seconds(seconds))
    return table


def _facts(advice: RankAdvice) -> Facts:
    budget_bytes = advice.budget_bytes
    rows = [
        *([] if budget_bytes is None else [("budget", f"{exact_bytes(budget_bytes)} on each rank")]),
        ("batch", f"{counted(advice.samples, 'sample')} on each rank, {advice.samples * advice.world_size} together"),
        ("sent", f"{format_bytes(advice.sent_bytes)} by each rank in a step without a plan"),
        *(("note", each) for each in NOTES),
    ]
    return facts(rows)
