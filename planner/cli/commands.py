"""The command line: profile, solve, pareto, train, fit, compare, max-batch, advise, show, report, explain and demo.

What a command needs is imported when it runs: help is there at once, and work on files loads no torch.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from planner import __version__
from planner.cli.advise import advise_command
from planner.cli.max_batch import max_batch_command
from planner.cli.options import (
    COMPARE_SECONDS,
    PARETO_SECONDS,
    AllowRounding,
    AsJson,
    BudgetText,
    Device,
    DevicesPerLink,
    HeadroomText,
    HostMemoryOption,
    LinkGbps,
    Measure,
    NoOffload,
    OffloadOnly,
    OptionalTarget,
    ReportFile,
    Settings,
    SnapshotFile,
    TargetArgument,
    TargetRequest,
    Trust,
    budget_callback,
    numerics_of,
    offload_options,
    time_limit_callback,
)
from planner.cli.profiling import profile_command
from planner.cli.report import check_report, write_result
from planner.cli.several_ranks import ShardOption, engine_named, on_ranks, workload_of
from planner.cli.shell import (
    ManyValues,
    PlannerGroup,
    check_folder,
    note,
    say_written,
    searching,
    set_verbosity,
    show,
    show_json,
    working,
)
from planner.cli.solve import solve_command
from planner.units import parse_bytes
from profiler.target_record import TargetRecord

app = typer.Typer(
    cls=PlannerGroup,
    help="Profile a PyTorch model, plan its training step under a memory budget, and train under the plan.",
    invoke_without_command=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def without_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "-q",
            "--quiet",
            help="Nothing on stderr but errors. This option and the next two may follow a command, too.",
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="A line for each part of the work.")] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Every line that an error came through, not the target's own alone.")
    ] = False,
) -> None:
    """Print the version, or help where no command is named."""
    set_verbosity(quiet=quiet, verbose=verbose, traceback=traceback)
    if version:
        show(f"planner {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        show(context.get_help())


app.command("profile", cls=ManyValues)(profile_command)
app.command("solve", cls=ManyValues)(solve_command)


@app.command("pareto", cls=ManyValues)
def pareto_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile, a chain problem or a graph problem.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Picture: .png, .svg or .pdf.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Table of every point.")] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            callback=time_limit_callback, help=f"Seconds for all searches together; {PARETO_SECONDS:g} for a graph."
        ),
    ] = None,
    no_offload: NoOffload = False,
    offload_only: OffloadOnly = False,
    link_gbps: LinkGbps = None,
    devices_per_link: DevicesPerLink = None,
    host_memory: HostMemoryOption = None,
    as_json: AsJson = False,
) -> None:
    """Draw every solver's memory/time curve, the unplanned point and the lower bound."""
    from planner.cli import documents
    from planner.cli.comparison_tables import frontier_report
    from planner.cli.problem_solving import search_seconds, title_of
    from planner.pictures import check_picture
    from planner.plans import problem_files
    from planner.plans.pareto_curves import pareto
    from profiler.json_files import write_whole

    check_folder(output)
    check_folder(csv)
    if output is not None:
        check_picture(output)
    offload_request = offload_options(no_offload, link_gbps, devices_per_link, host_memory, offload_only=offload_only)
    source = problem_files.read_source(file)
    with contextlib.redirect_stdout(sys.stderr), searching(search_seconds(source, time_limit, PARETO_SECONDS)):
        frame = pareto(source, time_limit_seconds=time_limit, offload=offload_request or "auto")
    _say_without(frame.attrs.get("no_offload"))
    if frame.attrs.get("left_out"):
        note(f"left out: {', '.join(frame.attrs['left_out'])}; they come to their turn with a larger --time-limit")
    title = title_of(source, file)
    if csv is not None:
        write_whole(csv, frame.to_csv(index=False))
    if output is not None:
        from planner.explain.pareto_plot import draw_pareto

        draw_pareto(frame, output, title=title)
    if as_json:
        show_json(documents.frontier_document(frame, title))
    else:
        show(frontier_report(frame, title))
    say_written(csv, output)


