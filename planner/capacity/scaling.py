"""How the numbers of a profile scale with a size of the workload, and the profile to expect at any size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch

from planner.capacity.step_trial import Build, has_room, release
from planner.plans.profiling import profile, profile_programs
from profiler.measurement.captured_stages import ProposeRuns
from profiler.measurement.device_memory import ran_out
from profiler.measurement.measuring import Progress
from profiler.op_graph import StageOps
from profiler.records import MenuRecord, Profile, StageRecord, is_of_whole_model
from profiler.step_graph import StepGraph, StepRuns, runs_once
from profiler.workload.workload import Workload

# Deviation from a line, as a share of what the bytes grow by, that counts as none: a CUDA allocator rounds every tensor
# up to 512 bytes, which of tensors of half a megabyte is that share.
STRAIGHT = 0.001
_SHAPES = ("input_shapes", "parameter_shapes", "gradient_strides")
_COUNTS = ("recompute_ops", "forward_ops", "saved_tensors", "alike")
_ROWS_OF_BYTES = ("parameters", "buffers", "optimizer", "inputs", "gradients", "loop")


class IncompatibleProfiles(ValueError):
    """Profiles of two sizes that do not have the same parts; ``difference`` names the first one."""

    def __init__(self, difference: str) -> None:
        self.difference = difference
        super().__init__(
            f"sizes: expected the same stages and tensors at every one, got {difference}; vary something else"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileScaling:
    """Profiles of one model at rising sizes, and what follows for other sizes.

    Attributes:
        sizes: two or more, rising.
        profiles: one for each.
    """

    sizes: tuple[int, ...]
    profiles: tuple[Profile, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or len(self.sizes) != len(self.profiles) or list(self.sizes) != sorted({*self.sizes}):
            raise ValueError(
                f"sizes: expected a profile at each of two or more rising ones, got {len(self.profiles)} at "
                f"{list(self.sizes)}; profile at one more size"
            )

    @property
    def bend(self) -> float:
        """How far the middle of the last three sizes lies below the line, as a share of what the bytes grow by."""
        kept_bytes = [profile.stages[-1].forward.end_bytes for profile in self.profiles]
        return _bend(self.sizes, kept_bytes)

    @property
    def is_linear(self) -> bool:
        """Whether the bytes kept for backward grow as a line; with two sizes nothing speaks against it."""
        return abs(self.bend) <= STRAIGHT

    def notes(self) -> list[str]:
        """Notes on the fit, one sentence each; empty where it is a line."""
        notes = []
        if len(self.sizes) == 2:
            notes.append("bytes are taken to grow linearly, which profiles at two sizes cannot tell")
        if not self.is_linear:
            kind = "faster" if self.bend > 0 else "slower"
            fit = "a parabola through three sizes" if self.bend > 0 else "a line through the two largest sizes"
            notes.append(f"bytes grow {kind} than linearly ({abs(self.bend):.1%} off the line): {fit} is taken")
        return notes

    def at(self, size: int) -> Profile:
        """The profile to expect at ``size``: every number as it scales, bytes rounded up.

        Whole numbers follow the line through the two nearest sizes, or, where the bytes that are kept grow faster than
        linearly, a parabola. Seconds follow the best line, or parabola, that never falls.

        Raises:
            IncompatibleProfiles: the profiles do not have the same stages, tensors or modules.
        """
        parts = _aligned(self.profiles)
        curved = self.bend > STRAIGHT
        fit = _Fit(
            whole=lambda values: whole_at(self.sizes, values, size, curved=curved),
            seconds=lambda values: seconds_at(self.sizes, values, size, curved=curved),
        )
        bare = [replace(part, link=None, menus=tuple(map(_without_replays, part.menus))) for part in parts]
        profile = _blend(bare, fit, "")
        stages = tuple(_ordered(stage) for stage in profile.stages)
        return replace(profile, stages=stages, menus=tuple(map(_with_replays, profile.menus)), link=parts[-1].link)


@dataclass(frozen=True, slots=True)
class _Fit:
    whole: Callable[[Sequence[int]], int]
    seconds: Callable[[Sequence[float]], float]


def whole_at(sizes: Sequence[int], values: Sequence[int], size: int, *, curved: bool) -> int:
    """A whole number at another size, rounded up; never negative where it was not at any size.

    >>> whole_at((1, 2, 4), (10, 13, 19), 8, curved=False), whole_at((1, 2, 4), (1, 4, 16), 8, curved=True)
    (31, 64)
    """
    if all(value == values[0] for value in values):
        return values[0]
    high = next((k for k in range(1, len(sizes) - 1) if sizes[k] >= size), len(sizes) - 1)
    low = high - 1
    slope = Fraction(values[high] - values[low], sizes[high] - sizes[low])
    value = values[high] + slope * (size - sizes[high])
    if curved and len(sizes) > 2:
        value += max(Fraction(0), _curvature(sizes, values)) * (size - sizes[high]) * (size - sizes[low])
    least = 0 if min(values) >= 0 else None
    rounded = -(-value.numerator // value.denominator)
    return rounded if least is None else max(least, rounded)


def _curvature(sizes: Sequence[int], values: Sequence[int]) -> Fraction:
    """The second divided difference of the last three points."""
    (a, b, c), (u, v, w) = sizes[-3:], values[-3:]
    return (Fraction(w - v, c - b) - Fraction(v - u, b - a)) / (c - a)


def _bend(sizes: Sequence[int], values: Sequence[float]) -> float:
    if len(sizes) < 3:
        return 0.0
    (a, b, c), (u, v, w) = sizes[-3:], values[-3:]
    grown = w - u
    return ((u + (w - u) * (b - a) / (c - a)) - v) / grown if grown > 0 else 0.0


def seconds_at(sizes: Sequence[int], values: Sequence[float], size: int, *, curved: bool) -> float:
    """Seconds at another size: least squares with no negative part, so that noise never makes a larger size faster.

    >>> round(seconds_at((1, 2, 4), (3.0, 5.0, 9.0), 8, curved=False), 6)
    17.0
    """
    if all(value == values[0] for value in values):
        return values[0]
    powers = (0, 1, 2) if curved and len(sizes) > 2 else (0, 1)
    fits = [_least_squares(sizes, values, chosen) for count in (2, 1) for chosen in combinations(powers, count)]
    best = min((fit for fit in fits if min(fit.parts) >= 0), key=lambda fit: fit.error)
    return sum(part * float(size) ** power for power, part in zip(best.powers, best.parts, strict=True))


class _PowerSum(NamedTuple):
    """The sum of some powers of the size that comes nearest to values, each power with its part in it."""

    powers: tuple[int, ...]
    parts: list[float]
    error: float


def _least_squares(sizes: Sequence[int], values: Sequence[float], powers: tuple[int, ...]) -> _PowerSum:
    columns = np.array([[float(size) ** power for power in powers] for size in sizes])
    parts = np.linalg.lstsq(columns, np.array(values))[0]
    error = float(np.square(columns @ parts - values).sum())
    return _PowerSum(powers, parts.tolist(), error)


def _blend(parts: Sequence[Any], fit: _Fit, name: str) -> Any:
    """The value of the field ``name`` at the size that ``fit`` is for."""
    last = parts[-1]
    if dataclasses.is_dataclass(last) and not isinstance(last, type):
        names = [field.name for field in dataclasses.fields(last)]
        return type(last)(**{key: _blend([getattr(part, key) for part in parts], fit, key) for key in names})
    if isinstance(last, tuple):
        if name == "gradient_strides" and len({len(part) for part in parts}) > 1:
            return ()
        if len({len(part) for part in parts}) > 1:
            raise _incompatible([len(part) for part in parts], f"{{}} {name}")
        blended = (_blend(items, fit, name) for items in zip(*parts, strict=True))
        return StepRuns(*blended) if isinstance(last, StepRuns) else tuple(blended)
    if isinstance(last, bool):
        return any(parts)
    if isinstance(last, int):
        return _whole(parts, fit, name)
    if isinstance(last, float):
        return fit.seconds(parts)
    if name in ("name", "kind", "module_class") and any(part != last for part in parts):
        raise _incompatible(parts, f"the {name} {{}}")
    return next((part for part in parts if name == "reason" and part), last)


def _whole(parts: Sequence[int], fit: _Fit, name: str) -> int:
    if name.endswith("_bytes") or name in (*_SHAPES, *_ROWS_OF_BYTES):
        return fit.whole(parts)
    if name not in _COUNTS and any(part != parts[0] for part in parts):
        raise _incompatible(parts, f"the {name} {{}}")
    return parts[-1]


def _incompatible(parts: Sequence[Any], text: str) -> IncompatibleProfiles:
    """With what differs in words: ``{}`` of the text stands for the values of all sizes."""
    *others, last = map(str, parts)
    values = text.replace("_", " ").format(f"{', '.join(others)} and {last}")
    return IncompatibleProfiles(f"{values} from the smallest size to the largest")


def _aligned(profiles: Sequence[Profile]) -> list[Profile]:
    """The profiles, each with the menus and the options that all of them have; without single ops and pieces."""
    numbers: dict[tuple[int, ...], int] = {}
    menus: list[list[MenuRecord]] = [[] for _ in profiles]
    of_stage: list[int] = []
    if len({len(each.stages) for each in profiles}) > 1:
        raise _incompatible([len(each.stages) for each in profiles], "{} stages")
    for records in zip(*(each.stages for each in profiles), strict=True):
        key = tuple(record.menu for record in records)
        if key not in numbers:
            common = _common([_menu_of(p, r) for p, r in zip(profiles, records, strict=True)])
            numbers[key] = len(menus[0]) if common else -1
            for menus_of_profile, menu in zip(menus, common, strict=False):
                menus_of_profile.append(menu)
        of_stage.append(numbers[key])
    return [
        replace(
            profile,
            stages=tuple(replace(record, menu=of_stage[k]) for k, record in enumerate(profile.stages)),
            menus=tuple(menus_of_profile),
            op_records=(),
            step_seconds=(),
            heads=(),
            in_pieces=(),
        )
        for profile, menus_of_profile in zip(profiles, menus, strict=True)
    ]


def _without_replays(menu: MenuRecord) -> MenuRecord:
    """The menu with the peaks of its programs above their replays: a peak may lie elsewhere at another size."""
    return _peaks_moved(menu, -1)


def _with_replays(menu: MenuRecord) -> MenuRecord:
    """The menu with all of the peaks, from those of the measured program above its replay on the graph as it scales."""
    menu = _peaks_moved(menu, 1)
    return menu if menu.once is None else menu.with_programs([option.runs for option in menu.options])


def _peaks_moved(menu: MenuRecord, times: int) -> MenuRecord:
    if menu.once is None:
        return menu
    replayed = menu.replays(menu.once.runs)[0]
    forward_bytes, backward_bytes = times * replayed.forward_peak_bytes, times * replayed.above_start_bytes
    options = (
        replace(
            option,
            forward_peak_bytes=option.forward_peak_bytes + forward_bytes,
            backward_peak_bytes=option.backward_peak_bytes + backward_bytes,
        )
        for option in menu.options
    )
    return replace(menu, options=tuple(options))


def _menu_of(profile: Profile, record: StageRecord) -> MenuRecord | None:
    return replace(profile.menus[record.menu], compiled=None) if record.menu >= 0 else None


def _common(menus: Sequence[MenuRecord | None]) -> list[MenuRecord]:
    """The menus with the options that all have, in the same order; none where they are not of the same ops."""
    known = [menu for menu in menus if menu is not None]
    if len(known) < len(menus) or len({flow_of(menu.ops) for menu in known}) > 1:
        return []
    if len({graph_flow(menu.graph) for menu in known}) > 1:
        return [replace(menu, graph=None, options=()) for menu in known]
    by_runs = [{option.runs: option for option in menu.options} for menu in known]
    shared = [runs for runs in by_runs[-1] if all(runs in options for options in by_runs)]
    shared = [runs for runs in shared if len({options[runs].kept for options in by_runs}) == 1]
    # The name of a program follows the order of its ops' seconds, which may differ: one name for all.
    names = {runs: by_runs[-1][runs].name for runs in shared}
    return [
        replace(menu, options=tuple(replace(options[runs], name=names[runs]) for runs in shared))
        for menu, options in zip(known, by_runs, strict=True)
    ]


def graph_flow(graph: StepGraph | None) -> tuple[Any, ...]:
    """The data flow of the ops of a graph, whatever the sizes of their tensors and their seconds."""
    if graph is None:
        return ()
    ops = tuple((op.name, op.op, op.module, op.reads, op.makes, op.arguments, op.random) for op in graph.ops)
    return ops, tuple((s.returned, s.written, s.gradient, s.of_loss) for s in graph.storages)


def flow_of(ops: StageOps) -> tuple[Any, ...]:
    """The data flow of a stage's ops, whatever the sizes of their tensors and their seconds."""
    steps = tuple(
        (op.op, op.module, op.reads, op.allocates, op.writes, op.random, op.not_rerunnable_reason) for op in ops.ops
    )
    storages = tuple(
        (s.op, s.output, s.versions, s.saved, s.always_live, s.dies_after_stage, s.returned) for s in ops.storages
    )
    return steps, storages, ops.modules, ops.saves


