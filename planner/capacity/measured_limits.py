"""The largest size in each training mode: predicted first, then confirmed by real steps at that size and the next."""

from __future__ import annotations

from dataclasses import replace

from planner.capacity.batch_limits import Limit, MaxBatch, TrainingMode
from planner.capacity.predicted_limits import PredictedLimits
from planner.capacity.size_bisection import BisectionResult, bisect_size
from planner.capacity.size_profiles import NoProfile
from planner.capacity.smallest_size import SearchStart, takes
from planner.capacity.step_trial import Build, Notify, Trial, has_room, room_bytes, run_trial
from planner.plans.plan import Plan
from planner.units import format_bytes

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
        """Of some sizes between the unplanned limit and the largest one, that of the best predicted throughput, tried.

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
    """Of two modes at one size the faster; a plan that has nothing to do differs by noise alone."""
    idle = planned.plan is not None and not planned.plan.recomputed_ops and not planned.plan.host_bytes
    return weaker if idle or weaker.throughput >= planned.throughput else planned


def _with_relative(limit: Limit, none: Limit) -> Limit:
    """The limit with its throughput over the unplanned one."""
    return replace(limit, relative=limit.throughput / none.throughput) if none.throughput and limit.size else limit
