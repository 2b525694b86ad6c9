"""From the dataflow of a captured call to a problem for the graph solvers.

Each group of ops is a node. Ops that make small storages alone run once, and what is small always counts. Where
large storages of one op are needed for different times, the one that is needed longer has a node of its own: directly
after the op, without work. Between forward and backward stands the loss, a node that runs once: it reads what the
forward returns, and makes the gradients that backward begins with.

Ops that run one after the other are one node (``groups_of``): many of the 918 ops of a GPT-2 with 12 layers make masks,
statistics and gradients of biases, or a tensor that the next op alone reads. A solver that may recompute each of them,
or keep what it makes, gains nothing, and takes longer.

The groups' first runs are ordered (``moved_groups``), within forward and within backward, to where less is alive.
A weight's gradient that comes before its input's lets go of an activation before the next gradient is made; a mask that
is made where it is first read is not alive before. Local search: a move is made where it leaves no other run with more
bytes alive, some with fewer, and the moved run with no more than the highest it passes. What a group reads comes before
it, and what draws random numbers or must run once stays in its order.

Computing optimal orders is hard for general graphs: Sethi, "Complete register allocation problems", 1975.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from profiler.step_graph import StepGraph, StepOp, StepReplay, StepRuns, replay_step, runs_once
from solvers.problem.graph import Graph, Node, Side


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGroup:
    """Ops that run together.

    Attributes:
        ops: ordinals of those that run as often as the group does, in their order; each alone reads what the one before
            it makes.
        once: ordinals of those that belong to its first run alone.
    """

    ops: list[int]
    once: list[int] = field(default_factory=list)

    @property
    def first_run(self) -> list[int]:
        """Ordinals of all its ops, in an order in which they can run."""
        return sorted([*self.ops, *self.once])


def small_storages(step: StepGraph, most_bytes: float) -> frozenset[int]:
    """The smallest storages that an op makes, as many as hold at most that many bytes together."""
    small: list[int] = []
    for storage in sorted((s for op in step.ops for s in op.makes), key=lambda s: step.storages[s].size_bytes):
        most_bytes -= step.storages[storage].size_bytes
        if most_bytes < 0:
            break
        small.append(storage)
    return frozenset(small)


def groups_of(step: StepGraph, small: frozenset[int]) -> list[OpGroup]:
    """All ops of a step, in groups whose order is one in which they can run.

    An op that makes small storages alone runs with the last of those whose results it reads, if what else it reads is
    alive then anyway. An op that alone reads what the op before it makes runs with that one, if it makes no more: who
    would keep the one result does better to keep the other.

    Args:
        step: its ops, in an order in which they can run.
        small: storages that always stay.
    """
    return _Grouping(step, small).groups


class _Grouping:
    """Goes through the ops in order.

    Attributes:
        groups: until now.
    """

    def __init__(self, step: StepGraph, small: frozenset[int]) -> None:
        self.groups: list[OpGroup] = []
        self._step, self._small = step, small
        self._place: dict[int, int] = {}  # by storage that of the group that makes it
        self._readers: dict[int, set[int]] = {}
        for ordinal, op in enumerate(step.ops):
            for storage in op.reads:
                self._readers.setdefault(storage, set()).add(ordinal)
        for ordinal, op in enumerate(step.ops):
            self._add(ordinal, op)

    def _add(self, ordinal: int, op: StepOp) -> None:
        place = self._beside(op)
        if place is not None:
            self.groups[place].once.append(ordinal)
        elif self.groups and self._continues(self.groups[-1], ordinal, op):
            place = len(self.groups) - 1
            self.groups[place].ops.append(ordinal)
        else:
            place = len(self.groups)
            self.groups.append(OpGroup(ops=[ordinal]))
        self._place.update(dict.fromkeys(op.makes, place))

    def _beside(self, op: StepOp) -> int | None:
        """The place of the group in whose first run alone an op may run."""
        known = self._place
        if (
            not self.groups
            or op.random
            or op.once_reason
            or not self._small.issuperset(op.makes)
            or not known.keys() >= set(op.reads)
        ):
            return None
        place = max((known[storage] for storage in op.reads), default=len(self.groups) - 1)
        last = self._step.ops[self.groups[place].ops[-1]]
        alive = {*last.reads, *last.makes}
        return place if last.side == op.side and alive.issuperset(self._large(op.reads)) else None

    def _continues(self, group: OpGroup, ordinal: int, op: StepOp) -> bool:
        last = self._step.ops[group.ops[-1]]
        made = self._large(last.makes)
        if last.side != op.side or last.once_reason or op.once_reason or not made or not self._large(op.makes):
            return False
        storages = [self._step.storages[s] for s in made]
        if any(storage.returned or storage.written or storage.gradient for storage in storages):
            return False
        if any(self._readers.get(s, set()) - {ordinal, *group.once} or s not in op.reads for s in made):
            return False
        if sum(storage.size_bytes for storage in storages) < self._bytes(op.makes):
            return False
        return self._as_large_together([*group.ops, ordinal])

    def _as_large_together(self, ordinals: list[int]) -> bool:
        """Whether ops that run together, all that they read being alive meanwhile, take no more than one by one."""
        ops = [self._step.ops[ordinal] for ordinal in ordinals]
        made = {s for op in ops for s in op.makes}
        read = [self._large(op.reads) - made for op in ops]
        everything = set[int]().union(*read)
        lasting = {s for s in everything if self._lasts(s, ordinals)}
        inside = inner_bytes(self._step, ordinals, self._small)
        one_by_one = [
            beside + self._bytes(lasting | (set[int]().union(*read[: k + 1]) & set[int]().union(*read[k:])))
            for k, beside in enumerate(inside)
        ]
        return max(inside) + self._bytes(everything) <= max(one_by_one)

    def _lasts(self, storage: int, ordinals: list[int]) -> bool:
        """Whether a storage of the same side is read after these ops as well, or made there for a later one of them."""
        side = self._step.ops[ordinals[0]].side
        place = self._place.get(storage)
        if place is None or self._step.ops[self.groups[place].ops[0]].side != side:
            return False
        later = [reader for reader in self._readers[storage] if reader >= ordinals[-1]]
        return any(self._step.ops[reader].side == side for reader in later)

    def _large(self, storages: Iterable[int]) -> set[int]:
        return {s for s in storages if s not in self._small}

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self._step.storages[s].size_bytes for s in storages if s not in self._small)


def inner_bytes(step: StepGraph, ordinals: Sequence[int], small: frozenset[int]) -> list[int]:
    """The bytes during each op of a group, beside what the group reads and what always stays.

    An op that draws again holds the generator's own state meanwhile.
    """
    made = [sum(step.storages[s].size_bytes for s in step.ops[ordinal].makes if s not in small) for ordinal in ordinals]
    return [
        before + made_bytes + step.ops[ordinal].transient_bytes + step.ops[ordinal].state_bytes
        for before, made_bytes, ordinal in zip([0, *made], made, ordinals, strict=False)
    ]


PASSES = 4
FURTHEST = 200  # places that a group moves at once: what reads the same tensors is near


def moved_groups(step: StepGraph, groups: Sequence[OpGroup], small: frozenset[int]) -> list[OpGroup]:
    """Groups in an order that holds fewer bytes where each runs once, or as they come.

    Args:
        step: of the groups.
        groups: in an order in which they can run, those of forward first.
        small: storages that always stay.
    """
    gradients = {s for s, storage in enumerate(step.storages) if storage.gradient}
    handed = {s for op in step.ops if op.side == "backward" for s in op.reads}
    left = {s for s, storage in enumerate(step.storages) if storage.returned or storage.written}
    ends: dict[Side, set[int]] = {"forward": left | handed, "backward": gradients}
    moved: list[OpGroup] = []
    for side, lasting in ends.items():
        of_side = [group for group in groups if step.ops[group.ops[0]].side == side]
        moved += _SideOrder(step, of_side, small, lasting).moved()
    return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A group as the search sees it, without what is small.

    Attributes:
        reads: storages that others make.
        made_bytes, beside_bytes: of what it leaves, and the most that it takes beside that while it runs.
        before: numbers of the items that come before it.
    """

    reads: frozenset[int]
    made_bytes: int
    beside_bytes: int
    before: frozenset[int]


