"""Plots of peak memory against step time: a curve for each solver, the unplanned point and the lower bound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from planner.pictures import (
    BLUE,
    BROWN,
    BUDGET,
    GREEN,
    ORANGE,
    PINK,
    RED,
    SKY,
    SLATE,
    VERMILION,
    YELLOW,
    AxisUnits,
    check_picture,
    new_figure,
    units_up_to,
    write_picture,
)
from planner.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class _CurveStyle(NamedTuple):
    colour: str
    marker: str
    size: float
    filled: bool


# Hollow markers show what lies under them.
_STYLES = {
    "rotor": _CurveStyle(BLUE, ".", 5, True),
    "ilp": _CurveStyle(VERMILION, "v", 8, True),
    "auto": _CurveStyle(GREEN, "x", 8, True),
    "offload_only": _CurveStyle(VERMILION, "D", 6, False),
    "exhaustive": _CurveStyle(YELLOW, "P", 8, True),
    "keep_all": _CurveStyle(GREEN, "s", 11, False),
    "recompute_all": _CurveStyle(PINK, "^", 10, True),
    "chen_sqrt": _CurveStyle(ORANGE, "D", 8, True),
    "chen_greedy": _CurveStyle(BROWN, "o", 13, False),
    "revolve": _CurveStyle(SKY, "*", 8, True),
    "demand": _CurveStyle(GREEN, "s", 9, False),
    "hierarchy": _CurveStyle(PINK, "^", 7, True),
    "moments": _CurveStyle(VERMILION, "o", 6, False),
}
_OTHER = _CurveStyle(SLATE, "+", 8, True)
_WIDE = ("auto",)  # drawn wide and pale: what lies on it is seen
_RULES = ("recompute_all", "chen_sqrt", "chen_greedy", "revolve")  # to compare with

_TALLEST_RULE = 1.6  # the same of rules, which only those who compare look at
_TALLEST = 3.0  # times the fastest plan; the few slower ones at the smallest budgets would flatten all else


class _SolverCurve(NamedTuple):
    """One solver's points by rising memory, in the units of the axes."""

    memory: list[float]
    time: list[float]


def draw_pareto(frame: pd.DataFrame, path: str | Path, *, title: str = "", budget_bytes: int | None = None) -> None:
    """Draw a frontier table and write the picture whole.

    Args:
        frame: what ``planner.pareto`` returns.
        path: a .png, .svg or .pdf file.
        title: for example the model and the device.
        budget_bytes: marked with a line.

    Raises:
        ValueError: another kind of file, a folder that is not there, or a table without a single plan.
    """
    check_picture(path)
    write_picture(pareto_figure(frame, title=title, budget_bytes=budget_bytes), path)


def pareto_figure(frame: pd.DataFrame, *, title: str = "", budget_bytes: int | None = None) -> Figure:
    """The figure that ``draw_pareto`` writes."""
    largest, longest = (max(frame[name], default=0) for name in ("budget_bytes", "seconds"))
    units = units_up_to(int(largest), float(longest))
    curves = _curves(frame, units)
    unplanned, bound = curves.pop("none", None), curves.pop("lower_bound", None)
    if not curves:
        raise ValueError("a Pareto plot: expected at least one plan in the table, got none; name more solvers")
    figure = new_figure(9, 6, dpi=150)
    axes = figure.add_subplot()
    _set_limits(axes, curves, unplanned, bound)
    _draw_infeasible(axes, curves, bound)
    if bound is not None:
        _draw_bound(axes, bound)
    for solver, curve in sorted(curves.items(), key=lambda pair: pair[0] not in _WIDE):  # wide ones lie below
        _draw_solver(axes, solver, curve, units.seconds_name)
    if unplanned is not None:
        computed = "computed" in set(frame["status"][frame["solver"] == "none"])
        label = "unplanned, computed" if computed else "unplanned"
        axes.plot(*unplanned, linestyle="", marker="*", markersize=10, color="black", label=label, zorder=5)
        _add_ratios(axes, *unplanned)
    if budget_bytes is not None:
        label = f"budget {format_bytes(budget_bytes)}"
        axes.axvline(budget_bytes / units.bytes_each, color=BUDGET, linestyle=":", linewidth=1.3, label=label)
    _label(axes, title, units)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")  # beside the axes it hides no curve
    return figure


def _curves(frame: pd.DataFrame, units: AxisUnits) -> dict[str, _SolverCurve]:
    """Points of every solver; the rows of ``lower_bound`` have a budget and no peak."""
    points: dict[str, list[tuple[float, float]]] = {}
    columns = (list(frame[name]) for name in ("solver", "budget_bytes", "peak_bytes", "seconds"))
    for solver, budget, peak, seconds in zip(*columns, strict=True):
        memory = budget if solver == "lower_bound" else peak
        points.setdefault(str(solver), []).append((memory / units.bytes_each, seconds / units.seconds_each))
    ordered = {solver: zip(*sorted(pairs), strict=True) for solver, pairs in points.items()}
    return {solver: _SolverCurve(*map(list, coordinates)) for solver, coordinates in ordered.items()}


