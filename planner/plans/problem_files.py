"""Reads problem files: a profile, a chain problem or a graph problem, as the command line takes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from profiler.json_files import read_document
from profiler.records import FORMAT as PROFILE_FORMAT, VERSION as PROFILE_VERSION, Profile
from solvers.problem.chain import FORMAT as CHAIN_FORMAT, VERSION as CHAIN_VERSION, Chain
from solvers.problem.graph import FORMAT as GRAPH_FORMAT, VERSION as GRAPH_VERSION, Graph

Source: TypeAlias = Profile | Chain | Graph
FORMATS = {PROFILE_FORMAT: PROFILE_VERSION, CHAIN_FORMAT: CHAIN_VERSION, GRAPH_FORMAT: GRAPH_VERSION}


def read_source(path: str | Path) -> Source:
    """The profile, chain or graph of a file; ValueError with the file's name for anything else."""
    document = read_document(path, FORMATS)
    if document["format"] == CHAIN_FORMAT:
        return chain_from(document, str(path))
    if document["format"] == GRAPH_FORMAT:
        return graph_from(document, str(path))
    return Profile.from_document(document, str(path))


def chain_from(document: Mapping[str, Any], where: str) -> Chain:
    """The chain of a problem file's document; ``where`` names it in errors.

    Raises:
        ValueError: what ``Chain.from_dict`` refuses.
    """
    try:
        return Chain.from_dict(document)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def graph_from(document: Mapping[str, Any], where: str) -> Graph:
    """The graph of a problem file's document; ``where`` names it in errors.

    Raises:
        ValueError: what ``Graph.from_dict`` refuses.
    """
    try:
        return Graph.from_dict(document)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def all_bytes(graph: Graph) -> int:
    """Bytes that no schedule of a graph can exceed."""
    return graph.resident_bytes + sum(node.output_bytes + node.transient_bytes for node in graph.nodes)
