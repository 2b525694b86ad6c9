"""The programs that captured stages of an applied plan run as: made at a stage's first call, guarded at each."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, NamedTuple

from torch import nn

from planner.plans.call_programs import first_difference
from planner.plans.lowering import LoweredSchedule
from planner.plans.plan import Plan
from planner.runtime.plan_checks import PlanWarnings
from planner.runtime.stage_places import made_compiled
from profiler.records import MenuRecord
from profiler.step_graph import StepRuns
from profiler.trace.call_program import BoundProgram, CallProgram, Compiled
from profiler.trace.captured_call import CapturedCall, GradientLayouts
from profiler.trace.captures import CallGuard, captured, captures_of
from profiler.trace.joint_graph import CaptureError, step_graph_of
from profiler.trace.programs import StepOrder
from profiler.workload.compiled_forwards import CompiledForward, is_compiled, leave_uncompiled
from profiler.workload.forward_patches import Forward, users_forward
from profiler.workload.tensor_parts import sizes_of
from profiler.workload.tensor_trees import tensors_in

leave_uncompiled(__name__)

_COMPILED = (
    "apply: the model is compiled, and the plan comes from the profile of the uncompiled one; gradients are the same, "
    "the peak is not promised. Compile before planner.profile"
)
_OTHER_LAYOUT = "gradients of what it returns lie otherwise than when profiled, and may be off in their last bits"
_MOST_FAILURES = 3  # to capture a stage: one may be called once with all of it frozen
_MOST_CAPTURES = 4  # of one stage: what changes more often than that would be captured over and over


class _Bound(NamedTuple):
    """A stage's program, and what it takes for granted."""

    guard: CallGuard
    program: BoundProgram


class StagePrograms:
    """Finds the program of each call of a stage that the plan runs as one.

    A stage that runs as compiled code stays compiled: it is recomputed as a whole instead, keeps less, and takes longer
    in backward.

    Args:
        plan: the applied plan.
        lowered: what its schedule does at each stage.
        model: the model with the plan.
        warn: gives the warnings of the plan.
        compiled: as for ``CallProgram``.
    """

    def __init__(
        self,
        plan: Plan,
        lowered: LoweredSchedule,
        model: nn.Module,
        warn: PlanWarnings,
        compiled: Compiled | None = None,
    ) -> None:
        self._plan, self._warn, self._compiled = plan, warn, compiled
        self._selective = frozenset(lowered.selective)
        self._model = weakref.ref(model)
        options = dict(lowered.selective)
        for reruns in lowered.reruns.values():
            options |= {rerun.stage: rerun.option for rerun in reruns if rerun.mode == "keep"}
        self._options = {k: option for k, option in options.items() if option}
        self._programs: dict[tuple[int, StepRuns], CallProgram] = {}  # stages of several menus may share a call
        self._bound: dict[tuple[int, nn.Module], list[_Bound]] = {}  # another module may take a stage's place
        self._refused: set[int] = set()
        self._looked_at: set[int] = set()  # whether they are compiled
        self._failures: Counter[int] = Counter()

    @property
    def has_programs(self) -> bool:
        """Whether the plan runs any stage as a program."""
        return bool(self._options)

    def runs(self, position: int) -> bool:
        """Whether the plan runs a stage as a program."""
        return position in self._options

    def check_model(self, forward: Forward) -> None:
        """The model is about to be run with ``forward``."""
        if isinstance(forward, CompiledForward) and not made_compiled(self._plan):
            self._warn.say(_COMPILED)

    def program(
        self, position: int, module: nn.Module, forward: Forward, args: Any, kwargs: Any
    ) -> BoundProgram | None:
        """The program for a call of a stage; None where it has none, which is said once.

        Args:
            position: place of the stage in the plan.
            module, forward, args, kwargs: the call.
        """
        if position not in self._looked_at or isinstance(forward, CompiledForward):
            self._check_compiled(position, module, forward)
        if position not in self._options or position in self._refused:
            return None
        why = ""
        bound = self._bound.setdefault((position, module), [])
        for place, each in enumerate(bound):
            refusal = each.guard.refusal(args, kwargs) or (_OTHER_LAYOUT if each.program.lay_otherwise else "")
            if not refusal:
                bound.insert(0, bound.pop(place))  # The next call is asked about it first.
                return each.program
            why = why or refusal
        if len(bound) < _MOST_CAPTURES:
            try:
                bound.append(self._bind(position, module, forward, args, kwargs))
                return bound[-1].program
            except Exception as error:  # noqa: BLE001 - the stage's own code runs here, and torch's tracing.
                why = why or (str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}")
                self._failures[position] += 1
                if self._failures[position] == _MOST_FAILURES:
                    self._refused.add(position)
        stage = self._plan.stages[position]
        self._warn.of_stage(
            stage.name, f"it does not run as the program that was planned: {why}; it is recomputed as a whole"
        )
        return None

    def _check_compiled(self, position: int, module: nn.Module, forward: Forward) -> None:
        """From now on a stage that runs as compiled code runs as no program."""
        self._looked_at.add(position)
        if not (isinstance(forward, CompiledForward) or is_compiled(module)):
            return
        self._refused.add(position)
        if not made_compiled(self._plan):
            self._warn.say(_COMPILED)
        if position in self._selective:
            stage = self._plan.stages[position]
            self._warn.of_stage(
                stage.name,
                f"{stage.option} cannot be recomputed inside compiled code; it stays compiled and is recomputed as a "
                "whole. Profile the compiled model for a plan without such choices",
            )

    def _bind(self, position: int, module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> _Bound:
        menu = self._plan.menus[self._plan.stages[position].menu]
        option = menu.options[self._options[position] - 1]
        assert menu.graph is not None
        stage = self._plan.stages[position]
        same_sizes = [*map(sizes_of, tensors_in((args, kwargs)))] == list(stage.record.input_shapes)
        gradients = GradientLayouts(stage.record.gradient_strides, same_sizes)
        call = self._call(menu, gradients, module, forward, args, kwargs)
        key = id(call), option.runs
        if key not in self._programs:
            self._programs[key] = CallProgram(call, StepOrder.of(menu.graph, option.runs), self._compiled)
        return _Bound(CallGuard(module, args, kwargs), self._programs[key].bound(module))

    def _call(
        self, menu: MenuRecord, gradients: GradientLayouts, module: nn.Module, forward: Forward, args: Any, kwargs: Any
    ) -> CapturedCall:
        """A captured call that holds for this one: known already, of the module or of one like it, or traced now."""
        model = self._model()
        assert model is not None and menu.graph is not None
        for known in captures_of(model):
            if known.gradients != gradients or known.function is not users_forward(forward):
                continue
            if known.module is module:
                holds = not known.guard.refusal(args, kwargs)
            else:
                holds = known.guard.holds_for_another(module, menu.unread, args, kwargs)
            if holds and not first_difference(menu.graph, step_graph_of(known.call.graph), sizes_differ=True):
                return known.call
        call = captured(model, module, forward, args, kwargs, gradients).call
        if what := first_difference(menu.graph, step_graph_of(call.graph), sizes_differ=True):
            raise CaptureError(f"its ops differ from the profiled ones: {what}")
        return call
