"""Solves again with programs of captured stages that are made for exactly the room that there is: for a plan that fits,
or for one that is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from planner.plans.call_programs import with_exact_programs
from planner.plans.cost_model import chain_of
from planner.plans.plan import Plan
from planner.plans.refusals import Infeasible
from profiler.records import Profile
from solvers import Chain, Problem, Schedule
from solvers.chain.persistent import smallest_schedule
from solvers.problem.deadline import Deadline
from solvers.problem.schedule import RUNS, Action

EXACT_SECONDS = 1.5  # in each round, for programs of exactly the room that a plan leaves
_EXACT_ROUNDS = 2
_EXACT_GAIN = 1e-3  # of a step's time, that makes another round worth it


def first_plan(
    profile: Profile, solved: Callable[[Profile], Plan], budget_bytes: int, time_limit_seconds: float | None
) -> tuple[Plan, Profile]:
    """The plan of a profile, and the profile; where its programs need more than the budget, with others that need less.

    Those are searched for in the room that the budget leaves around the stages in the smallest schedule, unless it is
    proven that no programs at all fit.

    Args:
        profile: to begin with.
        solved: the plan of a profile; raises Infeasible.
        budget_bytes: that ``solved`` plans for.
        time_limit_seconds: for all searches; None for a few seconds at most.

    Raises:
        Infeasible: none of the programs that were found fit; says the smallest budget that is known to be enough.
    """
    try:
        return solved(profile), profile
    except Infeasible as refusal:
        least = refusal
    left_seconds = math.inf if time_limit_seconds is None else time_limit_seconds - (least.solve_seconds or 0.0)
    if least.proven or profile.in_flight or left_seconds <= 0:
        raise least
    seconds = EXACT_SECONDS if time_limit_seconds is None else left_seconds / _EXACT_ROUNDS
    with Deadline(left_seconds):
        for _ in range(_EXACT_ROUNDS):
            problem = Problem(chain=chain_of(profile), budget_bytes=budget_bytes)
            more = with_exact_programs(profile, problem, _smallest_as_programs(profile, problem.chain), seconds)
            if more is profile:
                break
            try:
                return solved(more), more
            except Infeasible as refusal:
                least = min(least, refusal, key=lambda each: each.minimum_budget_bytes)
            profile = more
    raise least


def _smallest_as_programs(profile: Profile, chain: Chain) -> Schedule:
    """The schedule with the smallest peak, in which captured stages that keep everything run as programs, too."""
    actions: list[Action] = []
    for action in smallest_schedule(chain).actions:
        menu = profile.stages[action.stage].menu
        once = profile.menus[menu].once if menu >= 0 else None
        if action.kind in RUNS and action.option == 0 and once is not None:
            action = replace(action, option=1 + profile.menus[menu].options.index(once))
        actions.append(action)
    return Schedule(tuple(actions))


def faster_with_exact_programs(
    plan: Plan, profile: Profile, solved: Callable[[Profile], Plan], time_limit_seconds: float | None
) -> Plan:
    """The plan, or a faster one in which programs of captured stages are made for exactly the room that it leaves.

    Args:
        plan, profile: to begin with.
        solved: the plan of a profile whose menus have other programs.
        time_limit_seconds: for all searches, that of the plan included; None for a few seconds at most.
    """
    left_seconds = math.inf if time_limit_seconds is None else max(0.0, time_limit_seconds - plan.solve_seconds)
    seconds = min(EXACT_SECONDS, left_seconds)
    with Deadline(left_seconds):
        for _ in range(_EXACT_ROUNDS):
            if plan.interrupted or plan.chain is None or plan.in_flight or not left_seconds:
                break
            problem = Problem(chain=plan.chain, budget_bytes=plan.budget_bytes, link=plan.link)
            try:
                more = with_exact_programs(profile, problem, plan.schedule, seconds)
                if more is profile:
                    break
                better = solved(more)
            except KeyboardInterrupt:
                return replace(plan, interrupted=True)
            except Infeasible:  # More programs to choose from are searched less finely.
                break
            if better.predicted_seconds >= plan.predicted_seconds:
                break
            worth_more = better.predicted_seconds < plan.predicted_seconds * (1 - _EXACT_GAIN)
            plan, profile = better, more
            if not worth_more:
                break
    return plan
