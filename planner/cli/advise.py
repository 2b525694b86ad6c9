"""The command ``advise``: where the memory goes and what fits it into a budget, as tables, a picture or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import (
    AsJson,
    BudgetText,
    Device,
    DevicesPerLink,
    HostMemoryOption,
    LinkGbps,
    NoMenus,
    NoOffload,
    Settings,
    TargetArgument,
    offload_options,
)
from planner.cli.shell import NO_PLAN, check_folder, note, say_written, show, show_json, working
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.capacity.advice import Advice


def advise_command(
    target: TargetArgument,
    budget: BudgetText,
    settings: Settings = None,
    batch_key: Annotated[
        str, typer.Option(metavar="KEY", help="The --set key of the batch, of which micro-batches are made.")
    ] = "batch",
    device: Device = None,
    no_menus: NoMenus = False,
    no_offload: NoOffload = False,
    link_gbps: LinkGbps = None,
    devices_per_link: DevicesPerLink = None,
    host_memory: HostMemoryOption = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Picture: .png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the memory of a training step goes, and what would fit it into a budget at which cost.

    Mixed precision, Adafactor or SGD in place of the optimizer, micro-batches, recompute and offload, alone and
    combined: peaks and times as measured, computed or solved for, and the fastest combination that fits.
    """
    from planner.capacity.advice import advise
    from planner.explain.figures import check_picture
    from planner.plans.offload_request import Offload
    from planner.targets import parse_settings

    check_folder(output)
    if output is not None:
        check_picture(output)
    with working() as progress:
        advice = advise(
            target,
            budget,
            settings=parse_settings(settings or []),
            batch_key=batch_key,
            device=device,
            offload=offload_options(no_offload, link_gbps, devices_per_link, host_memory) or Offload(),
            menus=not no_menus,
            progress=progress,
        )
    _tell(advice, output, as_json=as_json)


def _tell(advice: Advice, output: Path | None, *, as_json: bool) -> None:
    """Draw and print; ends with exit code 3 where nothing fits."""
    from planner.capacity.advice_report import document_of, report_of

    if output is not None:
        from planner.capacity.advice_plot import draw_advice

        draw_advice(advice, output)
    if as_json:
        show_json(document_of(advice))
    else:
        show(report_of(advice))
    say_written(output)
    if not advice.fits:
        short = format_bytes(advice.nearest.short_bytes)
        note(f"infeasible: no combination fits; {advice.nearest.title} comes nearest, {short} above the budget")
        raise typer.Exit(NO_PLAN)
