"""Reads the sources that callers give: an object or the path of its file, and files of any kind of problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from planner.plans.plan import Plan
from profiler.json_files import read_document
from profiler.records import FORMAT as PROFILE_FORMAT, VERSION as PROFILE_VERSION, Profile
from solvers.problem.chain import FORMAT as CHAIN_FORMAT, VERSION as CHAIN_VERSION, Chain
from solvers.problem.graph import FORMAT as GRAPH_FORMAT, VERSION as GRAPH_VERSION, Graph

Given = TypeVar("Given", Profile, Plan)
Solvable = TypeVar("Solvable", Chain, Graph)
Source: TypeAlias = Profile | Chain | Graph
FORMATS = {PROFILE_FORMAT: PROFILE_VERSION, CHAIN_FORMAT: CHAIN_VERSION, GRAPH_FORMAT: GRAPH_VERSION}


def object_or_file(given: Any, kind: type[Given], who: str, remedy_for: Callable[[Any], str]) -> Given:
    """Returns an object of a kind, read from its file where a path is given.

    Args:
        given: the object or the path.
        kind: the expected type.
        who: the beginning of the message.
        remedy_for: returns the end of the message: what to do about an object of another kind.

    Raises:
        ValueError: it is of another kind, or the file holds another thing.
    """
    if isinstance(given, kind):
        return given
    if isinstance(given, (str, Path)):
        return kind.load(given)
    raise ValueError(
        f"{who}: {type_in_words(given)} is neither a {kind.__name__} nor the path of its file; {remedy_for(given)}"
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


def read_source(path: str | Path) -> Source:
    """Returns the profile, chain or graph of a file.

    Raises:
        ValueError: the file holds anything else; the message names the file.
    """
    document = read_document(path, FORMATS)
    if document["format"] == CHAIN_FORMAT:
        return problem_from(document, str(path), Chain)
    if document["format"] == GRAPH_FORMAT:
        return problem_from(document, str(path), Graph)
    return Profile.from_document(document, str(path))


def problem_from(document: Mapping[str, Any], where: str, kind: type[Solvable]) -> Solvable:
    """Returns the chain or graph of a document; ``where`` names it in errors.

    Raises:
        ValueError: the refusal of ``kind.from_dict``.
    """
    try:
        return kind.from_dict(document)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
