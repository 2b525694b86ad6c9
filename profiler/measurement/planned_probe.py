"""Step marks: where a step is as it runs, stage by stage and run by run, with whatever plan is applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from profiler.measurement.meter import Interval, Meter
from profiler.measurement.stage_probe import (
    END,
    FORWARD,
    LOSS,
    OPTIMIZER,
    Place,
    mark_backward,
    outside_place,
    stage_place,
)
from profiler.workload.autograd_nodes import next_node
from profiler.workload.forward_patches import Forward, ForwardPatches
from profiler.workload.workload import Workload

AGAIN = "again"
StageCall = tuple[str, int]


class StepMarks:
    """Runs steps of a workload with a mark wherever a stage, a second run of one, or a phase begins and ends.

    Use as a context manager, and apply the plan inside of it. The labels are
    those of ``StepProbe``; a run of a stage in backward has the phase ``AGAIN``.

    Args:
        workload: the training step.
        stages: in forward order, the module's name and how many calls of it come before.
        again: for the backward of a stage, the stages that run again before it, in order: tells calls of one
            module apart.
    """

    def __init__(
        self, workload: Workload, stages: Sequence[StageCall], again: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self._workload = workload
        self._stages = list(stages)
        self._positions = {call: k for k, call in enumerate(stages)}
        self._again = again or {}
        self._patches = ForwardPatches(compile_safe=False)
        self._meter: Meter | None = None
        self._begin()

    def _begin(self) -> None:
        self._counts: dict[str, int] = {}
        self._nodes: list[tuple[Place, int]] = []
        self._label = outside_place(0).label(FORWARD)
        self._inside = False
        self._backward = False
        # Each with the stage whose backward it runs again for, which may only be about to begin then.
        self._waiting = [(k, position) for k in sorted(self._again, reverse=True) for position in self._again[k]]

    def __enter__(self) -> StepMarks:
        for name in dict.fromkeys(name for name, _ in self._stages):
            module = self._workload.model.get_submodule(name)
            self._patches.wrap(module, lambda forward, n=name: self._marked(forward, n))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.remove()

    def step(self, meter: Meter) -> list[Interval]:
        """One step under a meter: forward, backward, optimizer; the intervals between its marks."""
        self._begin()
        self._workload.zero_grad()
        self._meter = meter
        meter.start(self._label)
        try:
            loss = self._workload.forward()
            self._nodes.append((outside_place(len(self._stages)), next_node()))
            mark_backward(loss, self._nodes, self._enter_backward)
            self._mark(LOSS)
            self._backward = True
            self._workload.backward(loss)
            value = loss.detach()  # As Workload.step: the loss outlives its graph.
            del loss
            if self._workload.optimizer is not None:
                self._mark(OPTIMIZER)
                self._workload.update()
            self._mark(END)
            del value
        finally:
            self._meter = None
            found = meter.stop()
        return found

    def _mark(self, label: str) -> None:
        assert self._meter is not None
        self._label = label
        with torch._C._DisableTorchDispatch():  # A mark is no op of the step.
            self._meter.mark(label)

    def _enter_backward(self, label: str) -> None:
        """The backward of a place begins."""
        _, kind, index = label.split(":")
        if kind == "stage":
            self._waiting = [(k, position) for k, position in self._waiting if k <= int(index)]
        self._mark(label)

    def _marked(self, forward: Forward, name: str) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._meter is None or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            position = self._run_again(name) if self._backward else self._first_run(name)
            if position is None:
                return forward(*args, **kwargs)
            before = self._label
            self._enter(position)
            try:
                return forward(*args, **kwargs)
            finally:
                self._leave(position, before)

        return run

    def _first_run(self, name: str) -> int | None:
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        return None if self._inside else self._positions.get((name, count))

    def _run_again(self, name: str) -> int | None:
        """Which stage runs again: the next of those that are expected to, else the module's first."""
        if self._inside:
            return None
        for place, (_, position) in enumerate(self._waiting):
            if self._stages[position][0] == name:
                self._waiting = self._waiting[place + 1 :]
                return position
        return self._positions.get((name, 0))

    def _enter(self, position: int) -> None:
        self._inside = True
        if self._backward:
            self._mark(stage_place(position).label(AGAIN))
        else:
            self._nodes.append((outside_place(position), next_node()))
            self._mark(stage_place(position).label(FORWARD))

    def _leave(self, position: int, before: str) -> None:
        self._inside = False
        if self._backward:
            self._mark(before)
        else:
            self._nodes.append((stage_place(position), next_node()))
            self._mark(outside_place(position + 1).label(FORWARD))
