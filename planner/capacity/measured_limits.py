"""The search for the limits: each way's is predicted, and settled by real steps at that size and the next one."""

from __future__ import annotations

from dataclasses import replace

from planner.capacity.batch_limits import Limit, MaxBatch, TrainingMode
from planner.capacity.predicted_limits import PredictedLimits
from planner.capacity.size_bisection import BisectionResult, bisect_size
from planner.capacity.size_profiles import NoProfile
from planner.capacity.smallest_size import SearchStart, takes
from planner.plans.plan import Plan
from planner.runtime.step_trial import Build, Notify, Trial, has_room, room_bytes, run_trial
from planner.units import format_bytes

TRIES = 12  # real steps to settle one limit; two where the prediction is right
REPEATS = 3  # timed steps at a size that may be reported
LONG_SECONDS = 3.0  # a step that takes longer is timed once: what disturbs steps is short beside it
SIZES_BETWEEN = 4  # sizes between the unplanned limit and the largest one whose speed is predicted
WORTH_TRYING = 1.02  # predicted throughput of one of them over that of the limits, for it to be tried
OFF = 0.001  # of the peak; a prediction that is further off is said to be


class LimitSearch:
    """Predicts the limit of each way and settles it by real steps.

    Args:
        build: the workload at a size.
        vary: the key that is varied.
        footing: the smallest size, and how far sizes lie apart.
        forecast: of bytes and seconds at any size.
        report: told what comes next.
        refused: a size that the target does not take, whatever the memory; larger ones are not tried.
    """

    def __init__(
        self,
        build: Build,
        vary: str,
        footing: SearchStart,
        forecast: PredictedLimits,
        report: Notify,
        *,
        refused: int | None = None,
    ) -> None:
        self._build = build
        self._vary = vary
        self._footing = footing
        self._forecast = forecast
        self._report = report
        self._end = refused
        self._trials: dict[tuple[TrainingMode, int], Trial] = {}
        self._untried: dict[TrainingMode, str] = {}
        self._refused: dict[int, str] = {}

    def run(self, notes: tuple[str, ...]) -> MaxBatch:
        """All limits; ``notes`` are handed on, with what is to be said of the predictions."""
        none = self._limit("none", None)
        recompute = self._limit("recompute", none)
        why = self._forecast.why_no_offload()
        offload = Limit(way="offload", size=None, reason=why) if why else self._limit("offload", recompute)
        ways = [none, recompute, offload]
        best = max([*ways, *self._between(ways)], key=lambda limit: limit.throughput)
        none, recompute, offload, best = (_beside(limit, none) for limit in (*ways, best))
        return MaxBatch(
            vary=self._vary,
            step=self._footing.step,
            budget_bytes=self._forecast.budget_bytes,
            states_bytes=self._footing.states_bytes,
            profiled=self._forecast.growth.sizes,
            linear=self._forecast.growth.is_linear,
            notes=(*notes, *self._forecast.growth.notes(), *self._off()),
            none=none,
            recompute=recompute,
            offload=offload,
            best=best,
        )

    def _limit(self, way: TrainingMode, weaker: Limit | None) -> Limit:
        """The largest size of a way; that of a weaker one fits in any case."""
        start, step = self._footing.start, self._footing.step
        floor = (weaker.size or 0) if weaker is not None else 0
        low = max(floor, start - step)
        self._report(f"solve, {way}")
        guess = self._forecast.largest(way, floor=low, step=step, vary=self._vary)
        first = guess if self._end is None else max(low, min(guess, self._end - step))
        settled = bisect_size(first, lambda size: self._attempt(way, size), floor=low, step=step, tries=TRIES)
        if settled.size < start:
            predicted = guess if guess >= start else 0
            reason = "" if settled.next_fails else self._untried.get(way, "")
            return Limit(way=way, size=0, predicted_size=predicted, next_fails=settled.next_fails, reason=reason)
        if settled.size == floor and weaker is not None:
            same = replace(weaker, way=way, predicted_size=guess, next_fails=settled.next_fails)
            if not self._attempt(way, floor):
                return same
            return _faster(self._reported(way, settled, guess), same)
        return self._reported(way, settled, guess)

    def _attempt(self, way: TrainingMode, size: int) -> bool | None:
        """A real step at a size, with the plan for it; None where nothing is known of it, or the device has no room."""
        budget_bytes = self._forecast.budget_bytes
        try:
            plan, expected = self._forecast.plan_at(way, size)
        except NoProfile as error:
            self._untried[way] = f"{self._vary}={size} was not tried: {error}"
            return None
        if not self._may_try(way, size, plan, expected):
            return None
        found = self._taken(way, size, plan, expected)
        if found is None:
            return False
        over = (found.peak_bytes or 0) - expected
        if found.fits(budget_bytes) or plan is None or over <= 0 or expected > budget_bytes:
            return found.fits(budget_bytes)
        self._forecast.margin_bytes[way] = max(self._forecast.margin_bytes[way], over)
        plan, expected = self._forecast.plan_at(way, size)  # a leaner one may fit yet
        if expected + self._forecast.margin_bytes[way] > budget_bytes:
            return False
        return self._try(way, size, plan, expected).fits(budget_bytes)

    def _may_try(self, way: TrainingMode, size: int, plan: Plan | None, expected: int) -> bool:
        device = self._footing.device
        on_host = plan.host_bytes if plan is not None and device.type == "cpu" else 0
        if has_room(device, expected + on_host, self._forecast.profile_at(size).resident.total):
            return True
        left = format_bytes(room_bytes(device) or 0)
        self._untried[way] = (
            f"{self._vary}={size} was not tried: it would take {format_bytes(expected + on_host)}, and {left} are left"
        )
        return False

    def _taken(self, way: TrainingMode, size: int, plan: Plan | None, expected: int) -> Trial | None:
        """The step, None where the target does not take the size."""
        try:
            return self._try(way, size, plan, expected)
        except ValueError as error:
            if takes(self._build, size):
                raise  # the model trains there, so it is not the size that is wrong
            self._refused[size] = f"{self._vary}={size} is refused: {error}"
            return None

    def _try(self, way: TrainingMode, size: int, plan: Plan | None, expected: int) -> Trial:
        self._report(f"{self._vary}={size}: a step, {way}")
        short = self._forecast.seconds_at(size, plan) <= LONG_SECONDS
        repeats = REPEATS if short and expected <= self._forecast.budget_bytes else 1
        self._trials[way, size] = run_trial(self._build, size, plan, repeats=repeats)
        return self._trials[way, size]

    def _reported(self, way: TrainingMode, settled: BisectionResult, guess: int) -> Limit:
        limit = self._tried(way, settled.size)
        refused = self._refused.get(settled.size + self._footing.step, "")
        next_fails = settled.next_fails and not refused
        reason = "" if limit.confirmed and next_fails else refused or self._untried.get(way, "")
        return replace(limit, predicted_size=guess, next_fails=next_fails, reason=reason)

    def _tried(self, way: TrainingMode, size: int) -> Limit:
        """A size as measured, or as predicted where it was not tried."""
        forecast, found = self._forecast, self._trials.get((way, size))
        plan, expected = forecast.plan_at(way, size)
        if found is None or found.seconds is None or not found.fits(forecast.budget_bytes):
            peak, seconds, confirmed = expected, forecast.seconds_at(size, plan), False
        else:
            peak, seconds, confirmed, plan = found.peak_bytes, found.seconds, True, found.plan
        rate = forecast.samples_at(size) / seconds if seconds > 0 else None
        return Limit(
            way=way,
            size=size,
            peak_bytes=peak,
            predicted_peak_bytes=expected if plan is None else plan.predicted_peak_bytes,
            samples_per_second=rate,
            throughput=(rate or 0.0) * forecast.weight_at(size),
            confirmed=confirmed,
            plan=plan,
        )

    def _between(self, ways: list[Limit]) -> list[Limit]:
        """Of some sizes between the unplanned limit and the largest one, that of the best predicted throughput, tried.

        None where none is predicted to be better than the limits.
        """
        step, low = self._footing.step, max(ways[0].size or 0, self._footing.start)
        widest = max(ways, key=lambda limit: limit.size or 0)
        high = widest.size or 0
        sizes = {low + round((high - low) * k / (SIZES_BETWEEN + 1) / step) * step for k in range(1, SIZES_BETWEEN + 1)}
        known = [self._forecast.throughput_at(limit.size, limit.plan) for limit in ways if limit.size]
        best, size = 0.0, 0
        for between in sorted(sizes - {low, high}):
            plan = self._forecast.quick(widest.way, between)
            found = self._forecast.throughput_at(between, plan) if plan is not None else 0.0
            best, size = max((best, size), (found, between))
        if best <= WORTH_TRYING * max(known, default=0.0) or not self._attempt(widest.way, size):
            return []
        return [self._tried(widest.way, size)]

    def _off(self) -> list[str]:
        """Where the predictions were furthest off, if they were."""
        shares = {
            (way, size): found.peak_bytes / expected - 1
            for (way, size), found in self._trials.items()
            if found.peak_bytes and (expected := self._expected(way, found))
        }
        if not shares:
            return []
        way, size = max(shares, key=lambda key: abs(shares[key]))
        share = shares[way, size]
        if abs(share) <= OFF:
            return []
        return [f"the measured peak of {self._vary}={size}, {way}, is {share:+.1%} off its prediction"]

    def _expected(self, way: TrainingMode, found: Trial) -> int:
        return self._forecast.plan_at(way, found.size)[1] if found.plan is None else found.plan.predicted_peak_bytes


def _faster(own: Limit, weaker: Limit) -> Limit:
    """Of one size the faster way; a plan that has nothing to do differs by noise alone."""
    idle = own.plan is not None and not own.plan.recomputed_ops and not own.plan.host_bytes
    return weaker if idle or weaker.throughput >= own.throughput else own


def _beside(limit: Limit, none: Limit) -> Limit:
    """The limit with its throughput over the unplanned one."""
    return replace(limit, relative=limit.throughput / none.throughput) if none.throughput and limit.size else limit
