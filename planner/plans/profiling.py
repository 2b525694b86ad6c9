"""Profiles a workload on one process or several ranks, and names the programs of its stages that are worth having."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from planner.distributed.alike_steps import check_alike, merged_profile
from planner.distributed.ranks import Ranks, current_ranks, together
from planner.plans.call_programs import program_menu
from planner.plans.pipeline_profile import profile_pipeline_stage, schedule_of
from planner.plans.refusals import Infeasible
from planner.plans.rules import Rule, Rules, rules_from
from planner.plans.solving import Numerics, check_numerics, find_plan, least_budget_bytes
from planner.plans.stated_plan import resolve_for
from planner.units import format_bytes, format_seconds, names_in_short, parse_bytes
from profiler.agreement import agreed
from profiler.measurement import profiling
from profiler.measurement.captured_stages import ProposeRuns
from profiler.measurement.measuring import Progress
from profiler.messages import tell
from profiler.recomputation.steps_in_pieces import NotInPieces, compared, in_pieces, of_head
from profiler.records import WHOLE_MODEL, ModulePieces, PiecesRecord, Profile
from profiler.step_graph import StepGraph, StepRuns, runs_once
from profiler.trace.divisible import COUNTS, divisible_modules
from profiler.trace.partition import Stages
from profiler.workload.compiled_forwards import is_compiled
from profiler.workload.data_parallel import states_in
from profiler.workload.steps import check_workload
from profiler.workload.workload import Workload

_FINER = 4  # times as many pieces of a head, which take less memory and more time


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
        ChoiceError: a rule names a part that does not exist, or an op that must not be recomputed.
        ValueError: unreadable rules, or an unknown value of ``numerics``.
    """
    check_workload(workload, "profile")
    ranks, schedule = current_ranks(), schedule_of(workload)
    if schedule is not None and numerics != "eager":
        raise ValueError(f"numerics: expected 'eager' in a pipeline, got {numerics!r}; leave it out")
    measure = partial(
        _measured, stages=stages, menus=menus, rules=rules, limit=limit, progress=progress, numerics=numerics
    )
    with together("profile"):
        if ranks is not None:
            ranks.check_same("profile", {"pipeline schedule": type(schedule).__name__})
        if schedule is not None:
            measured = profile_pipeline_stage(workload, schedule, measure)
        else:
            measured = _of_all_ranks(ranks, workload, measure, {"limit": limit, "stages": str(stages)})
    tell(
        "planner",
        f"profiled {measured.model_class}: unplanned peak {format_bytes(measured.unplanned_peak_bytes)}, "
        f"{format_seconds(measured.unplanned_seconds)} a step",
    )
    return measured


def profile_programs(
    workload: Workload, programs: ProposeRuns | None, *, stages: Stages = None, progress: Progress | None = None
) -> Profile:
    """Profile a workload with the programs that ``programs`` names; otherwise as ``profile``, which also says what
    is raised.

    Without ``stages`` the parts are found, and the model is never one stage.
    """
    measure = partial(profiling.profile, stages=stages, programs=programs, progress=progress)
    with together("profile"):
        return _of_all_ranks(current_ranks(), workload, measure, {})


def _of_all_ranks(
    ranks: Ranks | None, workload: Workload, measure: Callable[[Workload], Profile], same: dict[str, Any]
) -> Profile:
    """The profile of the worst rank; ``same`` are the arguments that all ranks have to give alike."""
    if ranks is None:
        return measure(workload)
    check_alike(ranks, "profile", workload)
    ranks.check_same("profile", same)
    mine = measure(workload)
    # The table of ops, which can be long, is the first rank's.
    return merged_profile(ranks.gathered(mine if ranks.rank == 0 else replace(mine, op_records=())))


def _measured(
    workload: Workload,
    *,
    stages: Stages,
    menus: bool,
    rules: Rules | Rule | Sequence[Rule] | str | Path | None,
    limit: str | int | None,
    progress: Progress | None,
    numerics: Numerics,
) -> Profile:
    """The profile that this process measures."""
    check_numerics(numerics)
    stated = None if rules is None else rules_from(rules)
    compiled = is_compiled(workload.model)
    measure = partial(
        profiling.profile,
        workload,
        programs=None if compiled else _orders_for if menus else _once if stated is not None else None,
        every_stage=stated is not None,
        progress=progress,
        limit_bytes=None if limit is None else parse_bytes(limit),
    )
    measured = measure(stages=stages)
    if stated is not None:
        resolve_for(measured, stated)
    if stages is None and stated is None and not compiled and menus:
        measured = with_best_cut(measured, lambda: measure(stages="whole"))
    if numerics != "rounding" or stated is not None or stages is not None:
        return measured
    return with_pieces(workload, measured, menus=menus, limit=limit, progress=progress)


