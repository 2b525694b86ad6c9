"""The search over combinations of levers: which variants are profiled, which are solved for, and which are left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.capacity.available_levers import LeverOptions, micro_batch_lever, precision_levers, recipe_levers
from planner.capacity.levers import Combination, Lever, rank
from planner.capacity.optimizer_variants import with_optimizer
from planner.capacity.variant_costs import (
    CostedCombination,
    StepVariant,
    costed_recipes,
    too_slow,
    with_better_plan,
    with_seconds,
)
from profiler.records import Profile
from profiler.state_bytes import states_bytes
from profiler.workload.steps import ProfileError

# Micro-batches of a batch that are looked at; more where nothing fits that leaves training as it is.
MICRO_BATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """What the search came to: levers, combinations (those that fit first), and what a person should know."""

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
        notes=(*notes, *_notes(options, combinations)),
    )


def _dtype(lever: Lever) -> str:
    return lever.name.removeprefix("autocast ")


def _in_precision(
    options: LeverOptions, precision: str, costed: Sequence[CostedCombination], *, split: bool = True
) -> tuple[list[CostedCombination], str]:
    """Those worked out so far and all of a precision, and why the step could not be profiled in it, if so.

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
    states_fit = states_bytes(options.profile) <= options.budget_bytes
    hopeless = not states_fit and any(each.fits for each in known)
    return micro_batches > MICRO_BATCHES and (exact or hopeless)


def least_states_bytes(options: LeverOptions) -> int:
    """The smallest model states that any optimizer leaves."""
    own_bytes = options.profile.resident.optimizer
    others_bytes = [each.cost.state_bytes for each in options.optimizers if each.cost is not None]
    return states_bytes(options.profile) - own_bytes + min([own_bytes, *others_bytes])


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


def _notes(options: LeverOptions, combinations: Sequence[Combination]) -> Iterator[str]:
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
