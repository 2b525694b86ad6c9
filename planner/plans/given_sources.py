"""What a caller gives: an object, or the path of its JSON file; other kinds are refused in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from planner.plans.graph_plan import GraphPlan
from planner.plans.plan import Plan
from planner.plans.plan_claims import FORMAT, VERSION
from profiler.graph_profile import GRAPH_KIND, GraphProfile
from profiler.json_files import read_document
from profiler.records import FORMAT as PROFILE_FORMAT, VERSION as PROFILE_VERSION, Profile

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


def plan_from_file(path: str | Path) -> Plan | GraphPlan:
    """A plan of either kind.

    Raises:
        ValueError: as ``Plan.load``.
    """
    return plan_from(read_document(path, {FORMAT: VERSION}), str(path))


def plan_from(document: Mapping[str, Any], where: str) -> Plan | GraphPlan:
    """The plan of a file's document; ``where`` names it in errors."""
    kind = GraphPlan if document.get("kind") == GRAPH_KIND else Plan
    return kind.from_document(document, where)


def profile_of_either_kind(profile: Any, who: str) -> Profile | GraphProfile:
    """The profile, of stages or of a graph, read from its file where a path is given; ``who`` begins the message.

    Raises:
        ValueError: as ``given_profile``.
    """
    if isinstance(profile, GraphProfile):
        return profile
    if not isinstance(profile, (str, Path)):
        return given_profile(profile, who)
    return profile_from(read_document(profile, {PROFILE_FORMAT: PROFILE_VERSION}), str(profile))


def profile_from(document: Mapping[str, Any], where: str) -> Profile | GraphProfile:
    """The profile of a file's document; ``where`` names it in errors."""
    kind = GraphProfile if document.get("kind") == GRAPH_KIND else Profile
    return kind.from_document(document, where)


def _remedy(given: Any) -> str:
    if isinstance(given, Plan):
        return "pass the profile that it was made from"
    if isinstance(given, GraphProfile):
        return "profile stages for that: planner.profile(workload)"
    if hasattr(given, "model") and hasattr(given, "inputs"):  # a Workload; its class would load torch
        return "profile it first: profile = planner.profile(workload)"
    if hasattr(given, "named_parameters"):
        return "profile its step first: profile = planner.profile(planner.Workload(model=..., inputs=...))"
    return "make one with planner.profile"
