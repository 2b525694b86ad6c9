"""Profiles of one model at several sizes, with the same options measured inside its stages at each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.capacity.scaling import Growth, flow_of
from planner.plans.profiling import profile
from profiler.measurement import profiling
from profiler.measurement.profiling import Progress
from profiler.op_graph import Choice, StageOps
from profiler.records import MenuRecord, Profile
from profiler.workload.workload import Workload


def growth_over(
    build: Callable[[int], Workload], sizes: Sequence[int], *, menus: bool, progress: Callable[[int], Progress]
) -> Growth:
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
    found = [_like(largest, build(size), progress(size)) for size in sizes[:-1]]
    return Growth(sizes=tuple(sizes), profiles=(*found, largest))


def with_size(
    growth: Growth, build: Callable[[int], Workload], size: int, *, progress: Callable[[int], Progress]
) -> Growth:
    """The growth with a profile at one more size, with the options of the largest; raises ProfileError."""
    found = dict(zip(growth.sizes, growth.profiles, strict=True))
    found[size] = _like(growth.profiles[-1], build(size), progress(size))
    sizes = tuple(sorted(found))
    return Growth(sizes=sizes, profiles=tuple(found[size] for size in sizes))


def _like(other: Profile, workload: Workload, progress: Progress) -> Profile:
    return profiling.profile(workload, propose=same_choices(other), progress=progress)


def same_choices(other: Profile) -> SameChoices | None:
    """What proposes the choices that another profile has measured; None where it has none."""
    return SameChoices(other.menus) if any(menu.options for menu in other.menus) else None


class SameChoices:
    """Proposes for a stage what was measured of the stages that run the same ops; none of it is left out as beaten."""

    def __init__(self, menus: Sequence[MenuRecord]) -> None:
        self._choices: dict[object, dict[tuple[int, ...], Choice]] = {}
        for menu in menus:
            own = self._choices.setdefault(flow_of(menu.ops), {})
            for option in menu.options:
                own[option.rerun] = Choice(option.name, option.kept, frozenset(option.rerun), stated=True)

    def __call__(self, ops: StageOps) -> list[Choice]:
        return list(self._choices.get(flow_of(ops), {}).values())