class _SideOrder:
    """The groups of a side in an order that changes: a group has a number and, for the time being, a place."""

    def __init__(
        self, step: StepGraph, groups: Sequence[OpGroup], small: frozenset[int], ends: Collection[int]
    ) -> None:
        self._groups, self._sizes = groups, [storage.size_bytes for storage in step.storages]
        self._items = [*_items(step, groups, small, ends)]
        self._order = [*range(len(groups))]
        self._place = [*range(len(groups))]
        self._ends = frozenset(ends)
        self._readers: dict[int, list[int]] = {}
        self._after: list[list[int]] = [[] for _ in groups]
        for number, item in enumerate(self._items):
            for storage in item.reads:
                self._readers.setdefault(storage, []).append(number)
            for other in item.before:
                self._after[other].append(number)
        self._alive = self._alive_bytes()

    def moved(self) -> list[OpGroup]:
        """The groups after the search."""
        for _ in range(PASSES):
            if not sum(self._earlier(number) or self._later(number) for number in range(len(self._items))):
                break
        return [self._groups[number] for number in self._order]

    def _alive_bytes(self) -> list[int]:
        """Bytes alive before each place, and at the end, above those that the side begins with."""
        changes = [0] * (len(self._items) + 1)
        for number, item in enumerate(self._items):
            changes[number + 1] += item.made_bytes
        for storage, readers in self._readers.items():
            if storage not in self._ends:
                changes[readers[-1] + 1] -= self._sizes[storage]
        return [*itertools.accumulate(changes)]

    def _earlier(self, number: int) -> bool:
        """Move a group to the earliest place that takes from all runs which it passes, if there is any."""
        item, place = self._items[number], self._place[number]
        first = max((self._place[other] + 1 for other in item.before), default=0)
        freed = _Falling((last, self._sizes[s]) for s, last in self._lasts(number) if last < place)
        if freed.before(place - 1) <= item.made_bytes:
            return False
        target, highest = place, self._peak(place)
        for at in range(place - 1, max(first, place - FURTHEST) - 1, -1):
            if freed.before(at) < item.made_bytes:
                break
            highest = max(highest, self._peak(at))
            if self._alive[at] + item.made_bytes + item.beside_bytes <= highest:
                target = at
        if target == place:
            return False
        after = [self._alive[at] + item.made_bytes - freed.before(at) for at in range(target, place)]
        self._alive[target + 1 : place + 1] = after
        self._put(number, target)
        return True

    def _later(self, number: int) -> bool:
        """Move a group to the latest place that takes from all runs which pass it, if there is any."""
        item, place = self._items[number], self._place[number]
        end = min((self._place[other] - 1 for other in self._after[number]), default=len(self._order) - 1)
        held = _Falling((last, self._sizes[s]) for s, last in self._lasts(number))
        if held.before(place + 1) >= item.made_bytes:
            return False
        target, highest = place, self._peak(place)
        for at in range(place + 1, min(end, place + FURTHEST) + 1):
            if held.before(at) > item.made_bytes:
                break
            highest = max(highest, self._peak(at))
            if self._alive[at + 1] + held.before(at + 1) + item.beside_bytes <= highest:
                target = at
        if target == place:
            return False
        after = [self._alive[at] - item.made_bytes + held.before(at) for at in range(place + 1, target + 2)]
        self._alive[place : target + 1] = after
        self._put(number, target)
        return True

    def _lasts(self, number: int) -> Iterator[tuple[int, int]]:
        """Storages that a group reads and that are let go of, with the last place at which another one reads them."""
        for storage in self._items[number].reads - self._ends:
            others = (self._place[reader] for reader in self._readers[storage] if reader != number)
            yield storage, max(others, default=-1)

    def _peak(self, place: int) -> int:
        item = self._items[self._order[place]]
        return self._alive[place] + item.made_bytes + item.beside_bytes

    def _put(self, number: int, target: int) -> None:
        place = self._place[number]
        self._order.insert(target, self._order.pop(place))
        for changed in range(min(place, target), max(place, target) + 1):
            self._place[self._order[changed]] = changed


