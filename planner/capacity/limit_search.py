"""The largest size in each training mode: predicted from profiles of a few sizes, then confirmed by real steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from planner.capacity.batch_limits import Limit, MaxBatch, TrainingMode
from planner.capacity.scaling import NoProfile, PerSizeProfiles, ProfileScaling, whole_at
from planner.capacity.step_trial import (
    Build,
    Notify,
    Trial,
    has_room,
    measured_states_bytes,
    release,
    room_bytes,
    run_trial,
)
from planner.plans.cost_model import chain_of
from planner.plans.offload_request import Offload
from planner.plans.plan import Plan
from planner.plans.refusals import Infeasible
from planner.plans.solving import SEARCH_SECONDS, find_plan, quick_plan, why_no_offload
from planner.targets import NoTarget
from planner.units import format_bytes
from profiler.agreement import made_by_rank0
from profiler.measurement.device_memory import ran_out
from profiler.records import Profile
from solvers.chain.baselines import keep_all_replay
from solvers.chain.persistent import shortage

MOST_STEPS = 2**30  # whatever still fits then does not grow


def largest_fitting(fits: Callable[[int], bool], *, floor: int, step: int) -> int:
    """The largest multiple of ``step`` above ``floor`` that fits, where all smaller ones do; ``floor`` if none does.

    Doubles the distance until something does not fit, then halves it. ``MOST_STEPS`` above the floor are the end.

    >>> largest_fitting(lambda size: size <= 77, floor=0, step=4)
    76
    """
    low, stride = floor, step
    while stride < MOST_STEPS * step and fits(low + stride):
        low, stride = low + stride, 2 * stride
    high = low + stride
    while high - low > step:
        middle = _between(low, high, step)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _between(low: int, high: int, step: int) -> int:
    return low + max(1, (high - low) // step // 2) * step


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectionResult:
    """The result of trying sizes.

    Attributes:
        size: the largest that is known to fit.
        tried: it was tried itself, and fitted.
        next_fails: the next one was tried, and did not; False where it was not tried.
    """

    size: int
    tried: bool
    next_fails: bool


def bisect_size(
    guess: int, attempt: Callable[[int], bool | None], *, floor: int, step: int, tries: int
) -> BisectionResult:
    """Try ``guess``, the size behind it, and where that says otherwise the sizes around, until the limit is found.

    Args:
        guess: the predicted limit, ``floor`` or more.
        attempt: True where a size fits, False where it does not, None where it cannot be tried.
        floor: known to fit.
        step: sizes lie so far apart.
        tries: the most sizes to try.

    >>> bisect_size(5, lambda size: size <= 7, floor=0, step=1, tries=9)
    BisectionResult(size=7, tried=True, next_fails=True)
    """
    low, high, stride = floor, None, step
    size = guess if guess > floor else floor + step
    for _ in range(tries):
        outcome = attempt(size)
        if outcome is None:
            return BisectionResult(size=max(low, guess if high is None else low), tried=low > floor, next_fails=False)
        low, high = (size, high) if outcome else (low, size)
        if high is not None and high - low <= step:
            break
        if high is None:
            size, stride = low + stride, 2 * stride
        elif size == guess and not outcome:
            size = max(floor + step, high - step)
        else:
            size = _between(low, high, step)
    return BisectionResult(size=low, tried=low > floor, next_fails=high is not None and high - low <= step)


class PredictedLimits:
    """Predicts for every size from the profiles at a few.

    Attributes:
        margin_bytes: by how much a measured peak was above the predicted one, in each mode: plans leave so much free
            from then on.

    Args:
        profiles: at a few sizes with what follows for others, or a profile at every size.
        budget_bytes: the most bytes alive at once.
        offload: what may be sent to host memory.
    """

    def __init__(self, profiles: ProfileScaling | PerSizeProfiles, budget_bytes: int, offload: Offload) -> None:
        self.profiles = profiles
        self.budget_bytes = budget_bytes
        self.margin_bytes: defaultdict[TrainingMode, int] = defaultdict(int)
        self._offload = offload
        self._profile_at: dict[int, Profile] = {}
        self._plans: dict[tuple[TrainingMode, int, int], Plan] = {}

    def profile_at(self, size: int) -> Profile:
        """The profile to expect."""
        if size not in self._profile_at:
            self._profile_at[size] = self.profiles.at(size)
        return self._profile_at[size]

    def samples_at(self, size: int) -> int:
        """Samples of one step: the first dimension of the batch's first tensor, as far as it has one."""
        shapes = self.profile_at(size).input_shapes
        return next((shape[0] for shape in shapes if shape), size)

    def weight_at(self, size: int) -> int:
        """The weight of one sample: 1, and its size where the key makes samples larger instead of more."""
        sizes = self.profiles.sizes
        return size if self.samples_at(sizes[0]) == self.samples_at(sizes[-1]) else 1

    def why_no_offload(self) -> str:
        """Why nothing can be sent to host memory; empty where it can."""
        return why_no_offload(self._offload, self.profiles.profiles[-1])

    def largest(self, mode: TrainingMode, *, floor: int, step: int, vary: str) -> int:
        """The largest size that is predicted to fit; ``floor`` where no larger one does.

        Raises:
            ValueError: everything fits, so memory does not grow with the size.
        """
        size = largest_fitting(lambda size: self._fits(mode, size), floor=floor, step=step)
        if size >= MOST_STEPS * step:
            raise ValueError(
                f"--vary: expected a setting that memory grows with, got {vary!r}, of which any value is predicted to "
                f"fit {format_bytes(self.budget_bytes)}; vary another one"
            )
        return size

    def _fits(self, mode: TrainingMode, size: int) -> bool:
        try:
            chain = chain_of(self.profile_at(size))
        except NoProfile:
            return False  # without a profile there is no plan
        if mode == "none":
            return keep_all_replay(chain).peak_bytes <= self.budget_bytes
        if mode == "recompute":
            return shortage(chain).minimum_budget_bytes <= self.budget_bytes
        return self.quick_plan(mode, size) is not None

    def quick_plan(self, mode: TrainingMode, size: int) -> Plan | None:
        """A plan by the method that weighs most in little time; None where none fits."""
        try:
            profile = self.profile_at(size)
            return made_by_rank0(lambda: quick_plan(profile, self.budget_bytes, self._offload_in(mode)))
        except (Infeasible, NoProfile):
            return None

    def plan_at(self, mode: TrainingMode, size: int) -> tuple[Plan | None, int]:
        """The plan for a size, the leanest where none is predicted to fit, and its predicted peak."""
        profile = self.profile_at(size)
        if mode == "none":
            return None, keep_all_replay(chain_of(profile)).peak_bytes
        key = (mode, size, self.margin_bytes[mode])
        if key not in self._plans:
            self._plans[key] = made_by_rank0(lambda: self._solved(profile, mode))
        return self._plans[key], self._plans[key].predicted_peak_bytes

    def _solved(self, profile: Profile, mode: TrainingMode) -> Plan:
        offload, budget_bytes = self._offload_in(mode), max(1, self.budget_bytes - self.margin_bytes[mode])
        try:
            quick = quick_plan(profile, budget_bytes, offload)
        except Infeasible as refusal:
            return quick_plan(profile, refusal.minimum_budget_bytes, offload)
        try:
            return find_plan(profile, budget_bytes, time_limit_seconds=SEARCH_SECONDS, offload=offload)
        except Infeasible:  # In so little time no program is searched for.
            return quick

    def _offload_in(self, mode: TrainingMode) -> Offload:
        return self._offload if mode == "offload" else Offload(mode="never")

    def seconds_at(self, size: int, plan: Plan | None) -> float:
        """Seconds of a step."""
        return self.profile_at(size).unplanned_seconds if plan is None else plan.predicted_seconds

    def throughput_at(self, size: int, plan: Plan | None) -> float:
        """Samples per second, each counted with its weight."""
        seconds = self.seconds_at(size, plan)
        return self.samples_at(size) * self.weight_at(size) / seconds if seconds > 0 else 0.0


