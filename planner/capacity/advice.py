"""Advice: where the memory of a training step goes, what each lever would make of it, and the cheapest that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.capacity.levers import (
    RECIPES,
    Combination,
    CostBasis,
    Exactness,
    Lever,
    LeverOptions,
    Recipe,
    lever_options,
    micro_batch_lever,
    precision_levers,
    rank,
    recipe_levers,
    with_optimizer,
    worst,
)
from planner.capacity.workload_variants import BATCH_KEY, Target, WorkloadVariants
from planner.explain.memory_breakdown import MemoryBreakdown, memory_breakdowns
from planner.plans.estimating import estimate_note, on_named_device
from planner.plans.offload_request import Offload, OffloadMode, offload_from
from planner.plans.plan import Plan
from planner.plans.refusals import Infeasible
from planner.plans.solving import SEARCH_SECONDS, find_plan, least_budget_bytes, quick_plan
from planner.units import check_size, format_bytes, parse_bytes
from profiler.measurement.measuring import Progress
from profiler.records import Profile
from profiler.workload.optimizers import optimizer_names
from profiler.workload.steps import ProfileError

_NAMED = 3  # combinations that a note names
# Micro-batches of a batch that are looked at; more where nothing fits that leaves training as it is.
MICRO_BATCHES = 8
_NO_OFFLOAD = Offload(mode="never")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """The results of the search: levers, combinations (those that fit first), and what a person should know."""

    levers: tuple[Lever, ...]
    combinations: tuple[Combination, ...]
    notes: tuple[str, ...]


def search_levers(options: LeverOptions) -> SearchOutcome:
    """Work out combinations, profiling and solving only what can matter.

    The workload's own precision comes first: what fits there leaves less to be profiled. Of the other precisions
    only the first that applies is looked at with micro-batches.
    """
    costed, failure = _in_precision(options, "", [])
    notes = [failure] if failure else []
    precisions = precision_levers(options.variants)
    preferred = next((lever for lever in precisions if lever.applies), None)
    for number, lever in enumerate(precisions):
        if not lever.applies:
            continue
        before = len(costed)
        costed, failure = _in_precision(options, _dtype(lever), costed, split=lever is preferred)
        if failure and len(costed) == before:
            precisions[number] = replace(lever, applies=False, reason=failure)
        elif failure:
            notes.append(failure)
    costed = _confirmed(options, costed)
    combinations = sorted((each.combination for each in costed), key=rank)
    optimizers = (variant.lever for variant in options.optimizers)
    return SearchOutcome(
        levers=(*precisions, *optimizers, micro_batch_lever(options), *recipe_levers(options)),
        combinations=tuple(combinations),
        notes=(*notes, *_notes_of_search(options, combinations)),
    )


def _dtype(lever: Lever) -> str:
    return lever.name.removeprefix("autocast ")


def _in_precision(
    options: LeverOptions, precision: str, costed: Sequence[CostedCombination], *, split: bool = True
) -> tuple[list[CostedCombination], str]:
    """The combinations so far and all of a precision, and why the step could not be profiled in it, if so.

    With ``split`` also with more and more micro-batches, until these cannot matter.
    """
    costed = list(costed)
    for micro_batches in (1, *(options.variants.splits() if split else ())):
        if micro_batches > 1 and enough(options, _combinations(costed), precision, micro_batches):
            break
        try:
            profile = options.variants.profile(precision, micro_batches)
        except ProfileError as error:
            return costed, f"{precision or 'the step'} in {micro_batches} parts: {error}"
        for variant in _with_optimizers(options, precision, micro_batches, profile):
            costed += costed_recipes(options, variant, _combinations(costed))
    return costed, ""


def _combinations(costed: Sequence[CostedCombination]) -> list[Combination]:
    return [each.combination for each in costed]


def _with_optimizers(
    options: LeverOptions, precision: str, micro_batches: int, profile: Profile
) -> Iterator[StepVariant]:
    """The step with the workload's own optimizer, and with every other one."""
    own = StepVariant(precision=precision, micro_batches=micro_batches, optimizer="", profile=profile)
    yield own
    for other in options.optimizers:
        if other.cost is not None:
            yield replace(own, optimizer=other.lever.name, profile=with_optimizer(profile, other.cost))


def enough(options: LeverOptions, known: Sequence[Combination], precision: str, micro_batches: int) -> bool:
    """Whether so many micro-batches in a precision can no longer matter, by what is known."""
    unplanned = [each for each in known if each.precision == precision and each.recipe == "none"]
    whole = next(each for each in unplanned if each.micro_batches == 1 and not each.optimizer)
    if not precision and micro_batches == 2:
        return False  # What this lever does alone is always shown.
    if any(each.fits and not each.optimizer for each in unplanned):
        return True  # More are only slower.
    if least_states_bytes(options) > options.budget_bytes:
        return True
    if precision and too_slow(known, whole.seconds or 0.0, "other"):
        return True
    exact = any(each.fits and each.keeps_result for each in known)
    states_fit = options.profile.states_bytes <= options.budget_bytes
    hopeless = not states_fit and any(each.fits for each in known)
    return micro_batches > MICRO_BATCHES and (exact or hopeless)


