"""JSON files with a format and a version: written whole or not at all, read with clear errors, made into records."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import reprlib
import secrets
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec

try:
    import fcntl
except ImportError:  # Windows has no such locks.
    fcntl = None

Record = TypeVar("Record")
MOST = 2**50  # of any number in a file: bytes that large are more than any machine has, and thousands of them add up
MOST_LEVELS = 64
MOST_CHARACTERS = 2**29
_NAME_KEPT = 32
# Control characters but for tabs and line breaks, marks that change the direction of writing, halves of characters.
UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


# What the commands write, as people call it.
_WRITTEN_BY = {
    "planner-profile": "a profile, which planner profile writes",
    "planner-plan": "a plan, which planner solve writes",
}


def _in_words(formats: Mapping[str, int]) -> str:
    return "a file of format " + " or ".join(
        f"{kind} ({_WRITTEN_BY[kind]})" if kind in _WRITTEN_BY else kind for kind in formats
    )


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old one or the whole new one, never a half.

    It keeps the mode of the file that it replaces; a new one has what the umask leaves. What killed runs left beside it
    is removed. Of a link, what it points to is replaced; into a device or a pipe, as ``/dev/stdout``, the content is
    written.

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
    _clear_parts(target)
    handle, temporary = _beside(target)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.replace(temporary, target)  # Locked until then.
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _beside(target: Path) -> tuple[int, str]:
    """A new file in the target's folder, of the mode that the target has or would get, locked by this process."""
    while True:
        temporary = f"{target.parent / target.name[:_NAME_KEPT]}.planner-{secrets.token_hex(8)}.part"
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # Less the umask.
        try:
            with contextlib.suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            _lock(handle)
            if os.path.exists(temporary):  # Else another write took it for one of a killed run, before it was locked.
                return handle, temporary
        except BaseException:
            os.close(handle)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        os.close(handle)


def _clear_parts(target: Path) -> None:
    """Remove what killed runs left of this target: files beside it that no living process has locked."""
    name = re.compile(re.escape(target.name[:_NAME_KEPT]) + r"\.planner-[0-9a-f]{16}\.part")
    try:
        left = [path for path in target.parent.iterdir() if name.fullmatch(path.name)]
    except OSError:  # A folder that may be written to, and not listed.
        return
    for path in left:
        with contextlib.suppress(OSError):  # It is locked, or gone.
            handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                _lock(handle, wait=False)
                os.unlink(path)
            finally:
                os.close(handle)


def _lock(handle: int, *, wait: bool = True) -> None:
    """Lock an open file until it is closed; raises OSError where another process has, and ``wait`` is False."""
    if fcntl is None:
        if not wait:
            raise OSError("this system does not say who has a file open")
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if not wait:  # Where the file system knows no locks, a write goes on without.
            raise


def _not_written(target: Path, error: OSError) -> str:
    if error.errno == errno.ENAMETOOLONG:
        return f"{target}: the name is too long for the file system; choose a shorter one"
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
    where = "standard input" if str(path) == "-" else str(path)
    text = read_text(path, _in_words(formats))
    try:
        document = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{where}: its JSON document is nested too deeply to be read; make it again") from error
    except json.JSONDecodeError as error:
        if not text.lstrip().startswith(("{", "[")):
            raise ValueError(f"{where}: it is no JSON document; pass {_in_words(formats)}") from error
        what = "more than one" if error.msg == "Extra data" else "one that breaks off"
        raise ValueError(f"{where}: expected a whole JSON document, got {what}: {error}; make it again") from error
    except ValueError as error:  # Python's limit of digits.
        raise ValueError(
            f"{where}: it has a number of thousands of digits, and the largest allowed is 2**50; correct it"
        ) from error
    kind = document.get("format") if isinstance(document, dict) else None
    if not isinstance(kind, str) or kind not in formats:
        got = "none" if kind is None else reprlib.repr(kind)
        got = f"{kind!r}: {_WRITTEN_BY[kind]}" if isinstance(kind, str) and kind in _WRITTEN_BY else got
        raise ValueError(f"{where}: expected {_in_words(formats)}, got {got}; pass another file")
    if document.get("version") != formats[kind]:
        raise ValueError(
            f"{where}: expected {kind} version {formats[kind]}, got {reprlib.repr(document.get('version'))}; "
            "make it again with this release"
        )
    check_plain(document, where)
    return document


