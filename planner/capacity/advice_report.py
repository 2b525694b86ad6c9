"""Advice as a person and a program read it: where the memory goes, levers and combinations in tables, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from planner.capacity.advice import Advice
from planner.capacity.levers import Combination, Lever
from planner.explain.memory_breakdown import GROUPS, MemoryBreakdown
from planner.explain.tables import Facts, PlainTable, facts, plain_table
from planner.pictures import (
    BUDGET,
    FITS,
    MISSES,
    SLATE,
    AxisUnits,
    check_picture,
    new_figure,
    part_look,
    units_up_to,
    write_picture,
)
from planner.units import exact_bytes, format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ROWS = 8  # of kinds of stages, of kinds of ops and of combinations
_RESULTS = {"same": "yes", "rounding": "up to rounding", "other": "no"}
_NOTHING = "-"


def document_of(advice: Advice) -> dict[str, Any]:
    """The document of ``advise --json``."""
    unplanned = advice.unplanned
    names = ("model_class", "device", "precision", "optimizer", "samples", "budget_bytes", "states_bytes", "fits")
    return {
        **{name: getattr(advice, name) for name in names},
        "states_short_bytes": advice.states_short_bytes,
        "unplanned_peak_bytes": unplanned.peak_bytes,
        "unplanned_seconds": unplanned.seconds,
        "memory": [breakdown_document(breakdown) for breakdown in advice.memory],
        "levers": [dataclasses.asdict(lever) for lever in advice.levers],
        "combinations": [_combination_document(each) for each in advice.combinations],
        "exact": None if advice.exact is None else _combination_document(advice.exact),
        "cheapest": None if advice.cheapest is None else _combination_document(advice.cheapest),
        "nearest": _combination_document(advice.nearest),
        "minimum_budget_bytes": advice.nearest.peak_bytes,
        "notes": list(advice.notes),
    }


def breakdown_document(breakdown: MemoryBreakdown) -> dict[str, Any]:
    """The bytes of one moment, as JSON."""
    return {
        "moment": breakdown.moment,
        "phase": breakdown.phase,
        "stage": breakdown.stage,
        "peak_bytes": breakdown.peak_bytes,
        "groups": {group: {"bytes": breakdown.of_group(group), "parts": breakdown.by_what(group)} for group in GROUPS},
        "activations_by_stage": breakdown.activations_by_stage(),
        "activations_by_op": breakdown.activations_by_op(),
    }


def _combination_document(combination: Combination) -> dict[str, Any]:
    names = ("precision", "optimizer", "micro_batches", "recipe", "peak_bytes", "seconds", "fits", "short_bytes")
    fields = {name: getattr(combination, name) for name in (*names, "peak_basis", "seconds_basis", "result")}
    return {"title": combination.title, "levers": list(combination.names), **fields}


def report_of(advice: Advice) -> RenderableType:
    """Everything, for 100 columns."""
    title = f"Where the memory of {advice.model_class} goes, unplanned ({advice.precision}, {advice.optimizer})"
    return Group(
        memory_table(title, advice.memory),
        *activation_tables(advice.memory),
        _lever_table(advice),
        *_combination_table(advice),
        _outcome(advice),
    )


def memory_table(title: str, moments: Sequence[MemoryBreakdown]) -> PlainTable:
    """A row for each part of each group, a column for each moment, the highest first."""
    table = plain_table(title, ["bytes"], [f"in {breakdown.moment}" for breakdown in moments])
    for group in GROUPS:
        sizes = [breakdown.of_group(group) for breakdown in moments]
        if not any(sizes):
            continue
        cells = [_share(size, breakdown) for size, breakdown in zip(sizes, moments, strict=True)]
        table.add_row(Text(group, style="bold"), *cells)
        parts = [breakdown.by_what(group) for breakdown in moments]
        names = dict.fromkeys(name for sizes_by_name in parts for name in sizes_by_name)
        for name in names if len(names) > 1 else ():
            cells = [format_bytes(sizes_by_name[name]) if name in sizes_by_name else "-" for sizes_by_name in parts]
            table.add_row(f"  {name}", *cells, style="dim")
    marks = [" (the peak)" if breakdown is moments[0] else "" for breakdown in moments]
    sums = [f"{format_bytes(breakdown.peak_bytes)}{mark}" for breakdown, mark in zip(moments, marks, strict=True)]
    table.add_row("together", *sums, style="bold")
    return table


def _share(size: int, breakdown: MemoryBreakdown) -> str:
    return f"{format_bytes(size)} ({size / breakdown.peak_bytes:.0%})" if size else _NOTHING


def activation_tables(moments: Sequence[MemoryBreakdown]) -> list[RenderableType]:
    """Activations by stage and by op; nothing where there are none."""
    breakdown = next((each for each in moments if each.of_group("activations")), None)
    if breakdown is None:
        return []
    whole = breakdown.of_group("activations")
    return [
        _share_table("Activations by stage", "stage", breakdown.activations_by_stage_class(), whole),
        _share_table("Activations by the op that made them", "op", breakdown.activations_by_op(), whole),
    ]


def _share_table(title: str, what: str, sizes: dict[str, int], whole: int) -> PlainTable:
    table = plain_table(title, [what], ["size", "share"])
    held = {name: size for name, size in sizes.items() if size}
    for name, size in shortened(held, ROWS).items():
        table.add_row(name, format_bytes(size), f"{size / whole:.0%}")
    return table


def shortened(sizes: dict[str, int], rows: int) -> dict[str, int]:
    """The largest, and the rest as one.

    >>> shortened({"a": 4, "b": 3, "c": 2, "d": 1}, 3)
    {'a': 4, 'b': 3, '2 others': 3}
    """
    if len(sizes) <= rows:
        return sizes
    kept = dict(list(sizes.items())[: rows - 1])
    return {**kept, f"{len(sizes) - len(kept)} others": sum(sizes.values()) - sum(kept.values())}


def _lever_table(advice: Advice) -> PlainTable:
    title = f"Levers alone, against {exact_bytes(advice.budget_bytes)}"
    table = _combinations_table(title, advice.alone(), advice)
    for lever in _idle(advice):
        table.add_row(lever.name, *[_NOTHING] * 5, style="dim")
    return table


def _idle(advice: Advice) -> list[Lever]:
    """Levers that do not apply."""
    return [lever for lever in advice.levers if not lever.applies]


def _combination_table(advice: Advice) -> list[RenderableType]:
    together = advice.together()
    if not together:
        return []
    shown = foremost(advice, ROWS)
    rest = len(together) - len(shown)
    title = f"Levers together{f': {len(shown)} of {len(together)}' if rest else ''}"
    return [_combinations_table(title, shown, advice)]


def foremost(advice: Advice, count: int) -> list[Combination]:
    """So many combinations of several levers, in their order: the advised ones, and the first of the others."""
    advised = [each for each in (advice.exact, advice.cheapest) if each is not None]
    wanted = [*(each for each in advised if len(each.kinds) > 1), *advice.together()]
    chosen = {id(each) for each in dict.fromkeys(wanted[: max(count, len(advised))])}
    return [each for each in advice.together() if id(each) in chosen]


def _combinations_table(title: str, rows: Iterable[Combination], advice: Advice) -> PlainTable:
    table = plain_table(title, ["with", "same result"], ["peak", "to spare", "time", "of unplanned"])
    for combination in rows:
        table.add_row(*_cells(combination, advice.unplanned), style=None if combination.fits else "dim")
    return table


def _cells(combination: Combination, unplanned: Combination) -> list[str | Text]:
    spare = combination.budget_bytes - combination.peak_bytes
    room = Text(format_bytes(spare), style="" if spare >= 0 else "red")
    peak = f"{format_bytes(combination.peak_bytes)} {_MARKS[combination.peak_basis]}"
    seconds = ratio = _NOTHING
    if combination.seconds is not None:
        seconds = f"{format_seconds(combination.seconds)} {_MARKS[combination.seconds_basis]}"
        ratio = f"{combination.seconds / unplanned.seconds:.2f} x" if unplanned.seconds else _NOTHING
    return [combination.title, _RESULTS[combination.result], peak, room, seconds, ratio]


_MARKS = {"measured": "m", "computed": "c", "solved": "s"}


def _outcome(advice: Advice) -> Facts:
    rows = [
        (
            "numbers",
            "m measured in a profile of this step, c computed from measured parts, s solved for on a profile",
        ),
        *((lever.name, f"does not apply: {lever.reason}") for lever in _idle(advice)),
        *(("note", note) for note in advice.notes),
        *_advised(advice),
    ]
    return facts(rows)


def _advised(advice: Advice) -> list[tuple[str, str]]:
    if advice.cheapest is None:
        nearest = advice.nearest
        missed = f"{nearest.title}: {format_bytes(nearest.peak_bytes)}"
        return [("nothing fits", f"nearest is {missed}, {format_bytes(nearest.short_bytes)} above the budget")]
    rows = []
    if advice.exact is not None:
        rows.append(("advice", f"{_said(advice.exact, advice)}; training stays as it is{_rounded(advice.exact)}"))
    if advice.cheapest is not advice.exact:
        what = "advice" if advice.exact is None else "fastest"
        rows.append((what, f"{_said(advice.cheapest, advice)}; changes training"))
    chosen = [each for each in (advice.exact, advice.cheapest) if each is not None]
    kinds = {kind for each in chosen for kind in each.kinds}
    names = {name for each in chosen for name in each.names}
    return [*rows, *((f"  {lever.name}", lever.change) for lever in _used(advice.levers, kinds, names))]


def _used(levers: Sequence[Lever], kinds: set[Any], names: set[str]) -> list[Lever]:
    """The levers that the advice uses; the changes of offload and of pieces contain that of recompute."""
    several = {"precision", "optimizer"}
    used = [lever for lever in levers if lever.kind in kinds and (lever.kind not in several or lever.name in names)]
    planned = any(lever.kind in ("offload", "in pieces") for lever in used)
    return [lever for lever in used if not (planned and lever.kind == "recompute")]


def _said(combination: Combination, advice: Advice) -> str:
    ratio = f" ({(combination.seconds or 0) / advice.unplanned.seconds:.2f} x)" if advice.unplanned.seconds else ""
    peak, seconds = format_bytes(combination.peak_bytes), format_seconds(combination.seconds or 0)
    samples = "1 sample" if advice.samples == 1 else f"{advice.samples} samples"
    return f"{combination.title}: {peak}, {seconds}{ratio} for {samples}"


def _rounded(combination: Combination) -> str:
    return " up to rounding" if combination.result == "rounding" else ""


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
    figure = new_figure(13, 11, dpi=130)
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
    names = dict.fromkeys(["activations", *(name for breakdown in advice.memory for name in _parts(breakdown))])
    looks = {name: part_look(number) for number, name in enumerate(names)}
    for place, breakdown in enumerate(advice.memory):
        _draw_moment(axes, place, breakdown, looks, units, widest_bytes)
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


def _draw_moment(
    axes: Axes,
    place: int,
    breakdown: MemoryBreakdown,
    looks: Mapping[str, tuple[str, str]],
    units: AxisUnits,
    widest_bytes: int,
) -> None:
    """The parts of a moment from the states onwards, with their sizes where there is room for them."""
    left = 0.0
    for name, size in _parts(breakdown).items():
        width, (colour, hatch) = size / units.bytes_each, looks[name]
        axes.barh(place, width, left=left, color=colour, hatch=hatch, edgecolor="white", height=0.7, label=name)
        if size >= _SMALL * widest_bytes:
            on = {**_PLAIN, "facecolor": colour}  # The budget's line does not strike the number through.
            text = format_bytes(size)
            axes.text(left + width / 2, place, text, ha="center", va="center", fontsize=8, bbox=on)
        left += width
    _say_beside(axes, left, place, format_bytes(breakdown.peak_bytes), fontsize=9, fontweight="bold")


def _say_beside(axes: Axes, end: float, place: int, text: str, **style: Any) -> None:
    """Words behind the end of a bar, over the budget's line."""
    place_of = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(text, (end, place), bbox=_PLAIN, **place_of, **style)


