"""Tables of what a plan decides: per kind of stage, or module of a graph, what that frees and costs; ops inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.explain.op_decisions import grouped_decisions
from planner.explain.stage_groups import groups_of_stages
from planner.plans.graph_plan import GraphPlan
from planner.plans.plan import Plan, PlannedStage
from planner.plans.short_names import names_in_short
from planner.units import format_seconds
from profiler.step_replay import StepCopy, StepRuns, replay_step, runs_once

OPS_SHOWN = 200  # in one table; a graph's dearest ones


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRow:
    """Parts of the model with the same decision: stages, or modules of a graph.

    Attributes:
        where: their names in short.
        module_class: of stages; empty of modules.
        decision: what happens to them; of modules how many of their ops run again or go to host memory.
        count: how many parts.
        kept_bytes: that all of them keep from forward to backward, what waits in host memory included.
        freed_bytes: that they would keep without the plan, and do not.
        sent_bytes: to host memory.
        runs: forwards of each in one step; 0 where that differs from op to op.
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
    """The ops of stages that do the same, or those of a graph that run again."""

    title: str
    rows: tuple[OpRow, ...]


def decision_rows(plan: Plan | GraphPlan) -> tuple[DecisionRow, ...]:
    """What a plan decides, parts with the same decision together, in the order of the step."""
    return tuple(_rows_of_graph(plan) if isinstance(plan, GraphPlan) else _rows_of_stages(plan))


def op_tables(plan: Plan | GraphPlan) -> tuple[OpTable, ...]:
    """What happens to single ops, and why."""
    return tuple(_tables_of_graph(plan) if isinstance(plan, GraphPlan) else _tables_of_stages(plan))


def _rows_of_stages(plan: Plan) -> Iterator[DecisionRow]:
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


def _tables_of_stages(plan: Plan) -> Iterator[OpTable]:
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


def _rows_of_graph(plan: GraphPlan) -> Iterator[DecisionRow]:
    facts = _GraphFacts(plan)
    rows: dict[tuple[object, ...], list[tuple[str, DecisionRow]]] = {}
    for module, ordinals in facts.modules().items():
        row = facts.row(module, ordinals)
        alike = (row.decision, row.count, row.kept_bytes, row.freed_bytes, row.sent_bytes)
        name = module.rpartition(".")[2]
        rows.setdefault((name if not name.isdigit() else "", *alike), []).append((module, row))
    for alike in rows.values():
        names, first = [name for name, _ in alike], alike[0][1]
        yield DecisionRow(
            where=names_in_short(names, ""),
            module_class="",
            decision=first.decision,
            count=len(alike),
            kept_bytes=sum(row.kept_bytes for _, row in alike),
            freed_bytes=sum(row.freed_bytes for _, row in alike),
            sent_bytes=sum(row.sent_bytes for _, row in alike),
            runs=0,
            extra_seconds=sum(row.extra_seconds for _, row in alike),
        )


def _tables_of_graph(plan: GraphPlan) -> Iterator[OpTable]:
    facts = _GraphFacts(plan)
    again = sorted(facts.again, key=lambda k: (-plan.graph.ops[k].seconds * facts.again[k], k))
    rows = tuple(facts.op_row(ordinal) for ordinal in again[:OPS_SHOWN])
    if rows:
        of_all = f"{len(rows)} of {len(again)}, dearest first" if len(rows) < len(again) else f"{len(again)}"
        yield OpTable(title=f"Ops that run again: {of_all}", rows=rows)


class _GraphFacts:
    """What a plan of single ops keeps, frees and runs again, op by op."""

    def __init__(self, plan: GraphPlan) -> None:
        self._plan = plan
        self.again = plan.runs.again
        self._handed = self._handed_by(plan.runs, plan.copies)
        self._handed_once = self._handed_by(runs_once(plan.graph), ())
        self._sent = {copy.storage for copy in plan.copies}

    def _handed_by(self, runs: StepRuns, copies: Sequence[StepCopy]) -> frozenset[int]:
        held = self._plan.around.held_bytes > 0
        return replay_step(self._plan.graph, runs, held=held, copies=copies).handed

    def modules(self) -> dict[str, list[int]]:
        """Ordinals of the forward's ops by module, in the order of the step."""
        found: dict[str, list[int]] = {}
        for ordinal, op in enumerate(self._plan.graph.ops):
            if op.side == "forward":
                found.setdefault(op.module or "outside of modules", []).append(ordinal)
        return found

    def row(self, module: str, ordinals: Sequence[int]) -> DecisionRow:
        ops = self._plan.graph.ops
        made = [storage for ordinal in ordinals for storage in ops[ordinal].makes]
        again = sum(ordinal in self.again for ordinal in ordinals)
        sent = [storage for storage in made if storage in self._sent]
        done = [f"{again} of {len(ordinals)} ops run again"] if again else []
        done += [f"{len(sent)} tensors wait in host memory"] if sent else []
        return DecisionRow(
            where=module,
            module_class="",
            decision=", ".join(done) or "keep",
            count=1,
            kept_bytes=self._bytes(storage for storage in made if storage in self._handed),
            freed_bytes=self._bytes(s for s in made if s in self._handed_once and s not in self._handed),
            sent_bytes=self._bytes(sent),
            runs=0,
            extra_seconds=sum(ops[ordinal].seconds * self.again.get(ordinal, 0) for ordinal in ordinals),
        )

    def op_row(self, ordinal: int) -> OpRow:
        op, times = self._plan.graph.ops[ordinal], self.again[ordinal]
        freed_bytes = self._bytes(s for s in op.makes if s in self._handed_once and s not in self._handed)
        seconds = op.seconds * times
        rate = f"{format_seconds(seconds * 2**20 / freed_bytes)} a MiB" if freed_bytes else "read by ops that run again"
        return OpRow(
            op=op.kind,
            module=op.module,
            decision="recomputed",
            count=times,
            size_bytes=freed_bytes,
            seconds=seconds,
            why=rate,
        )

    def _bytes(self, storages: Iterator[int] | Sequence[int]) -> int:
        return sum(self._plan.graph.storages[storage].size_bytes for storage in storages)
