"""The tables that a person reads: plans, profiles, op records, training runs, and solvers beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from planner.cli.solutions import SolutionSummary, StageSummary
from planner.explain.tables import (
    PlainTable,
    facts,
    losses_in_short,
    note_on_rows,
    path_of,
    plain_table,
    rows_of_stages,
)
from planner.plans.plan import pieces_in_words
from planner.plans.refusals import blocks_in_words
from planner.units import counted, exact_bytes, format_bytes, format_seconds, names_in_short
from profiler.device_record import BY_FLOPS, DeviceRecord, EstimateRecord
from profiler.records import LeftOutRecord, OpRecord, PiecesRecord, Profile, StageRecord

if TYPE_CHECKING:
    import pandas as pd

    from planner.training.estimated_run import EstimatedRun
    from planner.training.solver_comparison import ComparisonRow
    from planner.training.training import TrainingRun
    from planner.training.verification import Correction, Verification

_COLOURS = {"keep": "green", "selective": "cyan", "offload": "blue", "recompute": "yellow", "segment": "magenta"}
_MEANINGS = {
    "keep": "keep: saved tensors stay until backward",
    "offload": "offload: nothing runs again; saved tensors wait in host memory",
    "selective": "selective: some of its ops run again in backward, the rest stays (planner show --ops lists them)",
    "recompute": "recompute: its input is kept, its forward runs again",
    "segment": "segment: not even its input is kept; it runs again after the stages before it",
}
_NOTHING = "-"
_NODES_SHOWN = 20  # of a graph: what fits a screen


def solution_report(summary: SolutionSummary) -> RenderableType:
    """The stages of a solution in a table, or the recomputed nodes of a graph, with its claims below."""
    return _plan_report(summary) if summary.part == "stage" else _graph_report(summary)


def promises_report(summary: SolutionSummary) -> RenderableType:
    """The promises for peak and time, and conditions that the stages do not show."""
    left_out = ("recomputed", "solver", "resident")
    return facts([*(row for row in _claims(summary) if row[0] not in left_out), *_left_out(summary.left_out or ())])


def _plan_report(summary: SolutionSummary) -> RenderableType:
    return Group(stages_report(summary), "", facts([*_claims(summary), *_left_out(summary.left_out or ())]))


def stages_report(summary: SolutionSummary) -> RenderableType:
    """The decision for each stage, equal stages in one row, and its consequences."""
    used = [decision for decision in _MEANINGS if any(stage.decision == decision for stage in summary.stages)]
    legend = [("", _MEANINGS[decision]) for decision in used]
    rows = rows_of_stages(
        summary.stages,
        lambda stage: (stage.decision, stage.kept_bytes, stage.runs, stage.offloaded_bytes, stage.extra_ops),
        lambda stage: [stage.extra_seconds],
    )
    notes = note_on_rows(path_of(summary.stages), any(len(stages) > 1 for _, stages in rows))
    return Group(_plan_table(summary, rows), facts([*legend, *notes]))


def _graph_report(summary: SolutionSummary) -> RenderableType:
    """The claims, and the nodes that run more than once, most seconds first."""
    again = [node for node in summary.stages if node.runs > 1]
    claims = facts(_claims(summary))
    if not again:
        return claims
    shown = sorted(again, key=lambda node: -node.extra_seconds)[:_NODES_SHOWN]
    title = f"Run again: {len(shown)} of {len(again)}, most expensive first"
    table = plain_table(title, ["node"], ["runs", "extra time"])
    for node in shown:
        table.add_row(node.name, str(node.runs), milliseconds(node.extra_seconds))
    return Group(claims, "", table)


def _plan_table(summary: SolutionSummary, rows: Sequence[tuple[str, Sequence[StageSummary]]]) -> PlainTable:
    title = "Solution of a chain"
    if summary.model_class:
        title = f"Plan of {summary.model_class} on {summary.device} ({summary.precision})"
    offloads = any(stage.offloaded_bytes for stage in summary.stages)
    sent = ["sent to\nthe host"] if offloads else []
    table = plain_table(title, ["stage", "decision"], ["kept", *sent, "runs", "extra time"])
    for name, stages in rows:
        stage, colour = stages[0], _COLOURS[stages[0].decision]
        extra_seconds = sum(each.extra_seconds for each in stages) / len(stages)
        table.add_row(
            name,
            Text(stage.decision, style=colour),
            _size(stage.kept_bytes),
            *([_size(stage.offloaded_bytes)] if offloads else []),
            str(stage.runs),
            milliseconds(extra_seconds) if extra_seconds else _NOTHING,
            style="dim" if stage.kind == "outside" else None,
        )
    return table


def _size(size_bytes: int | None) -> str:
    return format_bytes(size_bytes) if size_bytes else _NOTHING


def _claims(summary: SolutionSummary) -> list[tuple[str, str]]:
    """The promises of a solution."""
    peak_bytes, budget_bytes = summary.predicted_peak_bytes, summary.budget_bytes
    unplanned_bytes = summary.unplanned_peak_bytes
    share = _share(peak_bytes, unplanned_bytes)
    resident = (
        "parameters, optimizer states, batch, and what the loop holds"
        if summary.part == "stage"
        else "alive throughout"
    )
    return [
        (
            "predicted peak",
            f"{exact_bytes(peak_bytes)}: {share} of the {_unplanned(summary.frugal)} {format_bytes(unplanned_bytes)}",
        ),
        *([] if summary.estimate is None else [("estimated", summary.estimate.in_words())]),
        *_unsteady(summary.unsteady or ()),
        *_other_bits(summary.other_bits or ()),
        *_pieces(summary.pieces),
        ("budget", f"{exact_bytes(budget_bytes)}: {format_bytes(budget_bytes - peak_bytes)} to spare"),
        *_headroom(summary),
        ("predicted time", _times(summary)),
        *_stated(summary),
        ("recomputed", _recomputed(summary)),
        *_offloaded(summary),
        ("solver", f"{summary.solver}, in {format_seconds(summary.solve_seconds)}"),
        ("status", _status(summary)),
        ("resident", f"{format_bytes(summary.resident_bytes)} ({resident})"),
    ]


def _other_bits(names: Sequence[str]) -> list[tuple[str, str]]:
    if not names:
        return []
    said = "rounded as torch.compile would, not as without the plan"
    return [("numbers", f"{said}, in {counted(len(names), 'stage')}: {names_in_short(names)}")]


def _pieces(pieces: PiecesRecord | None) -> list[tuple[str, str]]:
    lines = [] if pieces is None else pieces_in_words(pieces)
    return [("" if number else "in pieces", line) for number, line in enumerate(lines)]


def _unsteady(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Why the peak is not promised; no line where it is."""
    return [("" if number else "not promised", line) for number, line in enumerate(lines)]


