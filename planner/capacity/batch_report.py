"""The largest batch as a person and a program read it: a table of the ways of training, and a JSON document."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape

from planner.capacity.batch_limits import WAYS, Limit, MaxBatch, NoBatch
from planner.explain.tables import facts, plain_table
from planner.units import format_bytes

_NOTHING = "-"
_OF_LIMIT = (
    "peak_bytes",
    "samples_per_second",
    "relative",
    "predicted_peak_bytes",
    "confirmed",
    "next_fails",
    "reason",
)


def batch_document(found: MaxBatch) -> dict[str, Any]:
    """What ``max-batch --json`` says; ``batch`` is the value of the key that was varied."""
    return {
        "vary": found.vary,
        "step": found.step,
        "budget_bytes": found.budget_bytes,
        "states_bytes": found.states_bytes,
        "headroom_bytes": found.headroom_bytes,
        "profiled": list(found.profiled),
        "linear": found.linear,
        "notes": list(found.notes),
        **{way: _limit_document(getattr(found, way)) for way in WAYS},
        "best": {"way": found.best.way, **_limit_document(found.best)},
    }


def _limit_document(limit: Limit) -> dict[str, Any]:
    own = {name: getattr(limit, name) for name in _OF_LIMIT}
    return {"batch": limit.size, "predicted_batch": limit.predicted_size, **own}


def no_batch_document(refusal: NoBatch) -> dict[str, Any]:
    """What ``max-batch --json`` says where not even the smallest size fits."""
    nothing = {"batch": 0, "peak_bytes": None, "samples_per_second": None}
    return {
        "vary": refusal.vary,
        "status": refusal.status,
        "budget_bytes": refusal.budget_bytes,
        "minimum_budget_bytes": refusal.minimum_budget_bytes,
        "short_bytes": refusal.short_bytes,
        "states_bytes": refusal.states_bytes,
        "reason": refusal.reason,
        "levers": refusal.levers,
        **{way: dict(nothing) for way in WAYS},
    }


def limits_report(found: MaxBatch) -> RenderableType:
    """The limits in a table, with what is to be said of them below it."""
    title = f"Largest {found.vary} within {format_bytes(found.budget_bytes)} ({found.budget_bytes:,} bytes)"
    table = plain_table(title, ["with"], [found.vary, "predicted", "peak", "samples/s", "of unplanned", "next one"])
    for way in WAYS:
        table.add_row(WAYS[way], *_cells(getattr(found, way)))
    free = [("headroom", f"{format_bytes(found.headroom_bytes)} of the budget are left free")]
    weighted = [("of unplanned", f"of samples/s times {found.vary}")] if _makes_samples_larger(found) else []
    best, states = found.best, format_bytes(found.states_bytes)
    rows = [
        ("best throughput", f"{found.vary}={best.size} with {WAYS[best.way]}: {_speed(best)} samples/s"),
        *weighted,
        ("model states", f"{states} of the budget: parameters, gradients, optimizer states"),
        *(free if found.headroom_bytes else []),
        ("profiled at", f"{found.vary} {', '.join(str(size) for size in found.profiled)}"),
        *(("note", escape(note)) for note in found.notes),
        *((WAYS[way], escape(limit.reason)) for way in WAYS if (limit := getattr(found, way)).reason),
    ]
    return Group(table, facts(rows))


def _makes_samples_larger(found: MaxBatch) -> bool:
    return found.best.samples_per_second is not None and found.best.throughput != found.best.samples_per_second


def _cells(limit: Limit) -> list[str]:
    if not limit.size:
        return [_NOTHING if limit.size is None else "0", *[_NOTHING] * 5]
    peak = f"{format_bytes(limit.peak_bytes or 0)}{'' if limit.confirmed else ' (predicted)'}"
    relative = _NOTHING if limit.relative is None else f"{limit.relative:.3f} x"
    after = "does not fit" if limit.next_fails else "see below"
    return [str(limit.size), str(limit.predicted_size), peak, _speed(limit), relative, after]


def _speed(limit: Limit) -> str:
    return _NOTHING if limit.samples_per_second is None else f"{limit.samples_per_second:.4g}"
