"""The largest batch: a few sizes are profiled, limits are predicted from them, and confirmed by real steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planner.capacity.batch_limits import MaxBatch, NoBatch, StateBytes
from planner.capacity.limit_search import LimitSearch, PredictedLimits, SearchStart, doubling_steps, search_start
from planner.capacity.scaling import IncompatibleProfiles, PerSizeProfiles, ProfileScaling, scaling_over, with_size
from planner.capacity.step_trial import Build, release
from planner.distributed.ranks import together
from planner.distributed.sharding import Engine, sharded_together
from planner.plans.estimating import estimate_note, on_named_device
from planner.plans.headroom import Headroom, headroom_from
from planner.plans.offload_request import Offload, OffloadMode, offload_from
from planner.plans.profiling import profile
from planner.plans.refusals import Infeasible
from planner.plans.solving import plan_with_headroom, quick_plan, why_no_offload
from planner.targets import build_target
from planner.units import parse_bytes
from profiler.measurement.device_memory import ran_out
from profiler.measurement.measuring import Progress
from profiler.messages import told_by
from profiler.records import Profile
from profiler.workload.given_models import types_part
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
    shard: Engine | None = None,
    progress: Progress | None = None,
) -> MaxBatch:
    """Find the largest batch (or other size) that fits a budget with and without a plan, and measure its speed.

    Real unplanned steps at doubled sizes show where to profile; profiles at two or three sizes say how bytes and
    seconds scale; the solver says which size is the largest that a plan can fit; and real steps at that size and
    the next one confirm it, or correct it. Steps are only run where the device has room for what they are predicted
    to need; running out of memory counts as not fitting.

    Where ``torch.distributed`` is initialised for several ranks, all of them call this: the size is that of each rank,
    and it fits where it does on all.

    Args:
        target: as ``planner profile`` takes it, or a function of ``vary`` and ``settings`` that returns a Workload.
        budget: bytes, ``"32GB"`` or ``"512MiB"``: the most bytes on the device at once during a whole step.
        vary: the argument of the target's function to search over, a whole number.
        settings: its other arguments.
        step: sizes are multiples of it, or of a larger number where the target refuses others.
        device: move the model there first; or a card (``"h100"``) or a device file, as for ``estimate``: steps are then
            estimated.
        offload: as for ``solve``.
        menus: capture stages as graphs, and plan their ops.
        headroom: the part of the budget that no step may use: bytes, or ``"5%"`` of it.
        shard: wrap what the target builds, ``"ddp"`` or ``"fsdp2"``: in DistributedDataParallel, or by ``fully_shard``
            of each repeated block and of the model; None where the target does it.
        progress: called as ``progress(what, done, total)`` before each part.

    Raises:
        NoBatch: not even the smallest size fits; carries the smallest feasible budget.
        ValueError: a key that the target does not take or that memory does not grow with, a budget in percent, or a
            headroom that leaves nothing of it.
    """
    usable = _UsableBudget(_whole_budget(budget), headroom_from(headroom))
    if isinstance(target, Workload):
        raise ValueError(
            f"max_batch: expected a function that makes a Workload of a {vary}, got a Workload; pass "
            f"lambda {vary}: planner.Workload(...), which makes its inputs of that size"
        )
    if step < 1:
        raise ValueError(f"step: expected at least 1, got {step}; give a whole number above zero")
    report = _CountedReport(progress, vary)
    unused = (f"{vary} is what is searched for: the value in --set is not used",) if vary in (settings or {}) else ()
    with on_named_device(device) as moved_to, together("max_batch"):
        build = _builder(target, vary, settings or {}, moved_to, shard)
        limits = _limits(build, vary, step, usable, offload_from(offload), menus, report, unused)
    headroom_bytes = usable.budget_bytes - usable.usable_bytes
    return replace(limits, budget_bytes=usable.budget_bytes, headroom_bytes=headroom_bytes)


def _limits(
    build: Build,
    vary: str,
    step: int,
    usable: _UsableBudget,
    offload: Offload,
    menus: bool,
    report: _CountedReport,
    notes: tuple[str, ...],
) -> MaxBatch:
    """The limits of all training modes; ``notes`` come first among theirs."""
    start = search_start(build, vary, step, report)
    profiles, refused = _profiles(build, vary, start, usable, offload, menus, report)
    predicted = PredictedLimits(profiles, usable.usable_bytes, offload)
    notes = (*estimate_note(profiles.profiles[-1]), *notes, *start.notes)
    return LimitSearch(build, vary, start, predicted, report, refused=refused).run(notes)


class _UsableBudget:
    """The budget, and what the headroom leaves of it."""

    def __init__(self, budget_bytes: int, headroom: Headroom) -> None:
        self.budget_bytes = budget_bytes
        self.headroom = headroom
        self.usable_bytes = headroom.left_of(budget_bytes)


def _whole_budget(budget: str | int) -> int:
    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise ValueError(
            f"budget: expected what the device holds, such as 32GB, got {budget!r}, a part of an unplanned peak, which "
            "grows with the size that is searched for; give the size in bytes"
        )
    return parse_bytes(budget)


def _builder(
    target: str | Callable[..., Workload],
    vary: str,
    settings: Mapping[str, Any],
    device: str | None,
    shard: Engine | None,
) -> Build:
    def build(size: int) -> Workload:
        workload = build_target(target, {**settings, vary: size}, device)
        return workload if shard is None else sharded_together(workload, shard)

    return build


class _CountedReport:
    """Tells the parts of the search to ``progress``; how many there will be is not known before."""

    def __init__(self, progress: Progress | None, vary: str) -> None:
        self._progress = progress or told_by("planner", "max_batch")
        self._vary = vary
        self._done = 0

    def __call__(self, what: str) -> None:
        self._done += 1
        self._progress(what, self._done, 0)  # How many parts there will be is not known.

    def at(self, size: int) -> Progress:
        """For a profile at a size."""
        return lambda what, done, total: self(f"{self._vary}={size}: {what}")


def _profiles(
    build: Build,
    vary: str,
    start: SearchStart,
    usable: _UsableBudget,
    offload: Offload,
    menus: bool,
    report: _CountedReport,
) -> tuple[ProfileScaling | PerSizeProfiles, int | None]:
    """Profiles at three sizes up to the largest that was seen to fit, and the size that was refused on the way there.

    Raises NoBatch where there is no hope.
    """
    steps, refused = doubling_steps(build, start, vary, usable.usable_bytes, report)
    fitting = [tried.size for tried in steps if tried.fits(usable.usable_bytes)]
    if not fitting:  # one profile is enough to know
        smallest = profile(build(start.smallest), menus=menus, progress=report.at(start.smallest))
        _check_smallest(smallest, vary, start, usable, offload)
    # Where hardly any size fits unplanned, those up to three steps above the smallest are profiled.
    high = max([*fitting, start.smallest + 3 * start.step])
    while True:
        sizes = _profiled_sizes(start, high)
        try:
            scaling = scaling_over(build, sizes, menus=menus, progress=report.at)
        except ProfileError as error:
            if not ran_out(error):
                raise
            _check_third_size(sizes, vary, error)
        else:
            return _comparable(scaling, build, start.step, menus, report), refused
        release()
        high = sizes[-2]


def _check_smallest(smallest: Profile, vary: str, start: SearchStart, usable: _UsableBudget, offload: Offload) -> None:
    """Raises NoBatch where not even the smallest size has a plan."""
    possible = Offload(mode="never") if why_no_offload(offload, smallest) else offload
    try:
        plan_with_headroom(usable.budget_bytes, usable.headroom, lambda within: quick_plan(smallest, within, possible))
    except Infeasible as refusal:
        states = StateBytes(
            total_bytes=start.states_bytes,
            optimizer_bytes=smallest.resident.optimizer,
            halves=types_part(smallest.precision) == "float32",
        )
        raise NoBatch(refusal, vary=vary, size=start.smallest, states=states) from refusal


def _profiled_sizes(start: SearchStart, high: int) -> list[int]:
    """From half the largest size up to it: at a batch of one torch leaves out copies that all others need."""
    step = start.step
    low = max(start.smallest, high // 2 // step * step)
    return sorted({low, low + (high - low) // 2 // step * step, high})


def _check_third_size(sizes: list[int], vary: str, error: ProfileError) -> None:
    """Raises ValueError where the device has no room for the largest, and no smaller one would be left of two."""
    if len(sizes) < 3:
        raise ValueError(
            f"max-batch: expected room to profile {vary}={sizes[0]} and {vary}={sizes[-1]} without a plan, got too "
            "little on this device; make the model smaller, or take a device with more memory"
        ) from error


def _comparable(
    scaling: ProfileScaling, build: Build, step: int, menus: bool, report: _CountedReport
) -> ProfileScaling | PerSizeProfiles:
    """The profiles, without the smallest size where that differs from the others; else a profile at every size."""
    why_not = ""
    for first in range(len(scaling.sizes) - 1):
        larger = ProfileScaling(sizes=scaling.sizes[first:], profiles=scaling.profiles[first:])
        difference = _difference(larger)
        if not difference:
            return _with_third(larger, build, step, report) if first else larger
        why_not = why_not or difference
    return PerSizeProfiles(build, scaling, menus=menus, progress=report.at, why=why_not)


def _difference(scaling: ProfileScaling) -> str:
    """The reason why the profiles cannot be compared; empty where nothing does."""
    try:
        scaling.at(scaling.sizes[-1])
    except IncompatibleProfiles as error:
        return error.difference
    return ""


def _with_third(scaling: ProfileScaling, build: Build, step: int, report: _CountedReport) -> ProfileScaling:
    """With two sizes left, one more between or above them, as two do not tell a line from a curve."""
    low, high = scaling.sizes[0], scaling.sizes[-1]
    middle = low + (high - low) // 2 // step * step
    for size in (middle, high + step):
        if len(scaling.sizes) > 2 or size in scaling.sizes:
            continue
        try:
            extended = with_size(scaling, build, size, progress=report.at)
        except ValueError:  # there is no room for it, or the target refuses it
            continue
        scaling = scaling if _difference(extended) else extended
    return scaling