def _headroom(summary: SolutionSummary) -> list[tuple[str, str]]:
    """The part of the budget left to the allocator; no line where it is nothing."""
    if not summary.headroom_bytes:
        return []
    size = exact_bytes(summary.headroom_bytes)
    return [("headroom", f"{size} of the budget, left to the allocator: no plan may use them")]


def _recomputed(summary: SolutionSummary) -> str:
    """How much runs again: parts as a whole, ops inside others, and how many ops that comes to."""
    part = summary.part
    again = [stage for stage in summary.stages if stage.runs > 1]
    inside = [stage for stage in summary.stages if stage.runs == 1 and stage.decision == "selective"]
    ops = counted(summary.recomputed_ops or 0, "op")
    if not again and inside and summary.recomputed_ops == 0:
        return f"nothing; {counted(len(inside), part)} as a program in which each op runs once"
    if not again:
        return f"{ops} inside {counted(len(inside), part)}" if inside else "nothing"
    of_all = f" of {len(summary.stages)}" if part == "node" else ""
    whole = f"{counted(sum(stage.runs - 1 for stage in again), 'extra run')} of {counted(len(again), part)}{of_all}"
    if inside:
        return f"{whole}, and ops inside {counted(len(inside), f'other {part}')}; {ops} in all"
    return whole if summary.recomputed_ops is None else f"{whole}, {ops}"


def _offloaded(summary: SolutionSummary) -> list[tuple[str, str]]:
    """Bytes sent to host memory, the link, and the seconds that the step waits for it."""
    if summary.no_offload:
        return [("offloaded", f"nothing: {summary.no_offload}")]
    link, sent_bytes = summary.link, sum(stage.offloaded_bytes or 0 for stage in summary.stages)
    if link is None:
        return []
    if not sent_bytes:
        return [("offloaded", "nothing")]
    rates = (link.to_host_bytes_per_second, link.to_device_bytes_per_second)
    speed = " and ".join("unlimited" if rate == math.inf else f"{rate / 1e9:.4g} GB/s" for rate in rates)
    held = f"at most {format_bytes(summary.host_bytes or 0)} on the host at once"
    stalls = f"computation waits {format_seconds(summary.stall_seconds or 0.0)}"
    return [("offloaded", f"{format_bytes(sent_bytes)}, {held}; {stalls}"), ("link", f"to the host and back: {speed}")]


