"""Solves a profile for a budget: the plan with its certificate, or why there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from planner.plans.call_programs import chain_with_any_programs, held_against_any_programs
from planner.plans.cost_model import chain_of, lone_chain_of
from planner.plans.exact_programs import faster_with_exact_programs, first_plan
from planner.plans.headroom import Headroom, headroom_from
from planner.plans.lowering import can_carry_out
from planner.plans.offload_request import Offload, OffloadMode, offload_from, usable_link
from planner.plans.plan import Interrupted, Plan, PlannedStage, chain_in
from planner.plans.refusals import (
    FEWER_STATES,
    Infeasible,
    never_rerun,
    obstacle_in_words,
    remedy_in_words,
    require_schedule,
)
from planner.plans.sources import given_profile
from planner.plans.stage_decisions import (
    accepted_by,
    undecided_stages,
    units_that_may_stay,
    with_decisions,
    with_units_gathered,
)
from planner.units import format_bytes, parse_bytes
from profiler.messages import tell
from profiler.records import MenuRecord, Profile
from solvers import Chain, Problem, Solution, replay, solve_chain
from solvers.chain.lower_bound import bound_seconds
from solvers.chain.micro_batches import Beside, solve_beside_others, with_others, without_others
from solvers.chain.persistent import shortage

if TYPE_CHECKING:
    from planner.distributed.ranks import Ranks

OFFLOAD_ONLY = "offload_only"
_SEARCH_FOR_PROGRAMS = ("auto", "rotor")  # solvers that search for programs that fit where those of the menus do not
Reshard = Literal["profiled", "solve"]
Numerics = Literal["eager", "compiled", "rounding"]
_WAYS = 8  # numbers of units that are tried, each with a chain to solve; a model has a dozen, or many equal ones
# So little leaves out the integer program for short chains, which proves the best plan and hardly ever betters it.
SEARCH_SECONDS = 1e-3
_PROVEN = 1e-9  # relative distance from the bound that counts as none
COMPARE_SECONDS = 10.0  # for ilp and for auto, where all solvers are compared
NO_LINK = "there is no link to host memory: run on a CUDA device, or give a speed, --offload gbps=25 (link_gbps=25)"


def solve(
    profile: Profile | str | Path,
    budget: str | int,
    *,
    solver: str = "auto",
    time_limit_seconds: float | None = None,
    offload: Offload | OffloadMode = "auto",
    headroom: str | int = 0,
    reshard: Reshard = "profiled",
    numerics: Numerics = "eager",
) -> Plan:
    """Choose what to keep, recompute and offload so that the step's true peak stays within ``budget``.

    Where ``torch.distributed`` is initialised for several ranks, all of them call this: the first one solves, and all
    get its plan. The budget is that of each device, and the predicted peak that of the worst rank. In a pipeline each
    rank solves for its own stage, and gets its own plan.

    Args:
        profile: a Profile, or the path of its file.
        budget: bytes, ``"8GiB"``, ``"512MiB"`` or ``"70%"`` of the unplanned peak.
        solver: a name of ``solvers.solver_names()``.
        time_limit_seconds: for solvers that search, and the programs of captured stages.
        offload: ``"auto"`` (where the profile has a link to host memory), ``"never"``, ``"only"``, or an ``Offload``
            that says how fast the link is and how much the host may hold.
        headroom: the part of the budget left to the device's allocator: bytes, or ``"5%"`` of the budget.
        reshard: whether stages that are units of ``fully_shard`` free their gathered parameters after forward:
            ``"profiled"``, as while profiling, or ``"solve"``: the solver may let some keep them, which saves one
            gather.
        numerics: ``"eager"``: bit for bit the values of the step without a plan; or ``"compiled"``: stages whose
            captured ops round differently from their own code (``MenuRecord.opaque`` says so) may run as programs, too;
            or ``"rounding"``: the head and the loss may also run in pieces, if the profile was made so.

    Returns:
        The plan, replayed in exact bytes, with its bound.

    Raises:
        Infeasible: no plan was found; its status says whether it is proven that none fits, and it carries the
            smallest budget known to be enough. On all ranks.
        RankError: one rank failed, or ranks gave different profiles or budgets.
        ValueError: not a profile, an unknown solver, an invalid budget or headroom, or offloading requested although it
            is impossible.
    """
    tell("planner", f"solving for a budget of {format_bytes(budget) if isinstance(budget, int) else budget}")
    profile = given_profile(profile, "solve")

    def find() -> Plan:
        return find_plan(
            profile,
            budget,
            solver=solver,
            time_limit_seconds=time_limit_seconds,
            offload=offload,
            headroom=headroom,
            reshard=reshard,
            numerics=numerics,
        )

    ranks = _ranks_if_any()
    if ranks is None:
        plan = find()
    else:
        with ranks.together("solve"):
            if profile.in_flight:
                plan = find()
            else:
                ranks.check_same("solve", {"profile": profile.fingerprint, "budget": budget})
                plan = ranks.made_by_rank0(find)
    tell("planner", plan.in_one_line())
    return plan


def _ranks_if_any() -> Ranks | None:
    torch_distributed = sys.modules.get("torch.distributed")  # Solving from a file loads no torch.
    if torch_distributed is None or not torch_distributed.is_available() or not torch_distributed.is_initialized():
        return None
    from planner.distributed.ranks import current_ranks

    return current_ranks()


def find_plan(
    profile: Profile,
    budget: str | int,
    *,
    solver: str = "auto",
    time_limit_seconds: float | None = None,
    offload: Offload | OffloadMode = "auto",
    headroom: str | int = 0,
    reshard: Reshard = "profiled",
    numerics: Numerics = "eager",
) -> Plan:
    """Solve in this process, and say nothing of it; arguments and errors are those of ``solve``."""
    check_numerics(numerics)
    try:
        budget_bytes = parse_bytes(budget, whole_bytes=profile.unplanned_peak_bytes)
        left_free = headroom_from(headroom, profile)
        request = offload_from(offload)

        def plan_from(profile: Profile) -> Plan:
            if numerics != "eager":
                profile = replace(profile, menus=tuple(menu.compiled or menu for menu in profile.menus))
            ways = [()] if reshard == "profiled" else _ways_to_gather(profile)
            return complete(_solved(profile, budget_bytes, solver, time_limit_seconds, request, left_free, ways))

        if numerics == "rounding":
            return _with_pieces(profile, plan_from)
        try:
            return plan_from(profile)
        except Infeasible as refusal:
            raise _pieces_named(refusal, profile) from refusal
    except Infeasible as refusal:
        if not str(budget).strip().endswith("%"):
            raise
        raise replace(refusal, unplanned_peak_bytes=profile.unplanned_peak_bytes) from refusal


def _solved(
    profile: Profile,
    budget_bytes: int,
    solver: str,
    time_limit_seconds: float | None,
    offload_request: Offload,
    headroom: Headroom,
    ways: Sequence[tuple[int, ...]],
) -> Plan:
    link, why = usable_link(offload_request, chain_of(profile), profile.link)
    method = solver_for(offload_request, solver)
    accepts = accepted_by(profile)

    def plan_with(profile: Profile, gathered: tuple[int, ...], planned_bytes: int) -> Plan:
        chain = chain_of(profile)
        seconds_outside_chain = profile.unplanned_seconds - chain.unplanned_seconds
        with_units = with_units_gathered(chain, profile, gathered)
        problem = Problem(chain=with_units, budget_bytes=planned_bytes, link=link, accepts=accepts)
        if profile.in_flight:
            problem = replace(problem, chain=lone_chain_of(profile))
        numbers = [stage.menu for stage in profile.stages]
        try:
            problem, solution = _feasible_with_programs(
                problem, numbers, profile.menus, profile.in_flight, method, time_limit_seconds, seconds_outside_chain
            )
        except Infeasible as refusal:
            raise explained(refusal, profile) from refusal
        only = method == OFFLOAD_ONLY
        return plan_of(profile, problem, solution, no_offload=why, offload_only=only, gathered=gathered)

    def plan_gathering(gathered: tuple[int, ...], planned_bytes: int) -> Plan:
        def solved(profile: Profile) -> Plan:
            return plan_with(profile, gathered, planned_bytes)

        if method in _SEARCH_FOR_PROGRAMS:
            plan, chosen = first_plan(profile, solved, planned_bytes, time_limit_seconds)
        else:
            plan, chosen = solved(profile), profile
        return faster_with_exact_programs(plan, chosen, solved, time_limit_seconds)

    def plan_within(planned_bytes: int) -> Plan:
        plan = plan_gathering(ways[0], planned_bytes)
        others = [partial(plan_gathering, way, planned_bytes) for way in ways[1:]]
        return _fastest(plan, profile, others) if others and not plan.interrupted else plan

    return plan_with_headroom(budget_bytes, headroom, plan_within)


def least_budget_bytes(profile: Profile) -> int:
    """The smallest budget of any plan of a profile."""
    return shortage(chain_of(profile)).minimum_budget_bytes


def check_numerics(numerics: str) -> None:
    """Refuse what is no kind of numerics; raises ValueError."""
    if numerics not in get_args(Numerics):
        raise ValueError(f"numerics: expected one of {', '.join(get_args(Numerics))}, got {numerics!r}")


def _with_pieces(profile: Profile, plan_from: Callable[[Profile], Plan]) -> Plan:
    """The faster of the plans with the head in pieces and without; the first on equal terms is the one without.

    Args:
        profile: with the same step in pieces in it, where that was measured.
        plan_from: makes the plan of a profile; raises Infeasible.

    Raises:
        Infeasible: neither fits; says what the smaller of the two takes.
    """
    plans, refusals = list[Plan](), list[Infeasible]()
    for each in (profile, *profile.in_pieces):
        try:
            plans.append(_beside(profile, each, plan_from(each)))
        except Infeasible as refusal:
            refusals.append(refusal)
    if not plans:
        raise min(refusals, key=lambda refusal: refusal.minimum_budget_bytes)
    best = min(plans, key=lambda plan: plan.predicted_seconds)
    bound = min(plan.lower_bound_seconds for plan in plans)
    gap = (best.predicted_seconds - bound) / best.predicted_seconds if best.predicted_seconds > 0 else 0.0
    return replace(
        best,
        lower_bound_seconds=bound,
        gap=gap,
        status=best.status if bound == best.lower_bound_seconds else "feasible",
    )


def _beside(profile: Profile, measured: Profile, plan: Plan) -> Plan:
    """The plan of a step, as one that may take the place of the step of a profile."""
    return replace(
        plan,
        profile_fingerprint=profile.fingerprint,
        unplanned_peak_bytes=profile.unplanned_peak_bytes,
        unplanned_seconds=profile.unplanned_seconds,
        saved_seconds=plan.saved_seconds + profile.unplanned_seconds - measured.unplanned_seconds,
    )


def _pieces_named(refusal: Infeasible, profile: Profile) -> Infeasible:
    """A refusal that says first what would fit if the head ran in pieces, where that is known or likely."""
    if not profile.in_pieces:
        if not profile.heads:
            return refusal
        head = profile.heads[0]
        hint = (
            f"let {head.name} and the loss run in pieces, so that its {format_bytes(head.output_bytes)} of output "
            "never exist at once: profile and solve with --allow-rounding (numerics='rounding')"
        )
        return replace(refusal, remedy=f"{refusal.remedy}; or {hint}")
    least_bytes = min(map(least_budget_bytes, profile.in_pieces))
    if least_bytes >= refusal.minimum_budget_bytes:
        return refusal
    pieces = f"in pieces {least_bytes} bytes ({format_bytes(least_bytes)}) are enough"
    fits = "solve with --allow-rounding (numerics='rounding'), or " if least_bytes <= refusal.budget_bytes else ""
    return replace(refusal, reason=f"{pieces}; without pieces, {refusal.reason}", remedy=f"{fits}{refusal.remedy}")


def _ways_to_gather(profile: Profile) -> list[tuple[int, ...]]:
    """How many of the last units may keep their parameters: none, and about eight numbers up to all."""
    units = units_that_may_stay(profile)
    numbers = sorted({round(len(units) * part / _WAYS) for part in range(_WAYS + 1)})
    return [tuple(sorted(units[:number])) for number in numbers]


def _fastest(plan: Plan, profile: Profile, others: Sequence[Callable[[], Plan]]) -> Plan:
    """The fastest of the plan in which no unit keeps its parameters, and of others as far as there are any.

    Whatever stays gathered, a schedule takes no fewer bytes, and spares no more seconds than those of all gathers.
    """
    plans = [plan]
    for make in others:
        try:
            plans.append(make())
        except Infeasible:  # The more stays, the more it needs.
            break
        if plans[-1].interrupted:
            break
    best = min(plans, key=lambda each: each.predicted_seconds)
    gathers_seconds = sum(profile.stages[k].gather_seconds for k in units_that_may_stay(profile))
    bound = min(best.predicted_seconds, max(0.0, plan.lower_bound_seconds - gathers_seconds))
    gap = (best.predicted_seconds - bound) / best.predicted_seconds if best.predicted_seconds > 0 else 0.0
    interrupted = plans[-1].interrupted
    return replace(best, status="feasible", lower_bound_seconds=bound, gap=gap, interrupted=interrupted)


def explained(refusal: Infeasible, profile: Profile) -> Infeasible:
    """A refusal with what of the profile forces it, and what helps then."""
    if excess := _states_excess(profile, refusal.budget_bytes):
        return replace(refusal, reason=f"{refusal.reason}, and {excess}", remedy=FEWER_STATES)
    left_out = never_rerun(profile)
    remedies = [f"{remedy}, and profile again"] if (remedy := remedy_in_words(left_out)) else []
    return replace(
        refusal,
        reason=f"{refusal.reason}, and {obstacle_in_words(left_out)}" if left_out else refusal.reason,
        remedy="; or ".join([*remedies, "raise the budget"]) if remedies else refusal.remedy,
        left_out=left_out,
    )


def quick_plan(profile: Profile, budget_bytes: int, offload_request: Offload) -> Plan:
    """A plan by the method that weighs most in little time; raises Infeasible."""
    solver = "auto" if offload_request.mode == "only" else "rotor"
    return find_plan(profile, budget_bytes, solver=solver, offload=offload_request)


def replan(plan: Plan, budget_bytes: int, *, solver: str = "auto", time_limit_seconds: float | None = None) -> Plan:
    """Solve the plan's own chain again, with the programs of stages that it has, over the same link.

    Args:
        plan: with its chain; nothing of it was stated manually.
        budget_bytes: that the plan may use; the headroom of ``plan`` comes on top.
        solver: a name of ``solvers.solver_names()``. A plan that was to recompute nothing stays one.
        time_limit_seconds: for solvers that search.

    Raises:
        Infeasible: nothing fits; carries the smallest budget that would, without headroom.
        Interrupted: by Ctrl-C; carries the best plan until then.
        ValueError: a plan without its chain, or a manual one.
    """
    if plan.stated:
        raise ValueError(
            "a manual plan: expected one that was solved for, as another budget needs another statement; "
            "state and solve again"
        )
    chain = chain_in(plan)
    seconds_outside_chain = plan.seconds_outside(chain)
    accepts = partial(can_carry_out, plan.stages)
    problem = Problem(chain=chain, budget_bytes=budget_bytes, link=plan.link, accepts=accepts)
    method = OFFLOAD_ONLY if plan.offload_only else solver
    if plan.in_flight:
        problem = replace(problem, chain=without_others(chain, plan.in_flight, plan.schedule))
    numbers = [stage.menu for stage in plan.stages]
    problem, solution = _feasible_with_programs(
        problem, numbers, plan.menus, plan.in_flight, method, time_limit_seconds, seconds_outside_chain
    )
    fields = schedule_fields(problem, solution, plan.stages, plan.menus, seconds_outside_chain)
    return complete(replace(plan, budget_bytes=budget_bytes + plan.headroom_bytes, chain=problem.chain, **fields))


def complete(plan: Plan) -> Plan:
    """The plan itself, where its search went to its end; raises Interrupted with it where Ctrl-C ended that."""
    if plan.interrupted:
        raise Interrupted(plan)
    return plan


def repriced(plan: Plan, chain: Chain, *, lower_bound_seconds: float = 0.0) -> Plan:
    """The same schedule on a chain with other seconds: what it foretells then.

    Args:
        plan: with its schedule.
        chain: the same stages, options and bytes.
        lower_bound_seconds: of any plan of that chain within the budget; 0 where none is known.
    """
    seconds_outside_chain = plan.seconds_outside(chain)
    problem = Problem(chain=chain, budget_bytes=plan.budget_bytes - plan.headroom_bytes, link=plan.link)
    solution = Solution(
        schedule=plan.schedule,
        status="feasible",
        solver=plan.solver,
        lower_bound_seconds=max(0.0, lower_bound_seconds - seconds_outside_chain),
        solve_seconds=plan.solve_seconds,
    )
    fields = schedule_fields(problem, solution, plan.stages, plan.menus, seconds_outside_chain)
    return replace(plan, chain=chain, **fields)


def why_no_offload(offload_request: Offload, profile: Profile) -> str:
    """Why nothing can be sent to host memory; empty where it can."""
    if offload_request.mode == "never":
        return "nothing is to be sent (--offload no)"
    link, why = usable_link(offload_request, chain_of(profile), profile.link)
    return "" if link is not None else why or NO_LINK


def _states_excess(profile: Profile, budget_bytes: int) -> str:
    """By how much the model states alone are above a budget, in words; empty where they are not."""
    needed_bytes = profile.states_bytes
    if needed_bytes <= budget_bytes:
        return ""
    return (
        f"the model states alone (parameters, gradients, optimizer: {format_bytes(needed_bytes)}) are "
        f"{format_bytes(needed_bytes - budget_bytes)} above the budget"
    )


def plan_with_headroom(budget_bytes: int, headroom: Headroom, plan_within: Callable[[int], Plan]) -> Plan:
    """The plan that ``plan_within`` finds for what the headroom leaves of a budget; it states both.

    Raises:
        Infeasible: as ``plan_within``, in terms of the whole budget.
        ValueError: nothing of the budget is left.
    """
    headroom_bytes = headroom.of(budget_bytes)
    if not headroom_bytes:
        return plan_within(budget_bytes)
    left_bytes = headroom.left_of(budget_bytes)
    try:
        plan = plan_within(left_bytes)
        return replace(plan, budget_bytes=budget_bytes, headroom_bytes=headroom_bytes)
    except Infeasible as refusal:
        least_bytes = headroom.budget_above(refusal.minimum_budget_bytes)
        reason = f"{refusal.reason}; {format_bytes(headroom.of(least_bytes))} of it is headroom"
        raise replace(refusal, reason=reason, minimum_budget_bytes=least_bytes, budget_bytes=budget_bytes) from refusal


def solver_for(offload_request: Offload, solver: str) -> str:
    """The solver to ask: where nothing may be recomputed it follows from that."""
    if offload_request.mode != "only" or solver == OFFLOAD_ONLY:
        return solver
    if solver != "auto":
        raise ValueError(
            f"offload: expected solver 'auto' or {OFFLOAD_ONLY!r} where nothing may be recomputed, got {solver!r}; "
            "leave the solver out"
        )
    return OFFLOAD_ONLY


def feasible_solution(
    problem: Problem, solver: str, time_limit_seconds: float | None, seconds_outside_chain: float = 0.0
) -> Solution:
    """The solver's answer for a chain; raises Infeasible where it has none.

    ``seconds_outside_chain`` of a step lie outside the chain: a refusal's bound has them.
    """
    solution = solve_chain(problem, solver=solver, time_limit_seconds=time_limit_seconds)
    return require_schedule(solution, problem.budget_bytes, solver, seconds_outside_chain)


def _feasible_with_programs(
    problem: Problem,
    numbers: Sequence[int],
    menus: Sequence[MenuRecord],
    in_flight: Beside,
    solver: str,
    time_limit_seconds: float | None,
    seconds_outside_chain: float,
) -> tuple[Problem, Solution]:
    """The problem that was solved and the solver's answer; a refusal's claims hold for all programs of the stages.

    Args:
        problem: of one micro-batch alone, where several are ``in_flight``.
        numbers: of each stage that of its menu; -1 for none.
        menus, in_flight: of the stages.
        solver, time_limit_seconds, seconds_outside_chain: as ``feasible_solution`` takes them.
    """
    try:
        if in_flight:
            return feasible_beside_others(problem, in_flight, solver, time_limit_seconds)
        return problem, feasible_solution(problem, solver, time_limit_seconds, seconds_outside_chain)
    except Infeasible as refusal:
        others_keep_nothing = replace(problem, chain=with_others(problem.chain, in_flight, kept_bytes=0))
        raise held_against_any_programs(
            refusal, others_keep_nothing, numbers, menus, seconds_outside_chain
        ) from refusal


def feasible_beside_others(
    problem: Problem, beside: Beside, solver: str, time_limit_seconds: float | None
) -> tuple[Problem, Solution]:
    """The same for one micro-batch of several that are in flight: ``auto`` asks its quick methods alone."""
    seconds = SEARCH_SECONDS if solver == "auto" and time_limit_seconds is None else time_limit_seconds
    problem, solution = solve_beside_others(problem, beside, solver, seconds)
    return problem, require_schedule(solution, problem.budget_bytes, solver)


def plan_of(
    profile: Profile,
    problem: Problem,
    solution: Solution,
    *,
    no_offload: str = "",
    offload_only: bool = False,
    gathered: Sequence[int] = (),
) -> Plan:
    """Bind a feasible solution to the profile's stage names and state its claims.

    ``gathered``: stages that keep their parameters so in the problem's chain.
    """
    stages = undecided_stages(profile, gathered)
    saved_seconds = chain_of(profile).unplanned_seconds - problem.chain.unplanned_seconds if gathered else 0.0
    # Seconds outside forward and backward (optimizer) are those of the unplanned step.
    seconds_outside_chain = profile.unplanned_seconds - saved_seconds - problem.chain.unplanned_seconds
    return Plan(
        model_class=profile.model_class,
        target=profile.target,
        profile_fingerprint=profile.fingerprint,
        input_shapes=profile.input_shapes,
        device=profile.device,
        precision=profile.precision,
        budget_bytes=problem.budget_bytes,
        unplanned_peak_bytes=profile.unplanned_peak_bytes,
        unplanned_seconds=profile.unplanned_seconds,
        resident_bytes=profile.resident.total,
        menus=profile.menus,
        chain=problem.chain,
        resident=profile.resident,
        left_out=never_rerun(profile),
        link=problem.link,
        no_offload=no_offload,
        offload_only=offload_only,
        unseen=profile.unseen,
        unsteady=profile.unsteady,
        batch_sized=profile.batch_sized,
        frugal=profile.frugal,
        saved_seconds=saved_seconds,
        pieces=profile.pieces,
        estimate=profile.estimate,
        in_flight=profile.in_flight,
        forward_nodes=profile.forward_nodes,
        **schedule_fields(problem, solution, stages, profile.menus, seconds_outside_chain),
    )


def schedule_fields(
    problem: Problem,
    solution: Solution,
    stages: Sequence[PlannedStage],
    menus: Sequence[MenuRecord],
    seconds_outside_chain: float,
) -> dict[str, Any]:
    """The fields of a plan that follow from its schedule; what the schedule decides of the stages is filled in."""
    assert solution.schedule is not None
    replayed = replay(problem.chain, solution.schedule, problem.link)
    stages = with_decisions(stages, menus, problem.chain, solution.schedule, replayed)
    seconds = replayed.seconds + seconds_outside_chain
    bound, status = min(seconds, solution.lower_bound_seconds + seconds_outside_chain), solution.status
    any_programs = chain_with_any_programs(problem.chain, [stage.menu for stage in stages], menus)
    if any_programs is not problem.chain:
        least_seconds = bound_seconds(any_programs, problem.budget_bytes, problem.link) + seconds_outside_chain
        bound = min(bound, least_seconds)
        status = status if bound >= seconds * (1 - _PROVEN) else "feasible"
    return {
        "solver": solution.solver,
        "status": status,
        "predicted_peak_bytes": replayed.peak_bytes,
        "predicted_seconds": seconds,
        "recomputed_seconds": sum(stage.extra_seconds for stage in stages),
        "recomputed_ops": sum(stage.extra_ops for stage in stages),
        "lower_bound_seconds": bound,
        "gap": max(0.0, (seconds - bound) / seconds) if seconds > 0 else 0.0,
        "solve_seconds": solution.solve_seconds,
        "interrupted": solution.interrupted,
        "stages": stages,
        "schedule": solution.schedule,
        "host_bytes": replayed.host_peak_bytes,
        "stall_seconds": replayed.stall_seconds,
    }
