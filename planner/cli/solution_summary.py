"""The summary of a solution: what a plan, or the solution of a chain or graph problem, claims and does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from planner.plans.offload_request import link_document, link_from
from planner.plans.plan import Plan, StageDecision
from profiler.json_files import from_plain, to_plain
from profiler.records import LeftOutRecord, PiecesRecord
from profiler.target_record import TargetRecord
from solvers import Replay, Schedule, Solution
from solvers.problem.graph import GraphSchedule
from solvers.problem.graph_simulator import GraphReplay
from solvers.problem.link import Link

_FILE_KEYS = ("format", "version", "chain", "schedule", "actions")  # of a solution's file, beside its summary


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """What happens to one stage of a plan or a chain, or to one node of a graph; None for what it does not have.

    Attributes:
        name: of the stage or node.
        kind: ``stage`` or ``outside``; of a chain and a plan.
        side: ``forward`` or ``backward``; of a graph.
        decision: what happens to it.
        kept_bytes: kept from its forward to its backward; of a chain and a plan.
        runs: of it in one step, the first included.
        extra_seconds: that the runs after the first take.
        extra_ops: aten ops that run again; of a plan.
        offloaded_bytes: of what it makes, sent to host memory; of a chain and a plan.
    """

    name: str
    kind: Literal["stage", "outside"] | None = None
    side: Literal["forward", "backward"] | None = None
    decision: StageDecision
    kept_bytes: int | None = None
    runs: int
    extra_seconds: float
    extra_ops: int | None = None
    offloaded_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SolutionSummary:
    """What a solution claims: what tables print, ``solve --json`` says, and a solution's file begins with.

    Fields that are None are those that this kind of problem does not have; JSON leaves them out. Of a plan alone are
    ``model_class`` to ``precision``, ``headroom_bytes``, ``recomputed_ops`` and, where something was stated manually,
    ``stated`` and ``restricted``, where blocks cannot run again ``left_out``, and where what is unplanned was computed
    ``frugal``; a graph problem has no ``host_bytes`` to ``link``.
    """

    model_class: str | None = None
    target: TargetRecord | None = None
    device: str | None = None
    precision: str | None = None
    solver: str
    status: Literal["optimal", "feasible"]
    interrupted: bool = False
    budget_bytes: int
    headroom_bytes: int | None = None
    predicted_peak_bytes: int
    predicted_seconds: float
    unplanned_peak_bytes: int
    unplanned_seconds: float
    resident_bytes: int
    lower_bound_seconds: float
    gap: float
    solve_seconds: float
    recomputed_seconds: float
    recomputed_ops: int | None = None
    host_bytes: int | None = None
    stall_seconds: float | None = None
    no_offload: str | None = None
    link: Link | None = None
    slowdown: float
    stated: tuple[str, ...] | None = None
    restricted: bool | None = None
    unsteady: tuple[str, ...] | None = None
    other_bits: tuple[str, ...] | None = None
    pieces: PiecesRecord | None = None
    left_out: tuple[LeftOutRecord, ...] | None = None
    frugal: bool | None = None
    stages: tuple[StageSummary, ...]

    @property
    def part(self) -> Literal["stage", "node"]:
        """What its stages are called."""
        return "stage" if all(stage.side is None for stage in self.stages) else "node"

    def to_document(self) -> dict[str, Any]:
        """Plain data, as ``solve --json`` prints it."""
        document = _without_none(to_plain(self))
        if self.host_bytes is not None:  # The problem has a link, or was found to have none.
            document["link"] = link_document(self.link)
        return document


def summary_of_plan(plan: Plan) -> SolutionSummary:
    """What a plan claims, and per stage the decision."""
    summary = msgspec.convert(plan, SolutionSummary, from_attributes=True)  # Fields of the same names.
    summary = replace(
        summary,
        unsteady=plan.unsteady or None,
        other_bits=plan.other_bits or None,
        left_out=plan.left_out or None,
        frugal=plan.frugal or None,
    )
    return summary if plan.stated else replace(summary, stated=None, restricted=None)


def summary_of_solution(
    solution: Solution[Schedule] | Solution[GraphSchedule],
    replayed: Replay | GraphReplay,
    unplanned: Replay | GraphReplay,
    *,
    budget_bytes: int,
    resident_bytes: int,
    stages: tuple[StageSummary, ...],
) -> SolutionSummary:
    """What the solution of a chain or graph problem claims, as far as both claim the same.

    Args:
        solution: with a schedule.
        replayed: that schedule.
        unplanned: the schedule that recomputes and sends nothing.
        budget_bytes, resident_bytes: of the problem.
        stages: with what the schedule does to them.
    """
    assert solution.status in ("optimal", "feasible") and solution.gap is not None
    return SolutionSummary(
        solver=solution.solver,
        status=solution.status,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=replayed.peak_bytes,
        predicted_seconds=replayed.seconds,
        unplanned_peak_bytes=unplanned.peak_bytes,
        unplanned_seconds=unplanned.seconds,
        resident_bytes=resident_bytes,
        lower_bound_seconds=solution.lower_bound_seconds,
        gap=solution.gap,
        solve_seconds=solution.solve_seconds,
        interrupted=solution.interrupted,
        recomputed_seconds=sum(stage.extra_seconds for stage in stages),
        slowdown=replayed.seconds / unplanned.seconds if unplanned.seconds > 0 else 1.0,
        stages=stages,
    )


def summary_from(document: Mapping[str, Any], where: str) -> SolutionSummary:
    """The summary in a solution's file; ``where`` names the file in errors.

    Raises:
        ValueError: a field is missing, unknown, or of another kind.
    """
    data = {key: value for key, value in document.items() if key not in _FILE_KEYS}
    try:
        return from_plain(SolutionSummary, {**data, "link": link_from(data.get("link"))})
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: expected the fields of a solution, got a mismatch: {error}; solve again") from error


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
