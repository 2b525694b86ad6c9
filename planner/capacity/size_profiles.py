"""Profiles of one model at several sizes, with the same programs of its stages at each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from planner.capacity.scaling import ProfileScaling, graph_flow, whole_at
from planner.capacity.step_trial import Build, has_room, release
from planner.distributed.collective import profile, profile_programs
from profiler.measurement.captured_stages import ProposeRuns
from profiler.measurement.device_memory import ran_out
from profiler.measurement.measuring import Progress
from profiler.records import Profile, is_of_whole_model
from profiler.step_graph import StepRuns, runs_once
from profiler.workload.workload import Workload

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
    """What names the programs that another profile has, for stages of the same ops; None where it has none."""
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
        """Those profiled so far, rising."""
        return tuple(sorted(self._profile_at))

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """One for each of the sizes."""
        return tuple(self._profile_at[size] for size in self.sizes)

    def notes(self) -> list[str]:
        """What a person should know, one sentence each."""
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
                raise NoProfile(f"not profiled, as {MOST_PROFILES} sizes were: give a larger --step to reach further")
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
