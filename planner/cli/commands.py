"""The command line: profile, solve, pareto, train, compare, max-batch, advise, show, explain and demo.

What a command needs is imported when it runs: help is there at once, and work on files loads no torch.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner import __version__
from planner.cli.advise import advise_command
from planner.cli.options import (
    COMPARE_SECONDS,
    PARETO_SECONDS,
    AsJson,
    BudgetText,
    Device,
    DevicesPerLink,
    HeadroomText,
    HostMemoryOption,
    LinkGbps,
    NoMenus,
    NoOffload,
    OffloadOnly,
    Out,
    RulesFile,
    Settings,
    TargetArgument,
    offload_options,
)
from planner.cli.several_ranks import ShardOption, engine_named, on_ranks, settings_of_rank
from planner.cli.shell import ManyValues, PlannerGroup, check_folder, note, say_written, show, show_json, working
from planner.cli.solve import solve_command
from planner.units import check_size, parse_bytes

if TYPE_CHECKING:
    from planner import Workload
    from planner.distributed.sharding import Engine

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
) -> None:
    """Print the version, or help where no command is named."""
    if version:
        show(f"planner {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        show(context.get_help())


@app.command("profile", cls=ManyValues)
def profile_command(
    target: TargetArgument,
    settings: Settings = None,
    device: Device = None,
    stages: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN ...", help="Module names, glob patterns or classes; found automatically else."),
    ] = None,
    rules: RulesFile = None,
    no_menus: Annotated[
        bool, typer.Option("--no-menus", help="Measure whole stages only, and inside them what --rules ask for.")
    ] = False,
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="No step of profiling takes more; for a step that does not fit. By itself where needed.",
        ),
    ] = None,
    graph: Annotated[
        bool, typer.Option("--graph", help="Forward and backward as one graph of single ops, instead of stages.")
    ] = False,
    states: Annotated[
        bool, typer.Option("--states", help="Print the model states, measured in two more steps and by formula.")
    ] = False,
    ops: Annotated[bool, typer.Option("--ops", help="Print every op's record, largest output first.")] = False,
    ops_limit: Annotated[int, typer.Option(min=0, help="Rows of --ops; 0 for all.")] = 40,
    output: Out = None,
) -> None:
    """Measure one training step: what each stage costs in bytes and seconds."""
    from planner.cli.tables import ops_report, profile_report
    from planner.plans.rules import Rules

    check_folder(output)
    stated = None if rules is None else Rules.load(rules)  # refused before anything is measured
    if limit is not None:
        parse_bytes(limit)
    from planner.distributed.collective import profile

    if graph:
        _profile_graph(target, settings, device, output, others=bool(stages or rules or limit or states or ops))
        return
    with working() as progress:
        workload = _workload(target, settings, device)
        measured = profile(
            workload, stages=stages or None, menus=not no_menus, rules=stated, limit=limit, progress=progress
        )
    if output is not None:
        measured.save(output)
    show(profile_report(measured))
    if states:
        from planner.explain.state_table import model_states, states_report

        show("", states_report(model_states(workload)))
    if ops:
        show("", ops_report(measured.op_records, limit=ops_limit))
    say_written(output)


def _profile_graph(
    target: str, settings: list[str] | None, device: str | None, output: Path | None, *, others: bool
) -> None:
    from planner.cli.graph_tables import graph_profile_report
    from planner.distributed.collective import profile

    if others:
        raise ValueError(
            "--graph: expected it without --stages, --rules, --limit, --states and --ops, which are about stages, got "
            "one of them; leave it out"
        )
    with working() as progress:
        measured = profile(_workload(target, settings, device), graph=True, progress=progress)
    if output is not None:
        measured.save(output)
    show(graph_profile_report(measured))
    say_written(output)


app.command("solve", cls=ManyValues)(solve_command)


@app.command("pareto")
def pareto_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile, a chain problem or a graph problem.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Picture: .png, .svg or .pdf.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Table of every point.")] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(help=f"Seconds for all searches together; {PARETO_SECONDS:g} for a graph."),
    ] = None,
    no_offload: NoOffload = False,
    offload_only: OffloadOnly = False,
    link_gbps: LinkGbps = None,
    devices_per_link: DevicesPerLink = None,
    host_memory: HostMemoryOption = None,
) -> None:
    """Draw every solver's memory/time curve, the unplanned point and the lower bound."""
    from planner.cli.comparison_tables import frontier_report
    from planner.cli.problem_solving import title_of
    from planner.explain.figures import check_picture
    from planner.plans import problem_files
    from planner.plans.pareto_curves import pareto
    from profiler.json_files import write_whole

    check_folder(output)
    check_folder(csv)
    if output is not None:
        check_picture(output)
    offload_request = offload_options(no_offload, link_gbps, devices_per_link, host_memory, offload_only=offload_only)
    source = problem_files.read_source(file)
    with contextlib.redirect_stdout(sys.stderr):
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
    show(frontier_report(frame, title))
    say_written(csv, output)


