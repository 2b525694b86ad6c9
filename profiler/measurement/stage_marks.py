"""The marks of one step: where each of its stages and phases begins, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from profiler.measurement.meter import Mark, MarkedPhases, Meter, NoMeter, Place, WarmUp, metered_step
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.data_parallel import ends_unit, states_in
from profiler.workload.forward_patches import Forward, ForwardPatches
from profiler.workload.own_step import graph_nodes, next_node
from profiler.workload.workload import OnPhase, StepPhase, Workload

leave_uncompiled(__name__)

StageCall = tuple[nn.Module, int]  # a module, and how many calls of it come before
StageTensor = tuple[int, int]  # a stage, and which of the tensors that go into it, or come out of it


AnyStep = TypeVar("AnyStep", bound="MarkedStep")


class PlainStep(Protocol):
    """What a step that keeps everything shows under the memory meter; the attributes are those of ``SavingStep``."""

    phases: MarkedPhases
    input_deaths: dict[StageTensor, Mark]
    output_deaths: dict[StageTensor, Mark]
    late_releases: list[tuple[int, int, Mark]]
    gathered_bytes: dict[int, int]
    copied_bytes: dict[int, int]
    gradient_strides: dict[int, list[tuple[int, ...]]]
    held: set[StageTensor]
    varied: list[str]


class StepProbe:
    """Runs marked steps of a workload; inside of it, as a context manager, stages' forwards go through the step.

    Args:
        workload: the training step.
        positions: the number of each stage, by its call.
        compile_safe: as for ``ForwardPatches``.
    """

    def __init__(self, workload: Workload, positions: Mapping[StageCall, int], *, compile_safe: bool) -> None:
        self.workload = workload
        self.positions = positions
        self._patches = ForwardPatches(compile_safe=compile_safe)
        self._step: MarkedStep | None = None

    def __enter__(self) -> Self:
        for module in dict.fromkeys(module for module, _ in self.positions):
            self._patches.wrap(module, lambda forward, m=module: self._marked(forward, m))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.remove()

    def _marked(self, forward: Forward, module: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            step = self._step
            return forward(*args, **kwargs) if step is None else step.run_call(module, forward, args, kwargs)

        return run

    def ran(
        self,
        make: Callable[[Meter], AnyStep],
        meter: Meter,
        before: Callable[[Meter], MarkedStep] | None = None,
    ) -> AnyStep:
        """A step of this probe under a meter, once it has run.

        Args:
            make: the step, with a meter.
            meter: its own.
            before: makes the step to warm up with, where the meter needs one; None for one like it.
        """
        step = make(meter)
        if self.workload.own is not None or self.workload.nodes_keep:
            step.warm_up = lambda: self._warm_up((before or make)(NoMeter()))
        return self._run(step)

    def _warm_up(self, step: MarkedStep) -> None:
        self._run(step)
        self.workload.zero_grad()  # As they are where a step of the workload's begins; own ones do that themselves.

    def _run(self, step: AnyStep) -> AnyStep:
        outer, self._step = self._step, step
        try:
            step.run()
        finally:
            self._step = outer
        return step


class MarkedStep:
    """One step under a meter, with a mark wherever a stage, what runs outside of stages, or a phase begins.

    Args:
        probe: whose step it is.
        meter: seconds or memory.

    Attributes:
        phases: what lay between the marks, once the step is over.
        nodes: how many autograd nodes there were when backward began.
    """

    def __init__(self, probe: StepProbe, meter: Meter) -> None:
        self.phases: MarkedPhases = []
        self.nodes = 0
        self._workload, self._positions = probe.workload, probe.positions
        self._meter = meter
        self._calls: dict[nn.Module, int] = {}
        self._in_stage = False
        self._now = Mark("forward", Place("outside", 0))
        self._node_ends: list[tuple[Place, int]] = []  # each place with the number of the first node after it
        self.warm_up: WarmUp = None
        self.on_phase: OnPhase | None = None  # is told of each phase but a first forward

    def run(self) -> None:
        """Run the step."""
        self._metered()

    def _metered(self, until: StepPhase | None = None) -> None:
        def warm_up() -> None:
            if self.warm_up is not None:
                self.warm_up()
            self._first_node = next_node()

        self._first_node = next_node()
        self.phases = metered_step(self._workload, self._meter, self._first, self._begin, until=until, warm_up=warm_up)

    def _first(self, phase: StepPhase) -> Mark:
        if phase != "forward":
            self._now = Mark(phase)
            if self.on_phase is not None:
                self.on_phase(phase, None)
        return self._now

    def _begin(self, phase: StepPhase, loss: Tensor | None) -> None:
        if self.on_phase is not None:
            self.on_phase(phase, loss)
        if phase == "forward":  # Others came before it.
            self._first_node = next_node()
            self._calls.clear()
            self._node_ends.clear()
            self.mark(Mark("forward", Place("outside", 0)))
        elif phase == "backward":
            assert loss is not None
            self.nodes = next_node() - self._first_node
            self._node_ends.append((Place("outside", len(self._positions)), next_node()))
            self._mark_backward_of(loss)
            self.mark(Mark("loss"))  # What backward allocates first belongs to no forward.
        elif phase in ("evaluation", "end") or self._workload.optimizers:
            self.mark(Mark(phase))

    @property
    def now(self) -> Mark:
        """What began last."""
        return self._now

    def mark(self, mark: Mark) -> None:
        """Something else begins now."""
        self._now = mark
        self._meter.mark(mark)

    def run_call(self, module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run a call of a module, between marks where it is a stage's."""
        position = self.position_of(module) if torch.is_grad_enabled() else None
        if position is None:
            return forward(*args, **kwargs)
        self._in_stage = True
        self.enter(position)
        try:
            return self.run_stage(position, forward, args, kwargs)
        finally:
            self._in_stage = False
            self.leave(position)

    def position_of(self, module: nn.Module) -> int | None:
        """The stage that a module's next call is; None for a call inside another stage, or of none."""
        if self._now.phase == "evaluation":
            return None
        count = self._calls.get(module, 0)
        self._calls[module] = count + 1
        return None if self._in_stage else self._positions.get((module, count))

    def enter(self, position: int) -> None:
        """A stage's forward begins."""
        self._node_ends.append((Place("outside", position), next_node()))
        self.mark(Mark("forward", Place("stage", position)))

    def run_stage(self, position: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run the stage's own forward."""
        return forward(*args, **kwargs)

    def leave(self, position: int) -> None:
        """A stage's forward is over."""
        self._node_ends.append((Place("stage", position), next_node()))
        self.mark(Mark("forward", Place("outside", position + 1)))

    def enter_backward(self, place: Place) -> None:
        """The backward of a place begins."""
        self.mark(Mark("backward", place))

    def _mark_backward_of(self, loss: Tensor) -> None:
        """Have a mark made as the first autograd node of each place runs.

        The engine runs ready nodes in falling order of their sequence number, so
        a place's backward begins with its highest node and ends where another's begins.
        """
        highest: dict[Place, tuple[int, Any]] = {}
        has_units = bool(states_in(self._workload.model))
        for node in graph_nodes(loss):
            if has_units and ends_unit(node):
                node.register_hook(lambda *_: self._meter.mark(self._now))
            number = node._sequence_nr()
            place = self._place_of(number)
            if place is not None and (place not in highest or highest[place][0] < number):
                highest[place] = (number, node)
        for place, (_, node) in highest.items():
            node.register_prehook(lambda _, place=place: self.enter_backward(place))

    def _place_of(self, number: int) -> Place | None:
        for place, end in self._node_ends:
            if number < end:
                return place
        return None  # AccumulateGrad: its number stands above all others.