class _Falling:
    """Bytes of storages by the place of their last use."""

    def __init__(self, lasts: Iterable[tuple[int, int]]) -> None:
        self._lasts = [*lasts]

    def before(self, place: int) -> int:
        """Bytes of the storages whose last use comes before a place."""
        return sum(size_bytes for last, size_bytes in self._lasts if last < place)


def _items(step: StepGraph, groups: Sequence[OpGroup], small: frozenset[int], ends: Collection[int]) -> Iterator[_Item]:
    used = {*ends, *(s for group in groups for ordinal in group.first_run for s in step.ops[ordinal].reads)}
    makers: dict[int, int] = {}
    fixed: list[int] = []
    for number, group in enumerate(groups):
        ops = [step.ops[ordinal] for ordinal in group.first_run]
        inside = {s for op in ops for s in op.makes}
        read = {s for op in ops for s in op.reads} - inside
        before = {makers[s] for s in read if s in makers}
        if any(op.random or op.once_reason for op in ops):
            before.update(fixed[-1:])
            fixed.append(number)
        makers.update(dict.fromkeys(inside, number))
        left = (used & set(step.ops[group.ops[-1]].makes)) - small
        made_bytes = sum(step.storages[s].size_bytes for s in left)
        beside = [step.ops[ordinal].transient_bytes for ordinal in group.once]
        beside += [bytes_ - made_bytes for bytes_ in inner_bytes(step, group.ops, small)]
        yield _Item(
            reads=frozenset(read) - small,
            made_bytes=made_bytes,
            beside_bytes=max(0, *beside),
            before=frozenset(before),
        )


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
        """Results of forward that nobody may hold any more at that peak, and an order hands over all the same."""
        handed = [storage for s, storage in enumerate(step.storages) if s in replay.handed - self.loss_kept]
        return sum(storage.size_bytes for storage in handed if storage.returned)


def problem_of_call(step: StepGraph, around: StepSurroundings, *, small_share: float = SMALL_SHARE) -> StepProblem:
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
        """The inputs, outputs and costs of a group."""
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
