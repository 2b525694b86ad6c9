"""From the dataflow of a call to a graph problem.

Each group of ops is a node. Ops that make small storages alone run once, and what is small always counts. Where
large storages of one op are needed for different times, the one that is needed longer has a node of its own: directly
after the op, without work. Between forward and backward stands the loss, a node that runs once: it reads what the
forward returns, and makes the gradients that backward begins with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from planner.steps.group_order import moved_groups
from planner.steps.op_groups import OpGroup, groups_of, inner_bytes, small_storages
from profiler.step_graph import StepGraph, StepReplay, StepRuns, replay_step, runs_once
from solvers.problem.graph import Graph, Node, Side

SMALL_SHARE = 1e-3  # of the bytes at the peak: that much all small storages hold together
LEAST_SECONDS = 1e-6  # of an op: no run is free


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProblem:
    """A step as a graph problem.

    Attributes:
        graph: the problem.
        groups: by name of a node the ops that it runs. The loss, and nodes without work, run none.
        loss: name of the loss's node.
    """

    graph: Graph
    groups: Mapping[str, OpGroup]
    loss: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSurroundings:
    """Bytes around a call's two programs, the same for all orders of their ops.

    Attributes:
        forward_bytes, backward_bytes: alive beside what the programs make, take and hand over.
        loss_bytes: between the programs the most that is alive beside what forward hands over and returns.
        loss_kept: what forward hands over where every op runs once.
    """

    forward_bytes: int
    backward_bytes: int
    loss_bytes: int
    loss_kept: frozenset[int] = frozenset()

    def peak_bytes(self, step: StepGraph, runs: StepRuns) -> int:
        """The peak of an order of a call's ops, by its replay."""
        replay = replay_step(step, runs)
        return max(
            self.forward_bytes + replay.forward.peak_bytes,
            self.loss_bytes + replay.between_bytes + self.kept_longer_bytes(step, replay),
            self.backward_bytes + replay.backward.peak_bytes,
        )

    def kept_longer_bytes(self, step: StepGraph, replay: StepReplay) -> int:
        """What forward returns, nobody may hold any more at that peak, and an order hands over all the same."""
        handed = [storage for s, storage in enumerate(step.storages) if s in replay.handed - self.loss_kept]
        return sum(storage.size_bytes for storage in handed if storage.returned)


def step_problem(step: StepGraph, around: StepSurroundings, *, small_share: float = SMALL_SHARE) -> StepProblem:
    """The problem of a call.

    Args:
        step: its dataflow.
        around: bytes around its programs.
        small_share: of the most bytes that its ops hold when each runs once; the smallest storages, as many as hold no
            more than that together, always count.
    """
    once = replay_step(step, runs_once(step))
    small = small_storages(step, small_share * max(once.forward.peak_bytes, once.backward.peak_bytes))
    return _Builder(step, around, small).problem()


