"""What is said of wrong input: one sentence with the option's name, what was expected, what came, and what to do."""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from traceback import FrameSummary, extract_tb
from typing import Any

import typer

UsageError: Any = typer.BadParameter.__mro__[1]  # Of click, or of the copy of it that typer brings.

_OURS = Path(__file__).resolve().parents[2]
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_SUBJECT = re.compile(r"(--[a-z-]+|-o|[A-Z]+)\b")


def usage_in_words(error: Any, command: str) -> str:
    """What click refuses, in the words of all other messages; ``command`` is what was called."""
    kind = type(error).__name__
    see = f"{command} -h lists them"
    message = error.format_message()
    if kind == "MissingParameter":
        return f"{_name_of(error.param)}: expected a value, got none; add it, {command} -h says more"
    if kind == "NoSuchOption":
        near = f"did you mean {' or '.join(sorted(error.possibilities))}? {see}" if error.possibilities else see
        return f"{error.option_name}: expected an option of {command}, got one that it does not have; {near}"
    if kind == "BadOptionUsage":
        return f"{error.option_name}: expected a value, got none; add it, {command} -h says more"
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
    """Of a value of another type or out of range, as click says it, and as typer has it from pydantic."""
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
