"""Manual plans: a profile and rules in, a plan that does what they state out, predicted and bounded as any."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from planner.plans.cost_model import chain_of
from planner.plans.given_sources import given_profile
from planner.plans.headroom import headroom_from
from planner.plans.lowering import can_carry_out
from planner.plans.plan import Plan
from planner.plans.refusals import Infeasible, require_schedule
from planner.plans.rule_resolution import ResolvedRules, StageDirective, resolve_rules
from planner.plans.rules import Rule, Rules, rules_from
from planner.plans.solving import complete, plan_of, plan_with_headroom
from planner.plans.stage_decisions import undecided_stages
from planner.units import parse_bytes
from profiler.op_graph import ChoiceError, NamedStage, StageOps
from profiler.program_replay import forward_flow, runs_with
from profiler.records import Profile, StageRecord
from solvers import Chain, Problem, Schedule, Solution, replay, solve_chain
from solvers.chain.fixed_stages import expanded, restricted
from solvers.chain.lower_bound import bound_seconds
from solvers.chain.minimum_memory import shortage_of
from solvers.chain.segments import Segment, segmented_schedule
from solvers.problem.chain import RUNS, Action

SOLVER = "by hand"
_PROVEN = 1e-9  # relative distance from the bound that counts as none
_KEEP = StageDirective(kind="keep")


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
        profile: a Profile or the path of its file.
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
        ChoiceError: as ``resolve_for``.
        ValueError: a stage that cannot be recomputed, or a missing budget.
    """
    start = time.perf_counter()
    profile = given_profile(profile, "state")
    resolved = resolve_for(profile, rules_from(rules))
    profile = _with_choices(profile, resolved)
    chain = chain_of(profile)
    spans = _spans(profile, chain, resolved)

    def plan_within(planned_bytes: int | None) -> Plan:
        if not any(span.undecided for span in spans):
            return _fully_stated(profile, chain, spans, planned_bytes, start)
        if planned_bytes is None:
            raise ValueError(
                "rules: expected a budget for the stages left to the solver, got none; give one (--budget)"
            )
        problem = Problem(chain=chain, budget_bytes=planned_bytes)
        return _partly_stated(profile, spans, problem, solver, time_limit_seconds)

    left_free = headroom_from(headroom, profile)
    if budget is None:
        plan = plan_within(None)
        whole_bytes = left_free.budget_above(plan.budget_bytes)
        plan = replace(plan, budget_bytes=whole_bytes, headroom_bytes=whole_bytes - plan.budget_bytes)
    else:
        budget_bytes = parse_bytes(budget, whole_bytes=profile.unplanned_peak_bytes)
        plan = plan_with_headroom(budget_bytes, left_free, plan_within)
    return complete(replace(plan, stated=resolved.lines, solve_seconds=time.perf_counter() - start))


def resolve_for(profile: Profile, rules: Rules) -> ResolvedRules:
    """What rules state of the stages of a profile.

    Raises:
        ChoiceError: a name that matches nothing, rules that contradict each other, an op that must not run again, or
            ops of a stage that is not captured.
    """
    outside = {op.module for op in profile.op_records if op.place == "outside"}
    resolved = resolve_rules(rules, _named_stages(profile), outside)
    stages = [record for record in profile.stages if record.kind == "stage"]
    for record, directive in zip(stages, resolved.directives, strict=True):
        menu = profile.menus[record.menu] if record.menu >= 0 else None
        if directive.kind != "choice" or (menu is not None and menu.graph is not None and menu.options):
            continue
        why = record.reason or (menu.opaque if menu is not None else "")
        if profile.precision.endswith("compiled"):
            why = "the model is compiled, and compiled code shows no ops"
        remedy = "state it for the whole stage" if why else "profile with these rules (--rules, or rules=...)"
        raise ChoiceError(
            f"{directive.source}: only stages that were captured as a graph can run some of their ops again, and "
            f"{record.name!r} was not{f' ({why})' if why else ''}; {remedy}"
        )
    return resolved


def _fully_stated(
    profile: Profile, chain: Chain, spans: Sequence[Segment], budget_bytes: int | None, start: float
) -> Plan:
    """Everything is stated: the schedule is there, and the solver only bounds it."""
    schedule = _as_programs(profile, segmented_schedule(spans))
    replayed = replay(chain, schedule)
    budget_bytes = replayed.peak_bytes if budget_bytes is None else budget_bytes
    if replayed.peak_bytes > budget_bytes:
        raise Infeasible(
            minimum_budget_bytes=replayed.peak_bytes,
            reason=f"what is stated needs them: {shortage_of(chain, schedule).reason}",
            solver=SOLVER,
            budget_bytes=budget_bytes,
            solve_seconds=time.perf_counter() - start,
        )
    problem = Problem(chain=chain, budget_bytes=budget_bytes)
    solution = Solution(
        solver=SOLVER,
        status="feasible",
        schedule=schedule,
        peak_bytes=replayed.peak_bytes,
        seconds=replayed.seconds,
        lower_bound_seconds=min(solve_chain(problem).lower_bound_seconds, replayed.seconds),
        solve_seconds=0.0,
    )
    return plan_of(profile, problem, solution)


