"""The commands ``max-batch`` and ``advise``: the largest batch that fits, and what would fit a step into a budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from planner.cli.arguments import NO_PLAN
from planner.cli.options import (
    AsJson,
    DeviceOrCard,
    HeadroomText,
    OffloadBesideText,
    OptionalBudget,
    Settings,
    ShardOption,
    TargetArgument,
    budget_callback,
    offload_of,
    out_option,
)
from planner.cli.output import Output, OutputFiles, output_files
from planner.cli.several_ranks import check_alone, engine_named, on_ranks, settings_of_rank
from planner.units import format_bytes
from profiler.target_record import TargetRecord

if TYPE_CHECKING:
    from planner.capacity.advice import Advice


def max_batch_command(
    context: typer.Context,
    target: TargetArgument,
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            metavar="B",
            callback=budget_callback,
            help="The most bytes alive at once in a step, such as the device's memory: 32GB, 8GiB or bytes.",
        ),
    ],
    vary: Annotated[
        str,
        typer.Option(
            metavar="KEY[:STEP]", help="The --set key to search over; seq:64 tries only multiples of 64 for seq."
        ),
    ] = "batch",
    settings: Settings = None,
    device: DeviceOrCard = None,
    offload: OffloadBesideText = None,
    headroom: HeadroomText = None,
    shard: ShardOption = None,
    output: Annotated[
        list[Path] | None,
        out_option("Write the plan of the largest batch; .html: a page; .png, .svg or .pdf: a picture of the limits."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the largest batch that fits without a plan, with recomputation and with offloading, and its speed.

    A few sizes are profiled, bytes and seconds of the others are predicted, and the limits are confirmed by real
    steps. Under torchrun the batch is that of each rank, and the first rank prints.
    """
    out: Output = context.obj
    engine = engine_named(shard)
    from planner.capacity.batch_limits import NoBatch
    from planner.capacity.batch_report import batch_document, limits_report, no_batch_document
    from planner.capacity.batch_search import max_batch
    from planner.plans.offload_request import Offload
    from planner.report.command_results import section_of_limits
    from planner.targets import parse_settings

    if engine is None:
        check_alone()
    files = output_files(output, "json", "page", "picture")
    key, _, multiple = vary.partition(":")
    if multiple and not (multiple.isdecimal() and int(multiple)):
        raise ValueError(f"--vary: expected a whole number above zero after the colon, got {multiple!r}; write {key}:8")
    offload_request = offload_of(offload, only=False) or Offload()
    try:
        with on_ranks(engine, out), out.working() as progress:
            limits = max_batch(
                target,
                budget,
                vary=key,
                settings=settings_of_rank(target, parse_settings(settings or []), engine),
                shard=engine,
                step=int(multiple or 1),
                device=device,
                offload=offload_request,
                headroom=headroom or 0,
                progress=progress,
            )
    except NoBatch as refusal:
        if as_json:
            out.show_json(no_batch_document(refusal))
        raise
    plan, size = limits.largest.plan, limits.largest.size
    given = TargetRecord.given(target, settings, device).with_changes([f"{key}={size}"], None).proven()
    if files.json is not None and plan is not None and out.is_first:
        replace(plan, target=given).save(files.json)
    if files.picture is not None and out.is_first:
        from planner.capacity.batch_report import draw_limits

        draw_limits(limits, files.picture)
    out.answer(batch_document(limits), limits_report(limits))
    if files.json is not None and plan is None:
        out.note(f"not written: {files.json}: {key}={size} is the largest, and it needs no plan")
    out.say_written(files.json if plan is not None else None, files.picture)
    best, made_of = limits.best, given.with_changes([f"{key}={limits.best.size}"], None)
    out.write_result(files.page, f"Largest {key} of {target}", lambda: section_of_limits(limits), best.plan, made_of)


