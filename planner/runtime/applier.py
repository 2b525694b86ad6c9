"""Installs a plan on the real model, and takes it off again."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from planner.plans.lowering import LoweredSchedule, lower_schedule
from planner.plans.plan import Plan, PlannedStage
from planner.runtime.compiled_models import CompiledCalls, made_compiled, module_named
from planner.runtime.copy_engine import CopyEngine
from planner.runtime.cuda_link import CudaCopyEngine
from planner.runtime.kept_runs import Deviations
from planner.runtime.plan_checks import transformed
from planner.runtime.planned_step import PlannedStep
from planner.runtime.simulated_link import SimulatedCopyEngine
from planner.runtime.stage_input import BatchCopies
from profiler.recomputation.selection import Selection
from profiler.workload.compiled_forwards import COMPILED, plain_name, unwrapped
from profiler.workload.forward_patches import Forward, ForwardPatches, is_patched
from profiler.workload.precision import autocast_now, autocast_part, precision_of, types_part
from solvers.problem.chain_schedule import RUNS

_PLANNED: weakref.WeakKeyDictionary[nn.Module, Handle] = weakref.WeakKeyDictionary()


class PlanMismatch(ValueError):
    """The model is not the one that the plan was made for; the message says what differs."""


class Handle:
    """An applied plan; ``remove()`` or leaving the ``with`` block puts the model back."""

    def __init__(self, model: nn.Module, plan: Plan, patches: ForwardPatches) -> None:
        self.plan = plan
        self._model = weakref.ref(model)
        self._patches = patches

    def remove(self) -> None:
        """Take the plan off; calling it again does nothing."""
        self._patches.remove()
        model = self._model()
        if model is not None and _PLANNED.get(model) is self:
            del _PLANNED[model]

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def apply(model: nn.Module, plan: Plan) -> Handle:
    """Install ``plan`` on ``model``, in place and reversibly.

    Only the ``forward`` of the model and of recomputed stages is wrapped: the
    module tree, names, state_dict and hooks stay as they are. The plan acts in
    training mode with gradients enabled; under ``no_grad`` and in eval mode the
    model runs as without it.

    Args:
        model: the model that was profiled, or one with the same stages.
        plan: from ``planner.solve`` or ``Plan.load``.

    Returns:
        A handle with ``remove()``; also a context manager.

    Raises:
        PlanMismatch: stage names, parameter shapes or the parameters' types differ. So says the model's forward
            where it runs under another autocast than the profiled step.
        UnsupportedPlan: the plan's schedule cannot be carried out.
        ValueError: another plan is applied already.
    """
    model = unwrapped(model)
    check_unplanned(model)
    _check_model(model, plan)
    _check_types(model, plan)
    lowered = lower_schedule(plan.stages, plan.schedule)
    patches = ForwardPatches()
    if lowered.dropped or lowered.selective or lowered.transfers or made_compiled(plan):
        planned = PlannedCalls(plan, lowered, model)
        install(model, planned, [plan.stages[position].name for position in planned.wrapped], patches)
    handle = Handle(model, plan, patches)
    register(model, handle)
    return handle


def check_unplanned(model: nn.Module) -> None:
    """Refuse a model that has a plan, or forwards that are patched otherwise; raises ValueError."""
    if model in _PLANNED or is_patched(model):
        raise ValueError(
            "apply: expected a model without a plan, got one that has one; call its handle's remove() first"
        )


def register(model: nn.Module, handle: Handle) -> None:
    """From now on ``handle_of(model)`` is this one."""
    _PLANNED[model] = handle


def handle_of(model: nn.Module) -> Handle | None:
    """The handle of the plan that is applied to ``model``; None where there is none."""
    return _PLANNED.get(unwrapped(model))


class Wrappers(Protocol):
    """What runs in place of the model's own forward and of its stages'."""

    def whole(self, forward: Forward) -> Forward:
        """Instead of the model's forward."""
        ...

    def stage(self, forward: Forward, name: str, module: nn.Module) -> Forward:
        """Instead of a stage's, whose module has this name."""
        ...


def install(model: nn.Module, planned: Wrappers, stages: Iterable[str], patches: ForwardPatches) -> None:
    """Wrap the forward of the model, and of the modules that these stages are calls of."""
    patches.wrap(model, planned.whole)
    for name in dict.fromkeys(split_name(stage)[0] for stage in stages):
        module = module_named(model, name)
        what = f"planner.apply: stage {name!r} is run by its plan, not inside one graph; leave out fullgraph=True"
        patches.wrap(module, lambda forward, n=name, m=module: planned.stage(forward, n, m), what)


