"""Solutions of profiles, chains and graphs as the command line has them: solved, summed up, and read from files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from planner.plans.offload_request import Offload, link_document, link_from, sent_bytes, usable_link
from planner.plans.plan import Plan, StageDecision
from planner.plans.refusals import require_schedule
from planner.plans.solving import feasible_solution, solver_for
from planner.plans.sources import Source, problem_from
from planner.units import parse_bytes
from profiler.device_record import EstimateRecord
from profiler.json_files import from_plain, to_plain
from profiler.records import LeftOutRecord, PiecesRecord, Profile
from profiler.target_record import TargetRecord
from solvers import Chain, Problem, Replay, Schedule, Solution, replay
from solvers.chain.baselines import keep_all_replay
from solvers.graph.orders import unplanned_replay
from solvers.graph.registry import DEFAULT_GAP, solve_graph
from solvers.problem.chain import Link
from solvers.problem.graph import Graph
from solvers.problem.schedule import RUNS

CHAIN_FORMAT, CHAIN_VERSION = "planner-chain-solution", 1
GRAPH_FORMAT, GRAPH_VERSION = "planner-graph-solution", 1
_FILE_KEYS = ("format", "version", "chain", "schedule", "actions")  # of a solution's file, beside its summary


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """The decision for one stage of a plan or a chain, or one node of a graph; None for missing fields.

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
    """The claims of a solution, as tables, ``solve --json`` and the head of a solution's file have them.

    Fields that are None are those that this kind of problem does not have; JSON leaves them out. Of a plan alone are
    ``model_class`` to ``precision``, ``headroom_bytes``, ``recomputed_ops`` and, where something was stated manually,
    ``stated`` and ``restricted``, where blocks cannot run again ``left_out``, where what is unplanned was computed
    ``frugal``, and where nothing was measured ``estimated`` and ``estimate``; a graph problem has no ``host_bytes`` to
    ``link``.
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
    estimated: bool | None = None
    estimate: EstimateRecord | None = None
    stages: tuple[StageSummary, ...]

    @property
    def part(self) -> Literal["stage", "node"]:
        """The name for its stages."""
        return "stage" if all(stage.side is None for stage in self.stages) else "node"

    def to_document(self) -> dict[str, Any]:
        """Plain data, as ``solve --json`` prints it."""
        document = _without_none(to_plain(self))
        if self.host_bytes is not None:  # The problem has a link, or was found to have none.
            document["link"] = link_document(self.link)
        return document


def summary_of_plan(plan: Plan) -> SolutionSummary:
    """The claims of a plan, and the decision for each stage."""
    summary = msgspec.convert(plan, SolutionSummary, from_attributes=True)  # Fields of the same names.
    summary = replace(
        summary,
        unsteady=plan.unsteady or None,
        other_bits=plan.other_bits or None,
        left_out=plan.left_out or None,
        frugal=plan.frugal or None,
        estimated=True if plan.estimate is not None else None,
    )
    return summary if plan.stated else replace(summary, stated=None, restricted=None)


def summary_of_solution(
    solution: Solution,
    replayed: Replay,
    unplanned: Replay,
    *,
    budget_bytes: int,
    resident_bytes: int,
    stages: tuple[StageSummary, ...],
) -> SolutionSummary:
    """The claims that solutions of chain and graph problems share.

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


def solve_chain_problem(
    chain: Chain, budget: str, *, solver: str, time_limit_seconds: float | None, offload: Offload
) -> tuple[SolutionSummary, Schedule]:
    """Solve a chain for ``budget``; the summary of its solution, and the schedule.

    Raises:
        Infeasible: nothing fits.
        ValueError: unknown solver, or a budget that does not parse.
    """
    unplanned = keep_all_replay(chain)
    budget_bytes = parse_bytes(budget, whole_bytes=unplanned.peak_bytes)
    link, why_no_link = usable_link(offload, chain, None)
    problem = Problem(chain=chain, budget_bytes=budget_bytes, link=link)
    solution = feasible_solution(problem, solver_for(offload, solver), time_limit_seconds)
    schedule = solution.schedule
    assert schedule is not None
    replayed = replay(chain, schedule, link)
    summary = summary_of_solution(
        solution,
        replayed,
        unplanned,
        budget_bytes=budget_bytes,
        resident_bytes=chain.resident_bytes,
        stages=_stage_summaries(chain, schedule, replayed),
    )
    sent = {"host_bytes": replayed.host_peak_bytes, "stall_seconds": replayed.stall_seconds}
    return replace(summary, no_offload=why_no_link, link=link, **sent), schedule


def chain_solution_file(summary: SolutionSummary, chain: Chain, schedule: Schedule) -> dict[str, Any]:
    """The file that ``solve -o`` writes for a chain: the summary, the chain, and the schedule.

    One ``[kind, stage, option]`` per action.
    """
    solved = {"chain": chain.to_dict(), "schedule": schedule.to_list()}
    return {"format": CHAIN_FORMAT, "version": CHAIN_VERSION, **summary.to_document(), **solved}


def chain_summary(document: Mapping[str, Any], where: str) -> SolutionSummary:
    """The summary in a chain's solution file; ``where`` names the file in errors.

    Raises:
        ValueError: a field is missing, unknown, or of another kind.
    """
    summary = summary_from(document, where)
    for number, stage in enumerate(summary.stages):
        if stage.kind is None or stage.kept_bytes is None:
            raise ValueError(f"{where}: expected fields kind and kept_bytes of stage {number}, got none; solve again")
    return summary


