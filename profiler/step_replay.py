"""The replay of a step's ops in some order: the bytes alive in forward and in backward, storage by storage.

A storage is alive from the run that makes it to the last run that reads it, or to the end where it is handed on. What
is made again is another one from then on. So is what comes back from host memory; what goes there is alive until it may
be let go of.
"""

from __future__ import annotations

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


def replay_step(step: StepGraph, runs: StepRuns, *, held: bool, copies: Sequence[StepCopy] = ()) -> StepReplay:
    """The bytes of an order of runs.

    Args:
        step: what its ops read, make and take.
        runs: what runs when; who reads a storage comes after who makes it.
        held: whoever calls forward holds what it returns through backward, where it is not counted then.
        copies: what is in host memory meanwhile, where it does not count. What comes back is read on the same side.
    """
    storages = [*enumerate(step.storages)]
    sizes = [storage.size_bytes for storage in step.storages] + [op.state_bytes for op in step.ops]
    sizes += [0] * len(step.storages)  # of what stands for copies in host memory
    of_loss = {s for s, storage in storages if storage.of_loss}
    gradients = {s for s, storage in storages if storage.gradient}
    forward, backward = _runs_of(step, runs, copies)
    made = {s for run in backward for s in run.makes}
    handed = _read_first(backward) - of_loss | (gradients - made)
    returned = {s for s, storage in storages if storage.returned}
    written = {s for s, storage in storages if storage.written}
    taken = {s for s in handed if not held or s not in returned}
    return StepReplay(
        forward=_replay(forward, sizes, (), returned | written | handed),
        backward=_replay(backward, sizes, taken | of_loss, gradients),
        handed=frozenset(handed),
        between_bytes=sum(sizes[s] for s in handed | returned),
    )


class _Run(NamedTuple):
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    transient_bytes: int = 0
    is_copy: bool = False


def _runs_of(step: StepGraph, runs: StepRuns, copies: Sequence[StepCopy]) -> tuple[list[_Run], list[_Run]]:
    """What runs read and make; random states are storages that an op's first run makes, and its other runs read.

    Copies are runs, too: one to the host makes something without bytes, which the copies back read.
    """
    counts = Counter([*runs.forward, *runs.backward])
    ran: set[int] = set()

    def run_of(item: int | StepCopy) -> _Run:
        if isinstance(item, StepCopy):
            return _copy_run(item, len(step.storages) + len(step.ops))
        ordinal = item
        op, state = step.ops[ordinal], len(step.storages) + ordinal
        again = ordinal in ran
        ran.add(ordinal)
        makes = tuple(s for s in op.makes if s not in op.once_makes) if again else op.makes
        if not op.state_bytes or counts[ordinal] == 1:
            return _Run(op.reads, makes, op.transient_bytes)
        if again:  # The generator's own state is kept meanwhile.
            return _Run((*op.reads, state), makes, op.transient_bytes + op.state_bytes)
        return _Run(op.reads, (*makes, state), op.transient_bytes)

    forward = [*map(run_of, with_copies(runs.forward, "forward", copies))]
    return forward, [*map(run_of, with_copies(runs.backward, "backward", copies))]


def _copy_run(copy: StepCopy, first_host: int) -> _Run:
    device, host = (copy.storage,), (first_host + copy.storage,)
    if copy.kind == "send":
        return _Run(device, host, is_copy=True)
    if copy.kind == "fetch":
        return _Run(host, device, is_copy=True)
    return _Run((*device, *host), (), is_copy=True)


def _read_first(runs: Iterable[_Run]) -> set[int]:
    """Storages that are read before one of the runs makes them."""
    made: set[int] = set()
    found: set[int] = set()
    for run in runs:
        found.update(set(run.reads) - made)
        made.update(run.makes)
    return found


def _replay(runs: Sequence[_Run], sizes: Sequence[int], taken: Collection[int], ends: Collection[int]) -> SideReplay:
    dying = _dying(runs, taken, ends)
    start = alive = sum(sizes[storage] for storage in taken)
    peaks: list[int] = []
    after: list[int] = []
    for place, run in enumerate(runs):
        alive += sum(sizes[storage] for storage in run.makes)
        if not run.is_copy:  # What a copy takes is there in the run that comes next, too.
            peaks.append(alive + run.transient_bytes)
        alive -= sum(sizes[storage] for storage in dying[place])
        if not run.is_copy:
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
