"""The replay of a step's ops in some order: the bytes alive in forward and in backward, storage by storage.

A storage is alive from the run that makes it to the last run that reads it, or to the end where it is handed on. What
is made again is another one from then on. So is what comes back from host memory; what goes there is alive until it may
be let go of.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from profiler.step_graph import Side, StepGraph

CopyKind = Literal["send", "release", "fetch"]


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
class StepCopy:
    """What happens to a storage that is in host memory meanwhile, between the runs of a side.

    Attributes:
        kind: ``send`` begins the copy to host memory; ``release`` waits until it is done, and lets go of the storage on
            the device; ``fetch`` takes it there again and begins the copy back, for which who reads it then waits.
        storage: its position in ``StepGraph.storages``.
        side: of the runs.
        before: position of the run that comes next; how many there are where none does.
    """

    kind: CopyKind
    storage: int
    side: Side
    before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SideReplay:
    """The bytes of one side's runs, above those of everything else.

    Attributes:
        peaks: the most bytes during each run.
        alive: bytes after each run.
        start_bytes, end_bytes: at its start and at its end.
    """

    peaks: tuple[int, ...]
    alive: tuple[int, ...]
    start_bytes: int
    end_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Of all runs."""
        return max((*self.peaks, self.start_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReplay:
    """Both sides. Backward begins with what forward hands over and the gradients that the loss makes.

    Attributes:
        handed: storages that forward hands over.
        between_bytes: of these and of what forward returns; what it writes into buffers is gone by then.
    """

    forward: SideReplay
    backward: SideReplay
    handed: frozenset[int]
    between_bytes: int


def runs_once(step: StepGraph) -> StepRuns:
    """Each op once, in the order in which they were traced."""
    forward = tuple(k for k, op in enumerate(step.ops) if op.side == "forward")
    return StepRuns(forward, tuple(k for k, op in enumerate(step.ops) if op.side == "backward"))


Run = TypeVar("Run")


def with_copies(runs: Sequence[Run], side: Side, copies: Iterable[StepCopy]) -> Iterator[Run | StepCopy]:
    """Runs of a side and the copies between them, in their order."""
    before: dict[int, list[StepCopy]] = {}
    for copy in copies:
        if copy.side == side:
            before.setdefault(copy.before, []).append(copy)
    for place, run in enumerate(runs):
        yield from before.get(place, ())
        yield run
    yield from before.get(len(runs), ())


def replay_step(
    step: StepGraph, runs: StepRuns, *, held: bool, copies: Sequence[StepCopy] = (), gradients_held: bool = False
) -> StepReplay:
    """The bytes of an order of runs.

    Args:
        step: what its ops read, make and take.
        runs: what runs when; who reads a storage comes after who makes it.
        held: whoever calls forward holds what it returns through backward, where it is not counted then.
        copies: what is in host memory meanwhile, where it does not count. What comes back is read on the same side.
        gradients_held: others hold the gradients that backward begins with until it ends.
    """
    sizes, sides = _sizes(step), _sides(step, runs, copies, held, gradients_held)
    return StepReplay(
        forward=_replay(*sides.forward, sizes),
        backward=_replay(*sides.backward, sizes),
        handed=sides.handed,
        between_bytes=sum(sizes[s] for s in sides.handed | _returned(step)),
    )


def _sizes(step: StepGraph) -> list[int]:
    """Of storages, behind them of the random states of ops, and behind these of what stands for copies on the host."""
    on_device = [storage.size_bytes for storage in step.storages] + [op.state_bytes for op in step.ops]
    return on_device + [0] * len(step.storages)


def _returned(step: StepGraph) -> frozenset[int]:
    return frozenset(s for s, storage in enumerate(step.storages) if storage.returned)


class _SideRuns(NamedTuple):
    """Runs of a side, what it takes, and what outlives it."""

    runs: list[_Run]
    taken: frozenset[int]
    ends: frozenset[int]


class _Sides(NamedTuple):
    """Both sides, and what forward hands over."""

    forward: _SideRuns
    backward: _SideRuns
    handed: frozenset[int]


def _sides(
    step: StepGraph, runs: StepRuns, copies: Sequence[StepCopy], held: bool, gradients_held: bool = False
) -> _Sides:
    storages = [*enumerate(step.storages)]
    of_loss = frozenset(s for s, storage in storages if storage.of_loss)
    gradients = frozenset(s for s, storage in storages if storage.gradient)
    written = frozenset(s for s, storage in storages if storage.written)
    forward, backward = _runs_of(step, runs, copies)
    made = {s for run in backward for s in run.makes}
    handed = frozenset(_read_first(backward) - of_loss | (gradients - made))
    returned = _returned(step)
    taken = handed - returned if held else handed
    return _Sides(
        forward=_SideRuns(forward, frozenset(), returned | written | handed),
        backward=_SideRuns(backward, taken | of_loss, gradients | of_loss if gradients_held else gradients),
        handed=handed,
    )


class AliveStorage(NamedTuple):
    """A storage that is alive during a run.

    Attributes:
        number: of the storage; of a random state the number of storages and the ordinal of the op that drew from it.
        size_bytes: of it.
        taken: it was there as the side began.
        again: the run that made it was not its op's first.
    """

    number: int
    size_bytes: int
    taken: bool
    again: bool


def alive_during(
    step: StepGraph,
    runs: StepRuns,
    side: Side,
    place: int,
    *,
    held: bool,
    copies: Sequence[StepCopy] = (),
    after: bool = False,
) -> list[AliveStorage]:
    """What is alive while a run of a side runs, what it makes included; with its transient bytes that is its peak.

    Args:
        step, runs, held, copies: as for ``replay_step``.
        side: which of both.
        place: of the run among those of its side.
        after: what is alive as the next one begins instead.
    """
    turns = alive_during_each(step, runs, side, held=held, copies=copies, after=after)
    return next(itertools.islice(turns, place, None))


def alive_during_each(
    step: StepGraph,
    runs: StepRuns,
    side: Side,
    *,
    held: bool,
    copies: Sequence[StepCopy] = (),
    after: bool = False,
) -> Iterator[list[AliveStorage]]:
    """The same of every run of a side in turn, by one replay."""
    sides = _sides(step, runs, copies, held)
    of_side = sides.forward if side == "forward" else sides.backward
    alive: dict[int, tuple[bool, bool]] = dict.fromkeys(of_side.taken, (True, False))
    ran = set[int]() if side == "forward" else set(runs.forward)
    dying, sizes = _dying(*of_side), _sizes(step)
    begun = False

    def on_device() -> list[AliveStorage]:
        numbers = [each for each in alive if each < len(step.storages) + len(step.ops)]
        return [AliveStorage(storage, sizes[storage], *alive[storage]) for storage in numbers]

    for number, run in enumerate(of_side.runs):
        if after and begun and run.ordinal is not None:
            yield on_device()
        alive.update((storage, (False, run.ordinal in ran)) for storage in run.makes)
        if run.ordinal is not None:
            ran.add(run.ordinal)
            begun = True
            if not after:
                yield on_device()
        for storage in dying[number]:
            alive.pop(storage, None)
    if after and begun:
        yield on_device()


class _Run(NamedTuple):
    """Of an op, or a copy, which has no ordinal."""

    ordinal: int | None
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    transient_bytes: int = 0


def _runs_of(step: StepGraph, runs: StepRuns, copies: Sequence[StepCopy]) -> tuple[list[_Run], list[_Run]]:
    """What runs read and make; random states are storages that an op's first run makes, and its other runs read.

    Copies are runs, too: one to the host makes something without bytes, which the copies back read.
    """
    counts = Counter([*runs.forward, *runs.backward])
    ran: set[int] = set()

    def run_of(item: int | StepCopy) -> _Run:
        if isinstance(item, StepCopy):
            return _copy_run(item, len(step.storages) + len(step.ops))
        op, state = step.ops[item], len(step.storages) + item
        again = item in ran
        ran.add(item)
        makes = tuple(s for s in op.makes if s not in op.once_makes) if again else op.makes
        if not op.state_bytes or counts[item] == 1:
            return _Run(item, op.reads, makes, op.transient_bytes)
        if again:  # The generator's own state is kept meanwhile.
            return _Run(item, (*op.reads, state), makes, op.transient_bytes + op.state_bytes)
        return _Run(item, op.reads, (*makes, state), op.transient_bytes)

    forward = [*map(run_of, with_copies(runs.forward, "forward", copies))]
    return forward, [*map(run_of, with_copies(runs.backward, "backward", copies))]


def _copy_run(copy: StepCopy, first_host: int) -> _Run:
    device, host = (copy.storage,), (first_host + copy.storage,)
    if copy.kind == "send":
        return _Run(None, device, host)
    if copy.kind == "fetch":
        return _Run(None, host, device)
    return _Run(None, (*device, *host), ())


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
        if run.ordinal is not None:  # What a copy takes is there in the run that comes next, too.
            peaks.append(alive + run.transient_bytes)
        alive -= sum(sizes[storage] for storage in dying[place])
        if run.ordinal is not None:
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
