"""How the command line is read: repeated options, exit codes, and what is said of wrong input."""

from __future__ import annotations

import errno
import io
import linecache
import logging
import re
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from traceback import FrameSummary, extract_tb
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from planner.cli.interrupts import INTERRUPTED
from planner.cli.options import RECORDED
from planner.cli.output import Output
from planner.units import show_sizes_like

UsageError: Any = typer.BadParameter.__mro__[1]  # Of click, or of the copy of it that typer brings.

WRONG_INPUT = 2
NO_PLAN = 3
RETRIES = 3  # of --retry without a number: each takes at least a twentieth off the budget

_GLOBAL_OPTIONS = ("-q", "--quiet", "-v", "--verbose", "--traceback")
_OURS = Path(__file__).resolve().parents[2]
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_SUBJECT = re.compile(r"(--[a-z-]+|-o|[A-Z]+)\b")


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
            show_sizes_like("")

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        out = extra["obj"] = extra.get("obj") or Output()
        out.as_json = "--json" in args
        first = [arg for arg in args if arg in _GLOBAL_OPTIONS]  # They may stand behind the command, too.
        try:
            return super().make_context(
                info_name, [*first, *(arg for arg in args if arg not in _GLOBAL_OPTIONS)], parent, **extra
            )
        except UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                raise
            _refuse(out, usage_in_words(error, info_name))
            raise typer.Exit(WRONG_INPUT) from error

    def invoke(self, ctx: Any) -> Any:
        out: Output = ctx.obj
        try:
            return super().invoke(ctx)
        except UsageError as error:
            of_group = error.ctx in (None, ctx) and type(error).__name__ != "BadOptionUsage"
            name = ctx.command_path if of_group else f"{ctx.command_path} {ctx.invoked_subcommand}"
            _refuse(out, usage_in_words(error, name))
            raise typer.Exit(WRONG_INPUT) from error
        except ValueError as error:
            from planner.plans.refusals import Infeasible

            command = self.get_command(ctx, ctx.invoked_subcommand) if ctx.invoked_subcommand else None
            message = naming_option(str(error), command.params if command is not None else ())
            if out.traceback:
                out.complain("".join(traceback.format_exception(error)))
            if isinstance(error, Infeasible):
                known = {name: getattr(error, name) for name in ("budget_bytes", "minimum_budget_bytes", "reason")}
                _refuse(out, message, error.status, known)
                raise typer.Exit(NO_PLAN) from error
            _refuse(out, message, where="" if out.traceback else own_line(error))
            raise typer.Exit(WRONG_INPUT) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # Whoever reads wants no more.
                raise
            out.answered = out.answered or error.filename is None
            _refuse(
                out,
                f"{error.filename or 'standard output'}: expected a place that can be written to, got "
                f"{error.strerror or error}; make room or choose another",
            )
            raise typer.Exit(WRONG_INPUT) from error
        except KeyboardInterrupt as error:
            out.ctrl_c.say()
            if out.as_json and not out.answered:
                out.show_json({"status": "interrupted", "interrupted": True})
            raise typer.Exit(INTERRUPTED) from error


def _refuse(
    out: Output, message: str, status: str = "error", known: Mapping[str, Any] | None = None, where: str = ""
) -> None:
    """Say what is wrong: on stderr of every rank, as torchrun ends all with the first, and with --json on stdout."""
    out.complain(f"{status}: {message}")
    if where:
        out.complain(f"  {where}\n  (--traceback shows every line)")
    if out.as_json and not out.answered:
        at = {"at": where} if where else {}
        out.show_json({"status": status, "message": message, "option": option_in(message), **at, **(known or {})})


