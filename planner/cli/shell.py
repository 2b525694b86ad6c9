"""How the command line reads repeated options, shows progress, prints results and ends with its exit codes."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
import os
import shlex
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType
from typer.core import TyperCommand, TyperGroup

from planner.cli.errors import UsageError, naming_option, option_in, own_line, usage_in_words
from planner.cli.interrupts import INTERRUPTED, say_interrupted
from planner.cli.options import RECORDED
from planner.units import format_bytes, show_sizes_like
from profiler.json_files import UNSHOWN, check_writable, is_special

WRONG_INPUT = 2
NO_PLAN = 3
RETRIES = 3  # of --retry without a number: each takes at least a twentieth off the budget
LEAST_WIDTH = 40  # Below it numbers would be cut off.
PLAIN_WIDTH = 100  # columns where the output is no terminal
SEARCH_LINE_SECONDS = 10.0  # between lines of a search
LINE_SECONDS = 2.0  # between lines of progress there: a log says what goes on without a line for every stage

Report = Callable[[str, int, int], None]

_command = ""  # that runs

_rank = 0  # Of several ranks the first one prints; those of torchrun know theirs at once.
if int(os.environ.get("WORLD_SIZE", "") or 1) > 1:
    _rank = int(os.environ.get("RANK", "") or 0)


def set_rank(rank: int) -> None:
    """Of several ranks: only the first one prints results and progress; notes of the others name them."""
    global _rank
    _rank = rank


def is_first() -> bool:
    """Whether this is the rank that prints and writes; the only one where there are not several."""
    return _rank == 0


@dataclass(slots=True)
class Talk:
    """How much is said, and in which form.

    Attributes:
        quiet: nothing on stderr but errors.
        verbose: a line for each part of the work, as it begins.
        traceback: of errors in the user's code every line.
        as_json: ``--json`` was given.
        answered: the JSON document has been printed.
    """

    quiet: bool = False
    verbose: bool = False
    traceback: bool = False
    as_json: bool = False
    answered: bool = False


_talk = Talk()
_GLOBAL_OPTIONS = ("-q", "--quiet", "-v", "--verbose", "--traceback")


def set_verbosity(*, quiet: bool, verbose: bool, traceback: bool) -> None:
    """What the options that stand before or after any command ask for."""
    _talk.quiet, _talk.verbose, _talk.traceback = quiet, verbose, traceback


def given_command() -> str:
    """The command that runs, as it was given."""
    return _command


class PlannerGroup(TyperGroup):
    """The commands, ending as the contract says: 2 for wrong input, 3 where no plan comes out, 130 by Ctrl-C."""

    def main(self, *args: Any, **extra: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # What its encoding lacks is no reason to lose a result.
                stream.reconfigure(errors="replace")
        logger = logging.getLogger("planner")
        level = logger.level
        logger.setLevel(logging.WARNING)  # Tables and the command's own progress say the same.
        try:
            return super().main(*args, **extra)
        finally:  # Of what was said to this command, nothing holds for another one in this process.
            logger.setLevel(level)
            _talk.as_json = False
            show_sizes_like("")

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        _talk.as_json, _talk.answered = "--json" in args, False
        first = [arg for arg in args if arg in _GLOBAL_OPTIONS]  # They may stand behind the command, too.
        try:
            return super().make_context(
                info_name, [*first, *(arg for arg in args if arg not in _GLOBAL_OPTIONS)], parent, **extra
            )
        except UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                raise
            _refuse(usage_in_words(error, info_name))
            raise typer.Exit(WRONG_INPUT) from error

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            of_group = error.ctx in (None, ctx) and type(error).__name__ != "BadOptionUsage"
            name = ctx.command_path if of_group else f"{ctx.command_path} {ctx.invoked_subcommand}"
            _refuse(usage_in_words(error, name))
            raise typer.Exit(WRONG_INPUT) from error
        except ValueError as error:
            from planner.plans.refusals import Infeasible

            command = self.get_command(ctx, ctx.invoked_subcommand) if ctx.invoked_subcommand else None
            message = naming_option(str(error), command.params if command is not None else ())
            if _talk.traceback:
                complain("".join(traceback.format_exception(error)))
            if isinstance(error, Infeasible):
                known = {name: getattr(error, name) for name in ("budget_bytes", "minimum_budget_bytes", "reason")}
                _refuse(message, error.status, known)
                raise typer.Exit(NO_PLAN) from error
            _refuse(message, where="" if _talk.traceback else own_line(error))
            raise typer.Exit(WRONG_INPUT) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # Whoever reads wants no more.
                raise
            _talk.answered = _talk.answered or error.filename is None
            _refuse(
                f"{error.filename or 'standard output'}: expected a place that can be written to, got "
                f"{error.strerror or error}; make room or choose another"
            )
            raise typer.Exit(WRONG_INPUT) from error
        except KeyboardInterrupt as error:
            say_interrupted()
            if _talk.as_json and not _talk.answered:
                show_json({"status": "interrupted", "interrupted": True})
            raise typer.Exit(INTERRUPTED) from error


def _refuse(message: str, status: str = "error", known: Mapping[str, Any] | None = None, where: str = "") -> None:
    """Say what is wrong: on stderr of every rank, as torchrun ends all with the first, and with --json on stdout."""
    complain(f"{status}: {message}")
    if where:
        complain(f"  {where}\n  (--traceback shows every line)")
    if _talk.as_json and not _talk.answered:
        at = {"at": where} if where else {}
        show_json({"status": status, "message": message, "option": option_in(message), **at, **(known or {})})


class ManyValues(TyperCommand):
    """A command whose ``--set`` and ``--stages`` take several values after one option, and others one or none."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        global _command
        _command = shlex.join(["planner", str(ctx.info_name), *args])
        check_settings(args)
        spelled = with_default(spread(args), "--retry", str(RETRIES), lambda text: text.lstrip("-").isdigit())
        for option in ("--verify", "--measure"):
            spelled = with_default(spelled, option, RECORDED, lambda text: ":" in text)
        return super().parse_args(ctx, spelled)


