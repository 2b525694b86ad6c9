"""The programs that captured stages of an applied plan run as: made at a stage's first call, guarded at each."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from planner.plans.graph_solving import first_difference
from planner.plans.lowering import LoweredSchedule
from planner.plans.plan import Plan
from planner.runtime.plan_checks import warn_once
from profiler.capture.call_guard import CallGuard, differing_attributes
from profiler.capture.call_program import BoundProgram, CallProgram
from profiler.capture.captured_call import CapturedCall, capture_call
from profiler.capture.joint_graph import CaptureError
from profiler.capture.programs import StepOrder
from profiler.capture.step_dataflow import step_graph_of
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.forward_patches import Forward

leave_uncompiled(__name__)

_MOST_CAPTURES = 4  # of one stage: what changes more often than that would be captured over and over


class _Capture(NamedTuple):
    """A captured call, the module that it is of, and what it takes for granted."""

    call: CapturedCall
    module: nn.Module
    guard: CallGuard


class _Bound(NamedTuple):
    """A stage's program, and what it takes for granted."""

    guard: CallGuard
    program: BoundProgram


class StagePrograms:
    """Finds the program of each call of a stage that the plan runs as one.

    Args:
        plan, lowered: that are applied.
    """

    def __init__(self, plan: Plan, lowered: LoweredSchedule) -> None:
        self._plan = plan
        options = dict(lowered.selective)
        for reruns in lowered.reruns.values():
            options |= {rerun.stage: rerun.option for rerun in reruns if rerun.mode == "keep"}
        sent = {stage for stage, option in lowered.sending if option is not None}
        self._options = {
            k: option
            for k, option in options.items()
            if option and k not in sent and plan.menus[plan.stages[k].menu].options[option - 1].runs is not None
        }
        self._captures: dict[int, list[_Capture]] = {}
        self._programs: dict[tuple[int, int], CallProgram] = {}
        self._bound: dict[int, list[_Bound]] = {}
        self._refused: set[int] = set()

    def runs(self, position: int) -> bool:
        """Whether the plan runs a stage as a program."""
        return position in self._options

    def program(
        self, position: int, module: nn.Module, forward: Forward, args: Any, kwargs: Any
    ) -> BoundProgram | None:
        """The program for a call of a stage; None where it has none, which is said once.

        Args:
            position: of the stage in the plan.
            module, forward, args, kwargs: the call.
        """
        if position not in self._options or position in self._refused:
            return None
        why = ""
        bound = self._bound.setdefault(position, [])
        for each in bound:
            refusal = each.guard.refusal(args, kwargs)
            if not refusal:
                return each.program
            why = why or refusal
        if len(bound) < _MOST_CAPTURES:
            try:
                bound.append(self._bind(position, module, forward, args, kwargs))
                return bound[-1].program
            except CaptureError as error:
                why = why or str(error)
        if not bound or len(bound) == _MOST_CAPTURES:
            self._refused.add(position)
        stage = self._plan.stages[position]
        warn_once(stage.name, f"it does not run as the program that was planned: {why}; it is recomputed as a whole")
        return None

    def _bind(self, position: int, module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> _Bound:
        number = self._plan.stages[position].menu
        menu, captures = self._plan.menus[number], self._captures.setdefault(number, [])
        capture = next((each for each in captures if self._shares(each, module, args, kwargs, menu.unread)), None)
        guard = CallGuard(module, args, kwargs)
        if capture is None:
            capture = _Capture(capture_call(module, forward, args, kwargs), module, guard)
            assert menu.graph is not None
            if what := first_difference(menu.graph, step_graph_of(capture.call.graph)):
                raise CaptureError(f"expected the ops that were profiled, got others: {what}")
            captures.append(capture)
        key = id(capture.call), self._options[position]
        if key not in self._programs:
            assert menu.graph is not None
            runs = menu.options[self._options[position] - 1].runs
            assert runs is not None
            self._programs[key] = CallProgram(capture.call, StepOrder.of(menu.graph, runs))
        return _Bound(guard, self._programs[key].bound(module))

    def _shares(self, capture: _Capture, module: nn.Module, args: Any, kwargs: Any, unread: tuple[str, ...]) -> bool:
        """Whether a capture of another stage of this kind holds for a call of a module."""
        differing = differing_attributes(capture.module, module)
        return differing is not None and differing <= set(unread) and not capture.guard.other_arguments(args, kwargs)
