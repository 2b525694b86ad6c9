"""Levers: what can be changed to fit a memory budget, which of it a workload allows, and combinations of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from planner.capacity.workload_variants import WorkloadVariants
from planner.plans.offload_request import Offload
from planner.plans.plan import Plan
from planner.plans.solving import why_no_offload
from profiler.measurement.step_measurement import OptimizerCost, measure_optimizer
from profiler.records import Phase, Profile, StageRecord
from profiler.workload.optimizers import optimizer_names, stepped_parameters
from profiler.workload.workload import Workload, varied

LeverKind = Literal["precision", "optimizer", "micro-batches", "in pieces", "recompute", "offload"]
Exactness = Literal["same", "rounding", "other"]
CostBasis = Literal["measured", "computed", "solved"]
Recipe = Literal["none", "recompute", "offload", "recompute and offload", "in pieces", "in pieces and recompute"]
RESULTS: tuple[Exactness, ...] = ("same", "rounding", "other")
RECIPES: dict[Recipe, tuple[LeverKind, ...]] = {
    "none": (),
    "recompute": ("recompute",),
    "offload": ("offload",),
    "recompute and offload": ("recompute", "offload"),
    "in pieces": ("in pieces",),
    "in pieces and recompute": ("in pieces", "recompute"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One thing that can be changed.

    Attributes:
        kind: what it changes.
        name: in the words of the tables, as ``autocast bfloat16``.
        applies: whether this workload can be changed so.
        reason: why not; empty where it can.
        result: what becomes of losses and gradients: the ``same`` bit for bit where kernels are deterministic, the
            same up to ``rounding``, or ``other`` ones.
        change: what to write to make it.
    """

    kind: LeverKind
    name: str
    applies: bool = True
    reason: str = ""
    result: Exactness = "other"
    change: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Some levers together, and what a training step is predicted to take with them.

    Attributes:
        precision: what autocast casts to in place of the workload's own precision; empty for that.
        optimizer: name of another optimizer; empty for the workload's own.
        micro_batches: parts of the batch that run one after the other before the optimizer's step.
        recipe: what happens to activations.
        budget_bytes: what it has to fit.
        peak_bytes: of the whole step. Where nothing fits, the least that recomputing and offloading can reach.
        seconds: of an effective batch, all its micro-batches and the optimizer's step; None where it does not fit and
            was not worked out.
        peak_basis, seconds_basis: ``measured`` in a profile of this very step; ``computed`` from measured parts, or
            extrapolated from smaller batches; ``solved``: predicted by a plan from a profile of this step.
        result: the worst of its levers'.
        plan: for one micro-batch; None without one.
    """

    precision: str = ""
    optimizer: str = ""
    micro_batches: int = 1
    recipe: Recipe = "none"
    budget_bytes: int
    peak_bytes: int
    seconds: float | None
    peak_basis: CostBasis
    seconds_basis: CostBasis
    result: Exactness
    plan: Plan | None = None

    @property
    def fits(self) -> bool:
        """Whether its peak is within the budget."""
        return self.peak_bytes <= self.budget_bytes

    @property
    def as_built(self) -> bool:
        """Whether its plan is for the step as its target builds it."""
        return not (self.precision or self.optimizer) and self.micro_batches == 1

    @property
    def short_bytes(self) -> int:
        """By how much it misses the budget; 0 where it fits."""
        return max(0, self.peak_bytes - self.budget_bytes)

    @property
    def kinds(self) -> tuple[LeverKind, ...]:
        """The kinds of its levers."""
        changed: dict[LeverKind, bool] = {
            "precision": bool(self.precision),
            "optimizer": bool(self.optimizer),
            "micro-batches": self.micro_batches > 1,
        }
        return (*(kind for kind, is_changed in changed.items() if is_changed), *RECIPES[self.recipe])

    @property
    def names(self) -> tuple[str, ...]:
        """Its levers in words."""
        words = [f"autocast {self.precision}"] if self.precision else []
        words += [self.optimizer] if self.optimizer else []
        words += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        return (*words, *RECIPES[self.recipe])

    @property
    def title(self) -> str:
        """All of them in one line."""
        return " + ".join(self.names) or "nothing changed"

    @property
    def keeps_result(self) -> bool:
        """Whether training goes as before, up to rounding."""
        return self.result != "other"


def worst(results: list[Exactness]) -> Exactness:
    """The exactness of the result under several levers.

    >>> worst(["same", "rounding"]), worst([])
    ('rounding', 'same')
    """
    return RESULTS[max((RESULTS.index(result) for result in results), default=0)]


def rank(combination: Combination) -> tuple[bool, float, int, int]:
    """Sort key: what fits first, the fastest of it first; of the rest what misses by the least."""
    seconds = combination.seconds if combination.fits and combination.seconds is not None else 0.0
    return not combination.fits, seconds, combination.short_bytes, len(combination.kinds)


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
    if workload.custom_step is not None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverOptions:
    """The choices of a search over levers.

    Attributes:
        variants: of the workload.
        budget_bytes: the most bytes alive at once.
        offload: what may be sent to host memory.
        profile: of the workload as it is.
        no_offload: why nothing can be sent; empty where something can.
        optimizers: the other optimizers, measured.
        micro_batch_result: what becomes of the result with micro-batches.
    """

    variants: WorkloadVariants
    budget_bytes: int
    offload: Offload
    profile: Profile
    no_offload: str
    optimizers: tuple[OptimizerVariant, ...]
    micro_batch_result: Exactness

    @property
    def can_recompute(self) -> bool:
        """Whether any stage, or ops inside one, can run again."""
        profile = self.profile
        return any(s.recomputable for s in profile.stages) or any(menu.options for menu in profile.menus)


def lever_options(variants: WorkloadVariants, budget_bytes: int, offload: Offload) -> LeverOptions:
    """Profile the workload as it is, and measure other optimizers on its parameters."""
    profile = variants.profile("", 1)
    no_offload = why_no_offload(offload, profile)
    variants.report("other optimizers")
    return LeverOptions(
        variants=variants,
        budget_bytes=budget_bytes,
        offload=offload,
        profile=profile,
        no_offload=no_offload,
        optimizers=tuple(replacements_for(variants.runnable(), profile.resident.optimizer)),
        micro_batch_result=result_of_micro_batches(variants.workload.model, profile),
    )


def precision_levers(variants: WorkloadVariants) -> list[Lever]:
    """bfloat16, and on CUDA float16: the first one that the device computes in comes first."""
    why_not = variants.why_no_precision()
    names = ["bfloat16"]
    if variants.workload.device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        names = ["bfloat16", "float16"] if fast else ["float16", "bfloat16"]
    scalers = {"float16": ", scaler=torch.amp.GradScaler()"}
    return [
        Lever(
            kind="precision",
            name=f"autocast {name}",
            applies=not why_not,
            reason=why_not,
            result="other",
            change=f'Workload(..., autocast="{name}"{scalers.get(name, "")})',
        )
        for name in names
    ]


def micro_batch_lever(options: LeverOptions) -> Lever:
    """Parts of the batch one after the other before one optimizer's step."""
    why_not = options.variants.no_micro_batches
    return Lever(
        kind="micro-batches",
        name="micro-batches",
        applies=not why_not,
        reason=why_not,
        result=options.micro_batch_result,
        change="Workload(..., accumulate=True) on a part of the batch, its loss divided by their number, and the "
        "optimizer's step after the last one",
    )


