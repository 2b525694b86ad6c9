"""A training step as one graph of ops: what each reads, makes and costs, forward and backward; plain data.

Its ops are replayed in some order: the bytes alive in forward and in backward, storage by storage. A storage is alive
from the run that makes it to the last run that reads it, or to the end where it is handed on. What is made again is
another one from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import msgspec

from profiler.json_files import check_positions
from profiler.op_graph import kind_of

Bytes = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Side = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOp:
    """One aten op of a step. Its ordinal is its position in ``StepGraph.ops``.

    Attributes:
        name: unique in the step.
        op: the name of the op, for example ``aten.mm.default``.
        module: name of the module whose forward calls it, or whose forward it is the backward of; empty where unknown.
        side: ``forward`` where the forward's outputs need it.
        reads: storages that it reads, parameters, buffers and the batch left out.
        arguments: the numbers of the arguments of a captured call that the op reads.
        makes: storages that it makes. A view makes none, and is no op here: who reads a view reads its storage.
        once_makes: the storages among them that only its first run makes: a batch norm's running statistics.
        once_reason: why it must not be recomputed; empty where it may.
        seconds: the time of one run.
        transient_bytes: the most it holds while it runs, beside what it reads and makes.
        random: whether it draws random numbers.
        state_bytes: the bytes, on the device, of the random state that it draws from; kept where it is recomputed.
    """

    name: str
    op: str
    module: str = ""
    side: Side = "forward"
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    once_makes: tuple[int, ...] = ()
    once_reason: str = ""
    seconds: Seconds = 0.0
    transient_bytes: Bytes = 0
    random: bool = False
    state_bytes: Bytes = 0
    arguments: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """The op's name without library and overload."""
        return kind_of(self.op)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStorage:
    """A storage that an op of the step makes, or the loss.

    Attributes:
        size_bytes: the size of the storage, however many tensors view it.
        unseen_bytes: the part of it that tracing does not show: some ops allocate more than what they return takes, and
            CUDA's allocator does.
        returned: the forward returns it.
        written: whether it is written into a buffer as the forward ends.
        gradient: whether it is a gradient of a parameter or an input, alive as the step's backward ends.
        of_loss: the loss makes it: the gradient of an output of the forward, with which backward begins.
    """

    size_bytes: Bytes
    unseen_bytes: Bytes = 0
    returned: bool = False
    written: bool = False
    gradient: bool = False
    of_loss: bool = False

    @property
    def traced_bytes(self) -> int:
        """The bytes that tracing shows."""
        return self.size_bytes - self.unseen_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """The dataflow of a step's forward and backward; between them the loss is outside of the model.

    Attributes:
        ops: the ops in the order in which they were traced, those of the forward first.
        storages: each referred to by its position.
        resident_bytes: the bytes that ops read and none makes: parameters, buffers, the batch, constants.
    """

    ops: tuple[StepOp, ...]
    storages: tuple[StepStorage, ...]
    resident_bytes: Bytes

    def check_positions(self) -> None:
        """Raises ValueError where an op refers to a storage that is not there, or reads one that none makes before."""
        made: set[int] = {number for number, storage in enumerate(self.storages) if storage.of_loss}
        for op in self.ops:
            check_positions("storages of an op", (*op.reads, *op.makes, *op.once_makes), len(self.storages))
            if missing := set(op.reads) - made - set(op.makes):
                raise ValueError(f"expected ops that read what ops before them make, got storage {min(missing)}")
            made.update(op.makes)


