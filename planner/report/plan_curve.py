"""The plans that a plan's own problem has at other budgets, each with its stages, by rising peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.plans.plan import Plan, chain_in
from planner.plans.solving import OFFLOAD_ONLY, schedule_fields
from solvers import Problem, Solution, frontier

POINTS = 40  # of a curve: more are not told apart in a picture


def plans_of_curve(plan: Plan) -> list[Plan]:
    """Plans that no other one of their method beats, each with its own peak as its budget.

    They are solved for over the plan's link, ``rotor``'s where it has none; what was stated by hand does not bind them.
    A plan for several micro-batches under way, of which each budget has its own problem, has no curve.
    """
    if plan.beside:
        return []
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
