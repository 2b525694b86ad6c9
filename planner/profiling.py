"""Profiling as users call it: the profiler's measurement, with menus of options inside every stage."""

from __future__ import annotations

from collections.abc import Sequence

from planner.menus import choices_for
from profiler import profiling
from profiler.profiling import Progress
from profiler.records import Profile
from profiler.stages import StagePattern
from profiler.workload import Workload


def profile(
    workload: Workload,
    *,
    stages: Sequence[StagePattern] | None = None,
    menus: bool = True,
    progress: Progress | None = None,
) -> Profile:
    """Measure one training step of a workload on the device it is on.

    Runs about ten steps, and with ``menus`` ten to thirty more, in which
    stages keep a choice of what they save: every option that a plan may use has
    been measured. Parameters, buffers, gradients, optimizer states, random
    states and train/eval flags are as before afterwards, also after an exception.

    Args:
        workload: the training step; its model in training mode.
        stages: None to find stages automatically; otherwise module names,
            glob patterns or module classes.
        menus: measure options inside stages; without, a stage is kept or recomputed as a whole.
        progress: called as ``progress(what, done, total)`` before each run.

    Returns:
        The profile: bytes as exact integers, seconds as medians.

    Raises:
        ProfileError: the step fails, or the model is in eval mode or planned.
        StagesError: a stage pattern matches nothing, or the step calls the model more than once.
    """
    return profiling.profile(workload, stages=stages, propose=choices_for if menus else None, progress=progress)
