"""Marked steps of a model under a plan: which stage runs, for the first time or again, at every moment of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from profiler.capture.call_program import WATCHERS
from profiler.measurement.meter import Mark, MarkedPhases, Meter, Place
from profiler.measurement.stage_marks import MarkedStep, StepProbe
from profiler.workload.given_models import inner_model
from profiler.workload.workload import Workload


class PlannedProbe(StepProbe):
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
        self, workload: Workload, stages: Sequence[tuple[str, int]], again: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        model = inner_model(workload.model)
        positions = {(model.get_submodule(name), call): k for k, (name, call) in enumerate(stages)}
        super().__init__(workload, positions, compile_safe=False)
        self.again = again or {}

    def __enter__(self) -> Self:
        WATCHERS.append(self._run_as_program)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        WATCHERS.remove(self._run_as_program)

    def _run_as_program(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        """Mark what runs in the place of a stage's forward."""
        return self._marked(run, module)()

    def step(self, meter: Meter) -> MarkedPhases:
        """One step under a meter: forward, backward, optimizer; what lay between its marks."""
        return self.ran(lambda each: _MarkedPlannedStep(self, each), meter).phases


class _MarkedPlannedStep(MarkedStep):
    """The marks of one step in which stages run again."""

    def __init__(self, probe: PlannedProbe, meter: Meter) -> None:
        super().__init__(probe, meter)
        self._modules = {position: module for (module, _), position in probe.positions.items()}
        self._interrupted = self._now
        # Each with the stage whose backward it runs again for, which may only be about to begin then.
        again = sorted(probe.again.items(), reverse=True)
        self._expected = [(k, position) for k, positions in again for position in positions]

    @property
    def _in_backward(self) -> bool:
        return self._now.phase != "forward"

    def mark(self, mark: Mark) -> None:
        with torch._C._DisableTorchDispatch():  # A mark is no op of the step.
            super().mark(mark)

    def enter_backward(self, place: Place) -> None:
        if place.kind == "stage":
            self._expected = [(k, position) for k, position in self._expected if k <= place.index]
        super().enter_backward(place)

    def position_of(self, module: nn.Module) -> int | None:
        if self._now.phase in ("optimizer", "evaluation"):
            return None
        return self._position_again(module) if self._in_backward else super().position_of(module)

    def _position_again(self, module: nn.Module) -> int | None:
        """Which stage runs again: the next of those that are expected to, else the module's first."""
        if self._in_stage:
            return None
        for number, (_, position) in enumerate(self._expected):
            if self._modules[position] is module:
                del self._expected[: number + 1]
                return position
        return self._positions.get((module, 0))

    def enter(self, position: int) -> None:
        if not self._in_backward:
            super().enter(position)
            return
        self._interrupted = self._now
        self.mark(Mark("again", Place("stage", position)))

    def leave(self, position: int) -> None:
        if self._in_backward:
            self.mark(self._interrupted)
        else:
            super().leave(position)
