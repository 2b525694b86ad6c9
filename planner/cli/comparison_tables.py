"""The tables in which solvers stand beside each other: their curves, and their plans for one budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from planner.cli.tables import milliseconds
from planner.explain.tables import facts, plain_table
from planner.units import exact_bytes, format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas as pd

    from planner.training.solver_comparison import ComparisonRow

_NOTHING = "-"


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
    """What it would need, or what the allocator held for it; the table has no room for these within 100 columns."""
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
