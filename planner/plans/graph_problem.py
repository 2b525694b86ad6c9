"""From the dataflow of a step to a graph problem.

Each op is a node. Where storages of one op are needed for different times, and both parts are large, the one that is
needed longer has a node of its own: directly after the op, without work. Between forward and backward stands the loss,
a node that runs once: it reads what the forward returns, and makes the gradients that backward begins with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from profiler.step_graph import StepGraph, StepOp
from solvers.problem.graph import Graph, Node

# Without it every BatchNorm's statistics would be nodes: 114 beside the 400 of a ResNet-50, for 0.01 % of its bytes.
SPLIT_BYTES = 2**16
LEAST_SECONDS = 1e-6  # of an op: no run is free
_RESIDENT = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProblem:
    """A step as a graph problem.

    Attributes:
        graph: the problem.
        ops: by name of a node the ordinal of the op that it runs. The loss, and nodes without work, run none.
        loss: name of the loss's node.
    """

    graph: Graph
    ops: Mapping[str, int]
    loss: str


def step_problem(step: StepGraph, *, holds_returned: bool = True, split_bytes: int = SPLIT_BYTES) -> StepProblem:
    """The problem of a step.

    Args:
        step: its dataflow.
        holds_returned: what the forward returns stays alive until the step ends, as the loop holds it.
        split_bytes: storages of one op are told apart where there are more bytes than that of both kinds.
    """
    return _Builder(step, split_bytes).problem(holds_returned=holds_returned)


class _Builder:
    """Goes through the ops in order, and keeps which node owns each storage."""

    def __init__(self, step: StepGraph, split_bytes: int) -> None:
        self._step = step
        self._split_bytes = split_bytes
        self._owner: dict[int, str] = {}
        self._nodes: list[Node] = []
        self._ops: dict[str, int] = {}
        self._always_bytes = 0
        names = {op.name for op in step.ops}
        self._loss = next(name for name in ("loss", *(f"loss_{k}" for k in range(len(names)))) if name not in names)
        self._saved = {s for op in step.ops if op.side == "backward" for s in op.reads}
        self._ends = {s for s, storage in enumerate(step.storages) if storage.gradient}
        self._returned = [s for s, storage in enumerate(step.storages) if storage.returned]

    def problem(self, *, holds_returned: bool) -> StepProblem:
        if holds_returned:
            self._ends.update(self._returned)
        after_loss = False
        for ordinal, op in enumerate(self._step.ops):
            if op.side == "backward" and not after_loss:
                self._add_loss()
                after_loss = True
            self._add(ordinal, op)
        outputs = self._owners(sorted(self._ends))
        resident_bytes = self._step.resident_bytes + self._always_bytes
        graph = Graph(nodes=tuple(self._nodes), outputs=outputs, resident_bytes=resident_bytes)
        return StepProblem(graph=graph, ops=self._ops, loss=self._loss)

    def _add(self, ordinal: int, op: StepOp) -> None:
        inputs = self._owners(op.reads)
        node = Node(
            name=op.name,
            seconds=max(op.seconds, LEAST_SECONDS),
            output_bytes=self._bytes(op.makes),
            transient_bytes=op.transient_bytes,
            inputs=(*inputs, self._loss) if op.reads_gradients else inputs,
            side=op.side,
            once=bool(op.once_reason),
        )
        self._ops[op.name] = ordinal
        self._owner.update(dict.fromkeys(op.makes, op.name))
        place = len(self._nodes)
        node = self._part(node, [s for s in op.makes if s in self._ends], "end")
        if op.side == "forward":
            node = self._part(node, [s for s in op.makes if s in self._saved and s not in self._ends], "saved")
        self._nodes.insert(place, node)

    def _part(self, node: Node, part: list[int], suffix: str) -> Node:
        """Let a part of an op's storages outlive the rest; returns the op's node without that part."""
        part_bytes = self._bytes(part)
        rest_bytes = node.output_bytes - part_bytes
        if not part or rest_bytes <= self._split_bytes:
            return node
        if part_bytes <= self._split_bytes:
            self._owner.update(dict.fromkeys(part, _RESIDENT))
            self._always_bytes += part_bytes
            return replace(node, output_bytes=rest_bytes)
        name = f"{node.name}_{suffix}"
        self._nodes.append(
            Node(name=name, seconds=LEAST_SECONDS, output_bytes=part_bytes, inputs=(node.name,), side=node.side)
        )
        self._owner.update(dict.fromkeys(part, name))
        return replace(node, output_bytes=rest_bytes, transient_bytes=node.transient_bytes + part_bytes)

    def _add_loss(self) -> None:
        self._nodes.append(
            Node(
                name=self._loss,
                seconds=LEAST_SECONDS,
                output_bytes=self._step.gradient_bytes,
                inputs=self._owners(self._returned),
                side="backward",
                once=True,
            )
        )

    def _owners(self, storages: Iterable[int]) -> tuple[str, ...]:
        owners = dict.fromkeys(self._owner[storage] for storage in storages)
        return tuple(name for name in owners if name != _RESIDENT)

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self._step.storages[storage].size_bytes for storage in storages)
