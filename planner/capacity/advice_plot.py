"""The picture of advice: where the memory goes at both high moments, by stage and by op, and what levers make of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from planner.capacity.advice import Advice
from planner.capacity.advice_report import foremost, shortened
from planner.capacity.levers import Combination
from planner.explain.figures import AxisUnits, check_picture, units_up_to, write_picture
from planner.explain.memory_breakdown import GROUPS, MemoryBreakdown
from planner.units import format_bytes, format_seconds

# Colours after Okabe and Ito: told apart with colour-blind eyes too; parts of the model states in shades of one.
_COLOURS = {"inputs": "#F0E442", "outputs": "#009E73", "activations": "#E69F00", "temporaries": "#CC79A7"}
_STATE_COLOURS = {
    "parameters": "#0072B2",
    "optimizer states": "#3D94C9",
    "gradients": "#56B4E9",
    "casts of parameters": "#7FC4EC",
    "other parameters": "#9DD2F1",
    "buffers": "#B9DEF5",
    "loss scale": "#CFE8F7",
    "other": "#E4F2FB",
}
_DARK = ("#0072B2", "#3D94C9")
_FITS, _MISSES, _BUDGET = "#009E73", "#BBBBBB", "#B00020"
_PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 1}
_BARS = 10
_LEVERS = 16
_SMALL = 0.045  # share of the longer bar below which a part has no number in it


def draw_advice(advice: Advice, path: str | Path) -> None:
    """Draw the advice and write the picture whole.

    Raises:
        ValueError: a file that is not .png, .svg or .pdf, or a folder that is not there.
    """
    check_picture(path)
    write_picture(advice_figure(advice), path)


def advice_figure(advice: Advice) -> Figure:
    """The figure that ``draw_advice`` writes."""
    units = units_up_to(max(advice.budget_bytes, advice.memory[0].peak_bytes))
    figure = Figure(figsize=(13, 11), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    # Parts of their own, so that long names in one of them leave the others their width.
    rows = figure.add_gridspec(3, 1, height_ratios=(0.62, 1, 1.35))
    above, middle, below = (figure.add_subfigure(rows[k, 0]) for k in range(3))
    _draw_moments(above.add_subplot(), advice, units)
    breakdown = next((m for m in advice.memory if m.of_group("activations")), advice.memory[0])
    _draw_parts(middle.add_subplot(1, 2, 1), breakdown.activations_by_stage_class(), "activations by stage", units)
    _draw_parts(
        middle.add_subplot(1, 2, 2), breakdown.activations_by_op(), "activations by the op that made them", units
    )
    peaks, times = below.subplots(1, 2, sharey=True, width_ratios=(1.6, 1))
    _draw_levers(peaks, times, advice, units)
    figure.suptitle(
        f"{advice.model_class} on {advice.device} ({advice.precision}, {advice.optimizer}), "
        f"{advice.samples} samples a step, budget {format_bytes(advice.budget_bytes)}",
        fontsize="medium",
    )
    return figure


def _draw_moments(axes: Axes, advice: Advice, units: AxisUnits) -> None:
    """A bar for each moment."""
    widest_bytes = max(advice.budget_bytes, *(breakdown.peak_bytes for breakdown in advice.memory))
    for place, breakdown in enumerate(advice.memory):
        _draw_moment(axes, place, breakdown, units, widest_bytes)
    _mark_budget(axes, advice, units)
    axes.set_yticks(range(len(advice.memory)), [breakdown.moment for breakdown in advice.memory])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * widest_bytes / units.bytes_each)
    axes.set_xlabel(f"bytes alive [{units.bytes_name}]")
    computed = ", computed" if advice.unplanned.peak_basis == "computed" else ""
    axes.set_title(f"highest moments of the unplanned step{computed}", fontsize="medium")
    handles, labels = axes.get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
    place = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)}
    axes.legend(entries.values(), entries.keys(), fontsize="small", frameon=False, **place)


def _draw_moment(axes: Axes, place: int, breakdown: MemoryBreakdown, units: AxisUnits, widest_bytes: int) -> None:
    """The parts of a moment from the states onwards, with their sizes where there is room for them."""
    left = 0.0
    for name, size, colour in _slices(breakdown):
        width = size / units.bytes_each
        axes.barh(place, width, left=left, color=colour, edgecolor="white", height=0.7, label=name)
        if size >= _SMALL * widest_bytes:
            shade = "white" if colour in _DARK else "black"
            on = {**_PLAIN, "facecolor": colour}  # The budget's line does not strike the number through.
            text = format_bytes(size)
            axes.text(left + width / 2, place, text, ha="center", va="center", fontsize=8, color=shade, bbox=on)
        left += width
    _say_beside(axes, left, place, format_bytes(breakdown.peak_bytes), fontsize=9, fontweight="bold")


def _say_beside(axes: Axes, end: float, place: int, text: str, **style: Any) -> None:
    """Words behind the end of a bar, over the budget's line."""
    place_of = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(text, (end, place), bbox=_PLAIN, **place_of, **style)


