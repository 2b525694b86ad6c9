"""Problems as the plain data of JSON files, and back."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

Record = TypeVar("Record")


def to_plain(record: Any, keys: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a record, and of records in it; ``keys`` has those attributes that files call otherwise."""
    return _renamed(msgspec.to_builtins(record), keys)


def from_plain(kind: type[Record], data: Mapping[str, Any], where: str, keys: Mapping[str, str]) -> Record:
    """Read what ``to_plain`` wrote.

    Raises:
        ValueError: a field is missing, unknown, or of another kind; says which, and where it stands.
    """
    named = _renamed(data, {key: attribute for attribute, key in keys.items()})
    try:
        record = msgspec.convert(named, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {worded(error, named, 'correct it')}") from error
    if unknown := list(unread(named, msgspec.to_builtins(record))):
        raise ValueError(f"{where}: expected known fields alone, got also {', '.join(unknown)}; remove them")
    return record


def worded(error: msgspec.ValidationError, data: Any, remedy: str) -> str:
    """What was expected, what came, where, and the remedy, in the words of our own messages.

    >>> data = {"stages": [{"name": 3}]}
    >>> worded(msgspec.ValidationError("Expected `str`, got `int` - at `$.stages[0].name`"), data, "correct it")
    'expected str, got 3 at stages[0].name; correct it'
    """
    text, _, path = str(error).partition(" - at `$")
    place = path.strip("`.")
    at = f" at {place}" if place else ""
    if text.startswith("Object missing"):
        return f"expected a field {text.split('`')[1]}, got none{at}; {remedy}"
    wanted = {"Invalid": "a known value", "Number": "a number in range"}.get(text.partition(" ")[0], "")
    if text.startswith("Expected"):
        wanted = text.removeprefix("Expected ").partition(", got")[0].replace("`", "")
    if not wanted:
        return text + at  # a record's own check, which says all of it
    return f"expected {wanted}, got {reprlib.repr(_value_at(data, place))}{at}; {remedy}"


def _value_at(data: Any, place: str) -> Any:
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", re.sub(r"\[(\d+)\]", r".[\1]", place)):
        data = data[int(index)] if index else data[name]
    return data


def unread(given: Any, read: Any, place: str = "") -> Iterator[str]:
    """The places of fields that were given and not read."""
    if isinstance(given, Mapping) and isinstance(read, Mapping):
        for key, value in given.items():
            inner = f"{place}.{key}".lstrip(".")
            yield from unread(value, read[key], inner) if key in read else (inner,)
    elif isinstance(given, Sequence) and isinstance(read, Sequence) and not isinstance(given, str):
        for i, (value, taken) in enumerate(zip(given, read, strict=False)):
            yield from unread(value, taken, f"{place}[{i}]")


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {names.get(key, key): _renamed(item, names) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(item, names) for item in value]
    return value