def _stated(summary: SolutionSummary) -> list[tuple[str, str]]:
    """The manual decisions, one line a rule."""
    return [("" if number else "stated", line) for number, line in enumerate(summary.stated or ())]


def _times(summary: SolutionSummary) -> str:
    planned, unplanned = format_seconds(summary.predicted_seconds), format_seconds(summary.unplanned_seconds)
    return f"{planned}: {summary.slowdown:.2f} x the {_unplanned(summary.frugal)} {unplanned}"


def _unplanned(frugal: bool | None) -> str:
    """The name of a step without a plan, which may never have been measured as a whole."""
    return "unplanned, computed" if frugal else "unplanned"


def _status(summary: SolutionSummary) -> str:
    """How good it is, and among what."""
    interrupted = "interrupted: the best until then; " if summary.interrupted else ""
    what = "plan that does what is stated" if summary.restricted else "plan of these stages"
    if summary.part == "node":
        what = "schedule of this graph"
    bound = f"no {what} within the budget takes less than {format_seconds(summary.lower_bound_seconds)}"
    if summary.status == "optimal":
        return f"{interrupted}optimal: no {what} within the budget is faster"
    return f"{interrupted}{summary.status}: at most {_percent(summary.gap)} of the time could be saved; {bound}"


def profile_report(profile: Profile) -> RenderableType:
    """A profile's stages, why some cannot be recomputed, and the step as a whole."""
    kind = "Estimated profile" if profile.estimated else "Profile"
    title = f"{kind} of {profile.model_class} on {profile.device} ({profile.precision})"
    columns = ["forward\nms", "backward\nms", "kept", "boundary", "rerun\nms", "rerun\nops"]
    table = plain_table(title, ["stage"], columns)
    reasons: dict[tuple[str, str], int] = {}
    rows = rows_of_stages(
        profile.stages,
        lambda r: (r.kept_bytes, r.boundary_bytes, r.recompute_ops, r.recomputable, r.reason, r.remedy),
        lambda r: [r.forward.seconds, r.backward.seconds, r.recompute_seconds],
    )
    for name, records in rows:
        table.add_row(*_stage_cells(name, records, reasons), style="dim" if records[0].kind == "outside" else None)
    notes = [
        (f"({number})", f"never runs again: {reason}{f'; remedy: {remedy}' if remedy else ''}")
        for (reason, remedy), number in reasons.items()
    ]
    notes += note_on_rows(path_of(profile.stages), any(len(records) > 1 for _, records in rows))
    below = facts([*_step(profile), *_left_out(profile.left_out)])
    return Group(table, *([facts(notes), ""] if notes else []), below)


def estimate_report(
    profile: Profile,
    summary: SolutionSummary | None,
    planned: EstimatedRun | None = None,
    *,
    kept_free_bytes: int = 0,
) -> RenderableType:
    """What a step takes on a device that was not there: whether it fits, what makes it, and the range of its time.

    Args:
        profile: the estimated one.
        summary: the plan; None where none fits.
        planned: steps under it.
        kept_free_bytes: of the device's memory, which the budget leaves out as nobody has given one.
    """
    estimate, resident = profile.estimate, profile.resident
    assert estimate is not None
    room = estimate.memory_bytes - profile.unplanned_peak_bytes
    fits = f"fits, {format_bytes(room)} free" if room >= 0 else f"{format_bytes(-room)} more than the device has"
    parts = [("parameters", resident.parameters), ("gradients", profile.made_gradient_bytes + resident.gradients)]
    parts += [("optimizer", resident.optimizer), ("buffers", resident.buffers), ("batch", resident.inputs)]
    activations_bytes = max(0, profile.unplanned_peak_bytes - profile.states_bytes - resident.inputs)
    rows = [
        ("device", f"{estimate.device}, {format_bytes(estimate.memory_bytes)} for a step"),
        ("model states", ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)),
        ("without a plan", f"peak {format_bytes(profile.unplanned_peak_bytes)}: {fits}"),
        ("", f"{format_bytes(activations_bytes)} of it are activations and temporaries"),
        ("", f"a step takes {_seconds_range(profile.unplanned_seconds, estimate)}"),
    ]
    if kept_free_bytes:
        budget = format_bytes(max(1, estimate.memory_bytes - kept_free_bytes))
        margin = f", and {estimate.margin}" if estimate.margin else ""
        rows.append(("budget", f"{budget}: {format_bytes(kept_free_bytes)} are kept free for fragmentation{margin}"))
    if summary is not None:
        peak = f"peak {format_bytes(summary.predicted_peak_bytes)}; a step takes "
        rows.append(("planned", peak + _seconds_range(summary.predicted_seconds, estimate)))
    rows += [] if planned is None else held_by_allocator(planned)
    return facts(rows)


