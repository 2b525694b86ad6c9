"""The command ``max-batch``: the largest batch that fits, without a plan, with recompute and with offload."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import (
    AsJson,
    Device,
    DevicesPerLink,
    HeadroomText,
    HostMemoryOption,
    LinkGbps,
    NoMenus,
    NoOffload,
    ReportFile,
    Settings,
    TargetArgument,
    budget_callback,
    offload_options,
)
from planner.cli.report import check_report, write_result
from planner.cli.several_ranks import ShardOption, check_alone, engine_named, on_ranks, settings_of_rank
from planner.cli.shell import check_folder, is_first, note, say_written, show, show_json, working
from profiler.target_record import TargetRecord


def max_batch_command(
    target: TargetArgument,
    budget: Annotated[
        str,
        typer.Option(
            "--budget", metavar="B", callback=budget_callback, help="Of the whole step, as 32GB: 8GiB, 512MiB or bytes."
        ),
    ],
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
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan of the largest batch, for train --plan.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of the limits: .png, .svg or .pdf.")] = None,
    report: ReportFile = None,
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
    from planner.pictures import check_picture
    from planner.plans.offload_request import Offload
    from planner.report.command_results import section_of_limits
    from planner.targets import parse_settings

    if engine is None:
        check_alone("max-batch", "add --shard ddp or fsdp2")
    check_folder(output)
    check_folder(plot)
    if plot is not None:
        check_picture(plot)
    check_report(report)
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
    plan, size = limits.largest.plan, limits.largest.size
    given = TargetRecord.given(target, settings, device).with_changes([f"{vary}={size}"], None).proven()
    if output is not None and plan is not None and is_first():
        replace(plan, target=given).save(output)
    if plot is not None and is_first():
        from planner.capacity.batch_report import draw_limits

        draw_limits(limits, plot)
    if as_json:
        show_json(batch_document(limits))
    else:
        show(limits_report(limits))
    if output is not None and plan is None:
        note(f"not written: {output}: {vary}={size} is the largest, and it needs no plan")
    say_written(output if plan is not None else None, plot)
    best, made_of = limits.best, given.with_changes([f"{vary}={limits.best.size}"], None)
    write_result(report, f"Largest {vary} of {target}", lambda: section_of_limits(limits), best.plan, made_of)