def _ordered(record: StageRecord) -> StageRecord:
    """No phase has its peak below its ends: each of the three numbers was fitted by itself."""
    phases = {name: getattr(record, name) for name in ("forward", "backward", "dropped")}
    for name, phase in phases.items():
        phases[name] = replace(phase, peak_bytes=max(phase.peak_bytes, phase.start_bytes, phase.end_bytes))
    return replace(record, **phases)


# Halving and doubling takes two profiles for each doubling of the limit, and each training mode has its own: enough
# for limits of some hundred.
MOST_PROFILES = 40


def scaling_over(
    build: Callable[[int], Workload], sizes: Sequence[int], *, menus: bool, progress: Callable[[int], Progress]
) -> ProfileScaling:
    """Profile the workload at each size, the largest first: which programs are worth having is found there.

    Args:
        build: the workload at a size.
        sizes: two or more, rising.
        menus: capture stages as graphs, and plan their ops.
        progress: the reporter of the profile at a size.

    Raises:
        ProfileError: a step fails.
    """
    largest = profile(build(sizes[-1]), menus=menus, progress=progress(sizes[-1]))
    smaller = []
    for size in sizes[:-1]:
        release()  # The model before, where the device holds no two.
        smaller.append(_like(largest, build(size), progress(size)))
    return ProfileScaling(sizes=tuple(sizes), profiles=(*smaller, largest))


