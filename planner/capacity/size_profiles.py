"""Profiles of one model at several sizes, with the same options measured inside its stages at each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from planner.capacity.scaling import ProfileScaling, flow_of, graph_flow, whole_at
from planner.capacity.step_trial import Build, has_room, release
from planner.distributed.collective import profile, profile_choices
from profiler.measurement.device_memory import ran_out
from profiler.measurement.measuring import Progress
from profiler.op_graph import Choice, StageOps
from profiler.records import MenuRecord, Profile, is_of_whole_model
from profiler.step_graph import StepGraph
from profiler.step_replay import StepRuns, runs_once
from profiler.workload.workload import Workload

# Halving and doubling takes two profiles for each doubling of the limit, and each training mode has its own: enough
# for limits of some hundred.
MOST_PROFILES = 40


def scaling_over(
    build: Callable[[int], Workload], sizes: Sequence[int], *, menus: bool, progress: Callable[[int], Progress]
) -> ProfileScaling:
    """Profile the workload at each size, the largest first: what is worth measuring inside a stage is found there.

    Args:
        build: the workload at a size.
        sizes: two or more, rising.
        menus: measure options inside stages.
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
    same = same_choices(other)
    programs = None if same is None else same.programs
    stages = "whole" if is_of_whole_model(other.stages) else None
    return profile_choices(workload, same, programs, stages=stages, progress=progress)


def same_choices(other: Profile) -> SameChoices | None:
    """What proposes the choices that another profile has measured; None where it has none."""
    return SameChoices(other.menus) if any(menu.options for menu in other.menus) else None


class SameChoices:
    """Proposes for a stage what was measured of the stages that run the same ops; none of it is left out as beaten."""

    def __init__(self, menus: Sequence[MenuRecord]) -> None:
        self._choices: dict[object, dict[object, Choice]] = {}
        self._orders: dict[object, list[StepRuns]] = {}
        for menu in menus:
            if menu.graph is not None:
                orders = self._orders.setdefault(graph_flow(menu.graph), [])
                orders += [o.runs for o in menu.options if o.runs is not None and o.runs not in orders]
            choices = self._choices.setdefault(flow_of(menu.ops), {})
            for option in (option for option in menu.options if option.runs is None):
                rerun, packed = option.again
                choices[option.again] = Choice(option.name, option.kept, rerun, stated=True, packed=packed)

    def programs(self, graph: StepGraph) -> list[StepRuns]:
        """The orders of a graph's ops that the stages were profiled with; each op once, where they were not."""
        return self._orders.get(graph_flow(graph), [runs_once(graph)])

    def __call__(self, ops: StageOps) -> list[Choice]:
        return list(self._choices.get(flow_of(ops), {}).values())


class NoProfile(ValueError):
    """A size of which no profile is to be had, so that nothing is known of it."""


class PerSizeProfiles:
    """Stands in for a ``ProfileScaling``, with a real profile at every size.

    Args:
        build: the workload at a size.
        known: sizes that are profiled already.
        menus: measure options inside stages.
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
