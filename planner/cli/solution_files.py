"""Solution files of chains and graphs, as ``planner show`` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.cli import chain_solutions, graph_solutions

FORMATS = {
    chain_solutions.SOLUTION_FORMAT: chain_solutions.SOLUTION_VERSION,
    graph_solutions.SOLUTION_FORMAT: graph_solutions.SOLUTION_VERSION,
}

_NUMBERS = (
    "predicted_peak_bytes",
    "predicted_seconds",
    "unplanned_peak_bytes",
    "unplanned_seconds",
    "budget_bytes",
    "resident_bytes",
    "lower_bound_seconds",
    "gap",
    "slowdown",
    "solve_seconds",
)
_DECISIONS = ("keep", "offload", "recompute", "segment")


def check_solution(document: Mapping[str, Any], where: str) -> None:
    """Refuse a solution that lacks what a report says of it; the ValueError names the file and the first field."""
    for name in _NUMBERS:
        _expect(document, name, (int, float), where)
    for name in ("solver", "status"):
        _expect(document, name, (str,), where)
    _expect(document, "stages", (list,), where)
    of_chain = document["format"] == chain_solutions.SOLUTION_FORMAT
    for i, stage in enumerate(document["stages"]):
        _check_stage(stage, f"{where}: stage {i}", of_chain=of_chain)


def _check_stage(stage: Any, where: str, *, of_chain: bool) -> None:
    if not isinstance(stage, Mapping):
        raise ValueError(f"{where}: expected an object, got {stage!r}; solve again")
    _expect(stage, "name", (str,), where)
    _expect(stage, "runs", (int,), where)
    _expect(stage, "extra_seconds", (int, float), where)
    if stage.get("decision") not in _DECISIONS:
        raise ValueError(
            f"{where}: expected decision to be one of {_DECISIONS}, got {stage.get('decision')!r}; solve again"
        )
    if of_chain:
        _expect(stage, "kind", (str,), where)
        _expect(stage, "kept_bytes", (int,), where)


def _expect(fields: Mapping[str, Any], name: str, kinds: tuple[type, ...], where: str) -> None:
    value = fields.get(name)
    if not isinstance(value, kinds) or isinstance(value, bool):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{where}: expected {name} of a solution to be {expected}, got {value!r}; solve again")