def least_states_bytes(options: LeverOptions) -> int:
    """The smallest model states that any optimizer leaves."""
    own_bytes = options.profile.resident.optimizer
    others_bytes = [each.cost.state_bytes for each in options.optimizers if each.cost is not None]
    return options.profile.states_bytes - own_bytes + min([own_bytes, *others_bytes])


def _confirmed(options: LeverOptions, costed: list[CostedCombination]) -> list[CostedCombination]:
    """Where something fits, the best with better plans; else with what the smallest peaks cost.

    The best are the fastest that leaves training as it is, and the fastest of all. The smallest peaks are that of all
    combinations, and those of single levers.
    """
    if not any(each.combination.fits for each in costed):
        nearest = min(costed, key=lambda each: each.combination.peak_bytes)
        wanted = [each is nearest or len(each.combination.kinds) == 1 for each in costed]
        return [with_seconds(options, each) if want else each for each, want in zip(costed, wanted, strict=True)]
    fitting = sorted((each for each in costed if each.combination.fits), key=lambda each: rank(each.combination))
    exact = [each for each in fitting if each.combination.keeps_result]
    best = {id(each) for each in (*fitting[:1], *exact[:1])}
    return [with_better_plan(options, each) if id(each) in best else each for each in costed]


def _notes_of_search(options: LeverOptions, combinations: Sequence[Combination]) -> Iterator[str]:
    if ("", 1) in options.variants.extrapolated:
        yield "the device has no room for the step as it is: its numbers follow from profiles of smaller batches"
    if not any(each.micro_batches > 1 for each in combinations):
        return
    yield (
        "micro-batches: with each one's loss divided by their number the result is the same up to rounding, where "
        "the loss is a mean over equally many items"
    )
    if options.micro_batch_result == "other":
        yield "micro-batches: BatchNorm, or another module with buffers, sees parts of the batch, so results differ"
    elif any(stage.draws_random for stage in options.profile.stages):
        yield "micro-batches: dropout draws other masks than for the whole batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVariant:
    """A training step without a plan: the levers that change what is profiled, and the profile of one micro-batch.

    Attributes:
        precision, optimizer: as of a ``Combination``.
        micro_batches: parts of the batch before one optimizer's step.
        profile: of one of them.
    """

    precision: str
    micro_batches: int
    optimizer: str
    profile: Profile

    @property
    def seconds(self) -> float:
        """Seconds of an effective batch without a plan."""
        return self.batch_seconds(self.profile.unplanned_seconds)

    def batch_seconds(self, step_seconds: float) -> float:
        """Seconds of an effective batch: forward and backward of each micro-batch, and one optimizer's step."""
        optimizer_seconds = self.profile.optimizer.seconds
        return self.micro_batches * max(0.0, step_seconds - optimizer_seconds) + optimizer_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedCombination:
    """A combination with its predicted costs, and the variant that it was worked out from."""

    combination: Combination
    variant: StepVariant


def costed_recipes(
    options: LeverOptions, variant: StepVariant, known: Sequence[Combination]
) -> Iterator[CostedCombination]:
    """A variant without a plan and, where that does not fit, with those plans that may be the fastest.

    Args:
        options: what there is to choose from.
        variant: of the step.
        known: what was worked out before; a variant that is slower without a plan than what fits there has no plan.
    """
    unplanned = _without_plan(options, variant)
    yield unplanned
    unchanged = not (variant.precision or variant.optimizer) and variant.micro_batches == 1
    if unplanned.combination.fits:
        return
    if not unchanged and too_slow(known, variant.seconds, unplanned.combination.result):
        return
    if unchanged:
        yield from _in_pieces(options, variant)
    least_bytes = least_budget_bytes(variant.profile)
    if least_bytes > options.budget_bytes and options.can_recompute:
        yield _unsolved(options, variant, "recompute", least_bytes)
    if variant.profile.optimizer.peak_bytes > options.budget_bytes:
        return  # No plan changes the optimizer's step.
    for recipe in _recipes(options, unchanged):
        if recipe != "recompute" or least_bytes <= options.budget_bytes:
            yield _solved(options, variant, recipe)


def _in_pieces(options: LeverOptions, variant: StepVariant) -> Iterator[CostedCombination]:
    """The best of the step with its head, and with modules, in pieces; nothing where none of it can run so."""
    made = list[CostedCombination]()
    for profile in options.variants.in_pieces:
        kept = profile.unplanned_peak_bytes <= options.budget_bytes or not options.can_recompute
        recipe: Recipe = "in pieces" if kept else "in pieces and recompute"
        made.append(_solved(options, replace(variant, profile=profile), recipe))
    yield from sorted(made, key=lambda each: rank(each.combination))[:1]


