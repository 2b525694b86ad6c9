"""What the same step as one graph of ops would need, where plans of stages are of little use."""

from __future__ import annotations

from dataclasses import replace

from planner.plans.graph_solving import solve_graph_profile
from planner.plans.refusals import NoPlan
from planner.plans.solving import solve
from profiler.measurement.measuring import Progress
from profiler.records import Profile
from profiler.workload.workload import Workload

_LITTLE = 0.8  # of the unplanned peak: a plan of stages that needs more saves little
_MOST_STAGES = 16  # of a chain that may be of little use: longer ones have a plan, and are long to solve
_SOLVE_SECONDS = 5.0


def with_graph_alternative(profile: Profile, workload: Workload, progress: Progress | None = None) -> Profile:
    """The profile with the smallest budget of a plan of single ops, where its own plans save little."""
    resident_bytes, peak_bytes = profile.resident.total, profile.unplanned_peak_bytes
    if profile.frugal or len(profile.stages) > _MOST_STAGES or 2 * resident_bytes > peak_bytes:
        return profile
    least_bytes = _least_bytes(profile)
    if least_bytes <= _LITTLE * peak_bytes:
        return profile
    from profiler.capture.graph_profiling import profile_graph  # It loads what torch.compile is made of.

    try:
        graph_profile = profile_graph(workload, progress)
        solve_graph_profile(graph_profile, 1, time_limit_seconds=_SOLVE_SECONDS)
    except NoPlan as refusal:
        if refusal.minimum_budget_bytes < least_bytes:
            return replace(profile, whole_graph_bytes=refusal.minimum_budget_bytes)
    except ValueError:  # It is no single graph: there is no other plan of it.
        pass
    return profile


def _least_bytes(profile: Profile) -> int:
    try:
        return solve(profile, 1, solver="rotor").predicted_peak_bytes
    except NoPlan as refusal:
        return refusal.minimum_budget_bytes
