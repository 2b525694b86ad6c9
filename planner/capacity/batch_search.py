"""The largest batch: sizes are profiled, their growth is fitted, and the limits are searched for and confirmed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planner.capacity.batch_limits import MaxBatch, NoBatch, StateBytes
from planner.capacity.measured_limits import LimitSearch
from planner.capacity.predicted_limits import PredictedLimits
from planner.capacity.scaling import IncompatibleProfiles, ProfileScaling
from planner.capacity.size_profiles import PerSizeProfiles, scaling_over, with_size
from planner.capacity.smallest_size import SearchStart, doubling_steps, search_start
from planner.plans.headroom import Headroom, headroom_from
from planner.plans.offload_request import Offload, OffloadMode, offload_from
from planner.plans.profiling import profile
from planner.plans.solving import Infeasible, plan_with_headroom, quick_plan, why_no_offload
from planner.runtime.step_trial import Build, ran_out, release
from planner.targets import call_target, load_target, on_device
from planner.units import parse_bytes
from profiler.measurement.profiling import Progress
from profiler.records import Profile
from profiler.workload.precision import types_part
from profiler.workload.steps import ProfileError
from profiler.workload.workload import Workload


def max_batch(
    target: str | Callable[..., Workload],
    budget: str | int,
    *,
    vary: str = "batch",
    settings: Mapping[str, Any] | None = None,
    step: int = 1,
    device: str | None = None,
    offload: Offload | OffloadMode = "auto",
    menus: bool = True,
    headroom: str | int = 0,
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
        headroom: of the budget, what no step may use: bytes, or ``"5%"`` of it.
        progress: called as ``progress(what, done, total)`` before each part.

    Raises:
        NoBatch: not even the smallest size fits; carries the smallest feasible budget.
        ValueError: a key that the target does not take or that memory does not grow with, a budget in percent, or a
            headroom that leaves nothing of it.
    """
    room = _Room(_whole_budget(budget), headroom_from(headroom))
    if step < 1:
        raise ValueError(f"--step: expected at least 1, got {step}; give a whole number above zero")
    build = _builder(target, vary, settings or {}, device)
    report = _Counter(progress, vary)
    footing = search_start(build, vary, step, report)
    growth, refused = _growth(build, vary, footing, room, offload_from(offload), menus, report)
    forecast = PredictedLimits(growth, room.usable_bytes, offload_from(offload))
    limits = LimitSearch(build, vary, footing, forecast, report, refused=refused)
    unused = [f"{vary} is what is searched for: the value in --set is not used"] if vary in (settings or {}) else []
    found = limits.run((*unused, *footing.notes))
    return replace(found, budget_bytes=room.budget_bytes, headroom_bytes=room.budget_bytes - room.usable_bytes)


class _Room:
    """The budget, and what the headroom leaves of it."""

    def __init__(self, budget_bytes: int, headroom: Headroom) -> None:
        self.budget_bytes = budget_bytes
        self.headroom = headroom
        self.usable_bytes = budget_bytes - headroom.of(budget_bytes)
        if self.usable_bytes < 1:
            raise ValueError(
                f"headroom: expected less than the budget of {budget_bytes} bytes, got {headroom.of(budget_bytes)}; "
                "lower the headroom or raise the budget"
            )


def _whole_budget(budget: str | int) -> int:
    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise ValueError(
            f"budget: expected what the device holds, such as 32GB, got {budget!r}, a part of an unplanned peak, which "
            "grows with the size that is searched for; give the size in bytes"
        )
    return parse_bytes(budget)


def _builder(
    target: str | Callable[..., Workload], vary: str, settings: Mapping[str, Any], device: str | None
) -> Build:
    def build(size: int) -> Workload:
        own = {**settings, vary: size}
        found = load_target(target, own) if isinstance(target, str) else call_target(name, target, own)
        return on_device(found, device)

    name = getattr(target, "__name__", repr(target))
    return build


class _Counter:
    """Tells the parts of the search to whoever wants to know; how many there will be is not known before."""

    def __init__(self, progress: Progress | None, vary: str) -> None:
        self._progress = progress
        self._vary = vary
        self._done = 0

    def __call__(self, what: str) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(what, self._done, self._done + 1)

    def at(self, size: int) -> Progress:
        """For a profile at a size."""
        return lambda what, done, total: self(f"{self._vary}={size}: {what}")


