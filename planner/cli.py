"""The command line: profile, solve, pareto, train, compare, show and demo."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from planner import Infeasible, Plan, Profile, Workload, chain_files, curves, documents, plots, report
from planner.cli_demo import run_demo
from planner.cli_shell import Face, ManyValues, check_folder, note, show, show_json, working
from planner.comparison import ILP_SECONDS, compare_solvers
from planner.plan import FORMAT as PLAN_FORMAT
from planner.plan import VERSION as PLAN_VERSION
from planner.planning import solve
from planner.sizes import format_bytes, parse_bytes
from planner.targets import load_target, parse_settings
from planner.training import train_planned
from profiler.files import read_document, write_document, write_whole
from profiler.profiling import profile
from profiler.records import FORMAT as PROFILE_FORMAT
from profiler.records import VERSION as PROFILE_VERSION
from solvers import Chain, solver_names
from solvers.chain import FORMAT as CHAIN_FORMAT
from solvers.chain import VERSION as CHAIN_VERSION

app = typer.Typer(
    cls=Face,
    help="Profile a PyTorch model, plan its training step under a memory budget, and train under the plan.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Target = Annotated[str, typer.Argument(metavar="TARGET", help="zoo:NAME, path/to/file.py:function or module:function")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE ...", help="Arguments of the target's function.")
]
Device = Annotated[str | None, typer.Option(help="Move the model there first: cpu, cuda, cuda:1, ...")]
BudgetText = Annotated[str, typer.Option("--budget", help="8GiB, 8GB, 512MiB, bytes, or 70% of the unplanned peak.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")]
TimeLimit = Annotated[float | None, typer.Option(help="Seconds for solvers that search.")]
Out = Annotated[Path | None, typer.Option("-o", "--output", help="File to write.")]


def main() -> None:
    """The entry point of ``planner`` and of ``python -m planner``."""
    app(prog_name="planner")


@app.command("profile", cls=ManyValues)
def profile_command(
    target: Target,
    settings: Settings = None,
    device: Device = None,
    stages: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN ...", help="Module names, glob patterns or classes; found automatically else."),
    ] = None,
    ops: Annotated[bool, typer.Option("--ops", help="Print every op's record, largest output first.")] = False,
    ops_limit: Annotated[int, typer.Option(min=0, help="Rows of --ops; 0 for all.")] = 40,
    output: Out = None,
) -> None:
    """Measure one training step: what each stage costs in bytes and seconds."""
    check_folder(output)
    with working() as progress:
        measured = profile(_workload(target, settings, device), stages=stages or None, progress=progress)
    if output is not None:
        measured.save(output)
    show(report.profile_report(measured))
    if ops:
        show("", report.ops_report(measured.op_records, limit=ops_limit))
    _say_written(output)


@app.command("solve")
def solve_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile, or a chain problem.")],
    budget: BudgetText,
    solver: Annotated[str, typer.Option(help=f"One of {', '.join(solver_names())}.")] = "auto",
    time_limit: TimeLimit = None,
    output: Out = None,
    as_json: AsJson = False,
) -> None:
    """Choose what to keep and what to recompute so that the step's true peak stays within the budget."""
    check_folder(output)
    source = _profile_or_chain(file)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            document, saved = _solve(source, budget, solver, time_limit)
    except Infeasible as refusal:
        if as_json:
            refused = documents.profile_refusal if isinstance(source, Profile) else chain_files.chain_refusal
            show_json(refused(refusal, source))  # type: ignore[arg-type]  # each takes its own kind of source
        raise
    if output is not None:
        write_document(output, saved)
    if as_json:
        show_json(document)
    else:
        show(report.plan_report(document))
    _say_written(output)


@app.command("pareto")
def pareto_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Picture: .png, .svg or .pdf.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Table of every point.")] = None,
    time_limit: TimeLimit = None,
) -> None:
    """Draw every solver's memory/time curve, the unplanned point and the lower bound."""
    check_folder(output)
    check_folder(csv)
    if output is not None:
        plots.check_picture(output)
    source = Profile.load(file)
    with contextlib.redirect_stdout(sys.stderr):
        frame = curves.pareto(source, time_limit_seconds=time_limit)
    title = f"{source.model_class} on {source.device} ({source.device_name})"
    if csv is not None:
        write_whole(csv, frame.to_csv(index=False))
    if output is not None:
        plots.draw_pareto(frame, output, title=title)
    show(report.frontier_report(frame, title))
    _say_written(csv, output)


