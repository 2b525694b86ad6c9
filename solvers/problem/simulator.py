"""The replay of a chain's or a graph's schedule: memory timeline, seconds and copies, or what is impossible in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NoReturn

from solvers.problem.chain import Chain, Link, Option, Shared
from solvers.problem.deadline import check_deadline
from solvers.problem.graph import Graph
from solvers.problem.schedule import TRANSFERS, Action, Schedule

Direction = Literal["to_host", "to_device"]
_Phase = Literal["leaving", "away", "coming"]


class ReplayError(ValueError):
    """A schedule does something impossible; the message says at which action and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedAction:
    """One action of the timeline: bytes alive on the device before, at its peak, and after it.

    Attributes:
        begin_seconds: since the step began; the stall comes first.
        seconds: that the action takes, its stall included.
        stall_seconds: that it waits for a copy.
    """

    action: Action
    before_bytes: int
    peak_bytes: int
    after_bytes: int
    seconds: float
    begin_seconds: float = 0.0
    stall_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The copy of one offload unit, in seconds since the step began."""

    stage: int
    unit: int
    direction: Direction
    begin_seconds: float
    end_seconds: float
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The cost of a schedule.

    Attributes:
        timeline: one entry per action.
        peak_bytes: most bytes alive at once on the device, resident and optimizer included.
        seconds: sum over the actions, stalls included.
        stall_seconds: spent waiting for copies.
        host_peak_bytes: most bytes in host memory at once.
        copies: between device and host memory, in the order in which they were asked for.
    """

    timeline: tuple[ReplayedAction, ...]
    peak_bytes: int
    seconds: float
    stall_seconds: float = 0.0
    host_peak_bytes: int = 0
    copies: tuple[Copy, ...] = ()

    @property
    def peak_moment(self) -> ReplayedAction:
        """The action at which the peak stands; of a chain that of forward and backward, the optimizer's step aside."""
        return max(self.timeline, key=lambda entry: entry.peak_bytes)


def replay(problem: Chain | Graph, schedule: Schedule, link: Link | None = None) -> Replay:
    """Run ``schedule`` through a problem; resident bytes are part of every number of bytes.

    ``link``: to host memory; a schedule that offloads nothing needs none. Bytes on the device never depend on how fast
    it is.

    Raises:
        ReplayError: an action of a chain needs something that is not alive, a stage goes
            backward out of order or twice, host memory does not suffice, or the step does not finish. Of a graph: an
            input is not alive, something alive is run again, something dead is freed, a node's first run is out of
            order or missing, one that must run once runs again, or an output is not alive at the end.

    >>> from solvers.problem.graph import Node
    >>> a = Node(name="a", seconds=1.0, output_bytes=4, transient_bytes=3)
    >>> graph = Graph(nodes=(a, Node(name="b", seconds=2.0, output_bytes=1, inputs=("a",))), outputs=("b",))
    >>> run = (Action("run", 0), Action("run", 1), Action("free", 0))
    >>> [entry.peak_bytes for entry in replay(graph, Schedule(actions=run)).timeline]
    [7, 5, 5]
    """
    if isinstance(problem, Graph):
        return _replay_graph(problem, schedule)
    state = _ReplayState(problem, link)
    timeline = tuple(state.run(position, action) for position, action in enumerate(schedule.actions))
    if state.pending >= 0:
        raise ReplayError(f"the schedule ends before the backward of stage {state.pending}")
    peak = max(entry.peak_bytes for entry in timeline)
    return Replay(
        timeline=timeline,
        peak_bytes=max(peak, problem.optimizer_peak_bytes),
        seconds=sum(entry.seconds for entry in timeline),
        stall_seconds=sum(entry.stall_seconds for entry in timeline),
        host_peak_bytes=state.engines.host_peak_bytes,
        copies=tuple(state.engines.copies),
    )


