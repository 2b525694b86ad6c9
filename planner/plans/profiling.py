"""Profiling as users call it: the profiler's measurement, with menus of options inside every stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.plans.menus import choices_for
from planner.plans.rule_resolution import stated_by
from planner.plans.rules import Rule, Rules, rules_from
from profiler.measurement import profiling
from profiler.measurement.profiling import Progress
from profiler.op_graph import Choice, ChoiceError
from profiler.records import Profile
from profiler.trace.partition import StagePattern
from profiler.trace.stage_names import NamedStage
from profiler.workload.compiled_forwards import is_compiled
from profiler.workload.workload import Workload


def profile(
    workload: Workload,
    *,
    stages: Sequence[StagePattern] | None = None,
    menus: bool = True,
    rules: Rules | Rule | Sequence[Rule] | str | Path | None = None,
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
        rules: a plan stated by hand, or the path of its file: what it says of ops inside stages is measured as well,
            so that ``planner.state`` can predict it.
        progress: called as ``progress(what, done, total)`` before each run.

    Returns:
        The profile: bytes as exact integers, seconds as medians.

    Raises:
        ProfileError: the step fails, or the model is in eval mode or planned.
        StagesError: a stage pattern matches nothing, or the step calls the model more than once.
        ChoiceError: a rule names what is not there, or an op that must not run again.
        ValueError: rules that cannot be read.
    """
    stated = None if rules is None else rules_from(rules)
    compiled = is_compiled(workload.model)
    return profiling.profile(
        workload,
        stages=stages,
        propose=choices_for if menus and not compiled else None,
        state=None if stated is None else (lambda named, outside: _choices(stated, named, outside, compiled)),
        progress=progress,
    )


def _choices(rules: Rules, named: Sequence[NamedStage], outside: Sequence[str], compiled: bool) -> Mapping[int, Choice]:
    found = stated_by(rules, named, outside).choices()
    if found and compiled:
        raise ChoiceError(
            f"rules: expected whole stages in a compiled model, got a choice of ops inside {named[min(found)].name!r}; "
            "compiled code shows no ops to choose from: state it for the whole stage, or do not compile"
        )
    return found