def held_by_allocator(planned: EstimatedRun) -> list[tuple[str, str]]:
    """What CUDA's allocator would hold, and what to do where the device has too little for it."""
    from planner.training.allocator_advice import SEGMENTS

    default, expandable = planned.default, planned.expandable
    if default is None or expandable is None:
        return []
    held = f"may hold {format_bytes(default.reserved_bytes)}; with expandable segments "
    rows = [("CUDA's allocator", held + format_bytes(expandable.reserved_bytes))]
    remedy = f"set {'='.join(SEGMENTS)} in the environment"
    if expandable.short_bytes:
        short = format_bytes(expandable.short_bytes)
        rows.append(("", f"memory may run out, at worst by {short}: {remedy}, and plan for a smaller budget"))
    elif default.short_bytes:
        rows.append(("", f"memory may run out by {format_bytes(default.short_bytes)} without them: {remedy}"))
    elif default.flushes > expandable.flushes:
        rows.append(("", f"cached memory is given back {counted(default.flushes, 'time')}, which takes time: {remedy}"))
    return rows


def _seconds_range(seconds: float, estimate: EstimateRecord) -> str:
    low, high = seconds * estimate.least_seconds, seconds * estimate.most_seconds
    return f"{format_seconds(low)} to {format_seconds(high)}"


def device_report(device: DeviceRecord) -> RenderableType:
    """The rates of a device, each at its smallest and its largest work."""
    table = plain_table(f"{device.name}, {device.origin}", ["op", "type"], ["smallest", "largest", "per second"])
    for rate in device.rates:
        if not rate.points:
            continue
        (_, least), (work, most) = rate.points[0], rate.points[-1]
        unit = "FLOP" if rate.kind in BY_FLOPS else "B"
        cells = (format_seconds(least), format_seconds(most), f"{work / most / 1e9:,.1f} G{unit}")
        table.add_row(rate.kind, rate.dtype or "any", *cells)
    return table


def _left_out(records: Sequence[LeftOutRecord]) -> list[tuple[str, str]]:
    """Blocks that cannot run again, two lines for each kind."""
    lines = []
    for record in records:
        kept = f"{blocks_in_words(record)}, {format_bytes(record.kept_bytes)}: {record.reason}"
        lines += [("never runs again", kept), *([("", f"remedy: {record.remedy}")] if record.remedy else [])]
    return lines


def _stage_cells(name: str, records: Sequence[StageRecord], reasons: dict[tuple[str, str], int]) -> list[str]:
    """Cells of equal stages, with what one of them takes on average."""
    first = records[0]
    times = [
        _mean_ms([r.forward.seconds for r in records]),
        _mean_ms([r.backward.seconds for r in records]),
    ]
    if first.kind == "outside":
        return [name, *times, *[_NOTHING] * 4]
    if first.recomputable:
        again = [_mean_ms([r.recompute_seconds for r in records]), str(first.recompute_ops)]
    else:
        reason = first.reason or "it does not repeat its result"
        again = [f"never ({reasons.setdefault((reason, first.remedy), len(reasons) + 1)})", _NOTHING]
    return [name, *times, format_bytes(first.kept_bytes), format_bytes(first.boundary_bytes), *again]


def _mean_ms(seconds: Sequence[float]) -> str:
    return f"{sum(seconds) / len(seconds) * 1e3:.2f}"


def _step(profile: Profile) -> list[tuple[str, str]]:
    resident = profile.resident
    parts = [("parameters", resident.parameters), ("buffers", resident.buffers), ("optimizer", resident.optimizer)]
    parts += [("batch", resident.inputs), ("held by the loop", resident.loop)]
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)
    computed = ", computed: a few stages were kept at a time" if profile.frugal else ""
    facts = [
        ("unplanned peak", exact_bytes(profile.unplanned_peak_bytes) + computed),
        *_unsteady(profile.unsteady),
        *(("follows the batch", line) for line in profile.batch_sized),
        ("unplanned time", f"{format_seconds(profile.unplanned_seconds)} a step{computed}"),
        ("resident", f"{format_bytes(resident.total)}: {listed}"),
        ("measured on", f"{profile.device_name}, torch {profile.torch_version}")
        if profile.estimate is None
        else ("estimated", profile.estimate.in_words()),
        ("fingerprint", profile.fingerprint),
    ]
    if profile.optimizer.seconds:
        spent, peak = format_seconds(profile.optimizer.seconds), format_bytes(profile.optimizer.peak_bytes)
        facts.insert(3, ("optimizer step", f"{spent}, peak {peak}"))
    return facts