class _Builder:
    """Goes through the ops in order, and keeps which node owns each storage."""

    def __init__(self, step: StepGraph, around: StepSurroundings, small: frozenset[int]) -> None:
        self._step, self._around, self._small = step, around, small
        self._resident_bytes = min(around.forward_bytes, around.backward_bytes)
        self._owner: dict[int, str] = {}
        self._nodes: list[Node] = []
        self._groups: dict[str, OpGroup] = {}
        self._names = {op.name for op in step.ops}
        self._loss = self._free_name("loss")
        self._saved = {s for op in step.ops if op.side == "backward" for s in op.reads}
        self._gradients = {s for s, storage in enumerate(step.storages) if storage.gradient}
        self._before: tuple[str, ...] = ()
        self._after: tuple[str, ...] = ()

    def problem(self) -> StepProblem:
        after_loss = False
        before_bytes = self._around.forward_bytes - self._resident_bytes
        self._before = self._add_bytes("before", before_bytes, side="forward") if before_bytes else ()
        for group in moved_groups(self._step, groups_of(self._step, self._small), self._small):
            if self._step.ops[group.ops[0]].side == "backward" and not after_loss:
                self._add_loss()
                after_loss = True
            self._add(group)
        if not after_loss:  # Backward has no ops where its gradients are those of the loss.
            self._add_loss()
        always_bytes = self._bytes(self._small) + sum(op.state_bytes for op in self._step.ops)
        graph = Graph(
            nodes=tuple(self._nodes),
            outputs=(*self._owners(sorted(self._gradients)), *self._after),
            resident_bytes=self._resident_bytes + always_bytes,
        )
        return StepProblem(graph=graph, groups=self._groups, loss=self._loss)

    def _add(self, group: OpGroup) -> None:
        ops = [self._step.ops[ordinal] for ordinal in group.ops]
        op = ops[-1]
        made = [s for s in op.makes if s not in self._small]
        lasting = [s for s in made if s in self._gradients or (s in self._saved and s in op.once_makes)]
        once = bool(op.once_reason) or not made
        node = replace(self._node(op.name, group, op.side), once=once)
        self._groups[op.name] = group
        self._owner.update(dict.fromkeys(made, op.name))
        place = len(self._nodes)
        node = self._with_part_apart(node, lasting)
        if op.side == "forward":
            self._add_part(node, [s for s in made if s in self._saved and s not in lasting], "saved", once=once)
        self._nodes.insert(place, node)

    def _node(self, name: str, group: OpGroup, side: Side) -> Node:
        """What a group reads, makes and costs."""
        ops = [self._step.ops[ordinal] for ordinal in group.ops]
        made_bytes = self._bytes(s for s in ops[-1].makes if s not in self._small)
        inside = {s for each in ops for s in each.makes}
        beside = [self._step.ops[ordinal].transient_bytes for ordinal in group.once]
        beside += [bytes_ - made_bytes for bytes_ in inner_bytes(self._step, group.ops, self._small)]
        read = [s for each in ops for s in each.reads if s not in inside]
        return Node(
            name=name,
            seconds=max(sum(each.seconds for each in ops), LEAST_SECONDS),
            output_bytes=made_bytes,
            transient_bytes=max(0, *beside),
            inputs=self._owners(read),
            side=side,
        )

    def _with_part_apart(self, node: Node, part: list[int]) -> Node:
        """A node without a part of its output, which stays from the first run on."""
        part_bytes = self._bytes(part)
        if not self._add_part(node, part, "kept", once=True):
            return node
        rest_bytes = node.output_bytes - part_bytes
        return replace(node, output_bytes=rest_bytes, transient_bytes=node.transient_bytes + part_bytes)

    def _add_part(self, node: Node, part: list[int], suffix: str, *, once: bool) -> bool:
        """Add a node for a part of a node's output that outlives the rest; says whether there is a rest.

        Where it may be made again, it is made of the whole output, which counts beside it as long as that is read:
        who keeps the rest alone has to run the op again.
        """
        part_bytes = self._bytes(part)
        if not 0 < part_bytes < node.output_bytes:
            return False
        name = f"{node.name}_{suffix}"
        self._nodes.append(
            Node(
                name=name,
                seconds=LEAST_SECONDS,
                output_bytes=part_bytes,
                inputs=(node.name,),
                side=node.side,
                once=once,
            )
        )
        self._owner.update(dict.fromkeys(part, name))
        return True

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
        after_bytes = self._around.backward_bytes - self._resident_bytes
        self._after = self._add_bytes("after", after_bytes, (self._loss,), side="backward") if after_bytes else ()

    def _add_bytes(self, name: str, size_bytes: int, inputs: tuple[str, ...] = (), *, side: Side) -> tuple[str]:
        """A node for bytes that no op makes at that moment."""
        name = self._free_name(name)
        self._nodes.append(
            Node(name=name, seconds=LEAST_SECONDS, output_bytes=size_bytes, inputs=inputs, side=side, once=True)
        )
        return (name,)

    def _free_name(self, name: str) -> str:
        numbered = (f"{name}_{number}" for number in range(len(self._names)))
        return next(each for each in (name, *numbered) if each not in self._names)

    def _owners(self, storages: Iterable[int]) -> tuple[str, ...]:
        """Nodes whose outputs hold these; what is small always is there."""
        return tuple(dict.fromkeys(self._owner[s] for s in storages if s in self._owner))

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self._step.storages[storage].size_bytes for storage in storages)
