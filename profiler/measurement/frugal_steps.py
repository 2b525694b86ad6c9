"""The steps in which most stages are dropped and run again in backward, and what they hold meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from profiler.measurement.meter import Meter, Place
from profiler.measurement.stage_marks import MarkedStep
from profiler.measurement.stage_probe import DroppingForward, ReplacingStep, SavingStep, StageProbe, storages_of
from profiler.recomputation.dropped_call import DroppedCall
from profiler.trace.partition import ChosenStage
from profiler.trace.step_record import Trace
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.forward_patches import Forward

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
        """What the boundary before stage k takes, of what lives for it alone."""
        return self._trace.storages.total_bytes(self._stages[k].boundary_storages)

    def boundary_links(self, k: int) -> dict[int, int]:
        """Which output of the stage before each input of stage k is, of what lives for this boundary alone."""
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


class Kept(NamedTuple):
    """What a step keeps that drops the rest.

    Attributes:
        stages: that keep everything.
        boundaries: stages whose inputs are held as in a plain step. Before the others a boundary is dropped as well,
            and made again by running the stages since the last one that is held.
    """

    stages: frozenset[int]
    boundaries: frozenset[int]


class FrugalStep(DropsEvaluations, ReplacingStep):
    """A step in which most stages are dropped, and run again in backward.

    Args:
        probe, meter: as for ``MarkedStep``.
        shared: of its stages.
        kept: the stages and boundaries that the step keeps, beside the stages in ``instead``.
        instead: as for ``ReplacingStep``.
    """

    def __init__(
        self, probe: StageProbe, meter: Meter, shared: SharedStorages, kept: Kept, instead: Mapping[int, Forward]
    ) -> None:
        super().__init__(probe, meter, instead)
        self._shared, self._kept = shared, kept
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
        made = DroppedCall(
            call.module, shared.held_saves(position, gone), shared.held_inputs(position), call.mutated_buffers
        )
        if before is not None and links:
            made.take_from(before, links)
        output = made.run(forward, args, kwargs)
        self._last, self._last_position = weakref.ref(made), position
        return output


class FrugalSavingStep(FrugalStep, SavingStep):
    """The same, with a mark at every tensor that a kept stage saves."""

    def __init__(self, probe: StageProbe, meter: Meter, shared: SharedStorages, kept: Kept) -> None:
        super().__init__(probe, meter, shared, kept, {})

    def run_stage(self, position: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        if position in self._kept.stages:
            return SavingStep.run_stage(self, position, forward, args, kwargs)
        self._inputs.update(storages_of(position, (args, kwargs)))
        output = FrugalStep.run_stage(self, position, forward, args, kwargs)
        self._outputs.update(storages_of(position, output))
        self._note_gradients(position, (args, kwargs), output)
        return output