def _partly_stated(
    profile: Profile, spans: Sequence[Segment], problem: Problem, solver: str, time_limit_seconds: float | None
) -> Plan:
    """A part is stated: the solver plans for the chain in which that part is fixed."""
    seconds_outside_chain = profile.unplanned_seconds - problem.chain.unplanned_seconds
    stages = undecided_stages(profile)
    smaller = replace(
        problem,
        chain=restricted(problem.chain, spans),
        accepts=lambda schedule: can_carry_out(stages, expanded(schedule, spans)),
    )
    solved = solve_chain(smaller, solver=solver, time_limit_seconds=time_limit_seconds)
    solved = _with_proofs(solved, problem, spans)
    require_schedule(solved, problem.budget_bytes, f"{SOLVER} and {solver}", seconds_outside_chain)
    assert solved.schedule is not None
    schedule = _as_programs(profile, expanded(solved.schedule, spans))
    if replay(problem.chain, schedule).peak_bytes > problem.budget_bytes:
        schedule = expanded(solved.schedule, spans)
    solution = replace(solved, schedule=schedule, solver=f"{SOLVER} and {solved.solver}")
    plan = plan_of(profile, problem, solution)
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    return replace(plan, restricted=True)


def _as_programs(profile: Profile, schedule: Schedule) -> Schedule:
    """The schedule, in which captured stages that run again as a whole do so as programs: they cost less to call."""
    actions: list[Action] = []
    seen: set[int] = set()
    for action in schedule.actions:
        menu = profile.stages[action.stage].menu
        once = profile.menus[menu].once if menu >= 0 else None
        if action.kind in RUNS and action.option == 0 and action.stage in seen and once is not None:
            action = replace(action, option=1 + profile.menus[menu].options.index(once))
        if action.kind in RUNS:
            seen.add(action.stage)
        actions.append(action)
    return replace(schedule, actions=tuple(actions))


def _with_proofs(solved: Solution[Schedule], problem: Problem, spans: Sequence[Segment]) -> Solution[Schedule]:
    """The solution with claims that are proven of the chain without its shared tensors.

    The restricted chain may count those for longer than they are held.
    """
    if not problem.chain.shared:
        return solved
    fewest_bytes = restricted(replace(problem.chain, shared=()), spans)
    bound = bound_seconds(fewest_bytes, problem.budget_bytes)
    if solved.seconds is not None:
        status = "optimal" if solved.seconds <= bound * (1 + _PROVEN) else "feasible"
        return replace(solved, status=status, lower_bound_seconds=min(bound, solved.seconds))
    if math.isfinite(bound):
        return replace(solved, status="unknown", lower_bound_seconds=bound)
    assert solved.shortage is not None
    bound = bound_seconds(fewest_bytes, solved.shortage.minimum_budget_bytes)
    return replace(solved, status="infeasible", lower_bound_seconds=bound)


def _named_stages(profile: Profile) -> list[NamedStage]:
    return [
        NamedStage(name=record.name, parents=record.parents, ops=_ops(profile, record))
        for record in profile.stages
        if record.kind == "stage"
    ]


def _ops(profile: Profile, record: StageRecord) -> StageOps:
    if record.menu >= 0:
        menu = profile.menus[record.menu]
        return menu.ops if menu.graph is None else replace(forward_flow(menu.graph), modules=menu.ops.modules)
    return StageOps(ops=(), storages=(), modules=(("", record.module_class),))  # of a release without ops in profiles


def _with_choices(profile: Profile, resolved: ResolvedRules) -> Profile:
    """The profile with programs for what is stated of the ops of captured stages."""
    menus = [*profile.menus]
    stages = [record for record in profile.stages if record.kind == "stage"]
    for record, directive in zip(stages, resolved.directives, strict=True):
        graph = menus[record.menu].graph if record.menu >= 0 else None
        if directive.kind != "choice" or graph is None:
            continue
        runs = runs_with(graph, directive.rerun)
        if all(option.runs != runs for option in menus[record.menu].options):
            added = menus[record.menu].program(runs)
            menus[record.menu] = replace(menus[record.menu], options=(*menus[record.menu].options, added))
    return replace(profile, menus=tuple(menus))


def _spans(profile: Profile, chain: Chain, resolved: ResolvedRules) -> list[Segment]:
    """The chain cut by what is stated, and where a stage's input cannot come from the one before; what lies outside of
    stages is kept.
    """
    directives = iter(resolved.directives)
    spans: list[Segment] = []
    open_segment = False
    for k, record in enumerate(profile.stages):
        directive = next(directives) if record.kind == "stage" else _KEEP
        _check_recomputable(record, directive)
        if directive.kind == "segment" and open_segment and chain.stages[k].linked:
            spans[-1] = spans[-1]._replace(end=k + 1)
        else:
            spans.append(_span(profile, k, directive))
        open_segment = directive.kind == "segment" and not directive.ends_segment
    return spans


def _span(profile: Profile, k: int, directive: StageDirective) -> Segment:
    if directive.kind in ("recompute", "segment"):
        return Segment(k, k + 1)
    if directive.kind == "choice":
        return Segment(k, k + 1, option=_option(profile, profile.stages[k], directive))
    return Segment(k, k + 1, option=0, undecided=directive.kind == "solve")


def _check_recomputable(record: StageRecord, directive: StageDirective) -> None:
    if directive.kind in ("recompute", "segment") and not record.recomputable:
        reason = record.reason or "it does not repeat its result"
        raise ValueError(
            f"{directive.source}: expected stages that can be recomputed, got {record.name!r}: {reason}; keep it with "
            "a later rule"
        )


def _option(profile: Profile, record: StageRecord, directive: StageDirective) -> int:
    """The number of the program in which these ops run again."""
    menu = profile.menus[record.menu]
    assert menu.graph is not None
    runs = runs_with(menu.graph, directive.rerun)
    return 1 + next(number for number, option in enumerate(menu.options) if option.runs == runs)
