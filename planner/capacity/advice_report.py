"""Advice as a person and a program read it: where the memory goes, levers and combinations in tables, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from planner.capacity.advice import Advice
from planner.capacity.levers import Combination, Lever
from planner.explain.memory_breakdown import GROUPS, MemoryBreakdown
from planner.explain.tables import Facts, PlainTable, facts, plain_table
from planner.units import exact_bytes, format_bytes, format_seconds

ROWS = 8  # of kinds of stages, of kinds of ops and of combinations
_RESULTS = {"same": "yes", "rounding": "up to rounding", "other": "no"}
_NOTHING = "-"


def document_of(advice: Advice) -> dict[str, Any]:
    """What ``advise --json`` says."""
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
    """Those that are a part of the advice; what offload's change and that of pieces do has recompute's in it."""
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
