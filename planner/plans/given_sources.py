"""The profile that a caller gives: itself, or the path of its file; other kinds are refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.plans.plan import Plan
from profiler.records import Profile


def given_profile(profile: Any, who: str) -> Profile:
    """The profile, read from its file where a path is given; ``who`` begins the message.

    Raises:
        ValueError: it is of another kind, or the file is no profile.
    """
    if isinstance(profile, Profile):
        return profile
    if isinstance(profile, (str, Path)):
        return Profile.load(profile)
    got = "None" if profile is None else f"a {type(profile).__name__}"
    raise ValueError(f"{who}: expected a Profile or the path of its file, got {got}; {_remedy(profile)}")


def _remedy(given: Any) -> str:
    if isinstance(given, Plan):
        return "pass the profile that it was made from"
    if hasattr(given, "model") and hasattr(given, "inputs"):  # a Workload; its class would load torch
        return "profile it first: profile = planner.profile(workload)"
    if hasattr(given, "named_parameters"):
        return "profile its step first: profile = planner.profile(planner.Workload(model=..., inputs=...))"
    return "make one with planner.profile"
