"""The picture of advice: where the memory goes at both high moments, by stage and by op, and what levers make of it."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from planner.capacity.advice import Advice
from planner.capacity.advice_report import foremost, shortened
from planner.capacity.levers import Combination
from planner.explain.memory_breakdown import GROUPS, MemoryBreakdown
from planner.explain.pareto_plot import check_picture, memory_unit
from planner.units import format_bytes, format_seconds
from profiler.json_files import write_whole

# Colours after Okabe and Ito: told apart with colour-blind eyes too; parts of the model states in shades of one.
_COLOURS = {"inputs": "#F0E442", "activations": "#E69F00", "temporaries": "#CC79A7"}
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
    kind = check_picture(path)
    content = BytesIO()
    advice_figure(advice).savefig(content, format=kind)
    write_whole(path, content.getvalue())


def advice_figure(advice: Advice) -> Figure:
    """The figure that ``draw_advice`` writes."""
    unit, each = memory_unit(max(advice.budget_bytes, advice.memory[0].peak_bytes))
    figure = Figure(figsize=(13, 11), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    # Parts of their own, so that long names in one of them leave the others their width.
    rows = figure.add_gridspec(3, 1, height_ratios=(0.62, 1, 1.35))
    above, middle, below = (figure.add_subfigure(rows[k, 0]) for k in range(3))
    _draw_moments(above.add_subplot(), advice, unit, each)
    own = next((m for m in advice.memory if m.of_group("activations")), advice.memory[0])
    _draw_parts(middle.add_subplot(1, 2, 1), own.activations_by_stage_kind(), "activations by stage", unit, each)
    _draw_parts(
        middle.add_subplot(1, 2, 2), own.activations_by_op(), "activations by the op that made them", unit, each
    )
    _draw_levers(below.add_subplot(), advice, unit, each)
    figure.suptitle(
        f"{advice.model_class} on {advice.device} ({advice.precision}, {advice.optimizer}), "
        f"{advice.samples} samples a step, budget {format_bytes(advice.budget_bytes)}",
        fontsize="medium",
    )
    return figure


def _draw_moments(axes: Axes, advice: Advice, unit: str, each: float) -> None:
    """A bar for each moment, its parts from the states onwards."""
    widest = max(advice.budget_bytes, *(own.peak_bytes for own in advice.memory))
    seen: set[str] = set()
    for place, own in enumerate(advice.memory):
        left = 0
        for name, size, colour in _slices(own):
            label = "" if name in seen else name
            axes.barh(place, size / each, left=left / each, color=colour, edgecolor="white", height=0.7, label=label)
            seen.add(name)
            if size >= _SMALL * widest:
                shade = "white" if colour in _DARK else "black"
                middle = (left + size / 2) / each
                axes.text(middle, place, format_bytes(size), ha="center", va="center", fontsize=8, color=shade)
            left += size
        axes.text(left / each, place, f" {format_bytes(own.peak_bytes)}", va="center", fontsize=9, fontweight="bold")
    label = f"budget {format_bytes(advice.budget_bytes)}"
    axes.axvline(advice.budget_bytes / each, color=_BUDGET, linestyle=":", linewidth=1.5, label=label)
    axes.set_yticks(range(len(advice.memory)), [own.moment for own in advice.memory])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * widest / each)
    axes.set_xlabel(f"bytes alive [{unit}]")
    axes.set_title("highest moments of the unplanned step", fontsize="medium")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small", frameon=False)


def _slices(own: MemoryBreakdown) -> list[tuple[str, int, str]]:
    """Name, bytes and colour of each part with any bytes."""
    found = [(name, own.by_what("model states").get(name, 0), colour) for name, colour in _STATE_COLOURS.items()]
    found += [(group, own.of_group(group), _COLOURS[group]) for group in GROUPS if group in _COLOURS]
    return [part for part in found if part[1] > 0]


def _draw_parts(axes: Axes, sizes: dict[str, int], title: str, unit: str, each: float) -> None:
    shown = {name: size for name, size in shortened(sizes, _BARS).items() if size > 0}
    places = range(len(shown))
    axes.barh(places, [size / each for size in shown.values()], color=_COLOURS["activations"])
    axes.set_yticks(places, [_wrapped(name) for name in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize="medium")
    axes.grid(axis="x", alpha=0.25)
    axes.margins(x=0.18)
    for place, size in zip(places, shown.values(), strict=True):
        axes.text(size / each, place, f" {format_bytes(size)}", va="center", fontsize=7)


def _wrapped(name: str) -> str:
    """In two lines where it is long."""
    return name if len(name) <= 26 else name.replace(" (", "\n(", 1)


def _draw_levers(axes: Axes, advice: Advice, unit: str, each: float) -> None:
    """A bar for each lever alone, and for the first of those together: peaks against the budget, seconds beside."""
    alone = list(advice.alone())
    rows: list[Combination] = [*alone, *foremost(advice, _LEVERS - len(alone))]
    places = range(len(rows))
    right = 1.35 * max([advice.budget_bytes, *(row.peak_bytes for row in rows)]) / each
    colours = [_FITS if row.fits else _MISSES for row in rows]
    axes.barh(places, [row.peak_bytes / each for row in rows], color=colours)
    best = {id(advice.cheapest): " \u2190 fastest", id(advice.exact or advice.cheapest): " \u2190 advice"}
    for place, row in zip(places, rows, strict=True):
        text = f"{format_bytes(row.peak_bytes)}{_seconds(row, advice)}{best.get(id(row), '')}"
        axes.text(row.peak_bytes / each + 0.005 * right, place, text, va="center", fontsize=8, bbox=_PLAIN)
    if len(alone) < len(rows):
        axes.axhline(len(alone) - 0.5, color="#666666", linewidth=0.8)
    label = f"budget {format_bytes(advice.budget_bytes)}"
    axes.axvline(advice.budget_bytes / each, color=_BUDGET, linestyle=":", linewidth=1.5, label=label, zorder=1)
    axes.set_yticks(places, [row.title for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, right)
    axes.set_xlabel(f"predicted peak [{unit}]")
    title = f"levers alone, and together: predicted peak and time of {advice.samples} samples; green fits the budget"
    axes.set_title(title, fontsize="medium")
    axes.legend(loc="lower right", fontsize="small")


def _seconds(row: Combination, advice: Advice) -> str:
    if row.seconds is None:
        return ""
    ratio = f" ({row.seconds / advice.unplanned.seconds:.2f} x)" if advice.unplanned.seconds else ""
    return f", {format_seconds(row.seconds)}{ratio}"
