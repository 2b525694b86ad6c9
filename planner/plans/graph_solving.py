"""Orders of a call's ops within a budget, found by the graph solver, and what two graphs of ops differ in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from planner.plans.refusals import Infeasible, require_schedule
from planner.steps.graph_problem import StepProblem, StepSurroundings
from profiler.step_graph import StepGraph, StepRuns
from solvers.graph.registry import DEFAULT_GAP, GraphSolution, solve_graph
from solvers.problem.deadline import Deadline, left_seconds
from solvers.problem.solution import GraphProblem

# Of the time that is left, for rounds of less and less room, where the replay of an order is above what its graph says.
_ROUND_SHARES = (0.8, 0.5, 1.0)


class GraphSearch(NamedTuple):
    """How orders are searched for: by which method, until when, and how near to the bound."""

    solver: str = "auto"
    time_limit_seconds: float | None = None
    gap: float = DEFAULT_GAP


def order_within(
    budget_bytes: int, step: StepGraph, around: StepSurroundings, problem: StepProblem, search: GraphSearch
) -> StepRuns:
    """The fastest order of a call's ops that is found within a budget.

    Where the replay of an order is above the budget, the next one is found in less room.

    Raises:
        Infeasible: nothing was found; carries the smallest budget known to be feasible.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    least_bytes, room_bytes = 0, budget_bytes
    for share in _ROUND_SHARES:
        with Deadline(left_seconds() * share):
            solution = solve_graph(GraphProblem(graph=problem.graph, budget_bytes=room_bytes), *search)
        if solution.interrupted:
            raise KeyboardInterrupt
        if solution.schedule is None and least_bytes:
            break
        runs = runs_of(problem, require_schedule(solution, budget_bytes, search.solver))
        peak_bytes = around.peak_bytes(step, runs)
        if peak_bytes <= budget_bytes:
            return runs
        least_bytes = min(least_bytes or peak_bytes, peak_bytes)
        room_bytes -= peak_bytes - budget_bytes
    raise Infeasible(
        minimum_budget_bytes=least_bytes,
        reason="the orders that were found hand over what forward returns and nobody holds",
        solver=search.solver,
        budget_bytes=budget_bytes,
        proven=False,
    )


def runs_of(problem: StepProblem, solution: GraphSolution) -> StepRuns:
    """The runs of a solution's schedule, without nodes that stand for no op."""
    turns = [*_turns(problem, solution)]
    loss = next(k for k, (name, _) in enumerate(turns) if name == problem.loss)
    forward, backward = ([k for _, ordinals in part for k in ordinals] for part in (turns[:loss], turns[loss + 1 :]))
    return StepRuns(tuple(forward), tuple(backward))


def _turns(problem: StepProblem, solution: GraphSolution) -> Iterator[tuple[str, list[int]]]:
    """The nodes of a schedule in the order of their runs, with ordinals of the ops that run."""
    assert solution.schedule is not None
    ran: set[str] = set()
    for node in solution.schedule.computed():
        name = problem.graph.nodes[node].name
        group = problem.groups.get(name)
        yield name, [] if group is None else group.ops if name in ran else group.first_run
        ran.add(name)


def first_difference(planned: StepGraph, found: StepGraph, *, sizes_differ: bool = False) -> str:
    """What differs first between the ops of a plan and those of a model, in words; empty where nothing does.

    Args:
        planned, found: both graphs.
        sizes_differ: the bytes of what ops make may be others.
    """
    for mine, other in zip(planned.ops, found.ops, strict=False):
        where = f" in {other.module}" if other.module else ""
        if (mine.name, mine.op) != (other.name, other.op):
            return f"{other.name} ({other.op}{where}) where it had {mine.name}"
        if (mine.reads, mine.makes) != (other.reads, other.makes):
            return f"{mine.name} ({mine.op}{where}) has other arguments, as where other tensors require gradients"
        sizes, made = ([graph.storages[s].traced_bytes for s in mine.makes] for graph in (planned, found))
        if sizes != made and not sizes_differ:
            return f"{mine.name} ({mine.op}{where}) makes {made} bytes, and made {sizes}"
    if len(planned.ops) != len(found.ops):
        return f"{len(found.ops)} ops, not {len(planned.ops)}"
    return ""
