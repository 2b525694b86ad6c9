"""Results of commands as sections of a report: sentences, tables and bars, ready to be shown."""

from __future__ import annotations

from dataclasses import dataclass


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
    """What a command found out.

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
