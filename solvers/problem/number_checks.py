"""Checks of the numbers that problems are made of: bytes are integers, seconds are numbers, neither is negative."""

from __future__ import annotations

import math
from typing import Any


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
    """Raises ValueError for a limit that is no time above zero; None stands for the default."""
    if time_limit_seconds is not None and not (time_limit_seconds > 0):
        raise ValueError(
            f"a time limit: expected seconds above zero, got {time_limit_seconds!r}; leave it out for the default"
        )


def check_size(method: str, count: int, most: int, kind: str, remedy: str) -> None:
    """Raises ValueError for more stages or nodes (``kind``) than a method can take."""
    if count > most:
        raise ValueError(f"{method}: expected at most {most} {kind}, got {count}; use {remedy}")
