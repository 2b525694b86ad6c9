"""Stages whose calls are captured as graphs of ops: checked against the stages themselves, and costed op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from profiler.agreement import agreed, first_failure, gathered
from profiler.capture.call_program import BoundProgram, CallProgram
from profiler.capture.captured_call import CapturedCall, GradientLayouts
from profiler.capture.captures import CallGuard, captured, difference, differing_attributes
from profiler.capture.joint_graph import CaptureError, step_graph_of
from profiler.capture.programs import order_of
from profiler.measurement.device_memory import ran_out
from profiler.measurement.op_costs import measured_graph
from profiler.measurement.stage_probe import FirstRun
from profiler.step_graph import StepGraph, StepRuns
from profiler.tensors.tensor_trees import in_new_containers, tensors_in
from profiler.trace.obstacles import why_not_recomputable
from profiler.trace.partition import HOOKS_OF_CALLS, ChosenStage
from profiler.trace.step_record import Call, Trace
from profiler.workload.data_parallel import casts_as_unit

ProposeRuns = Callable[[StepGraph], Sequence[StepRuns]]
_OTHER_GRAPH = "stages like it are captured as another graph"


@dataclass(slots=True)
class CapturedKind:
    """Stages of one kind, captured.

    Attributes:
        graph: of their ops, with what these cost; None where they are opaque.
        opaque: why they are; empty otherwise.
        other_bits: what their programs round otherwise than the stages do; empty where nothing is.
        unread: attributes in which the stages' modules differ, and which make no difference to what they compute.
        once: by stage, the program in which each op runs once.
        orders: the orders of the graph's ops that are worth having; None until they are asked for.
    """

    graph: StepGraph | None = None
    opaque: str = ""
    other_bits: str = ""
    unread: frozenset[str] = frozenset()
    once: dict[int, BoundProgram] = field(default_factory=dict)
    orders: Sequence[StepRuns] | None = None
    _guards: dict[int, CallGuard] = field(default_factory=dict)

    def run(self, k: int, args: Any, kwargs: Any) -> Any:
        """Call a stage as that program, and ask its guard before, as it is called where a plan is applied."""
        program, guard = self.once[k], self._guards.get(k)
        if guard is None or guard.refusal(args, kwargs):  # Under the memory meter modules hold something else.
            self._guards[k] = CallGuard(program.module, args, kwargs)
        return program(*args, **kwargs)


class KindCapture:
    """Captures the stages of one kind, one after the other.

    Args:
        stages: of the step.
        trace: of the step that they were chosen from.
        model: whose modules they are of.
        device: of the step.
        gradient_strides: of the gradients of what the stages return.
    """

    def __init__(
        self,
        stages: Sequence[ChosenStage],
        trace: Trace,
        model: nn.Module,
        device: torch.device,
        gradient_strides: Mapping[int, Sequence[tuple[int, ...]]],
    ) -> None:
        self._stages, self._trace, self._model, self._device = stages, trace, model, device
        self._gradient_strides = {k: tuple(each) for k, each in gradient_strides.items()}
        self._kind = CapturedKind()
        self._programs: list[tuple[CallProgram, nn.Module, int]] = []
        self._failure = ""
        self._raised: Exception | None = None

    def add(self, k: int, first: FirstRun) -> None:
        """Capture stage k, or find that a program of one before it gives its own bits; once one is opaque, all are.

        Args:
            k: position of the stage.
            first: its call, with what it was given.
        """
        if self._failure:
            return
        try:
            self._failure = self._obstacle(k, first) or self._capture(k, first)
        except Exception as error:  # noqa: BLE001 - the stage's own code runs here, and torch's tracing.
            self._failure, self._raised = f"capturing it fails: {type(error).__name__}: {_first_line(error)}", error
            if isinstance(error, CaptureError):
                self._failure = str(error)
            elif ran_out(error):
                self._failure = "there is no memory to check a program of it against the stage"

    def refuse(self, why: str) -> None:
        """The stages are opaque."""
        self._failure = self._failure or why

    def finished(self) -> CapturedKind:
        """What is known of the stages, once all of them were added; the same on all ranks."""
        kind, opaque = self._kind, first_failure(self._failure, self._raised)
        if not opaque:
            graph = agreed(kind.graph)
            other = _OTHER_GRAPH if _without_costs(graph) != _without_costs(kind.graph) else ""
            opaque = first_failure(other)
            kind.graph, kind.unread = graph, frozenset().union(*gathered(kind.unread))
        return kind if not opaque else CapturedKind(opaque=opaque)

    def _obstacle(self, k: int, first: FirstRun) -> str:
        """What speaks against capturing a stage before it is tried; empty where nothing does."""
        call = self._stages[k].call
        if reason := why_not_recomputable(call):
            return reason
        if call.distributed:
            return "its tensors are distributed (DTensor), or it calls collectives"
        for name, inner in call.module.named_modules():
            if name and any(getattr(inner, kind) for kind in HOOKS_OF_CALLS):
                return f"{name!r} inside it has hooks, which a program would not run"
        if first.state.casts() and self._shares_parameters(call):
            return (
                "autocast casts its parameters once for it and for other calls that use them, and adds up in the cast"
            )
        if first.state.units.inside:
            return "it has units of fully_shard inside"
        with first.state.units.gathered():
            if any(type(p) not in (nn.Parameter, torch.Tensor) for p in call.module.parameters()):
                return "its parameters are of a type of their own"
        if casts_as_unit(call.module, tensors_in(first.arguments)):
            return "as a unit of fully_shard it casts what it is given, or returns"
        return ""

    def _shares_parameters(self, call: Call) -> bool:
        """Whether anything outside of a call uses parameters of its module.

        That may be another call of the module or of a part of it, whether or not it is a stage; or another module.
        """
        inside, calls = {*call.module.modules()}, self._trace.calls
        for position, other in enumerate(calls):
            if other.module in inside and call not in (other, *(calls[k] for k in self._trace.ancestors(position))):
                return True
        mine = {id(p) for p in call.module.parameters()}
        others = _modules_outside(self._model, call.module)
        return any(id(p) in mine for other in others for p in other._parameters.values())

    def _capture(self, k: int, first: FirstRun) -> str:
        kind, module, strides = self._kind, self._stages[k].call.module, self._gradient_strides.get(k)
        known = [each for each in self._programs if self._gradient_strides.get(each[2]) == strides]
        shared = next((each for each in known if not self._difference(k, first, each[0])), None)
        if shared is None:
            call = self._captured(k, first)
            program = CallProgram(call, order_of(call.graph))
            if what := self._difference(k, first, program):
                if self._difference(k, first, program, rounded=True):
                    return f"a program of its ops gives other numbers than the stage: {what}"
                kind.other_bits = f"a program of its ops gives other bits than the stage: {what}"
            graph = call.with_arguments(step_graph_of(call.graph))
            if kind.graph is None:
                kind.graph = call.with_arguments(measured_graph(call.graph, self._device))
            elif graph != _without_costs(kind.graph):
                return _OTHER_GRAPH
            self._programs.append((program, module, k))
        else:
            program = shared[0]
            kind.unread |= differing_attributes(shared[1], module) or frozenset()
        kind.once[k] = program.bound(module)
        kind.once[k].watches_gradients = True
        return ""

    def _captured(self, k: int, first: FirstRun) -> CapturedCall:
        args, kwargs = in_new_containers(first.arguments)
        with first.state.reinstated():
            module, strides = self._stages[k].call.module, self._gradient_strides.get(k, ())
            return captured(self._model, module, first.call, args, kwargs, GradientLayouts(strides)).call

    def _difference(self, k: int, first: FirstRun, program: CallProgram, *, rounded: bool = False) -> str:
        """What a program of a stage's ops computes otherwise, and the stage itself does not when it runs twice.

        ``rounded`` is as for ``difference``.
        """
        module = self._stages[k].call.module
        args, kwargs = in_new_containers(first.arguments)
        with first.state.reinstated():
            call = module, first.call, args, kwargs
            what = difference(program.bound(module), *call, rounded=rounded)
            if what and self._device.type != "cpu" and what == difference(first.call, *call, rounded=rounded):
                return ""
        return what


def _modules_outside(model: nn.Module, module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that are there without this one, though some may be inside it as well."""
    waiting, seen = [model], {module}
    while waiting:
        other = waiting.pop()
        if other not in seen:
            seen.add(other)
            waiting += other.children()
            yield other


def _without_costs(graph: StepGraph | None) -> StepGraph | None:
    """What two graphs of the same ops have in common, whatever these were measured to cost."""
    if graph is None:
        return None
    return replace(
        graph,
        ops=tuple(replace(op, seconds=0.0, transient_bytes=0, once_reason="") for op in graph.ops),
        storages=tuple(replace(s, size_bytes=s.traced_bytes, unseen_bytes=0) for s in graph.storages),
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")