TRIES = 12  # real steps to find one limit; two where the prediction is right
REPEATS = 3  # timed steps at a size that may be reported
LONG_SECONDS = 3.0  # a step that takes longer is timed once: what disturbs steps is short against it
SIZES_BETWEEN = 4  # sizes between the unplanned limit and the largest one whose speed is predicted
WORTH_TRYING = 1.02  # predicted throughput of one of them over that of the limits, for it to be tried
OFF = 0.001  # of the peak; a prediction that is further off is said to be


class LimitSearch:
    """Predicts the limit of each training mode and confirms or corrects it by real steps.

    Args:
        build: the workload at a size.
        vary: the key that is varied.
        start: the smallest size, and how far sizes lie apart.
        predicted: bytes and seconds at any size.
        report: told what comes next.
        refused: a size that the target does not take, whatever the memory; larger ones are not tried.
    """

    def __init__(
        self,
        build: Build,
        vary: str,
        start: SearchStart,
        predicted: PredictedLimits,
        report: Notify,
        *,
        refused: int | None = None,
    ) -> None:
        self._build = build
        self._vary = vary
        self._start = start
        self._predicted = predicted
        self._report = report
        self._end = refused
        self._trials: dict[tuple[TrainingMode, int], Trial] = {}
        self._why_untried: dict[TrainingMode, str] = {}
        self._why_refused: dict[int, str] = {}

    def run(self, notes: tuple[str, ...]) -> MaxBatch:
        """All limits; ``notes`` are handed on, with what is to be said of the predictions."""
        none = self._limit("none", None)
        recompute = self._limit("recompute", none)
        why_not = self._predicted.why_no_offload()
        offload = Limit(mode="offload", size=None, reason=why_not) if why_not else self._limit("offload", recompute)
        limits = [none, recompute, offload]
        best = max([*limits, *self._between(limits)], key=lambda limit: limit.throughput)
        none, recompute, offload, best = (_with_relative(limit, none) for limit in (*limits, best))
        profiles = self._predicted.profiles
        return MaxBatch(
            vary=self._vary,
            step=self._start.step,
            budget_bytes=self._predicted.budget_bytes,
            states_bytes=self._start.states_bytes,
            profiled=profiles.sizes,
            linear=profiles.is_linear,
            notes=(*notes, *profiles.notes(), *self._off()),
            none=none,
            recompute=recompute,
            offload=offload,
            best=best,
        )

    def _limit(self, mode: TrainingMode, weaker: Limit | None) -> Limit:
        """The largest size in a mode; that of a weaker one fits in any case."""
        smallest, step = self._start.smallest, self._start.step
        floor = (weaker.size or 0) if weaker is not None else 0
        low = max(floor, smallest - step)
        self._report(f"solve, {mode}")
        guess = self._predicted.largest(mode, floor=low, step=step, vary=self._vary)
        first = guess if self._end is None else max(low, min(guess, self._end - step))
        bisected = bisect_size(first, lambda size: self._attempt(mode, size), floor=low, step=step, tries=TRIES)
        if bisected.size < smallest:
            predicted = guess if guess >= smallest else 0
            reason = "" if bisected.next_fails else self._why_untried.get(mode, "")
            return Limit(mode=mode, size=0, predicted_size=predicted, next_fails=bisected.next_fails, reason=reason)
        if bisected.size == floor and weaker is not None:
            same = replace(weaker, mode=mode, predicted_size=guess, next_fails=bisected.next_fails)
            if not self._attempt(mode, floor):
                return same
            return _faster(self._confirmed(mode, bisected, guess), same)
        return self._confirmed(mode, bisected, guess)

    def _attempt(self, mode: TrainingMode, size: int) -> bool | None:
        """A real step at a size, with the plan for it; None where nothing is known of it, or the device has no room."""
        budget_bytes = self._predicted.budget_bytes
        try:
            plan, expected_bytes = self._predicted.plan_at(mode, size)
        except NoProfile as error:
            self._why_untried[mode] = f"{self._vary}={size} was not tried: {error}"
            return None
        if not self._may_try(mode, size, plan, expected_bytes):
            return None
        tried = self._try_if_taken(mode, size, plan, expected_bytes)
        if tried is None:
            return False
        over_bytes = (tried.peak_bytes or 0) - expected_bytes
        if tried.fits(budget_bytes) or plan is None or over_bytes <= 0 or expected_bytes > budget_bytes:
            return tried.fits(budget_bytes)
        margin_bytes = max(self._predicted.margin_bytes[mode], over_bytes)
        self._predicted.margin_bytes[mode] = margin_bytes
        plan, expected_bytes = self._predicted.plan_at(mode, size)  # a leaner one may fit yet
        if expected_bytes + margin_bytes > budget_bytes:
            return False
        return self._try(mode, size, plan, expected_bytes).fits(budget_bytes)

    def _may_try(self, mode: TrainingMode, size: int, plan: Plan | None, expected_bytes: int) -> bool:
        device = self._start.device
        host_bytes = plan.host_bytes if plan is not None and device.type == "cpu" else 0
        needed_bytes = expected_bytes + host_bytes
        if has_room(device, needed_bytes, self._predicted.profile_at(size).resident.total):
            return True
        left = format_bytes(room_bytes(device))
        self._why_untried[mode] = (
            f"{self._vary}={size} was not tried: it would take {format_bytes(needed_bytes)}, and {left} are left"
        )
        return False

    def _try_if_taken(self, mode: TrainingMode, size: int, plan: Plan | None, expected_bytes: int) -> Trial | None:
        """The step, None where the target does not take the size."""
        try:
            return self._try(mode, size, plan, expected_bytes)
        except ValueError as error:
            if takes(self._build, size):
                raise  # the model trains there, so it is not the size that is wrong
            self._why_refused[size] = f"{self._vary}={size} is refused: {error}"
            return None

    def _try(self, mode: TrainingMode, size: int, plan: Plan | None, expected_bytes: int) -> Trial:
        self._report(f"{self._vary}={size}: a step, {mode}")
        short = self._predicted.seconds_at(size, plan) <= LONG_SECONDS
        repeats = REPEATS if short and expected_bytes <= self._predicted.budget_bytes else 1
        self._trials[mode, size] = run_trial(self._build, size, plan, repeats=repeats)
        return self._trials[mode, size]

    def _confirmed(self, mode: TrainingMode, bisected: BisectionResult, guess: int) -> Limit:
        limit = self._limit_at(mode, bisected.size)
        refused = self._why_refused.get(bisected.size + self._start.step, "")
        next_fails = bisected.next_fails and not refused
        reason = "" if limit.confirmed and next_fails else refused or self._why_untried.get(mode, "")
        return replace(limit, predicted_size=guess, next_fails=next_fails, reason=reason)

    def _limit_at(self, mode: TrainingMode, size: int) -> Limit:
        """A size as measured, or as predicted where it was not tried."""
        predicted, tried = self._predicted, self._trials.get((mode, size))
        plan, expected_bytes = predicted.plan_at(mode, size)
        if tried is None or tried.seconds is None or not tried.fits(predicted.budget_bytes):
            peak_bytes, seconds, confirmed = expected_bytes, predicted.seconds_at(size, plan), False
        else:
            peak_bytes, seconds, confirmed, plan = tried.peak_bytes, tried.seconds, True, tried.plan
        rate = predicted.samples_at(size) / seconds if seconds > 0 else None
        return Limit(
            mode=mode,
            size=size,
            peak_bytes=peak_bytes,
            predicted_peak_bytes=expected_bytes if plan is None else plan.predicted_peak_bytes,
            samples_per_second=rate,
            throughput=(rate or 0.0) * predicted.weight_at(size),
            confirmed=confirmed,
            plan=plan,
        )

    def _between(self, limits: list[Limit]) -> list[Limit]:
        """Tries the size of the best predicted throughput between the unplanned limit and the largest.

        None where none is predicted to be better than the limits.
        """
        step, low = self._start.step, max(limits[0].size or 0, self._start.smallest)
        widest = max(limits, key=lambda limit: limit.size or 0)
        high = widest.size or 0
        sizes = {low + round((high - low) * k / (SIZES_BETWEEN + 1) / step) * step for k in range(1, SIZES_BETWEEN + 1)}
        known = [self._predicted.throughput_at(limit.size, limit.plan) for limit in limits if limit.size]
        best, best_size = 0.0, 0
        for size in sorted(sizes - {low, high}):
            plan = self._predicted.quick_plan(widest.mode, size)
            throughput = self._predicted.throughput_at(size, plan) if plan is not None else 0.0
            best, best_size = max((best, best_size), (throughput, size))
        if best <= WORTH_TRYING * max(known, default=0.0) or not self._attempt(widest.mode, best_size):
            return []
        return [self._limit_at(widest.mode, best_size)]

    def _off(self) -> list[str]:
        """Where the predictions were furthest off, if they were."""
        shares = {
            (mode, size): tried.peak_bytes / expected_bytes - 1
            for (mode, size), tried in self._trials.items()
            if tried.peak_bytes and (expected_bytes := self._expected_bytes(mode, tried))
        }
        if not shares:
            return []
        mode, size = max(shares, key=lambda key: abs(shares[key]))
        share = shares[mode, size]
        if abs(share) <= OFF:
            return []
        return [f"the measured peak of {self._vary}={size}, {mode}, is {share:+.1%} off its prediction"]

    def _expected_bytes(self, mode: TrainingMode, tried: Trial) -> int:
        return self._predicted.plan_at(mode, tried.size)[1] if tried.plan is None else tried.plan.predicted_peak_bytes


