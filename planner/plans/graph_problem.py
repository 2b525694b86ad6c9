"""From the dataflow of a step to a graph problem.

Each op is a node. Where storages of one op are needed for different times, and both parts are large, the one that is
needed longer has a node of its own: directly after the op, without work. Between forward and backward stands the loss,
a node that runs once: it reads what the forward returns, and makes the gradients that backward begins with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from profiler.graph_profile import GraphProfile
from profiler.records import Phase
from profiler.step_graph import StepGraph, StepOp
from profiler.step_replay import SideReplay, StepReplay, replay_step, runs_once
from solvers.problem.graph import Graph, Node, Side

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSurroundings:
    """Bytes around a step's two programs, the same for all orders of their ops. Resident bytes are included.

    Attributes:
        forward_bytes, backward_bytes: alive beside what the programs make, take and hand over.
        loss_bytes: between the programs the most that is alive beside what forward hands over and returns.
        other_peak_bytes: the peak of what comes before the programs and after them: the optimizer step.
        held_bytes: of ``backward_bytes``, what forward returned and the loop holds.
    """

    forward_bytes: int
    backward_bytes: int
    loss_bytes: int
    other_peak_bytes: int = 0
    held_bytes: int = 0

    @classmethod
    def of(cls, profile: GraphProfile) -> StepSurroundings:
        """As measured: what was alive, without what the replay of the same order of ops says."""
        once = replay_step(profile.graph, runs_once(profile.graph))
        returned_bytes = sum(storage.size_bytes for storage in profile.graph.storages if storage.returned)
        return cls(
            forward_bytes=_beside(profile.forward, once.forward),
            backward_bytes=_beside(profile.backward, once.backward),
            loss_bytes=profile.between.peak_bytes - once.forward.end_bytes,
            other_peak_bytes=max(phase.peak_bytes for phase in (profile.before, profile.after, profile.optimizer)),
            held_bytes=returned_bytes if profile.resident.loop >= returned_bytes else 0,
        )

    def peak_bytes(self, replay: StepReplay) -> int:
        """The peak of a step by the replay of its order."""
        return max(
            self.forward_bytes + replay.forward.peak_bytes,
            self.loss_bytes + replay.forward.end_bytes,
            self.backward_bytes + replay.backward.peak_bytes,
            self.other_peak_bytes,
        )


def _beside(measured: Phase, replayed: SideReplay) -> int:
    """What is alive beside: as the program begins, or more where the replay would fall short later."""
    return max(
        measured.start_bytes - replayed.start_bytes,
        measured.peak_bytes - replayed.peak_bytes,
        measured.end_bytes - replayed.end_bytes,
    )


def step_problem(step: StepGraph, around: StepSurroundings, *, split_bytes: int = SPLIT_BYTES) -> StepProblem:
    """The problem of a step.

    Args:
        step: its dataflow.
        around: bytes around its programs.
        split_bytes: storages of one op are told apart where there are more bytes than that of both kinds.
    """
    return _Builder(step, around, split_bytes).problem()


class _Builder:
    """Goes through the ops in order, and keeps which node owns each storage."""

    def __init__(self, step: StepGraph, around: StepSurroundings, split_bytes: int) -> None:
        self._step, self._around = step, around
        self._backward_bytes = around.backward_bytes - around.held_bytes
        self._resident_bytes = min(around.forward_bytes, self._backward_bytes)
        self._split_bytes = split_bytes
        self._owner: dict[int, str] = {}
        self._nodes: list[Node] = []
        self._ops: dict[str, int] = {}
        # Of what always is alive: small parts that outlive the rest, and the states of random generators.
        self._always_bytes = sum(op.state_bytes for op in step.ops)
        self._names = {op.name for op in step.ops}
        self._loss = self._free_name("loss")
        self._saved = {s for op in step.ops if op.side == "backward" for s in op.reads}
        held = around.held_bytes > 0
        self._ends = {s for s, storage in enumerate(step.storages) if storage.gradient or (held and storage.returned)}
        self._before: tuple[str, ...] = ()
        self._after: tuple[str, ...] = ()

    def problem(self) -> StepProblem:
        after_loss = False
        before_bytes = self._around.forward_bytes - self._resident_bytes
        self._before = self._add_bytes("before", before_bytes) if before_bytes else ()
        for ordinal, op in enumerate(self._step.ops):
            if op.side == "backward" and not after_loss:
                self._add_loss()
                after_loss = True
            self._add(ordinal, op)
        outputs = (*self._owners(sorted(self._ends)), *self._after)
        resident_bytes = self._resident_bytes + self._always_bytes
        graph = Graph(nodes=tuple(self._nodes), outputs=outputs, resident_bytes=resident_bytes)
        return StepProblem(graph=graph, ops=self._ops, loss=self._loss)

    def _add(self, ordinal: int, op: StepOp) -> None:
        node = Node(
            name=op.name,
            seconds=max(op.seconds, LEAST_SECONDS),
            output_bytes=self._bytes(op.makes),
            transient_bytes=op.transient_bytes,
            inputs=self._owners(op.reads),
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
        """The loss lets go of what is alive in forward alone, and leaves what is alive in backward alone."""
        storages = [*enumerate(self._step.storages)]
        of_loss = [s for s, storage in storages if storage.of_loss]
        read = [s for s, storage in storages if storage.returned or storage.written]
        made_bytes = self._bytes(of_loss)
        self._nodes.append(
            Node(
                name=self._loss,
                seconds=LEAST_SECONDS,
                output_bytes=made_bytes,
                transient_bytes=max(0, self._around.loss_bytes - self._around.forward_bytes - made_bytes),
                inputs=(*self._before, *self._owners(read)),
                side="backward",
                once=True,
            )
        )
        self._owner.update(dict.fromkeys(of_loss, self._loss))
        after_bytes = self._backward_bytes - self._resident_bytes
        self._after = self._add_bytes("after", after_bytes, (self._loss,)) if after_bytes else ()

    def _add_bytes(self, name: str, size_bytes: int, inputs: tuple[str, ...] = ()) -> tuple[str]:
        """A node for bytes that the step does not make."""
        name = self._free_name(name)
        side: Side = "backward" if inputs else "forward"
        self._nodes.append(
            Node(name=name, seconds=LEAST_SECONDS, output_bytes=size_bytes, inputs=inputs, side=side, once=True)
        )
        return (name,)

    def _free_name(self, name: str) -> str:
        numbered = (f"{name}_{number}" for number in range(len(self._names)))
        return next(each for each in (name, *numbered) if each not in self._names)

    def _owners(self, storages: Iterable[int]) -> tuple[str, ...]:
        owners = dict.fromkeys(self._owner[storage] for storage in storages)
        return tuple(name for name in owners if name != _RESIDENT)

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self._step.storages[storage].size_bytes for storage in storages)
