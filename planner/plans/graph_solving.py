"""Solves the profile of a graph for a budget: the plan with its certificate, or why there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from planner.plans.graph_plan import GraphPlan
from planner.plans.refusals import Infeasible, NothingFound, require_schedule
from planner.steps.graph_problem import StepProblem, StepSurroundings, step_problem
from profiler.graph_profile import GraphProfile
from profiler.step_graph import StepGraph
from profiler.step_replay import StepRuns
from solvers.graph.registry import DEFAULT_GAP, GraphSolution, solve_graph
from solvers.problem.solution import GraphProblem

ROUNDS = 3  # of less and less room, where the replay of a plan is above what its graph says


def solve_graph_profile(
    profile: GraphProfile,
    budget_bytes: int,
    *,
    solver: str = "auto",
    time_limit_seconds: float | None = None,
    gap: float = DEFAULT_GAP,
) -> GraphPlan:
    """The fastest plan of a profile's ops that is found within a budget.

    Args:
        profile: of the step.
        budget_bytes: the most that may be alive at once.
        solver: a name of ``solvers.graph_solver_names()``.
        time_limit_seconds: the search ends then.
        gap: relative distance from the bound at which it ends early.

    Raises:
        Infeasible: nothing fits; carries the smallest budget known to be feasible.
        NothingFound: nothing was found, and nothing ruled out.
    """
    around = StepSurroundings.of(profile)
    problem = step_problem(profile.graph, around)
    if budget_bytes < around.other_peak_bytes:
        raise _too_little_around(problem, around.other_peak_bytes, budget_bytes, solver)
    least_bytes, room_bytes = 0, budget_bytes
    for _ in range(ROUNDS):
        solution = solve_graph(
            GraphProblem(graph=problem.graph, budget_bytes=room_bytes), solver, time_limit_seconds, gap
        )
        if solution.schedule is None and least_bytes:
            break
        plan = _plan_of(profile, problem, around, require_schedule(solution, budget_bytes, solver), budget_bytes)
        above_bytes = plan.predicted_peak_bytes - budget_bytes
        if above_bytes <= 0:
            return plan
        least_bytes = min(least_bytes or plan.predicted_peak_bytes, plan.predicted_peak_bytes)
        room_bytes -= above_bytes
    raise NothingFound(
        minimum_budget_bytes=least_bytes,
        reason="the orders that were found hand over what forward returns and nobody holds",
        solver=solver,
        budget_bytes=budget_bytes,
    )


def _too_little_around(problem: StepProblem, needed_bytes: int, budget_bytes: int, solver: str) -> Infeasible:
    """A budget below what the step takes before its programs and after them; these may need even more."""
    reason = f"what comes before forward and after backward, such as the optimizer step, needs {needed_bytes} bytes"
    shortage = solve_graph(GraphProblem(graph=problem.graph, budget_bytes=1)).shortage
    assert shortage is not None
    if shortage.minimum_budget_bytes > needed_bytes:
        needed_bytes, reason = shortage.minimum_budget_bytes, shortage.reason
    return Infeasible(minimum_budget_bytes=needed_bytes, reason=reason, solver=solver, budget_bytes=budget_bytes)


def runs_of(problem: StepProblem, solution: GraphSolution) -> StepRuns:
    """The runs of a solution's schedule, without nodes that stand for no op."""
    assert solution.schedule is not None
    names = [problem.graph.nodes[node].name for node in solution.schedule.computed()]
    end = names.index(problem.loss)
    ran: set[str] = set()

    def ordinals(part: list[str]) -> Iterator[int]:
        for name in part:
            if (group := problem.groups.get(name)) is not None:
                yield from group.ops if name in ran else group.first_run
                ran.add(name)

    return StepRuns(tuple(ordinals(names[:end])), tuple(ordinals(names[end + 1 :])))


def _plan_of(
    profile: GraphProfile,
    problem: StepProblem,
    around: StepSurroundings,
    solution: GraphSolution,
    budget_bytes: int,
) -> GraphPlan:
    runs = runs_of(problem, solution)
    again = [*_second_runs(runs)]
    again_seconds = profile.evaluations * sum(profile.graph.ops[ordinal].seconds for ordinal in again)
    seconds = profile.once_seconds + again_seconds
    least_added = profile.evaluations * (solution.lower_bound_seconds - problem.graph.unplanned_seconds)
    bound = min(profile.once_seconds + max(0.0, least_added), seconds)
    status = solution.status
    assert status in ("optimal", "feasible")
    return GraphPlan(
        model_class=profile.model_class,
        input_shapes=profile.input_shapes,
        device=profile.device,
        precision=profile.precision,
        solver=solution.solver,
        status=status,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=around.peak_bytes(profile.graph, runs),
        predicted_seconds=seconds,
        unplanned_peak_bytes=profile.unplanned_peak_bytes,
        unplanned_seconds=profile.unplanned_seconds,
        resident_bytes=profile.resident.total,
        recomputed_seconds=again_seconds,
        recomputed_ops=len(again),
        lower_bound_seconds=bound,
        gap=(seconds - bound) / seconds if seconds > 0 else 0.0,
        solve_seconds=solution.solve_seconds,
        unused_outputs=profile.unused_outputs,
        graph=profile.graph,
        runs=runs,
    )


def _second_runs(runs: StepRuns) -> Iterator[int]:
    for ordinal, count in Counter([*runs.forward, *runs.backward]).items():
        yield from [ordinal] * (count - 1)


def first_difference(planned: StepGraph, found: StepGraph) -> str:
    """What differs first between the ops of a plan and those of a model, in words; empty where nothing does."""
    for mine, other in zip(planned.ops, found.ops, strict=False):
        where = f" in {other.module}" if other.module else ""
        if (mine.name, mine.op, mine.reads, mine.makes) != (other.name, other.op, other.reads, other.makes):
            return f"{other.name} ({other.op}{where}) where it had {mine.name}"
        sizes, made = ([graph.storages[s].size_bytes for s in mine.makes] for graph in (planned, found))
        if sizes != made:
            return f"{mine.name} ({mine.op}{where}) makes {made} bytes, and made {sizes}"
    if len(planned.ops) != len(found.ops):
        return f"{len(found.ops)} ops, not {len(planned.ops)}"
    return ""
