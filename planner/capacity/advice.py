"""Advice: where the memory of a training step goes, what each lever would make of it, and the cheapest that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.capacity.lever_search import SearchOutcome, search_levers
from planner.capacity.levers import Combination, Lever, lever_options
from planner.capacity.workload_variants import BATCH_KEY, Target, WorkloadVariants
from planner.explain.memory_breakdown import MemoryBreakdown, memory_breakdowns
from planner.plans.estimating import estimate_note, on_named_device
from planner.plans.offload_request import Offload, OffloadMode, offload_from
from planner.units import check_size, format_bytes, parse_bytes
from profiler.measurement.measuring import Progress
from profiler.workload.optimizers import optimizer_names

_NAMED = 3  # combinations that a note names


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The ways to fit a budget.

    Attributes:
        model_class, device, precision, optimizer: of the workload as it is; ``none`` without an optimizer.
        samples: of one step: the effective batch that all combinations keep.
        budget_bytes: the most bytes alive at once in the whole step.
        states_bytes: of parameters, buffers, gradients and optimizer states together, whatever the batch.
        memory: the unplanned step's highest moment, and the other one of forward and backward and optimizer's step.
        levers: what can be changed, and what cannot and why.
        combinations: every one that was worked out: those that fit first, the fastest of them first.
        exact: the fastest that fits and leaves training as it is, up to rounding; None where none does.
        cheapest: the fastest that fits at all; None where nothing does.
        nearest: the one with the smallest peak: by its ``short_bytes`` the budget is missed where nothing fits.
        notes: what a person should know, one sentence each.
    """

    model_class: str
    device: str
    precision: str
    optimizer: str
    samples: int
    budget_bytes: int
    states_bytes: int
    memory: tuple[MemoryBreakdown, ...]
    levers: tuple[Lever, ...]
    combinations: tuple[Combination, ...]
    exact: Combination | None
    cheapest: Combination | None
    nearest: Combination
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether any combination is within the budget."""
        return self.cheapest is not None

    @property
    def unplanned(self) -> Combination:
        """The step as it is."""
        return next(each for each in self.combinations if not each.kinds)

    @property
    def states_short_bytes(self) -> int:
        """By how much the model states alone are above the budget; 0 where they are not."""
        return max(0, self.states_bytes - self.budget_bytes)

    def alone(self) -> tuple[Combination, ...]:
        """The step as it is, and with one lever each, in the order of ``combinations``."""
        return tuple(each for each in self.combinations if len(each.kinds) <= 1)

    def together(self) -> tuple[Combination, ...]:
        """The combinations of several levers, in the order of ``combinations``."""
        return tuple(each for each in self.combinations if len(each.kinds) > 1)


def advise(
    target: Target,
    budget: str | int,
    *,
    settings: Mapping[str, Any] | None = None,
    batch_key: str = BATCH_KEY,
    device: str | None = None,
    offload: Offload | OffloadMode = "auto",
    menus: bool = True,
    progress: Progress | None = None,
) -> Advice:
    """Show where a training step's memory goes and find the cheapest way to fit it into a budget.

    The levers: autocast, an optimizer with smaller states, micro-batches (gradient accumulation at the same effective
    batch), parts that run in pieces, recomputing activations, and sending them to host memory. The workload is
    profiled as it is, under autocast, in pieces, and with smaller batches as far as they are needed; other optimizers
    run a few steps on its parameters; plans are solved on those profiles. Everything else is computed from these. The
    workload is left as it was found.

    Args:
        target: as ``planner profile`` takes it, a function that returns a Workload, or a Workload.
        budget: bytes, ``"32GB"``, ``"512MiB"``, or ``"70%"`` of the unplanned peak: the most bytes alive at once.
        settings: arguments of the target's function.
        batch_key: the setting that gives the number of samples per step.
        device: move the model there first; not for a Workload. A card (``"h100"``) or a device file, as ``estimate``
            takes them: all is then estimated.
        offload: as for ``solve``: without a link in the profile or here nothing is sent.
        menus: capture stages as graphs, and plan their ops.
        progress: called as ``progress(what, done, total)`` before each part.

    Raises:
        ProfileError: the step fails as it is.
        ValueError: an invalid target, budget or setting.
    """
    check_size(budget)  # refused before anything is measured
    with on_named_device(device) as moved_to:
        variants = WorkloadVariants(target, settings or {}, batch_key, moved_to, menus, progress)
        profile = variants.profile("", 1)
        budget_bytes = parse_bytes(budget, whole_bytes=profile.unplanned_peak_bytes)
        outcome = search_levers(lever_options(variants, budget_bytes, offload_from(offload)))
        combinations, optimizers = outcome.combinations, variants.workload.optimizers
        return Advice(
            model_class=profile.model_class,
            device=profile.device,
            precision=profile.precision,
            optimizer=optimizer_names(optimizers),
            samples=variants.samples,
            budget_bytes=budget_bytes,
            states_bytes=profile.states_bytes,
            memory=memory_breakdowns(profile),
            levers=outcome.levers,
            combinations=combinations,
            exact=_fastest([each for each in combinations if each.keeps_result]),
            cheapest=_fastest(combinations),
            nearest=min(combinations, key=lambda each: (each.peak_bytes, len(each.kinds))),
            notes=(*estimate_note(profile), *_notes(outcome, profile.states_bytes, budget_bytes)),
        )


def _fastest(combinations: tuple[Combination, ...] | list[Combination]) -> Combination | None:
    """The first that fits: they are ranked."""
    return next((each for each in combinations if each.fits), None)


def _notes(outcome: SearchOutcome, needed_bytes: int, budget_bytes: int) -> tuple[str, ...]:
    """Notes of the search; first, where model states alone exceed the budget, what would fit."""
    if needed_bytes <= budget_bytes:
        return outcome.notes
    over_bytes = needed_bytes - budget_bytes
    over = f"the model states alone ({format_bytes(needed_bytes)}) are {format_bytes(over_bytes)} above the budget"
    fitting = [each for each in outcome.combinations if each.fits]
    if not fitting:
        return (f"{over}, and no lever brings the step down to it", *outcome.notes)
    others = len(fitting) - _NAMED
    more = f", or one of {others} more" if others > 0 else ""
    return (f"{over}: what fits is {', or '.join(each.title for each in fitting[:_NAMED])}{more}", *outcome.notes)