def _set_limits(
    axes: Axes, solvers: dict[str, _SolverCurve], unplanned: _SolverCurve | None, bound: _SolverCurve | None
) -> None:
    """Around what people choose from: simple rules that take more than the unplanned step do not widen the axes."""
    curves = [*solvers.values(), *([unplanned] if unplanned else [])]
    memory = [x for curve in [*curves, *([bound] if bound else [])] for x in curve.memory]
    left, right = min(memory), max(memory)
    if unplanned is not None:
        right = max([unplanned.memory[0], *(x for name, c in solvers.items() if name not in _RULES for x in c.memory)])
    fastest = min(y for curve in curves for y in curve.time)
    tallest = {name: _TALLEST_RULE if name in _RULES else _TALLEST for name in solvers}
    time = [y for name, curve in solvers.items() for y in curve.time if y <= tallest[name] * fastest]
    time += unplanned.time if unplanned is not None else []
    high = max(time, default=fastest)
    low = min(time + (bound.time if bound else []))
    width, height = (right - left) or 0.2 * right or 1.0, (high - low) or 0.2 * high or 1.0
    axes.set_xlim(max(0.0, left - 0.14 * width), right + 0.06 * width)
    axes.set_ylim(max(0.0, low - 0.08 * height), high + 0.12 * height)


def _draw_infeasible(axes: Axes, curves: dict[str, _SolverCurve], bound: _SolverCurve | None) -> None:
    """Where no plan fits, and where one may but none is known: between the bound's first budget and the first plan."""
    smallest = min(curve.memory[0] for curve in curves.values())
    proven = smallest if bound is None else min(smallest, bound.memory[0])
    axes.axvspan(axes.get_xlim()[0], proven, facecolor=RED, alpha=0.16, linewidth=0, label="no plan fits")
    if proven < smallest:
        axes.axvspan(proven, smallest, facecolor=RED, alpha=0.07, linewidth=0, label="no plan known")
    axes.axvline(smallest, color=RED, linewidth=0.8, alpha=0.6)


def _draw_bound(axes: Axes, bound: _SolverCurve) -> None:
    """Steps to the left: what is proven for a budget holds for every smaller one, up to the next proof."""
    axes.plot(
        *bound,
        color=SLATE,
        drawstyle="steps-pre",
        linestyle="--",
        linewidth=1.4,
        label="lower bound",
        zorder=2,
    )


def _draw_solver(axes: Axes, solver: str, curve: _SolverCurve, unit: str) -> None:
    style = _STYLES.get(solver, _OTHER)
    memory, time = curve
    marked = list(range(len(memory)))
    if len(memory) > 1:  # a plan serves every larger budget too, up to the next faster one
        memory, time = [*memory, axes.get_xlim()[1]], [*time, time[-1]]
    axes.plot(
        memory,
        time,
        linestyle="-" if len(marked) > 1 else "",
        drawstyle="steps-post",
        linewidth=4.5 if solver in _WIDE else 1.6,
        alpha=0.45 if solver in _WIDE else 1.0,
        marker=style.marker,
        markevery=marked,
        markersize=style.size,
        color=style.colour,
        markerfacecolor=style.colour if style.filled else "none",
        markeredgewidth=1.0 if style.filled else 1.6,
        label=_label_of(axes, solver, curve, unit),
        zorder=3 if len(marked) > 1 else 4,
    )


def _label_of(axes: Axes, solver: str, curve: _SolverCurve, unit: str) -> str:
    """The solver's name for the legend, with its longest time where that lies above the axes.

    It stands in the legend and not at the curve, where it would cover markers and the notes of other curves.
    """
    beyond = [
        time for memory, time in zip(*curve, strict=True) if time > axes.get_ylim()[1] and memory <= axes.get_xlim()[1]
    ]
    return f"{solver} (up to {max(beyond):,.0f} {unit}, above the chart)" if beyond else solver


def _add_ratios(axes: Axes, memory: list[float], time: list[float]) -> None:
    """Second axes: the slowdown, and the percentages that budgets may be given in."""
    whole, plain = memory[0], time[0]
    if plain > 0:
        right = axes.secondary_yaxis("right", functions=_scaled(1 / plain))
        right.set_ylabel("times the unplanned step")
    if whole > 0:
        top = axes.secondary_xaxis("top", functions=_scaled(100 / whole))
        top.set_xlabel("% of the unplanned peak", fontsize="small")
        top.tick_params(labelsize="small")


def _scaled(factor: float) -> tuple[Any, Any]:
    return (lambda value: value * factor), (lambda value: value / factor)


def _label(axes: Axes, title: str, units: AxisUnits) -> None:
    axes.set_xlabel(f"peak memory of a training step [{units.bytes_name}]")
    axes.set_ylabel(f"time of a training step [{units.seconds_name}]")
    axes.grid(alpha=0.25)
    if title:
        axes.set_title(title, fontsize="medium")
