"""Schedules of graphs: which node runs and which output is freed, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from solvers.problem.graph import Graph

GraphActionKind = Literal["compute", "free"]


@dataclass(frozen=True, slots=True)
class GraphAction:
    """One step: run the node with this index, or drop its output."""

    op: GraphActionKind
    node: int


@dataclass(frozen=True, slots=True)
class GraphSchedule:
    """Actions in order; one whole run of a graph."""

    actions: tuple[GraphAction, ...]

    def computed(self) -> list[int]:
        """The nodes that run, in order, repeated runs included."""
        return [action.node for action in self.actions if action.op == "compute"]

    def to_list(self, graph: Graph) -> list[dict[str, str]]:
        """Plain data for a plan file: ``{"op": "compute" | "free", "node": NAME}`` per action."""
        return [{"op": action.op, "node": graph.nodes[action.node].name} for action in self.actions]

    @classmethod
    def from_list(cls, rows: Sequence[Any], graph: Graph) -> GraphSchedule:
        """Read what ``to_list`` wrote; raises ValueError on anything else."""
        index = {node.name: i for i, node in enumerate(graph.nodes)}
        return cls(actions=tuple(_action(row, index) for row in rows))


def _action(row: Any, index: Mapping[str, int]) -> GraphAction:
    if not isinstance(row, Mapping) or row.get("op") not in ("compute", "free"):
        raise ValueError(
            f"a graph's action: expected {{'op': 'compute' or 'free', 'node': name}}, got {row!r}; solve again"
        )
    node = index.get(row.get("node", ""))
    if node is None:
        raise ValueError(f"a graph's action: expected a node of the graph, got {row.get('node')!r}; solve again")
    return GraphAction(row["op"], node)