def _growth(
    build: Build, vary: str, footing: SearchStart, room: _Room, offload_request: Offload, menus: bool, report: _Counter
) -> tuple[ProfileScaling | PerSizeProfiles, int | None]:
    """Profiles at three sizes up to the largest that was seen to fit, and the size that was refused on the way there.

    Raises NoBatch where there is no hope.
    """
    steps, refused = doubling_steps(build, footing, vary, room.usable_bytes, report)
    fitting = [own.size for own in steps if own.fits(room.usable_bytes)]
    if not fitting:  # one profile is enough to know
        smallest = profile(build(footing.start), menus=menus, progress=report.at(footing.start))
        _check_smallest(smallest, vary, footing, room, offload_request)
    # Where hardly any size fits unplanned, those up to three steps above the smallest are profiled.
    high = max([*fitting, footing.start + 3 * footing.step])
    while True:
        sizes = _profiled_sizes(footing, high)
        try:
            found = scaling_over(build, sizes, menus=menus, progress=report.at)
        except ProfileError as error:
            if not ran_out(error):
                raise
            _check_two(sizes, vary, error)
        else:
            return _alike(found, build, footing.step, menus, report), refused
        release()
        high = sizes[-2]


def _profiled_sizes(footing: SearchStart, high: int) -> list[int]:
    """From half the largest size up to it: at a batch of one torch leaves out copies that all others need."""
    step = footing.step
    low = max(footing.start, high // 2 // step * step)
    return sorted({low, low + (high - low) // 2 // step * step, high})


def _check_two(sizes: list[int], vary: str, error: ProfileError) -> None:
    if len(sizes) < 3:
        raise ValueError(
            f"max-batch: expected room to profile {vary}={sizes[0]} and {vary}={sizes[-1]} without a plan, got too "
            "little on this device; make the model smaller, or take a device with more memory"
        ) from error


def _alike(
    found: ProfileScaling, build: Build, step: int, menus: bool, report: _Counter
) -> ProfileScaling | PerSizeProfiles:
    """The growth, without the smallest size where that differs from the others; else a profile at every size."""
    why = ""
    for first in range(len(found.sizes) - 1):
        growth = ProfileScaling(sizes=found.sizes[first:], profiles=found.profiles[first:])
        difference = _difference(growth)
        if not difference:
            return _with_third(growth, build, step, report) if first else growth
        why = why or difference
    return PerSizeProfiles(build, found, menus=menus, progress=report.at, why=why)


def _difference(growth: ProfileScaling) -> str:
    """What keeps the profiles from being put side by side; empty where nothing does."""
    try:
        growth.at(growth.sizes[-1])
    except IncompatibleProfiles as error:
        return error.difference
    return ""


def _with_third(growth: ProfileScaling, build: Build, step: int, report: _Counter) -> ProfileScaling:
    """With two sizes left, one more between or above them, as two do not tell a line from a curve."""
    low, high = growth.sizes[0], growth.sizes[-1]
    middle = low + (high - low) // 2 // step * step
    for size in (middle, high + step):
        if len(growth.sizes) > 2 or size in growth.sizes:
            continue
        try:
            third = with_size(growth, build, size, progress=report.at)
        except ValueError:  # there is no room for it, or the target refuses it
            continue
        growth = growth if _difference(third) else third
    return growth


def _check_smallest(smallest: Profile, vary: str, footing: SearchStart, room: _Room, offload_request: Offload) -> None:
    """Raises NoBatch where not even the smallest size has a plan."""
    usable = offload_request if not why_no_offload(offload_request, smallest) else Offload(mode="never")
    try:
        plan_with_headroom(room.budget_bytes, room.headroom, lambda within: quick_plan(smallest, within, usable))
    except Infeasible as refusal:
        states = StateBytes(
            total_bytes=footing.states_bytes,
            optimizer_bytes=smallest.resident.optimizer,
            halves=types_part(smallest.precision) == "float32",
        )
        raise NoBatch(refusal, vary=vary, size=footing.start, states=states) from refusal
