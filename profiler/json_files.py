"""JSON files with a format and a version: written whole or not at all, read with clear errors, made into records."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

Record = TypeVar("Record")


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old one or the whole new one, never a half.

    Of a link, what it points to is replaced; into a device or a pipe, as ``/dev/stdout``, the content is written.

    Raises:
        ValueError: the folder does not exist or cannot be written to, there is no room, or the name is too long.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(path) if is_special(path) else Path(os.path.realpath(path))
    try:
        _write(target, data)
    except OSError as error:
        raise ValueError(_not_written(target, error)) from error


def check_writable(path: str | Path) -> None:
    """Refuse what ``write_whole`` could not write; raises ValueError as that does, but where there is no room."""
    if is_special(path):
        return
    target = Path(os.path.realpath(path))
    try:
        with contextlib.suppress(FileNotFoundError):
            os.lstat(target)  # The name itself: the one beside it is shorter.
        handle, temporary = _beside(target)
        os.close(handle)
        os.unlink(temporary)
    except OSError as error:
        raise ValueError(_not_written(target, error)) from error


def _write(target: Path, data: bytes) -> None:
    if is_special(target):
        with open(target, "wb") as stream:
            stream.write(data)
        return
    handle, temporary = _beside(target)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _beside(target: Path) -> tuple[int, str]:
    return tempfile.mkstemp(dir=target.parent, prefix=target.name[:32], suffix=".part")


def _not_written(target: Path, error: OSError) -> str:
    if error.errno == errno.ENAMETOOLONG:
        return f"{target}: expected a name that the file system can have, got one too long; choose a shorter one"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{target}: expected room to write it, got {error.strerror}; make room or choose another place"
    return f"{target}: expected a folder that can be written to, got {error.strerror}; create it or choose another"


def is_special(path: str | Path) -> bool:
    """Whether there is something that is neither a file nor a folder: a device, a pipe."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def write_document(path: str | Path, document: dict[str, Any]) -> None:
    """Write a JSON document whole."""
    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def read_document(path: str | Path, formats: dict[str, int]) -> dict[str, Any]:
    """Read a JSON document and check what it is.

    Args:
        path: the file; ``-`` is standard input.
        formats: accepted format names with the version this release reads.

    Raises:
        ValueError: no such file, no JSON (truncated), another format or version, or NaN in it.
    """
    from_input = str(path) == "-"
    path = "standard input" if from_input else path
    if from_input and sys.stdin is None:
        raise ValueError(f"{path}: expected a JSON document, got none: it is closed; pass the name of a file")
    try:
        text = sys.stdin.read().removeprefix("\ufeff") if from_input else Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a readable JSON file, got {error}; check the path") from error
    try:
        document = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{path}: expected a JSON document, got one nested without end; make it again") from error
    except json.JSONDecodeError as error:
        what = "more than one" if error.msg == "Extra data" else "one that breaks off"
        raise ValueError(f"{path}: expected a whole JSON document, got {what}: {error}; make it again") from error
    kind = document.get("format") if isinstance(document, dict) else None
    if not isinstance(kind, str) or kind not in formats:
        got = "none" if kind is None else repr(kind)
        raise ValueError(f"{path}: expected a file of format {' or '.join(formats)}, got {got}; pass another file")
    if document.get("version") != formats[kind]:
        raise ValueError(
            f"{path}: expected {kind} version {formats[kind]}, got {document.get('version')!r}; "
            "make it again with this release"
        )
    _refuse_nan(document, str(path), "")
    return document


def _refuse_nan(value: Any, path: str, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(
            f"{path}: expected finite numbers, got {value} at {where.lstrip('.')}; correct it or profile again"
        )
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _refuse_nan(item, path, f"{where}.{key}")


def to_plain(record: Any, keys: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a record, and of records in it; ``keys`` has those attributes that files call otherwise."""
    return _renamed(msgspec.to_builtins(record), keys)


def from_plain(kind: type[Record], data: Mapping[str, Any], keys: Mapping[str, str]) -> Record:
    """Read what ``to_plain`` wrote.

    Raises:
        ValueError: a field is missing, unknown, or of another kind; says which, and where it stands.
    """
    named = _renamed(data, {key: attribute for attribute, key in keys.items()})
    try:
        record = msgspec.convert(named, kind)
    except msgspec.ValidationError as error:
        said = str(error).replace("`", "").replace(" - at $.", " at ")
        raise ValueError(said[:1].lower() + said[1:]) from error
    if unknown := _unread(named, msgspec.to_builtins(record)):
        raise ValueError(f"expected fields of this release, got also {', '.join(sorted(unknown))}")
    return record


def _unread(given: Any, read: Any) -> set[str]:
    """Names of fields that were given and not read."""
    if isinstance(given, Mapping) and isinstance(read, Mapping):
        known = (_unread(value, read[key]) for key, value in given.items() if key in read)
        return (given.keys() - read.keys()).union(*known)
    if isinstance(given, list) and isinstance(read, tuple):
        return set().union(*map(_unread, given, read))
    return set()


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {names.get(key, key): _renamed(item, names) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(item, names) for item in value]
    return value
