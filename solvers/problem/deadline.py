"""The time limit of a search: set once around it, asked by every long loop that runs inside."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from types import TracebackType


class TimeOver(Exception):
    """The time limit is over; the ``with`` of the deadline ends by it, and the code after that goes on."""


class Deadline:
    """A time limit for everything that runs inside its ``with``; of nested ones the earliest counts.

    Args:
        seconds: from the beginning of the ``with`` on.
        clock: what tells the seconds. One that rises by one at each call makes a limit of work, which ends a search
            at the same place on every machine.

    Attributes:
        passed: whether the time was over before the end of the ``with``.

    >>> from itertools import count
    >>> with Deadline(3, clock=count().__next__) as deadline:
    ...     for step in range(100):
    ...         check_deadline()
    >>> step, deadline.passed
    (2, True)
    """

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.perf_counter) -> None:
        self.passed = False
        self._seconds, self._clock = seconds, clock
        self._end = math.inf
        self._outer: Deadline | None = None
        self._token: Token[Deadline | None] | None = None

    def __enter__(self) -> Deadline:
        self._outer = _current.get()
        self._token = _current.set(self)
        self._end = self._clock() + self._seconds
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        assert self._token is not None
        _current.reset(self._token)
        self.passed = isinstance(error, TimeOver)
        return self.passed

    def left_seconds(self) -> float:
        """Seconds until this or an outer one ends, not below zero."""
        outer = math.inf if self._outer is None else self._outer.left_seconds()
        return max(0.0, min(outer, self._end - self._clock()))


_current: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


@contextlib.contextmanager
def unlimited() -> Iterator[None]:
    """Run the last lines of a search, which are short and make its answer, also where the time is over."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def left_seconds() -> float:
    """Seconds that the deadlines around leave, not below zero; infinite without any."""
    deadline = _current.get()
    return math.inf if deadline is None else deadline.left_seconds()


def check_deadline() -> None:
    """Raises TimeOver where the time is over."""
    if left_seconds() == 0.0:
        raise TimeOver