class PlannedCalls:
    """The wrappers of one applied plan, and the forward that is under way."""

    def __init__(self, plan: Plan, lowered: LoweredSchedule, model: nn.Module) -> None:
        self._device = model_device(model)
        self._engine = engine_for(plan, lowered, self._device)
        cast = autocast_part(plan.precision)
        self._autocast = getattr(torch, cast) if cast else None
        stages = {k for k, stage in enumerate(plan.stages) if stage.kind == "stage"}
        # Where something is sent, the end of every stage and the begin of its backward are moments to know.
        planned = stages if lowered.transfers else {*lowered.dropped, *lowered.selective}
        # In a compiled model all stages were compiled one by one while they were measured.
        self.wrapped = sorted(stages if made_compiled(plan) else planned)
        self._compiled = CompiledCalls(plan, lowered.selective)
        self._plan = plan
        self._selections = selections_of(plan)
        self._deviations = Deviations()
        self._lowered = lowered
        self._model = weakref.ref(model)
        self._positions = {split_name(plan.stages[k].name): k for k in planned}
        self._step: PlannedStep | None = None
        self._counts: dict[str, int] = {}
        self._inside = False

    def whole(self, forward: Forward) -> Forward:
        """The model's own forward: begins and ends a planned step."""

        def run(*args: Any, **kwargs: Any) -> Any:
            model = self._model()
            if self._step is not None or model is None or not self._acts(model):
                return forward(*args, **kwargs)
            if autocast_now(self._device) != self._autocast:
                check_precision(model, self._plan, autocast_now(self._device))
            self._compiled.in_model(forward)
            if (device := model_device(model)) != self._device:
                self._device = device
                self._engine = engine_for(self._plan, self._lowered, device)
            runs = self._plan, self._lowered, self._selections, self._deviations
            self._step = PlannedStep(*runs, BatchCopies((args, kwargs)), self._engine)
            self._counts.clear()
            try:
                output = forward(*args, **kwargs)
                self._step.leave(output)
                return output
            finally:
                self._step.finish()
                self._step = None

        return run

    def _acts(self, model: nn.Module) -> bool:
        """Whether a forward that begins now is one of training, which the plan is for."""
        return model.training and torch.is_grad_enabled() and not transformed()

    def stage(self, forward: Forward, name: str, module: nn.Module) -> Forward:
        """A stage's forward: keeps what the plan says while a planned step is under way."""

        def run(*args: Any, **kwargs: Any) -> Any:
            step = self._step
            if step is None or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            position = self._positions.get((name, count))
            if position is None or self._inside:
                return forward(*args, **kwargs)
            self._inside = True
            planned = self._compiled.in_stage(position, module, forward, self._deviations.diverged_stages)
            try:
                return step.run(position, module, planned, args, kwargs)
            finally:
                self._inside = False

        return run


def split_name(stage: str) -> tuple[str, int]:
    """A stage's module name and call number: ``"block#2"`` is the third call of ``block``."""
    name, _, number = stage.partition("#")
    return name, int(number) if number else 0


def _check_model(model: nn.Module, plan: Plan) -> None:
    differences = [text for stage in plan.stages if stage.kind == "stage" if (text := _difference(model, stage))]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise PlanMismatch(
            f"apply: expected the {plan.model_class} that was profiled, got a {type(model).__name__} that differs: "
            f"{'; '.join(differences[:3])}{more}; profile and solve for this model"
        )


def _check_types(model: nn.Module, plan: Plan) -> None:
    """The part of the precision that shows before the model runs."""
    expected, got = types_part(plan.precision), precision_of(model, None)
    if got != expected:
        raise PlanMismatch(
            f"a plan for {plan.precision}: expected parameters in {expected}, got {got}; "
            "use them as they were profiled, or profile and solve for these"
        )


def check_precision(model: nn.Module, plan: Plan, autocast: torch.dtype | None) -> None:
    """Refuse a step in another precision than the plan's: bytes, casts and kernels are others then.

    Raises:
        PlanMismatch: the parameters' types, or what autocast casts to.
    """
    expected, got = plan.precision.removesuffix(COMPILED), precision_of(model, autocast)
    if got != expected:
        raise PlanMismatch(
            f"a plan for {expected}: expected a step in the same precision, got {got}; "
            "run it as it was profiled, or profile and solve in this precision"
        )


def _difference(model: nn.Module, stage: PlannedStage) -> str:
    """The first thing in which a stage's module differs from the profiled one; empty where there is none."""
    name, _ = split_name(stage.name)
    try:
        module = module_named(model, name)
    except AttributeError:
        return f"it has no module {name!r}"
    if type(module).__name__ != stage.module_class:
        return f"{name!r} is a {type(module).__name__}, expected {stage.module_class}"
    shapes = {plain_name(key): tuple(p.shape) for key, p in module.named_parameters()}
    expected = dict(stage.parameter_shapes)
    for key in sorted({*shapes, *expected}):
        if shapes.get(key) != expected.get(key):
            return f"{name}.{key} has shape {shapes.get(key)}, expected {expected.get(key)}"
    return ""


def model_device(model: nn.Module) -> torch.device:
    """The device that a model computes on."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def engine_for(plan: Plan, lowered: LoweredSchedule, device: torch.device) -> CopyEngine | None:
    """The engine with its host memory, allocated here once; None where nothing is sent.

    On a device on which nothing can be sent, it warns.
    """
    if not lowered.transfers:
        return None
    if device.type == "cuda":
        return CudaCopyEngine(device, plan.host_bytes)
    if device.type == "cpu" and plan.link is not None:
        return SimulatedCopyEngine(plan.link, plan.host_bytes)
    warnings.warn(
        f"apply: expected a device that copies beside its computation, got {device}; nothing is sent to host memory, "
        "and the peak is not promised. Solve without offloading",
        RuntimeWarning,
        stacklevel=4,
    )
    return None


def selections_of(plan: Plan) -> dict[tuple[int, int], Selection]:
    """Which ops of each stage run again, by stage and option, for all options that the schedule uses."""
    sending = {action.stage for action in plan.schedule.actions if action.kind == "offload"}

    @functools.cache  # stages of one kind share theirs
    def selection(menu: int, option: int, all_saves: bool) -> Selection:
        return Selection.of(plan.menus[menu].ops, plan.menus[menu].options[option - 1].rerun, all_saves=all_saves)

    return {
        (action.stage, action.option): selection(plan.stages[action.stage].menu, action.option, action.stage in sending)
        for action in plan.schedule.actions
        if action.kind in RUNS and action.option
    }