def check_settings(args: Sequence[str]) -> None:
    """Refuse a setting that is written with a space; raises ValueError."""
    for option, key, value in zip(args, args[1:], args[2:], strict=False):
        if option == "--set" and "=" not in key + value and ":" not in value and "-" not in (key[:1], value[:1]):
            raise ValueError(f"--set: expected KEY=VALUE, got '{key} {value}'; write --set {key}={value}")


def with_default(args: Sequence[str], option: str, default: str, is_value: Callable[[str], bool]) -> list[str]:
    """Put ``default`` behind an option that no value of its own follows.

    >>> with_default(["--retry", "--steps", "3"], "--retry", "2", str.isdigit)
    ['--retry', '2', '--steps', '3']
    >>> with_default(["--retry", "5"], "--retry", "2", str.isdigit)
    ['--retry', '5']
    """
    spelled: list[str] = []
    for text, after in zip(args, [*args, ""][1:], strict=True):
        spelled += [text, default] if text == option and not is_value(after) else [text]
    return spelled


def spread(args: Sequence[str]) -> list[str]:
    """Repeat ``--set`` and ``--stages`` before each of the values that follow them.

    A further setting has an ``=``; a further pattern has no colon, which every TARGET has.

    >>> spread(["zoo:mlp", "--set", "a=1", "b=2", "--stages", "h.*", "ln", "zoo:mlp", "-o", "x"])
    ['zoo:mlp', '--set', 'a=1', '--set', 'b=2', '--stages', 'h.*', '--stages', 'ln', 'zoo:mlp', '-o', 'x']
    """
    continues = {"--set": lambda text: "=" in text, "--stages": lambda text: ":" not in text}
    spelled: list[str] = []
    option, first = "", False  # the option whose values come, and whether its own value is still due
    for text in args:
        if option and not first and not text.startswith("-") and continues[option](text):
            spelled += [option, text]
            continue
        spelled.append(text)
        if first:
            first = False
        else:
            option, first = (text, True) if text in continues else ("", False)
    return spelled


