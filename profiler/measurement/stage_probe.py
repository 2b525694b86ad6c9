"""Real steps of a workload with a mark at every stage and phase, in each of the variants that a profile measures."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from profiler.measurement.meter import Mark, MarkedPhases, Meter, NoMeter, Place, WarmUp, metered_step
from profiler.recomputation.module_rerun import CallState, detached
from profiler.recomputation.saved_tensors import SavedSignature, is_parameter_like, signature_of
from profiler.trace.partition import ChosenStage
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.custom_step import graph_nodes, next_node
from profiler.workload.data_parallel import CopiesOfThreads, ends_unit, in_flight_bytes, states_in, told_when_gathered
from profiler.workload.forward_patches import Forward, ForwardPatches
from profiler.workload.snapshot import left_as_before
from profiler.workload.tensor_parts import has_storage, sizes_of, storage_key, storage_of
from profiler.workload.tensor_trees import device_of, map_tensors, tensors_in
from profiler.workload.workload import OnPhase, StepPhase, Workload

leave_uncompiled(__name__)

StageCall = tuple[nn.Module, int]  # a module, and how many calls of it come before
StageTensor = tuple[int, int]  # a stage, and which of the tensors that go into it, or come out of it


AnyStep = TypeVar("AnyStep", bound="MarkedStep")
NOTHING_INSTEAD: Mapping[int, Forward] = MappingProxyType({})
MakeMeter = Callable[[], Meter]


@dataclass(slots=True)
class PlainStep:
    """The measurements of a step that keeps everything, under the memory meter.

    Attributes:
        phases: the intervals between its marks. The last interval of a stage's forward begins after its last saved
            tensor.
        input_deaths: the mark, for input tensors of stages, at which their storage was freed.
        output_deaths: the mark for their output tensors.
        held: the tensors that stages saved, and that autograd still held when their backward was over.
        varied: the names of the stages that saved more or fewer tensors than in the traced step.
        late_releases: the stage, the bytes and the mark of storages that were saved and freed in a later forward.
        gathered_bytes: the buffer that parameters were gathered in, by stage that is a unit of ``fully_shard``. Its
            second interval begins when they are there.
        copied_bytes: the copies of other gradients that may be there as the backward of a stage begins, by stage.
        gradient_strides: the strides of the gradients of outputs that take one, by stage; empty for none.
        cyclic_bytes: the tensors that the step left in reference cycles.
    """

    phases: MarkedPhases = field(default_factory=list)
    input_deaths: dict[StageTensor, Mark] = field(default_factory=dict)
    output_deaths: dict[StageTensor, Mark] = field(default_factory=dict)
    held: set[StageTensor] = field(default_factory=set)
    varied: list[str] = field(default_factory=list)
    late_releases: list[tuple[int, int, Mark]] = field(default_factory=list)
    gathered_bytes: dict[int, int] = field(default_factory=dict)
    copied_bytes: dict[int, int] = field(default_factory=dict)
    gradient_strides: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    cyclic_bytes: int = 0


Named = TypeVar("Named", bound=Hashable)


def calls_outside(calls: Iterable[tuple[Named, int, Iterable[tuple[Named, int]]]]) -> list[tuple[Named, int]]:
    """The calls of stages, each with how many calls of its module come before outside of stages.

    Calls inside of stages do not count, since a stage that runs as a program makes none.

    Args:
        calls: a module, how many calls of it come before, and the modules that the call itself calls, with how often.

    >>> calls_outside([("block", 0, [("act", 2)]), ("act", 2, []), ("block", 1, [("act", 2)]), ("act", 5, [])])
    [('block', 0), ('act', 0), ('block', 1), ('act', 1)]
    """
    found: list[tuple[Named, int]] = []
    inside = Counter[Named]()
    for module, number, inner_calls in calls:
        found.append((module, number - inside[module]))
        inside.update(dict(inner_calls))
    return found


class StepProbe:
    """Runs marked steps of a workload; inside of it, as a context manager, stages' forwards go through the step.

    Args:
        workload: the training step.
        positions: the number of each stage, by its module and the number of its earlier calls outside of stages.
        compile_safe: the same as for ``ForwardPatches``.
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
            make: the function that makes the step, given a meter.
            meter: the meter of the step.
            before: the function that makes the step to warm up with, where the meter needs one; None for one like it.
        """
        step = make(meter)
        if self.workload.custom_step is not None or self.workload.nodes_keep:
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
        probe: the probe that runs the step.
        meter: seconds or memory.
        instead: the function, by the stage's number, that runs in the place of its own forward.

    Attributes:
        phases: the intervals between the marks, once the step is over.
        nodes: the number of autograd nodes when backward began.
    """

    def __init__(self, probe: StepProbe, meter: Meter, instead: Mapping[int, Forward] = NOTHING_INSTEAD) -> None:
        self.phases: MarkedPhases = []
        self.nodes = 0
        self._workload, self._positions = probe.workload, probe.positions
        self._meter, self._instead = meter, instead
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
        self.phases = metered_step(
            self._workload,
            self._meter,
            self._first,
            self._begin,
            until=until,
            warm_up=warm_up,
            at_end=self._end,
        )

    def _end(self) -> None:
        """The step is over, and the meter still runs."""

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
        """The mark of the interval that began last."""
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
        if self._now.phase == "evaluation" or self._in_stage:
            return None
        count = self._calls.get(module, 0)
        self._calls[module] = count + 1
        return self._positions.get((module, count))

    def enter(self, position: int) -> None:
        """A stage's forward begins."""
        self._node_ends.append((Place("outside", position), next_node()))
        self.mark(Mark("forward", Place("stage", position)))

    def run_stage(self, position: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run the stage's own forward, or what runs in its place."""
        return self._instead.get(position, forward)(*args, **kwargs)

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


WHERE = "sublinear_planner_where"  # an attribute of errors: the stage in which they were raised


class StageProbe(StepProbe):
    """Patches the chosen stages of a workload's model and runs steps under a meter.

    Use as a context manager; on leaving, the model's forwards are its own again.

    Attributes:
        nodes_of_steps: the numbers of autograd nodes that the plain steps made: more than one where they differ.
    """

    def __init__(self, workload: Workload, stages: Sequence[ChosenStage]) -> None:
        calls = calls_outside((stage.call.module, stage.call.index, stage.inner_calls) for stage in stages)
        super().__init__(workload, {call: k for k, call in enumerate(calls)}, compile_safe=True)
        self.stages = stages
        self.nodes_of_steps: set[int] = set()

    def _run(self, step: AnyStep) -> AnyStep:
        try:
            return super()._run(step)
        except Exception as error:
            mark = step.now
            if mark.place is not None and mark.place.kind == "stage" and not hasattr(error, WHERE):
                setattr(error, WHERE, f"in the {mark.phase} of stage {self.stages[mark.place.index].name!r}")
            raise

    def step(self, meter: Meter) -> MarkedPhases:
        """One plain step: forward, backward, optimizer."""
        return self._counted(self.ran(lambda each: MarkedStep(self, each), meter)).phases

    def saving_step(self, make_meter: MakeMeter) -> PlainStep:
        """One plain step with a mark at every tensor that is saved inside a stage."""
        return self._counted(self.ran(lambda each: SavingStep(self, each), make_meter())).seen

    def timed_step(self, make_meter: MakeMeter) -> MarkedPhases:
        """One plain step under a meter of seconds."""
        return self.step(make_meter())

    def _counted(self, step: AnyStep) -> AnyStep:
        self.nodes_of_steps.add(step.nodes)
        return step

    def replacing_step(self, meter: Meter, instead: Mapping[int, Forward]) -> MarkedStep:
        """One step with something else in the place of stages' own forwards; arguments as for ``MarkedStep``."""
        return self.ran(lambda each: MarkedStep(self, each, instead), meter)

    def dropping_forward(
        self, meter: Meter, *, hold_all: bool, on_stage: Callable[[int, FirstRun], None] | None = None
    ) -> DroppingForward:
        """One forward in which no stage keeps anything, and no backward; arguments as for ``DroppingForward``."""
        # The step before is a whole one: it leaves what a step leaves.
        return self.ran(
            lambda each: DroppingForward(self, each, hold_all=hold_all, on_stage=on_stage),
            meter,
            lambda each: MarkedStep(self, each),
        )


class SavingStep(MarkedStep):
    """A step with a mark at every tensor that is saved inside a stage; ``seen`` is what it shows."""

    def __init__(self, probe: StageProbe, meter: Meter, instead: Mapping[int, Forward] = NOTHING_INSTEAD) -> None:
        super().__init__(probe, meter, instead)
        self._stages, self._units = probe.stages, states_in(probe.workload.model)
        self._copies = CopiesOfThreads(self._units)
        self.seen = PlainStep()
        self._saved_storages: dict[int, tuple[int, int, weakref.ref[Any]]] = {}  # with stage and bytes
        self._saved: dict[int, list[weakref.ref[Tensor]]] = {}
        self._inputs: dict[StageTensor, weakref.ref[Any]] = {}
        self._outputs: dict[StageTensor, weakref.ref[Any]] = {}

    def run(self) -> None:
        """Run the step."""
        gc.collect()  # What earlier steps have left is not this one's.
        super().run()
        if self.phases:  # Nothing is known of a step to warm up with.
            *self.phases, (_, collected) = self.phases
            self.seen.cyclic_bytes = collected.start_bytes - collected.end_bytes
        self.seen.phases = self.phases

    def _end(self) -> None:
        self._meter.mark(Mark("collected"))
        gc.collect()

    def mark(self, mark: Mark) -> None:
        """Notes the storages freed since the last mark: they were freed in the interval that it began."""
        seen = self.seen
        for living, deaths in ((self._inputs, seen.input_deaths), (self._outputs, seen.output_deaths)):
            for tensor in [tensor for tensor, storage in living.items() if storage() is None]:
                deaths[tensor] = self._now
                del living[tensor]
        for key in [key for key, (*_, storage) in self._saved_storages.items() if storage() is None]:
            self._release(key)
        if mark.phase != "forward":
            self._saved_storages.clear()
        place = mark.place if mark.phase == "backward" else None
        copied_bytes = self._copies.size_now()
        if place is not None and place.kind == "stage" and not in_flight_bytes(self._units):
            seen.copied_bytes.setdefault(place.index, copied_bytes)
        if self._now.phase == "backward" and self._now.place is not None and self._now.place.kind == "stage":
            k = self._now.place.index
            seen.held |= {(k, n) for n, saved in enumerate(self._saved.pop(k, ())) if saved() is not None}
        super().mark(mark)

    def run_stage(self, position: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        now, saved = self._now, self._saved.setdefault(position, [])
        given = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
        for key in given & self._saved_storages.keys():  # They are counted as boundaries, or as shared.
            del self._saved_storages[key]

        def pack(tensor: Tensor) -> Tensor:
            self._meter.mark(now)
            packed = tensor.detach()
            saved.append(weakref.ref(packed))
            if storage_key(tensor) not in given:
                self._note_saved(position, tensor)
            return packed

        def gathered(module: Any) -> None:
            if module is self._stages[position].call.module:
                self.seen.gathered_bytes[position] = in_flight_bytes(self._units)
                self._meter.mark(now)

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, told_when_gathered(gathered):
            self._inputs.update(storages_of(position, (args, kwargs)))
            output = forward(*args, **kwargs)
            self._outputs.update(storages_of(position, output))
        self._note_gradients(position, (args, kwargs), output)
        self.seen.varied += _varied(self._stages[position], len(saved))
        return output

    def _note_gradients(self, position: int, given: Any, output: Any) -> None:
        passed_on = {id(tensor) for tensor in tensors_in(given)}
        made = (tensor for tensor in tensors_in(output) if id(tensor) not in passed_on)
        trained = [tensor for tensor in made if tensor.requires_grad and tensor.grad_fn is not None]
        strides = self.seen.gradient_strides[position] = [()] * len(trained)

        def note(number: int, gradient: Tensor) -> None:
            strides[number] = gradient.stride() if gradient.layout is torch.strided else ()

        for number, tensor in enumerate(trained):
            tensor.register_hook(functools.partial(note, number))

    def _note_saved(self, position: int, tensor: Tensor) -> None:
        key = storage_key(tensor)
        known = self._saved_storages.get(key)
        if known is not None and known[2]() is None:  # Another one lies there now.
            self._release(key)
            known = None
        if known is None and has_storage(tensor):
            storage = storage_of(tensor)
            self._saved_storages[key] = position, storage.nbytes(), weakref.ref(storage)

    def _release(self, key: int) -> None:
        position, size_bytes, _ = self._saved_storages.pop(key)
        self.seen.late_releases.append((position, size_bytes, self._now))


def _varied(stage: ChosenStage, saved: int) -> list[str]:
    return [] if saved == stage.call.end_save - stage.call.first_save else [stage.name]


def storages_of(position: int, tree: Any) -> dict[StageTensor, weakref.ref[Any]]:
    """The storages under the tensors that go into a stage, or come out of it, without holding them."""
    return {
        (position, leaf): weakref.ref(storage_of(tensor))
        for leaf, tensor in enumerate(tensors_in(tree))
        if has_storage(tensor)
    }


@dataclass(slots=True)
class FirstRun:
    """One stage call as it ran without keeping anything: with what it was given and returned, and would have saved."""

    call: Forward
    state: CallState
    arguments: Any
    output: Any
    versions: list[int]
    saved: list[tuple[tuple[int, ...], torch.dtype]]
    signatures: list[SavedSignature | None]

    def input_changed(self) -> bool:
        """Whether an input tensor was changed in place after the call."""
        return [tensor._version for tensor in tensors_in(self.arguments)] != self.versions


class DroppingForward(MarkedStep):
    """A forward in which no stage keeps anything.

    Args:
        probe, meter: the same as for ``MarkedStep``.
        hold_all: whether every stage's input and output is held (to recompute it); if not, an input is held only if
            it is not the output of the stage before, as under a plan.
        on_stage: called with each stage's number and call as it ends; holds nothing of it where nothing is to be held.

    Attributes:
        first_runs: each stage's call, where all of them are held.
        freed: whether the boundary before each stage was freed once nothing held it.
        hidden: tensors that stages would have saved, and that were alive at the end of the forward all the same.
        varied: names of the stages that would have saved more or fewer tensors than in the traced step.
    """

    def __init__(
        self,
        probe: StageProbe,
        meter: Meter,
        *,
        hold_all: bool,
        on_stage: Callable[[int, FirstRun], None] | None = None,
    ) -> None:
        super().__init__(probe, meter)
        self._on_stage = on_stage
        self.first_runs: list[FirstRun] = []
        self.freed = [True] * len(probe.stages)
        self.hidden: set[StageTensor] = set()
        self.varied: list[str] = []
        self._dropped: dict[StageTensor, weakref.ref[Any]] = {}
        self._stages = probe.stages
        self._hold_all = hold_all
        self._held: list[Any] = []
        self._linked: list[tuple[int, weakref.ref[Any]]] = []  # storages of the boundary before the last stage

    def run(self) -> None:
        """Run the forward."""
        try:
            with left_as_before(self._workload):
                self._metered(until="backward")
        finally:
            self._held.clear()

    def _begin(self, phase: StepPhase, loss: Tensor | None) -> None:
        if phase == "backward":
            self.mark(Mark("end"))
            self._check_freed()
            self.hidden = {tensor for tensor, storage in self._dropped.items() if storage() is not None}
        else:
            super()._begin(phase, loss)

    def enter(self, position: int) -> None:
        self._check_freed()
        super().enter(position)

    def run_stage(self, position: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        call = self._stages[position].call
        saved: list[tuple[tuple[int, ...], torch.dtype]] = []
        signatures: list[SavedSignature | None] = []  # Taken as a plan takes them, so their time is in the forward's.
        # A graph that a module stores holds this closure: by the step, whose calls hold what is stored, it held itself.
        dropped, goes_backward = self._dropped, call.goes_backward

        def pack(tensor: Tensor) -> Tensor | None:
            if not goes_backward and has_storage(tensor):
                dropped[position, len(saved)] = weakref.ref(storage_of(tensor))
            saved.append((sizes_of(tensor), tensor.dtype))
            signatures.append(None if is_parameter_like(tensor) else signature_of(tensor))
            return tensor.detach() if goes_backward else None

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            device, changing = device_of((args, kwargs)), call.mutated_buffers
            state = CallState(call.module, device, draws_random=call.draws_random, changing=changing)
            self._hold_inputs(position, args, kwargs)
            if not self._hold_all and self._on_stage is None:
                output = forward(*args, **kwargs)
                self.varied += _varied(self._stages[position], len(saved))
                return output
            arguments = detached((args, kwargs))  # Before: the call may add to a list.
            versions = [tensor._version for tensor in tensors_in(arguments)]
            output = forward(*args, **kwargs)
            copies = map_tensors(lambda tensor: tensor.detach().clone(), output)  # It may be changed later.
            first = FirstRun(forward, state, arguments, copies, versions, saved, signatures)
            if self._hold_all:
                self.first_runs.append(first)
        if self._on_stage is not None:
            self._on_stage(position, first)
        return output

    def _hold_inputs(self, position: int, args: Any, kwargs: Any) -> None:
        linked = {leaf for leaf, _ in self._stages[position].links}
        for leaf, tensor in enumerate(tensors_in((args, kwargs))):
            if leaf not in linked:
                self._held.append(tensor.detach())
            elif not self._hold_all and has_storage(tensor):
                self._linked.append((position, weakref.ref(storage_of(tensor))))

    def _check_freed(self) -> None:
        """Boundaries that the stage behind them has used must be gone by now."""
        for position, reference in self._linked:
            storage = reference()
            if storage is not None:
                self.freed[position] = False
                self._held.append(storage)  # The model holds it for longer; a plan then holds it as an input.
        self._linked.clear()
