"""Results of commands (compare, max-batch, advise, train) as sections of a report: sentences, tables and bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.capacity.batch_limits import MODE_NAMES
from planner.explain.memory_breakdown import GROUPS, MemoryBreakdown
from planner.report.plan_report import MeasuredRun
from planner.units import exact_bytes, format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.capacity.advice import Advice
    from planner.capacity.batch_limits import Limit, MaxBatch
    from planner.capacity.levers import Combination
    from planner.training.solver_comparison import ComparisonRow
    from planner.training.training import TrainingRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultTable:
    """Rows of text; ``numbers`` of the last columns are aligned right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Bytes of several series for each name, beside a budget; None where there are none."""

    names: tuple[str, ...]
    series: tuple[tuple[str, tuple[int | None, ...]], ...]
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultSection:
    """The result of a command.

    Attributes:
        title: of the section.
        sentence: the answer.
        facts: names and what is said of each.
        tables: in their order.
        chart: above them.
    """

    title: str
    sentence: str
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[ResultTable, ...] = ()
    chart: BarChart | None = None


COMBINATIONS_SHOWN = 40
_NOTHING = "-"
_RESULTS = {"same": "yes", "rounding": "up to rounding", "other": "no"}


def measured_of_training(run: TrainingRun) -> MeasuredRun:
    """Measurements of training under a plan."""
    return MeasuredRun(peak_bytes=run.measured_peak_bytes, seconds=run.measured_seconds, losses=run.losses)


def section_of_comparison(rows: Sequence[ComparisonRow], budget_bytes: int) -> ResultSection:
    """Every solver's plan, predicted beside measured; ``none`` is the unplanned model."""
    plain = next((row.measured_seconds for row in rows if row.solver == "none"), None)
    planned = [row for row in rows if row.solver != "none" and row.predicted_peak_bytes is not None]
    best = min(planned, key=lambda row: row.measured_seconds or row.predicted_seconds or 0.0, default=None)
    sentence = f"No solver has a plan within {exact_bytes(budget_bytes)}."
    if best is not None:
        sentence = f"Within {format_bytes(budget_bytes)} the plan of {best.solver} is the fastest"
        if plain and best.measured_seconds:
            sentence += f", measured {best.measured_seconds / plain:.2f} times the unplanned step"
        sentence += "."
    columns = ("solver", "status", "predicted peak", "measured peak", "predicted time", "measured time", "slowdown")
    return ResultSection(
        title="Solvers compared",
        sentence=sentence,
        facts=(
            ("Budget", exact_bytes(budget_bytes)),
            *((row.solver, f"{row.reason} ({format_bytes(row.minimum_budget_bytes)})") for row in rows
              if row.minimum_budget_bytes is not None),
        ),
        tables=(
            ResultTable(
                title="Predicted beside measured",
                columns=columns,
                rows=tuple(_comparison_cells(row, plain) for row in rows),
                numbers=5,
            ),
        ),
        chart=BarChart(
            names=tuple(row.solver for row in rows),
            series=(
                ("predicted", tuple(row.predicted_peak_bytes for row in rows)),
                ("measured", tuple(row.measured_peak_bytes for row in rows)),
            ),
            budget_bytes=budget_bytes,
        ),
    )  # fmt: skip


def _comparison_cells(row: ComparisonRow, plain_seconds: float | None) -> tuple[str, ...]:
    slowdown = f"{row.measured_seconds / plain_seconds:.2f} x" if row.measured_seconds and plain_seconds else _NOTHING
    return (
        row.solver,
        row.status_in_words,
        _size(row.predicted_peak_bytes),
        _size(row.measured_peak_bytes),
        _time(row.predicted_seconds),
        _time(row.measured_seconds),
        slowdown,
    )


def section_of_limits(limits: MaxBatch) -> ResultSection:
    """The largest sizes in each training mode."""
    best = limits.best
    modes = [getattr(limits, mode) for mode in MODE_NAMES]
    found = [limit for limit in modes if limit.size]
    return ResultSection(
        title=f"Largest {limits.vary}",
        sentence=(
            f"Within {format_bytes(limits.budget_bytes)} {limits.vary}={best.size} with {MODE_NAMES[best.mode]} "
            f"has the best throughput: {_speed(best)} samples a second."
        ),
        facts=(
            ("Budget", exact_bytes(limits.budget_bytes)),
            ("Model states", f"{format_bytes(limits.states_bytes)}: parameters, gradients, optimizer states"),
            *((("Headroom", format_bytes(limits.headroom_bytes)),) if limits.headroom_bytes else ()),
            ("Profiled at", f"{limits.vary} {', '.join(map(str, limits.profiled))}"),
            *((MODE_NAMES[limit.mode], limit.reason) for limit in modes if limit.reason),
            *(("Note", note) for note in limits.notes),
        ),
        tables=(
            ResultTable(
                title="The largest in each mode",
                columns=("with", limits.vary, "predicted", "peak", "samples/s", "of unplanned"),
                rows=tuple(_limit_cells(limit) for limit in modes),
                numbers=5,
            ),
        ),
        chart=BarChart(
            names=tuple(f"{MODE_NAMES[limit.mode]}: {limit.size}" for limit in found),
            series=(
                ("predicted", tuple(limit.predicted_peak_bytes for limit in found)),
                ("measured", tuple(limit.peak_bytes if limit.confirmed else None for limit in found)),
            ),
            budget_bytes=limits.budget_bytes,
        ),
    )


