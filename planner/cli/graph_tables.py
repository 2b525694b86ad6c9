"""The tables of whole-graph profiles and plans: ops by kind, and which of them run again."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType

from planner.explain.tables import facts, plain_table
from planner.plans.graph_plan import GraphPlan
from planner.units import counted, exact_bytes, format_bytes, format_seconds
from profiler.graph_profile import GraphProfile
from profiler.step_graph import StepGraph, StepOp

KINDS_SHOWN = 20


def graph_profile_report(profile: GraphProfile) -> RenderableType:
    """The ops of a graph by kind, dearest first, and the step as a whole."""
    graph = profile.graph
    by_kind: dict[str, list[StepOp]] = {}
    for op in graph.ops:
        by_kind.setdefault(op.kind, []).append(op)
    kinds = sorted(by_kind.items(), key=lambda pair: -_seconds(pair[1]))
    shown = kinds[:KINDS_SHOWN]
    title = f"Profile of {profile.model_class} on {profile.device} ({profile.precision}), op by op"
    table = plain_table(title, ["op"], ["forward", "backward", "time", "makes", "most beside"])
    for kind, ops in shown:
        sides = [sum(op.side == side for op in ops) for side in ("forward", "backward")]
        beside = max(op.transient_bytes for op in ops)
        made = format_bytes(sum(_made_bytes(graph, op) for op in ops))
        table.add_row(kind, *map(str, sides), format_seconds(_seconds(ops)), made, format_bytes(beside))
    rest = len(kinds) - len(shown)
    more = [("", f"and {counted(rest, 'other kind')} of ops")] if rest > 0 else []
    return Group(table, facts([*more, *_step(profile)]))


def reruns_report(plan: GraphPlan, *, every_kind: bool = False) -> list[RenderableType]:
    """Which ops run again, alike ones of one module together, dearest first; nothing where none do.

    Args:
        plan: of single ops.
        every_kind: all rows, not the dearest alone.
    """
    groups: dict[tuple[str, str], list[tuple[StepOp, int]]] = {}
    for ordinal, again in plan.runs.again.items():
        op = plan.graph.ops[ordinal]
        groups.setdefault((op.module, op.kind), []).append((op, again))
    rows = sorted(groups.items(), key=lambda pair: -sum(op.seconds * again for op, again in pair[1]))
    if not rows:
        return []
    shown = rows if every_kind else rows[:KINDS_SHOWN]
    title = f"Run again: {len(shown)} of {counted(len(rows), 'kind')} of ops by module, dearest first"
    table = plain_table(title, ["module", "op"], ["ops", "extra runs", "extra time", "made again"])
    for (module, kind), ops in shown:
        table.add_row(
            module or "-",
            kind,
            str(len(ops)),
            str(sum(again for _, again in ops)),
            format_seconds(sum(op.seconds * again for op, again in ops)),
            format_bytes(sum(_made_bytes(plan.graph, op) * again for op, again in ops)),
        )
    rest = len(rows) - len(shown)
    return ["", table, *([f"and {rest} more: --ops lists them"] if rest else [])]


def _step(profile: GraphProfile) -> list[tuple[str, str]]:
    ops, optimizer = profile.graph.ops, profile.optimizer
    forward = sum(op.side == "forward" for op in ops)
    return [
        ("graph", f"{counted(forward, 'op')} forward, {len(ops) - forward} backward"),
        ("unplanned peak", exact_bytes(profile.unplanned_peak_bytes)),
        ("unplanned time", f"{format_seconds(profile.unplanned_seconds)} a step"),
        ("as a graph", f"{format_seconds(profile.once_seconds)} a step in which every op runs once"),
        (
            "optimizer step",
            f"{format_seconds(optimizer.seconds)}, peak {format_bytes(optimizer.peak_bytes)}",
        ),
        ("resident", format_bytes(profile.resident.total)),
        ("measured on", f"{profile.device_name}, torch {profile.torch_version}"),
    ]


def _seconds(ops: Iterable[StepOp]) -> float:
    return sum(op.seconds for op in ops)


def _made_bytes(graph: StepGraph, op: StepOp) -> int:
    return sum(graph.storages[storage].size_bytes for storage in op.makes)