def _mark_budget(axes: Axes, advice: Advice, units: AxisUnits) -> None:
    label = f"budget {format_bytes(advice.budget_bytes)}"
    place = advice.budget_bytes / units.bytes_each
    axes.axvline(place, color=BUDGET, linestyle=":", linewidth=1.5, label=label, zorder=1)


def _parts(breakdown: MemoryBreakdown) -> dict[str, int]:
    """Bytes of each part: the model states one by one, all else by its group."""
    groups = {group: breakdown.of_group(group) for group in GROUPS if group != "model states"}
    return {name: size for name, size in (breakdown.by_what("model states") | groups).items() if size > 0}


def _draw_parts(axes: Axes, sizes: dict[str, int], title: str, units: AxisUnits) -> None:
    shown = {name: size for name, size in shortened(sizes, _BARS).items() if size > 0}
    places = range(len(shown))
    axes.barh(places, [size / units.bytes_each for size in shown.values()], color=part_look(0)[0])  # as above
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
    colours = [FITS if row.fits else MISSES for row in rows]
    axes.barh(places, [row.peak_bytes / units.bytes_each for row in rows], color=colours)
    best = {id(advice.cheapest): " \u2190 fastest", id(advice.exact or advice.cheapest): " \u2190 advice"}
    for place, row in zip(places, rows, strict=True):
        text = f"{format_bytes(row.peak_bytes)}{best.get(id(row), '')}"
        _say_beside(axes, row.peak_bytes / units.bytes_each, place, text, fontsize=8)
    if len(alone) < len(rows):
        for each in (axes, times):
            each.axhline(len(alone) - 0.5, color=SLATE, linewidth=0.8)
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
        axes.axvline(unplanned_seconds / each, color=SLATE, linestyle="--", linewidth=1, zorder=1)
    for place, row in enumerate(rows):
        if row.seconds is not None:
            ratio = f" ({row.seconds / unplanned_seconds:.2f} x)" if unplanned_seconds else ""
            _say_beside(axes, row.seconds / each, place, f"{format_seconds(row.seconds)}{ratio}", fontsize=8)
    axes.set_xlim(0, 1.4 * longest / each)
    axes.tick_params(labelleft=False)
    axes.set_xlabel(f"time [{name}]")
    axes.set_title(f"predicted time of {advice.samples} samples; dashed: unplanned", fontsize="medium")