def solved_chain(document: Mapping[str, Any], where: str) -> tuple[Chain, Schedule]:
    """The chain and the schedule in a chain's solution file; ``where`` names the file in errors.

    Raises:
        ValueError: the file is one of an older release, or spoilt.
    """
    if "chain" not in document:
        raise ValueError(
            f"{where}: this solution of an older release lacks the chain that it was solved on; solve the problem again"
        )
    schedule = document.get("schedule")
    if not isinstance(document["chain"], Mapping) or not isinstance(schedule, list):
        raise ValueError(f"{where}: expected a chain and a schedule, got others; solve again")
    return problem_from(document["chain"], where, Chain), Schedule.from_list(schedule)


def _stage_summaries(chain: Chain, schedule: Schedule, replayed: Replay) -> tuple[StageSummary, ...]:
    runs = [0] * len(chain.stages)
    extra_seconds = [0.0] * len(chain.stages)
    for moment in replayed.timeline:
        if moment.action.kind in RUNS:
            k = moment.action.stage
            extra_seconds[k] += moment.seconds - moment.stall_seconds if runs[k] else 0.0
            runs[k] += 1
    kept, freed = _first_pass(schedule)
    offloaded_bytes = sent_bytes(chain, schedule)
    return tuple(
        StageSummary(
            name=stage.name,
            kind="stage",
            decision="offload" if k in kept and offloaded_bytes[k] else _decision(k, kept, freed),
            kept_bytes=_kept_bytes(chain, k, kept, freed),
            runs=runs[k],
            extra_seconds=extra_seconds[k],
            offloaded_bytes=offloaded_bytes[k],
        )
        for k, stage in enumerate(chain.stages)
    )


def _first_pass(schedule: Schedule) -> tuple[dict[int, int], set[int]]:
    """Until a stage runs again or goes backward: the option that each kept stage keeps, and the boundaries freed."""
    seen: set[int] = set()
    kept: dict[int, int] = {}
    freed: set[int] = set()
    for action in schedule.actions:
        if action.kind in ("backward", "recompute") or (action.kind == "forward" and action.stage in seen):
            break
        if action.kind == "free":
            freed.add(action.stage)
        if action.kind != "forward":
            continue
        seen.add(action.stage)
        if action.option is not None:
            kept[action.stage] = action.option
    return kept, freed


def _decision(k: int, kept: Mapping[int, int], freed: set[int]) -> StageDecision:
    if k in kept:
        return "keep"
    return "segment" if k - 1 in freed else "recompute"


def _kept_bytes(chain: Chain, k: int, kept: Mapping[int, int], freed: set[int]) -> int:
    if k in kept:
        return max(0, chain.stages[k].options[kept[k]].kept_bytes)
    return chain.stages[k - 1].boundary_bytes if k > 0 and k - 1 not in freed else 0


def solve_graph_problem(
    graph: Graph, budget: str, *, solver: str, time_limit_seconds: float | None
) -> tuple[SolutionSummary, Schedule]:
    """Solve a graph for ``budget``; the summary of its solution, and the schedule.

    Raises:
        Infeasible: nothing was found; its ``proven`` says whether nothing fits.
        ValueError: unknown solver, an impossible time limit, or a budget that does not parse.
    """
    unplanned = unplanned_replay(graph)
    budget_bytes = parse_bytes(budget, whole_bytes=unplanned.peak_bytes)
    # Bytes that no schedule can exceed; 64 bits hold them.
    most_bytes = graph.resident_bytes + sum(node.output_bytes + node.transient_bytes for node in graph.nodes)
    within_bytes = min(budget_bytes, most_bytes)
    solution = solve_graph(graph, within_bytes, solver, time_limit_seconds, DEFAULT_GAP)
    schedule = require_schedule(solution, budget_bytes, solver).schedule
    assert schedule is not None
    replayed = replay(graph, schedule)
    runs_of = Counter(schedule.nodes_run())
    nodes = tuple(
        StageSummary(
            name=node.name,
            side=node.side,
            decision="recompute" if runs_of[place] > 1 else "keep",
            runs=runs_of[place],
            extra_seconds=node.seconds * (runs_of[place] - 1),
        )
        for place, node in enumerate(graph.nodes)
    )
    summary = summary_of_solution(
        solution,
        replayed,
        unplanned,
        budget_bytes=budget_bytes,
        resident_bytes=graph.resident_bytes,
        stages=nodes,
    )
    return summary, schedule


def graph_solution_file(summary: SolutionSummary, graph: Graph, schedule: Schedule) -> dict[str, Any]:
    """The file that ``solve -o`` writes for a graph: the summary, and the actions by the names of their nodes."""
    file_format = {"format": GRAPH_FORMAT, "version": GRAPH_VERSION}
    return {**file_format, **summary.to_document(), "actions": graph.actions_of(schedule)}


def title_of(source: Source, path: Path) -> str:
    """The title of a picture of a source."""
    if isinstance(source, Profile):
        estimated = ", estimated" if source.estimated else ""
        return f"{source.model_class} on {source.device} ({source.device_name}{estimated})"
    if isinstance(source, Graph):
        return f"{path.stem}: a graph of {len(source.nodes)} nodes"
    return f"{path.stem}: a chain of {len(source.stages)} stages"