def recipe_levers(options: LeverOptions) -> tuple[Lever, ...]:
    """Running parts in pieces, recomputing activations, and sending them to host memory."""
    recompute = Lever(
        kind="recompute",
        name="recompute",
        applies=options.can_recompute,
        reason="" if options.can_recompute else "no stage can run again",
        result="same",
        change="planner.solve(profile, budget, offload='never'), planner.apply(model, plan)",
    )
    offload = Lever(
        kind="offload",
        name="offload",
        applies=not options.no_offload,
        reason=options.no_offload,
        result="same",
        change="planner.solve(profile, budget), planner.apply(model, plan)",
    )
    return pieces_lever(options), recompute, offload


def pieces_lever(options: LeverOptions) -> Lever:
    """The head and its loss, and modules, a few rows at a time."""
    fits = options.profile.unplanned_peak_bytes <= options.budget_bytes
    applies = bool(options.profile.heads) if fits else bool(options.variants.in_pieces)
    return Lever(
        kind="in pieces",
        name="in pieces",
        applies=applies,
        reason="" if applies else "no large part of the model takes its rows one by one",
        result="rounding",
        change="planner.profile(workload, numerics='rounding'), planner.solve(profile, budget, numerics='rounding')",
    )


def result_of_micro_batches(model: nn.Module, profile: Profile) -> Exactness:
    """Gradients are sums over samples unless a module looks at the whole batch, or changes its buffers by it."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    # Without running statistics it takes the batch's own in evaluation, too.
    batch_wise = any(norm.training or norm.running_mean is None for norm in norms)
    return "other" if batch_wise or any(stage.mutated_buffers for stage in profile.stages) else "rounding"
