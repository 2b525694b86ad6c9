"""What running stages as programs was measured to cost, in bytes and in seconds, from several steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from profiler.measurement.meter import Mark
from profiler.measurement.option_groups import OptionGroup, growth_of, marks_of, peak_of
from profiler.records import Phase


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
