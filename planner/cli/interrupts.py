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


class CtrlC:
    """Whether Ctrl-C was pressed while a command ran, and whether the command has said so.

    Attributes:
        pressed: it was; a solver may end by it and return.
        said: the line on stderr that a command ends with has been printed.
    """

    def __init__(self) -> None:
        self.pressed = False
        self.said = False

    def say(self, text: str = "interrupted") -> None:
        """Print the line on stderr that a command ends with."""
        self.said = True
        print(text, file=sys.stderr)

    def press(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        self.pressed = True
        raise KeyboardInterrupt


@contextlib.contextmanager
def ending_by_ctrl_c() -> Iterator[CtrlC]:
    """Run a command; after Ctrl-C it ends with exit code 130, whatever its code made of the interrupt."""
    ctrl_c = CtrlC()
    signal.signal(signal.SIGINT, ctrl_c.press)
    sys.unraisablehook = _raise_again
    try:
        yield ctrl_c
    except BaseException:  # As an import does, code may turn the interrupt into an error of its own.
        if not ctrl_c.pressed:
            raise
    if not ctrl_c.pressed:
        return
    if not ctrl_c.said:
        ctrl_c.say()
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
