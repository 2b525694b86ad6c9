"""Profiles a workload as users call it, and names the programs of its stages that are worth having."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from planner.plans.call_programs import program_menu
from planner.plans.cut_choice import with_best_cut
from planner.plans.rules import Rule, Rules, rules_from
from planner.plans.short_names import names_in_short
from planner.plans.solving import Numerics, check_numerics, least_budget_bytes
from planner.plans.stated_plan import resolve_for
from planner.units import parse_bytes
from profiler.agreement import agreed
from profiler.measurement import profiling
from profiler.measurement.measuring import Progress
from profiler.pieces.comparison import NotInPieces, compared, in_pieces, of_head
from profiler.progress import tell
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
    """What ``planner.profile`` does in one process, which measures by itself; arguments and errors are as there."""
    check_workload(workload, "profile")
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
