"""Sizes, times, counts and names of modules as text, as people write and read them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from contextvars import ContextVar
from fractions import Fraction
from operator import index

_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY_SHOWN = (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))
_DECIMAL_SHOWN = (("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12))
_shown = ContextVar("units of sizes that are shown", default=_BINARY_SHOWN)
_LETTERS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS = {"": 1, "b": 1, **_BINARY, **_DECIMAL, **_LETTERS}

# Up to 30 digits: enough for any size, few enough that Python reads them at once.
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})\s*([a-z]*|%)", re.IGNORECASE)

_EXPECTED = "expected a size such as 8GiB, 8GB, 512MiB, 1234567 (bytes) or 70% (of the unplanned peak)"


def parse_bytes(text: str | int, *, whole_bytes: int | None = None) -> int:
    """Read a size; fractions of a byte are dropped, so a budget never gets larger than what was written.

    ``KiB MiB GiB TiB`` are powers of 1024, ``KB MB GB TB`` and ``K M G T`` powers of 1000; a
    bare whole number is bytes; ``70%`` is a part of ``whole_bytes``.

    >>> parse_bytes("1.5 GiB"), parse_bytes("0.09G"), parse_bytes("70%", whole_bytes=1000)
    (1610612736, 90000000, 700)

    Args:
        text: the size; an ``int`` is bytes already and is only checked.
        whole_bytes: what 100% means, usually the unplanned peak.

    Returns:
        Bytes, at least 1.

    Raises:
        ValueError: with what was expected, what came, and what to write instead.
    """
    size = _from_text(text, whole_bytes) if isinstance(text, str) else _from_number(text)
    if size < 1:
        raise ValueError(f"size: {_EXPECTED}, got {text!r}, which is less than one byte; give a larger one")
    return size


def check_size(text: str | int) -> None:
    """Refuse what is no size, whatever 100 % turn out to be; raises as ``parse_bytes``."""
    parse_bytes(text, whole_bytes=1 << 60)


def parse_bytes_or_zero(text: str | int) -> int:
    """As ``parse_bytes``, where 0 is an answer, too."""
    return 0 if str(text).strip() in ("0", "0B") else parse_bytes(text)


def _from_number(number: int) -> int:
    try:
        if not isinstance(number, bool):
            return index(number)
    except TypeError:
        pass
    meant = _meant(Fraction(number), f"{number:g}") if isinstance(number, float) and 0 < number < 1e15 else ""
    raise ValueError(
        f"size: {_EXPECTED}, got {number!r}; {meant or 'pass bytes as an int, or a text with a unit or a %'}"
    )


def _meant(number: Fraction, written: str) -> str:
    """The correction for a number without a unit: a share, gibibytes, or so many bytes."""
    if number <= 1:
        return f"write {_plain(number * 100)}% for that part of the unplanned peak"
    return f"write {written}GiB, or {written}% for a share" if number <= 100 else f"write {int(number)} for bytes"


def _plain(number: Fraction) -> str:
    return f"{float(number):g}"


def _in_bytes(text: str) -> str:
    """The correction for a number such as 1e9; empty where it is none."""
    try:
        number = float(text)
    except ValueError:
        return ""
    return f"write {int(number)} for bytes" if 1 <= number < 1e15 else ""


def _from_text(text: str, whole_bytes: int | None) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"size: {_EXPECTED}, got {text!r}; {_in_bytes(text) or 'write a positive number and a unit'}")
    number, unit = Fraction(match[1]), match[2].lower()
    if unit == "%":
        if whole_bytes is None:
            raise ValueError(
                f"size: expected bytes, got {text!r} where no unplanned peak is known that it could be a part of; "
                "give the size in bytes, for example 8GiB"
            )
        return int(number * whole_bytes / 100)
    if not unit and number.denominator != 1:
        raise ValueError(f"size: {_EXPECTED}, got {text!r} without a unit; {_meant(number, text.strip())}")
    if unit not in _UNITS:
        raise ValueError(
            f"size: {_EXPECTED}, got {text!r} with the unknown unit {match[2]!r}; "
            "use one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB, K, M, G, T"
        )
    return int(number * _UNITS[unit])


def show_sizes_like(text: str) -> None:
    """Have sizes shown from now on in units of the family of ``text``: powers of 1000 after 8GB and 90M, else of 1024.

    >>> show_sizes_like("8GB"), format_bytes(8_000_000_000)
    (None, '8.00 GB')
    >>> show_sizes_like("8GiB"), format_bytes(8_000_000_000)
    (None, '7.45 GiB')
    """
    match = _SIZE.fullmatch(text.strip())
    decimal = match is not None and match[2].lower() in {**_DECIMAL, **_LETTERS}
    _shown.set(_DECIMAL_SHOWN if decimal else _BINARY_SHOWN)


def shown_units() -> tuple[tuple[str, int], ...]:
    """The units in which sizes are shown, with their bytes, smallest first."""
    return _shown.get()


def format_bytes(size: int) -> str:
    """Three digits and a unit, a binary one unless ``show_sizes_like`` says otherwise; a negative size keeps its sign.

    >>> format_bytes(512), format_bytes(1610612736)
    ('512 B', '1.50 GiB')
    """
    sign, amount, units = ("-" if size < 0 else ""), abs(size), shown_units()
    step = units[0][1]
    if amount < step:
        return f"{sign}{int(amount)} B"
    # 1023.5 KiB would print as 1024 KiB.
    name, each = next((unit for unit in units[:-1] if amount < (step - 0.5) * unit[1]), units[-1])
    return f"{sign}{_three_digits(amount / each)} {name}"


def exact_bytes(size: int) -> str:
    """As ``format_bytes``, and the bytes themselves.

    >>> exact_bytes(1610612736)
    '1.50 GiB (1,610,612,736 bytes)'
    """
    return f"{format_bytes(size)} ({size:,} bytes)"


def counted(number: int, what: str) -> str:
    """A number of things, in the singular or the plural.

    >>> counted(1, "stage"), counted(2, "stage")
    ('1 stage', '2 stages')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def format_seconds(seconds: float) -> str:
    """Three digits and a unit from µs to s; longer than a minute in minutes and seconds.

    >>> format_seconds(0.01234), format_seconds(1.5), format_seconds(125)
    ('12.3 ms', '1.50 s', '2 min 5 s')
    """
    sign, amount = ("-" if seconds < 0 else ""), abs(seconds)
    if amount == 0:
        return "0 s"
    if 59.95 <= amount < float("inf"):  # 59.95 s would print as 60.0 s
        minutes, rest = divmod(round(amount), 60)
        return f"{sign}{minutes} min {rest} s"
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if amount * scale < 999.5:
            return f"{sign}{_three_digits(amount * scale)} {unit}"
    return f"{sign}{_three_digits(amount)} s"


