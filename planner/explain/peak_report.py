"""Tables of what is alive at a peak: alike parts together for people, every part as a CSV row for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from planner.explain.peak import Peak, PeakPart
from planner.explain.tables import plain_table
from planner.plans.plan import Plan
from planner.plans.short_names import common_path, in_one_series, names_in_short
from planner.units import exact_bytes, format_bytes
from profiler.op_graph import kind_of

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("series", "what", "op", "module", "stage", "phase", "tensors", "bytes")
ROWS_SHOWN = 12
_EVERY_STAGE = ("gradients of parameters", "gradients of activations", "left by stages that keep nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRow:
    """Parts that are alike: the same reason, the same kind of op, stages of the same class."""

    what: str
    op: str
    where: str
    tensors: int
    size_bytes: int


def peak_rows(peak: Peak, plan: Plan | None = None) -> list[PeakRow]:
    """The parts of a peak, alike ones together, largest first.

    Args:
        peak: explained.
        plan: says of which class the stages are, and in which order they run.
    """
    stages = () if plan is None else plan.stages
    classes = {stage.name: stage.module_class for stage in stages if stage.kind == "stage"}
    order = {stage.name: k for k, stage in enumerate(stages)}
    groups: dict[tuple[str, str, str, str], list[PeakPart]] = {}
    for part in sorted(peak.parts, key=lambda part: order.get(part.stage, 0)):
        module_class = "" if part.what in _EVERY_STAGE or plan is None else classes.get(part.stage, part.stage)
        groups.setdefault((part.what, _kind(part), part.phase, module_class), []).append(part)
    path = path_of(plan)
    return sorted((_row(key[1], parts, path, key[3]) for key, parts in groups.items()), key=lambda row: -row.size_bytes)


def path_of(plan: Plan | None) -> str:
    """The modules around all stages: rows leave them out of the stages' names."""
    return "" if plan is None else common_path([stage.name for stage in plan.stages if stage.kind == "stage"])


def _kind(part: PeakPart) -> str:
    return "" if part.what in _EVERY_STAGE else kind_of(part.op)


def _row(op: str, parts: Sequence[PeakPart], path: str, module_class: str) -> PeakRow:
    stages = list(dict.fromkeys(part.stage for part in parts if part.stage))
    where = names_in_short(stages).replace(path, "") if stages else ""
    if module_class and len(stages) > 1 and not in_one_series(stages):
        where = f"{len(stages)} x {module_class}"
    modules = {part.module for part in parts}
    inside = f" ({modules.pop()})" if op and len(modules) == 1 and "" not in modules else ""
    return PeakRow(
        what=parts[0].what,
        op=op + inside,
        where=where,
        tensors=sum(part.tensors for part in parts),
        size_bytes=sum(part.size_bytes for part in parts),
    )


def alive_report(peak: Peak, plan: Plan | None = None) -> RenderableType:
    """What is alive at the peak, largest first, in ``ROWS_SHOWN`` rows."""
    rows = peak_rows(peak, plan)
    shown = rows[:ROWS_SHOWN]
    title = peak_title(peak).replace(path_of(plan), "") if path_of(plan) else peak_title(peak)
    table = plain_table(title, ["alive", "made by", "in"], ["tensors", "size", "share"])
    for row in shown:
        tensors = str(row.tensors) if row.tensors else "-"
        share = f"{row.size_bytes / peak.peak_bytes:.0%}" if peak.peak_bytes else "-"
        cells = (row.what, row.op or "-", row.where or "-")
        table.add_row(*cells, tensors, format_bytes(row.size_bytes), share)
    rest = [row.size_bytes for row in rows[len(shown) :]]
    smaller, twice = [size for size in rest if size >= 0], [size for size in rest if size < 0]
    notes = [f"and {len(smaller)} smaller ones: {format_bytes(sum(smaller))}"] if smaller else []
    notes += [f"less what is counted twice above: {format_bytes(-sum(twice))}"] if twice else []
    notes += [f"names of stages without {path_of(plan)!r}"] if path_of(plan) else []
    return Group(table, *(["; ".join(notes)] if notes else []))


def peak_title(peak: Peak) -> str:
    """One line: how much, where in the step, and at which op."""
    at = f", at {peak.op}" if peak.op else ""
    return f"Peak, {peak.source}: {exact_bytes(peak.peak_bytes)} {moment_in_words(peak)}{at}"


def moment_in_words(peak: Peak) -> str:
    """Where in the step a peak is."""
    apart = {"optimizer": "in the optimizer's step", "loss": "between forward and backward, at the loss"}
    return apart.get(peak.action, f"in the {peak.action} of {stage_in_words(peak.stage)}")


def stage_in_words(stage: str) -> str:
    """The name of a stage, as a sentence has it.

    >>> stage_in_words("h.0"), stage_in_words("between drop and h.0")
    ('h.0', 'what runs between drop and h.0')
    """
    name = stage.removeprefix("outside, ")  # as files of older releases have it
    return f"what runs {name}" if name.startswith(("before ", "between ", "after ")) else name


def peak_table(peaks: Iterable[Peak]) -> pd.DataFrame:
    """Every part of every peak, one row each.

    Columns: ``series`` (``predicted`` or ``measured``), ``what``, ``op`` (that
    made it), ``module`` (relative to the stage), ``stage``, ``phase`` (in which
    it was made), ``tensors`` (0 where not known), ``bytes``. The bytes of a
    series add up to its peak.
    """
    import pandas as pd

    rows = [
        (peak.source, p.what, p.op, p.module, p.stage, p.phase, p.tensors, p.size_bytes)
        for peak in peaks
        for p in sorted(peak.parts, key=lambda part: -part.size_bytes)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))
