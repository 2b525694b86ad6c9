"""A table of the ops in each group of stages: what is kept, recomputed or neither, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from planner.explain.op_decisions import OpDecision, OpOutcome, always_live_tensors, decisions_of_ops, grouped_decisions
from planner.explain.stage_groups import StageGroup, groups_of_stages
from planner.explain.tables import PlainTable, plain_table
from planner.plans.plan import Plan
from planner.plans.short_names import common_path
from planner.units import counted, format_bytes, format_seconds

ROWS_SHOWN = 5  # each of what is recomputed and of what is kept
TABLES_SHOWN = 3  # of the groups that free most; the others in a line
_COLOURS: dict[OpOutcome, str] = {
    "recomputed": "yellow",
    "kept": "green",
    "not needed": "dim",
    "view": "dim",
}


def plan_ops_report(plan: Plan, *, every_op: bool = False) -> RenderableType:
    """Every group of a plan's stages with what happens to its ops.

    Args:
        plan: with the menus of its profile; of stages without one only the decision is said.
        every_op: all ops of all groups one by one; else of groups in which
            some ops run again, the largest ones, alike ones together.
    """
    groups = [group for group in groups_of_stages(plan) if every_op or group.decision == "selective"]
    ranked = sorted(groups, key=lambda group: -(group.chosen.freed_bytes * len(group.members) if group.chosen else 0))
    with_table = {group.members for group in ranked[:TABLES_SHOWN]}
    parts: list[RenderableType] = [Text("Ops, per kind of stage", style="bold")]
    for group in groups:
        parts += _group_report(plan, group, every_op, table=group.members in with_table)
    return Group(*parts)


def _group_report(plan: Plan, group: StageGroup, every_op: bool, *, table: bool) -> Iterator[RenderableType]:
    path = common_path([stage.name for stage in plan.stages if stage.kind == "stage"])
    title = group.title.replace(path, "") if path else group.title
    yield Text.assemble("\n", (title, "bold"), f", {group.decision}: {_stage_decision(plan, group)}")
    if group.menu is None:
        return
    if every_op:
        yield _table([(str(op.ordinals[0]), op) for op in decisions_of_ops(group)], "op")
        yield _always_live(group)
    elif group.decision == "selective" and table:
        yield from _largest(group)
    elif group.decision == "selective":
        short = [_in_short(ops) for ops in grouped_decisions(group) if ops.outcome == "recomputed"]
        if short:
            yield f"recomputed: {', '.join(short)}"


def _stage_decision(plan: Plan, group: StageGroup) -> str:
    """What happens to the stages of a group, per stage: bytes and seconds."""
    stage = plan.stages[group.members[0]]
    per_stage = " each" if len(group.members) > 1 else ""
    cost = f"costs {format_seconds(stage.extra_seconds) if stage.extra_seconds else 'no time to speak of'}{per_stage}"
    saved_bytes = group.menu.ops.saved_bytes if group.menu is not None else 0
    if group.decision == "keep":
        return f"{format_bytes(stage.kept_bytes)}{per_stage}" if stage.kept_bytes else "nothing of its own"
    if group.decision == "selective" and group.chosen is not None and group.menu is not None:
        freed = f"frees {format_bytes(group.chosen.freed_bytes)} of {format_bytes(saved_bytes)}"
        count = len(group.ops.ops) if group.ops is not None else 0
        return f"{len(group.chosen.rerun)} of {count} ops run again: {freed}, {cost}"
    freed = f"frees {format_bytes(saved_bytes)}, " if saved_bytes else ""
    inside = f"; from its last run on all but {stage.option}" if stage.option else ""
    return f"runs {group.runs} times: {freed}{cost}{inside}"


def _largest(group: StageGroup) -> Iterator[RenderableType]:
    decisions = grouped_decisions(group)
    shown = [
        *[ops for ops in decisions if ops.outcome == "recomputed"][:ROWS_SHOWN],
        *[ops for ops in decisions if ops.outcome == "kept" and ops.size_bytes][:ROWS_SHOWN],
    ]
    yield _table([(_count_of(ops), ops) for ops in shown], "")
    rest = [ops for ops in decisions if ops not in shown]
    outcomes = dict.fromkeys(ops.outcome for ops in rest)
    if rest:
        yield f"beside these: {', '.join(_together([ops for ops in rest if ops.outcome == o], o) for o in outcomes)}"
    yield _always_live(group)


def _always_live(group: StageGroup) -> str:
    count, size_bytes = always_live_tensors(group)
    return f"held anyway: {counted(count, 'tensor')} from outside (inputs, parameters), {format_bytes(size_bytes)}"


def _in_short(ops: OpDecision) -> str:
    size = f" {format_bytes(ops.size_bytes)}" if ops.size_bytes else ""
    return f"{_count_of(ops)} {ops.op}{size}".strip()


def _count_of(ops: OpDecision) -> str:
    return f"{len(ops.ordinals)} x" if len(ops.ordinals) > 1 else ""


def _together(decisions: Sequence[OpDecision], outcome: str) -> str:
    """Ops of one outcome in a few words."""
    count = counted(sum(len(ops.ordinals) for ops in decisions), "op")
    size_bytes, seconds = sum(ops.size_bytes for ops in decisions), sum(ops.seconds for ops in decisions)
    return f"{count} {outcome} ({f'{format_bytes(size_bytes)}, ' if size_bytes else ''}{format_seconds(seconds)})"


def _table(rows: Sequence[tuple[str, OpDecision]], first: str) -> PlainTable:
    table = plain_table("", [first, "op", "module", "decision", "why"], ["bytes", "time"])
    for number, ops in rows:
        size = format_bytes(ops.size_bytes) if ops.size_bytes else "-"
        decision = Text(ops.outcome, style=_COLOURS[ops.outcome])
        cells = (number, ops.op, ops.module, decision, ops.why)
        table.add_row(*cells, size, format_seconds(ops.seconds))
    return table
