"""Marked steps of a model under a plan: which stage runs, for the first time or recomputed, at every moment of a step.

With them: which tensors make up the highest moment of one such step, and which op, module and stage made each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.measurement.meter import Mark, MarkedPhases, Meter, Place, WarmUp
from profiler.measurement.stage_probe import MarkedStep, StepProbe
from profiler.op_graph import is_allocation
from profiler.recomputation.module_rerun import RERUN_DEPTH
from profiler.recomputation.op_schema import traits_of
from profiler.trace.call_program import WATCHERS
from profiler.workload.custom_step import next_node
from profiler.workload.forward_patches import Forward, ForwardPatches
from profiler.workload.given_models import inner_model
from profiler.workload.optimizers import optimizer_tensors, scaler_tensors
from profiler.workload.reachable import tensors_held
from profiler.workload.steps import beside_the_inputs, held_by_loop
from profiler.workload.tensor_parts import any_distributed, storage_of
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import Workload


class PlannedProbe(StepProbe):
    """Runs steps of a workload with a mark wherever a stage, a recomputation of one, or a phase begins and ends.

    Use as a context manager, and apply the plan inside of it: a plan recomputes the forwards that it found when it was
        applied, these marks among them. The marks are those of ``StageProbe``; a run of a stage in backward has the
    phase ``again``.

    Args:
        workload: the training step.
        stages: the module's name of each stage and the number of earlier calls of it outside of stages, in forward
            order.
        again: the stages that are recomputed before the backward of each stage, in order: tells calls of one module
            apart.
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
    """The marks of one step in which stages are recomputed."""

    def __init__(self, probe: PlannedProbe, meter: Meter) -> None:
        super().__init__(probe, meter)
        self._modules = {position: module for (module, _), position in probe.positions.items()}
        self._interrupted = self._now
        # Each with the stage whose backward it is recomputed for, which may only be about to begin then.
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
        """Returns the recomputed stage: the next of the expected ones, else the module's first."""
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


