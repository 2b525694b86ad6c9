"""The probe: runs one real step with marks at every stage boundary, forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from profiler.measurement.meter import Interval, Meter
from profiler.recomputation.module_rerun import CallState, CallTraits, detached
from profiler.recomputation.recompute_checks import CheckedCall
from profiler.recomputation.selection import Selection
from profiler.recomputation.selective_call import SelectiveCall
from profiler.trace.partition import ChosenStage
from profiler.workload.autograd_nodes import graph_nodes, next_node
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.forward_patches import Forward, ForwardPatches
from profiler.workload.tensor_trees import device_of, map_tensors, tensors_in
from profiler.workload.workload import Workload

leave_uncompiled(__name__)

FORWARD, LOSS, BACKWARD, OPTIMIZER, END = "forward", "loss", "backward", "optimizer", "end"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step is: in stage k, or outside directly before stage k (k = number of stages: after the last)."""

    kind: str
    index: int

    def label(self, phase: str) -> str:
        return f"{phase}:{self.kind}:{self.index}"


def stage_place(index: int) -> Place:
    """The k-th stage."""
    return Place("stage", index)


def outside_place(index: int) -> Place:
    """What runs between stage k-1 and stage k."""
    return Place("outside", index)


@dataclass(slots=True, kw_only=True)
class FirstRun:
    """One stage call as the probe saw it run without keeping anything."""

    call: Forward
    state: CallState
    arguments: Any
    output: Any
    versions: list[int]
    saved: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)

    def input_changed(self) -> bool:
        """Whether an input tensor was changed in place after the call."""
        return [tensor._version for tensor in tensors_in(self.arguments)] != self.versions


class StepProbe:
    """Patches the chosen stages of a workload's model and runs steps under a meter.

    Use as a context manager; on leaving, the model's forwards are its own again.
    """

    def __init__(self, workload: Workload, stages: tuple[ChosenStage, ...]) -> None:
        self._workload = workload
        self._stages = stages
        self._patches = ForwardPatches()
        self._position = {(id(s.call.module), s.call.index): k for k, s in enumerate(stages)}
        self._counts: dict[int, int] = {}
        self._run: _Run | None = None
        # Of the last plain step: (stage, input tensor) -> the interval in which its storage was freed.
        self.deaths: dict[tuple[int, int], str] = {}
        # The same for the output tensors of stages.
        self.output_deaths: dict[tuple[int, int], str] = {}
        # Of the last step: stages that ran other ops than their selection expects.
        self.diverged: set[int] = set()
        # Of the last step that was checked: stage -> ordinals of ops that did not give the same again.
        self.wrong: dict[int, set[int]] = {}

    def __enter__(self) -> StepProbe:
        for module in {id(s.call.module): s.call.module for s in self._stages}.values():
            self._patches.wrap(module, lambda forward, m=module: self._marked(forward, m))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.remove()

    def step(
        self,
        meter: Meter,
        *,
        mark_saves: bool = False,
        selections: Mapping[int, Selection] | None = None,
        check: bool = False,
    ) -> list[Interval]:
        """One step: forward, backward, optimizer.

        Args:
            meter: seconds or memory.
            mark_saves: also mark each tensor saved inside a stage, so that a
                stage's last interval begins after its last saved tensor.
            selections: stages that keep only a choice of what they save.
            check: hold what they make again against what they made first.
        """
        self._workload.zero_grad()
        run = _Run(meter, "save" if mark_saves else "plain", len(self._stages), selections=selections, check=check)
        with self._running(run):
            meter.start(outside_place(0).label(FORWARD))
            try:
                loss = self._forward(run)
                run.mark(LOSS)  # What backward allocates first belongs to no forward.
                self._workload.backward(loss)
                value = loss.detach()  # As Workload.step: the loss outlives its graph.
                del loss
                if self._workload.optimizer is not None:
                    run.mark(OPTIMIZER)
                    self._workload.update()
                run.mark(END)
                del value
            finally:
                found = meter.stop()
        self.deaths, self.output_deaths = run.deaths, run.output_deaths
        self.diverged = run.diverged
        self.wrong = {position: call.wrong for position, call in run.checked.items() if call.wrong}
        return found

    def dropping_forward(
        self, meter: Meter, traits: list[CallTraits], *, hold_all: bool
    ) -> tuple[list[Interval], list[FirstRun], list[bool]]:
        """One forward in which no stage keeps anything.

        Args:
            meter: seconds or memory.
            traits: of each stage.
            hold_all: hold every stage's input and output (to rerun it); else only
                inputs that are no output of the stage before, as a plan would.

        Returns:
            The intervals, the runs, and for each stage whether the boundary
            before it was freed once nothing held it.
        """
        self._workload.zero_grad()
        run = _Run(meter, "drop", len(self._stages), traits=traits, hold_all=hold_all)
        with self._running(run):
            meter.start(outside_place(0).label(FORWARD))
            try:
                loss = self._workload.forward()
                meter.mark(END)
                run.check_freed()
                del loss
            finally:
                found = meter.stop()
        return found, run.first_runs, run.freed

    @contextmanager
    def _running(self, run: _Run) -> Iterator[None]:
        self._counts.clear()
        self._run = run
        try:
            yield
        finally:
            self._run = None

    def _forward(self, run: _Run) -> Tensor:
        loss = self._workload.forward()
        run.nodes.append((outside_place(len(self._stages)), next_node()))
        mark_backward(loss, run.nodes, run.mark)
        return loss

    def _marked(self, forward: Forward, module: nn.Module) -> Forward:
        def run_marked(*args: Any, **kwargs: Any) -> Any:
            run = self._run
            if run is None or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            count = self._counts.get(id(module), 0)
            self._counts[id(module)] = count + 1
            position = self._position.get((id(module), count))
            if position is None or run.inside:
                return forward(*args, **kwargs)
            run.enter(position)
            try:
                with run.hooks(self._stages[position], position):
                    output = run.first_run(self._stages[position], position, module, forward, args, kwargs)
            finally:
                run.leave(position)
            return output

        return run_marked


