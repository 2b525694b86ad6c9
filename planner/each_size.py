"""Profiles at every size asked for, where models of two sizes do not have the same stages and so no growth."""

from __future__ import annotations

from collections.abc import Callable

from planner.growth import Growth
from planner.profiling import profile
from planner.trials import Build, release
from profiler.profiling import Progress
from profiler.records import Profile


class EachSize:
    """Stands in for a ``Growth``, with a real profile at every size.

    Args:
        build: the workload at a size.
        known: sizes that are profiled already.
        menus: measure options inside stages.
        progress: the reporter of the profile at a size.
        why: what differs between the sizes.
    """

    is_linear = False

    def __init__(
        self, build: Build, known: Growth, *, menus: bool, progress: Callable[[int], Progress], why: str
    ) -> None:
        self._build = build
        self._menus = menus
        self._progress = progress
        self._why = why
        self._found = dict(zip(known.sizes, known.profiles, strict=True))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Those profiled so far, rising."""
        return tuple(sorted(self._found))

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """One for each of the sizes."""
        return tuple(self._found[size] for size in self.sizes)

    def notes(self) -> list[str]:
        """What a person should know, one sentence each."""
        return [f"models of other sizes have other stages, so every size in question was profiled ({self._why})"]

    def at(self, size: int) -> Profile:
        """The profile at a size.

        Raises:
            ProfileError: the step fails, or the device has no room for it without a plan.
        """
        if size not in self._found:
            release()
            self._found[size] = profile(self._build(size), menus=self._menus, progress=self._progress(size))
        return self._found[size]
