"""Tables of what a plan decides: per kind of stage what that frees and costs; ops inside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.explain.op_decisions import grouped_decisions
from planner.explain.stage_groups import groups_of_stages
from planner.plans.plan import Plan, PlannedStage
from planner.plans.short_names import names_in_short


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRow:
    """Stages with the same decision.

    Attributes:
        where: their names in short.
        module_class: empty of what runs outside of stages.
        decision: what happens to them.
        count: how many stages.
        kept_bytes: that all of them keep from forward to backward, what waits in host memory included.
        freed_bytes: that they would keep without the plan, and do not.
        sent_bytes: to host memory.
        runs: forwards of each in one step.
        extra_seconds: that the plan adds to all of them.
    """

    where: str
    module_class: str
    decision: str
    count: int
    kept_bytes: int
    freed_bytes: int
    sent_bytes: int
    runs: int
    extra_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """Ops that are alike, with what happens to them."""

    op: str
    module: str
    decision: str
    count: int
    size_bytes: int
    seconds: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable:
    """The ops of stages that do the same."""

    title: str
    rows: tuple[OpRow, ...]


def decision_rows(plan: Plan) -> tuple[DecisionRow, ...]:
    """What a plan decides, stages with the same decision together, in the order of the step."""
    return tuple(_rows_of(plan))


def _rows_of(plan: Plan) -> Iterator[DecisionRow]:
    groups: dict[tuple[object, ...], list[PlannedStage]] = {}
    for stage in plan.stages:
        what = (stage.module_class, stage.decision, stage.option, stage.runs, stage.kept_bytes, stage.offloaded_bytes)
        groups.setdefault((stage.name if stage.kind == "outside" else "", *what), []).append(stage)
    for stages in groups.values():
        first = stages[0]
        kept_bytes = sum(stage.kept_bytes for stage in stages)
        yield DecisionRow(
            where=names_in_short([stage.name for stage in stages], ""),
            module_class=first.module_class if first.kind == "stage" else "",
            decision=first.decision,
            count=len(stages),
            kept_bytes=kept_bytes,
            freed_bytes=max(0, sum(stage.saved_bytes for stage in stages) - kept_bytes),
            sent_bytes=sum(stage.offloaded_bytes for stage in stages),
            runs=first.runs,
            extra_seconds=sum(stage.extra_seconds for stage in stages),
        )


def op_tables(plan: Plan) -> tuple[OpTable, ...]:
    """What happens to single ops, and why."""
    return tuple(_tables_of(plan))


def _tables_of(plan: Plan) -> Iterator[OpTable]:
    for group in groups_of_stages(plan):
        rows = [
            OpRow(
                op=each.op,
                module=each.module,
                decision=each.outcome,
                count=len(each.ordinals),
                size_bytes=each.size_bytes,
                seconds=each.seconds,
                why=each.why,
            )
            for each in grouped_decisions(group)
        ]
        if rows:
            yield OpTable(title=f"{group.title}: {group.decision}", rows=tuple(rows))
