"""The command ``profile``: one training step measured, as a table or JSON, and the file that it goes to."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.options import (
    AllowRounding,
    AsJson,
    Device,
    RulesFile,
    Settings,
    TargetArgument,
    limit_callback,
    numerics_of,
    out_option,
)
from planner.cli.output import Output, check_folder, output_files
from planner.cli.several_ranks import workload_of
from profiler.json_files import read_text, to_plain
from profiler.records import FORMAT
from profiler.target_record import TargetRecord

if TYPE_CHECKING:
    from planner.plans.solving import Numerics
    from profiler.measurement.measuring import Progress
    from profiler.records import Profile
    from profiler.workload.workload import Workload

OPS_SHOWN = 40  # the largest; --json has all


def profile_command(
    context: typer.Context,
    target: TargetArgument,
    settings: Settings = None,
    device: Device = None,
    stages: Annotated[
        list[str] | None,
        typer.Option(
            metavar="whole|PATTERN ...",
            help="Modules that become stages: names, glob patterns or classes; whole makes the model one stage. "
            "Default: found automatically.",
        ),
    ] = None,
    rules: RulesFile = None,
    no_menus: Annotated[
        bool, typer.Option("--no-menus", help="Faster: let plans keep or recompute stages only as a whole.")
    ] = False,
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="B",
            callback=limit_callback,
            help="The most bytes that profiling may use, for a step that does not fit. Default: the device's memory.",
        ),
    ] = None,
    allow_rounding: AllowRounding = False,
    ops: Annotated[bool, typer.Option("--ops", help=f"Print the {OPS_SHOWN} ops with the largest outputs.")] = False,
    output: Annotated[
        list[Path] | None, out_option("Write the profile to this file. Default: a name made from the target's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure one training step: what each stage costs in bytes and seconds.

    Without -o the profile is written to this folder under the target's name: gpt2.profile.json for zoo:gpt2. It
    replaces only a profile of the same target, settings and device; otherwise the name gets a number.
    """
    from planner.cli import documents
    from planner.cli.tables import ops_report, profile_report
    from planner.plans.profiling import profile
    from planner.plans.rules import Rules

    out: Output = context.obj
    path = output_files(output, "json").json
    stated = None if rules is None else Rules.load(rules)  # Refused before anything is measured.
    given = TargetRecord.given(target, settings, device)
    path = path or profile_file(given)
    check_folder(path)
    with out.working() as progress:
        measured = profile(
            workload_of(given, out),
            stages="whole" if stages == ["whole"] else stages or None,
            menus=not no_menus,
            rules=stated,
            limit=limit,
            progress=progress,
            numerics=numerics_of(allow_rounding),
        )
    measured = replace(measured, target=given)
    if out.is_first:
        measured.save(path)
    if as_json:
        out.show_json(documents.profile_document(measured, path, measured.op_records if ops else None))
    else:
        out.show(profile_report(measured))
        if ops:
            out.show("", ops_report(measured.op_records, limit=OPS_SHOWN))
    out.say_written(path)


def profile_of_target(
    workload: Workload, target: TargetRecord, progress: Progress, numerics: Numerics = "eager"
) -> Profile:
    """The profile of a target's workload, which records the target."""
    from planner.plans.profiling import profile

    return replace(profile(workload, progress=progress, numerics=numerics), target=target)


def profile_file(target: TargetRecord) -> Path:
    """The file for a profile that is given none.

    It has the target's name, and the first number under which there is nothing yet, or a profile of the same target,
    settings and device.
    """
    place, _, name = target.text.strip().rpartition(":")
    if place != "zoo":
        name = f"{Path(place).stem if place.endswith('.py') else place.rpartition('.')[2]}-{name}"
    stem = re.sub(r"[^\w.-]+", "_", name) or "model"
    paths = (Path(f"{stem}{'' if number == 1 else f'-{number}'}.profile.json") for number in itertools.count(1))
    expected = {"target": to_plain(target), "format": FORMAT}
    return next(path for path in paths if not path.exists() or _has(path, expected))


def _has(path: Path, expected: Mapping[str, Any]) -> bool:
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and all(document.get(key) == value for key, value in expected.items())
