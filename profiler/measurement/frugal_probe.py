"""Steps that need little memory: a few stages are kept at a time, the others are recomputed in backward.

The measurements of a step that keeps everything are put together from them. Dropped stages hold on the device what they
would hold if they were kept, of all that others take, make or save as well; the rest is theirs alone. So each phase of
a kept stage, and of what runs outside of stages, has the bytes of a plain step above those at its start.

Where what stages hand on is too much as well, a step holds it for a window of neighbouring stages, and only phases in
the window are taken from that step.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from profiler.agreement import agreed, gathered, largest
from profiler.measurement.device_memory import trim_heap
from profiler.measurement.meter import Mark, MarkedPhases, Meter, NoMeter, Place
from profiler.measurement.shortage import MIB, op_meter, remedies
from profiler.measurement.stage_probe import (
    NOTHING_INSTEAD,
    AnyStep,
    DroppingForward,
    FirstRun,
    MakeMeter,
    MarkedStep,
    PlainStep,
    SavingStep,
    StageProbe,
    storages_of,
)
from profiler.measurement.stage_reruns import RerunsAtOnce, RerunTimes
from profiler.recomputation.dropped_call import DroppedCall
from profiler.records import Phase
from profiler.trace.partition import ChosenStage
from profiler.trace.step_record import Trace
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.forward_patches import Forward
from profiler.workload.steps import ProfileError, resident_bytes_of
from profiler.workload.workload import OnPhase, Workload

leave_uncompiled(__name__)


class SharedStorages:
    """The storages that more than one stage, or a stage and what runs outside, takes, makes or saves.

    Args:
        trace, stages: the traced step and its stages.
    """

    def __init__(self, trace: Trace, stages: Sequence[ChosenStage]) -> None:
        self._trace, self._stages = trace, stages
        self.savers: dict[int, set[Place]] = {}
        position = 0
        for k, stage in enumerate(stages):
            self._note(position, stage.call.first_save, Place("outside", k))
            self._note(stage.call.first_save, stage.call.end_save, Place("stage", k))
            position = stage.call.end_save
        self._note(position, len(trace.saves), Place("outside", len(stages)))
        passed = set[int]().union(*(s.call.input_storages | s.call.output_storages for s in stages))
        several = {number for number, places in self.savers.items() if len(places) > 1}
        self._shared = (passed | several | trace.casts) - trace.always_alive

    def _note(self, first: int, end: int, place: Place) -> None:
        for save in self._trace.saves[first:end]:
            if save.storage is not None:
                self.savers.setdefault(save.storage, set()).add(place)

    def held_saves(self, k: int, dropped_boundaries: Collection[int] = ()) -> frozenset[int]:
        """Numbers of the tensors that stage k saves and holds also when it is dropped.

        Args:
            k: the stage.
            dropped_boundaries: the stages before which the boundary is dropped, too.
        """
        call = self._stages[k].call
        saves = self._trace.saves[call.first_save : call.end_save]
        gone = set().union(*(self._stages[j].boundary_storages for j in dropped_boundaries if j < len(self._stages)))
        return frozenset(n for n, save in enumerate(saves) if save.storage in self._shared and save.storage not in gone)

    def boundary_bytes(self, k: int) -> int:
        """Returns the bytes of the storages that live for the boundary before stage k alone."""
        return self._trace.storages.total_bytes(self._stages[k].boundary_storages)

    def boundary_links(self, k: int) -> dict[int, int]:
        """Maps inputs of stage k to outputs of the stage before, for storages that live for this boundary alone."""
        stage = self._stages[k]
        return {i: j for i, j in stage.links if stage.call.inputs[i].storage in stage.boundary_storages}

    def held_inputs(self, k: int) -> frozenset[int]:
        """Numbers of the tensors that go into stage k and are there anyway, or are saved by it."""
        mine = Place("stage", k)
        leaves = enumerate(self._stages[k].call.inputs)
        return frozenset(
            n
            for n, leaf in leaves
            if leaf.storage is None
            or leaf.storage in self._trace.always_alive
            or mine in self.savers.get(leaf.storage, ())
        )

    def inner_bytes(self, k: int) -> int:
        """Returns the bytes that stage k keeps for itself alone."""
        call = self._stages[k].call
        saved = self._trace.saved(call.first_save, call.end_save) - self._shared
        return self._trace.storages.total_bytes(saved)


class DropsEvaluations(MarkedStep):
    """A step in which the forwards that are not measured keep nothing of a stage's own either."""

    def run_call(self, module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        if self._now.phase != "evaluation" or self._in_stage or not torch.is_grad_enabled():
            return super().run_call(module, forward, args, kwargs)
        self._in_stage = True
        try:
            return _run_dropped(DroppedCall(module, forward), args, kwargs)
        finally:
            self._in_stage = False


def _run_dropped(call: DroppedCall, args: Any, kwargs: Any, *held: Any) -> Any:
    """The first run of a call; ``held`` are the further arguments of ``DroppedCall.hold_input``."""
    with torch._C._DisableTorchDispatch():  # Meters count what is held, not how.
        call.hold_input((args, kwargs), *held)
    return call.run_first(args, kwargs)


class FrugalDroppingForward(DropsEvaluations, DroppingForward):
    """A forward in which no stage keeps anything, after such forwards."""


class Kept(NamedTuple):
    """The stages and boundaries that a step keeps; it drops the rest.

    Attributes:
        stages: the stages that keep everything.
        boundaries: the stages whose inputs are held as in a plain step. Before the others a boundary is dropped as
            well, and recomputed by running the stages since the last one that is held.
    """

    stages: frozenset[int]
    boundaries: frozenset[int]


class FrugalStep(DropsEvaluations):
    """A step in which most stages are dropped, and recomputed in backward.

    Args:
        probe, meter, instead: the same as for ``MarkedStep``.
        kept: the stages and boundaries that the step keeps, beside the stages in ``instead``.
    """

    def __init__(
        self, probe: FrugalProbe, meter: Meter, kept: Kept, instead: Mapping[int, Forward] = NOTHING_INSTEAD
    ) -> None:
        super().__init__(probe, meter, instead)
        self._stages, self._shared, self._kept = probe.stages, probe.shared, kept
        self._last: weakref.ref[DroppedCall] | None = None  # of the last stage that was dropped
        self._last_position = -1

    def run_stage(self, position: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        if position in self._kept.stages or position in self._instead:
            return super().run_stage(position, forward, args, kwargs)
        call, shared, boundaries = self._stages[position].call, self._shared, self._kept.boundaries
        before = self._last() if self._last is not None and self._last_position == position - 1 else None
        links = shared.boundary_links(position) if before is not None and position not in boundaries else {}
        following = position + 1
        gone = [k for k, dropped in ((position, links), (following, following not in boundaries)) if dropped]
        made = DroppedCall(call.module, forward, call.mutated_buffers, shared.held_saves(position, gone))
        output = _run_dropped(made, args, kwargs, before, links, shared.held_inputs(position))
        self._last, self._last_position = weakref.ref(made), position
        return output


class FrugalSavingStep(FrugalStep, SavingStep):
    """A frugal step with a mark at every tensor that a kept stage saves."""

    def run_stage(self, position: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        if position in self._kept.stages:
            return SavingStep.run_stage(self, position, forward, args, kwargs)
        self._inputs.update(storages_of(position, (args, kwargs)))
        output = FrugalStep.run_stage(self, position, forward, args, kwargs)
        self._outputs.update(storages_of(position, output))
        self._note_gradients(position, (args, kwargs), output)
        return output


_PHASES = {"evaluation": "another micro-batch or evaluation of the loss"}
Groups = dict[tuple[Mark, int], list[Phase]]  # keyed by a mark and its number of earlier occurrences


class FrugalProbe(StageProbe):
    """Runs frugal steps, and puts the measurements of a plain one together.

    Args:
        workload, stages: the same as for ``StageProbe``.
        trace: the trace of one forward.
        kinds: a number for each stage; equal where structure and shapes are equal.
        limit_bytes: the most bytes that a step may take.

    Attributes:
        trace: the given trace.
        kept_anyway: the stages that cannot be recomputed, as ``run_again`` has found.
        limit_bytes: the given limit.
    """

    def __init__(
        self,
        workload: Workload,
        stages: Sequence[ChosenStage],
        trace: Trace,
        kinds: Sequence[int],
        limit_bytes: int,
    ) -> None:
        super().__init__(workload, stages)
        self.limit_bytes = limit_bytes
        self.kept_anyway: frozenset[int] = frozenset()
        self.shared = SharedStorages(trace, stages)
        self.trace = trace
        self._kinds = kinds
        self._alike: list[Any] = list(kinds)
        self._windows = [range(len(stages))]
        self._bases: list[MarkedPhases] = []  # of each window
        self._anyway = self._held_anyway()
        self._freed_in: dict[int, int] = {}  # Where in forward a dropped boundary goes, by the stage behind it.

    def _refine(self, base: MarkedPhases) -> None:
        """Tell stages apart that are alike and do not take the same bytes where all are dropped.

        Who comes first in backward makes a gradient, and who comes later adds to it.
        """
        groups = by_occurrence(base)
        for k, kind in enumerate(self._kinds):
            mine = [
                (mark.phase, occurrence, [(p.peak_bytes - p.start_bytes, p.end_bytes - p.start_bytes) for p in phases])
                for (mark, occurrence), phases in groups.items()
                if mark.place == Place("stage", k)
            ]
            self._alike[k] = kind, mine

    def representative(self, k: int) -> int:
        """The stage that is measured in the place of stage k: the last one like it, which is kept for the shortest."""
        if k in self.kept_anyway:
            return k
        alike = (j for j, kind in enumerate(self._alike) if kind == self._alike[k])
        return max(j for j in alike if j not in self.kept_anyway)

    # What a step holds --------------------------------------------------------

    def _boundaries_of(self, window: range) -> frozenset[int]:
        """Returns the stages before which the boundary is held so that phases in a window are those of a plain step."""
        late = {k for k, freed_in in self._freed_in.items() if freed_in in window}
        return frozenset(range(window.start, window.stop + 1)) | late

    def _held_anyway(self) -> frozenset[int]:
        """Returns the stages before which the boundary is held in every step: all where that takes half of the limit.

        Else one in so many that stages are recomputed about twice, or more often, down to one.
        """
        count = len(self.stages)
        resident_bytes = max(gathered(resident_bytes_of(self.workload).total))
        distances = [1, *(math.isqrt(count) << doubled for doubled in range(count.bit_length()))]
        for distance in (each for each in distances if each < count):
            held = range(0, count, distance)
            if resident_bytes + sum(map(self.shared.boundary_bytes, held)) <= self.limit_bytes // 2:
                return frozenset(held)
        return frozenset()

    def _kept(self, stages: Collection[int], boundaries: Collection[int]) -> Kept:
        return Kept(frozenset([*stages, *self.kept_anyway]), self._anyway | frozenset(boundaries))

    def _window_of(self, stages: Collection[int]) -> int | None:
        """The number of the window in which stages lie; None where they lie in several."""
        return next((n for n, window in enumerate(self._windows) if all(k in window for k in stages)), None)

    def _number_of(self, k: int) -> int:
        """The number of the window in which stage k lies."""
        return next(n for n, window in enumerate(self._windows) if k in window)

    def needed_bytes(self, stages: Collection[int]) -> float:
        """Returns the most bytes of a step in which these stages are kept, by the one in which all are dropped.

        Infinite where they are measured in different windows.
        """
        number = self._window_of(stages)
        if number is None:
            return math.inf
        inner = {k: self.shared.inner_bytes(k) for k in stages}
        return max(needed for _, needed in _with_more(self._bases[number], inner))

    def _sets(self) -> list[list[int]]:
        """The stages to measure, one of each kind, in as few steps as have room for them."""
        sets: list[list[int]] = []
        stages = [k for k in range(len(self.stages)) if k not in self.kept_anyway]
        for k in sorted({self.representative(k) for k in stages}, reverse=True):
            self.check_room(k)
            if sets and self.needed_bytes([*sets[-1], k]) <= self.limit_bytes:
                sets[-1].append(k)
            else:
                sets.append([k])
        return sets

    def check_room(self, k: int) -> None:
        """Refuse a limit that is too low for a step in which stage k is kept; raises ProfileError."""
        number = self._number_of(k)
        needed = _with_more(self._bases[number], {k: self.shared.inner_bytes(k)})
        self._check(needed, f"keeps {self.stages[k].name!r} only", self._boundaries_of(self._windows[number]))

    def _check(self, needed: Iterable[tuple[Mark, int]], what: str, boundaries: Collection[int] = ()) -> None:
        """Refuse a limit below what the phases of a step take; ``boundaries`` are held in it. Raises ProfileError."""
        mark, needed_bytes = max(needed, key=lambda pair: pair[1])
        if needed_bytes <= self.limit_bytes:
            return
        meter, kept = op_meter(self.workload.device), self._kept((), boundaries)
        self.ran(lambda each: FrugalStep(self, each, kept), meter)
        stage = f" of stage {self.stages[mark.place.index].name!r}" if mark.place and mark.place.kind == "stage" else ""
        op = f", in {meter.ops[mark]}" if mark in meter.ops else ""
        raise ProfileError(
            f"profile: the limit is too low for a step that {what}: it takes {needed_bytes} bytes "
            f"({needed_bytes / MIB:,.1f} MiB) in {_PHASES.get(mark.phase, f'the {mark.phase}')}{stage}{op}, "
            f"{needed_bytes - self.limit_bytes} more than the limit of {self.limit_bytes} "
            f"({self.limit_bytes / MIB:,.1f} MiB); "
            f"{remedies(self.workload, needed_bytes, self.limit_bytes)}"
        )

    def _find_windows(self, make_meter: MakeMeter) -> None:
        """Divide the stages where there is no room for all that they hand on."""
        last = len(self.stages) - 1
        if len(self._anyway) > last:
            return
        kept = self._kept((), ())
        lean = self.ran(lambda each: FrugalSavingStep(self, each, kept), make_meter())
        phases = largest(lean.phases)
        self._check(_with_more(phases, {}), "recomputes every stage")
        freed_in = {
            k: min(mark.place.index, last)
            for (k, leaf), mark in lean.seen.input_deaths.items()
            if mark.place is not None and mark.phase == "forward" and leaf in self.shared.boundary_links(k)
        }
        self._freed_in = agreed(freed_in)
        self._windows = self._divided(phases)

    def _divided(self, lean: MarkedPhases) -> list[range]:
        """Divides the stages into as few windows as have room for their boundaries and for one stage's own bytes."""
        count = len(self.stages)
        inner_bytes = max(self.shared.inner_bytes(k) for k in range(count) if k not in self.kept_anyway)
        windows: list[range] = []
        first = 0
        for end in range(1, count + 1):
            boundaries = self._boundaries_of(range(first, end + 1)) - self._anyway
            handed_on = {k - 1: self.shared.boundary_bytes(k) for k in boundaries if 0 < k < count}
            needed_bytes = max(needed for _, needed in _with_more(lean, handed_on)) + inner_bytes
            if end == count or needed_bytes > self.limit_bytes:
                windows.append(range(first, end))
                first = end
        return windows

    # Steps --------------------------------------------------------------------

    def _run(self, step: AnyStep) -> AnyStep:
        trim_heap(self.workload.device)
        return super()._run(step)

    def run_again(self) -> list[RerunTimes]:
        """Recompute each stage in one forward; those that cannot be recomputed are kept in every step from now on."""
        at_once = RerunsAtOnce(self._kinds, self.workload.device)
        self.dropping_forward(NoMeter(), hold_all=False, on_stage=at_once.run)
        reruns = at_once.finished()
        self.kept_anyway = frozenset(k for k, rerun in enumerate(reruns) if rerun.failure)
        return reruns

    def dropping_forward(
        self, meter: Meter, *, hold_all: bool, on_stage: Callable[[int, FirstRun], None] | None = None
    ) -> DroppingForward:
        return self.ran(
            lambda each: FrugalDroppingForward(self, each, hold_all=hold_all, on_stage=on_stage),
            meter,
            lambda each: self._dropping(each),
        )

    def dropping_step(self, meter: Meter, on_phase: OnPhase | None = None) -> FrugalStep:
        """Runs a step in which every stage is dropped, and as many boundaries as need be."""

        def made(each: Meter) -> FrugalStep:
            step = self._dropping(each)
            step.on_phase = on_phase
            return step

        return self.ran(made, meter)

    def _dropping(self, meter: Meter) -> FrugalStep:
        return FrugalStep(self, meter, self._kept((), ()))

    def step(self, meter: Meter) -> MarkedPhases:
        """One whole step, every stage dropped."""
        return self._counted(self.dropping_step(meter)).phases

    def replacing_step(self, meter: Meter, instead: Mapping[int, Forward]) -> MarkedStep:
        kept = self._kept_around(instead)
        return self.ran(lambda each: FrugalStep(self, each, kept, instead), meter)

    def _kept_around(self, stages: Collection[int]) -> Kept:
        """These stages, and the boundaries of their window."""
        number = self._window_of(stages)
        window = range(len(self.stages)) if number is None else self._windows[number]
        return self._kept(stages, self._boundaries_of(window))

    def saving_step(self, make_meter: MakeMeter) -> PlainStep:
        """Returns the measurements of a plain step, put together from several others."""

        def ran(kept: Kept) -> FrugalSavingStep:
            return self.ran(lambda each: FrugalSavingStep(self, each, kept), make_meter())

        self._find_windows(make_meter)
        windows = [self._counted(ran(self._kept((), self._boundaries_of(window)))) for window in self._windows]
        self._bases = [largest(each.phases) for each in windows]  # They say which steps follow.
        for window, phases in zip(self._windows, self._bases, strict=True):
            self._check(_with_more(phases, {}), "recomputes every stage", self._boundaries_of(window))
        base = self._base_of(self._bases)
        self._refine(base)
        steps = {k: step for kept in self._sets() for step in [ran(self._kept_around(kept))] for k in kept}
        phases = self._composed(base, {k: by_occurrence(step.phases) for k, step in steps.items()})
        composed = PlainStep(phases, cyclic_bytes=max(each.seen.cyclic_bytes for each in windows))
        for window, each in zip(self._windows, windows, strict=True):
            composed.input_deaths |= {key: mark for key, mark in each.seen.input_deaths.items() if key[0] in window}
            composed.output_deaths |= {key: mark for key, mark in each.seen.output_deaths.items() if key[0] in window}
        unable = {k: windows[self._number_of(k)] for k in self.kept_anyway}
        self._copy_notes({k: each.seen for k, each in {**unable, **steps}.items()}, composed)
        return composed

    def timed_step(self, make_meter: MakeMeter) -> MarkedPhases:
        """Returns the seconds of a plain step, put together from several others."""

        def ran(kept: Kept) -> MarkedPhases:
            return self.ran(lambda each: FrugalStep(self, each, kept), make_meter()).phases

        bases = [ran(self._kept((), self._boundaries_of(window))) for window in self._windows]
        groups: dict[int, Groups] = {}
        for kept in self._sets():
            groups |= dict.fromkeys(kept, by_occurrence(ran(self._kept_around(kept))))
        return self._composed(self._base_of(bases), groups)

    def _counted(self, step: AnyStep) -> AnyStep:
        return super()._counted(step) if len(self._windows) == 1 else step  # Each window has other cuts in the graph.

    def _base_of(self, bases: Sequence[MarkedPhases]) -> MarkedPhases:
        """Each phase as in the step of the window that it lies in; what lies in none as in the first one."""
        if len(bases) == 1:
            return bases[0]
        groups = [by_occurrence(phases) for phases in bases]
        composed: MarkedPhases = []
        for mark, occurrence in groups[0]:
            place = mark.place.index if mark.place is not None else 0
            number = self._number_of(min(place, len(self.stages) - 1))
            composed += [(mark, phase) for phase in groups[number].get((mark, occurrence), ())]
        return composed

    def _composed(self, base: MarkedPhases, groups: Mapping[int, Groups]) -> MarkedPhases:
        """The phases of a step, each as it is where the stages around it are kept, one after another."""
        composed: MarkedPhases = []
        position = base[0][1].start_bytes
        for (mark, occurrence), phases in by_occurrence(base).items():
            measured = phases
            if mark.place is not None and mark.place.kind == "stage" and mark.place.index not in self.kept_anyway:
                rep = self.representative(mark.place.index)
                measured = groups[rep].get((Mark(mark.phase, Place("stage", rep)), occurrence), phases)
            moved = [_shifted(phase, position - measured[0].start_bytes) for phase in measured]
            composed += [(mark, phase) for phase in moved]
            position = moved[-1].end_bytes
        return composed

    def _copy_notes(self, steps: Mapping[int, PlainStep], plain: PlainStep) -> None:
        for k in range(len(self.stages)):
            rep = self.representative(k)
            step = steps[rep]
            if rep in step.gathered_bytes:
                plain.gathered_bytes[k] = step.gathered_bytes[rep]
            plain.copied_bytes[k] = step.copied_bytes.get(rep, 0)
            plain.gradient_strides[k] = step.gradient_strides.get(k, [])
            plain.held |= {(k, number) for stage, number in step.held if stage == rep}
            plain.varied += [self.stages[k].name for name in step.varied if name == self.stages[rep].name]
            for stage, size_bytes, mark in step.late_releases:
                if stage == rep and mark.place is not None:
                    place = Place(mark.place.kind, mark.place.index + k - rep)
                    plain.late_releases.append((k, size_bytes, Mark(mark.phase, place)))


def by_occurrence(phases: MarkedPhases) -> Groups:
    """Phases that follow each other with one mark, by the mark and how often it was there before; in order of time."""
    groups: Groups = {}
    counts: dict[Mark, int] = {}
    for mark, group in itertools.groupby(phases, key=lambda pair: pair[0]):
        groups[mark, counts.get(mark, 0)] = [phase for _, phase in group]
        counts[mark] = counts.get(mark, 0) + 1
    return groups


def _with_more(phases: MarkedPhases, more: Mapping[int, int]) -> Iterator[tuple[Mark, int]]:
    """The most bytes of each phase if stages keep more, from their forward to their backward.

    Args:
        phases: the phases of a step in which they are dropped: in backward a stage's own bytes are there already.
        more: bytes by stage.
    """
    kept: dict[int, int] = {}
    for mark, phase in phases:
        if mark.place is not None and mark.place.kind == "stage" and mark.place.index in more:
            if mark.phase == "forward":
                kept[mark.place.index] = more[mark.place.index]
            else:
                kept.pop(mark.place.index, None)
        yield mark, phase.peak_bytes + sum(kept.values())


def _shifted(phase: Phase, by_bytes: int) -> Phase:
    return replace(
        phase,
        start_bytes=phase.start_bytes + by_bytes,
        peak_bytes=phase.peak_bytes + by_bytes,
        end_bytes=phase.end_bytes + by_bytes,
    )