def with_size(
    scaling: ProfileScaling, build: Callable[[int], Workload], size: int, *, progress: Callable[[int], Progress]
) -> ProfileScaling:
    """The profiles with one at one more size, with the options of the largest; raises ProfileError."""
    profile_at = dict(zip(scaling.sizes, scaling.profiles, strict=True))
    release()
    profile_at[size] = _like(scaling.profiles[-1], build(size), progress(size))
    sizes = tuple(sorted(profile_at))
    return ProfileScaling(sizes=sizes, profiles=tuple(profile_at[size] for size in sizes))


def _like(other: Profile, workload: Workload, progress: Progress) -> Profile:
    names = [stage.name for stage in other.stages if stage.kind == "stage"]
    stages = "whole" if is_of_whole_model(other.stages) else names if len(names) == 1 else None
    return profile_programs(workload, same_programs(other), stages=stages, progress=progress)


def same_programs(other: Profile) -> ProposeRuns | None:
    """Returns a lookup of another profile's programs for stages of the same ops; None where it has none."""
    if not any(menu.options for menu in other.menus):
        return None
    orders_of: dict[object, list[StepRuns]] = {}
    for menu in other.menus:
        if menu.graph is not None:
            orders = orders_of.setdefault(graph_flow(menu.graph), [])
            orders += [option.runs for option in menu.options if option.runs not in orders]
    return lambda graph: orders_of.get(graph_flow(graph), [runs_once(graph)])