class _Run:
    """The state of one probed step."""

    def __init__(
        self,
        meter: Meter,
        mode: str,
        count: int,
        *,
        traits: list[CallTraits] | None = None,
        hold_all: bool = False,
        selections: Mapping[int, Selection] | None = None,
        check: bool = False,
    ) -> None:
        self.meter = meter
        self.mode = mode
        self.traits = traits or []
        self.hold_all = hold_all
        self.selections = selections or {}
        self.check = check
        self.checked: dict[int, CheckedCall] = {}
        self.diverged: set[int] = set()
        self.inside = False
        self.nodes: list[tuple[Place, int]] = []
        self.held: list[Any] = []
        self.first_runs: list[FirstRun] = []
        self.freed = [True] * count
        self.deaths: dict[tuple[int, int], str] = {}
        self.output_deaths: dict[tuple[int, int], str] = {}
        self._label = outside_place(0).label(FORWARD)
        self._inputs: dict[tuple[int, int], weakref.ref[Any]] = {}
        self._outputs: dict[tuple[int, int], weakref.ref[Any]] = {}
        self._saved: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._watched: list[tuple[int, weakref.ref[Any]]] = []

    def enter(self, position: int) -> None:
        self.inside = True
        self.check_freed()
        self.nodes.append((outside_place(position), next_node()))
        self.mark(stage_place(position).label(FORWARD))

    def mark(self, label: str) -> None:
        """A mark; inputs and outputs that died since the last one died in what that one began."""
        for living, deaths in ((self._inputs, self.deaths), (self._outputs, self.output_deaths)):
            for key in [key for key, reference in living.items() if reference() is None]:
                deaths[key] = self._label
                del living[key]
        self._label = label
        self.meter.mark(label)

    def leave(self, position: int) -> None:
        self.inside = False
        self.nodes.append((stage_place(position), next_node()))
        self.mark(outside_place(position + 1).label(FORWARD))

    def hooks(self, stage: ChosenStage, position: int) -> torch.autograd.graph.saved_tensors_hooks | _NoHooks:
        if self.mode == "plain":
            return _NoHooks()
        label = stage_place(position).label(FORWARD)

        def pack_marked(tensor: Tensor) -> Tensor:
            self.meter.mark(label)
            return tensor.detach()

        def pack_dropped(tensor: Tensor) -> Tensor | None:
            self._saved.append((tuple(tensor.shape), tensor.dtype))
            return tensor.detach() if stage.call.goes_backward else None

        pack = pack_marked if self.mode == "save" else pack_dropped
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def first_run(
        self, stage: ChosenStage, position: int, module: nn.Module, forward: Forward, args: Any, kwargs: Any
    ) -> Any:
        if self.mode == "save":
            self._inputs.update(_storages(position, (args, kwargs)))
            output = forward(*args, **kwargs)
            self._outputs.update(_storages(position, output))
            return output
        if position in self.selections:
            call = self._selective(position, module)
            output = call.run(forward, args, kwargs)
            if call.diverged is not None:
                self.diverged.add(position)
            return output
        if self.mode != "drop":
            return forward(*args, **kwargs)
        state = CallState(module, self.traits[position], device_of((args, kwargs)))
        self._hold(stage, position, args, kwargs)
        self._saved = []
        arguments = detached((args, kwargs)) if self.hold_all else None  # Before: the call may add to a list.
        versions = [tensor._version for tensor in tensors_in(arguments)]
        output = forward(*args, **kwargs)
        if self.hold_all:
            self.first_runs.append(
                FirstRun(
                    call=forward,
                    state=state,
                    arguments=arguments,
                    output=map_tensors(lambda tensor: tensor.detach().clone(), output),  # It may be changed later.
                    versions=versions,
                    saved=self._saved,
                )
            )
        return output

    def _selective(self, position: int, module: nn.Module) -> SelectiveCall:
        if not self.check:
            return SelectiveCall(module, self.selections[position])
        self.checked[position] = CheckedCall(module, self.selections[position])
        return self.checked[position]

    def _hold(self, stage: ChosenStage, position: int, args: Any, kwargs: Any) -> None:
        linked = {leaf for leaf, _ in stage.links}
        for leaf, tensor in enumerate(tensors_in((args, kwargs))):
            if leaf not in linked:
                self.held.append(tensor.detach())
            elif not self.hold_all and tensor.layout is torch.strided:
                self._watched.append((position, weakref.ref(tensor.untyped_storage())))

    def check_freed(self) -> None:
        """Boundaries that the stage behind them has used must be gone by now."""
        for position, reference in self._watched:
            storage = reference()
            if storage is not None:
                self.freed[position] = False
                self.held.append(storage)  # The model holds it for longer; a plan then holds it as an input.
        self._watched.clear()


