"""The picture of the largest batches: in each training mode the size, its peak, and its throughput beside it."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from planner.capacity.batch_limits import MODE_NAMES, Limit, MaxBatch
from planner.capacity.batch_report import rows_of
from planner.explain.figures import check_picture, write_picture
from planner.units import format_bytes

# Colours after Okabe and Ito: told apart with colour-blind eyes too.
_SIZE, _SPEED = "#0072B2", "#E69F00"
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
    figure = Figure(figsize=(10, 1.2 + 0.55 * len(rows)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    sizes, speeds = figure.subplots(1, 2, sharey=True)
    _bars(sizes, [limit.size or 0 for _, limit in rows], [_size_text(limit) for _, limit in rows], _SIZE)
    sizes.set_xlabel(f"{limits.vary}, and the peak of its step")
    sizes.set_yticks(
        range(len(rows)), [name for name, _ in rows[:-1]] + [f"{rows[-1][0]}:\n{MODE_NAMES[limits.best.mode]}"]
    )
    sizes.invert_yaxis()
    rates = [limit.samples_per_second or 0.0 for _, limit in rows]
    _bars(speeds, rates, [_speed_text(limit) for _, limit in rows], _SPEED)
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
