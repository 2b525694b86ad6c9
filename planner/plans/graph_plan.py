"""Plans of single ops: which op of a step runs when, with predictions; versioned JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from planner.notebook_view import AliveDuring, html_table
from planner.plans.offload_request import link_document, link_from
from planner.plans.plan import Plan
from planner.plans.plan_claims import FORMAT, VERSION, PlanClaims
from planner.steps.graph_problem import StepSurroundings
from planner.units import counted, format_seconds
from profiler.graph_profile import GRAPH_KIND
from profiler.json_files import from_plain, read_document, to_plain
from profiler.step_graph import StepGraph, StepOp
from profiler.step_replay import StepCopy, StepRuns, replay_step

KINDS_SHOWN = 8  # in a notebook


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GraphPlan(PlanClaims):
    """An order of runs of a step's ops, with predictions. Bytes and seconds are of one whole training step.

    Of ``lower_bound_seconds``: no order of these ops whose first runs come in the same order as the plan's, and which
    keeps what is small (a thousandth of the peak in all), is faster within the budget; with a link, no order at all.

    Attributes:
        unused_outputs: places of the forward's outputs, among all leaves, to which the loss hands no gradient.
        graph: the ops of the step, by which it is recognised.
        around: bytes beside what they hold.
        runs: ordinals of ops in the order of their runs, forward and backward.
        copies: to host memory and back, between the runs, in their order.
    """

    kind: ClassVar[str] = GRAPH_KIND
    frugal: ClassVar[bool] = False  # Steps that do not fit are profiled as stages.

    unused_outputs: tuple[int, ...]
    graph: StepGraph
    around: StepSurroundings
    runs: StepRuns
    copies: tuple[StepCopy, ...] = ()

    def _decision_table(self) -> str:
        rows = []
        for kind, again in self._run_again_by_kind():
            seconds = sum(op.seconds * runs for op, runs in again.items())
            rows.append((kind, str(len(again)), str(sum(again.values())), format_seconds(seconds)))
        shown, rest = rows[:KINDS_SHOWN], len(rows) - KINDS_SHOWN
        more = [(f"and {counted(rest, 'other kind')}", "", "", "")] if rest > 0 else []
        return html_table(("run again", "ops", "extra runs", "extra time"), [*shown, *more])

    def _run_again_by_kind(self) -> list[tuple[str, dict[StepOp, int]]]:
        """Kinds of ops, dearest first, and how often each op of them runs again."""
        kinds: dict[str, dict[StepOp, int]] = {}
        for ordinal, again in self.runs.again.items():
            op = self.graph.ops[ordinal]
            kinds.setdefault(op.kind, {})[op] = again
        return sorted(kinds.items(), key=lambda pair: -sum(op.seconds * again for op, again in pair[1].items()))

    def _alive(self) -> Iterator[AliveDuring]:
        around, ops = self.around, self.graph.ops
        replayed = replay_step(self.graph, self.runs, held=around.held_bytes > 0, copies=self.copies)
        sides = (
            (self.runs.forward, replayed.forward, around.forward_bytes),
            (self.runs.backward, replayed.backward, around.backward_bytes),
        )
        for ordinals, side, beside_bytes in sides:
            before = side.start_bytes
            for ordinal, peak, after in zip(ordinals, side.peaks, side.alive, strict=True):
                sizes = before, max(before, peak, after), after
                yield AliveDuring(ops[ordinal].seconds, *(beside_bytes + size for size in sizes))
                before = after

    def _decided(self) -> Any:
        ops = [[op.name, op.op, op.side, op.reads, op.makes] for op in self.graph.ops]
        copies = [[copy.kind, copy.storage, copy.side, copy.before] for copy in self.copies]
        return [ops, [storage.size_bytes for storage in self.graph.storages], self.unused_outputs, self.runs, copies]

    def to_document(self) -> dict[str, Any]:
        """Plain data, as it stands in the file."""
        document = {**to_plain(replace(self, link=None)), "link": link_document(self.link)}
        return {"format": FORMAT, "version": VERSION, "kind": GRAPH_KIND, **document}

    @classmethod
    def load(cls, path: str | Path) -> GraphPlan:
        """Read a plan.

        Raises:
            ValueError: the file is missing, truncated, of another format, kind or version, or lacks a field.
        """
        return cls.from_document(read_document(path, {FORMAT: VERSION}), str(path))

    @classmethod
    def from_document(cls, document: Mapping[str, Any], where: str) -> GraphPlan:
        """Build a plan from its JSON document; ``where`` names it in errors."""
        if document.get("kind") != GRAPH_KIND:
            raise ValueError(f"{where}: expected a plan of a graph, got one of stages; read it with planner.Plan.load")
        data = {key: value for key, value in document.items() if key not in ("format", "version", "kind")}
        try:
            link = link_from(data.get("link"))
            plan = replace(from_plain(cls, {**data, "link": None}), link=link)
            plan.graph.check_positions()
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: expected the fields of a plan, got a mismatch: {error}; solve again") from error
        if not all(0 <= ordinal < len(plan.graph.ops) for side in plan.runs for ordinal in side):
            raise ValueError(f"{where}: expected an order of its own ops, got others; solve again")
        if not all(_is_own(copy, plan) for copy in plan.copies):
            raise ValueError(f"{where}: expected copies of its own storages between its runs, got others; solve again")
        return plan


def _is_own(copy: StepCopy, plan: GraphPlan) -> bool:
    runs = plan.runs.forward if copy.side == "forward" else plan.runs.backward
    return 0 <= copy.storage < len(plan.graph.storages) and 0 <= copy.before <= len(runs)


AnyPlan = TypeVar("AnyPlan", Plan, GraphPlan)
