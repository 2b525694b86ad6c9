"""Chooses between two cuts of a model of few ops: its parts as stages, or its whole call as one."""

from __future__ import annotations

from collections.abc import Callable

from planner.plans.refusals import NoPlan
from planner.plans.solving import least_budget_bytes, solve
from profiler.agreement import agreed
from profiler.records import Profile

_MOST_OPS = 600  # of a forward: the programs of more ops at once take minutes to find
_FEW_OPS = 300  # a chain of stages with at most this many is tried as one stage, too, as the search is quick
_WORTH_BYTES = 32 * 2**20  # where it keeps at least this much
_SKIPPED = 0.01  # other stages are tried where later ones read more than this share of the bytes beyond the states
_BUDGETS = (0.25, 0.5, 0.75)  # of the way from the smallest budget of the parts up to the unplanned peak
_SECONDS = 1.5  # for each plan


def with_best_cut(parts: Profile, profile_whole: Callable[[], Profile]) -> Profile:
    """The profile whose plans are faster: of the parts, or of the whole model where that may be better.

    Args:
        parts: the profile with the stages that were found.
        profile_whole: measures the model as one stage; called where that may be better.
    """
    if not agreed(_may_be_better_whole(parts)):
        return parts
    whole = profile_whole()
    return whole if agreed(_is_better(whole, parts)) else parts


def _may_be_better_whole(profile: Profile) -> bool:
    """Whether the model's ops are few enough to be planned at once, and the stages form no chain or the ops are few."""
    stages = profile.stages
    ops = sum(stage.forward_ops for stage in stages)
    if profile.frugal or profile.evaluations > 1 or profile.in_flight or profile.left_out or ops > _MOST_OPS:
        return False
    if any(stage.unit_bytes or not stage.recomputable for stage in stages if stage.kind == "stage"):
        return False
    planned = [k for k, stage in enumerate(stages) if stage.kind == "stage"]
    if len(planned) < 2:
        return True
    dynamic_bytes = profile.unplanned_peak_bytes - profile.resident.total
    if ops <= _FEW_OPS and dynamic_bytes >= _WORTH_BYTES:
        return True
    apart = any(not stages[k].links for k in planned[1:])
    skipped_bytes = sum(shared.size_bytes for shared in profile.shared if shared.readers)
    return apart or skipped_bytes > _SKIPPED * dynamic_bytes


def _is_better(whole: Profile, parts: Profile) -> bool:
    """Whether plans of the whole model are faster, and fit in every budget that those of its parts fit in."""
    least, least_whole = least_budget_bytes(parts), least_budget_bytes(whole)
    if least_whole > least or all(menu.graph is None for menu in whole.menus):
        return False
    span = parts.unplanned_peak_bytes - least
    if span <= 0:
        return least_whole < least
    budgets = [least + int(part * span) for part in _BUDGETS]
    return sum(_slowdown(whole, each) for each in budgets) < sum(_slowdown(parts, each) for each in budgets)


def _slowdown(profile: Profile, budget_bytes: int) -> float:
    try:
        plan = solve(profile, budget_bytes, solver="rotor", offload="never", time_limit_seconds=_SECONDS)
    except NoPlan:
        return float("inf")
    return plan.slowdown
