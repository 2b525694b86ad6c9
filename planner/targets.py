"""Loads targets: calls the function that a text names (a zoo model, one of a file or of a module) for its workload."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import solvers  # noqa: F401  (before a target's folder is put first on the path)
from planner import zoo
from planner.hidden_packages import files_named_alike
from profiler.target_record import TargetRecord
from profiler.workload.workload import Workload

_FORMS = "zoo:NAME, path/to/file.py:function or package.module:function"
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,30}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_SWITCHES = {"true": True, "false": False}


class TargetError(ValueError):
    """A target that gives no workload; the message says what was expected, what came, and what to do."""


class NoTarget(TargetError):
    """There is no such function, it takes no such settings, or there is no such device: other values do not help."""


def build_target(
    target: str | Callable[..., Workload], settings: Mapping[str, Any] | None = None, device: str | None = None
) -> Workload:
    """The workload of a target, on a device.

    Args:
        target: text as for ``load_target``, or a function that returns a Workload.
        settings: keyword arguments of its function.
        device: that it is moved to; None: as it is built.

    Raises:
        TargetError: as ``load_target``, or there is no such device.
    """
    if isinstance(target, str):
        return on_device(load_target(target, settings), device)
    return on_device(call_target(getattr(target, "__name__", repr(target)), target, settings or {}), device)


def build_recorded(record: TargetRecord, settings: Mapping[str, Any]) -> Workload:
    """The workload of a target that was given earlier, perhaps in another folder.

    Args:
        record: its text, its device, and where it was given.
        settings: keyword arguments of its function, in place of the record's.

    Raises:
        TargetError: as ``build_target``, or its file or its folder is no longer there.
    """
    return build_target(_found_again(record), settings, record.device)


def _found_again(record: TargetRecord) -> str:
    """The target's text, as it is valid in the current folder.

    A file is taken from the recorded folder first; a module from there only where nothing of the user's own, in the
    current folder or installed, has its name.
    """
    place, _, name = record.text.strip().rpartition(":")
    folder = Path(record.folder)
    if record.of_zoo or not record.folder or folder == Path.cwd():
        return record.text
    if place.endswith(".py"):
        if found := next((path for path in (folder / place, Path(place)) if os.path.isfile(path)), None):
            return f"{found}:{name}"
        raise NoTarget(
            f"TARGET: the file of {record.text!r}, which was profiled, is neither at {str(folder / place)!r} nor here; "
            "name the target at the command line"
        )
    if not folder.is_dir():
        raise NoTarget(
            f"TARGET: the folder in which {record.text!r} was profiled, {record.folder!r}, is gone; "
            "name the target at the command line"
        )
    _put_on_path(Path.cwd())
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return record.text


def load_target(text: str, settings: Mapping[str, Any] | None = None) -> Workload:
    """Call the function that ``text`` names and return the workload that it builds.

    A file's folder (for a module: the current folder) joins ``sys.path``, as
    it does for ``python file.py`` and ``python -m module``, so that the target
    can import what lies beside it.

    Args:
        text: ``zoo:NAME``, ``path/to/file.py:function`` or ``package.module:function``.
        settings: keyword arguments, as ``parse_settings`` reads them.

    Raises:
        TargetError: whatever stands in the way; an exception of the target's own is chained.
    """
    place, colon, name = text.strip().rpartition(":")
    if not (colon and place and name):
        raise NoTarget(f"target: expected {_FORMS}, got {text!r}; {_completed(text.strip())}")
    if place == "zoo":
        return _from_zoo(name, settings or {})
    return call_target(text, _function(text, _module(text, place), name), settings or {})


def _completed(text: str) -> str:
    """The correction for half a target."""
    if text in zoo.names():
        return f"did you mean zoo:{text}?"
    if text.endswith(".py"):
        return f"add its function, as {text}:build"
    if text.endswith(".json"):
        return "name what builds the model; planner solve, show and report take files"
    return "write both sides of the colon"


def on_device(workload: Workload, device: str | None) -> Workload:
    """The workload moved to a device; as it is for None.

    Raises:
        NoTarget: this machine has no such device, or the workload cannot be moved.
    """
    if device is None:
        return workload
    try:
        return workload.to(torch.device(device))
    except ValueError as error:
        raise NoTarget(str(error)) from error
    except (RuntimeError, AssertionError) as error:  # torch says so of names and numbers that it does not know
        if isinstance(error, torch.OutOfMemoryError):
            raise
        said = str(error).splitlines()[0]
        why = (
            "" if "at start of device string" in said else f": {said}"
        )  # which names all that torch could be built for
        raise NoTarget(
            f"--device: expected one that this machine has, as cpu or cuda, got {device!r}{why}; use cpu"
        ) from error


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` texts: whole numbers, numbers, true and false, else text.

    >>> parse_settings(["layers=12", "rate=1e-3", "bias=false", "device=cpu"])
    {'layers': 12, 'rate': 0.001, 'bias': False, 'device': 'cpu'}

    Raises:
        TargetError: no ``=``, no name before it, or a name given twice.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise TargetError(f"--set: expected key=value, got {pair!r}; write for example batch=8")
        if key in settings:
            raise TargetError(f"--set: expected each key once, got {key!r} twice; remove one")
        text = value.strip()
        if _WHOLE_NUMBER.fullmatch(text):
            settings[key] = int(text)
        else:
            settings[key] = float(text) if _NUMBER.fullmatch(text) else _SWITCHES.get(text.lower(), text)
    return settings


def _from_zoo(name: str, settings: Mapping[str, Any]) -> Workload:
    try:
        return zoo.build(name, **settings)
    except zoo.Unknown as error:
        raise NoTarget(str(error)) from error
    except (ValueError, ModuleNotFoundError) as error:  # its messages say expected, got, remedy already
        raise TargetError(str(error)) from error
    except (RuntimeError, MemoryError, OverflowError) as error:  # torch says so when an allocation fails
        raise TargetError(
            f"zoo:{name}: expected sizes that this machine can hold, got {_describe(error)}; make them smaller"
        ) from error


def _module(text: str, place: str) -> ModuleType:
    if place.endswith(".py"):
        return _import(text, Path(place).parent, lambda: _load_file(text, Path(place)))
    if not all(part.isidentifier() for part in place.split(".")):
        raise NoTarget(f"target: expected {_FORMS}, got {text!r}; end the file's name with .py")
    _put_on_path(Path.cwd())
    return _import(text, Path.cwd(), lambda: importlib.import_module(place))


def _import(text: str, folder: Path, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except TargetError:
        raise
    # The module is the user's code: it may raise anything, and an exit at import is an error here too.
    except (Exception, SystemExit) as error:
        raise NoTarget(
            f"target {text!r}: expected a module that imports, got {_describe(error)}; "
            f"check its name and that it imports on its own{_named_alike(folder)}"
        ) from error


def _named_alike(folder: Path) -> str:
    """The files beside a target that are not imported by their names; empty where there are none."""
    files = ", ".join(str(path) for path in files_named_alike(folder))
    return f"; rename {files}: the planner's own package of that name is imported instead" if files else ""


def _load_file(text: str, path: Path) -> ModuleType:
    if not os.path.isfile(path):
        raise NoTarget(f"target {text!r}: there is no file {str(path)!r}; check the path")
    name = f"planner_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise NoTarget(f"target {text!r}: expected a Python file, got {str(path)!r}; name a .py file")
    module = importlib.util.module_from_spec(spec)
    _put_on_path(path.resolve().parent)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half a module must not be found by the next import
        raise
    return module


def _put_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _function(text: str, module: ModuleType, name: str) -> Callable[..., Any]:
    member = getattr(module, name, None)
    if callable(member):
        return member
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
    got = "nothing of that name" if member is None else f"a {type(member).__name__}"
    raise NoTarget(
        f"target {text!r}: expected a function {name!r}, got {got}; "
        f"use one of those there: {', '.join(sorted(functions)) or 'none yet'}"
    )


def call_target(text: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> Workload:
    """Call a target's function and check what comes; raises TargetError as ``load_target`` does, naming it ``text``."""
    _check_settings(text, function, settings)
    try:
        workload = function(**settings)
    # The function is the user's code: it may raise anything.
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"target {text!r}: expected a Workload, got {_describe(error)} from inside it; "
            "call it on its own to see where"
        ) from error
    if not isinstance(workload, Workload):
        raise TargetError(
            f"target {text!r}: expected a Workload, got {type(workload).__name__}; "
            "return planner.Workload(model=..., inputs=...)"
        )
    return workload


def _check_settings(text: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have none; the call itself will tell
        return
    try:
        signature.bind(**settings)
    except TypeError as error:
        hidden = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
        accepted = ", ".join(str(p) for p in signature.parameters.values() if p.kind not in hidden)
        given = ", ".join(f"{key}={value}" for key, value in settings.items())
        raise NoTarget(
            f"target {text!r}: expected the settings ({accepted}), got ({given}): {error}; "
            "give those with --set key=value"
        ) from error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
