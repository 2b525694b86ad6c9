"""Replanning: another budget's plan from a plan alone, by the chain that it was solved on; no profile is needed."""

from __future__ import annotations

from dataclasses import replace

from planner.plans.plan import Plan, chain_in
from planner.plans.solving import OFFLOAD_ONLY, claims_of, feasible_solution
from planner.plans.stage_decisions import with_decisions
from solvers import Problem, replay


def replan(plan: Plan, budget_bytes: int, *, solver: str = "auto", time_limit_seconds: float | None = None) -> Plan:
    """Solve the plan's own chain again, over the same link.

    Args:
        plan: with its chain; nothing of it was stated by hand.
        budget_bytes: that the plan may use; the headroom of ``plan`` comes on top.
        solver: a name of ``solvers.solver_names()``. A plan that recomputes nothing by wish stays one.
        time_limit_seconds: for solvers that search.

    Raises:
        Infeasible: nothing fits; carries the smallest budget that would, without headroom.
        ValueError: a plan without its chain, or one stated by hand.
    """
    if plan.stated:
        raise ValueError(
            "a plan stated by hand: expected one that was solved for, as another budget needs another statement; "
            "state and solve again"
        )
    chain = chain_in(plan)
    beside = plan.unplanned_seconds - chain.unplanned_seconds
    problem = Problem(chain=chain, budget_bytes=budget_bytes, link=plan.link)
    method = OFFLOAD_ONLY if plan.offload_only else solver
    solution = feasible_solution(problem, method, time_limit_seconds, beside_seconds=beside)
    assert solution.schedule is not None
    replayed = replay(chain, solution.schedule, plan.link)
    stages = with_decisions(plan.stages, plan.menus, chain, solution.schedule, replayed)
    claims = claims_of(stages, solution, replayed, beside_seconds=beside)
    return replace(plan, budget_bytes=budget_bytes + plan.headroom_bytes, **claims)