class NoProfile(ValueError):
    """A size of which no profile is to be had, so that nothing is known of it."""


class PerSizeProfiles:
    """Stands in for a ``ProfileScaling``, with a real profile at every size.

    Args:
        build: the workload at a size.
        known: sizes that are profiled already.
        menus: capture stages as graphs, and plan their ops.
        progress: the reporter of the profile at a size.
        why: what differs between the sizes.
    """

    is_linear = False

    def __init__(
        self, build: Build, known: ProfileScaling, *, menus: bool, progress: Callable[[int], Progress], why: str
    ) -> None:
        self._build = build
        self._menus = menus
        self._progress = progress
        self._why = why
        self._refused: dict[int, NoProfile] = {}
        self._profile_at = dict(zip(known.sizes, known.profiles, strict=True))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes profiled so far, rising."""
        return tuple(sorted(self._profile_at))

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """One for each of the sizes."""
        return tuple(self._profile_at[size] for size in self.sizes)

    def notes(self) -> list[str]:
        """Notes, one sentence each."""
        return [f"models of other sizes have other stages ({self._why}), so every size in question was profiled"]

    def at(self, size: int) -> Profile:
        """The profile at a size.

        Raises:
            NoProfile: the step fails, the device has no room for it without a plan, or enough sizes were profiled.
        """
        if size in self._refused:
            raise self._refused[size]
        if size not in self._profile_at:
            if len(self._profile_at) >= MOST_PROFILES:
                raise NoProfile(
                    f"not profiled, as {MOST_PROFILES} sizes were; to reach further, search over multiples, "
                    "--vary KEY:STEP (step=)"
                )
            if not self._has_room(size):
                raise NoProfile("no room is left to profile it without a plan")
            self._profile_at[size] = self._profiled(size)
        return self._profile_at[size]

    def _has_room(self, size: int) -> bool:
        """Whether the device holds the step, by the line through the two largest sizes so far."""
        first, last = self.profiles[-2:]
        peaks = [first.unplanned_peak_bytes, last.unplanned_peak_bytes]
        expected = whole_at(self.sizes[-2:], peaks, size, curved=False)
        return has_room(torch.device(last.device), expected, last.resident.total)

    def _profiled(self, size: int) -> Profile:
        release()
        try:
            return profile(self._build(size), menus=self._menus, progress=self._progress(size))
        except ValueError as error:
            said = "no room is left to profile it without a plan" if ran_out(error) else f"refused: {error}"
            self._refused[size] = NoProfile(said)
            raise self._refused[size] from error
