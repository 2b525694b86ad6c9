"""The seconds of a step's copies over a link: one engine each way, beside the computation, which waits for some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from profiler.graph_profile import GraphProfile
from profiler.step_graph import StepGraph
from profiler.step_replay import StepCopy, StepRuns, with_copies
from solvers.problem.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """How long a step computes.

    Attributes:
        of_op: of one run of each op, by its ordinal.
        between: from the end of forward to the begin of backward.
    """

    of_op: tuple[float, ...]
    between: float

    @classmethod
    def of(cls, profile: GraphProfile) -> StepSeconds:
        """As measured: a program's seconds, shared among its ops by their own.

        Ops by themselves take longer than in their program where the device waits for the host in between.
        """
        ops = profile.graph.ops
        programs = {"forward": profile.forward.seconds, "backward": profile.backward.seconds}
        whole = {side: sum(op.seconds for op in ops if op.side == side) for side in programs}
        factors = {side: programs[side] / whole[side] if whole[side] > 0 else 1.0 for side in programs}
        return cls(of_op=tuple(op.seconds * factors[op.side] for op in ops), between=profile.between.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTimes:
    """What copies cost.

    Attributes:
        stall_seconds: in which the computation waits for them.
        host_peak_bytes: the most in host memory at once, from when a copy there begins until the last one back is read.
    """

    stall_seconds: float
    host_peak_bytes: int


def copy_times(
    step: StepGraph, runs: StepRuns, copies: Sequence[StepCopy], link: Link, seconds: StepSeconds
) -> CopyTimes:
    """Replay copies beside runs; each engine takes copies in their order, and one back begins when it is asked for.

    Args:
        step: whose storages are copied.
        runs: what runs when.
        copies: between the runs.
        link: over which they go.
        seconds: that computation takes.
    """
    clock = _Clock(step, copies, link)
    for item in with_copies(runs.forward, "forward", copies):
        clock.take(item, seconds)
    clock.now += seconds.between
    for item in with_copies(runs.backward, "backward", copies):
        clock.take(item, seconds)
    return CopyTimes(stall_seconds=clock.stall_seconds, host_peak_bytes=clock.host_peak_bytes)


class _Clock:
    """Goes through runs and copies in their order."""

    def __init__(self, step: StepGraph, copies: Sequence[StepCopy], link: Link) -> None:
        self.now = self.stall_seconds = 0.0
        self.host_peak_bytes = 0
        self._step, self._link = step, link
        self._host_bytes = 0
        self._to_host_free = self._to_device_free = 0.0
        self._sent: dict[int, float] = {}  # by storage when its copy is in host memory
        self._coming: dict[int, float] = {}  # by storage when it will be back
        self._to_fetch = Counter(copy.storage for copy in copies if copy.kind == "fetch")

    def take(self, item: int | StepCopy, seconds: StepSeconds) -> None:
        """What comes next: a run, by its op's ordinal, or a copy."""
        if isinstance(item, StepCopy):
            self._copy(item)
            return
        for storage in self._step.ops[item].reads:
            if storage in self._coming:
                self._arrive(storage)
        self.now += seconds.of_op[item]

    def _copy(self, copy: StepCopy) -> None:
        size_bytes = self._step.storages[copy.storage].size_bytes
        if copy.kind == "send":
            self._to_host_free = max(self._to_host_free, self.now) + self._link.to_host_seconds(size_bytes)
            self._sent[copy.storage] = self._to_host_free
            self._host_bytes += size_bytes
            self.host_peak_bytes = max(self.host_peak_bytes, self._host_bytes)
        elif copy.kind == "release":
            self._wait_until(self._sent[copy.storage])
        else:
            begin = max(self._to_device_free, self.now, self._sent[copy.storage])
            self._to_device_free = begin + self._link.to_device_seconds(size_bytes)
            self._coming[copy.storage] = self._to_device_free

    def _arrive(self, storage: int) -> None:
        self._wait_until(self._coming.pop(storage))
        self._to_fetch[storage] -= 1
        if not self._to_fetch[storage]:
            self._host_bytes -= self._step.storages[storage].size_bytes

    def _wait_until(self, moment: float) -> None:
        self.stall_seconds += max(0.0, moment - self.now)
        self.now = max(self.now, moment)
