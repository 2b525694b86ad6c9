"""By hand: rules and a profile in, a plan out that does what the rules state, predicted and bounded like any other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from planner.plans.cost_model import chain_of
from planner.plans.headroom import Headroom, headroom_from
from planner.plans.plan import Plan
from planner.plans.rule_resolution import StageDirective, Stated, stated_by
from planner.plans.rules import Rule, Rules, rules_from
from planner.plans.solving import Infeasible, plan_of, plan_with_headroom, require_schedule
from planner.units import parse_bytes
from profiler.op_graph import NamedStage, StageOps
from profiler.records import Profile, StageRecord
from solvers import Chain, Problem, Solution, replay, solve_chain
from solvers.chain.fixed_stages import FixedSpan, expanded, restricted, schedule_of
from solvers.chain.minimum_memory import shortage_of

SOLVER = "by hand"
_KEPT = StageDirective(kind="keep")


def state(
    profile: Profile | str | Path,
    rules: Rules | Rule | Sequence[Rule] | str | Path,
    *,
    budget: str | int | None = None,
    solver: str = "auto",
    time_limit_seconds: float | None = None,
    headroom: str | int = 0,
) -> Plan:
    """The plan that does what ``rules`` state.

    Args:
        profile: a Profile or the path of its file, measured with the same rules: ``planner.profile(..., rules=rules)``.
        rules: Rules, a list of them, or the path of a TOML or JSON file.
        budget: bytes, ``"8GiB"`` or ``"70%"`` of the unplanned peak. None: what the plan needs. With something left
            to the solver it has to be given.
        solver: for what is left to the solver; a name of ``solvers.solver_names()``.
        time_limit_seconds: for solvers that search.
        headroom: as for ``solve``; without a budget it comes on top of what the plan needs.

    Returns:
        The plan, replayed in exact bytes. Its bound holds for all plans within the budget; with something left to the
        solver (``Plan.restricted``) for those that do what is stated.

    Raises:
        Infeasible: what is stated does not fit the budget; carries the bytes that it needs.
        ChoiceError: a name that matches nothing, rules that contradict each other, an op that must not run again.
        ValueError: a stage that cannot be recomputed, a choice that the profile has not measured, a missing budget.
    """
    start = time.perf_counter()
    profile = profile if isinstance(profile, Profile) else Profile.load(profile)
    rules = rules_from(rules)
    stated = stated_by(rules, _named_stages(profile), _names_outside(profile))
    pieces = _pieces(profile, stated)
    chain = chain_of(profile)
    budget_bytes = None if budget is None else parse_bytes(budget, whole_bytes=profile.unplanned_peak_bytes)

    def within(planned_bytes: int | None) -> Plan:
        if not any(piece.free for piece in pieces):
            return _stated_plan(profile, chain, pieces, planned_bytes, start)
        if planned_bytes is None:
            raise ValueError(
                "rules: expected a budget for the stages left to the solver, got none; give one (--budget)"
            )
        problem = Problem(chain=chain, budget_bytes=planned_bytes)
        return _solved_plan(profile, pieces, problem, solver, time_limit_seconds)

    free = headroom_from(headroom)
    plan = _with_room(within(None), free) if budget_bytes is None else plan_with_headroom(budget_bytes, free, within)
    return replace(plan, stated=stated.lines, solve_seconds=time.perf_counter() - start)


def _with_room(plan: Plan, headroom: Headroom) -> Plan:
    """The plan with a headroom beside what it needs."""
    whole_bytes = headroom.budget_above(plan.budget_bytes)
    return replace(plan, budget_bytes=whole_bytes, headroom_bytes=whole_bytes - plan.budget_bytes)


def _stated_plan(
    profile: Profile, chain: Chain, pieces: Sequence[FixedSpan], budget_bytes: int | None, start: float
) -> Plan:
    """Everything is stated: the schedule is there, and the solver only bounds it."""
    schedule = schedule_of(pieces)
    found = replay(chain, schedule)
    budget = found.peak_bytes if budget_bytes is None else budget_bytes
    if found.peak_bytes > budget:
        raise Infeasible(
            minimum_budget_bytes=found.peak_bytes,
            reason=f"what is stated needs them: {shortage_of(chain, schedule).reason}",
            solver=SOLVER,
            budget_bytes=budget,
            solve_seconds=time.perf_counter() - start,
        )
    problem = Problem(chain=chain, budget_bytes=budget)
    best = solve_chain(problem)
    solution = Solution(
        solver=SOLVER,
        status="feasible",
        schedule=schedule,
        peak_bytes=found.peak_bytes,
        seconds=found.seconds,
        lower_bound_seconds=min(best.lower_bound_seconds, found.seconds),
        solve_seconds=0.0,
    )
    return plan_of(profile, problem, solution)


def _solved_plan(
    profile: Profile, pieces: Sequence[FixedSpan], problem: Problem, solver: str, time_limit_seconds: float | None
) -> Plan:
    """A part is stated: the solver plans for the chain in which that part is fixed."""
    chain = problem.chain
    small = replace(problem, chain=restricted(chain, pieces))
    beside = profile.unplanned_seconds - chain.unplanned_seconds
    found = solve_chain(small, solver=solver, time_limit_seconds=time_limit_seconds)
    require_schedule(found, problem.budget_bytes, f"{SOLVER} and {solver}", seconds_outside_chain=beside)
    assert found.schedule is not None
    solution = replace(found, schedule=expanded(found.schedule, pieces), solver=f"{SOLVER} and {found.solver}")
    plan = plan_of(profile, problem, solution)
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    return replace(plan, restricted=True)


def _named_stages(profile: Profile) -> list[NamedStage]:
    return [
        NamedStage(name=record.name, parents=record.parents, ops=_ops(profile, record))
        for record in profile.stages
        if record.kind == "stage"
    ]


def _ops(profile: Profile, record: StageRecord) -> StageOps:
    if record.menu >= 0:
        return profile.menus[record.menu].ops
    return StageOps(ops=(), storages=(), modules=(("", record.module_class),))  # of a release without ops in profiles


def _names_outside(profile: Profile) -> set[str]:
    return {op.module for op in profile.op_records if op.place == "outside"}


def _pieces(profile: Profile, stated: Stated) -> list[FixedSpan]:
    """The chain cut by what is stated; what lies outside of stages is kept."""
    fates = iter(stated.fates)
    found: list[FixedSpan] = []
    open_segment = False
    for k, record in enumerate(profile.stages):
        fate = next(fates) if record.kind == "stage" else _KEPT
        _check_recomputable(record, fate)
        if fate.kind == "segment" and open_segment and record.links:
            found[-1] = replace(found[-1], end=k + 1)
        else:
            found.append(_piece(profile, k, fate))
        open_segment = fate.kind == "segment" and not fate.ends
    return found


def _piece(profile: Profile, k: int, fate: StageDirective) -> FixedSpan:
    if fate.kind in ("recompute", "segment"):
        return FixedSpan(k, k + 1)
    if fate.kind == "choice":
        return FixedSpan(k, k + 1, option=_option(profile, profile.stages[k], fate))
    return FixedSpan(k, k + 1, option=0, free=fate.kind == "solve")


def _check_recomputable(record: StageRecord, fate: StageDirective) -> None:
    if fate.kind in ("recompute", "segment") and not record.recomputable:
        reason = record.reason or "it does not repeat its result"
        raise ValueError(
            f"{fate.source}: expected stages that can be recomputed, got {record.name!r}: {reason}; keep it with a "
            'later rule, or name ops in it (ops = "*"), which run again without its Python code'
        )


def _option(profile: Profile, record: StageRecord, fate: StageDirective) -> int:
    """The number of the measured option that is the choice."""
    assert fate.choice is not None
    menu = profile.menus[record.menu]
    for number, option in enumerate(menu.options, start=1):
        if frozenset(option.rerun) == fate.choice.rerun:
            return number
    if menu.reason:
        raise ValueError(
            f"{fate.source}: expected options inside stage {record.name!r} to work, got none: {menu.reason}; "
            "state something else of it"
        )
    raise ValueError(
        f"{fate.source}: expected a profile that has measured stage {record.name!r} with {fate.choice.name} run again, "
        "got one that has not; profile with these rules (--rules, or planner.profile(..., rules=...))"
    )