def show_warnings_plainly() -> None:
    """Of warnings that no line of the user's caused, show the message alone: the outermost line is typer's."""
    usual = warnings.showwarning

    def show_warning(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if Path(filename).parent.name == "typer":
            complain(f"warning: {message}")
        else:
            usual(message, category, filename, lineno, file, line)

    warnings.showwarning = show_warning


def check_folder(path: Path | None) -> None:
    """Refuse an output file that could not be written, before any long work.

    Raises:
        ValueError: the folder is not there or cannot be written to, or the path is a folder itself.
    """
    if path is None or is_special(path):
        return
    if os.path.isdir(path):  # What cannot be looked at is none, where pathlib raises.
        raise ValueError(f"{path}: expected the name of a file to write, got a folder; add a file name")
    if not os.path.isdir(path.parent):
        raise ValueError(f"{path}: expected a folder that exists, got none at {str(path.parent)!r}; create it first")
    check_writable(path)


def show(*parts: RenderableType) -> None:
    """Print results for a person: to a terminal in its width, elsewhere plain, 100 columns wide or as COLUMNS says.

    What strings hold is text, and no markup. On stderr where stdout has a JSON document.
    """
    if not is_first() or (_talk.as_json and _talk.quiet):
        return
    if (sys.stderr if _talk.as_json else sys.stdout).isatty():
        console = Console(highlight=False, markup=False, emoji=False, stderr=_talk.as_json)
        for part in parts:
            console.print(part)
        return
    columns = os.environ.get("COLUMNS", "")
    width = max(LEAST_WIDTH, int(columns)) if columns.isdecimal() and int(columns) else PLAIN_WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as printed:
        for part in parts:
            console.print(part)
    typer.echo("\n".join(line.rstrip() for line in printed.get().splitlines()), err=_talk.as_json)


def show_json(document: dict[str, Any]) -> None:
    """The one JSON document of ``--json``."""
    _talk.answered = True
    if is_first():
        typer.echo(json.dumps(document, indent=1, allow_nan=False))


def note(text: str) -> None:
    """A line for a person on stderr, that says nothing is wrong; none with -q."""
    if not _talk.quiet:
        complain(text)


def complain(text: str) -> None:
    """A line on stderr about what is wrong."""
    plain = UNSHOWN.sub(lambda found: repr(found[0])[1:-1], text)  # What it names may be a file's or a model's.
    typer.echo(f"rank {_rank}: {plain}" if _rank else plain, err=True)


def say_written(*paths: Path | None) -> None:
    """What files have been written, and how large they are."""
    for path in paths:
        if path is not None and is_first():
            note(f"written: {path} ({format_bytes(path.stat().st_size)})")


@contextlib.contextmanager
def working() -> Iterator[Report]:
    """Progress on stderr, a bar on a terminal and lines elsewhere; what user code prints meanwhile goes there too.

    Both move only when they are told to: no thread redraws them while a step is being timed.

    Yields:
        ``report(what, done, total)``; a total of 0 is one that is not known.
    """
    last = 0
    with _progress() as tell:

        def report(what: str, done: int, of: int) -> None:
            nonlocal last
            last = of or done + 1
            tell(what, done, of)

        with _stdout_elsewhere():
            yield report
        if last:
            tell("done", last, last)


@contextlib.contextmanager
def searching(limit_seconds: float) -> Iterator[None]:
    """Progress of a solver on stderr: for how long it has searched, of how long it may; 0 where that is not known."""
    limit, ended = int(limit_seconds) if math.isfinite(limit_seconds) else 0, threading.Event()
    with _progress() as tell:

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


@contextlib.contextmanager
def _stdout_elsewhere() -> Iterator[None]:
    """What is printed meanwhile goes to stderr, or nowhere with -q."""
    with contextlib.ExitStack() as opened:
        place = opened.enter_context(open(os.devnull, "w")) if _talk.quiet else sys.stderr
        opened.enter_context(contextlib.redirect_stdout(place))
        yield


def _progress() -> contextlib.AbstractContextManager[Report]:
    if not is_first() or _talk.quiet:
        return contextlib.nullcontext(lambda what, done, total: None)
    return _bar() if sys.stderr.isatty() and not _talk.verbose else contextlib.nullcontext(_lines())


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


def _lines() -> Report:
    """Lines as the parts begin, some seconds apart, and the last one."""
    began, said = time.monotonic(), 0.0

    def report(what: str, done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= LINE_SECONDS or done == total or _talk.verbose:
            said = now
            left = time_left(now - began, done, total)
            count = f"{done}/{total}" if total else f"{done} done" if done else ""
            note(f"{now - began:5.0f} s  {what}  {count}{f', {left}' if left else ''}".rstrip())

    return report