def advise_command(
    context: typer.Context,
    target: TargetArgument,
    budget: OptionalBudget = None,
    settings: Settings = None,
    batch_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The --set key of the batch, for micro-batches. Default: batch."),
    ] = None,
    device: DeviceOrCard = None,
    offload: OffloadBesideText = None,
    world_size: Annotated[
        int | None, typer.Option(metavar="N", help="Simulate N ranks, and predict the memory of each; needs --shard.")
    ] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="ddp|fsdp2", help="How the simulated ranks share the model.")
    ] = None,
    output: Annotated[
        list[Path] | None, out_option("Write a page, .html, or a picture, .png, .svg or .pdf; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the memory of a training step goes, and which changes would make it fit a budget.

    Compares mixed precision, Adafactor or SGD as the optimizer, micro-batches, recompute and offload, alone and
    combined, by peaks and times that are measured, computed or solved for, and names the fastest combination that fits.

    With --world-size and --shard, predict the memory of each of N ranks instead; the batch is that of each rank.
    """
    from planner.plans.offload_request import Offload
    from planner.targets import parse_settings

    out: Output = context.obj
    files = output_files(output, "page", "picture")
    asked: dict[str, Any] = {
        "settings": parse_settings(settings or []),
        "device": device,
        "offload": offload_of(offload, only=False) or Offload(),
    }
    if world_size is not None or shard is not None:
        if world_size is None or shard is None:
            missing = "--world-size 8" if world_size is None else "--shard ddp or fsdp2"
            raise ValueError(f"--world-size, --shard: simulated ranks need both; add {missing}")
        if files.all:
            raise ValueError("-o: there is no page and no picture of simulated ranks; leave it out, or use --json")
        if batch_key is not None:
            raise ValueError("--batch-key: the batch of simulated ranks is not split; leave it out")
        _advise_rank(out, target, budget, world_size, shard, asked)
        return
    if budget is None:
        raise ValueError("--budget: it is missing; add the most bytes alive at once, such as --budget 8GiB")
    from planner.capacity.advice import advise
    from planner.capacity.workload_variants import BATCH_KEY

    with out.working() as progress:
        advice = advise(target, budget, batch_key=batch_key or BATCH_KEY, progress=progress, **asked)
    _tell(out, advice, files, TargetRecord.given(target, settings, device))


def _advise_rank(
    out: Output, target: str, budget: str | None, world_size: int, shard: str, asked: dict[str, Any]
) -> None:
    """Print what a rank would hold; ends with exit code 3 where nothing fits a budget that was given."""
    from planner.capacity.rank_advice import advise_rank, rank_document_of, rank_report_of

    with out.working() as progress:
        advice = advise_rank(
            target, world_size=world_size, shard=cast(Any, shard), budget=budget, progress=progress, **asked
        )
    out.answer(rank_document_of(advice), rank_report_of(advice))
    if not advice.fits:
        short = format_bytes(advice.minimum_budget_bytes - (advice.budget_bytes or 0))
        out.complain(f"nothing found fits: the smallest plan of a rank that recomputes is {short} above the budget")
        raise typer.Exit(NO_PLAN)


def _tell(out: Output, advice: Advice, files: OutputFiles, target: TargetRecord) -> None:
    """Draw and print; ends with exit code 3 where nothing fits."""
    from planner.capacity.advice_report import document_of, report_of
    from planner.report.command_results import section_of_advice

    if files.picture is not None:
        from planner.capacity.advice_report import draw_advice

        draw_advice(advice, files.picture)
    out.answer(document_of(advice), report_of(advice))
    out.say_written(files.picture)
    best = advice.exact or advice.cheapest
    out.write_result(
        files.page,
        f"Advice on {advice.model_class}",
        lambda: section_of_advice(advice),
        None if best is None else best.plan,
        target if best is not None and best.as_built else None,
    )
    if not advice.fits:
        short = format_bytes(advice.nearest.short_bytes)
        out.complain(f"nothing found fits: {advice.nearest.title} comes nearest, {short} above the budget")
        raise typer.Exit(NO_PLAN)
