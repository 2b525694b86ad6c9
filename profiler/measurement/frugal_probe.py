"""Steps that need little memory: a few stages are kept at a time, the others run again in backward.

What a step that keeps everything would show is put together from them. Dropped stages hold on the device what they
would hold if they were kept, of all that others take, make or save as well; the rest is theirs alone. So each phase of
a kept stage, and of what runs outside of stages, has the bytes of a plain step above those at its start.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from profiler.measurement.meter import Mark, MarkedPhases, Meter, NoMeter, Place
from profiler.measurement.stage_marks import MarkedStep
from profiler.measurement.stage_probe import (
    DroppingForward,
    FirstRun,
    SavingStep,
    SelectiveStep,
    StageProbe,
    StageTensor,
    storages_of,
)
from profiler.measurement.stage_reruns import RerunsAtOnce, RerunTimes
from profiler.recomputation.dropped_call import DroppedCall
from profiler.recomputation.selection import Selection
from profiler.records import Phase
from profiler.trace.partition import ChosenStage
from profiler.trace.step_record import Trace
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.forward_patches import Forward
from profiler.workload.steps import ProfileError
from profiler.workload.workload import OnPhase, Workload

leave_uncompiled(__name__)

MakeMeter = Callable[[], Meter]
Groups = dict[tuple[Mark, int], list[Phase]]  # by mark and how often it was there before


@dataclass(slots=True)
class ComposedStep:
    """A plain step put together from several others; the attributes are those of ``SavingStep``."""

    phases: MarkedPhases
    input_deaths: dict[StageTensor, Mark] = field(default_factory=dict)
    output_deaths: dict[StageTensor, Mark] = field(default_factory=dict)
    late_releases: list[tuple[int, int, Mark]] = field(default_factory=list)
    held: set[StageTensor] = field(default_factory=set)
    varied: list[str] = field(default_factory=list)


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

    def held_saves(self, k: int) -> frozenset[int]:
        """Numbers of the tensors that stage k saves and holds also when it is dropped."""
        call = self._stages[k].call
        saves = self._trace.saves[call.first_save : call.end_save]
        return frozenset(n for n, save in enumerate(saves) if save.storage in self._shared)

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
        """What stage k keeps for itself alone."""
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
            return DroppedCall(module, ()).run(forward, args, kwargs)
        finally:
            self._in_stage = False


class FrugalDroppingForward(DropsEvaluations, DroppingForward):
    """A forward in which no stage keeps anything, after such forwards."""


class FrugalStep(DropsEvaluations, SelectiveStep):
    """A step in which most stages are dropped, and run again in backward.

    Args:
        probe, meter: as for ``MarkedStep``.
        kept: stages that keep everything.
        selections: by the stage's number, as for ``SelectiveStep``.
        check: as for ``SelectiveStep``.
    """

    def __init__(
        self,
        probe: FrugalProbe,
        meter: Meter,
        kept: Collection[int],
        selections: Mapping[int, Selection],
        *,
        check: bool = False,
    ) -> None:
        super().__init__(probe, meter, selections, check=check)
        self._kept = {*kept, *probe.kept_anyway}
        self._shared = probe.shared

    def run_stage(self, position: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        if position in self._kept or position in self._selections:
            return super().run_stage(position, forward, args, kwargs)
        call = self._stages[position].call
        shared = self._shared
        held, inputs = shared.held_saves(position), shared.held_inputs(position)
        return DroppedCall(call.module, held, inputs, call.mutated_buffers).run(forward, args, kwargs)


class FrugalSavingStep(FrugalStep, SavingStep):
    """The same, with a mark at every tensor that a kept stage saves."""

    def __init__(self, probe: FrugalProbe, meter: Meter, kept: Collection[int]) -> None:
        super().__init__(probe, meter, kept, {})

    def run_stage(self, position: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        if position in self._kept:
            return SavingStep.run_stage(self, position, forward, args, kwargs)
        self._inputs.update(storages_of(position, (args, kwargs)))
        output = FrugalStep.run_stage(self, position, forward, args, kwargs)
        self._outputs.update(storages_of(position, output))
        return output


class FrugalProbe(StageProbe):
    """Runs such steps, and puts together what a plain one shows.

    Args:
        workload, stages: as for ``StageProbe``.
        trace: of one forward.
        kinds: a number for each stage; equal where structure and shapes are equal.
        limit_bytes: that no step may take more than.

    Attributes:
        trace: as given.
        kept_anyway: stages that cannot run again, as ``run_again`` has found.
        limit_bytes: as given.
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
        self._base: MarkedPhases = []
        self.kept_anyway: frozenset[int] = frozenset()
        self.shared = SharedStorages(trace, stages)
        self.trace = trace
        self._kinds = kinds
        self._alike: list[Any] = list(kinds)

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

    @property
    def base_peak_bytes(self) -> int:
        """Most bytes of a step in which every stage is dropped that can be."""
        return max(phase.peak_bytes for _, phase in self._base)

    def needed_bytes(self, stages: Iterable[int]) -> int:
        """What a step takes at most in which these stages are kept, by the step in which all are dropped.

        They keep from their forward to their backward, where a dropped stage has the same again.
        """
        inner = {k: self.shared.inner_bytes(k) for k in stages}
        kept: dict[int, int] = {}
        needed_bytes = 0
        for mark, phase in self._base:
            if mark.place is not None and mark.place.kind == "stage" and mark.place.index in inner:
                if mark.phase == "forward":
                    kept[mark.place.index] = inner[mark.place.index]
                else:
                    kept.pop(mark.place.index, None)
            needed_bytes = max(needed_bytes, phase.peak_bytes + sum(kept.values()))
        return needed_bytes

    def _sets(self) -> list[list[int]]:
        """The stages to measure, one of each kind, in as few steps as have room for them."""
        sets: list[list[int]] = []
        stages = [k for k in range(len(self.stages)) if k not in self.kept_anyway]
        for k in sorted({self.representative(k) for k in stages}, reverse=True):
            self.check_room([k])
            if sets and self.needed_bytes([*sets[-1], k]) <= self.limit_bytes:
                sets[-1].append(k)
            else:
                sets.append([k])
        return sets

    def check_room(self, stages: Sequence[int]) -> None:
        """Refuse a limit that is too low for a step in which these are kept; raises ProfileError."""
        needed_bytes = self.needed_bytes(stages)
        if needed_bytes > self.limit_bytes:
            mark, _ = max(self._base, key=lambda pair: pair[1].peak_bytes)
            place = self.stages[mark.place.index].name if mark.place and mark.place.kind == "stage" else "no stage"
            raise ProfileError(
                f"profile: expected a limit of at least {needed_bytes} bytes, got {self.limit_bytes}: a step that runs "
                f"every stage again takes {self.base_peak_bytes} (in the {mark.phase} of {place!r}), and one that "
                f"keeps {self.stages[stages[0]].name!r} {needed_bytes}; make the batch smaller, or take an optimizer "
                "or a precision that needs less"
            )

    def run_again(self) -> list[RerunTimes]:
        """Run each stage again in one forward; those that cannot are kept in every step from now on."""
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
            lambda each: FrugalStep(self, each, (), {}),
        )

    def dropping_step(self, meter: Meter, on_phase: OnPhase | None = None) -> FrugalStep:
        """A step in which every stage is dropped."""

        def made(each: Meter) -> FrugalStep:
            step = FrugalStep(self, each, (), {})
            step.on_phase = on_phase
            return step

        return self.ran(made, meter)

    def step(self, meter: Meter) -> MarkedPhases:
        """One whole step, every stage dropped."""
        return self._counted(self.dropping_step(meter)).phases

    def selective_step(
        self, meter: Meter, selections: Mapping[int, Selection], *, measured: Collection[int] = (), check: bool = False
    ) -> SelectiveStep:
        kept = {*selections, *measured}
        return self.ran(lambda each: FrugalStep(self, each, kept, selections, check=check), meter)

    def saving_steps(self, make_meter: MakeMeter) -> ComposedStep:
        """What ``saving_step`` would show, put together."""
        base = self._counted(self.ran(lambda each: FrugalSavingStep(self, each, ()), make_meter()))
        self._base = base.phases
        self._refine(base.phases)
        steps = {
            k: step
            for measured in self._sets()
            for step in [self.ran(lambda each, m=measured: FrugalSavingStep(self, each, m), make_meter())]
            for k in measured
        }
        phases = self._composed(base.phases, {k: by_occurrence(step.phases) for k, step in steps.items()})
        composed = ComposedStep(phases, base.input_deaths, base.output_deaths)
        self._copy_notes({**dict.fromkeys(self.kept_anyway, base), **steps}, composed)
        return composed

    def timed_steps(self, make_meter: MakeMeter) -> MarkedPhases:
        """What ``step`` under the time meter would show of a plain step, put together."""
        base = self.dropping_step(make_meter())
        groups: dict[int, Groups] = {}
        for measured in self._sets():
            step = self.ran(lambda each, kept=measured: FrugalStep(self, each, kept, {}), make_meter())
            groups |= dict.fromkeys(measured, by_occurrence(step.phases))
        return self._composed(base.phases, groups)

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

    def _copy_notes(self, steps: Mapping[int, FrugalSavingStep], plain: ComposedStep) -> None:
        for k in range(len(self.stages)):
            rep = self.representative(k)
            step = steps[rep]
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


def _shifted(phase: Phase, by_bytes: int) -> Phase:
    return replace(
        phase,
        start_bytes=phase.start_bytes + by_bytes,
        peak_bytes=phase.peak_bytes + by_bytes,
        end_bytes=phase.end_bytes + by_bytes,
    )
