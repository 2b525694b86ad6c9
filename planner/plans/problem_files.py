"""Reads problem files: a profile of either kind, a chain problem or a graph problem, as the command line takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

from planner.plans.given_sources import profile_from
from profiler.graph_profile import GraphProfile
from profiler.json_files import read_document
from profiler.records import FORMAT as PROFILE_FORMAT, VERSION as PROFILE_VERSION, Profile
from solvers.problem.chain import FORMAT as CHAIN_FORMAT, VERSION as CHAIN_VERSION, Chain
from solvers.problem.graph import FORMAT as GRAPH_FORMAT, VERSION as GRAPH_VERSION, Graph

Source: TypeAlias = Profile | GraphProfile | Chain | Graph
FORMATS = {PROFILE_FORMAT: PROFILE_VERSION, CHAIN_FORMAT: CHAIN_VERSION, GRAPH_FORMAT: GRAPH_VERSION}
_MOST_BYTES = 2**62  # what all nodes or stages need together; the solvers count in 64 bits


def read_source(path: str | Path) -> Source:
    """The profile, chain or graph of a file; ValueError with the file's name for anything else."""
    document = read_document(path, FORMATS)
    if document["format"] == CHAIN_FORMAT:
        return chain_from(document, str(path))
    if document["format"] == GRAPH_FORMAT:
        return graph_from(document, str(path))
    return profile_from(document, str(path))


def chain_from(document: Mapping[str, Any], where: str) -> Chain:
    """The chain of a problem file's document; ``where`` names it in errors.

    Raises:
        ValueError: what ``Chain.from_dict`` refuses, or numbers too large to add up.
    """
    try:
        chain = Chain.from_dict(document)
        fits = _sum_of(chain, "_bytes") < _MOST_BYTES and math.isfinite(_sum_of(chain, "_seconds"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except OverflowError:  # of an integer that no float holds, given as seconds
        fits = False
    if not fits:
        raise _too_large(where)
    return chain


def graph_from(document: Mapping[str, Any], where: str) -> Graph:
    """The graph of a problem file's document; ``where`` names it in errors.

    Raises:
        ValueError: what ``Graph.from_dict`` refuses, or numbers too large to add up.
    """
    try:
        graph = Graph.from_dict(document)
        fits = all_bytes(graph) < _MOST_BYTES and math.isfinite(graph.unplanned_seconds)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except OverflowError:  # of an integer that no float holds, given as seconds
        fits = False
    if not fits:
        raise _too_large(where)
    return graph


def _too_large(where: str) -> ValueError:
    return ValueError(
        f"{where}: expected less than 2**62 bytes and finite seconds in all, got more; correct the largest"
    )


def _sum_of(chain: Chain, unit: str) -> float:
    """All bytes or all seconds of a chain, whatever their sign, those of every option of its stages included."""
    holders = [*chain.stages, *(option for stage in chain.stages for option in stage.options)]
    total = sum(sum(each.offload_units) for each in holders) if unit == "_bytes" else 0
    records = [chain, *chain.shared, *holders]
    return total + sum(abs(getattr(each, f.name)) for each in records for f in fields(each) if f.name.endswith(unit))


def all_bytes(graph: Graph) -> int:
    """Bytes that no schedule of a graph can exceed."""
    return graph.resident_bytes + sum(node.output_bytes + node.transient_bytes for node in graph.nodes)
