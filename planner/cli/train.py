"""The command ``train``: steps under a plan, what was measured, and what happened where memory ran out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.arguments import NO_PLAN
from planner.cli.interrupts import INTERRUPTED
from planner.cli.options import (
    AllowRounding,
    AsJson,
    Device,
    HeadroomText,
    OptionalBudget,
    OptionalTarget,
    Settings,
    ShardOption,
    TargetRequest,
    Trust,
    numerics_of,
    out_option,
)
from planner.cli.output import Output, OutputFiles, output_files
from planner.cli.several_ranks import engine_named, on_ranks, workload_of
from planner.units import counted, format_bytes

if TYPE_CHECKING:
    from planner.distributed.sharding import Engine
    from planner.plans.solving import Numerics
    from planner.runtime.applier import Backend
    from planner.training.training import TrainingRun
    from profiler.target_record import TargetRecord

LOSSES_SAID = 20  # lines of a long training


def train_command(
    context: typer.Context,
    target: OptionalTarget = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Train under this plan.")] = None,
    budget: OptionalBudget = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Training steps.")] = 3,
    settings: Settings = None,
    device: Device = None,
    shard: ShardOption = None,
    backend: Annotated[
        str,
        typer.Option(
            metavar="eager|inductor", help="Run the programs of captured stages op by op, or compiled by Inductor."
        ),
    ] = "eager",
    headroom: HeadroomText = None,
    allow_rounding: AllowRounding = False,
    retry: Annotated[
        int,
        typer.Option(
            min=0, metavar="[N]", help="If memory runs out, go on with a smaller plan, at most N times (3 without N)."
        ),
    ] = 0,
    trust: Trust = False,
    output: Annotated[
        list[Path] | None,
        out_option(
            "Write the plan that training ended with, .json; a page that explains it, .html; or its predicted step for "
            "pytorch.org/memory_viz, .pickle. May be repeated."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train for some steps, and check predictions against measurements.

    With --plan, train under that plan; with --budget, first profile the model and solve for a plan. A plan from planner
    estimate is first checked by a step; if that exceeds the budget here, a plan made from measurements replaces it.

    Under torchrun, each rank trains on its own batch, and only the first rank prints.
    """
    out: Output = context.obj
    engine = engine_named(shard)
    if backend not in ("eager", "inductor"):
        raise ValueError(f"--backend: expected eager or inductor, got {backend!r}; use one of them")
    with on_ranks(engine, out):
        _run(
            out,
            TargetRequest(text=target, settings=settings, device=device, trust=trust),
            plan,
            budget,
            output_files(output, "json", "page", "snapshot"),
            backend=backend,
            headroom=headroom,
            numerics=numerics_of(allow_rounding),
            steps=steps,
            retries=retry,
            engine=engine,
        )


