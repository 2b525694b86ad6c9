"""The commands: profile, solve, pareto, train, compare, estimate, calibrate, max-batch, show, advise and demo.

What a command needs is imported when it runs, so that help is there at once, and work on files loads no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner import __version__
from planner.cli.arguments import ManyValues, PlannerGroup
from planner.cli.capacity import advise_command, max_batch_command
from planner.cli.estimate import calibrate_command, estimate_command
from planner.cli.options import (
    PARETO_SECONDS,
    AsJson,
    BudgetText,
    Device,
    OffloadText,
    Settings,
    SourceFile,
    TargetArgument,
    TimeLimit,
    offload_of,
    out_option,
)
from planner.cli.output import Output, check_folder, output_files
from planner.cli.profiling import profile_command
from planner.cli.several_ranks import workload_of
from planner.cli.show_file import show_command
from planner.cli.solve import search_seconds, solve_command
from planner.cli.train import train_command
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
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print only errors on stderr.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print a line for each part of the work.")] = False,
    traceback: Annotated[
        bool,
        typer.Option(
            "--traceback", help="Print the full traceback of an error. Like -q and -v, also allowed after the command."
        ),
    ] = False,
) -> None:
    """Print the version, or help where no command is named."""
    out: Output = context.obj
    out.quiet, out.verbose, out.traceback = quiet, verbose, traceback
    if version:
        out.show(f"planner {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        out.show(context.get_help())


app.command("profile", cls=ManyValues)(profile_command)
app.command("solve", cls=ManyValues)(solve_command)


@app.command("pareto", cls=ManyValues)
def pareto_command(
    context: typer.Context,
    file: SourceFile,
    time_limit: TimeLimit = None,
    offload: OffloadText = None,
    output: Annotated[
        list[Path] | None,
        out_option("Write the picture, .png, .svg or .pdf, or the table of all points, .csv; may be repeated."),
    ] = None,
    as_json: AsJson = False,
    csv: Annotated[Path | None, typer.Option(hidden=True, help="-o FILE.csv.")] = None,
) -> None:
    """Draw the memory/time curves of the quick solvers and of auto, the unplanned point and the lower bound.

    Curves of a graph take 45 seconds in all unless --time-limit says otherwise.
    """
    from planner.cli import documents
    from planner.cli.solutions import title_of
    from planner.cli.tables import frontier_report
    from planner.plans.pareto_curves import pareto
    from planner.plans.sources import read_source
    from profiler.json_files import write_whole

    out: Output = context.obj
    files = output_files(output, "picture", "table")
    table = csv or files.table
    check_folder(csv)
    request = offload_of(offload)
    source = read_source(file)
    with out.searching(search_seconds(source, time_limit, PARETO_SECONDS)):
        frame = pareto(source, time_limit_seconds=time_limit, offload=request or "auto")
    if why := frame.attrs.get("no_offload"):
        out.note(f"without offload: {why}")
    if frame.attrs.get("left_out"):
        out.note(f"left out: {', '.join(frame.attrs['left_out'])}, for which a larger --time-limit has room")
    title = title_of(source, file)
    if table is not None:
        write_whole(table, frame.to_csv(index=False))
    if files.picture is not None:
        from planner.explain.pareto_plot import draw_pareto

        draw_pareto(frame, files.picture, title=title)
    out.answer(documents.frontier_document(frame, title), frontier_report(frame, title))
    out.say_written(table, files.picture)


app.command("train", cls=ManyValues)(train_command)


@app.command("compare", cls=ManyValues)
def compare_command(
    context: typer.Context,
    target: TargetArgument,
    budget: BudgetText,
    settings: Settings = None,
    device: Device = None,
    output: Annotated[list[Path] | None, out_option("Write a page that explains the result, .html.")] = None,
    as_json: AsJson = False,
) -> None:
    """Apply every solver's plan for one budget in turn: predicted and measured peaks and times side by side."""
    from planner.cli import documents
    from planner.cli.tables import comparison_report
    from planner.plans.profiling import profile
    from planner.plans.refusals import Infeasible
    from planner.report.command_results import section_of_comparison
    from planner.training.solver_comparison import compare_solvers

    out: Output = context.obj
    files = output_files(output, "page")
    with out.working() as progress:
        workload = workload_of(TargetRecord.given(target, settings, device), out)
        measured = profile(workload, progress=progress)
        budget_bytes = parse_bytes(budget, whole_bytes=measured.unplanned_peak_bytes)
        rows = compare_solvers(workload, measured, budget_bytes, progress=progress)
    out.answer(documents.comparison_document(measured, budget_bytes, rows), comparison_report(rows, budget_bytes))
    title = f"Solvers for {measured.model_class}"
    out.write_result(files.page, title, lambda: section_of_comparison(rows, budget_bytes))
    least = documents.least_demanding(rows)
    if least is not None:
        raise Infeasible(
            proven=documents.none_can_fit(rows),
            minimum_budget_bytes=least.minimum_budget_bytes or 0,
            reason=least.reason or "",
            solver="auto",
            budget_bytes=budget_bytes,
        )


app.command("estimate", cls=ManyValues)(estimate_command)
app.command("calibrate")(calibrate_command)
app.command("max-batch", cls=ManyValues)(max_batch_command)
app.command("show", cls=ManyValues)(show_command)
app.command("advise", cls=ManyValues)(advise_command)


@app.command("demo")
def demo_command(context: typer.Context, as_json: AsJson = False) -> None:
    """Profile, plan and train a GPT-2 on the CPU, and draw its Pareto curve."""
    from planner.cli.demo import run_demo

    out: Output = context.obj
    found = run_demo(out)
    if as_json:
        out.show_json(found)
