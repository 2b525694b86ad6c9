"""A plan of single ops held against its own run: its true peak measured, and solved again for less until it is kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from planner.compiled.applying import Backend
from planner.distributed.collective import apply, measure, profile as profiled
from planner.distributed.solving import solve
from planner.plans.graph_plan import GraphPlan
from planner.plans.graph_solving import first_difference
from planner.plans.offload_request import link_record
from planner.plans.refusals import NoPlan, NothingFound
from planner.runtime.model_match import PlanMismatch, check_precision
from planner.runtime.plan_checks import check_device, check_inputs
from planner.units import counted, format_bytes
from profiler.graph_profile import GraphProfile
from profiler.workload.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """A plan and what a step under it took.

    Attributes:
        plan: that was run; its headroom is what the solver could not use.
        peak_bytes: the true peak of the whole step.
        seconds: of the whole step.
    """

    plan: GraphPlan
    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphVerification:
    """A plan whose measured peak is within its budget.

    Attributes:
        plan: the last one that was run.
        rounds: every plan that was run, in order.
    """

    plan: GraphPlan
    rounds: tuple[MeasuredPlan, ...]


def verify_graph_plan(
    workload: Workload,
    plan: GraphPlan,
    *,
    backend: Backend = "eager",
    profile: GraphProfile | None = None,
    solver: str = "auto",
    time_limit_seconds: float | None = None,
) -> GraphVerification:
    """Run a plan; while its measured peak is above its budget, solve for less: by the excess, or twice the last cut.

    Args:
        workload: the training step. It is left as it was found.
        plan: for it.
        backend: that will run it, as for ``planner.apply``.
        profile: that the plan was made from; None to profile anew where it is needed.
        solver, time_limit_seconds: as for ``planner.solve``.

    Raises:
        PlanMismatch: the plan is for another model or another precision, or the profile of another step.
        NothingFound: no plan keeps the budget; carries the smallest peak that was measured.
        ProfileError: the step fails.
        ValueError: the batch or the device is another one.
    """
    check_device(workload, plan)
    check_inputs(workload, plan)
    check_precision(workload.model, plan.precision, workload.autocast)
    rounds = [_run(workload, plan, backend)]
    cut_bytes = 0
    while rounds[-1].peak_bytes > plan.budget_bytes:
        last = rounds[-1]
        profile = replace(_of_same_step(profile or profiled(workload, graph=True), plan), link=link_record(plan.link))
        cut_bytes = max(last.peak_bytes - plan.budget_bytes, 2 * cut_bytes)
        within = partial(
            solve,
            profile,
            plan.budget_bytes,
            solver=solver,
            time_limit_seconds=time_limit_seconds,
            offload="only" if plan.offload_only else "auto",
        )
        smaller = _smaller(within, last.plan, last.plan.predicted_peak_bytes - cut_bytes)
        if smaller is None:
            raise _refusal(rounds, backend, solver)
        rounds.append(_run(workload, smaller, backend))
    return GraphVerification(plan=rounds[-1].plan, rounds=tuple(rounds))


def _run(workload: Workload, plan: GraphPlan, backend: Backend) -> MeasuredPlan:
    with apply(workload.model, plan, backend=backend):
        measured = measure(workload)
    return MeasuredPlan(plan=plan, peak_bytes=measured.peak_bytes, seconds=measured.seconds)


def _of_same_step(profile: GraphProfile, plan: GraphPlan) -> GraphProfile:
    if differs := first_difference(plan.graph, profile.graph):
        raise PlanMismatch(
            f"verify: expected the profile that the plan was made from, got ops that differ: {differs}; solve that one"
        )
    return profile


def _smaller(within: partial[GraphPlan], last: GraphPlan, planned_bytes: int) -> GraphPlan | None:
    """A plan with a smaller peak than the last one's, of at most so many bytes or the fewest that can be had."""
    budget_bytes = last.budget_bytes
    try:
        return within(headroom=budget_bytes - max(1, planned_bytes))
    except NoPlan as refusal:
        least_bytes = refusal.minimum_budget_bytes - (budget_bytes - max(1, planned_bytes))
    if least_bytes >= last.predicted_peak_bytes:
        return None
    try:
        plan = within(headroom=budget_bytes - least_bytes)
    except NoPlan:
        return None
    return plan if plan.predicted_peak_bytes < last.predicted_peak_bytes else None


def _refusal(rounds: list[MeasuredPlan], backend: Backend, solver: str) -> NothingFound:
    best = min(rounds, key=lambda each: each.peak_bytes)
    reason = (
        f"of {counted(len(rounds), 'plan')} run with backend={backend!r}, the smallest measured peak, of a plan for "
        f"{format_bytes(best.plan.predicted_peak_bytes)}"
    )
    return NothingFound(
        minimum_budget_bytes=best.peak_bytes, reason=reason, solver=solver, budget_bytes=best.plan.budget_bytes
    )
