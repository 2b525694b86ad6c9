"""The graph problem: the ops of a training step as a DAG of forward and backward nodes, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal, get_args

from solvers.problem.plain_data import check_number, from_document, to_document
from solvers.problem.schedule import Action, ActionKind, Schedule

FORMAT = "planner-graph"
VERSION = 1

Side = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One op: it reads the outputs of other nodes and makes one of its own.

    A view has no bytes of its own: give it ``output_bytes`` 0 and let the nodes that read it name the
    node that owns the storage among their inputs too. An in-place update is a node of its own that reads
    what it overwrites; its output is counted beside it, as a copy would be.

    Attributes:
        name: unique in the graph.
        seconds: of one run.
        output_bytes: of its output, alive from its run until it is freed.
        transient_bytes: alive only while it runs, beside its inputs and its output.
        inputs: names of the nodes that it reads, all of them before it.
        side: ``"forward"`` or ``"backward"``.
        once: it must not run again: an effect, a draw that cannot be repeated, what lies outside of the model.
    """

    name: str
    seconds: float
    output_bytes: int
    transient_bytes: int = 0
    inputs: tuple[str, ...] = ()
    side: Side = "forward"
    once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes in topological order, which is the order of their first runs, and the outputs alive at the end.

    A schedule runs every node at least once. The first runs come in the order of ``nodes``; between them any node
    that has run before may run again, but for those that run once.

    Attributes:
        nodes: at least one node, unique names, inputs before readers.
        outputs: names of nodes that have to be alive when the schedule ends.
        resident_bytes: alive throughout (parameters, optimizer state, batch).

    >>> a = Node(name="a", seconds=1.0, output_bytes=4)
    >>> Graph(nodes=(a, Node(name="b", seconds=2.0, output_bytes=1, inputs=("a",))), outputs=("b",)).unplanned_seconds
    3.0
    """

    nodes: tuple[Node, ...]
    outputs: tuple[str, ...] = ()
    resident_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("a graph: expected at least one node, got none; add nodes")
        for node in self.nodes:
            _check_node(node)
        check_number("a graph", "resident_bytes", self.resident_bytes)
        _check_names(self.nodes)
        _check_order(self.nodes)
        known = {node.name for node in self.nodes}
        for name in self.outputs:
            if not isinstance(name, str) or name not in known:
                raise ValueError(
                    f"a graph: expected its outputs to be nodes, got missing node {name!r}; add or drop it"
                )

    @property
    def unplanned_seconds(self) -> float:
        """Seconds when every node runs once: no schedule is faster."""
        return sum(node.seconds for node in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a problem file (``"format": "planner-graph"``, version 1)."""
        document = to_document(self, FORMAT, VERSION)
        for node in document["nodes"]:
            if not node["once"]:  # Few nodes have to.
                del node["once"]
        return document

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Graph:
        """Read what ``to_dict`` wrote; raises ValueError with what is wrong and where."""
        return from_document(cls, data, FORMAT, VERSION)

    def actions_of(self, schedule: Schedule) -> list[dict[str, str]]:
        """Plain data for a plan file: ``{"op": "compute" | "free", "node": NAME}`` per action."""
        words = {kind: word for word, kind in _KINDS.items()}
        return [{"op": words[action.kind], "node": self.nodes[action.stage].name} for action in schedule.actions]

    def schedule_of(self, actions: Sequence[Any]) -> Schedule:
        """Read what ``actions_of`` wrote; raises ValueError on anything else."""
        index = {node.name: i for i, node in enumerate(self.nodes)}
        return Schedule(actions=tuple(_action(row, index) for row in actions))


_KINDS: dict[Any, ActionKind] = {"compute": "run", "free": "free"}  # by the words of files


def _action(row: Any, index: Mapping[str, int]) -> Action:
    kind = _KINDS.get(row.get("op")) if isinstance(row, Mapping) else None
    if kind is None:
        raise ValueError(
            f"a graph's action: expected {{'op': 'compute' or 'free', 'node': name}}, got {row!r}; solve again"
        )
    node = index.get(row.get("node", ""))
    if node is None:
        raise ValueError(f"a graph's action: expected a node of the graph, got {row.get('node')!r}; solve again")
    return Action(kind, node)


def _check_node(node: Node) -> None:
    if not isinstance(node.name, str) or not node.name:
        raise ValueError(f"a node: expected its name to be text, got {node.name!r}; name it")
    where = f"node {node.name!r}"
    for name in ("seconds", "output_bytes", "transient_bytes"):
        check_number(where, name, getattr(node, name))
    if node.side not in get_args(Side):
        raise ValueError(f"{where}: expected side to be one of {get_args(Side)}, got {node.side!r}; correct it")


def _check_names(nodes: tuple[Node, ...]) -> None:
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            raise ValueError(f"a graph: expected every name once, got duplicate name {node.name!r}; rename one")
        seen.add(node.name)
    for node in nodes:
        for name in node.inputs:
            if not isinstance(name, str) or name not in seen:
                raise ValueError(
                    f"node {node.name!r}: expected its inputs to be nodes, got missing node {name!r}; add it"
                )


def _check_order(nodes: tuple[Node, ...]) -> None:
    position = {node.name: i for i, node in enumerate(nodes)}
    late = next(((n, p) for n in nodes for p in n.inputs if position[p] >= position[n.name]), None)
    if late is None:
        return
    try:
        TopologicalSorter({node.name: node.inputs for node in nodes}).prepare()
    except CycleError as error:
        cycle = " -> ".join(error.args[1])
        raise ValueError(f"a graph: expected no cycle, got {cycle}; remove one of these inputs") from error
    raise ValueError(
        f"a graph: expected inputs before the nodes that read them, got {late[0].name!r} before its input {late[1]!r}; "
        "sort the nodes in topological order, the order of their first runs"
    )
