"""Plans of single ops stated by hand: a profile of a graph and rules in, a plan that does what they state out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from planner.plans.graph_plan import GraphPlan
from planner.plans.graph_rules import DecidedOps
from planner.plans.graph_solving import solve_graph_profile
from planner.plans.headroom import Headroom
from planner.plans.refusals import Infeasible
from planner.plans.rules import Rules
from planner.plans.solving import plan_with_headroom
from planner.units import parse_bytes
from profiler.graph_profile import GraphProfile

SOLVER = "by hand"
_ANY_BUDGET = 2**62  # bytes


def state_ops(
    profile: GraphProfile,
    rules: Rules,
    *,
    budget: str | int | None,
    solver: str,
    time_limit_seconds: float | None,
    headroom: Headroom,
) -> GraphPlan:
    """The plan of single ops that does what rules state; as ``planner.state``.

    Ops that are to be recomputed run again just before what first needs them in backward.
    """
    decided = DecidedOps(profile.graph, rules)
    within = partial(solve_graph_profile, profile, time_limit_seconds=time_limit_seconds, decisions=decided.decisions)

    def fully_stated(budget_bytes: int) -> GraphPlan:
        plan = replace(within(_ANY_BUDGET, solver="keep_all"), solver=SOLVER)
        if plan.predicted_peak_bytes > budget_bytes:
            raise Infeasible(
                minimum_budget_bytes=plan.predicted_peak_bytes,
                reason="what is stated needs them",
                solver=SOLVER,
                budget_bytes=budget_bytes,
            )
        return replace(plan, budget_bytes=budget_bytes)

    def partly_stated(budget_bytes: int) -> GraphPlan:
        plan = within(budget_bytes, solver=solver)
        return replace(plan, solver=f"{SOLVER} and {plan.solver}")

    if budget is not None:
        budget_bytes = parse_bytes(budget, whole_bytes=profile.unplanned_peak_bytes)
        plan = plan_with_headroom(budget_bytes, headroom, partly_stated if decided.undecided else fully_stated)
    elif decided.undecided:
        raise ValueError("rules: expected a budget for the ops left to the solver, got none; give one (--budget)")
    else:
        peak_bytes = fully_stated(_ANY_BUDGET).predicted_peak_bytes
        plan = plan_with_headroom(headroom.budget_above(peak_bytes), headroom, fully_stated)
    return replace(plan, stated=tuple(decided.lines), restricted=True)
