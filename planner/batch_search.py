"""The largest batch: sizes profiled, growth fitted, limits predicted with the solver and confirmed by real steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planner.batch_limits import Limit, MaxBatch, NoBatch, Way
from planner.footing import Footing, footing_of, ladder
from planner.forecast import Forecast, quick_plan, why_no_offload
from planner.growth import Growth
from planner.limits import Settled, settle
from planner.offloading import Mode, Offload, offload_from
from planner.plan import Plan
from planner.planning import Infeasible
from planner.profiled_sizes import growth_over
from planner.profiling import profile
from planner.sizes import format_bytes, parse_bytes
from planner.targets import load_target
from planner.trials import Build, Trial, has_room, ran_out, room_bytes, trial
from profiler.profiling import ProfileError, Progress
from profiler.records import Profile
from profiler.workload import Workload

TRIES = 12  # real steps to settle one limit; two where the prediction is right
REPEATS = 3  # timed steps at a size that may be reported
SIZES_BETWEEN = 4  # sizes between the unplanned limit and the largest one whose speed is predicted
WORTH_TRYING = 1.02  # predicted throughput of one of them over that of the limits, for it to be tried


def max_batch(
    target: str | Callable[..., Workload],
    budget: str | int,
    *,
    vary: str = "batch",
    settings: Mapping[str, Any] | None = None,
    step: int = 1,
    device: str | None = None,
    offload: Offload | Mode = "auto",
    menus: bool = True,
    progress: Progress | None = None,
) -> MaxBatch:
    """Find the largest batch, or other size, that fits a budget, unplanned and planned, and how fast each is.

    Real unplanned steps at doubled sizes show where to profile; profiles at two or three sizes give the growth of
    bytes and seconds; the solver says which size is the largest that a plan can fit; and real steps at that size and
    the next one confirm it, or correct it. Steps are only run where the device has room for what they are predicted
    to need; running out of memory counts as not fitting.

    Args:
        target: as ``planner profile`` takes it, or a function of ``vary`` and ``settings`` that returns a Workload.
        budget: bytes, ``"32GB"`` or ``"512MiB"``: the most bytes on the device at once during a whole step.
        vary: the argument of the target's function to search over, a whole number.
        settings: its other arguments.
        step: sizes are multiples of it, or of a larger number where the target refuses others.
        device: move the model there first.
        offload: as for ``solve``.
        menus: measure options inside stages.
        progress: called as ``progress(what, done, total)`` before each part.

    Raises:
        NoBatch: not even the smallest size fits; carries the smallest feasible budget.
        ValueError: a key that the target does not take or that memory does not grow with, or a budget in percent.
    """
    budget_bytes = parse_bytes(budget)
    if step < 1:
        raise ValueError(f"--step: expected at least 1, got {step}; give a whole number above zero")
    build = _builder(target, vary, settings or {}, device)
    report = _Counter(progress)
    footing = footing_of(build, vary, step, report)
    growth = _growth(build, vary, footing, budget_bytes, offload_from(offload), menus, report)
    forecast = Forecast(growth, budget_bytes, offload_from(offload))
    _check_smallest(forecast.profile_at(footing.start), vary, footing, budget_bytes, offload_from(offload))
    limits = _Limits(build, vary, footing, forecast, report)
    unused = [f"{vary} is what is searched for: the value in --set is not used"] if vary in (settings or {}) else []
    return limits.run((*unused, *footing.notes, *growth.notes()))


def _builder(
    target: str | Callable[..., Workload], vary: str, settings: Mapping[str, Any], device: str | None
) -> Build:
    def build(size: int) -> Workload:
        own = {**settings, vary: size}
        workload = load_target(target, own) if isinstance(target, str) else target(**own)
        return workload if device is None else workload.to(device)

    return build


class _Counter:
    """Tells the parts of the search to whoever wants to know; how many there will be is not known before."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0

    def __call__(self, what: str) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(what, self._done, self._done + 1)

    def at(self, size: int) -> Progress:
        """For a profile at a size."""
        return lambda what, done, total: self(f"{size}: {what}")


def _growth(
    build: Build, vary: str, footing: Footing, budget_bytes: int, wish: Offload, menus: bool, report: _Counter
) -> Growth:
    """Profiles at three sizes up to the largest that was seen to fit; raises NoBatch where there is no hope."""
    fitting = [own.size for own in ladder(build, footing, vary, budget_bytes, report) if own.fits(budget_bytes)]
    if not fitting:  # one profile is enough to know
        smallest = profile(build(footing.start), menus=menus, progress=report.at(footing.start))
        _check_smallest(smallest, vary, footing, budget_bytes, wish)
    sizes = _profiled_sizes(footing, max(fitting, default=0))
    while True:
        try:
            return growth_over(build, sizes, menus=menus, progress=report.at)
        except ProfileError as error:
            if not ran_out(error) or len(sizes) < 3:
                raise
        sizes = sizes[:-1]


