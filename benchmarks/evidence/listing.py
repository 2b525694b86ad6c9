"""What the list of benchmarks holds: a benchmark is a command, and a table is what is said of a result file."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A result file.

    Attributes:
        name: of the file, without its ending.
        what: what was measured.
        says: the numbers to remember, read from the table's rows.
        written_as: the name under which the benchmark writes it, where that is another.
    """

    name: str
    what: str
    says: Callable[[pd.DataFrame], str]
    written_as: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A command, and the tables that it makes.

    Attributes:
        name: to choose it by.
        module: as in ``python -m MODULE``.
        full: the arguments of the committed results.
        quick: arguments that show in about a minute that it still works; None where another one's quick run shows it.
        quick_module: what they are of, where that is another module.
        tables: in the order of the page.
    """

    name: str
    module: str
    full: str
    quick: str | None
    quick_module: str = ""
    tables: tuple[Table, ...]

    @property
    def command(self) -> str:
        """As it is typed, and as the result files record it."""
        return "python -m " + shlex.join([self.module, *shlex.split(self.full)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A heading of the page: a paragraph on what the tables below it have in common, and their benchmarks."""

    heading: str
    intro: str = ""
    benchmarks: tuple[Benchmark, ...]
