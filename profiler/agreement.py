"""What ranks that measure one step together have to decide as one: how many steps run, and what runs in them.

A step of a model that is spread over ranks has collectives in it, and a rank that ran a step more than the others would
wait for them in vain. So whatever follows from numbers measured on one rank, or from values there, goes through here
before it decides what runs next. A process that measures by itself agrees with itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from profiler.largest_values import merged_largest

Value = TypeVar("Value")


class MeasuringRanks(Protocol):
    """Processes that run the same code, each with its part of the same step."""

    def gathered(self, value: Value) -> list[Value]:
        """What each rank has given, in their order."""
        ...

    def from_first(self, value: Value) -> Value:
        """What the first rank has given."""
        ...

    def made_by_rank0(self, make: Callable[[], Value]) -> Value:
        """What the first rank makes, for all."""
        ...

    def check_answered(self, error: Exception | None) -> None:
        """Raise where an error on any rank says that another one did not answer in a collective."""
        ...


_together: list[MeasuringRanks | None] = []  # of the processes that measure together now; the innermost last


@contextlib.contextmanager
def measured_with(ranks: MeasuringRanks | None) -> Iterator[None]:
    """Inside, what is measured is measured together with these ranks; with None by this process alone."""
    _together.append(ranks)
    try:
        yield
    finally:
        _together.pop()


def is_together() -> bool:
    """Whether other ranks measure with this one."""
    return _others() is not None


def _others() -> MeasuringRanks | None:
    return _together[-1] if _together else None


def gathered(value: Value) -> list[Value]:
    """What each rank has for this value."""
    return [value] if (ranks := _others()) is None else ranks.gathered(value)


def agreed(value: Value) -> Value:
    """What the first rank has for this value."""
    return value if (ranks := _others()) is None else ranks.from_first(value)


def made_by_rank0(make: Callable[[], Value]) -> Value:
    """What ``make`` returns on the first rank, for all; a ValueError that it raises there is raised on all."""
    return make() if (ranks := _others()) is None else ranks.made_by_rank0(make)


def any_rank(flag: Any) -> bool:
    """Whether it is true on any rank."""
    return any(gathered(bool(flag)))


def largest(value: Value) -> Value:
    """The largest of what the ranks have measured; raises UnlikeValues where they differ in more than that."""
    return merged_largest(gathered(value))


def first_failure(failure: str, error: Exception | None = None) -> str:
    """The first rank's words on what failed there, of those on which something did; empty where nothing did.

    Args:
        failure: this rank's words; empty where it succeeded.
        error: that they are about. Where it came of another rank that did not answer, all ranks raise.
    """
    if (ranks := _others()) is not None:
        ranks.check_answered(error)
    return next(filter(None, gathered(failure)), "")
