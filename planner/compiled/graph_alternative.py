"""What the same step as one graph of ops would need, where plans of stages are of no use."""

from __future__ import annotations

from dataclasses import replace

from planner.plans.graph_solving import solve_graph_profile
from planner.plans.refusals import NoPlan
from profiler.measurement.measuring import Progress
from profiler.progress import tell
from profiler.records import Profile
from profiler.workload.restoring import RestoreError
from profiler.workload.workload import Workload

_SOLVE_SECONDS = 5.0


def with_graph_alternative(profile: Profile, workload: Workload, progress: Progress | None = None) -> Profile:
    """The profile with the smallest budget of a plan of single ops, where all of the model is one stage."""
    if profile.frugal or len(profile.stages) > 1:
        return profile
    from profiler.whole.graph_profiling import profile_graph  # It loads what torch.compile is made of.

    try:
        graph_profile = profile_graph(workload, progress)
        solve_graph_profile(graph_profile, 1, time_limit_seconds=_SOLVE_SECONDS)
    except NoPlan as refusal:
        if refusal.minimum_budget_bytes < profile.unplanned_peak_bytes:
            return replace(profile, whole_graph_bytes=refusal.minimum_budget_bytes)
    except RestoreError:  # The model is not as it was: that is said, whatever it was tried for.
        raise
    except Exception as error:  # noqa: BLE001 - user code and torch's compiler run here; the profile stands without it.
        tell("planner", f"the step was not planned as one graph of ops: {type(error).__name__}: {error}")
    return profile
