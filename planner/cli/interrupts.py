"""Ctrl-C at the command line: one line on stderr and exit code 130, in whatever code it comes, imports included."""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it

_AGAIN_SECONDS = 0.05  # until a lost interrupt is raised again: the callback that lost it is over by then

_pressed = False
_said = False


def say_interrupted(text: str = "interrupted") -> None:
    """The line on stderr that a command ends with."""
    global _said
    _said = True
    print(text, file=sys.stderr)


def is_pressed() -> bool:
    """Whether Ctrl-C was pressed since ``ending_by_ctrl_c`` began; a solver may end by it and return."""
    return _pressed


@contextlib.contextmanager
def ending_by_ctrl_c() -> Iterator[None]:
    """Run a command; after Ctrl-C it ends with exit code 130, whatever its code made of the interrupt."""
    signal.signal(signal.SIGINT, _press)
    sys.unraisablehook = _raise_again
    try:
        yield
    except BaseException:  # As an import does, code may turn the interrupt into an error of its own.
        if not _pressed:
            raise
    if not _pressed:
        return
    if not _said:
        say_interrupted()
    sys.exit(INTERRUPTED)


def _raise_again(lost: sys.UnraisableHookArgs) -> None:
    """Raise an interrupt again that came in a callback of a weak reference or in ``__del__``, where Python drops it."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        _thread.start_new_thread(_interrupt_soon, ())  # threading takes locks, which this thread may hold
    else:
        sys.__unraisablehook__(lost)


def _interrupt_soon() -> None:
    time.sleep(_AGAIN_SECONDS)
    _thread.interrupt_main()


def _press(number: int, frame: FrameType | None) -> None:
    global _pressed
    _pressed = True
    raise KeyboardInterrupt
