"""The plans that a plan's own problem has at other budgets, each with its stages, by rising peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

from planner.plans.graph_plan import GraphPlan
from planner.plans.graph_solving import runs_of, solution_within
from planner.plans.plan import Plan, chain_in
from planner.plans.solving import OFFLOAD_ONLY, schedule_fields
from planner.steps.graph_problem import step_problem
from solvers import Problem, Solution, frontier
from solvers.graph.registry import graph_frontier

GRAPH_SECONDS = 15.0  # of the search over the budgets of a graph
POINTS = 40  # of a chain's curve: more are not told apart in a picture


@overload
def plans_of_curve(plan: Plan, *, time_limit_seconds: float | None = None) -> list[Plan]: ...
@overload
def plans_of_curve(plan: GraphPlan, *, time_limit_seconds: float | None = None) -> list[GraphPlan]: ...
def plans_of_curve(plan: Plan | GraphPlan, *, time_limit_seconds: float | None = None) -> list[Plan] | list[GraphPlan]:
    """Plans that no other one of their method beats, each with its own peak as its budget.

    Of stages they are solved for over the plan's link, ``rotor``'s where it has none; of single ops without copies.
    What was stated by hand does not bind them.

    Args:
        plan: with the problem that it solves. One for several micro-batches under way, of which each budget has its
            own problem, has no curve.
        time_limit_seconds: for all plans of single ops together; 15 where None.
    """
    if isinstance(plan, GraphPlan):
        return _of_graph(plan, time_limit_seconds or GRAPH_SECONDS)
    return [] if plan.beside else _of_chain(plan)


def _of_chain(plan: Plan) -> list[Plan]:
    chain = chain_in(plan)
    seconds_outside_chain = plan.seconds_outside(chain)
    solver = OFFLOAD_ONLY if plan.offload_only else "rotor" if plan.link is None else "auto"
    plans = []
    for solution in _thinned(frontier(chain, solver, link=plan.link)):
        assert solution.peak_bytes is not None
        problem = Problem(chain=chain, budget_bytes=solution.peak_bytes, link=plan.link)
        fields = schedule_fields(problem, solution, plan.stages, plan.menus, seconds_outside_chain)
        plans.append(replace(plan, budget_bytes=solution.peak_bytes, headroom_bytes=0, stated=(), **fields))
    return plans


def _thinned(items: Sequence[Solution]) -> list[Solution]:
    """At most ``POINTS`` of them, the first and the last included."""
    if len(items) <= POINTS:
        return [*items]
    return [items[round(k * (len(items) - 1) / (POINTS - 1))] for k in range(POINTS)]


def _of_graph(plan: GraphPlan, time_limit_seconds: float) -> list[GraphPlan]:
    step, around = plan.graph, plan.around
    problem = step_problem(step, around)
    once_seconds = plan.predicted_seconds - plan.recomputed_seconds - plan.stall_seconds
    evaluations = _evaluations(plan)
    plans = []
    for solution in graph_frontier(problem.graph, time_limit_seconds=time_limit_seconds):
        runs = runs_of(problem, solution)
        again = runs.again
        again_seconds = evaluations * sum(step.ops[ordinal].seconds for ordinal in again.elements())
        seconds = once_seconds + again_seconds
        peak_bytes = around.peak_bytes(step, runs)
        solution = solution_within(problem, solution, peak_bytes)
        added_seconds = evaluations * max(0.0, solution.lower_bound_seconds - problem.once_seconds)
        bound_seconds = min(seconds, once_seconds + added_seconds)
        plans.append(
            replace(
                plan,
                solver=solution.solver,
                status="optimal" if solution.status == "optimal" else "feasible",
                budget_bytes=peak_bytes,
                headroom_bytes=0,
                predicted_peak_bytes=peak_bytes,
                predicted_seconds=seconds,
                recomputed_seconds=again_seconds,
                recomputed_ops=again.total(),
                lower_bound_seconds=bound_seconds,
                gap=(seconds - bound_seconds) / seconds if seconds > 0 else 0.0,
                solve_seconds=solution.solve_seconds,
                runs=runs,
                copies=(),
                host_bytes=0,
                stall_seconds=0.0,
                stated=(),
            )
        )
    return _undominated(plans)


def _undominated(plans: Sequence[GraphPlan]) -> list[GraphPlan]:
    """By rising peak, which is that of the whole step and may be the same for many: each faster than all before it."""
    best: list[GraphPlan] = []
    for plan in sorted(plans, key=lambda each: (each.predicted_peak_bytes, each.predicted_seconds)):
        if not best or plan.predicted_seconds < best[-1].predicted_seconds:
            best.append(plan)
    return best


def _evaluations(plan: GraphPlan) -> float:
    """How often a step runs forward and backward, as what runs again tells; 1 where nothing does."""
    seconds = sum(plan.graph.ops[ordinal].seconds for ordinal in plan.runs.again.elements())
    return plan.recomputed_seconds / seconds if seconds > 0 else 1.0
