"""Real steps with stages run as programs, first for the bytes and then for the seconds of these, and their costs.

What a program costs comes from several steps: bytes as they were seen, seconds made steady.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

from profiler.agreement import first_failure, gathered, made_by_rank0, merged_largest
from profiler.measurement.captured_stages import ProposeRuns
from profiler.measurement.meter import Mark, MarkedPhases, Meter, PhasesOfMark, by_mark, time_meter
from profiler.measurement.option_groups import (
    OptionGroup,
    ProgramsOf,
    growth_of,
    marks_of,
    memory_steps,
    peak_of,
    timed_steps,
)
from profiler.measurement.stage_probe import StageProbe
from profiler.records import MenuRecord, OptionRecord, Phase
from profiler.step_graph import runs_once
from profiler.workload.forward_patches import Forward
from profiler.workload.snapshot import RandomState


@dataclass(slots=True)
class ProgramCost:
    """What the program in which each op runs once was measured to cost.

    Attributes:
        forward_seconds, backward_seconds: of it.
        keep_forward_seconds, keep_backward_seconds: of the stage's own code, in the same steps.
        freed_bytes: how much less a forward leaves alive than that of the unplanned stage.
        forward_peak_bytes, backward_peak_bytes: above what is alive at the phase's start.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    keep_forward_seconds: float = 0.0
    keep_backward_seconds: float = 0.0
    freed_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0


class Costs:
    """Collects what the steps showed."""

    def __init__(self, groups: Sequence[OptionGroup], plain: Mapping[Mark, list[Phase]]) -> None:
        self._plain, self._groups = plain, groups
        self._costs = [ProgramCost() for _ in groups]
        self._samples: list[Sample] = []
        self._steps = 0

    def add_memory(self, programs: Collection[int], step: Mapping[Mark, list[Phase]]) -> None:
        """Take the bytes of a step under the memory meter, in which these stages ran as programs."""
        for group, cost in zip(self._groups, self._costs, strict=True):
            for k in (k for k in group.members if k in programs):
                forward, backward = (step.get(mark, []) for mark in marks_of(k))
                cost.freed_bytes = growth_of(self._plain[marks_of(k)[0]]) - growth_of(forward)
                cost.forward_peak_bytes, cost.backward_peak_bytes = peak_of(forward), peak_of(backward)

    def add_seconds(self, programs: Collection[int], step: Mapping[Mark, list[Phase]]) -> None:
        """Take the seconds of a step under the time meter, in which these stages ran as programs."""
        for group in (group for group in self._groups if group.is_captured):
            for k in group.members:
                for mark in marks_of(k):
                    seconds = sum(phase.seconds for phase in step.get(mark, []))
                    self._samples.append(Sample(self._steps, (mark.phase, group.family, k in programs), seconds))
        for mark, phases in step.items():
            if mark.place is None or mark.place.kind == "outside":  # The same in every step: it shows their pace.
                self._samples.append(Sample(self._steps, mark, sum(phase.seconds for phase in phases)))
        self._steps += 1

    def finish(self) -> list[ProgramCost]:
        """The costs by group."""
        seconds = steady_seconds(self._samples)
        for group, cost in zip(self._groups, self._costs, strict=True):
            for phase in ("forward", "backward"):
                keep, program = (seconds.get((phase, group.family, is_program), 0.0) for is_program in (False, True))
                setattr(cost, f"keep_{phase}_seconds", keep)
                setattr(cost, f"{phase}_seconds", program)
        return self._costs


class Sample(NamedTuple):
    """One timing of one thing, in one step."""

    step: int
    what: Hashable
    seconds: float


def steady_seconds(samples: Sequence[Sample]) -> dict[Hashable, float]:
    """What each thing takes at the pace of a typical step.

    A machine stalls and never hurries, so of several timings the lower quartile
    counts. It may be slower throughout a whole step, as others use it: every
    step's pace is the median, over the things timed in it, of their seconds there
    over their typical ones, each with the weight of these, and timings are divided by it before they count. What is
    timed once shows no pace.

    >>> slow = [Sample(0, "a", 2.0), Sample(0, "b", 4.0)]
    >>> steady_seconds([*slow, Sample(1, "a", 1.0), Sample(1, "b", 2.0)])
    {'a': 1.0, 'b': 2.0}
    """
    typical = _quartiles(samples)
    paces: dict[int, list[tuple[float, float]]] = {}
    times = Counter(sample.what for sample in samples)
    for step, what, seconds in samples:
        if typical[what] > 0 and times[what] > 1:
            paces.setdefault(step, []).append((seconds / typical[what], typical[what]))
    # The quartile is the pace of a quick step: none is counted as quicker.
    pace = {step: max(1.0, _weighted_median(ratios)) for step, ratios in paces.items()}
    return _quartiles([Sample(step, what, seconds / pace.get(step, 1.0)) for step, what, seconds in samples])


def _weighted_median(ratios: Sequence[tuple[float, float]]) -> float:
    """The ratio below and above which the others have the same weight."""
    half = sum(weight for _, weight in ratios) / 2
    below = 0.0
    for ratio, weight in sorted(ratios):
        below += weight
        if below >= half:
            return ratio
    return 1.0