def ops_report(records: Sequence[OpRecord], *, limit: int) -> RenderableType:
    """The per-op records, largest output first; ``limit`` rows, or all for 0; totals below."""
    ordered = sorted(records, key=lambda record: (record.output_bytes, record.seconds), reverse=True)
    shown = ordered[: limit or None]
    title = f"Ops: {len(shown)} of {len(records)}, largest output first"
    table = plain_table(title, ["side", "module", "op"], ["output", "time", "kept"])
    for record in shown:
        table.add_row(*_op_cells(record))
    return Group(table, facts(_op_totals(records)))


def _op_cells(record: OpRecord) -> list[str]:
    size = format_bytes(record.output_bytes) if record.output_bytes else _NOTHING
    kept = "kept" if record.kept else ""
    return [
        record.side,
        record.module or record.place,
        record.op,
        size,
        milliseconds(record.seconds),
        kept,
    ]


def _op_totals(records: Sequence[OpRecord]) -> list[tuple[str, str]]:
    totals = []
    for side in ("forward", "backward"):
        part = [record for record in records if record.side == side]
        output, kept = sum(r.output_bytes for r in part), sum(r.output_bytes for r in part if r.kept)
        text = f"{len(part)} ops, {format_seconds(sum(r.seconds for r in part))}, {format_bytes(output)} of new storage"
        totals.append((side, f"{text}, {format_bytes(kept)} of it kept for backward" if kept else text))
    return totals


def training_report(run: TrainingRun, allocator_advice: str = "") -> RenderableType:
    """Losses of a planned training run, predicted beside measured, and what to do about the device's allocator."""
    plan = run.plan
    within = run.measured_peak_bytes <= plan.budget_bytes
    verdict = Text("within the budget") if within else Text("above the budget", style="red")
    slowdown = run.measured_seconds / plan.unplanned_seconds if plan.unplanned_seconds else 1.0
    measured = f"{format_seconds(run.measured_seconds)} a step, {slowdown:.2f} x the profile's unplanned step"
    return facts(
        [
            ("losses", losses_in_short(run.losses)),
            ("budget", exact_bytes(plan.budget_bytes)),
            ("predicted peak", exact_bytes(plan.predicted_peak_bytes)),
            ("measured peak", Text(f"{exact_bytes(run.measured_peak_bytes)}: ") + verdict),
            *((f"of rank {rank}", exact_bytes(peak)) for rank, peak in enumerate(run.rank_peak_bytes)),
            *_reserved(run),
            *([("allocator", allocator_advice)] if allocator_advice else []),
            *_retries(run),
            ("predicted time", f"{format_seconds(plan.predicted_seconds)} a step"),
            ("measured time", measured),
        ]
    )


def _reserved(run: TrainingRun) -> list[tuple[str, str]]:
    """Bytes that the allocator held of a CUDA device beside the tensors."""
    if run.reserved_bytes is None:
        return []
    above_bytes = run.reserved_bytes - run.measured_peak_bytes
    share = _share(above_bytes, run.reserved_bytes)
    size = exact_bytes(run.reserved_bytes)
    rounding = exact_bytes((run.allocated_bytes or run.measured_peak_bytes) - run.measured_peak_bytes)
    said = f"{size}: {share} of it no tensors ({rounding} in their blocks); --headroom {above_bytes} covers it"
    return [("reserved", said)]


def _retries(run: TrainingRun) -> list[tuple[str, str]]:
    if not run.failures:
        return []
    budget = run.plan.budget_bytes
    return [
        ("out of memory", f"{counted(len(run.failures), 'time')}; each time a smaller plan went on from there"),
        ("", f"the last one: -o FILE writes it, planner solve PROFILE --budget {budget} makes one like it"),
    ]


