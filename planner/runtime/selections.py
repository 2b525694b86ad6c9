"""Selections: what a plan tells the ops of its stages."""

from __future__ import annotations

from planner.plans.plan import Plan
from profiler.recomputation.selection import Selection
from profiler.records import MenuRecord


def selections_of(plan: Plan) -> dict[tuple[int, int], Selection]:
    """What the ops of each stage are told, by stage and option, for all options that the schedule uses."""
    runs = [action for action in plan.schedule.actions if action.kind in ("forward", "recompute")]
    used = {(action.stage, action.option) for action in runs if action.option}
    sending = {action.stage for action in plan.schedule.actions if action.kind == "offload"}
    kinds = {(plan.stages[stage].menu, option, stage in sending) for stage, option in used}
    found = {(m, o, all_saves): _selection(plan.menus[m], o, all_saves) for m, o, all_saves in kinds}
    return {(k, option): found[plan.stages[k].menu, option, k in sending] for k, option in used}


def _selection(menu: MenuRecord, option: int, all_saves: bool) -> Selection:
    return Selection.of(menu.ops, menu.options[option - 1].rerun, all_saves=all_saves)