def _run(
    out: Output,
    target: TargetRequest,
    file: Path | None,
    budget: str | None,
    files: OutputFiles,
    *,
    backend: Backend,
    headroom: str | None,
    numerics: Numerics,
    steps: int,
    retries: int,
    engine: Engine | None,
) -> None:
    """Train and print, and write the plan, the page and the snapshot that are asked for.

    With ``engine``, on a rank of the default process group, whose other ranks do the same.

    Raises:
        typer.Exit: memory ran out for good, or Ctrl-C was pressed, which has been said.
        Infeasible: nothing fits the budget.
        ValueError: not one of plan and budget is given, the file is no plan, or as ``train_planned``.
    """
    from planner.cli import documents, tables
    from planner.cli.profiling import profile_of_target
    from planner.distributed.ranks import RankError
    from planner.distributed.sharding import sharded_together
    from planner.explain.tables import losses_in_short
    from planner.plans.plan import Plan, chain_in
    from planner.plans.solving import solve
    from planner.runtime.plan_checks import PlanMismatch
    from planner.training.oom_report import failure_text
    from planner.training.training import OutOfMemory, TrainingInterrupted, train_planned
    from planner.training.verification import corrected_here
    from profiler.measurement.device_memory import ran_out

    if (file is None) == (budget is None):
        got = "neither" if file is None else "both"
        raise ValueError(f"--plan, --budget: {got} of them is given; give a plan's file or a budget to solve for")
    if file is not None and headroom is not None:
        raise ValueError("--headroom: it has no effect on a plan that is solved already; use planner solve --headroom")
    plan = None if file is None else Plan.load(file)
    if plan is not None and (files.page or files.snapshot):
        chain_in(plan, str(file))  # Refused before training, not after.
    chosen = target.chosen(None if plan is None else plan.target, file)
    with out.working() as progress:
        workload = workload_of(chosen, out, engine)
        if engine is not None:
            workload = sharded_together(workload, engine)
        if plan is None:
            assert budget is not None
            measured = profile_of_target(workload, chosen, progress, numerics)
            plan = solve(measured, budget, headroom=headroom or 0, numerics=numerics)
        elif plan.estimate is not None:
            estimated, plan = plan, corrected_here(workload, plan, progress=progress)
            if plan is not estimated:
                out.note("the estimated plan does not keep its budget here: another was made from measurements")
    try:
        with out.working() as progress:
            progress("measure a step", 0, 1)
            run = train_planned(
                workload,
                plan,
                steps=steps,
                backend=backend,
                retries=retries,
                on_failure=lambda failure: out.complain(f"out of memory: {failure_text(failure)}"),
                on_step=_loss_told(out, steps),
            )
    except TrainingInterrupted as interrupt:
        losses = tables.facts([("losses", losses_in_short(interrupt.losses))])
        out.answer(documents.interrupted_training_document(interrupt), losses)
        out.ctrl_c.say(f"interrupted after {len(interrupt.losses)} of {counted(steps, 'step')}")
        raise typer.Exit(INTERRUPTED) from interrupt
    except OutOfMemory as failure:
        if out.as_json:
            out.show_json(documents.lost_training_document(plan, failure))
        out.complain(f"out of memory: {failure}")
        if files.json is not None:
            out.complain(f"not written: {files.json}: no plan came to the end of training")
        raise typer.Exit(NO_PLAN) from failure
    except PlanMismatch as mismatch:
        if target.text is None or plan.target is None:
            raise
        made_of = f"{file} was made of {plan.target.arguments}, which is trained where TARGET is left out"
        raise ValueError(f"{mismatch} ({made_of})") from mismatch
    except RankError as failure:
        if not ran_out(failure):
            raise
        if out.as_json:
            out.show_json(documents.failed_rank_document(plan, failure))
        out.complain(f"out of memory: {failure}")
        raise typer.Exit(NO_PLAN) from failure
    advice = _allocator_advice(run)
    answer = ["", _answer(chosen, run)] if file is None else []
    out.answer(documents.training_document(run, advice), tables.training_report(run, advice), *answer)
    if out.is_first:
        _write(out, run, files, file)


def _write(out: Output, run: TrainingRun, files: OutputFiles, plan_file: Path | None) -> None:
    from planner.report.command_results import measured_of_training
    from planner.report.page import write_report
    from planner.report.snapshot import write_snapshot

    if files.json is not None:
        run.plan.save(files.json)
    if files.page is not None:
        write_report(
            run.plan,
            files.page,
            measured=measured_of_training(run),
            commands=[out.command],
            plan_file=plan_file or files.json or Path("plan.json"),
        )
    if files.snapshot is not None:
        write_snapshot(run.plan, files.snapshot)
    out.say_written(*files.all)


def _answer(target: TargetRecord, run: TrainingRun) -> str:
    """Whether the model trains within the budget, in one sentence."""
    plan = run.plan
    does = "trains" if run.measured_peak_bytes <= plan.budget_bytes else "does not train"
    slowdown = run.measured_seconds / plan.unplanned_seconds if plan.unplanned_seconds else 1.0
    return (
        f"{target.text} {does} within {format_bytes(plan.budget_bytes)}: it takes "
        f"{format_bytes(run.measured_peak_bytes)} in place of {format_bytes(plan.unplanned_peak_bytes)}, and "
        f"{slowdown:.2f} times the time"
    )


def _loss_told(out: Output, steps: int) -> Callable[[int, float], None]:
    """Says a step's loss, of many steps that of every k-th."""
    every = max(1, steps // LOSSES_SAID)

    def told(step: int, loss: float) -> None:
        if out.ctrl_c.pressed:  # An interrupt that code in the step has swallowed.
            raise KeyboardInterrupt
        if out.is_first and (step % every == 0 or step in (1, steps)):
            out.note(f"step {step} of {steps}: loss {loss:.6g}")

    return told


def _allocator_advice(run: TrainingRun) -> str:
    from planner.training.allocator_advice import advice_on_allocator, advice_on_malloc
    from profiler.measurement.device_memory import has_expandable_segments

    expandable = run.reserved_bytes is not None and has_expandable_segments()
    advice = advice_on_allocator(
        run.measured_peak_bytes, run.reserved_bytes, expandable=expandable, cache_flushes=run.cache_flushes
    )
    return advice or advice_on_malloc(run.measured_peak_bytes, run.faulted_bytes)