class StepRuns(NamedTuple):
    """Ordinals of a step's ops in the order of their runs, each as often as it runs, by side."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def again(self) -> Counter[int]:
        """Ordinals of the ops that run more than once, in the order of their first runs: how often beyond that."""
        counts = Counter([*self.forward, *self.backward])
        return Counter({ordinal: count - 1 for ordinal, count in counts.items() if count > 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class SideReplay:
    """The bytes of one side's runs, above those of everything else.

    Attributes:
        peaks: the most bytes during each run.
        alive: bytes after each run.
        start_bytes, end_bytes: the bytes alive at its start and at its end.
    """

    peaks: tuple[int, ...]
    alive: tuple[int, ...]
    start_bytes: int
    end_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The highest peak of all runs."""
        return max((*self.peaks, self.start_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReplay:
    """The replay of both sides. Backward begins with the storages that forward hands over and the loss's gradients.

    Attributes:
        handed: storages that forward hands over.
        between_bytes: the bytes of these and of the output of forward; those written into buffers are gone by then.
    """

    forward: SideReplay
    backward: SideReplay
    handed: frozenset[int]
    between_bytes: int


def runs_once(step: StepGraph) -> StepRuns:
    """Each op once, in the order in which they were traced."""
    forward = tuple(k for k, op in enumerate(step.ops) if op.side == "forward")
    return StepRuns(forward, tuple(k for k, op in enumerate(step.ops) if op.side == "backward"))


def without_unread_runs(step: StepGraph, runs: StepRuns) -> StepRuns:
    """The runs less those in backward whose results go unread before their op runs once more; never a higher peak.

    Searches keep the order in which ops first run: what is to run later runs twice in what they find.

    >>> made = StepOp(name="a", op="mm", side="backward", makes=(0,))
    >>> step = StepGraph(ops=(made,), storages=(StepStorage(size_bytes=4, gradient=True),), resident_bytes=0)
    >>> without_unread_runs(step, StepRuns((), (0, 0)))
    StepRuns(forward=(), backward=(0,))
    """
    read = {number for number, storage in enumerate(step.storages) if storage.gradient}
    runs_later: set[int] = set()
    kept: list[int] = []
    for ordinal in reversed(runs.backward):
        op = step.ops[ordinal]
        if ordinal in runs_later and op.makes and not op.random and read.isdisjoint(op.makes):
            continue
        kept.append(ordinal)
        runs_later.add(ordinal)
        read.difference_update(op.makes)
        read.update(op.reads)
    return StepRuns(runs.forward, tuple(reversed(kept)))


def replay_step(
    step: StepGraph, runs: StepRuns, *, gradients_held: bool = False, outputs_held: bool = False
) -> StepReplay:
    """The bytes of an order of runs.

    Args:
        step: the inputs, results and costs of its ops.
        runs: the order of the runs; an op that reads a storage comes after the one that makes it.
        gradients_held: others hold the gradients that backward begins with until it ends.
        outputs_held: others hold what forward returned until then.
    """
    sizes = [storage.size_bytes for storage in step.storages] + [op.state_bytes for op in step.ops]
    sides = _sides(step, runs, gradients_held, outputs_held)
    return StepReplay(
        forward=_replay(*sides.forward, sizes),
        backward=_replay(*sides.backward, sizes),
        handed=sides.handed,
        between_bytes=sum(sizes[s] for s in sides.handed | _returned(step)),
    )


def _returned(step: StepGraph) -> frozenset[int]:
    return frozenset(s for s, storage in enumerate(step.storages) if storage.returned)


class _SideRuns(NamedTuple):
    """Runs of a side, what it takes, and what outlives it."""

    runs: list[_Run]
    taken: frozenset[int]
    ends: frozenset[int]


class _Sides(NamedTuple):
    """The runs of both sides, and the storages that forward hands over."""

    forward: _SideRuns
    backward: _SideRuns
    handed: frozenset[int]


def _sides(step: StepGraph, runs: StepRuns, gradients_held: bool, outputs_held: bool) -> _Sides:
    storages = [*enumerate(step.storages)]
    of_loss = frozenset(s for s, storage in storages if storage.of_loss)
    gradients = frozenset(s for s, storage in storages if storage.gradient)
    written = frozenset(s for s, storage in storages if storage.written)
    forward, backward = _runs_of(step, runs)
    made = {s for run in backward for s in run.makes}
    handed = frozenset(_read_first(backward) - of_loss | (gradients - made))
    held = (of_loss if gradients_held else frozenset()) | (_returned(step) & handed if outputs_held else frozenset())
    return _Sides(
        forward=_SideRuns(forward, frozenset(), _returned(step) | written | handed),
        backward=_SideRuns(backward, handed | of_loss, gradients | held),
        handed=handed,
    )


class _Run(NamedTuple):
    """The storages that a run reads and makes; random states are storages behind those of the step, one of each op."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    transient_bytes: int = 0


def _runs_of(step: StepGraph, runs: StepRuns) -> tuple[list[_Run], list[_Run]]:
    """Returns the storages that runs read and make; the first run of an op makes its random state, others read it."""
    counts = Counter([*runs.forward, *runs.backward])
    ran: set[int] = set()

    def run_of(ordinal: int) -> _Run:
        op, state = step.ops[ordinal], len(step.storages) + ordinal
        again = ordinal in ran
        ran.add(ordinal)
        makes = tuple(s for s in op.makes if s not in op.once_makes) if again else op.makes
        if not op.state_bytes or counts[ordinal] == 1:
            return _Run(op.reads, makes, op.transient_bytes)
        if again:  # The generator's own state is kept meanwhile.
            return _Run((*op.reads, state), makes, op.transient_bytes + op.state_bytes)
        return _Run(op.reads, (*makes, state), op.transient_bytes)

    return [*map(run_of, runs.forward)], [*map(run_of, runs.backward)]


def _read_first(runs: Iterable[_Run]) -> set[int]:
    """Storages that are read before one of the runs makes them."""
    made: set[int] = set()
    found: set[int] = set()
    for run in runs:
        found.update(set(run.reads) - made)
        made.update(run.makes)
    return found


def _replay(runs: Sequence[_Run], taken: Collection[int], ends: Collection[int], sizes: Sequence[int]) -> SideReplay:
    dying = _dying(runs, taken, ends)
    start = alive = sum(sizes[storage] for storage in taken)
    peaks: list[int] = []
    after: list[int] = []
    for place, run in enumerate(runs):
        alive += sum(sizes[storage] for storage in run.makes)
        peaks.append(alive + run.transient_bytes)
        alive -= sum(sizes[storage] for storage in dying[place])
        after.append(alive)
    return SideReplay(peaks=tuple(peaks), alive=tuple(after), start_bytes=start, end_bytes=alive)


def _dying(runs: Sequence[_Run], taken: Collection[int], ends: Collection[int]) -> list[list[int]]:
    """Storages that go after each run. What is taken and never read stays: whoever hands it over may hold it."""
    made = dict.fromkeys(taken, -1)  # by storage the place of the run that made it last
    last_use = {(storage, -1): len(runs) for storage in taken}
    for place, run in enumerate(runs):
        for storage in run.reads:
            if storage in made:
                last_use[storage, made[storage]] = place
        for storage in run.makes:
            made[storage] = place
            last_use[storage, place] = place
    last_use.update({(storage, made[storage]): len(runs) for storage in ends if storage in made})
    dying: list[list[int]] = [[] for _ in range(len(runs) + 1)]
    for (storage, _), place in last_use.items():
        dying[place].append(storage)
    return dying
