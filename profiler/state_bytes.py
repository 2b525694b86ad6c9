"""Bytes of model states in a profile."""

from __future__ import annotations

from profiler.records import Profile


def states_bytes(profile: Profile) -> int:
    """Bytes of the model states: parameters, buffers, gradients and what the optimizer keeps, all alive at once."""
    resident = profile.resident
    return resident.total - resident.inputs - resident.loop + made_gradient_bytes(profile)


def made_gradient_bytes(profile: Profile) -> int:
    """Of gradients that the step makes: what is alive after backward, as far as parameters can have it."""
    resident = profile.resident
    after = profile.optimizer.start_bytes if profile.optimizer.peak_bytes else profile.stages[0].backward.end_bytes
    most_bytes = resident.parameters + resident.other_parameters - resident.gradients
    return max(0, min(after - resident.total, most_bytes))