def _profiled_sizes(footing: Footing, fitting: int) -> list[int]:
    """From half the largest size up to it: at a batch of one torch leaves out copies that all others need.

    Where hardly any size fits unplanned, those up to three steps above the smallest.
    """
    step = footing.step
    high = max(fitting, footing.start + 3 * step)
    low = max(footing.start, high // 2 // step * step)
    return [low, low + (high - low) // 2 // step * step, high]


def _check_smallest(smallest: Profile, vary: str, footing: Footing, budget_bytes: int, wish: Offload) -> None:
    """Raises NoBatch where not even the smallest size has a plan."""
    if smallest.unplanned_peak_bytes <= budget_bytes:
        return
    usable = wish if not why_no_offload(wish, smallest) else Offload(mode="never")
    try:
        quick_plan(smallest, budget_bytes, usable)
    except Infeasible as refusal:
        raise NoBatch(refusal, vary=vary, size=footing.start, states_bytes=footing.states_bytes) from refusal


class _Limits:
    """Predicts the limit of each way and settles it by real steps."""

    def __init__(self, build: Build, vary: str, footing: Footing, forecast: Forecast, report: _Counter) -> None:
        self._build = build
        self._vary = vary
        self._footing = footing
        self._forecast = forecast
        self._report = report
        self._trials: dict[tuple[Way, int], Trial] = {}
        self._untried: dict[Way, str] = {}

    def run(self, notes: tuple[str, ...]) -> MaxBatch:
        none = self._limit("none", 0)
        recompute = self._limit("recompute", none.size or 0)
        why = self._forecast.why_no_offload()
        offload = Limit(way="offload", size=None, reason=why) if why else self._limit("offload", recompute.size or 0)
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
            notes=notes,
            none=none,
            recompute=recompute,
            offload=offload,
            best=best,
        )

    def _limit(self, way: Way, floor: int) -> Limit:
        """The largest size of a way; that of a weaker one, ``floor``, fits in any case."""
        start, step = self._footing.start, self._footing.step
        low = max(floor, start - step)
        self._report(f"solve, {way}")
        guess = self._forecast.largest(way, floor=low, step=step, vary=self._vary)
        settled = settle(guess, lambda size: self._attempt(way, size), floor=low, step=step, tries=TRIES)
        if settled.size < start:
            return Limit(way=way, size=0, predicted_size=0, next_fails=settled.next_fails)
        if settled.size == floor:
            self._attempt(way, floor)
        return self._reported(way, settled, guess)

    def _attempt(self, way: Way, size: int) -> bool | None:
        """A real step at a size, with the plan for it; None where the device has no room for what it should need."""
        budget_bytes = self._forecast.budget_bytes
        plan, expected = self._forecast.plan_at(way, size)
        if not self._may_try(way, size, plan, expected):
            return None
        found = self._try(way, size, plan, expected)
        over = (found.peak_bytes or 0) - expected
        if found.fits(budget_bytes) or plan is None or over <= 0 or expected > budget_bytes:
            return found.fits(budget_bytes)
        self._forecast.margin_bytes[way] += over
        plan, expected = self._forecast.plan_at(way, size)  # a leaner one may fit yet
        if expected + self._forecast.margin_bytes[way] > budget_bytes:
            return False
        return self._try(way, size, plan, expected).fits(budget_bytes)

    def _may_try(self, way: Way, size: int, plan: Plan | None, expected: int) -> bool:
        device = self._footing.device
        on_host = plan.host_bytes if plan is not None and device.type == "cpu" else 0
        if has_room(device, expected + on_host, self._footing.states_bytes):
            return True
        left = format_bytes(room_bytes(device) or 0)
        self._untried[way] = (
            f"{self._vary}={size} was not tried: it would take {format_bytes(expected + on_host)}, and {left} are left"
        )
        return False

    def _try(self, way: Way, size: int, plan: Plan | None, expected: int) -> Trial:
        self._report(f"{self._vary}={size}: a step, {way}")
        repeats = REPEATS if expected <= self._forecast.budget_bytes else 1
        self._trials[way, size] = trial(self._build, size, plan, repeats=repeats)
        return self._trials[way, size]

    def _reported(self, way: Way, settled: Settled, guess: int) -> Limit:
        limit = self._tried(way, settled.size)
        reason = "" if limit.confirmed and settled.next_fails else self._untried.get(way, "")
        return replace(limit, predicted_size=guess, next_fails=settled.next_fails, reason=reason)

    def _tried(self, way: Way, size: int) -> Limit:
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


def _beside(limit: Limit, none: Limit) -> Limit:
    """The limit with its throughput over the unplanned one."""
    return replace(limit, relative=limit.throughput / none.throughput) if none.throughput and limit.size else limit