@app.command("train", cls=ManyValues)
def train_command(
    target: Target,
    plan: Annotated[Path, typer.Option(help="The plan to apply.")],
    settings: Settings = None,
    device: Device = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Train under a plan and hold what it predicts against what is measured."""
    loaded = Plan.load(plan)
    with working() as progress:
        workload = _workload(target, settings, device)
        progress(f"train {steps} steps", 0, 1)
        document = documents.training_document(train_planned(workload, loaded, steps=steps))
    if as_json:
        show_json(document)
    else:
        show(report.training_report(document))


@app.command("compare", cls=ManyValues)
def compare_command(
    target: Target,
    budget: BudgetText,
    settings: Settings = None,
    device: Device = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for ilp and auto.")] = ILP_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Apply every solver's plan for one budget in turn: predicted and measured peaks and times side by side."""
    if not budget.strip().endswith("%"):
        parse_bytes(budget)  # refused before anything is measured
    with working() as progress:
        workload = _workload(target, settings, device)
        measured = profile(workload, progress=progress)
        budget_bytes = parse_bytes(budget, whole_bytes=measured.unplanned_peak_bytes)
        rows = compare_solvers(workload, measured, budget_bytes, time_limit_seconds=time_limit, progress=progress)
    document = documents.comparison_document(measured, budget_bytes, rows)
    if as_json:
        show_json(document)
    else:
        show(report.comparison_report(rows, budget_bytes))
    _fail_if_infeasible(document)


@app.command("show")
def show_command(file: Annotated[Path, typer.Argument(metavar="FILE", help="A plan; or a profile.")]) -> None:
    """Print a plan file as a table."""
    document = read_document(file, {PLAN_FORMAT: PLAN_VERSION, PROFILE_FORMAT: PROFILE_VERSION})
    if document["format"] == PLAN_FORMAT:
        show(report.plan_report(documents.plan_document(Plan.load(file))))
    else:
        show(report.profile_report(Profile.load(file)))


@app.command("demo")
def demo_command() -> None:
    """Profile, plan and train a GPT-2 on the CPU, and draw its Pareto curve to ./planner-demo/pareto.png."""
    run_demo()


def _workload(target: str, settings: list[str] | None, device: str | None) -> Workload:
    workload = load_target(target, parse_settings(settings or []))
    if device is None:
        return workload
    try:
        return workload.to(torch.device(device))
    except ValueError:
        raise
    except (RuntimeError, AssertionError) as error:  # torch says so of names and numbers that it does not know
        raise ValueError(
            f"--device: expected one that this machine has, got {device!r}: {str(error).splitlines()[0]}; use cpu"
        ) from error


def _profile_or_chain(file: Path) -> Profile | Chain:
    document = read_document(file, {PROFILE_FORMAT: PROFILE_VERSION, CHAIN_FORMAT: CHAIN_VERSION})
    if document["format"] == CHAIN_FORMAT:
        return chain_files.chain_from(document, str(file))
    return Profile.from_document(document, str(file))


def _solve(
    source: Profile | Chain, budget: str, solver: str, time_limit: float | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The document to show, and the one to save."""
    if isinstance(source, Profile):
        plan = solve(source, budget, solver=solver, time_limit_seconds=time_limit)
        return documents.plan_document(plan), plan.to_document()
    document, schedule = chain_files.solve_chain_document(source, budget, solver=solver, time_limit_seconds=time_limit)
    return document, chain_files.solution_file(document, schedule)


def _fail_if_infeasible(document: dict[str, Any]) -> None:
    if document.get("status") == "infeasible":
        raise Infeasible(
            minimum_budget_bytes=document["minimum_budget_bytes"],
            reason=document["reason"],
            solver="auto",
            budget_bytes=document["budget_bytes"],
        )


def _say_written(*paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            note(f"written: {path} ({format_bytes(path.stat().st_size)})")
