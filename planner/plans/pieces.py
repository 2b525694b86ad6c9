"""Weighs a step whose head runs in pieces against the step as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.plans.cost_model import chain_of
from planner.plans.plan import Plan
from planner.plans.refusals import NoPlan
from planner.units import format_bytes
from profiler.records import Profile
from solvers.chain.minimum_memory import shortage


def with_pieces(profile: Profile, plan_from: Callable[[Profile], Plan]) -> Plan:
    """The faster of the plans with the head in pieces and without; the first on equal terms is the one without.

    Args:
        profile: with the same step in pieces in it, where that was measured.
        plan_from: makes the plan of a profile; raises NoPlan.

    Raises:
        NoPlan: neither fits; says what the smaller of the two takes.
    """
    plans, refusals = list[Plan](), list[NoPlan]()
    for each in (profile, profile.in_pieces):
        if each is not None:
            try:
                plans.append(_beside(profile, each, plan_from(each)))
            except NoPlan as refusal:
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


def pieces_named(refusal: NoPlan, profile: Profile) -> NoPlan:
    """A refusal that says first what would fit if the head ran in pieces, where that is known or likely."""
    if profile.in_pieces is None:
        if not profile.heads:
            return refusal
        head = profile.heads[0]
        hint = (
            f"profile and solve with numerics='rounding' (the {format_bytes(head.output_bytes)} of {head.name}'s output "
            "are then made in pieces)"
        )
        return replace(refusal, remedy=f"{refusal.remedy}; or {hint}")
    least_bytes = shortage(chain_of(profile.in_pieces)).minimum_budget_bytes
    if least_bytes >= refusal.minimum_budget_bytes:
        return refusal
    assert profile.in_pieces.pieces is not None
    pieces = (
        f"with {profile.in_pieces.pieces.head} and the loss in pieces (numerics='rounding') {least_bytes} bytes "
        f"({format_bytes(least_bytes)}) are enough"
    )
    fits = "solve with numerics='rounding'; or " if least_bytes <= refusal.budget_bytes else ""
    return replace(refusal, reason=f"{pieces}; without, {refusal.reason}", remedy=f"{fits}{refusal.remedy}")
