"""Other optimizers for a workload: measured on its own parameters, and the profile to expect with each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from planner.capacity.levers import Lever
from profiler.measurement.model_states import OptimizerCost, measure_optimizer
from profiler.records import Phase, Profile, StageRecord
from profiler.workload.optimizers import optimizer_names, stepped_parameters
from profiler.workload.workload import Workload, varied

MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SmallOptimizer:
    """An optimizer with small states; in place of one of ``classes`` it would be nothing new."""

    name: str
    make: MakeOptimizer
    classes: tuple[str, ...]
    change: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerVariant:
    """A lever, and what its optimizer was measured to cost; None where it does not apply."""

    lever: Lever
    cost: OptimizerCost | None = None


_SMALL_OPTIMIZERS = (
    _SmallOptimizer(
        name="Adafactor",
        make=lambda parameters: torch.optim.Adafactor(parameters),
        classes=("Adafactor", "SGD"),
        change="torch.optim.Adafactor(model.parameters(), lr=...)",
    ),
    _SmallOptimizer(
        name="SGD with momentum",
        make=lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        classes=("SGD",),
        change="torch.optim.SGD(model.parameters(), lr=..., momentum=0.9)",
    ),
)


def replacements_for(workload: Workload, state_bytes: int) -> list[OptimizerVariant]:
    """Adafactor and SGD with momentum in place of the workload's optimizer, each measured on its parameters.

    Args:
        workload: left as it was found.
        state_bytes: what its own optimizer keeps from step to step; another one has to keep less.
    """
    return [_tried(workload, other, state_bytes) for other in _SMALL_OPTIMIZERS]


def optimizer_named(name: str, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer that a lever stands for, with the settings that it was measured with."""
    return next(other for other in _SMALL_OPTIMIZERS if other.name == name).make(parameters)


def _tried(workload: Workload, other: _SmallOptimizer, state_bytes: int) -> OptimizerVariant:
    lever = Lever(kind="optimizer", name=other.name, change=other.change)
    why_not = _why_not(workload, other, state_bytes)
    if why_not:
        return OptimizerVariant(lever=replace(lever, applies=False, reason=why_not))
    try:
        optimizer = other.make(_parameters(workload))
        cost = measure_optimizer(varied(workload, optimizer=optimizer))
    except (RuntimeError, ValueError, TypeError) as error:  # torch says so of sparse and complex ones, say
        why_not = f"it does not run with these parameters: {str(error).splitlines()[0] if str(error) else error!r}"
        return OptimizerVariant(lever=replace(lever, applies=False, reason=why_not))
    if cost.state_bytes >= state_bytes:
        why_not = f"it keeps no less than the workload's own {optimizer_names(workload.optimizers)}"
        return OptimizerVariant(lever=replace(lever, applies=False, reason=why_not))
    return OptimizerVariant(lever=lever, cost=cost)


def _why_not(workload: Workload, other: _SmallOptimizer, state_bytes: int) -> str:
    if workload.own is not None:
        return "the step is a function of your own: make another optimizer there, and ask again"
    if not workload.optimizers:
        return "the workload has no optimizer"
    name = optimizer_names(workload.optimizers)
    if {type(each).__name__ for each in workload.optimizers} <= set(other.classes):
        return f"the workload has {name} already"
    if not state_bytes:
        return f"{name} keeps no states here"
    known = {id(p) for p in workload.model.parameters()}
    known |= {id(p) for p in workload.loss.parameters()} if isinstance(workload.loss, torch.nn.Module) else set()
    if any(id(p) not in known for p in _parameters(workload)):
        return f"{name} steps parameters of its own (master copies, say), which another one would not know"
    return ""


def _parameters(workload: Workload) -> list[torch.Tensor]:
    return stepped_parameters(workload.optimizers)


def with_optimizer(profile: Profile, cost: OptimizerCost) -> Profile:
    """The profile to expect with another optimizer: other bytes below forward and backward, another step."""
    shift_bytes = cost.state_bytes - profile.resident.optimizer
    start_bytes = profile.optimizer.start_bytes + shift_bytes
    optimizer = Phase(
        start_bytes=start_bytes,
        peak_bytes=start_bytes + cost.temporary_bytes,
        end_bytes=profile.optimizer.end_bytes + shift_bytes,
        seconds=cost.seconds,
    )
    stages = tuple(_shifted_stage(stage, shift_bytes) for stage in profile.stages)
    highest = max(phase.peak_bytes for stage in stages for phase in (stage.forward, stage.backward))
    return replace(
        profile,
        stages=stages,
        resident=replace(profile.resident, optimizer=cost.state_bytes),
        optimizer=optimizer,
        unplanned_peak_bytes=max(highest, optimizer.peak_bytes),
        unplanned_seconds=profile.unplanned_seconds - profile.optimizer.seconds + cost.seconds,
    )


def _shifted_stage(stage: StageRecord, shift_bytes: int) -> StageRecord:
    phases = {name: _shifted(getattr(stage, name), shift_bytes) for name in ("forward", "backward", "dropped")}
    return replace(stage, **phases)


def _shifted(phase: Phase, shift_bytes: int) -> Phase:
    if phase == Phase():  # Nothing was measured there.
        return phase
    return replace(
        phase,
        start_bytes=phase.start_bytes + shift_bytes,
        peak_bytes=phase.peak_bytes + shift_bytes,
        end_bytes=phase.end_bytes + shift_bytes,
    )
