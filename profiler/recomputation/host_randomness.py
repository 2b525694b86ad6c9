"""The states of Python's and numpy's global random generators as they are before a first run, for a second one.

Python's takes some ten microseconds to read, numpy's several times that. So the words that numpy's lies in are looked
at first: where none has changed since its state was read, that is the state still.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import numpy as np
from numpy.random import mtrand

_WORDS_BYTES = 2500  # of the Mersenne Twister: 624 words of four bytes, and how many of them are given out


def _words() -> bytes:
    """The memory of numpy's global generator; empty where it is of another kind."""
    generator = mtrand.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _WORDS_BYTES)


class _NumpyState:
    """The state that was read last, which stages share as long as nobody draws."""

    __slots__ = ("_state", "_words")

    def __init__(self) -> None:
        self._words = b""
        self._state: Any = None

    def now(self) -> Any:
        """The state as it is; the same object where it is the same."""
        words = _words()
        if not words or words != self._words or self._holds_a_normal():
            self._state = np.random.get_state(legacy=False)
            self._words = words if words == _as_words(self._state) else b""
        return self._state

    def put_back(self, state: Any) -> None:
        """Make it the state again."""
        if self.now() is not state:
            np.random.set_state(state)
            self._state, self._words = state, _words()

    def _holds_a_normal(self) -> bool:
        """Whether the second number of a pair is still to be given out, which changes no word."""
        return bool(self._state["has_gauss"])


def _as_words(state: Any) -> bytes:
    inside = state["state"]
    return inside["key"].tobytes() + int(inside.get("pos", 0)).to_bytes(4, sys.byteorder) if "key" in inside else b"-"


_NUMPY = _NumpyState()


class HostRandomness:
    """Both states as they are now; as a context, both generators give the same numbers again, and go on afterwards."""

    __slots__ = ("_now", "_numpy", "_python")

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), _NUMPY.now()

    def __enter__(self) -> None:
        self._now = random.getstate(), _NUMPY.now()
        self._set(self._python, self._numpy)

    def __exit__(self, *error: object) -> None:
        self._set(*self._now)
        del self._now

    @staticmethod
    def _set(python: Any, numpy: Any) -> None:
        random.setstate(python)
        _NUMPY.put_back(numpy)
