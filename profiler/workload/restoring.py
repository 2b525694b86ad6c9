"""Putting many things back as they were: all are tried, and what could not be put back is said at the end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MOST_NAMED = 3


class RestoreError(ValueError):
    """Something could not be remembered, or not be put back; the message says what, and what to do."""


class Restoring:
    """Ways back to how things were. Each leads there however often it is gone, and needs none of the others."""

    def __init__(self) -> None:
        self._ways: list[tuple[str, Callable[[], object]]] = []

    def add(self, what: str, put_back: Callable[[], object]) -> None:
        """One more thing to put back; errors call it ``what``."""
        self._ways.append((what, put_back))

    def remember(self, what: str, remembered: Callable[[], Callable[[], object]]) -> None:
        """Add what ``remembered()`` returns; raises RestoreError where it fails."""
        try:
            put_back = remembered()
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise RestoreError(
                f"{what}: expected what can be copied to host memory and put back after the measured steps, got "
                f"{_said(error)}; keep it out of the workload, or make it a plain tensor"
            ) from error
        self.add(what, put_back)

    def restore(self) -> None:
        """Put everything back; the first interrupt that came in between goes on afterwards.

        Raises:
            RestoreError: some of it could not be; all else is back.
        """
        failures: list[tuple[str, Exception]] = []
        interrupt: BaseException | None = None
        with _interrupts_later(), torch.no_grad():
            for what, put_back in self._ways:
                try:
                    interrupt = _gone(put_back) or interrupt
                except Exception as error:  # noqa: BLE001  Whatever it is, the others are put back.
                    failures.append((what, error))
        if interrupt is not None:
            raise interrupt
        if failures:
            raise _failed(failures) from failures[0][1]


def _gone(put_back: Callable[[], object]) -> BaseException | None:
    """Go a way to its end, also where something interrupts; what did."""
    try:
        put_back()
    except Exception:  # The way itself failed: that goes to the caller; only after interrupts is it gone again.
        raise
    except BaseException as interrupt:  # noqa: BLE001  It is raised once all is back.
        put_back()
        return interrupt
    return None


def _failed(failures: list[tuple[str, Exception]]) -> RestoreError:
    named = "; ".join(f"{what}: {_said(error)}" for what, error in failures[:_MOST_NAMED])
    more = f"; and {len(failures) - _MOST_NAMED} more" if len(failures) > _MOST_NAMED else ""
    return RestoreError(
        f"expected everything to be put back after the measured steps, got {len(failures)} that could not be "
        f"({named}{more}); all else is as before: build what is named anew, or load it from a checkpoint"
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C inside takes effect at the end. Only the main thread gets any."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, Any]] = []
    try:
        signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])
