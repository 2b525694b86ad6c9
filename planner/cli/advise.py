"""The command ``advise``: where the memory goes and what fits it into a budget, as tables, a picture or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from planner.cli.options import (
    AsJson,
    BudgetOrRules,
    Device,
    DevicesPerLink,
    HostMemoryOption,
    LinkGbps,
    NoMenus,
    NoOffload,
    ReportFile,
    Settings,
    TargetArgument,
    offload_options,
)
from planner.cli.report import check_report, write_result
from planner.cli.shell import NO_PLAN, check_folder, complain, say_written, show, show_json, working
from planner.units import format_bytes
from profiler.target_record import TargetRecord

if TYPE_CHECKING:
    from planner.capacity.advice import Advice


def advise_command(
    target: TargetArgument,
    budget: BudgetOrRules = None,
    settings: Settings = None,
    batch_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="The --set key of the batch, of which micro-batches are made; batch if unset."
        ),
    ] = None,
    device: Device = None,
    no_menus: NoMenus = False,
    no_offload: NoOffload = False,
    link_gbps: LinkGbps = None,
    devices_per_link: DevicesPerLink = None,
    host_memory: HostMemoryOption = None,
    world_size: Annotated[
        int | None, typer.Option(metavar="N", help="Say what each of N simulated ranks would hold; with --shard.")
    ] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="ENGINE", help="How the ranks share the model: ddp or fsdp2.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Picture: .png, .svg or .pdf.")] = None,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Show where the memory of a training step goes, and what would fit it into a budget at which cost.

    Mixed precision, Adafactor or SGD in place of the optimizer, micro-batches, recompute and offload, alone and
    combined: peaks and times as measured, computed or solved for, and the fastest combination that fits.

    With --world-size and --shard: what one of so many ranks would hold instead; the batch is that of each rank.
    """
    from planner.plans.offload_request import Offload
    from planner.targets import parse_settings

    check_folder(output)
    check_report(report)
    asked: dict[str, Any] = {
        "settings": parse_settings(settings or []),
        "device": device,
        "offload": offload_options(no_offload, link_gbps, devices_per_link, host_memory) or Offload(),
        "menus": not no_menus,
    }
    if world_size is not None or shard is not None:
        if report is not None:
            raise ValueError(f"--report: expected no page of simulated ranks, got {str(report)!r}; leave it out")
        if batch_key is not None:
            raise ValueError("--batch-key: expected none with simulated ranks, whose batch is not split; leave it out")
        _advise_rank(target, budget, world_size, shard, output, asked, as_json=as_json)
        return
    if budget is None:
        raise ValueError("--budget: expected the most bytes alive at once, got none; write for example --budget 8GiB")
    from planner.capacity.advice import advise
    from planner.capacity.workload_variants import BATCH_KEY
    from planner.pictures import check_picture

    if output is not None:
        check_picture(output)
    with working() as progress:
        advice = advise(target, budget, batch_key=batch_key or BATCH_KEY, progress=progress, **asked)
    _tell(advice, output, report, TargetRecord.given(target, settings, device), as_json=as_json)


def _advise_rank(
    target: str,
    budget: str | None,
    world_size: int | None,
    shard: str | None,
    output: Path | None,
    asked: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Print what a rank would hold; ends with exit code 3 where nothing fits a budget that was given."""
    if world_size is None or shard is None:
        got, missing = ("--shard", "--world-size 8") if world_size is None else ("--world-size", "--shard ddp or fsdp2")
        raise ValueError(f"--world-size, --shard: expected both or neither, got {got} alone; add {missing}")
    if output is not None:
        raise ValueError(f"-o: expected no picture of simulated ranks, got {str(output)!r}; leave it out")
    from planner.capacity.rank_advice import advise_rank, rank_document_of, rank_report_of

    with working() as progress:
        advice = advise_rank(
            target, world_size=world_size, shard=cast(Any, shard), budget=budget, progress=progress, **asked
        )
    if as_json:
        show_json(rank_document_of(advice))
    else:
        show(rank_report_of(advice))
    if not advice.fits:
        short = format_bytes(advice.minimum_budget_bytes - (advice.budget_bytes or 0))
        complain(f"nothing found fits: the smallest plan of a rank that recomputes is {short} above the budget")
        raise typer.Exit(NO_PLAN)


def _tell(advice: Advice, output: Path | None, report: Path | None, target: TargetRecord, *, as_json: bool) -> None:
    """Draw and print; ends with exit code 3 where nothing fits."""
    from planner.capacity.advice_report import document_of, report_of
    from planner.report.command_results import section_of_advice

    if output is not None:
        from planner.capacity.advice_report import draw_advice

        draw_advice(advice, output)
    if as_json:
        show_json(document_of(advice))
    else:
        show(report_of(advice))
    say_written(output)
    best = advice.exact or advice.cheapest
    write_result(
        report,
        f"Advice on {advice.model_class}",
        lambda: section_of_advice(advice),
        None if best is None else best.plan,
        target if best is not None and best.as_built else None,
    )
    if not advice.fits:
        short = format_bytes(advice.nearest.short_bytes)
        complain(f"nothing found fits: {advice.nearest.title} comes nearest, {short} above the budget")
        raise typer.Exit(NO_PLAN)