@app.command("train", cls=ManyValues)
def train_command(
    target: OptionalTarget = None,
    plan: Annotated[Path | None, typer.Option(help="The plan to apply.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="B",
            callback=budget_callback,
            help="Instead of a plan: profile, and solve for this budget, first.",
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            metavar="eager|inductor",
            help="How the programs of captured stages run: op by op, or compiled by Inductor.",
        ),
    ] = "eager",
    headroom: HeadroomText = None,
    allow_rounding: AllowRounding = False,
    settings: Settings = None,
    device: Device = None,
    trust: Trust = False,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 3,
    retry: Annotated[
        int,
        typer.Option(min=0, metavar="[N]", help="Where memory runs out, try up to N smaller plans (3 without N)."),
    ] = 0,
    save_plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the plan that training ended with: after a retry another."),
    ] = None,
    shard: ShardOption = None,
    report: ReportFile = None,
    snapshot: SnapshotFile = None,
    as_json: AsJson = False,
) -> None:
    """Train under a plan, or profile and solve for a budget first; check predictions against measurements.

    Under torchrun on several ranks, each with a batch of its own; the first one prints.
    """
    engine = engine_named(shard)
    from planner.cli.train import PlanRequest, backend_named, run_train

    with on_ranks(engine):
        run_train(
            PlanRequest(
                file=plan,
                budget=budget,
                backend=backend_named(backend),
                headroom=headroom or "",
                numerics=numerics_of(allow_rounding),
            ),
            TargetRequest(text=target, settings=settings, device=device, trust=trust),
            lambda chosen: workload_of(chosen, engine),
            steps=steps,
            retries=retry,
            as_json=as_json,
            save_plan=save_plan,
            report=report,
            snapshot=snapshot,
            shard=engine,
        )


@app.command("compare", cls=ManyValues)
def compare_command(
    target: TargetArgument,
    budget: BudgetText,
    settings: Settings = None,
    device: Device = None,
    time_limit: Annotated[
        float, typer.Option(callback=time_limit_callback, help="Seconds for ilp and auto.")
    ] = COMPARE_SECONDS,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Apply every solver's plan for one budget in turn: predicted and measured peaks and times side by side."""
    from planner.cli import documents
    from planner.cli.comparison_tables import comparison_report
    from planner.plans.profiling import profile
    from planner.plans.refusals import Infeasible
    from planner.report.command_results import section_of_comparison
    from planner.training.solver_comparison import compare_solvers

    check_report(report)
    with working() as progress:
        workload = workload_of(TargetRecord.given(target, settings, device))
        measured = profile(workload, progress=progress)
        budget_bytes = parse_bytes(budget, whole_bytes=measured.unplanned_peak_bytes)
        rows = compare_solvers(workload, measured, budget_bytes, time_limit_seconds=time_limit, progress=progress)
    if as_json:
        show_json(documents.comparison_document(measured, budget_bytes, rows))
    else:
        show(comparison_report(rows, budget_bytes))
    title = f"Solvers for {measured.model_class}"
    write_result(report, title, lambda: section_of_comparison(rows, budget_bytes))
    least = documents.least_demanding(rows)
    if least is not None:
        raise Infeasible(
            proven=documents.none_can_fit(rows),
            minimum_budget_bytes=least.minimum_budget_bytes or 0,
            reason=least.reason or "",
            solver="auto",
            budget_bytes=budget_bytes,
        )


app.command("max-batch", cls=ManyValues)(max_batch_command)


@app.command("show", cls=ManyValues)
def show_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A plan or a solution that solve wrote; or a profile.")],
    ops: Annotated[bool, typer.Option("--ops", help="Every op of every kind of stage, not the largest alone.")] = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Picture of the bytes alive over a step: .png, .svg or .pdf.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Table of the same, action by action.")] = None,
    peak_csv: Annotated[Path | None, typer.Option(help="Table of what is alive at the peak.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Page that explains the plan, without network or model: .html.")
    ] = None,
    snapshot: SnapshotFile = None,
    measure: Measure = None,
    settings: Settings = None,
    device: Device = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Print a plan: its stages, what happens to their ops and why, and what is alive at its peak.

    With --timeline and --csv: the bytes alive over one step, without the plan and with it. With --html: one file to
    read in a browser, with the answer, the memory over the step, plans for other budgets, and what else would help.
    """
    from planner.cli.show_file import ShowRequest, run_show

    if measure is None and (settings or device):
        raise ValueError("--set, --device: expected them beside --measure, got it missing; add it, or leave them out")
    target = TargetRequest(text=measure, settings=settings, device=device, option="--measure", trust=trust)
    run_show(
        file,
        ShowRequest(
            ops=ops,
            timeline=timeline,
            csv=csv,
            peak_csv=peak_csv,
            html=html,
            snapshot=snapshot,
            target=None if measure is None else target,
            as_json=as_json,
        ),
    )


app.command("advise", cls=ManyValues)(advise_command)


@app.command("demo")
def demo_command(as_json: AsJson = False) -> None:
    """Profile, plan and train a GPT-2 on the CPU, and draw its Pareto curve."""
    from planner.cli.demo import run_demo

    found = run_demo()
    if as_json:
        show_json(found)


def _say_without(why: str | None) -> None:
    if why:
        note(f"without offload: {why}")