class ManyValues(TyperCommand):
    """A command whose ``--set`` and ``--stages`` take several values after one option, and others one or none."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.obj.command = shlex.join(["planner", str(ctx.info_name), *args])
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


def usage_in_words(error: Any, command: str) -> str:
    """The refusal of click, in the words of all other messages; ``command`` is what was called."""
    kind = type(error).__name__
    see = f"{command} -h lists them"
    message = error.format_message()
    if kind == "MissingParameter":
        return f"{_name_of(error.param)}: it is missing; add it, {command} -h says more"
    if kind == "NoSuchOption":
        near = f"did you mean {' or '.join(sorted(error.possibilities))}? {see}" if error.possibilities else see
        return f"{error.option_name}: {command} has no such option; {near}"
    if kind == "BadOptionUsage":
        return f"{error.option_name}: its value is missing; add it, {command} -h says more"
    if getattr(error, "param", None) is not None:
        return _value_in_words(error)
    if match := re.match(r"No such command '(.*?)'\.?\s*(.*)", message, re.DOTALL):
        near = f"{match[2][:1].lower()}{match[2][1:]} " if match[2] else ""
        return f"COMMAND: expected a command of planner, got {match[1]!r}; {near}{see}"
    if match := re.match(r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)", message, re.DOTALL):
        return f"{command}: expected no further argument, got {match[1]}; leave it out, {command} -h says more"
    return f"{command}: {message[:1].lower()}{message[1:]}; {command} -h says more"


def _name_of(param: Any) -> str:
    """As it is written: the longest name of an option, or what stands for an argument in the help."""
    options = [name for name in param.opts if name.startswith("-")]
    return max(options, key=len) if options else (param.metavar or param.name or "").strip("[]").upper()


def _value_in_words(error: Any) -> str:
    """The message for a value of another type or out of range, from click, or by typer from pydantic."""
    name, message = _name_of(error.param), str(error.message)
    if hasattr(error.__cause__, "errors"):
        first = error.__cause__.errors()[0]
        expected = re.sub(r"^Input should be (a valid )?|,.*", "", first["msg"])
        return f"{name}: expected {_a_number(expected)}, got {first['input']!r}; correct it"
    match = re.match(r"'?(.*?)'? is not (?:a valid )?(.*?)\.?$", message, re.DOTALL)
    return f"{name}: expected {_a_number(match[2])}, got {match[1]!r}; correct it" if match else f"{name}: {message}"


def _a_number(expected: str) -> str:
    """In words: a type, or a range."""
    kinds = {"integer": "a whole number", "int": "a whole number", "float": "a number", "number": "a number"}
    return kinds.get(expected, f"a number {expected}")


def naming_option(message: str, params: Iterable[Any]) -> str:
    """The message with the option's name where it begins with what Python calls it.

    Args:
        message: ``budget: expected ...``, say.
        params: of the command that runs.
    """
    subject, colon, rest = message.partition(": ")
    if subject.split(" ")[0] == "target":
        return f"TARGET{message.removeprefix('target')}"
    if subject == "zoo":
        return f"TARGET: {rest}"
    if subject.startswith("zoo:"):
        return f"TARGET {message}"
    subject = re.sub("^an? ", "", subject)
    option = f"--{subject.replace(' ', '-').replace('_', '-')}"
    known = {name for param in params for name in param.opts}
    return f"{option}{colon}{rest}" if colon and option in known else message


def option_in(message: str) -> str | None:
    """The option or the argument that a message begins with."""
    match = _SUBJECT.match(message)
    return match[1] if match else None


def own_line(error: BaseException) -> str:
    """The deepest line of the user's own code that an error came from; empty where there is none."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        source = linecache.getline(error.filename, error.lineno).strip()
        return f"at {error.filename}:{error.lineno}: {source}"
    frames = [frame for frame in extract_tb(error.__traceback__) if _is_own(frame)]
    if not frames:
        return ""
    frame = frames[-1]
    return f"at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"


def _is_own(frame: FrameSummary) -> bool:
    path = Path(frame.filename)
    ours = any(path.is_relative_to(_OURS / package) for package in ("planner", "profiler", "solvers"))
    return path.is_file() and not ours and not any(path.is_relative_to(folder) for folder in _LIBRARIES)
