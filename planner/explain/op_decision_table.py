"""The ops of a plan as a person reads them: per kind of stage what is kept, recomputed or neither, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from planner.explain.op_decisions import OpDecision, fates_of_ops, grouped_fates, held_bytes
from planner.explain.stage_groups import StageKind, kinds_of_stages
from planner.plans.plan import Plan
from planner.units import format_bytes, format_seconds

SHOWN = 5  # rows each of what is recomputed and of what is kept
KINDS_SHOWN = 3  # with a table, those that free most; the others in a line
_COLOURS = {"recomputed": "yellow", "kept": "green", "not needed": "dim", "view": "dim"}


def plan_ops_report(plan: Plan, *, every_op: bool = False) -> RenderableType:
    """Every kind of stage of a plan with what happens to its ops.

    Args:
        plan: with the menus of its profile; of stages without one only the decision is said.
        every_op: all ops of all kinds one by one; else, for kinds in which
            some ops run again, the largest ones, alike ones together.
    """
    kinds = kinds_of_stages(plan)
    ranked = sorted(kinds, key=lambda kind: -(kind.chosen.freed_bytes * len(kind.members) if kind.chosen else 0))
    tabled = {kind.members for kind in ranked[:KINDS_SHOWN]}
    parts: list[RenderableType] = ["[bold]Ops, per kind of stage[/bold]"]
    for kind in kinds:
        parts += _kind_report(plan, kind, every_op, table=kind.members in tabled)
    return Group(*parts)


def _kind_report(plan: Plan, kind: StageKind, every_op: bool, *, table: bool) -> Iterator[RenderableType]:
    yield f"\n[bold]{escape(kind.title)}[/bold], {kind.decision}: {escape(_decision(plan, kind))}"
    if kind.menu is None:
        return
    if every_op:
        yield _table([(str(fate.ordinals[0]), fate) for fate in fates_of_ops(kind)], "op")
        yield _held(kind)
    elif kind.decision == "selective" and table:
        yield from _largest(kind)
    elif kind.decision == "selective":
        again = [fate for fate in grouped_fates(kind) if fate.fate == "recomputed"]
        yield f"recomputed: {escape(', '.join(_short(fate) for fate in again))}"


def _decision(plan: Plan, kind: StageKind) -> str:
    """What happens to the stages of a kind, per stage: bytes and seconds."""
    stage = plan.stages[kind.members[0]]
    each = " each" if len(kind.members) > 1 else ""
    cost = f"costs {format_seconds(stage.extra_seconds) if stage.extra_seconds else 'no time to speak of'}{each}"
    saved = kind.menu.ops.saved_bytes if kind.menu is not None else 0
    if kind.decision == "keep":
        return f"{format_bytes(stage.kept_bytes)}{each}" if stage.kept_bytes else "nothing of its own"
    if kind.decision == "selective" and kind.chosen is not None and kind.menu is not None:
        freed = f"frees {format_bytes(kind.chosen.freed_bytes)} of {format_bytes(saved)}"
        return f"{len(kind.chosen.rerun)} of {len(kind.menu.ops.ops)} ops run again: {freed}, {cost}"
    freed = f"frees {format_bytes(saved)}, " if saved else ""
    inside = f"; from its last run on all but {stage.option}" if stage.option else ""
    return f"runs {kind.runs} times: {freed}{cost}{inside}"


def _largest(kind: StageKind) -> Iterator[RenderableType]:
    fates = grouped_fates(kind)
    shown = [fate for part in ("recomputed", "kept") for fate in _first(fates, part)]
    yield _table([(_times(fate), fate) for fate in shown], "")
    rest = [fate for fate in fates if fate not in shown]
    said = [_rest([fate for fate in rest if fate.fate == part], part) for part in ("recomputed", "kept", "not needed")]
    if any(said):
        yield f"beside these: {', '.join(text for text in said if text)}"
    yield _held(kind)


def _held(kind: StageKind) -> str:
    count, size = held_bytes(kind)
    return f"held anyway: {_count(count, 'tensor')} from outside (inputs, parameters), {format_bytes(size)}"


def _short(fate: OpDecision) -> str:
    size = f" {format_bytes(fate.size_bytes)}" if fate.size_bytes else ""
    return f"{_times(fate)} {fate.op}{size}".strip()


def _first(fates: Sequence[OpDecision], part: str) -> list[OpDecision]:
    return [fate for fate in fates if fate.fate == part and (fate.size_bytes or part != "kept")][:SHOWN]


def _times(fate: OpDecision) -> str:
    return f"{len(fate.ordinals)} x" if len(fate.ordinals) > 1 else ""


def _rest(fates: Sequence[OpDecision], part: str) -> str:
    if not fates:
        return ""
    count = _count(sum(len(fate.ordinals) for fate in fates), "op")
    size, seconds = sum(fate.size_bytes for fate in fates), sum(fate.seconds for fate in fates)
    return f"{count} {part} ({f'{format_bytes(size)}, ' if size else ''}{format_seconds(seconds)})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _table(rows: Sequence[tuple[str, OpDecision]], first: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, justify="right", no_wrap=True)
    for name in ("op", "module", "fate"):
        table.add_column(name, overflow="fold")
    for name in ("bytes", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for number, fate in rows:
        size = format_bytes(fate.size_bytes) if fate.size_bytes else "-"
        colour = _COLOURS[fate.fate]
        said = f"[{colour}]{fate.fate}[/{colour}]"
        table.add_row(number, escape(fate.op), escape(fate.module), said, size, format_seconds(fate.seconds), fate.why)
    return table