def _replay_graph(graph: Graph, schedule: Schedule) -> Replay:
    index = {node.name: i for i, node in enumerate(graph.nodes)}
    alive: set[int] = set()
    ran = [False] * len(graph.nodes)
    alive_bytes, first_runs, now = graph.resident_bytes, 0, 0.0
    timeline: list[ReplayedAction] = []
    for position, action in enumerate(schedule.actions):
        node, before_bytes = graph.nodes[action.stage], alive_bytes
        if action.kind == "free":
            if action.stage not in alive:
                raise ReplayError(f"action {position}: frees {node.name!r}, which is not alive")
            peak_bytes, seconds = alive_bytes, 0.0
            alive.discard(action.stage)
            alive_bytes -= node.output_bytes
        elif action.kind != "run":
            raise ReplayError(f"action {position}: a graph has no action {action.kind!r}")
        else:
            missing = [name for name in node.inputs if index[name] not in alive]
            if missing:
                raise ReplayError(f"action {position}: runs {node.name!r} without its inputs {missing}")
            if action.stage in alive:
                raise ReplayError(f"action {position}: runs {node.name!r}, whose output is alive")
            if action.stage > first_runs:
                due = graph.nodes[first_runs].name
                raise ReplayError(f"action {position}: the first run of {node.name!r} comes before that of {due!r}")
            if node.once and ran[action.stage]:
                raise ReplayError(f"action {position}: runs {node.name!r} again, which must run once")
            first_runs += action.stage == first_runs
            alive.add(action.stage)
            ran[action.stage] = True
            alive_bytes += node.output_bytes
            peak_bytes, seconds = alive_bytes + node.transient_bytes, node.seconds
        timeline.append(
            ReplayedAction(
                action=action,
                before_bytes=before_bytes,
                peak_bytes=peak_bytes,
                after_bytes=alive_bytes,
                seconds=seconds,
                begin_seconds=now,
            )
        )
        now += seconds
    if first_runs < len(graph.nodes):
        raise ReplayError(f"the end: {graph.nodes[first_runs].name!r} has never run")
    dead = [name for name in graph.outputs if index[name] not in alive]
    if dead:
        raise ReplayError(f"the end: outputs {dead} are not alive")
    return Replay(timeline=tuple(timeline), peak_bytes=max(entry.peak_bytes for entry in timeline), seconds=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSet:
    """The bytes that a step holds in addition to its resident ones as one of its actions begins.

    All numbers are those of stages, but for ``shared``.

    Attributes:
        boundaries: their outputs.
        kept: what they keep, with the option.
        residues: what they left behind without being kept.
        shared: positions in ``Chain.shared``.
        gradients: their parameters' gradients.
        incoming: the gradients that its backward begins with; None before the first backward.
        away: stage and offload unit of what is in host memory alone, though the stage counts as holding it.
    """

    boundaries: tuple[int, ...]
    kept: dict[int, Option]
    residues: tuple[int, ...]
    shared: tuple[int, ...]
    gradients: tuple[int, ...]
    incoming: int | None
    away: tuple[tuple[int, int], ...] = ()


def alive_before(chain: Chain, schedule: Schedule, position: int) -> LiveSet:
    """The parts of ``before_bytes`` of action ``position``.

    Raises:
        ReplayError: an action before it is impossible.
    """
    state = _ReplayState(chain, _ANY_LINK)
    for k, action in enumerate(schedule.actions[:position]):
        state.run(k, action)
    return state.alive(schedule.actions[position])


def alive_before_each(chain: Chain, schedule: Schedule) -> Iterator[LiveSet]:
    """The same of every action in turn, by one replay."""
    state = _ReplayState(chain, _ANY_LINK)
    for position, action in enumerate(schedule.actions):
        yield state.alive(action)
        state.run(position, action)


_ANY_LINK = Link(to_host_bytes_per_second=math.inf, to_device_bytes_per_second=math.inf)  # bytes depend on none


class _ReplayState:
    """The memory alive while a schedule runs. Boundary k is the output of stage k; the chain's input is resident."""

    def __init__(self, chain: Chain, link: Link | None) -> None:
        self.chain = chain
        self.engines = _CopyEngines(link)
        self.now = 0.0
        self.boundaries: set[int] = set()
        self.kept: dict[int, Option] = {}
        self.residues: set[int] = set()
        self.held_bytes = 0  # of boundaries, residues and what is kept
        self.reached = -1  # last stage whose first forward has run
        self.pending = len(chain.stages) - 1  # next stage to go backward
        self.position = 0
        self.gradients_from = [0] * (len(chain.stages) + 1)  # parameter gradients of stage k and all later ones
        for k in reversed(range(len(chain.stages))):
            self.gradients_from[k] = self.gradients_from[k + 1] + chain.stages[k].parameter_gradient_bytes

    def live_bytes(self) -> int:
        stages = self.chain.stages
        total = self.chain.resident_bytes + self.held_bytes
        total += sum(tensor.size_bytes for tensor in self.chain.shared if self._holds(tensor))
        total += self.gradients_from[self.pending + 1]
        if self.reached == len(stages) - 1 and self.pending >= 0:
            total += stages[self.pending].gradient_bytes
        return total - self.engines.away_bytes

    def _stage_bytes(self, k: int) -> int:
        """The held bytes of one stage: its boundary, the tensors that it keeps, its residue."""
        stage, option = self.chain.stages[k], self.kept.get(k)
        total = stage.boundary_bytes if k in self.boundaries else 0
        if option is not None:
            total += option.kept_bytes + (0 if k in self.boundaries else option.kept_output_bytes)
        return total + (stage.residue_bytes if k in self.residues else 0)

    def alive(self, action: Action) -> LiveSet:
        forward_over = self.reached == len(self.chain.stages) - 1
        again = {action.stage} if action.kind == "recompute" else set()
        return LiveSet(
            boundaries=tuple(sorted(self.boundaries)),
            kept=dict(sorted(self.kept.items())),
            residues=tuple(sorted(self.residues - again)),
            shared=tuple(i for i, tensor in enumerate(self.chain.shared) if self._holds(tensor)),
            gradients=tuple(range(self.pending + 1, len(self.chain.stages))),
            incoming=self.pending if forward_over and self.pending >= 0 else None,
            away=self.engines.away(),
        )

    def _holds(self, tensor: Shared) -> bool:
        """Whether anything holds a shared tensor now."""
        if self.reached < tensor.born or self.pending < 0:
            return False
        forward_over = self.reached == len(self.chain.stages) - 1
        if self.reached < tensor.forward_death or any(k in self.kept for k in tensor.savers):
            return True
        if any(self._waits(k) for k in tensor.readers):
            return True
        if any(self._waits(k) and k - 1 in self.boundaries for k in tensor.linked_readers):
            return True
        return forward_over and tensor.held_until is not None and self.pending >= tensor.held_until

    def _waits(self, k: int) -> bool:
        """Stage k has run, keeps nothing, and has its backward still to come."""
        return k <= self.reached and k <= self.pending and k not in self.kept

    def run(self, position: int, action: Action) -> ReplayedAction:
        self.position = position
        if not 0 <= action.stage < len(self.chain.stages):
            self._fail(f"stage {action.stage} does not exist")
        check_deadline()
        stage_bytes = self._stage_bytes(action.stage)
        if action.kind == "recompute" and action.stage in self.residues:
            self.residues.discard(action.stage)
            self.held_bytes -= self.chain.stages[action.stage].residue_bytes
            stage_bytes = self._stage_bytes(action.stage)
        before_bytes, begin_seconds = self.live_bytes(), self.now
        try:
            above_bytes, seconds, stall_seconds = self._act(action)
        except _CopyError as error:
            raise ReplayError(f"action {position}: {error}") from error
        self.held_bytes += self._stage_bytes(action.stage) - stage_bytes
        after_bytes = self.live_bytes()
        self.now += stall_seconds + seconds
        return ReplayedAction(
            action=action,
            before_bytes=before_bytes,
            peak_bytes=max(before_bytes + above_bytes, before_bytes, after_bytes),
            after_bytes=after_bytes,
            seconds=stall_seconds + seconds,
            begin_seconds=begin_seconds,
            stall_seconds=stall_seconds,
        )

    def _act(self, action: Action) -> tuple[int, float, float]:
        """Peak above the bytes before, seconds of the action itself, and seconds that it waits for copies."""
        if action.kind in TRANSFERS:
            return 0, 0.0, self._transfer(action)
        if action.kind == "run":
            self._fail("a chain has no action 'run'")
        stall = 0.0 if action.kind == "free" else self.engines.hand_over(action.stage, self.now)
        return *getattr(self, f"_{action.kind}")(action), stall

    def _transfer(self, action: Action) -> float:
        size_bytes, unit = self._unit_bytes(action), action.option or 0
        if action.kind == "release":
            return self.engines.release(action.stage, unit, self.now)
        if action.kind == "fetch":
            self.engines.fetch(action.stage, unit, self.now)
        else:
            self.engines.send(action.stage, unit, size_bytes, self.now)
        return 0.0

    def _unit_bytes(self, action: Action) -> int:
        """Size of an offload unit of what the stage holds: what it keeps, or its input while it waits to run again."""
        k = action.stage
        if k in self.kept:
            units = self.kept[k].offload_units
        elif self._waits(k) and (k == 0 or k - 1 in self.boundaries):
            units = self.chain.stages[k].offload_units
        else:
            self._fail(f"stage {k} holds nothing that can be offloaded")
        if action.option is None or not 0 <= action.option < len(units):
            self._fail(f"stage {k} holds no offload unit {action.option}")
        return units[action.option]

    def _forward(self, action: Action) -> tuple[int, float]:
        k, stage = action.stage, self.chain.stages[action.stage]
        self._need_input(k)
        if k > self.reached + 1:
            self._fail(f"stage {k} runs before stage {k - 1}")
        first = k == self.reached + 1
        self._check_runnable(action, first)
        if k + 1 not in self.kept and self.engines.has_transfers(k + 1):
            self._fail(f"stage {k} is run again while parts of its output, the input of stage {k + 1}, are away")
        if first:
            self.reached = k
        self.boundaries.add(k)
        if action.option is None:
            if first and stage.residue_bytes:
                self.residues.add(k)
            return stage.forward_peak_bytes + self._held_on_bytes(k, first, dropped=True), stage.forward_seconds
        self.residues.discard(k)
        option = self.kept[k] = self._option(action)
        seconds = option.forward_seconds if first else option.rerun_seconds
        return option.forward_peak_bytes + self._held_on_bytes(k, first, dropped=False), seconds

    def _held_on_bytes(self, k: int, first: bool, dropped: bool) -> int:
        """Shared bytes that this forward would let go of before its peak, if nothing held them now that it has run."""
        early = [t for t in self.chain.shared if first and t.forward_death == k and t.forward_death_is_early]
        # A reader that is dropped holds them itself, with which its peak is given.
        return sum(t.size_bytes for t in early if self._holds(t) and not (dropped and k in t.readers))

    def _recompute(self, action: Action) -> tuple[int, float]:
        k = action.stage
        self._need_input(k)
        if k > self.reached or k != self.pending or self.reached < len(self.chain.stages) - 1:
            self._fail(f"stage {k} is recomputed, but it is not the next to go backward")
        self._check_runnable(action, first=False)
        option = self.kept[k] = self._option(action)
        return option.recompute_peak_bytes, option.recompute_seconds

    def _backward(self, action: Action) -> tuple[int, float]:
        k = action.stage
        if self.reached < len(self.chain.stages) - 1 or k != self.pending:
            self._fail(f"stage {k} goes backward out of order; stage {self.pending} is next")
        if k not in self.kept:
            self._fail(f"stage {k} goes backward, but nothing of it is kept")
        self._need_input(k)
        option = self.kept.pop(k)
        self.pending = k - 1
        early = [tensor for tensor in self.chain.shared if tensor.early_backward_death == k]
        held_on_bytes = sum(tensor.size_bytes for tensor in early if self._holds(tensor))
        return option.backward_peak_bytes + held_on_bytes, option.backward_seconds

    def _free(self, action: Action) -> tuple[int, float]:
        k = action.stage
        if k not in self.boundaries:
            self._fail(f"boundary {k} is freed, but it is not alive")
        reader = k + 1
        if reader < len(self.chain.stages) and reader <= self.pending:
            if reader in self.kept:
                self._fail(f"boundary {k} is freed while stage {reader}, which is kept, still needs it")
            if self.engines.has_transfers(reader):
                self._fail(f"boundary {k} is freed while parts of it, the input of stage {reader}, are away")
            if not self.chain.stages[reader].linked:
                self._fail(f"boundary {k} is freed, but stage {reader} cannot get it back: they are not linked")
            if reader > self.reached:
                self._fail(f"boundary {k} is freed before stage {reader} has run")
        self.boundaries.discard(k)
        return 0, 0.0

    def _check_runnable(self, action: Action, first: bool) -> None:
        k, stage = action.stage, self.chain.stages[action.stage]
        if k in self.kept:
            self._fail(f"stage {k} is run again while it is kept")
        if k > self.pending:
            self._fail(f"stage {k} is run after its backward")
        if not stage.recomputable and (not first or action.option is None):
            self._fail(f"stage {k} ({stage.name}) must run once and be kept")

    def _need_input(self, k: int) -> None:
        if k > 0 and (k - 1) not in self.boundaries:
            self._fail(f"stage {k} needs boundary {k - 1}, which is not alive")

    def _option(self, action: Action) -> Option:
        options = self.chain.stages[action.stage].options
        if action.option is None or not 0 <= action.option < len(options):
            self._fail(f"stage {action.stage} has no option {action.option}")
        return options[action.option]

    def _fail(self, why: str) -> NoReturn:
        raise ReplayError(f"action {self.position}: {why}")


class _CopyError(ValueError):
    """A copy that cannot be; the message says why."""


@dataclass(slots=True)
class _Transfer:
    size_bytes: int
    phase: _Phase
    done_seconds: float  # of the copy that began last


class _CopyEngines:
    """Both engines take copies one after another, in the order in which they are asked for.

    Attributes:
        copies: all that were asked for, in that order.
        away_bytes: that offload units in host memory leave free on the device.
        host_bytes: in use; an offload unit takes them from the begin of its copy until its stage has it again.
        host_peak_bytes: the most until now.
    """

    def __init__(self, link: Link | None) -> None:
        self.copies: list[Copy] = []
        self.away_bytes = 0
        self.host_bytes = 0
        self.host_peak_bytes = 0
        self._link = link if link is not None and link.usable else None
        self._free_seconds: dict[Direction, float] = {"to_host": 0.0, "to_device": 0.0}
        self._transfers: dict[tuple[int, int], _Transfer] = {}

    def away(self) -> tuple[tuple[int, int], ...]:
        """Stage and offload unit of all that is not on the device."""
        return tuple(sorted(key for key, transfer in self._transfers.items() if transfer.phase == "away"))

    def has_transfers(self, stage: int) -> bool:
        """Whether any offload unit of a stage was sent away and is not handed back to it."""
        return any(key[0] == stage for key in self._transfers)

    def send(self, stage: int, unit: int, size_bytes: int, now: float) -> None:
        """Begin to copy an offload unit to host memory."""
        if self._link is None:
            raise _CopyError("something is sent to host memory, but there is no usable link")
        if (stage, unit) in self._transfers:
            raise _CopyError(f"offload unit {unit} of stage {stage} is sent twice")
        limit = self._link.host_bytes
        self.host_bytes += size_bytes
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        if limit is not None and self.host_bytes > limit:
            raise _CopyError(f"{self.host_bytes} bytes of host memory are used, the limit is {limit}")
        done = self._copy(stage, unit, size_bytes, "to_host", self._link.to_host_seconds(size_bytes), now)
        self._transfers[stage, unit] = _Transfer(size_bytes, "leaving", done)

    def release(self, stage: int, unit: int, now: float) -> float:
        """Give back an offload unit's device bytes; returns the seconds that the computation waits for its copy."""
        transfer = self._find(stage, unit, "leaving")
        transfer.phase = "away"
        self.away_bytes += transfer.size_bytes
        return max(0.0, transfer.done_seconds - now)

    def fetch(self, stage: int, unit: int, now: float) -> None:
        """Take an offload unit's device bytes again and begin to copy it back."""
        assert self._link is not None
        transfer = self._find(stage, unit, "away")
        transfer.phase = "coming"
        self.away_bytes -= transfer.size_bytes
        seconds = self._link.to_device_seconds(transfer.size_bytes)
        transfer.done_seconds = self._copy(stage, unit, transfer.size_bytes, "to_device", seconds, now)

    def hand_over(self, stage: int, now: float) -> float:
        """The stage uses its offload units; returns the seconds that it waits until all of them are back."""
        keys = [key for key in self._transfers if key[0] == stage]
        ready_seconds = now
        for key in keys:
            transfer = self._transfers.pop(key)
            if transfer.phase != "coming":
                raise _CopyError(f"stage {stage} needs its offload unit {key[1]}, which is not fetched back")
            ready_seconds = max(ready_seconds, transfer.done_seconds)
            self.host_bytes -= transfer.size_bytes
        return ready_seconds - now

    def _copy(self, stage: int, unit: int, size_bytes: int, direction: Direction, seconds: float, now: float) -> float:
        begin = max(self._free_seconds[direction], now)
        end = self._free_seconds[direction] = begin + seconds
        self.copies.append(
            Copy(
                stage=stage,
                unit=unit,
                direction=direction,
                begin_seconds=begin,
                end_seconds=end,
                size_bytes=size_bytes,
            )
        )
        return end

    def _find(self, stage: int, unit: int, phase: _Phase) -> _Transfer:
        transfer = self._transfers.get((stage, unit))
        if transfer is None or transfer.phase != phase:
            wanted = "on its way to host memory" if phase == "leaving" else "in host memory alone"
            raise _CopyError(f"offload unit {unit} of stage {stage} is not {wanted}")
        return transfer