def _mark_budget(axes: Axes, advice: Advice, units: AxisUnits) -> None:
    label = f"budget {format_bytes(advice.budget_bytes)}"
    place = advice.budget_bytes / units.bytes_each
    axes.axvline(place, color=_BUDGET, linestyle=":", linewidth=1.5, label=label, zorder=1)


def _slices(breakdown: MemoryBreakdown) -> list[tuple[str, int, str]]:
    """Name, bytes and colour of each part with any bytes."""
    slices = [(name, breakdown.by_what("model states").get(name, 0), colour) for name, colour in _STATE_COLOURS.items()]
    slices += [(group, breakdown.of_group(group), _COLOURS[group]) for group in GROUPS if group in _COLOURS]
    return [part for part in slices if part[1] > 0]


def _draw_parts(axes: Axes, sizes: dict[str, int], title: str, units: AxisUnits) -> None:
    shown = {name: size for name, size in shortened(sizes, _BARS).items() if size > 0}
    places = range(len(shown))
    axes.barh(places, [size / units.bytes_each for size in shown.values()], color=_COLOURS["activations"])
    axes.set_yticks(places, [_wrapped(name) for name in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(units.bytes_name)
    axes.set_title(title, fontsize="medium")
    axes.grid(axis="x", alpha=0.25)
    axes.margins(x=0.18)
    for place, size in zip(places, shown.values(), strict=True):
        axes.text(size / units.bytes_each, place, f" {format_bytes(size)}", va="center", fontsize=7)


def _wrapped(name: str) -> str:
    """In two lines where it is long."""
    return name if len(name) <= 26 else name.replace(" (", "\n(", 1)


def _draw_levers(axes: Axes, times: Axes, advice: Advice, units: AxisUnits) -> None:
    """Two bars for each lever alone, and for the first of those together: peak against the budget, and time beside."""
    alone = list(advice.alone())
    rows: list[Combination] = [*alone, *foremost(advice, _LEVERS - len(alone))]
    places = range(len(rows))
    right = 1.35 * max([advice.budget_bytes, *(row.peak_bytes for row in rows)]) / units.bytes_each
    colours = [_FITS if row.fits else _MISSES for row in rows]
    axes.barh(places, [row.peak_bytes / units.bytes_each for row in rows], color=colours)
    best = {id(advice.cheapest): " \u2190 fastest", id(advice.exact or advice.cheapest): " \u2190 advice"}
    for place, row in zip(places, rows, strict=True):
        text = f"{format_bytes(row.peak_bytes)}{best.get(id(row), '')}"
        _say_beside(axes, row.peak_bytes / units.bytes_each, place, text, fontsize=8)
    if len(alone) < len(rows):
        for each in (axes, times):
            each.axhline(len(alone) - 0.5, color="#666666", linewidth=0.8)
    _mark_budget(axes, advice, units)
    axes.set_yticks(places, [row.title for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, right)
    axes.set_xlabel(f"predicted peak [{units.bytes_name}]")
    axes.set_title("levers alone, and together: predicted peak; green fits the budget", fontsize="medium")
    axes.legend(loc="lower right", fontsize="small")
    _draw_times(times, rows, colours, advice)


def _draw_times(axes: Axes, rows: Sequence[Combination], colours: Sequence[str], advice: Advice) -> None:
    """A bar for each row, as long as its step takes; the unplanned step's time is a line."""
    unplanned_seconds = advice.unplanned.seconds
    longest = max([row.seconds or 0.0 for row in rows] + [unplanned_seconds or 0.0]) or 1.0
    each, name = (1.0, "s") if longest >= 10 else (1e-3, "ms")
    axes.barh(range(len(rows)), [(row.seconds or 0.0) / each for row in rows], color=colours)
    if unplanned_seconds:
        axes.axvline(unplanned_seconds / each, color="#222222", linestyle="--", linewidth=1, zorder=1)
    for place, row in enumerate(rows):
        if row.seconds is not None:
            ratio = f" ({row.seconds / unplanned_seconds:.2f} x)" if unplanned_seconds else ""
            _say_beside(axes, row.seconds / each, place, f"{format_seconds(row.seconds)}{ratio}", fontsize=8)
    axes.set_xlim(0, 1.4 * longest / each)
    axes.tick_params(labelleft=False)
    axes.set_xlabel(f"time [{name}]")
    axes.set_title(f"predicted time of {advice.samples} samples; dashed: unplanned", fontsize="medium")
