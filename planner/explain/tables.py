"""Tables and lists of facts as every report of the planner prints them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table


def plain_table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table without lines, its columns of text before those of numbers."""
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
    return table


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    """Names in bold with what is said of each, one a line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(name, text)
    return grid