def milliseconds(seconds: float) -> str:
    """Seconds as a table has them: with two digits behind the point where they are few."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else _NOTHING


def _percent(part: float) -> str:
    """One digit behind the point, more where a small part needs them."""
    return f"{part:.1%}" if part >= 0.001 else f"{100 * part:.2g}%"


def verification_report(verified: Verification) -> RenderableType:
    """Every round's slowdown as predicted, measured and corrected, and the corrections below."""
    table = plain_table("Checked against its own run", ["plan"], ["predicted", "measured", "corrected", "corrections"])
    lines = []
    for number, each in enumerate(verified.rounds, start=1):
        table.add_row(
            f"{number}, used" if each.plan.schedule == verified.plan.schedule else str(number),
            f"{each.plan.slowdown:.3f} x",
            f"{each.measured_slowdown:.3f} x",
            f"{each.corrected_slowdown:.3f} x",
            str(len(each.corrections)),
        )
        lines += [(f"plan {number}", _correction_in_words(correction)) for correction in each.corrections]
    return Group(table, facts(lines)) if lines else table


def _correction_in_words(correction: Correction) -> str:
    what = correction.option or "run again whole"
    return (
        f"{correction.stages[0]} ({counted(len(correction.stages), 'stage')}), {what}: predicted "
        f"{format_seconds(correction.predicted_seconds)} more, measured {format_seconds(correction.measured_seconds)}"
    )


def frontier_report(frame: pd.DataFrame, title: str) -> RenderableType:
    """The two ends of every solver's curve: its smallest peak and its fastest plan."""
    table = plain_table(title, ["solver"], ["points", "smallest peak", "its time", "fastest", "its peak", "solved in"])
    curves: dict[str, list[dict[str, Any]]] = {}
    for values in frame.itertuples(index=False, name=None):
        row = dict(zip(frame.columns, values, strict=True))
        if row["solver"] != "lower_bound":
            curves.setdefault(row["solver"], []).append(row)
    for solver, rows in curves.items():
        small, fast = min(rows, key=lambda row: row["peak_bytes"]), min(rows, key=lambda row: row["seconds"])
        table.add_row(
            solver,
            str(len(rows)),
            format_bytes(int(small["peak_bytes"])),
            milliseconds(small["seconds"]),
            milliseconds(fast["seconds"]),
            format_bytes(int(fast["peak_bytes"])),
            milliseconds(sum(row["solve_seconds"] for row in rows)),
        )
    return table


def comparison_report(rows: Sequence[ComparisonRow], budget_bytes: int) -> RenderableType:
    """Every solver's plan for one budget, predicted beside measured; what was reserved where an allocator says so."""
    title = f"Budget {exact_bytes(budget_bytes)}"
    table = plain_table(
        title, ["solver", "status"], ["predicted peak", "measured", "off by", "predicted time", "measured", "slowdown"]
    )
    plain = next((row.measured_seconds for row in rows if row.solver == "none"), None)
    for row in rows:
        table.add_row(*_comparison_cells(row, plain))
    below = [(row.solver, text) for row in rows if (text := _below_comparison(row))]
    return Group(table, facts(below)) if below else table


def _below_comparison(row: ComparisonRow) -> str:
    """Bytes needed, or held by the allocator; the table has no room for these within 100 columns."""
    if row.minimum_budget_bytes is not None:
        return f"{row.reason or ''} ({format_bytes(row.minimum_budget_bytes)})"
    return "" if row.reserved_bytes is None else f"reserved {exact_bytes(row.reserved_bytes)} of the device"


def _comparison_cells(row: ComparisonRow, plain_seconds: float | None) -> list[str | Text]:
    if row.predicted_peak_bytes is None:
        return [row.solver, Text(row.status_in_words, style="red"), *[_NOTHING] * 6]
    if row.measured_peak_bytes is None:
        predicted = (
            format_bytes(row.predicted_peak_bytes),
            _NOTHING,
            _NOTHING,
            format_seconds(row.predicted_seconds or 0),
        )
        return [row.solver, row.status_in_words, *predicted, _NOTHING, _NOTHING]
    assert row.predicted_seconds is not None and row.measured_seconds is not None
    off = (row.predicted_peak_bytes - row.measured_peak_bytes) / row.measured_peak_bytes
    return [
        row.solver,
        row.status_in_words,
        format_bytes(row.predicted_peak_bytes),
        format_bytes(row.measured_peak_bytes),
        f"{off:+.2%}" if off else "0",
        milliseconds(row.predicted_seconds),
        milliseconds(row.measured_seconds),
        f"{row.measured_seconds / plain_seconds:.2f} x" if plain_seconds else _NOTHING,
    ]