def _faster(planned: Limit, weaker: Limit) -> Limit:
    """The faster of two modes at one size; a plan that has nothing to do differs by noise alone."""
    idle = planned.plan is not None and not planned.plan.recomputed_ops and not planned.plan.host_bytes
    return weaker if idle or weaker.throughput >= planned.throughput else planned


def _with_relative(limit: Limit, none: Limit) -> Limit:
    """The limit with its throughput over the unplanned one."""
    return replace(limit, relative=limit.throughput / none.throughput) if none.throughput and limit.size else limit


STANDING = 6  # sizes in a row with one peak; profiles still show what grows below the optimizer's step
STARTS = 10  # doublings of the step in search of a size that the target takes: 512 steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStart:
    """Where a search begins.

    Attributes:
        smallest: the smallest size whose step runs.
        step: sizes are multiples of it.
        states_bytes: parameters, buffers, gradients and optimizer states at ``smallest``.
        device: of the model.
        notes: what a person should know, one sentence each.
    """

    smallest: int
    step: int
    states_bytes: int
    device: torch.device
    notes: tuple[str, ...] = ()


def search_start(build: Build, vary: str, step: int, report: Notify) -> SearchStart:
    """Try the step, twice the step and so on, until the target takes one and the model trains with it.

    Raises:
        ValueError: the target takes none of them (the first refusal is said), or the device has no room for a step.
    """
    first_refusal: ValueError | None = None
    for doubling in range(STARTS):
        size = step << doubling
        report(f"{vary}={size}: states")
        release()
        try:
            workload = build(size)
            states, device = measured_states_bytes(workload), workload.device
        except NoTarget:
            raise  # other sizes would not help
        except ValueError as error:
            if ran_out(error):
                raise ValueError(
                    f"max-batch: expected room for an unplanned step of {vary}={size}, which is to be profiled, got "
                    "too little on this device; make the model smaller, or take a device with more memory"
                ) from error
            first_refusal = first_refusal or error
            continue
        unit = _unit(build, size, step)
        notes = (f"{vary}: multiples of {unit} are tried, as {size + unit // 2} is refused",) if unit > step else ()
        return SearchStart(smallest=size, step=unit, states_bytes=states, device=device, notes=notes)
    assert first_refusal is not None
    last = step << STARTS - 1
    raise ValueError(
        f"{first_refusal} (tried {vary}={step} and its doubles up to {last}; where only multiples of another number "
        f"work, name it: --vary {vary}:NUMBER, in Python step=)"
    ) from first_refusal