def _limit_cells(limit: Limit) -> tuple[str, ...]:
    if not limit.size:
        return (MODE_NAMES[limit.mode], _NOTHING if limit.size is None else "0", *[_NOTHING] * 4)
    peak = f"{_size(limit.peak_bytes)}{'' if limit.confirmed else ' (predicted)'}"
    relative = _NOTHING if limit.relative is None else f"{limit.relative:.3f} x"
    return (MODE_NAMES[limit.mode], str(limit.size), str(limit.predicted_size), peak, _speed(limit), relative)


def _speed(limit: Limit) -> str:
    rate = limit.samples_per_second
    return _NOTHING if rate is None else f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def section_of_advice(advice: Advice) -> ResultSection:
    """Where the memory goes, and what fits it into the budget."""
    alone = advice.alone()
    return ResultSection(
        title="Advice",
        sentence=_advice_in_words(advice),
        facts=(
            ("Budget", exact_bytes(advice.budget_bytes)),
            ("Model", f"{advice.model_class}, {advice.precision} on {advice.device}, {advice.optimizer}"),
            *((lever.name, f"does not apply: {lever.reason}") for lever in advice.levers if not lever.applies),
            *((f"To use {lever.name}", lever.change) for lever in advice.levers if lever.applies and lever.change),
            *(("Note", note) for note in advice.notes),
        ),
        tables=(
            _combinations("Levers alone", alone, advice),
            *((_combinations("Levers together", advice.together(), advice),) if advice.together() else ()),
            _memory(advice.memory),
        ),
        chart=BarChart(
            names=tuple(each.title for each in alone),
            series=(("peak", tuple(each.peak_bytes for each in alone)),),
            budget_bytes=advice.budget_bytes,
        ),
    )


def _advice_in_words(advice: Advice) -> str:
    budget = format_bytes(advice.budget_bytes)
    if advice.cheapest is None:
        nearest = advice.nearest
        return f"Nothing fits {budget}: {nearest.title} comes nearest, {format_bytes(nearest.short_bytes)} above it."
    said = []
    if advice.exact is not None:
        said.append(f"{_taking(advice.exact, advice)} and leaves training as it is")
    if advice.cheapest is not advice.exact:
        said.append(f"{_taking(advice.cheapest, advice)} and changes training")
    return f"Within {budget}: {'; '.join(said)}."


def _taking(combination: Combination, advice: Advice) -> str:
    plain_seconds, seconds = advice.unplanned.seconds, combination.seconds
    ratio = f", {seconds / plain_seconds:.2f} times the unplanned step," if plain_seconds and seconds else ""
    return f"{combination.title} takes {format_bytes(combination.peak_bytes)}{ratio}"


def _combinations(title: str, rows: Sequence[Combination], advice: Advice) -> ResultTable:
    shown = rows[:COMBINATIONS_SHOWN]
    return ResultTable(
        title=title if len(shown) == len(rows) else f"{title}: {len(shown)} of {len(rows)}",
        columns=("with", "same result", "peak is", "peak", "to spare", "time", "of unplanned"),
        rows=tuple(_combination_cells(each, advice) for each in shown),
        numbers=4,
    )


def _combination_cells(each: Combination, advice: Advice) -> tuple[str, ...]:
    plain_seconds = advice.unplanned.seconds
    ratio = f"{each.seconds / plain_seconds:.2f} x" if each.seconds and plain_seconds else _NOTHING
    spare = format_bytes(each.budget_bytes - each.peak_bytes)
    return (
        each.title,
        _RESULTS[each.result],
        each.peak_basis,
        _size(each.peak_bytes),
        spare,
        _time(each.seconds),
        ratio,
    )


def _memory(moments: Sequence[MemoryBreakdown]) -> ResultTable:
    rows: list[tuple[str, ...]] = []
    for group in GROUPS:
        sizes = [each.of_group(group) for each in moments]
        if any(sizes):
            rows.append((group, *map(_size, sizes)))
            names = dict.fromkeys(name for each in moments for name in each.by_what(group))
            rows += [
                (f"· {name}", *(_size(each.by_what(group).get(name)) for each in moments)) for name in _several(names)
            ]
    rows.append(("together", *(_size(each.peak_bytes) for each in moments)))
    return ResultTable(
        title="Where the memory goes without a plan",
        columns=("bytes", *(f"in {each.moment}" for each in moments)),
        rows=tuple(rows),
        numbers=len(moments),
    )


def _several(names: Iterable[str]) -> list[str]:
    """The parts of a group, where it has more than one."""
    parts = [*names]
    return parts if len(parts) > 1 else []


def _size(size_bytes: int | None) -> str:
    return format_bytes(size_bytes) if size_bytes else _NOTHING


def _time(seconds: float | None) -> str:
    return format_seconds(seconds) if seconds else _NOTHING