def too_slow(known: Sequence[Combination], seconds: float, result: Exactness) -> bool:
    """Whether what takes at least so long cannot be the fastest of its kind."""
    rivals = [each.seconds for each in known if each.fits and (result == "other" or each.keeps_result)]
    return any(rival is not None and rival <= seconds for rival in rivals)


def _recipes(options: LeverOptions, unchanged: bool) -> list[Recipe]:
    if not options.can_recompute:
        return ["offload"] if unchanged and not options.no_offload else []
    if options.no_offload:
        return ["recompute"]
    return ["recompute", "offload", "recompute and offload"] if unchanged else ["recompute", "recompute and offload"]


def _without_plan(options: LeverOptions, variant: StepVariant) -> CostedCombination:
    key = (variant.precision, variant.micro_batches)
    computed = bool(variant.optimizer) or key in options.variants.extrapolated or variant.profile.frugal
    return _costed(
        options,
        variant,
        "none",
        peak_bytes=variant.profile.unplanned_peak_bytes,
        seconds=variant.seconds,
        peak_basis="computed" if computed else "measured",
        seconds_basis="computed" if computed or variant.micro_batches > 1 else "measured",
    )


def _solved(options: LeverOptions, variant: StepVariant, recipe: Recipe) -> CostedCombination:
    options.variants.report(f"solve: {recipe}")
    try:
        plan = quick_plan(variant.profile, options.budget_bytes, _offload_for(options, recipe))
    except Infeasible as refusal:
        return _unsolved(options, variant, recipe, refusal.minimum_budget_bytes)
    return _costed(
        options,
        variant,
        recipe,
        peak_bytes=plan.predicted_peak_bytes,
        seconds=variant.batch_seconds(plan.predicted_seconds),
        plan=plan,
    )


def _unsolved(options: LeverOptions, variant: StepVariant, recipe: Recipe, least_bytes: int) -> CostedCombination:
    """A combination that does not fit: the least known bytes, and no time."""
    return _costed(options, variant, recipe, peak_bytes=least_bytes, seconds=None)


def _costed(
    options: LeverOptions,
    variant: StepVariant,
    recipe: Recipe,
    *,
    peak_bytes: int,
    seconds: float | None,
    peak_basis: CostBasis = "solved",
    seconds_basis: CostBasis = "solved",
    plan: Plan | None = None,
) -> CostedCombination:
    results: list[Exactness] = ["other"] if variant.precision or variant.optimizer else []
    if variant.micro_batches > 1:
        results.append(options.micro_batch_result)
    if "in pieces" in RECIPES[recipe]:
        results.append("rounding")
    combination = Combination(
        precision=variant.precision,
        optimizer=variant.optimizer,
        micro_batches=variant.micro_batches,
        recipe=recipe,
        budget_bytes=options.budget_bytes,
        peak_bytes=peak_bytes,
        seconds=seconds,
        peak_basis=peak_basis,
        seconds_basis=seconds_basis,
        result=worst(results),
        plan=plan,
    )
    return CostedCombination(combination=combination, variant=variant)


def with_better_plan(options: LeverOptions, costed: CostedCombination) -> CostedCombination:
    """With the plan that all methods together find, where that is faster."""
    chosen = costed.combination
    if chosen.plan is None:
        return costed
    offload = _offload_for(options, chosen.recipe)
    profile = costed.variant.profile
    try:
        plan = find_plan(profile, options.budget_bytes, time_limit_seconds=SEARCH_SECONDS, offload=offload)
    except Infeasible:  # In so little time no program is searched for.
        return costed
    faster = costed.variant.batch_seconds(plan.predicted_seconds) < (chosen.seconds or 0.0)
    return _with_plan(costed, plan) if faster else costed


def with_seconds(options: LeverOptions, costed: CostedCombination) -> CostedCombination:
    """With the seconds that the smallest peak costs, where they were not worked out."""
    combination = costed.combination
    if combination.seconds is not None:
        return costed
    offload = _offload_for(options, combination.recipe)
    return _with_plan(costed, quick_plan(costed.variant.profile, combination.peak_bytes, offload))


def _with_plan(costed: CostedCombination, plan: Plan) -> CostedCombination:
    seconds = costed.variant.batch_seconds(plan.predicted_seconds)
    combination = replace(costed.combination, peak_bytes=plan.predicted_peak_bytes, seconds=seconds, plan=plan)
    return replace(costed, combination=combination)


def _offload_for(options: LeverOptions, recipe: Recipe) -> Offload:
    if "offload" not in RECIPES[recipe]:
        return _NO_OFFLOAD
    return replace(options.offload, mode="only" if recipe == "offload" else "auto")