def _unit(build: Build, size: int, step: int) -> int:
    """How far the next size lies: the step, or where that is refused, the first double that is taken."""
    unit = step
    while unit < size and not takes(build, size + unit):
        unit *= 2
    return unit


def takes(build: Build, size: int) -> bool:
    """Whether the target takes a size and the model trains with it: many refuse one only in their forward."""
    try:
        measured_states_bytes(build(size))
    except ValueError as error:
        return ran_out(error)  # there is no room for it here, which is another question
    return True


def doubling_steps(
    build: Build, start: SearchStart, vary: str, budget_bytes: int, report: Notify
) -> tuple[list[Trial], int | None]:
    """Real unplanned steps at doubled sizes, as long as they are taken, predicted to fit and have room.

    With the size that the target did not take, if it came to one.
    """
    trials: list[Trial] = []
    size = start.smallest
    while size <= MOST_STEPS * start.step:
        report(f"{vary}={size}: a step")
        try:
            trials.append(run_trial(build, size, None, repeats=1))
        except ValueError:
            if not trials:
                raise
            return trials, size  # the target takes no such size, whatever the memory
        if len(trials) >= STANDING and len({tried.peak_bytes for tried in trials[-STANDING:]}) == 1:
            break
        size *= 2
        expected_bytes = _expected_bytes(trials, size, start.states_bytes)
        if not trials[-1].fits(budget_bytes) or expected_bytes > budget_bytes:
            break
        if not has_room(start.device, expected_bytes, start.states_bytes):
            break
    return trials, None


def _expected_bytes(trials: list[Trial], size: int, states_bytes: int) -> int:
    """The peak at the next size by the last three; after the first one, all but the states doubles."""
    peaks = [tried.peak_bytes or 0 for tried in trials[-3:]]
    if len(peaks) == 1:
        return peaks[0] + max(0, peaks[0] - states_bytes)
    return whole_at([tried.size for tried in trials[-3:]], peaks, size, curved=True)
