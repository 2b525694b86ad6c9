"""The commands ``estimate``, which plans for a device that need not be there, and ``calibrate``, which measures one."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from planner.cli.options import (
    AllowRounding,
    AsJson,
    OffloadText,
    OptionalBudget,
    Settings,
    TargetArgument,
    numerics_of,
    offload_of,
    out_option,
)
from planner.cli.output import Output, output_files
from planner.units import format_bytes
from profiler.target_record import TargetRecord

if TYPE_CHECKING:
    from planner.distributed.sharding import Engine
    from planner.plans.refusals import Infeasible

_OF_PROFILE = ".profile.json"
_KEPT_FREE_PERCENT = 3  # of the device's memory, where no budget is given


def estimate_command(
    context: typer.Context,
    target: TargetArgument,
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="A card (h100, a100-80gb, l4, ...), or the file that planner calibrate wrote on the device.",
        ),
    ],
    budget: OptionalBudget = None,
    settings: Settings = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Estimate the first of N ranks, each with the target's batch. Without --shard, the target wraps its "
            "model.",
        ),
    ] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="ddp|fsdp2", help="How ranks share a model that the target has not wrapped.")
    ] = None,
    offload: OffloadText = None,
    allow_rounding: AllowRounding = False,
    output: Annotated[
        list[Path] | None,
        out_option(f"Write the plan; a name that ends in {_OF_PROFILE}: the profile. May be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a training step for a device that you need not have: whether it fits, its peak, and its time.

    The target builds its model and runs its step without memory and without values, so neither has to fit this machine.
    Bytes are counted as on the device; seconds come from what is known of it, and are given as a range.

    Without --budget the plan is for 97 % of the device's memory, less the margin that the estimate states. Where
    nothing fits, the smallest budget is named.
    """
    from planner.cli import documents
    from planner.cli.solve import solve_source, unplanned_fields
    from planner.cli.tables import estimate_report, solution_report
    from planner.plans.estimating import estimate
    from planner.plans.plan import Plan
    from planner.plans.refusals import Infeasible
    from planner.targets import build_target, parse_settings
    from planner.training.estimated_run import run_estimated
    from profiler.device_record import DeviceRecord
    from profiler.json_files import write_document

    out: Output = context.obj
    profiles = [path for path in output or () if path.name.endswith(_OF_PROFILE)]
    plan_file = output_files([path for path in output or () if path not in profiles], "json").json
    profile_file = output_files(profiles, "json").json
    if ranks is None and shard is not None:
        raise ValueError("--shard: it is for several ranks; add --ranks 8, or leave it out for one device")
    request = offload_of(offload)
    with out.working() as progress:
        known = DeviceRecord.named(device)
        build = partial(build_target, target, parse_settings(settings or []))
        numerics, engine = numerics_of(allow_rounding), cast("Engine | None", shard)
        found = estimate(build, device=known, ranks=ranks, shard=engine, numerics=numerics, progress=progress)
        given = TargetRecord.given(target, settings, "cuda" if known.kind == "cuda" else None)
        found = replace(found, target=given)
    assert found.estimate is not None
    if profile_file is not None:
        found.save(profile_file)
    # What is not counted (fragmentation, workspaces that the device's libraries choose) gets a part of the memory.
    memory_bytes = found.estimate.memory_bytes
    free_bytes = 0 if budget else found.estimate.margin_bytes + memory_bytes * _KEPT_FREE_PERCENT // 100
    allowed = budget or str(max(1, memory_bytes - free_bytes))
    try:
        with out.searching(0.0):
            summary, document = solve_source(
                found,
                allowed,
                solver="auto",
                time_limit_seconds=None,
                headroom="auto" if budget is None else None,
                offload=request,
                numerics=numerics,
            )
    except Infeasible as refused:
        refusal = refused if budget else _of_device(refused)
        if as_json:
            out.show_json({**documents.refusal_document(refusal, **unplanned_fields(found)), "estimated": True})
        else:
            out.show(estimate_report(found, None, kept_free_bytes=free_bytes))
        raise refusal from None
    if plan_file is not None:
        write_document(plan_file, document)
    planned = None
    if known.kind == "cuda":  # Of a CPU's allocator nothing would be said.
        with out.working() as progress:
            progress("run the plan", 1, 1)
            plan = Plan.from_document(document, "the plan")
            planned = run_estimated(build, plan, known, ranks=ranks, shard=engine)
    if as_json:
        runs = {} if planned is None else {"allocator": planned.default, "allocator_expandable": planned.expandable}
        out.show_json({**summary.to_document(), **{name: asdict(run) for name, run in runs.items() if run is not None}})
    else:
        report = estimate_report(found, summary, planned, kept_free_bytes=free_bytes)
        out.show(solution_report(summary), "", report)
    out.say_written(profile_file, plan_file)


def _of_device(refusal: Infeasible) -> Infeasible:
    """A refusal where nobody gave a budget: it is the device that has no more."""
    remedy = refusal.remedy.replace("raise the budget", "take a device with more memory", 1)
    return replace(refusal, subject="device", remedy=remedy)


def calibrate_command(
    context: typer.Context,
    output: Annotated[Path, out_option("Write the device file here.")],
    device: Annotated[str, typer.Option(metavar="D", help="The device to measure: cpu, cuda, cuda:1.")] = "",
    as_json: AsJson = False,
) -> None:
    """Time the ops that training is made of on the device at hand, for planner estimate --device FILE.

    It takes one to two minutes; nothing else should run on the device meanwhile.
    """
    from planner.cli.tables import device_report
    from profiler.json_files import to_plain
    from profiler.measurement.calibration import calibrate

    out: Output = context.obj
    path = output_files([output], "json").json
    assert path is not None
    with out.working() as progress:
        measured = calibrate(device or None, progress=progress)
    measured.save(path)
    out.answer({**to_plain(measured), "file": str(path)}, device_report(measured))
    out.say_written(path)
    out.note(f"{format_bytes(measured.memory_bytes)} of memory; use it: planner estimate TARGET --device {path}")
