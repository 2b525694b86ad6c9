"""The table of model states that a person reads, at 100 columns."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape

from planner.cli.tables import facts, plain_table
from planner.explain.state_table import ModelStates, StateRow
from planner.units import format_bytes

_NOTHING = "-"


def states_report(states: ModelStates) -> RenderableType:
    """What each part takes, measured and by formula; what they come to together; the first step and later ones."""
    title = f"Model states of {states.model_class} ({states.precision}, {states.optimizer})"
    table = plain_table(title, ["part"], ["measured", "by formula"])
    table.add_column("how")
    for row in states.rows:
        table.add_row(*_cells(row), style=None if row.held else "dim")
    return Group(table, facts(_sums(states)))


def _cells(row: StateRow) -> list[str]:
    size = _NOTHING if row.formula_bytes is None else format_bytes(row.formula_bytes)
    return [escape(row.part), format_bytes(row.measured_bytes), size, escape(row.how)]


def _sums(states: ModelStates) -> list[tuple[str, str]]:
    count = states.parameter_count
    each = f"{states.held_bytes / count:.2f} bytes for each of {count:,} parameters" if count else "no parameters"
    first = states.first_peak_bytes
    begins = [] if first is None else [("first step", f"peak {format_bytes(first)}: states are made in it")]
    return [
        ("together", f"{format_bytes(states.held_bytes)}: {each}, without those that come and go"),
        *begins,
        ("later steps", f"peak {format_bytes(states.peak_bytes)}, in the {states.peak_phase} phase"),
    ]