def _quartiles(samples: Sequence[Sample]) -> dict[Hashable, float]:
    seconds_of: dict[Hashable, list[float]] = {}
    for sample in samples:
        seconds_of.setdefault(sample.what, []).append(sample.seconds)
    return {what: sorted(seconds)[len(seconds) // 4] for what, seconds in seconds_of.items()}


class ProgramSteps:
    """Runs the steps under one probe, and makes the menus of what they cost.

    Args:
        probe: of the workload's stages.
        plain: the intervals of an unplanned step under the memory meter, by mark.
        memory_meter: makes one for a step.
        randomness: that every step is run from.
        report: is told what runs next.
        timed: unplanned steps under the time meter: what programs are compared with.

    Attributes:
        late_phases: the optimizers' part of the step that was run late in training, under the memory meter.
    """

    def __init__(
        self,
        probe: StageProbe,
        plain: PhasesOfMark,
        memory_meter: Callable[[], Meter],
        randomness: RandomState,
        report: Callable[[str], None],
        timed: Sequence[MarkedPhases] = (),
    ) -> None:
        self._probe = probe
        self._plain = plain
        self._device = probe.workload.device
        self._memory_meter = memory_meter
        self._randomness = randomness
        self._report = report
        self._timed = timed
        self.late_phases: list[Phase] = []

    def measure(
        self,
        groups: Sequence[OptionGroup],
        programs: ProposeRuns | None,
        late_in_training: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[MenuRecord]:
        """One menu per group; a group whose program cannot be carried out is opaque and says why.

        Args:
            groups: captured where that is possible.
            programs: names the orders of a graph's ops that are worth having; each op once comes first.
            late_in_training: the last step under the memory meter is run in it; its optimizers' part is noted.
        """
        costs = self._costs(groups, late_in_training)
        if isinstance(costs, str) and len(groups) > 1:  # Some group fails: find out which, each on its own.
            self.late_phases = []
            return [menu for group in groups for menu in self.measure([group], programs)]
        if isinstance(costs, str):
            return [MenuRecord(ops=group.ops, opaque=costs) for group in groups]
        costs = merged_largest(gathered(costs), {"freed_bytes": min})
        return [self._menu(*each, programs) for each in zip(groups, costs, strict=True)]

    def _costs(
        self, groups: Sequence[OptionGroup], late_in_training: Callable[[], AbstractContextManager[None]]
    ) -> list[ProgramCost] | str:
        """The costs by group; or why a step failed."""
        costs, failure, raised = Costs(groups, self._plain), "", None
        for step in self._timed:
            costs.add_seconds((), by_mark(step))
        try:
            steps = memory_steps(groups)
            for left, running in zip(reversed(range(len(steps))), steps, strict=True):
                self._report("memory, programs")
                with nullcontext() if left else late_in_training():
                    step = by_mark(self._step(self._memory_meter(), running))
                costs.add_memory(running, step)
                self.late_phases = step.get(Mark("optimizer"), [])
            for running in timed_steps(groups):
                self._report("time, programs")
                costs.add_seconds(running, by_mark(self._step(time_meter(self._device), running)))
        except Exception as error:  # noqa: BLE001 - user code runs here; whatever it raises, programs cannot be used.
            failure, raised = f"running it as a program fails: {type(error).__name__}: {error}", error
        return first_failure(failure, raised) or costs.finish()

    def _step(self, meter: Meter, running: ProgramsOf) -> MarkedPhases:
        self._randomness.restore()
        return self._probe.replacing_step(meter, {k: _as_program(group, k) for k, group in running.items()}).phases

    def _menu(self, group: OptionGroup, cost: ProgramCost, programs: ProposeRuns | None) -> MenuRecord:
        captured = group.captured
        if captured is None or (graph := captured.graph) is None:
            return MenuRecord(ops=group.ops, opaque="" if captured is None else captured.opaque)
        assert programs is not None
        runs = runs_once(graph)
        once = OptionRecord(
            name="as a program",
            runs=runs,
            kept=(),
            rerun=(),
            forward_seconds=cost.forward_seconds,
            backward_seconds=cost.backward_seconds,
            freed_bytes=cost.freed_bytes,
            forward_peak_bytes=cost.forward_peak_bytes,
            backward_peak_bytes=cost.backward_peak_bytes,
        )
        menu = MenuRecord(
            ops=group.ops,
            options=(once,),
            keep_forward_seconds=cost.keep_forward_seconds,
            keep_backward_seconds=cost.keep_backward_seconds,
            graph=graph,
            unread=tuple(sorted(captured.unread)),
            gradients_held=any(captured.once[k].gradients_held for k in group.members),
        )
        if captured.orders is None:
            captured.orders = made_by_rank0(lambda: [*programs(graph)])
        menu = menu.with_programs(captured.orders)
        if not captured.other_bits:
            return menu
        return MenuRecord(
            ops=group.ops, opaque=captured.other_bits, compiled=replace(menu, other_bits=captured.other_bits)
        )


def _as_program(group: OptionGroup, k: int) -> Forward:
    captured = group.captured
    assert captured is not None
    return lambda *args, **kwargs: captured.run(k, args, kwargs)
