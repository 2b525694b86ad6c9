"""Output of a command: results on stdout, progress and warnings on stderr, and the files that it writes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.console import Console, RenderableType

from planner.cli.interrupts import CtrlC
from planner.units import format_bytes
from profiler.json_files import UNSHOWN, check_writable, is_special

if TYPE_CHECKING:
    from planner.plans.plan import Plan
    from planner.report.command_results import ResultSection
    from profiler.target_record import TargetRecord

LEAST_WIDTH = 40  # Below it numbers would be cut off.
PLAIN_WIDTH = 100  # columns where the output is no terminal
SEARCH_LINE_SECONDS = 10.0  # between lines of a search
LINE_SECONDS = 2.0  # between lines of progress there: a log says what goes on without a line for every stage

Report = Callable[[str, int, int], None]


def _launched_rank() -> int:
    """This process's rank, as torchrun tells it before any process group is there; 0 without torchrun."""
    several = int(os.environ.get("WORLD_SIZE", "") or 1) > 1
    return int(os.environ.get("RANK", "") or 0) if several else 0


@dataclass(slots=True)
class Output:
    """Prints what one command finds; every command is handed one, as ``obj`` of its context.

    Attributes:
        quiet: nothing on stderr but errors.
        verbose: a line for each part of the work, as it begins.
        traceback: every line that an error in the user's code came through.
        as_json: ``--json`` was given.
        answered: the JSON document has been printed.
        command: the command line, as it was given.
        rank: of several ranks only the first one prints results and progress; notes of the others name them.
        ctrl_c: whether Ctrl-C was pressed.
    """

    quiet: bool = False
    verbose: bool = False
    traceback: bool = False
    as_json: bool = False
    answered: bool = False
    command: str = ""
    rank: int = field(default_factory=_launched_rank)
    ctrl_c: CtrlC = field(default_factory=CtrlC)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes; the only one where there are not several."""
        return self.rank == 0

    def show(self, *parts: RenderableType) -> None:
        """Print results for a person: in the terminal's width, or plain, 100 columns wide or as COLUMNS says.

        Strings are text, not markup. With ``--json`` it goes to stderr, since stdout has the document.
        """
        if not self.is_first or (self.as_json and self.quiet):
            return
        if (sys.stderr if self.as_json else sys.stdout).isatty():
            console = Console(highlight=False, markup=False, emoji=False, stderr=self.as_json)
            for part in parts:
                console.print(part)
            return
        columns = os.environ.get("COLUMNS", "")
        width = max(LEAST_WIDTH, int(columns)) if columns.isdecimal() and int(columns) else PLAIN_WIDTH
        console = Console(width=width, highlight=False, markup=False, emoji=False)
        with console.capture() as printed:
            for part in parts:
                console.print(part)
        typer.echo("\n".join(line.rstrip() for line in printed.get().splitlines()), err=self.as_json)

    def show_json(self, document: dict[str, Any]) -> None:
        """Print the one JSON document of ``--json``."""
        self.answered = True
        if self.is_first:
            typer.echo(json.dumps(document, indent=1, allow_nan=False))

    def answer(self, document: dict[str, Any], *tables: RenderableType) -> None:
        """Print the document with ``--json``, and otherwise the tables."""
        if self.as_json:
            self.show_json(document)
        else:
            self.show(*tables)

    def note(self, text: str) -> None:
        """Print a line on stderr that says nothing is wrong; none with -q."""
        if not self.quiet:
            self.complain(text)

    def complain(self, text: str) -> None:
        """Print a line on stderr about what is wrong."""
        plain = UNSHOWN.sub(lambda found: repr(found[0])[1:-1], text)  # A file or a model may have made up the name.
        typer.echo(f"rank {self.rank}: {plain}" if self.rank else plain, err=True)

    def say_written(self, *paths: Path | None) -> None:
        """Print which files have been written, and how large they are."""
        for path in paths:
            if path is not None and self.is_first:
                self.note(f"written: {path} ({format_bytes(path.stat().st_size)})")

    def show_warnings_plainly(self) -> None:
        """Print warnings that no line of the user's caused without a line: the outermost one is typer's."""
        usual = warnings.showwarning

        def show_warning(
            message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
        ) -> None:
            if Path(filename).parent.name == "typer":
                self.complain(f"warning: {message}")
            else:
                usual(message, category, filename, lineno, file, line)

        warnings.showwarning = show_warning

    @contextlib.contextmanager
    def working(self) -> Iterator[Report]:
        """Progress on stderr, a bar on a terminal and lines elsewhere; what user code prints meanwhile goes there too.

        Both move only when they are told to: no thread redraws them while a step is being timed.

        Yields:
            ``report(what, done, total)``; a total of 0 is one that is not known.
        """
        last = 0
        with self._progress() as tell:

            def report(what: str, done: int, of: int) -> None:
                nonlocal last
                last = of or done + 1
                tell(what, done, of)

            with contextlib.ExitStack() as opened:
                place = opened.enter_context(open(os.devnull, "w")) if self.quiet else sys.stderr
                opened.enter_context(contextlib.redirect_stdout(place))
                yield report
            if last:
                tell("done", last, last)

    @contextlib.contextmanager
    def searching(self, limit_seconds: float) -> Iterator[None]:
        """Progress of a solver on stderr: seconds searched, of how many; ``limit_seconds`` 0 where that is not known.

        What is printed meanwhile goes to stderr.
        """
        limit, ended = int(limit_seconds) if math.isfinite(limit_seconds) else 0, threading.Event()
        with contextlib.redirect_stdout(sys.stderr), self._progress() as tell:

            def tick() -> None:
                began = time.monotonic()
                while not ended.wait(1.0 if sys.stderr.isatty() else SEARCH_LINE_SECONDS):
                    tell("search, seconds", min(int(time.monotonic() - began), limit), limit)

            thread = threading.Thread(target=tick, daemon=True)
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()

    def _progress(self) -> contextlib.AbstractContextManager[Report]:
        if not self.is_first or self.quiet:
            return contextlib.nullcontext(lambda what, done, total: None)
        return _bar() if sys.stderr.isatty() and not self.verbose else contextlib.nullcontext(self._lines())

    def _lines(self) -> Report:
        """Lines as the parts begin, some seconds apart, and the last one."""
        began, said = time.monotonic(), 0.0

        def report(what: str, done: int, total: int) -> None:
            nonlocal said
            now = time.monotonic()
            if now - said >= LINE_SECONDS or done == total or self.verbose:
                said = now
                left = time_left(now - began, done, total)
                count = f"{done}/{total}" if total else f"{done} done" if done else ""
                self.note(f"{now - began:5.0f} s  {what}  {count}{f', {left}' if left else ''}".rstrip())

        return report

    def write_result(
        self,
        path: Path | None,
        title: str,
        section: Callable[[], ResultSection],
        plan: Plan | None = None,
        target: TargetRecord | None = None,
    ) -> None:
        """Write a command's result as a page, with the plan that came out of it; nothing without a path.

        Args:
            path: of the page.
            title: its heading.
            section: the result.
            plan: the plan that came out of it.
            target: what the plan was made of, where it does not record it.
        """
        if path is None or not self.is_first:
            return
        from planner.report.page import Page, write_page
        from planner.report.plan_report import report_of_plan

        self.note("writing the report")
        explained = None if plan is None else report_of_plan(replace(plan, target=plan.target or target))
        write_page(Page(title=title, plan=explained, results=(section(),), commands=(self.command,)), path)
        self.say_written(path)


@contextlib.contextmanager
def _bar() -> Iterator[Report]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    began = time.monotonic()
    columns = (
        TextColumn("{task.description:<24}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    columns = (*columns, TextColumn("{task.fields[left]}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("", total=None, visible=False, left="")

        def report(what: str, done: int, total: int) -> None:
            left = time_left(time.monotonic() - began, done, total)
            known = {"description": what, "completed": done, "total": total or None, "left": left}
            bar.update(task, visible=True, refresh=True, **known)

        yield report


def time_left(spent_seconds: float, done: int, total: int) -> str:
    """An estimate by what is done until now; empty where there is nothing to tell it from.

    >>> time_left(30.0, 10, 40), time_left(300.0, 1, 2), time_left(1.0, 0, 5), time_left(1.0, 3, 0)
    ('about 90 s left', 'about 5 min left', '', '')
    """
    if not 0 < done < total:
        return ""
    seconds = spent_seconds / done * (total - done)
    return f"about {seconds:.0f} s left" if seconds < 120 else f"about {seconds / 60:.0f} min left"


Kind = Literal["json", "page", "picture", "table", "snapshot"]
_ENDINGS: dict[Kind, tuple[str, ...]] = {
    "json": (".json",),
    "page": (".html", ".htm"),
    "picture": (".png", ".svg", ".pdf"),
    "table": (".csv",),
    "snapshot": (".pickle",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFiles:
    """The files that ``-o`` names, told apart by their endings; None for those that are not asked for."""

    json: Path | None = None
    page: Path | None = None
    picture: Path | None = None
    table: Path | None = None
    snapshot: Path | None = None

    @property
    def all(self) -> tuple[Path, ...]:
        """All that are asked for."""
        return tuple(path for path in (self.json, self.page, self.picture, self.table, self.snapshot) if path)


def output_files(paths: Sequence[Path] | None, *kinds: Kind) -> OutputFiles:
    """The files to write, each of a kind that the command has; refused here, before any work.

    Args:
        paths: of ``-o``.
        kinds: what the command can write. JSON takes any ending that is none of another kind.

    Raises:
        ValueError: two files of one kind, an ending that the command does not write, or as ``check_folder``.
    """
    found: dict[str, Path] = {}
    for path in paths or ():
        check_folder(path)
        kind = next((kind for kind in kinds if path.suffix.lower() in _ENDINGS[kind]), None)
        if kind is None and "json" in kinds:
            kind = "json"
        if kind is None:
            endings = ", ".join(ending for each in kinds for ending in _ENDINGS[each] if ending != ".htm")
            raise ValueError(f"-o: expected a name ending in {endings}, got {str(path)!r}; rename it")
        if kind in found:
            raise ValueError(f"-o: {found[kind]} and {path} would hold the same {kind}; leave one out")
        found[kind] = path
    return OutputFiles(**found)


def check_folder(path: Path | None) -> None:
    """Refuse an output file that could not be written, before any long work.

    Raises:
        ValueError: the folder is not there or cannot be written to, or the path is a folder itself.
    """
    if path is None or is_special(path):
        return
    if os.path.isdir(path):  # What cannot be looked at is none, where pathlib raises.
        raise ValueError(f"{path}: it is a folder; add the name of a file to write")
    if not os.path.isdir(path.parent):
        raise ValueError(f"{path}: there is no folder {str(path.parent)!r}; create it first, or write elsewhere")
    check_writable(path)