def with_pieces(
    workload: Workload,
    measured: Profile,
    *,
    menus: bool = True,
    limit: str | int | None = None,
    progress: Progress | None = None,
) -> Profile:
    """A profile, with others in it of the same step in pieces: of its head, and of modules that keep much, too.

    Args:
        workload: left as it was found.
        measured: its profile, with ``numerics="eager"``.
        menus, limit, progress: as for ``profile``.
    """
    if is_compiled(workload.model):
        return measured
    measure = partial(
        profiling.profile,
        workload,
        programs=_orders_for if menus else None,
        every_stage=False,
        progress=progress,
        limit_bytes=None if limit is None else parse_bytes(limit),
    )
    found: list[Profile] = []

    def add(pieces: PiecesRecord, what: str, measure: Callable[[], Profile] = measure, *, lowers: bool = True) -> None:
        lowest = min((measured, *found), key=least_budget_bytes)
        least_bytes = least_budget_bytes(lowest)
        if lowers and agreed(least_bytes <= lowest.optimizer.peak_bytes):
            return None  # No pieces lower what the optimizer's step takes.
        try:
            pieces = compared(workload, pieces, frugal=measured.frugal)
        except NotInPieces as error:
            return tell("planner", f"not in pieces, {what}: {error}")
        with in_pieces(workload, pieces):
            apart = replace(measure(), pieces=pieces, op_records=())
        if not lowers or agreed(least_budget_bytes(apart) < least_bytes):
            found.append(apart)
        return None

    for head in measured.heads:
        if not found:
            add(of_head(workload, head), head.name, lowers=False)  # It may be faster, too.
    of_loss = found[0].pieces if found and found[0].pieces else PiecesRecord()
    if of_loss.head:
        finer = replace(of_loss, rows_at_once=max(1, of_loss.rows_at_once // _FINER))
        add(finer, f"{of_loss.head}, {finer.rows_at_once} rows at once")
        of_loss = found[-1].pieces or of_loss
    # Modules are found by steps that keep everything, with parameters that are there all along.
    if not (measured.frugal or states_in(workload.model)):
        inside, whole = divisible_modules(workload, of_loss.head)
        for count in COUNTS if inside else ():
            names = names_in_short([module.name for module in inside])
            add(replace(of_loss, modules=_in_so_many(inside, count)), f"{names} in {count}")
        for count in COUNTS if whole else ():
            of_call = PiecesRecord(modules=_in_so_many(whole, count))
            add(of_call, f"{WHOLE_MODEL} in {count}", partial(measure, stages="whole"))
    return replace(measured, in_pieces=tuple(found))


def _in_so_many(modules: tuple[ModulePieces, ...], count: int) -> tuple[ModulePieces, ...]:
    return tuple(replace(module, count=count) for module in modules)


def _orders_for(graph: StepGraph) -> list[StepRuns]:
    """The orders of a captured call's ops that no other one beats; each op once first, whatever it is worth."""
    once = runs_once(graph)
    return [once, *(each.runs for each in program_menu(graph) if each.runs != once)]


def _once(graph: StepGraph) -> list[StepRuns]:
    return [runs_once(graph)]


_MOST_OPS = 600  # of a forward: the programs of more ops at once take minutes to find
_FEW_OPS = 300  # a chain of stages with at most this many is tried as one stage, too, as the search is quick
_WORTH_BYTES = 32 * 2**20  # where it keeps at least this much
_SKIPPED = 0.01  # other stages are tried where later ones read more than this share of the bytes beyond the states
_BUDGETS = (0.25, 0.5, 0.75)  # of the way from the smallest budget of the parts up to the unplanned peak
_SECONDS = 1.5  # for each plan


def with_best_cut(parts: Profile, profile_whole: Callable[[], Profile]) -> Profile:
    """The profile whose plans are faster: of the parts, or of the whole model where that may be better.

    Args:
        parts: the profile with the stages that were found.
        profile_whole: measures the model as one stage; called where that may be better.
    """
    if not agreed(_may_be_better_whole(parts)):
        return parts
    whole = profile_whole()
    return whole if agreed(_is_better(whole, parts)) else parts


def _may_be_better_whole(profile: Profile) -> bool:
    """Whether the model's ops are few enough to be planned at once, and the stages form no chain or the ops are few."""
    stages = profile.stages
    ops = sum(stage.forward_ops for stage in stages)
    if profile.frugal or profile.evaluations > 1 or profile.in_flight or profile.left_out or ops > _MOST_OPS:
        return False
    if any(stage.unit_bytes or not stage.recomputable for stage in stages if stage.kind == "stage"):
        return False
    planned = [k for k, stage in enumerate(stages) if stage.kind == "stage"]
    if len(planned) < 2:
        return True
    dynamic_bytes = profile.unplanned_peak_bytes - profile.resident.total
    if ops <= _FEW_OPS and dynamic_bytes >= _WORTH_BYTES:
        return True
    apart = any(not stages[k].links for k in planned[1:])
    skipped_bytes = sum(shared.size_bytes for shared in profile.shared if shared.readers)
    return apart or skipped_bytes > _SKIPPED * dynamic_bytes


def _is_better(whole: Profile, parts: Profile) -> bool:
    """Whether plans of the whole model are faster, and fit in every budget that those of its parts fit in."""
    least, least_whole = least_budget_bytes(parts), least_budget_bytes(whole)
    if least_whole > least or all(menu.graph is None for menu in whole.menus):
        return False
    span = parts.unplanned_peak_bytes - least
    if span <= 0:
        return least_whole < least
    budgets = [least + int(part * span) for part in _BUDGETS]
    return sum(_slowdown(whole, each) for each in budgets) < sum(_slowdown(parts, each) for each in budgets)


def _slowdown(profile: Profile, budget_bytes: int) -> float:
    try:
        plan = find_plan(profile, budget_bytes, solver="rotor", offload="never", time_limit_seconds=_SECONDS)
    except Infeasible:
        return float("inf")
    return plan.slowdown
