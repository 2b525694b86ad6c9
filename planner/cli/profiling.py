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
)
from planner.cli.several_ranks import workload_of
from planner.cli.shell import check_folder, is_first, say_written, show, show_json, working
from profiler.json_files import read_text, to_plain
from profiler.records import FORMAT
from profiler.target_record import TargetRecord

if TYPE_CHECKING:
    from planner.explain.state_table import ModelStates
    from planner.plans.solving import Numerics
    from profiler.measurement.measuring import Progress
    from profiler.records import Profile
    from profiler.trace.partition import Stages
    from profiler.workload.workload import Workload


def profile_command(
    target: TargetArgument,
    settings: Settings = None,
    device: Device = None,
    stages: Annotated[
        list[str] | None,
        typer.Option(
            metavar="whole|PATTERN ...",
            help="Module names, glob patterns or classes; whole: the model's call is one stage; found automatically "
            "if unset.",
        ),
    ] = None,
    rules: RulesFile = None,
    no_menus: Annotated[
        bool, typer.Option("--no-menus", help="Find no programs for stages: each is kept or recomputed as a whole.")
    ] = False,
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            callback=limit_callback,
            help="No step of profiling takes more; for a step that does not fit. By itself where needed.",
        ),
    ] = None,
    allow_rounding: AllowRounding = False,
    states: Annotated[
        bool, typer.Option("--states", help="Print the model states, measured in two more steps and by formula.")
    ] = False,
    ops: Annotated[bool, typer.Option("--ops", help="Print every op's record, largest output first.")] = False,
    ops_limit: Annotated[int, typer.Option(min=0, help="Rows of --ops; 0 for all.")] = 40,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write; named after the target if unset.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure one training step: what each stage costs in bytes and seconds.

    Without -o the profile goes to a file of this folder that is named after the target: gpt2.profile.json of zoo:gpt2.
    Only a profile of the same target, settings and device is overwritten; else the next free number is added.
    """
    from planner.cli import documents
    from planner.cli.tables import ops_report, profile_report
    from planner.plans.profiling import profile
    from planner.plans.rules import Rules

    check_folder(output)
    stated = None if rules is None else Rules.load(rules)  # refused before anything is measured
    given = TargetRecord.given(target, settings, device)
    path = output or profile_file(given)
    check_folder(path)
    with working() as progress:
        workload = workload_of(given)
        measured = profile(
            workload,
            stages=_stages_of(stages),
            menus=not no_menus,
            rules=stated,
            limit=limit,
            progress=progress,
            numerics=numerics_of(allow_rounding),
        )
    measured = replace(measured, target=given)
    if is_first():
        measured.save(path)
    state_rows = _states_of(workload) if states else None
    if as_json:
        parts = {"states": state_rows.rows} if state_rows is not None else {}
        parts |= {"op_records": measured.op_records} if ops else {}
        show_json(documents.profile_document(measured, path, parts))
    else:
        show(profile_report(measured))
        if state_rows is not None:
            from planner.explain.state_table import states_report

            show("", states_report(state_rows))
        if ops:
            show("", ops_report(measured.op_records, limit=ops_limit))
    say_written(path)


def _stages_of(patterns: list[str] | None) -> Stages:
    """What ``--stages`` asks for: ``whole`` alone is the model's call as one stage."""
    return "whole" if patterns == ["whole"] else patterns or None


def _states_of(workload: Workload) -> ModelStates:
    from planner.explain.state_table import model_states

    with working():
        return model_states(workload)


def profile_of_target(
    workload: Workload, target: TargetRecord, progress: Progress, numerics: Numerics = "eager"
) -> Profile:
    """The profile of a target's workload, which records the target."""
    from planner.plans.profiling import profile

    return replace(profile(workload, progress=progress, numerics=numerics), target=target)


def default_file(target: TargetRecord, ending: str, folder: Path = Path(), **same: Any) -> Path:
    """Where a profile or a plan goes that is given no file: it has the target's name, and the first number under which
    there is nothing yet, or a file of the same target, settings and device, and of the ``same`` values at its keys.
    """
    place, _, name = target.text.strip().rpartition(":")
    if place != "zoo":
        name = f"{Path(place).stem if place.endswith('.py') else place.rpartition('.')[2]}-{name}"
    stem = re.sub(r"[^\w.-]+", "_", name) or "model"
    paths = (folder / f"{stem}{'' if number == 1 else f'-{number}'}.{ending}" for number in itertools.count(1))
    expected = {"target": to_plain(target), **same}
    return next(path for path in paths if not path.exists() or _has(path, expected))


def _has(path: Path, expected: Mapping[str, Any]) -> bool:
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and all(document.get(key) == value for key, value in expected.items())


def profile_file(target: TargetRecord, folder: Path = Path()) -> Path:
    """Where a profile goes that is given no file."""
    return default_file(target, "profile.json", folder, format=FORMAT)