@app.command("train", cls=ManyValues)
def train_command(
    target: TargetArgument,
    plan: Annotated[Path | None, typer.Option(help="The plan to apply.")] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="B", help="Instead of a plan: profile, and solve for this budget, first.")
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="With --budget: plan single ops, instead of stages.")] = False,
    settings: Settings = None,
    device: Device = None,
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
    as_json: AsJson = False,
) -> None:
    """Train under a plan and hold what it predicts against what is measured.

    Under torchrun on several ranks, each with a batch of its own; the first one prints.
    """
    engine = engine_named(shard)
    from planner.cli.train import PlanRequest, run_train

    with on_ranks(engine):
        run_train(
            PlanRequest(file=plan, budget=budget, graph=graph),
            lambda: _workload(target, settings, device, engine),
            steps=steps,
            retries=retry,
            as_json=as_json,
            save_plan=save_plan,
            shard=engine,
        )


@app.command("compare", cls=ManyValues)
def compare_command(
    target: TargetArgument,
    budget: BudgetText,
    settings: Settings = None,
    device: Device = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for ilp and auto.")] = COMPARE_SECONDS,
    graph: Annotated[bool, typer.Option("--graph", help="Also a plan of single ops.")] = False,
    as_json: AsJson = False,
) -> None:
    """Apply every solver's plan for one budget in turn: predicted and measured peaks and times side by side."""
    from planner.cli import documents
    from planner.cli.comparison_tables import comparison_report
    from planner.distributed.collective import profile
    from planner.plans.refusals import Infeasible
    from planner.training.solver_comparison import compare_solvers

    check_size(budget)  # refused before anything is measured
    with working() as progress:
        workload = _workload(target, settings, device)
        measured = profile(workload, progress=progress)
        budget_bytes = parse_bytes(budget, whole_bytes=measured.unplanned_peak_bytes)
        ops = profile(workload, graph=True, progress=progress) if graph else None
        rows = compare_solvers(
            workload, measured, budget_bytes, graph=ops, time_limit_seconds=time_limit, progress=progress
        )
    if as_json:
        show_json(documents.comparison_document(measured, budget_bytes, rows))
    else:
        show(comparison_report(rows, budget_bytes))
    least = documents.least_demanding(rows)
    if least is not None:
        raise Infeasible(
            minimum_budget_bytes=least.minimum_budget_bytes or 0,
            reason=least.reason or "",
            solver="auto",
            budget_bytes=budget_bytes,
        )


