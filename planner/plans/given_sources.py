"""What a caller gives: an object, or the path of its JSON file; other kinds are refused in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from planner.plans.plan import Plan
from profiler.records import Profile

Given = TypeVar("Given", Profile, Plan)


def object_or_file(given: Any, kind: type[Given], who: str, remedy_for: Callable[[Any], str]) -> Given:
    """An object of a kind, read from its file where a path is given.

    Args:
        given: the object or the path.
        kind: what is expected.
        who: begins the message.
        remedy_for: says what to do about an object of another kind; ends the message.

    Raises:
        ValueError: it is of another kind, or the file holds another thing.
    """
    if isinstance(given, kind):
        return given
    if isinstance(given, (str, Path)):
        return kind.load(given)
    raise ValueError(
        f"{who}: expected a {kind.__name__} or the path of its file, got {type_in_words(given)}; {remedy_for(given)}"
    )


def type_in_words(value: Any) -> str:
    """The type of a value, for a message."""
    return "None" if value is None else f"a {type(value).__name__}"


def given_profile(profile: Any, who: str) -> Profile:
    """The profile, read from its file where a path is given; ``who`` begins the message.

    Raises:
        ValueError: it is of another kind, or the file is no profile.
    """
    return object_or_file(profile, Profile, who, _remedy)


def _remedy(given: Any) -> str:
    if isinstance(given, Plan):
        return "pass the profile that it was made from"
    if hasattr(given, "model") and hasattr(given, "inputs"):  # a Workload; its class would load torch
        return "profile it first: profile = planner.profile(workload)"
    if hasattr(given, "named_parameters"):
        return "profile its step first: profile = planner.profile(planner.Workload(model=..., inputs=...))"
    return "make one with planner.profile"
