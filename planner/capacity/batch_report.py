"""The largest batch in each training mode as a table and as a JSON document."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from planner.capacity.batch_limits import MODE_NAMES, Limit, MaxBatch, NoBatch
from planner.explain.tables import facts, plain_table
from planner.pictures import BLUE, ORANGE, check_picture, new_figure, write_picture
from planner.units import exact_bytes, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_NOTHING = "-"
_LIMIT_KEYS = (
    "peak_bytes",
    "samples_per_second",
    "relative",
    "predicted_peak_bytes",
    "confirmed",
    "next_fails",
    "reason",
)


def batch_document(limits: MaxBatch) -> dict[str, Any]:
    """The document of ``max-batch --json``; ``batch`` is the value of the key that was varied."""
    return {
        "vary": limits.vary,
        "step": limits.step,
        "budget_bytes": limits.budget_bytes,
        "states_bytes": limits.states_bytes,
        "headroom_bytes": limits.headroom_bytes,
        "profiled": list(limits.profiled),
        "linear": limits.linear,
        "notes": list(limits.notes),
        **{mode: _limit_document(getattr(limits, mode)) for mode in MODE_NAMES},
        "best": {"way": limits.best.mode, **_limit_document(limits.best)},
    }


def _limit_document(limit: Limit) -> dict[str, Any]:
    others = {name: getattr(limit, name) for name in _LIMIT_KEYS}
    return {"batch": limit.size, "predicted_batch": limit.predicted_size, **others}


def no_batch_document(refusal: NoBatch) -> dict[str, Any]:
    """The document of ``max-batch --json`` where not even the smallest size fits."""
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
        **{mode: dict(nothing) for mode in MODE_NAMES},
    }


def limits_report(limits: MaxBatch) -> RenderableType:
    """The limits in a table, with what is to be said of them below it."""
    title = f"Largest {limits.vary} within {exact_bytes(limits.budget_bytes)}"
    table = plain_table(title, ["with"], [limits.vary, "predicted", "peak", "samples/s", "of unplanned", "next one"])
    for name, limit in rows_of(limits):
        table.add_row(name, *_cells(limit))
    free = [("headroom", f"{format_bytes(limits.headroom_bytes)} of the budget are left free")]
    weighted = [("of unplanned", f"of samples/s times {limits.vary}")] if _makes_samples_larger(limits) else []
    states = format_bytes(limits.states_bytes)
    rows = [
        ("best throughput", f"{limits.vary}={limits.best.size} with {MODE_NAMES[limits.best.mode]}"),
        *weighted,
        ("model states", f"{states} of the budget: parameters, gradients, optimizer states"),
        *(free if limits.headroom_bytes else []),
        ("profiled at", f"{limits.vary} {', '.join(str(size) for size in limits.profiled)}"),
        *(("note", note) for note in limits.notes),
        *((MODE_NAMES[mode], limit.reason) for mode in MODE_NAMES if (limit := getattr(limits, mode)).reason),
    ]
    return Group(table, facts(rows))


def rows_of(limits: MaxBatch) -> list[tuple[str, Limit]]:
    """The limit of each training mode, and the size of the best throughput, each with its name."""
    modes = [(name, getattr(limits, mode)) for mode, name in MODE_NAMES.items()]
    return [*modes, ("best throughput", limits.best)]


def _makes_samples_larger(limits: MaxBatch) -> bool:
    return limits.best.samples_per_second is not None and limits.best.throughput != limits.best.samples_per_second


def _cells(limit: Limit) -> list[str]:
    if not limit.size:
        return [_NOTHING if limit.size is None else "0", *[_NOTHING] * 5]
    peak = f"{format_bytes(limit.peak_bytes or 0)}{'' if limit.confirmed else ' (predicted)'}"
    relative = _NOTHING if limit.relative is None else f"{limit.relative:.3f} x"
    after = "does not fit" if limit.next_fails else "fits or unknown" if limit.predicted_size is None else "see below"
    predicted = _NOTHING if limit.predicted_size is None else str(limit.predicted_size)
    return [str(limit.size), predicted, peak, _speed(limit), relative, after]


def _speed(limit: Limit) -> str:
    return _NOTHING if limit.samples_per_second is None else f"{limit.samples_per_second:.4g}"


_ROOM = 1.45  # right of the longest bar, for what is written behind it


def draw_limits(limits: MaxBatch, path: str | Path) -> None:
    """Draw the limits and write the picture whole.

    Raises:
        ValueError: a file that is not .png, .svg or .pdf, or a folder that is not there.
    """
    check_picture(path)
    write_picture(limits_figure(limits), path)


def limits_figure(limits: MaxBatch) -> Figure:
    """The figure that ``draw_limits`` writes."""
    rows = [(name, limit) for name, limit in rows_of(limits) if limit.size is not None]
    figure = new_figure(10, 1.2 + 0.55 * len(rows), dpi=130)
    sizes, speeds = figure.subplots(1, 2, sharey=True)
    _bars(sizes, [limit.size or 0 for _, limit in rows], [_size_text(limit) for _, limit in rows], BLUE)
    sizes.set_xlabel(f"{limits.vary}, and the peak of its step")
    sizes.set_yticks(
        range(len(rows)), [name for name, _ in rows[:-1]] + [f"{rows[-1][0]}:\n{MODE_NAMES[limits.best.mode]}"]
    )
    sizes.invert_yaxis()
    rates = [limit.samples_per_second or 0.0 for _, limit in rows]
    _bars(speeds, rates, [_speed_text(limit) for _, limit in rows], ORANGE)
    speeds.set_xlabel("samples a second")
    figure.suptitle(f"largest {limits.vary} within {format_bytes(limits.budget_bytes)}", fontsize="medium")
    return figure


def _bars(axes: Axes, lengths: list[float], texts: list[str], colour: str) -> None:
    axes.barh(range(len(lengths)), lengths, color=colour)
    right = _ROOM * max([*lengths, 1e-9])
    for place, (length, text) in enumerate(zip(lengths, texts, strict=True)):
        axes.text(length + 0.01 * right, place, text, va="center", fontsize=8)
    axes.set_xlim(0, right)


def _size_text(limit: Limit) -> str:
    if not limit.size:
        return "none fits"
    return f"{limit.size}: {format_bytes(limit.peak_bytes or 0)}{'' if limit.confirmed else ' (predicted)'}"


def _speed_text(limit: Limit) -> str:
    relative = "" if limit.relative is None else f" ({limit.relative:.3g} x)"
    return "" if limit.samples_per_second is None else f"{limit.samples_per_second:.4g}{relative}"
