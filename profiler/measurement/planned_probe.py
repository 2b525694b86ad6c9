"""Marked steps of a model under a plan: which stage runs, for the first time or again, at every moment of a step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.measurement.meter import Mark, MarkedPhases, Meter, Place, stage_place
from profiler.measurement.stage_marks import MarkedStep, StageCall
from profiler.workload.forward_patches import Forward, ForwardPatches
from profiler.workload.workload import StepPhase, Workload


class PlannedProbe:
    """Runs steps of a workload with a mark wherever a stage, a second run of one, or a phase begins and ends.

    Use as a context manager, and apply the plan inside of it: a plan runs again what it found when it was applied,
    and so runs these marks again too. The marks are those of ``StageProbe``; a run of a stage in backward has the
    phase ``again``.

    Args:
        workload: the training step.
        stages: in forward order, the module's name and how many calls of it come before.
        again: for the backward of a stage, the stages that run again before it, in order: tells calls of one
            module apart.
    """

    def __init__(
        self,
        workload: Workload,
        stages: Sequence[tuple[str, int]],
        again: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._workload = workload
        self._names = dict.fromkeys(name for name, _ in stages)
        self._positions: dict[StageCall, int] = {call: k for k, call in enumerate(stages)}
        self._again = again or {}
        self._patches = ForwardPatches(compile_safe=False)
        self._step: _MarkedPlannedStep | None = None

    def __enter__(self) -> PlannedProbe:
        for name in self._names:
            module = self._workload.model.get_submodule(name)
            self._patches.wrap(module, lambda forward, n=name: self._marked(forward, n))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.remove()

    def step(self, meter: Meter) -> MarkedPhases:
        """One step under a meter: forward, backward, optimizer; what lay between its marks."""
        self._step = step = _MarkedPlannedStep(self._workload, meter, self._positions, self._again)
        try:
            step.run()
        finally:
            self._step = None
        return step.phases

    def _marked(self, forward: Forward, name: str) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs) if self._step is None else self._step.run_call(name, forward, args, kwargs)

        return run


class _MarkedPlannedStep(MarkedStep):
    """The marks of one step in which stages run again."""

    def __init__(
        self,
        workload: Workload,
        meter: Meter,
        positions: Mapping[StageCall, int],
        again: Mapping[int, Sequence[int]],
    ) -> None:
        super().__init__(workload, meter, positions)
        self._modules = {position: module for (module, _), position in positions.items()}
        self._in_backward = False
        self._interrupted = self._now
        # Each with the stage whose backward it runs again for, which may only be about to begin then.
        self._expected = [(k, position) for k in sorted(again, reverse=True) for position in again[k]]

    def _begin(self, phase: StepPhase, loss: Tensor | None) -> None:
        super()._begin(phase, loss)
        self._in_backward = self._in_backward or phase == "backward"

    def mark(self, mark: Mark) -> None:
        with torch._C._DisableTorchDispatch():  # A mark is no op of the step.
            super().mark(mark)

    def enter_backward(self, place: Place) -> None:
        if place.kind == "stage":
            self._expected = [(k, position) for k, position in self._expected if k <= place.index]
        super().enter_backward(place)

    def position_of(self, module: Hashable) -> int | None:
        return self._position_again(module) if self._in_backward else super().position_of(module)

    def _position_again(self, module: Hashable) -> int | None:
        """Which stage runs again: the next of those that are expected to, else the module's first."""
        if self._in_stage:
            return None
        for number, (_, position) in enumerate(self._expected):
            if self._modules[position] == module:
                del self._expected[: number + 1]
                return position
        return self._positions.get((module, 0))

    def enter(self, position: int) -> None:
        if not self._in_backward:
            super().enter(position)
            return
        self._interrupted = self._now
        self.mark(Mark("again", stage_place(position)))

    def leave(self, position: int) -> None:
        if self._in_backward:
            self.mark(self._interrupted)
        else:
            super().leave(position)
