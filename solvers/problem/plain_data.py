"""Problems as the plain data of JSON files, and back; checks of the numbers that they are made of."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

AnyProblem = TypeVar("AnyProblem")


def to_document(problem: Any, kind: str, version: int, keys: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The fields of a problem, and of records in it, with the format and version of the file.

    ``keys`` has those attributes that files call otherwise.
    """
    return {"format": kind, "version": version, **_renamed(msgspec.to_builtins(problem), keys or {})}


def from_document(
    problem: type[AnyProblem], data: Mapping[str, Any], kind: str, version: int, keys: Mapping[str, str] | None = None
) -> AnyProblem:
    """Read what ``to_document`` wrote.

    Raises:
        ValueError: another format or version; a field is missing, unknown, or of another kind. Says which, and where.
    """
    where = f"a {problem.__name__.lower()} problem"
    if data.get("format") != kind or data.get("version") != version:
        raise ValueError(
            f"{where}: expected format {kind!r} version {version}, "
            f"got {data.get('format')!r} version {data.get('version')!r}; write it with {problem.__name__}.to_dict"
        )
    fields = {key: value for key, value in data.items() if key not in ("format", "version")}
    named = _renamed(fields, {key: attribute for attribute, key in (keys or {}).items()})
    try:
        record = msgspec.convert(named, problem)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {_mismatch(error, named)}") from error
    if unknown := list(_unread(named, msgspec.to_builtins(record))):
        raise ValueError(f"{where}: expected known fields alone, got also {', '.join(unknown)}; remove them")
    return record


def _mismatch(error: msgspec.ValidationError, data: Any) -> str:
    """The expected value, the actual one, its place, and the remedy, in the words of our own messages.

    >>> data = {"stages": [{"name": 3}]}
    >>> _mismatch(msgspec.ValidationError("Expected `str`, got `int` - at `$.stages[0].name`"), data)
    'expected str, got 3 at stages[0].name; correct it'
    """
    text, _, path = str(error).partition(" - at `$")
    place = path.strip("`.")
    at = f" at {place}" if place else ""
    if text.startswith("Object missing"):
        return f"expected a field {text.split('`')[1]}, got none{at}; correct it"
    wanted = {"Invalid": "a known value", "Number": "a number in range"}.get(text.partition(" ")[0], "")
    if text.startswith("Expected"):
        wanted = text.removeprefix("Expected ").partition(", got")[0].replace("`", "")
    if not wanted:
        return text + at  # a record's own check, which says all of it
    return f"expected {wanted}, got {reprlib.repr(_value_at(data, place))}{at}; correct it"


def _value_at(data: Any, place: str) -> Any:
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", re.sub(r"\[(\d+)\]", r".[\1]", place)):
        data = data[int(index)] if index else data[name]
    return data


def _unread(given: Any, read: Any, place: str = "") -> Iterator[str]:
    """The places of fields that were given and not read."""
    if isinstance(given, Mapping) and isinstance(read, Mapping):
        for key, value in given.items():
            inner = f"{place}.{key}".lstrip(".")
            yield from _unread(value, read[key], inner) if key in read else (inner,)
    elif isinstance(given, Sequence) and isinstance(read, Sequence) and not isinstance(given, str):
        for i, (value, taken) in enumerate(zip(given, read, strict=False)):
            yield from _unread(value, taken, f"{place}[{i}]")


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {names.get(key, key): _renamed(item, names) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(item, names) for item in value]
    return value


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, True and False aside."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_number(where: str, name: str, value: Any, *, negative: bool = False) -> None:
    """Raises ValueError for what is no finite number, or no integer where the name ends in ``_bytes``.

    ``negative``: it may be below zero.
    """
    of_bytes = name.endswith("_bytes")
    number = is_whole(value) or (isinstance(value, float) and not of_bytes)
    if not number or not math.isfinite(value) or (value < 0 and not negative):
        kind = "an integer number of bytes" if of_bytes else "a number of seconds"
        limit = "" if negative else ", not negative"
        raise ValueError(f"{where}: expected {name} to be {kind}{limit}, got {value!r}; correct it")


def check_budget(budget_bytes: Any) -> None:
    """Raises ValueError for what is no number of bytes."""
    if not is_whole(budget_bytes) or budget_bytes < 0:
        raise ValueError(
            f"a budget: expected an integer number of bytes, not negative, got {budget_bytes!r}; correct it"
        )


def check_time_limit(time_limit_seconds: float | None) -> None:
    """Raises ValueError unless a time limit is positive; None stands for the default."""
    if time_limit_seconds is not None and not (time_limit_seconds > 0):
        raise ValueError(
            f"a time limit: expected seconds above zero, got {time_limit_seconds!r}; leave it out for the default"
        )


def check_size(method: str, count: int, most: int, kind: str, remedy: str) -> None:
    """Raises ValueError for more stages or nodes (``kind``) than a method can take."""
    if count > most:
        raise ValueError(f"{method}: expected at most {most} {kind}, got {count}; use {remedy}")