def _three_digits(amount: float) -> str:
    if amount < 9.995:
        return f"{amount:.2f}"
    return f"{amount:.1f}" if amount < 99.95 else f"{amount:.0f}"


_NAMED = 3  # ranges of numbers; where there are more, the first ones and the last
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")  # the parts around the last number


def names_in_short(names: Sequence[str], what: str = "stage", *, ranges: int = _NAMED) -> str:
    """Returns numbered names as at most ``ranges`` ranges, with the number of them in units of ``what`` unless empty.

    >>> names_in_short(["transformer.h.0"])
    'transformer.h.0'
    >>> names_in_short([f"transformer.h.{k}" for k in (3, 4, 5, 7)])
    'transformer.h.3 to 5, 7 (4 stages)'
    >>> names_in_short([str(k) for k in range(0, 20, 2)])
    '0, 2, ... 18 (10 stages)'
    >>> names_in_short(["layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.2.mlp"])
    'layers.0.attn ... layers.2.mlp (4 stages)'
    """
    if len(names) == 1:
        return names[0]
    if not in_one_series(names):
        shown = f"{names[0]}{', ' if len(names) == 2 else ' ... '}{names[-1].removeprefix(common_path(names))}"
    else:
        runs = _ranges(names)
        shown = ", ".join(runs if len(runs) <= ranges else [*runs[: ranges - 1], f"... {runs[-1]}"])
    return f"{shown} ({counted(len(names), what)})" if what else shown


def in_one_series(names: Sequence[str]) -> bool:
    """Whether names differ by one number alone.

    >>> in_one_series(["h.0.mlp", "h.3.mlp"]), in_one_series(["h.0.mlp", "ln_f"])
    (True, False)
    """
    return len({_number_cut_out(name) for name in names}) == 1


def common_path(names: Sequence[str]) -> str:
    """Returns the path of the modules that contain all of these, with the last dot; empty where there are none.

    A number alone says too little: the module that it counts in stays with it.

    >>> common_path(["transformer.drop", "transformer.h.0", "transformer.h.1"])
    'transformer.'
    >>> common_path(["transformer.h.0", "transformer.h.1"])
    'transformer.'
    """
    paths = [name.split(".") for name in names]
    columns = zip(*(path[:-1] for path in paths), strict=False)
    common = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, columns)]
    while common and any(parts[len(common)][:1].isdigit() for parts in paths):
        common.pop()
    return "".join(f"{part}." for part in common)


def _number_cut_out(name: str) -> tuple[str, str]:
    """Splits a name into the parts before and behind its last number."""
    match = _NUMBERED.fullmatch(name)
    return (name, name) if match is None else (match[1], match[3])


def _ranges(names: Sequence[str]) -> list[str]:
    """Joins neighbouring numbers of names that differ in nothing else."""
    before, behind = _number_cut_out(names[0])
    numbers = [int(name[len(before) : len(name) - len(behind)]) for name in names]
    ranges: list[str] = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [value for _, value in run]
        ranges += [f"{values[0]} to {values[-1]}"] if len(values) > 2 else [str(value) for value in values]
    return [f"{'' if k else before}{text}{behind}" for k, text in enumerate(ranges)]