def read_text(path: str | Path, what: str = "") -> str:
    """The text of a file; ``-`` is standard input. ``what`` names in errors what to pass.

    Raises:
        ValueError: there is none, it is no text, it is larger than any that the planner writes, or it is a device or a
            pipe, which may have no end.
    """
    from_input = str(path) == "-"
    where = "standard input" if from_input else str(path)
    if from_input and sys.stdin is None:
        raise ValueError(f"{where}: it is closed, so there is no JSON document in it; pass the name of a file")
    try:
        if from_input:
            text = _in_blocks(sys.stdin).removeprefix("\ufeff")
        else:
            if is_special(path):
                raise ValueError(f"{where}: it is a device or a pipe, not a file; pass - and the content as input")
            with open(path, encoding="utf-8-sig") as file:
                text = _in_blocks(file)
    except FileNotFoundError as error:
        other = f", or pass {what}" if what else ""
        raise ValueError(f"{where}: there is no file of that name; check the path{other}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: it cannot be read: {error}; check the path") from error
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{where}: it has more than {MOST_CHARACTERS:,} characters; pass another file")
    return text


def _in_blocks(file: TextIO) -> str:
    """The text of a file, up to one character more than is allowed; ``read`` makes room for all that is asked for."""
    blocks: list[str] = []
    left = MOST_CHARACTERS + 1
    while left > 0 and (block := file.read(min(left, 2**20))):
        blocks.append(block)
        left -= len(block)
    return "".join(blocks)


def check_plain(document: Any, where: str) -> None:
    """Refuse plain data that no part of the planner could have written; ``where`` names it in errors.

    Raises:
        ValueError: a number that is not finite or too large to add up, deep nesting, or text that would do something
            where it is shown: control characters but for line breaks and tabs, marks that turn the direction of
            writing, halves of characters.
    """
    level: list[tuple[str, Any]] = [("", document)]
    for _ in range(MOST_LEVELS):
        below: list[tuple[str, Any]] = []
        for place, value in level:
            if isinstance(value, dict):
                for key, item in value.items():
                    if isinstance(key, str) and UNSHOWN.search(key):
                        raise ValueError(f"{where}: expected names of plain characters, got {key!r}; correct it")
                    below.append((f"{place}.{key}", item))
            elif isinstance(value, list):
                below += [(f"{place}.{k}", item) for k, item in enumerate(value)]
            else:
                _check_value(value, where, place.lstrip("."))
        if not below:
            return
        level = below
    raise ValueError(f"{where}: it is nested more than {MOST_LEVELS} levels deep; make it again")


def _check_value(value: Any, where: str, place: str) -> None:
    if isinstance(value, str) and UNSHOWN.search(value):
        raise ValueError(f"{where}: expected text of plain characters at {place}, got {value!r}; correct it")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: expected finite numbers, got {value} at {place}; correct it or profile again")
    if isinstance(value, (int, float)) and abs(value) > MOST:
        number = f"{value:.3g}" if abs(value) < 10**300 else "a longer one"
        raise ValueError(f"{where}: expected numbers up to 2**50, got {number} at {place}; correct it or profile again")


def to_plain(record: Any) -> dict[str, Any]:
    """The fields of a record, and of records in it, as they are read from a file: with lists for tuples."""
    return _with_lists(msgspec.to_builtins(record))


def from_plain(kind: type[Record], data: Mapping[str, Any]) -> Record:
    """Read what ``to_plain`` wrote.

    Raises:
        ValueError: a field is missing, unknown, or of another kind; says which, and where it stands.
    """
    try:
        record = msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        said = str(error).replace("`", "").replace(" - at $.", " at ")
        raise ValueError(said[:1].lower() + said[1:]) from error
    if unknown := _unread(data, msgspec.to_builtins(record)):
        raise ValueError(f"expected fields of this release, got also {', '.join(sorted(unknown))}")
    return record


def check_positions(what: str, numbers: Iterable[int], count: int, least: int = 0) -> None:
    """Raises ValueError where a file refers to what is not there: to a number not from ``least`` to below ``count``."""
    for number in numbers:
        if not least <= number < count:
            raise ValueError(f"expected {what} from {least} to {count - 1}, got {number}")


def _unread(given: Any, read: Any) -> set[str]:
    """Names of fields that were given and not read."""
    if isinstance(given, Mapping) and isinstance(read, Mapping):
        known = (_unread(value, read[key]) for key, value in given.items() if key in read)
        return (given.keys() - read.keys()).union(*known)
    if isinstance(given, list) and isinstance(read, tuple):
        return set().union(*map(_unread, given, read))
    return set()


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
