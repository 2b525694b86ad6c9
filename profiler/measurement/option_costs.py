"""What choices inside stages were measured to cost, in bytes and in seconds, from several steps."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from profiler.measurement.meter import Mark, Place
from profiler.measurement.stage_marks import OpRun
from profiler.measurement.stage_options import (
    KEEP,
    Assignment,
    ChoiceCost,
    OptionGroup,
    families_of,
    growth_of,
    marks_of,
    peak_of,
)
from profiler.op_graph import Choice, StageOps
from profiler.recomputation.selection import Selection
from profiler.records import Phase


class Costs:
    """Collects what the steps showed."""

    def __init__(self, groups: Sequence[OptionGroup], plain: Mapping[Mark, list[Phase]]) -> None:
        self._plain = plain
        self._groups = groups
        self._bytes = [[ChoiceCost() for _ in group.choices] for group in groups]
        self._samples: list[Sample] = []
        self._reran: dict[tuple[int, int], frozenset[OpRun]] = {}
        self._steps = 0

    def add_memory(self, assignment: Assignment, step: Mapping[Mark, list[Phase]]) -> None:
        """Take the bytes of a step under the memory meter."""
        for k, (group, choice) in assignment.items():
            forward, backward = (step.get(mark, []) for mark in marks_of(k))
            cost = self._bytes[group][choice]
            cost.freed_bytes = growth_of(self._plain[marks_of(k)[0]]) - growth_of(forward)
            cost.forward_peak_bytes = peak_of(forward)
            cost.backward_peak_bytes = peak_of(backward)

    def add_seconds(
        self,
        assignment: Assignment,
        step: Mapping[Mark, list[Phase]],
        reran: Mapping[int, Sequence[OpRun]] = MappingProxyType({}),
    ) -> None:
        """Take the seconds of a step under the time meter.

        Args:
            assignment: what the stages did; groups are families.
            step: its intervals.
            reran: by stage, the ops that ran again or were packed or unpacked, one for each interval ``again``.
        """
        for k, (group, choice) in assignment.items():
            ops = reran.get(k, ())
            if choice != KEEP:
                self._reran[group, choice] = frozenset(ops)
            for op, phase in zip(ops, step.get(Mark("again", Place("stage", k)), []), strict=True):
                self._samples.append(Sample(self._steps, ("again", group, op), phase.seconds))
            for mark in marks_of(k):
                seconds = sum(phase.seconds for phase in step.get(mark, []))
                self._samples.append(Sample(self._steps, (mark.phase, group, choice), seconds))
        for mark, phases in step.items():
            if mark.place is None or mark.place.kind == "outside":  # The same in every step: it shows their pace.
                self._samples.append(Sample(self._steps, mark, sum(phase.seconds for phase in phases)))
        self._steps += 1

    def finish(self) -> list[list[ChoiceCost]]:
        """The costs by group and choice; the last of each group is that of keeping everything."""
        families = families_of(self._groups)
        numbers = {family.family: number for number, family in enumerate(families)}
        choices = [{choice.again: place for place, choice in enumerate(family.choices)} for family in families]
        seconds = steady_seconds(self._samples)
        per_op = _carrying_out(families, seconds)
        costs_of = [[*costs, ChoiceCost()] for costs in self._bytes]
        for group, costs in zip(self._groups, costs_of, strict=True):
            number = numbers[group.family]
            forward_seconds, backward_seconds = (seconds.get((phase, number, KEEP), 0.0) for phase in _PHASES)
            costs[KEEP].forward_seconds, costs[KEEP].backward_seconds = forward_seconds, backward_seconds
            for choice, cost in zip(group.choices, costs[:KEEP], strict=True):
                place = choices[number][choice.again]
                if choice.program:
                    cost.forward_seconds, cost.backward_seconds = (
                        seconds.get((phase, number, place), 0.0) for phase in _PHASES
                    )
                    continue
                reran = self._reran.get((number, place), ())
                packing, again = (
                    sum(seconds.get(("again", number, run), 0.0) for run in reran if (run.how == "packs") is packs)
                    for packs in (True, False)
                )
                weight = _carried_out(group.ops, choice)
                cost.forward_seconds = forward_seconds + weight * per_op[0] + packing
                cost.backward_seconds = backward_seconds + weight * per_op[1] + again
        return costs_of


_PHASES = ("forward", "backward")


def _carrying_out(families: Sequence[OptionGroup], seconds: Mapping[Hashable, float]) -> tuple[float, float]:
    """What carrying out a choice takes in forward and in backward, beside the ops that run again, for each op.

    The machine's moods are larger than that in any one phase, and it is the same Python everywhere: so the typical one
    of all choices counts for each.
    """
    found: dict[str, list[float]] = {phase: [] for phase in _PHASES}
    for number, family in enumerate(families):
        for place, choice in enumerate(family.choices):
            for phase in () if choice.program else _PHASES:
                if (phase, number, place) in seconds and (phase, number, KEEP) in seconds:
                    more = seconds[phase, number, place] - seconds[phase, number, KEEP]
                    found[phase].append(more / _carried_out(family.ops, choice))
    forward, backward = (max(0.0, statistics.median(found[phase])) if found[phase] else 0.0 for phase in _PHASES)
    return forward, backward


_OPS_OF_A_CALL = 8  # what it takes to begin and end a call under a selection, in ops that are looked at


def _carried_out(ops: StageOps, choice: Choice) -> int:
    """How many ops are looked at in forward, and once more how many are recorded."""
    return _OPS_OF_A_CALL + len(Selection.of(ops, *choice.again).ops) + len(choice.rerun)


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
