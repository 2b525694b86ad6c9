"""The body of ``planner train``: steps under a plan, what was measured, and what happened where memory ran out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import typer

from planner.cli import documents, tables
from planner.cli.interrupts import INTERRUPTED, is_pressed, say_interrupted
from planner.cli.options import TargetRequest
from planner.cli.profiling import profile_of_target
from planner.cli.report import check_report
from planner.cli.shell import (
    NO_PLAN,
    check_folder,
    complain,
    given_command,
    is_first,
    note,
    say_written,
    show,
    show_json,
    working,
)
from planner.distributed.ranks import RankError
from planner.distributed.sharding import Engine, sharded_together
from planner.explain.tables import losses_in_short
from planner.plans.plan import Plan, chain_in
from planner.plans.solving import Numerics, solve
from planner.report.command_results import measured_of_training
from planner.report.page import write_report
from planner.report.snapshot import write_snapshot
from planner.runtime.applier import Backend
from planner.runtime.model_match import PlanMismatch
from planner.training.allocator_advice import advice_on_allocator, advice_on_malloc
from planner.training.oom_report import FailureReport, failure_text
from planner.training.training import OutOfMemory, TrainingInterrupted, TrainingRun, train_planned
from planner.units import counted, format_bytes
from profiler.measurement.device_memory import has_expandable_segments, ran_out
from profiler.measurement.measuring import Progress
from profiler.target_record import TargetRecord
from profiler.workload.workload import Workload

LOSSES_SAID = 20  # lines of a long training


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Where the plan to train under comes from, a file, or a budget to profile and solve for; and what runs programs.

    Attributes:
        file: of a plan.
        budget: as text.
        backend: of the programs of captured stages.
        headroom, numerics: as for ``planner.solve``.
    """

    file: Path | None
    budget: str | None
    backend: Backend = "eager"
    headroom: str = ""
    numerics: Numerics = "eager"

    def read(self) -> Plan | None:
        """The file's plan; None where it is to be made.

        Raises:
            ValueError: not one of both is given, or the file is no plan.
        """
        if (self.file is None) == (self.budget is None):
            got = "neither" if self.file is None else "both"
            raise ValueError(f"--plan, --budget: expected one of them, got {got}; give a plan's file, or a budget")
        if self.file is not None and self.headroom:
            raise ValueError("--headroom: expected it beside --budget, got it beside --plan; solve with --headroom")
        return None if self.file is None else Plan.load(self.file)

    def made_for(self, workload: Workload, target: TargetRecord, progress: Progress) -> Plan:
        """The plan for the workload of a target, profiled and solved for."""
        assert self.budget is not None
        measured = profile_of_target(workload, target, progress, self.numerics)
        return solve(measured, self.budget, headroom=self.headroom or 0, numerics=self.numerics)


