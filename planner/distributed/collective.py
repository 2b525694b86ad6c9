"""Profiling, applying and measuring on several ranks: each measures, all know the worst, and all do the same."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from planner.distributed.alike_steps import check_alike
from planner.distributed.merging import merged_measurement, merged_profile
from planner.distributed.pipeline_profile import profile_pipeline_stage
from planner.distributed.pipeline_schedule import schedule_of
from planner.distributed.ranks import Ranks, current_ranks
from planner.plans import profiling
from planner.plans.plan import Plan
from planner.plans.rules import Rule, Rules
from planner.plans.solving import Numerics
from planner.runtime import applier
from planner.runtime.applier import Backend, Handle, handle_of
from planner.runtime.model_match import given_plan
from planner.units import format_bytes, format_seconds
from profiler.measurement import step_measurement
from profiler.measurement.captured_stages import ProposeRuns
from profiler.measurement.measuring import Progress
from profiler.measurement.profiling import profile as measured_profile
from profiler.measurement.step_measurement import Measurement
from profiler.progress import tell
from profiler.records import Profile
from profiler.trace.partition import Stages
from profiler.workload.steps import check_workload
from profiler.workload.workload import Workload


def profile(
    workload: Workload,
    *,
    stages: Stages = None,
    menus: bool = True,
    rules: Rules | Rule | Sequence[Rule] | str | Path | None = None,
    limit: str | int | None = None,
    progress: Progress | None = None,
    numerics: Numerics = "eager",
) -> Profile:
    """Measure one training step of a workload on the device it is on.

    Runs about ten steps, and with ``menus`` about five more, in which captured
    stages run as programs. Parameters, buffers, gradients, optimizer states, random
    states and train/eval flags are as before afterwards, also after an exception.

    Where ``torch.distributed`` is initialised for several ranks, all of them call this, each with its own part of the
    batch: each measures, and all get the profile of the worst rank, with the largest bytes and seconds of any. Where
    the workload's own step runs a schedule of ``torch.distributed.pipelining``, each rank gets that of its own stage.

    Args:
        workload: the training step; its model in training mode.
        stages: None to find stages automatically; "whole" for the model's call as one stage; otherwise module names,
            glob patterns or module classes.
        menus: capture stages as graphs, so that plans decide op by op; else a stage is kept or recomputed as a whole.
        rules: a manual plan, or the path of its file. Profiling checks that it fits the model, and captures
            stages that save little as well.
        limit: bytes (``"8GiB"``) that no step of profiling takes more than, for a step that does not fit: a few stages
            are kept at a time while the others run again, and what a plain step takes is put together from that
            (``Profile.frugal``). Without one, profiling does so by itself where a plain step runs out of memory, but
            not on several ranks: there a step that runs out on one breaks off on all.
        progress: called as ``progress(what, done, total)`` before each run.
        numerics: ``"rounding"`` also measures the step in pieces: its head with the loss, where the head's output is
            large, and modules that keep much (``Profile.in_pieces``): plans that need less, with sums of another order.
            It takes two to four times as many steps.

    Returns:
        The profile: bytes as exact integers, seconds as medians.

    Raises:
        ProfileError: the step fails, does not fit in any way, or the model is in eval mode or planned.
        RankError: it failed on one rank, a rank did not answer, or ranks have different models or shapes of batches.
        StagesError: a stage pattern matches nothing, or the step calls the model more than once.
        ChoiceError: a rule names what is not there, or an op that must not run again.
        ValueError: rules that cannot be read, or no such kind of numerics.
    """
    check_workload(workload, "profile")
    settings: dict[str, Any] = {
        "stages": stages,
        "menus": menus,
        "rules": rules,
        "limit": limit,
        "progress": progress,
        "numerics": numerics,
    }
    measured = _profiled(workload, settings)
    tell(
        "planner",
        f"profiled {measured.model_class}: unplanned peak {format_bytes(measured.unplanned_peak_bytes)}, "
        f"{format_seconds(measured.unplanned_seconds)} a step",
    )
    return measured


def _profiled(workload: Workload, settings: dict[str, Any]) -> Profile:
    ranks, schedule = current_ranks(), schedule_of(workload)
    if schedule is not None and settings["numerics"] != "eager":
        raise ValueError(f"numerics: expected 'eager' in a pipeline, got {settings['numerics']!r}; leave it out")
    if ranks is None:
        if schedule is not None:
            return profile_pipeline_stage(workload, schedule, **settings)
        return profiling.profile(workload, **settings)
    with ranks.together("profile"):
        ranks.check_same("profile", {"pipeline schedule": type(schedule).__name__})
        if schedule is not None:
            return profile_pipeline_stage(workload, schedule, **settings)
        check_alike(ranks, "profile", workload)
        ranks.check_same("profile", {"limit": settings["limit"], "stages": str(settings["stages"])})
        return _of_all(ranks, profiling.profile(workload, **settings))


def profile_programs(
    workload: Workload, programs: ProposeRuns | None, *, stages: Stages = None, progress: Progress | None = None
) -> Profile:
    """A profile with the programs that this names, as ``profile`` otherwise; raises as it does.

    Without ``stages`` it is of the parts that are found.
    """
    ranks = current_ranks()
    if ranks is None:
        return measured_profile(workload, stages=stages, programs=programs, progress=progress)
    with ranks.together("profile"):
        check_alike(ranks, "profile", workload)
        return _of_all(ranks, measured_profile(workload, stages=stages, programs=programs, progress=progress))


def _of_all(ranks: Ranks, mine: Profile) -> Profile:
    # The table of ops, which can be long, is the first rank's.
    return merged_profile(ranks.gathered(mine if ranks.rank == 0 else replace(mine, op_records=())))


def apply(
    model: nn.Module,
    plan: Plan | str | Path,
    *,
    watch: bool | None = None,
    backend: Backend = "eager",
) -> Handle:
    """Install ``plan`` on ``model``, in place and reversibly.

    Only ``forward`` is wrapped, of the model and of recomputed stages: the module tree, names, state_dict and hooks
    stay as they are. The plan acts in training mode with gradients enabled; under ``no_grad`` and in eval mode the
    model runs as without it.

    Where ``torch.distributed`` is initialised for several ranks, all of them call this, with one plan; in a pipeline
    with the plan of the rank's own stage.

    Args:
        model: the model that was profiled, or one with the same stages; also where it was compiled, or wrapped by
            DistributedDataParallel or fully_shard since.
        plan: from ``planner.solve`` or ``Plan.load``, or the path of its file.
        watch: take the peak of the first steps, from one update to the next, and say once where it is above the
            budget, by how much and what holds it. None does so on CUDA, where it is free; on the CPU the profiler runs
            for two steps. That a loop holds gradients or outputs which the plan does not count on is said in any case.
        backend: how the programs of captured stages run: ``"eager"`` runs the ops as they are; ``"inductor"`` has
            Inductor compile them, with its numbers, and a peak near the predicted one. It needs a C++ compiler on the
            CPU.

    Returns:
        A handle with ``remove()``; also a context manager.

    Raises:
        PlanMismatch: stage names, parameter shapes, types or ops differ. So says the model's forward where it runs
            under another autocast or with other shapes than the profiled step, or its parameters have become others.
        RankError: ranks apply different plans (of another ``fingerprint``), or it failed on one of them.
        UnsupportedPlan: the plan's schedule cannot be carried out.
        ValueError: another plan is applied already, an argument is of another kind, the file is no plan,
            checkpointing of the model's own is switched on, or there is no such backend.
    """
    ranks = current_ranks()
    if ranks is None:
        return applier.apply(model, plan, watch=watch, backend=backend)
    with contextlib.ExitStack() as undo:
        with ranks.together("apply"):
            given = given_plan(plan)
            if not given.in_flight:  # Those of a pipeline's ranks are for different stages.
                ranks.check_same("apply", {"plan": given.fingerprint})
            handle = applier.apply(model, given, watch=watch, backend=backend)
            undo.callback(handle.remove)  # It may have failed on another rank.
        undo.pop_all()
    return handle


def measure(workload: Workload, *, repeats: int = 3) -> Measurement:
    """Measure one training step as it runs now, with whatever plan is applied.

    The workload is left as it was found. Runs one step to warm up, one under
    the memory meter and ``repeats`` timed ones.

    Where ``torch.distributed`` is initialised for several ranks, all of them call this: the peak and the seconds are
    those of the worst rank, and ``rank_peak_bytes`` has the peak of each.

    Raises:
        ProfileError: the step fails.
        RankError: it failed on one rank, a rank did not answer, or ranks have different models or shapes of batches.
        ValueError: ``repeats`` is below one.
    """
    check_workload(workload, "measure")
    ranks, handle = current_ranks(), handle_of(workload.model)
    with contextlib.nullcontext() if handle is None else handle.outside_loop():
        return _measured(workload, repeats, ranks)


def _measured(workload: Workload, repeats: int, ranks: Ranks | None) -> Measurement:
    if ranks is None:
        return step_measurement.measure(workload, repeats=repeats)
    with ranks.together("measure"):
        if schedule_of(workload) is None:
            check_alike(ranks, "measure", workload)
        ranks.check_same("measure", {"repeats": repeats})
        return merged_measurement(ranks.gathered(step_measurement.measure(workload, repeats=repeats)), ranks.rank)
