"""The states of the random generators that a step or a stage draws from, torch's and the host's, and putting them back.

Reading the state of Python's or numpy's global generator takes ten microseconds and more, and nearly no stage draws
from them. So the words that a generator lies in are looked at first: where none has changed since its state was read,
that is the state still.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_CPU = torch.device("cpu")

RecordedState = tuple[torch.device, Any]  # a device, and the state of its generator


def states_on(device: torch.device) -> list[RecordedState]:
    """The states of the generators that ops on a device may draw from: its own and the CPU's."""
    devices = dict.fromkeys((_CPU, device if device.type == "cuda" else _CPU))
    return [(on, _state_on(on)) for on in devices]


def _state_on(device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.default_generator.clone_state()  # No tensor: it is held for as long as what draws from it.


def _read(device: torch.device, state: Any) -> Tensor:
    """A state in memory that the device's allocator does not count, also where ``torch.func`` wraps what is made."""
    if device.type == "cuda":
        return state
    with temporarily_clear_interpreter_stack(), torch._C._DisableTorchDispatch():
        return torch.from_numpy(state.get_state().numpy().copy())


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextmanager
def drawing_from_all(recorded: Sequence[RecordedState]) -> Iterator[None]:
    """Draws random numbers inside as when the states were recorded; on leaving, the generators are as before."""
    now = [(device, _read(device, _state_on(device))) for device, _ in recorded]
    try:
        for device, state in recorded:
            _set_state(device, _read(device, state))
        yield
    finally:
        for device, state in now:
            _set_state(device, state)


# Of the Mersenne Twister: 624 words of four bytes, and how many of them are given out.
_WORDS = 624
_WORDS_BYTES = 4 * _WORDS + 4


_Words = ctypes.c_char * _WORDS_BYTES


class _Generator:
    """A global generator, and the state that was read last, which stages share as long as nobody draws.

    Args:
        read, write: the functions that read and write its state, as its library has it.
        current: the generator as an object.
        address: the function that tells where such an object's words lie; None where it has none.
        packed: the words of a state as they should lie there.
        holds_a_normal: whether of a state the second number of a pair is still to be given out, which changes no word.
    """

    __slots__ = (
        "_address",
        "_current",
        "_holds_a_normal",
        "_memory",
        "_object",
        "_packed",
        "_read",
        "_state",
        "_words",
        "_write",
    )

    def __init__(
        self,
        *,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        current: Callable[[], Any],
        address: Callable[[Any], int | None],
        packed: Callable[[Any], bytes],
        holds_a_normal: Callable[[Any], bool],
    ) -> None:
        self._read, self._write, self._current, self._address = read, write, current, address
        self._packed, self._holds_a_normal = packed, holds_a_normal
        self._words = b""
        self._state: Any = None
        self._object: Any = None  # that the memory is of: it stays where it is as long as it lives
        self._memory: Any = None

    def now(self) -> Any:
        """The state as it is; the same object where it is the same."""
        words = self._words_now()
        if not words or words != self._words or self._holds_a_normal(self._state):
            self._state = self._read()
            self._words = words if words == self._packed(self._state) else b""
        return self._state

    def put_back(self, state: Any) -> None:
        """Make it the state again."""
        if self.now() is not state:
            self._write(state)
            self._state, self._words = state, self._words_now()

    def _words_now(self) -> bytes:
        if (current := self._current()) is not self._object:
            address = self._address(current)
            self._object, self._memory = current, None if address is None else _Words.from_address(address)
        return b"" if self._memory is None else self._memory.raw


def _address_of_numpy(generator: Any) -> int | None:
    return generator.ctypes.state_address if type(generator) is np.random.MT19937 else None


def _packed_of_numpy(state: Any) -> bytes:
    inside = state["state"]
    return inside["key"].tobytes() + struct.pack("=i", int(inside.get("pos", 0))) if "key" in inside else b"-"


def _address_of_python(generator: Any) -> int | None:
    """Behind the head of CPython's object; where other words lie there, ``now`` reads the state every time."""
    room_bytes = type(generator).__basicsize__ - object.__basicsize__
    return id(generator) + object.__basicsize__ if room_bytes >= _WORDS_BYTES else None


def _packed_of_python(state: Any) -> bytes:
    *words, given_out = state[1]
    return struct.pack(f"=i{_WORDS}I", given_out, *words)


_NUMPY = _Generator(
    read=lambda: np.random.get_state(legacy=False),
    write=np.random.set_state,
    current=mtrand.get_bit_generator,
    address=_address_of_numpy,
    packed=_packed_of_numpy,
    holds_a_normal=lambda state: bool(state["has_gauss"]),
)
_PYTHON = _Generator(
    read=random.getstate,
    write=random.setstate,
    current=lambda: random._inst,  # type: ignore[attr-defined]  # what the module's functions are methods of
    address=_address_of_python,
    packed=_packed_of_python,
    holds_a_normal=lambda state: state[2] is not None,
)


class HostRandomness:
    """Both states as they are now; as a context, both generators repeat their numbers, and go on afterwards."""

    __slots__ = ("_now", "_numpy", "_python")

    def __init__(self) -> None:
        self._python, self._numpy = _PYTHON.now(), _NUMPY.now()

    def has_advanced(self) -> bool:
        """Whether somebody has drawn since."""
        python, numpy = _PYTHON.now(), _NUMPY.now()
        same = (self._python is python or self._python == python) and (
            self._numpy is numpy or same_state(self._numpy, numpy)
        )
        return not same

    def restore(self) -> None:
        """Put both states back; may be called any number of times."""
        _PYTHON.put_back(self._python)
        _NUMPY.put_back(self._numpy)

    def __enter__(self) -> None:
        self._now = HostRandomness()
        self.restore()

    def __exit__(self, *error: object) -> None:
        self._now.restore()
        del self._now


class RandomState:
    """The random states of torch (every device in use), numpy and Python, as they were when this was made."""

    def __init__(self) -> None:
        self._cpu, self._cuda, self._host = _cpu_state(), _states_of_cuda(), HostRandomness()

    def host_differs(self) -> bool:
        """True where Python's or numpy's generator has advanced since."""
        return self._host.has_advanced()

    def torch_differs(self) -> bool:
        """True where a torch generator has advanced since."""
        moved = any(not torch.equal(a, b) for a, b in zip(self._cuda, _states_of_cuda(), strict=False))
        return moved or not torch.equal(self._cpu, _cpu_state())

    def restore(self) -> None:
        """Put the states back; may be called any number of times."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        self._host.restore()

    def repeat(self, run: Callable[[], object]) -> None:
        """Call ``run`` from these states, and go on from those of now: it draws what was drawn since they were read."""
        now = RandomState()
        self.restore()
        run()
        now.restore()


def _cpu_state() -> Tensor:
    return _read(_CPU, _state_on(_CPU))


def _states_of_cuda() -> list[Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def same_state(now: Any, before: Any) -> bool:
    """Whether two states of a generator, or two arrays, are equal."""
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(same_state, now, before))
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(same_state(now[key], before[key]) for key in now)
    return np.array_equal(now, before) if isinstance(now, np.ndarray) else now == before