def _storages(position: int, tree: Any) -> dict[tuple[int, int], weakref.ref[Any]]:
    return {
        (position, leaf): weakref.ref(tensor.untyped_storage())
        for leaf, tensor in enumerate(tensors_in(tree))
        if tensor.layout is torch.strided
    }


class _NoHooks:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def mark_backward(loss: Tensor, nodes: list[tuple[Place, int]], mark: Callable[[str], None]) -> None:
    """Mark the moment at which the first autograd node of each place runs.

    The engine runs ready nodes in falling order of their sequence number, so
    a place's backward begins with its highest node and ends where another's begins.
    """
    highest: dict[Place, tuple[int, Any]] = {}
    for node in graph_nodes(loss):
        number = node._sequence_nr()
        place = _place_of(number, nodes)
        if place is not None and (place not in highest or highest[place][0] < number):
            highest[place] = (number, node)
    for place, (_, node) in highest.items():
        node.register_prehook(_marker(mark, place.label(BACKWARD)))


def _marker(mark: Callable[[str], None], label: str) -> Callable[[Any], None]:
    def run(_: Any) -> None:
        mark(label)

    return run


def _place_of(number: int, nodes: list[tuple[Place, int]]) -> Place | None:
    for place, end in nodes:
        if number < end:
            return place
    return None  # AccumulateGrad: its number stands above all others.