def run_train(
    wanted: PlanRequest,
    target: TargetRequest,
    build: Callable[[TargetRecord], Workload],
    *,
    steps: int,
    retries: int,
    as_json: bool,
    save_plan: Path | None = None,
    report: Path | None = None,
    snapshot: Path | None = None,
    shard: Engine | None = None,
) -> TrainingRun:
    """Train and print; write the plan that training ended with to ``save_plan``, a page on it to ``report``, and
    its predicted step to ``snapshot``.

    With ``shard``, on a rank of the default process group, whose other ranks do the same.

    Raises:
        typer.Exit: memory ran out for good, which has been said.
        Infeasible: nothing fits the budget.
        ValueError: as ``PlanRequest.read`` and ``train_planned``.
    """
    check_folder(save_plan)
    check_report(report)
    check_folder(snapshot)
    plan = wanted.read()
    if plan is not None and (report is not None or snapshot is not None):
        chain_in(plan, str(wanted.file))  # Refused before training, not after.
    chosen = target.chosen(None if plan is None else plan.target, wanted.file)
    with working() as progress:
        workload = build(chosen)
        if shard is not None:
            workload = sharded_together(workload, shard)
        plan = wanted.made_for(workload, chosen, progress) if plan is None else plan
    try:
        with working() as progress:
            progress("measure a step", 0, 1)
            run = train_planned(
                workload,
                plan,
                steps=steps,
                backend=wanted.backend,
                retries=retries,
                on_failure=_say,
                on_step=_loss_told(steps),
            )
    except TrainingInterrupted as interrupt:
        if as_json:
            show_json(documents.interrupted_training_document(interrupt))
        else:
            show(tables.facts([("losses", losses_in_short(interrupt.losses))]))
        say_interrupted(f"interrupted after {len(interrupt.losses)} of {counted(steps, 'step')}")
        raise typer.Exit(INTERRUPTED) from interrupt
    except OutOfMemory as failure:
        if as_json:
            show_json(documents.lost_training_document(plan, failure))
        complain(f"out of memory: {failure}")
        if save_plan is not None:
            complain(f"not written: {save_plan}: no plan came to the end of training")
        raise typer.Exit(NO_PLAN) from failure
    except PlanMismatch as mismatch:
        if target.text is None or plan.target is None:
            raise
        made_of = f"{wanted.file} was made of {plan.target.arguments}, which is trained where TARGET is left out"
        raise ValueError(f"{mismatch} ({made_of})") from mismatch
    except RankError as failure:
        if not ran_out(failure):
            raise
        if as_json:
            show_json(documents.failed_rank_document(plan, failure))
        complain(f"out of memory: {failure}")
        raise typer.Exit(NO_PLAN) from failure
    if save_plan is not None and is_first():
        run.plan.save(save_plan)
    advice = _allocator_advice(run)
    if as_json:
        show_json(documents.training_document(run, advice))
    else:
        show(tables.training_report(run, advice))
        if wanted.file is None:
            show("", _answer(chosen, run))
    say_written(save_plan)
    if report is not None and is_first():
        measured = measured_of_training(run)
        plan_file = wanted.file or Path("plan.json")
        write_report(run.plan, report, measured=measured, commands=[given_command()], plan_file=plan_file)
        say_written(report)
    if snapshot is not None and is_first():
        write_snapshot(run.plan, snapshot)
        say_written(snapshot)
    return run


def backend_named(name: str) -> Backend:
    """The backend that ``--backend`` names; raises ValueError where there is no such."""
    for backend in get_args(Backend):
        if backend == name:
            return backend
    raise ValueError(f"--backend: expected {' or '.join(get_args(Backend))}, got {name!r}; use one of them")


def _answer(target: TargetRecord, run: TrainingRun) -> str:
    """In one sentence."""
    plan = run.plan
    does = "trains" if run.measured_peak_bytes <= plan.budget_bytes else "does not train"
    slowdown = run.measured_seconds / plan.unplanned_seconds if plan.unplanned_seconds else 1.0
    return (
        f"{target.text} {does} within {format_bytes(plan.budget_bytes)}: it takes "
        f"{format_bytes(run.measured_peak_bytes)} in place of {format_bytes(plan.unplanned_peak_bytes)}, and "
        f"{slowdown:.2f} times the time"
    )


def _loss_told(steps: int) -> Callable[[int, float], None]:
    """Says a step's loss, of many steps that of every k-th."""
    every = max(1, steps // LOSSES_SAID)

    def told(step: int, loss: float) -> None:
        if is_pressed():  # An interrupt that code in the step has swallowed.
            raise KeyboardInterrupt
        if is_first() and (step % every == 0 or step in (1, steps)):
            note(f"step {step} of {steps}: loss {loss:.6g}")

    return told


def _say(failure: FailureReport) -> None:
    complain(f"out of memory: {failure_text(failure)}")


def _allocator_advice(run: TrainingRun) -> str:
    expandable = run.reserved_bytes is not None and has_expandable_segments()
    advice = advice_on_allocator(run.measured_peak_bytes, run.reserved_bytes, expandable=expandable)
    return advice or advice_on_malloc(run.measured_peak_bytes, run.faulted_bytes)