StorageOrigin = Literal["parameter", "buffer", "optimizer state", "batch", "loop", "gradient", "made in step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStorage:
    """A storage that is alive at the highest moment.

    Attributes:
        kind: the kind; ``gradient``: of the parameter ``module``; ``loop``: the output or loss of the step before.
        size_bytes: the size of the storage, however many tensors view it.
        op: the op that made or filled it; empty if it is older than the step.
        module: the module that called the op (in backward: whose op's backward it is), or the parameter's name.
        made_in: the part of the step that made it; None if it is older than the step.
        again: whether a recomputed op made it in backward.
        shape, dtype: the shape and type of the tensor as it was made.
    """

    kind: StorageOrigin
    size_bytes: int = 0
    op: str = ""
    module: str = ""
    made_in: Mark | None = None
    again: bool = False
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakSnapshot:
    """The highest moment of a step.

    Attributes:
        peak_bytes: the allocator's, of the watched step.
        before_bytes: the allocator's as the op at the peak began.
        mark: the phase and place at that moment.
        op, module: the op that was running; empty between two ops.
        storages: the storages that were alive, the op's own results included, each once.
    """

    peak_bytes: int
    before_bytes: int
    mark: Mark
    op: str
    module: str
    storages: tuple[LiveStorage, ...]

    @property
    def explained_bytes(self) -> int:
        """The sum of the storages; the rest of the peak are temporaries inside the op's kernel."""
        return sum(storage.size_bytes for storage in self.storages)


class LiveTensorTracker:
    """Logs which storages live while a workload runs one step.

    Use as a context manager together with its ``PlannedProbe``, and apply a plan
    inside of both, so that recomputed ops are seen in their modules.

    Args:
        workload: the training step.
        probe: the probe of the same workload; it runs the step.
        meter: the meter of memory for the workload's device.
    """

    def __init__(self, workload: Workload, probe: PlannedProbe, meter: Meter) -> None:
        self._workload = workload
        self._probe = probe
        self._meter = meter
        self._patches = ForwardPatches(compile_safe=False)
        self._modules: list[str] = []

    def __enter__(self) -> LiveTensorTracker:
        for name, module in self._workload.model.named_modules():
            self._patches.wrap(module, lambda forward, n=name: self._named(forward, n))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.remove()

    def _named(self, forward: Forward, name: str) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._modules.append(name)
            try:
                return forward(*args, **kwargs)
            finally:
                self._modules.pop()

        return run

    def step(self) -> PeakSnapshot:
        """Run one step and tell what was alive at its highest moment."""
        log = _StorageLog(self._workload.device)
        step = _LoggingMeter(log, self._meter, self._workload, lambda: self._modules[-1] if self._modules else None)
        with step:
            self._probe.step(step)
        for name, parameter in self._workload.model.named_parameters():
            if parameter.grad is not None:
                log.name_gradient(parameter.grad, name)
        return step.peak()


@dataclass(slots=True)
class _LoggedMark:
    """A mark of the meter: so many events had been logged; of an op's, also those of its own results."""

    mark: Mark
    events: int
    op: str = ""
    module: str = ""
    made: list[tuple[int, int]] = field(default_factory=list)


class _StorageLog:
    """Births and deaths of storages in order, as pairs (number, bytes from now on)."""

    def __init__(self, device: torch.device) -> None:
        self._device_type = device.type
        self.events: list[tuple[int, int]] = []
        self.storages: list[LiveStorage] = []
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def add_resident(self, workload: Workload) -> None:
        model = workload.model
        for name, parameter in model.named_parameters():
            self.add([parameter], LiveStorage(kind="parameter", module=name))
            if parameter.grad is not None:
                self.add([parameter.grad], LiveStorage(kind="gradient", module=name))
        for name, buffer in model.named_buffers():
            self.add([buffer], LiveStorage(kind="buffer", module=name))
        others = list(workload.parameters_beside())
        self.add(others, LiveStorage(kind="parameter"))  # Those of the model are known by name already.
        self.add((p.grad for p in others if p.grad is not None), LiveStorage(kind="gradient"))
        self.add(scaler_tensors(workload.scaler), LiveStorage(kind="optimizer state"))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for owner, _, tensor in optimizer_tensors(workload.optimizers):
            self.add([tensor], LiveStorage(kind="optimizer state", module=names.get(id(owner), "")))
        self.add([*tensors_held(workload.inputs), *beside_the_inputs(workload)], LiveStorage(kind="batch"))
        self.add(held_by_loop(workload), LiveStorage(kind="loop"))

    def add(self, tensors: Iterable[Tensor], made: LiveStorage) -> None:
        """Log storages that are new, and those whose size has changed."""
        for tensor in tensors:
            if tensor.layout is not torch.strided or tensor.device.type != self._device_type:
                continue
            storage = storage_of(tensor)
            size = storage.nbytes()
            number = self._number(tensor)
            if number is None:
                number = len(self.storages)
                self._know(storage, number)
                shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
                self.storages.append(replace(made, size_bytes=size, shape=shape, dtype=dtype))
                self.events.append((number, size))
            elif number >= 0 and size != self.storages[number].size_bytes:
                self.storages[number] = replace(self.storages[number], size_bytes=size)
                self.events.append((number, size))

    def fill(self, tensors: Iterable[Tensor], op: str) -> None:
        """An op has changed these in place: where they were only allocated, it is their maker."""
        for tensor in tensors:
            number = self._number(tensor)
            if number is not None and number >= 0 and is_allocation(self.storages[number].op):
                self.storages[number] = replace(self.storages[number], op=op)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Mark storages that an op reads and no op of the step made, so that they are not counted as the step's."""
        for tensor in tensors:
            if tensor.layout is torch.strided and self._number(tensor) is None:
                self._know(storage_of(tensor), -1)

    def name_gradient(self, gradient: Tensor, parameter: str) -> None:
        number = self._number(gradient)
        if number is not None and number >= 0:
            self.storages[number] = replace(self.storages[number], kind="gradient", module=parameter)

    def _number(self, tensor: Tensor) -> int | None:
        """Returns the number of its storage; None where that is not known, or where it has none (sparse tensors)."""
        known = self._known.get(id(storage_of(tensor))) if tensor.layout is torch.strided else None
        return None if known is None else known[0]

    def _know(self, storage: Any, number: int) -> None:
        """Map a storage to its number until it is freed; -1 if no op of the step made it."""
        key = id(storage)

        def died(_: Any) -> None:
            self._known.pop(key, None)
            if number >= 0:
                self.events.append((number, 0))

        self._known[key] = (number, weakref.ref(storage, died))


class _LoggingMeter(TorchDispatchMode):
    """The meter that the marks see, and a mode: passes marks on, and adds one before every op."""

    def __init__(self, log: _StorageLog, meter: Meter, workload: Workload, module: Callable[[], str | None]) -> None:
        super().__init__()
        self._log = log
        self._meter = meter
        self._workload = workload
        self._module = module
        self._marks: list[_LoggedMark] = []
        self._module_of: dict[int, str] = {}  # by the autograd node that its first op made
        self._phases: MarkedPhases = []

    def start(self, mark: Mark, warm_up: WarmUp = None) -> None:
        with torch._C._DisableTorchDispatch():
            self._meter.start(mark, warm_up)
        self._log.add_resident(self._workload)  # Now: a meter may give tensors other storages as it starts.
        self._marks.append(_LoggedMark(mark, len(self._log.events)))

    def mark(self, mark: Mark) -> None:
        self._add(_LoggedMark(mark, len(self._log.events)))

    def _add(self, logged: _LoggedMark) -> None:
        self._marks.append(logged)
        with torch._C._DisableTorchDispatch():
            self._meter.mark(logged.mark)

    def stop(self) -> MarkedPhases:
        with torch._C._DisableTorchDispatch():  # It may put back storages that it moved as it started.
            self._phases = self._meter.stop()
        return self._phases

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any_distributed(types):
            return NotImplemented
        kwargs = kwargs or {}
        if not self._marks:  # Gradients that are added to are cleared before the meter starts.
            return func(*args, **kwargs)
        logged = _LoggedMark(self._marks[-1].mark, len(self._log.events), str(func), self._module_now())
        self._log.ignore(tensors_in((args, kwargs)))
        self._add(logged)
        output = func(*args, **kwargs)
        again = RERUN_DEPTH.get() > 0 or logged.mark.phase == "again"
        made = LiveStorage(kind="made in step", op=logged.op, module=logged.module, made_in=logged.mark, again=again)
        before = len(self._log.events)
        self._log.add(tensors_in(output), made)
        logged.made = self._log.events[before:]
        self._log.fill(traits_of(func).writes(args, kwargs), logged.op)
        return output

    def _module_now(self) -> str:
        """The module whose forward runs; in backward the one whose op's backward runs."""
        module, node = self._module(), torch._C._current_autograd_node()
        if module is None:
            return "" if node is None else self._module_of.get(node._sequence_nr(), "")
        if node is None:
            self._module_of.setdefault(next_node() - 1, module)
        return module

    def peak(self) -> PeakSnapshot:
        logged, (mark, phase) = max(zip(self._marks, self._phases, strict=True), key=lambda pair: pair[1][1].peak_bytes)
        alive = dict([*self._log.events[: logged.events], *logged.made])
        return PeakSnapshot(
            peak_bytes=phase.peak_bytes,
            before_bytes=phase.start_bytes,
            mark=mark,
            op=logged.op,
            module=logged.module,
            storages=tuple(replace(self._log.storages[n], size_bytes=size) for n, size in alive.items() if size),
        )