@app.command("max-batch", cls=ManyValues)
def max_batch_command(
    target: TargetArgument,
    budget: Annotated[str, typer.Option("--budget", help="Of the whole step, as 32GB: 8GiB, 512MiB or bytes.")],
    vary: Annotated[str, typer.Option(metavar="KEY", help="The --set key to search over, as seq.")] = "batch",
    step: Annotated[int, typer.Option(min=1, help="Sizes tried are multiples of it.")] = 1,
    settings: Settings = None,
    device: Device = None,
    no_menus: NoMenus = False,
    no_offload: NoOffload = False,
    link_gbps: LinkGbps = None,
    devices_per_link: DevicesPerLink = None,
    host_memory: HostMemoryOption = None,
    headroom: HeadroomText = None,
    shard: ShardOption = None,
    as_json: AsJson = False,
) -> None:
    """Find the largest batch that fits without a plan, with recompute, and with offload, and how fast each is.

    Profiles a few sizes, predicts how bytes and seconds grow, and confirms the limits by real steps. Under torchrun
    the batch is that of each rank; the first one prints.
    """
    engine = engine_named(shard)
    from planner.capacity.batch_limits import NoBatch
    from planner.capacity.batch_report import batch_document, limits_report, no_batch_document
    from planner.capacity.batch_search import max_batch
    from planner.plans.offload_request import Offload
    from planner.targets import parse_settings

    offload_request = offload_options(no_offload, link_gbps, devices_per_link, host_memory) or Offload()
    try:
        with on_ranks(engine), working() as progress:
            limits = max_batch(
                target,
                budget,
                vary=vary,
                settings=settings_of_rank(target, parse_settings(settings or []), engine),
                shard=engine,
                step=step,
                device=device,
                offload=offload_request,
                menus=not no_menus,
                headroom=headroom or 0,
                progress=progress,
            )
    except NoBatch as refusal:
        if as_json:
            show_json(no_batch_document(refusal))
        raise
    if as_json:
        show_json(batch_document(limits))
    else:
        show(limits_report(limits))


@app.command("show", cls=ManyValues)
def show_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A plan or a solution that solve wrote; or a profile.")],
    ops: Annotated[bool, typer.Option("--ops", help="Every op of every kind of stage, not the largest alone.")] = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Picture of the bytes alive over a step: .png, .svg or .pdf.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Table of the same, action by action.")] = None,
    peak_csv: Annotated[Path | None, typer.Option(help="Table of what is alive at the peak.")] = None,
    measure: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Run this model's steps too and show what is measured.")
    ] = None,
    settings: Settings = None,
    device: Device = None,
) -> None:
    """Print a plan: its stages, what happens to their ops and why, and what is alive at its peak.

    With --timeline and --csv: the bytes alive over one step, without the plan and with it.
    """
    from planner.cli.show_file import ShowRequest, run_show

    if measure is None and (settings or device):
        raise ValueError("--set, --device: expected them beside --measure TARGET, got no TARGET; name the model")
    build = None if measure is None else lambda: _workload(measure, settings, device)
    run_show(file, ShowRequest(ops=ops, timeline=timeline, csv=csv, peak_csv=peak_csv, workload=build))


app.command("advise", cls=ManyValues)(advise_command)


@app.command("explain")
def explain_command(
    word: Annotated[str, typer.Argument(metavar="[WORD]", help="Of what tables and messages say, as gap.")] = "",
) -> None:
    """Say what a word means that tables, pictures and messages use; without a word: list them."""
    from planner.explain.glossary import explanation, glossary_words
    from planner.explain.tables import facts

    show(facts([explanation(word)]) if word else ", ".join(glossary_words()))


@app.command("demo")
def demo_command() -> None:
    """Profile, plan and train a GPT-2 on the CPU, draw its Pareto curve, and plan a DenseNet by stages and by ops."""
    from planner.cli.demo import run_demo

    run_demo()


def _workload(target: str, settings: list[str] | None, device: str | None, engine: Engine | None = None) -> Workload:
    from planner.targets import build_target, parse_settings

    return build_target(target, settings_of_rank(target, parse_settings(settings or []), engine), device)


def _say_without(why: str | None) -> None:
    if why:
        note(f"without offload: {why}")
