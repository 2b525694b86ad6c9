"""Values and what is in them, remembered and put back: containers, tensors, generators, arrays, objects.

Where many things are put back (``Restoring``) all are tried, and what could not be put back is said at the end.
"""

from __future__ import annotations

import copy
import operator
import random
import signal
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from profiler.workload.plain_objects import (
    MOST_ITEMS,
    PLAIN,
    base_of,
    copied,
    refill,
    size_of,
)
from profiler.workload.reachable import Space
from profiler.workload.tensor_memory import TensorMemory

_DEPTH = 8  # Containers further inside are left alone: they may hold themselves.
MAPPINGS = (dict, OrderedDict, defaultdict)
SEQUENCES = (list, deque)


Memories = dict[int, TensorMemory | None]


class Snapshot:
    """A value and what is in it. Tensors are copied to host memory.

    Args:
        value: anything; what is no plain data is put back as the same object, whatever happened to it.
        memories: the copies of tensors that others have copied, by their ids; None for those whose values others put
            back.
        most_items: containers of more are taken as objects.
        keeps: tensors and containers are kept alive; without, they are made anew where they are gone.
    """

    def __init__(
        self,
        value: Any,
        memories: Memories | None = None,
        most_items: float = MOST_ITEMS,
        depth: int = _DEPTH,
        *,
        keeps: bool = False,
    ) -> None:
        self._identity, self._type, self._keeps = id(value), type(value), keeps
        self._back: Callable[[Any], Any]
        memories = {} if memories is None else memories

        def remember(item: Any) -> Snapshot:
            return Snapshot(item, memories, most_items, depth - 1, keeps=keeps)

        if self._type in PLAIN:
            self._back = lambda _: value
        elif isinstance(value, Tensor):
            self._back = _tensor(value, memories, keeps)
        elif is_container(value) and depth and size_of(value) <= most_items and (not keeps or isinstance(value, tuple)):
            self._back = self._container(value, remember)
        elif base_of(type(value)) is not None:
            self._back = self._filled_again(value, remember, depth)
        else:
            self._back = _object(value)

    def put_back(self, now: Any) -> Any:
        """The value as it was: the same object as far as it still is there, or stands in its place ``now``."""
        return self._back(now)

    def _is(self, now: Any) -> bool:
        """Whether it is the value itself; its place in memory may be another's by now."""
        return id(now) == self._identity and type(now) is self._type

    def _filled_again(self, value: Any, remember: Callable[[Any], Snapshot], depth: int) -> Callable[[Any], Any]:
        """Refills the same container, whatever stands in its place; for long ones only their own items count."""
        contents = copied(value)
        if len(contents) > MOST_ITEMS or not depth or isinstance(contents, set):
            return lambda _: (value, refill(value, contents))[0]
        if isinstance(contents, dict):
            pairs = {key: remember(item) for key, item in contents.items()}
            return lambda _: (value, refill(value, {k: p.put_back(contents[k]) for k, p in pairs.items()}))[0]
        items = [remember(item) for item in contents]
        return lambda _: (value, refill(value, [i.put_back(old) for i, old in zip(items, contents, strict=True)]))[0]

    def _container(self, value: Any, remember: Callable[[Any], Snapshot]) -> Callable[[Any], Any]:
        if isinstance(value, tuple):
            make = getattr(type(value), "_make", tuple)
            items = [remember(item) for item in value]
            kept = value if self._keeps else None

            def rebuilt(now: Any) -> Any:
                now = now if kept is None else kept
                there = now if self._is(now) else [None] * len(items)
                parts = [item.put_back(old) for item, old in zip(items, there, strict=True)]
                return now if self._is(now) and all(map(operator.is_, parts, there)) else make(parts)

            return rebuilt
        shell = copy.copy(value)
        shell.clear()
        if isinstance(value, MAPPINGS):
            pairs = {key: remember(item) for key, item in value.items()}

            def back(now: Any) -> Any:
                target = now if self._is(now) else copy.copy(shell)
                return filled(target, target.update, {k: item.put_back(target.get(k)) for k, item in pairs.items()})

            return back
        items = [remember(item) for item in value]

        def refilled(now: Any) -> Any:
            target = now if self._is(now) else copy.copy(shell)
            old = {id(item): item for item in target}
            return filled(target, target.extend, [item.put_back(old.get(item._identity)) for item in items])

        return refilled


def filled(container: Any, fill: Callable[[Any], None], items: Any) -> Any:
    """The container, emptied and filled."""
    container.clear()
    fill(items)
    return container


def is_container(value: Any) -> bool:
    """Whether it is made anew where it is gone: other people's subclasses may mean something else by their items."""
    return type(value) in (tuple, *MAPPINGS, *SEQUENCES) or (isinstance(value, tuple) and hasattr(value, "_make"))


class StateAccess(NamedTuple):
    """How the state of an object is read, and written; it lies in no memory that an allocator of torch's counts."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


# Objects that a step changes inside, by their type.
STATE_OF: dict[type, StateAccess] = {
    torch.Generator: StateAccess(
        lambda g: g.get_state().numpy().copy(), lambda g, state: g.set_state(torch.from_numpy(state))
    ),
    np.random.Generator: StateAccess(
        lambda g: g.bit_generator.state, lambda g, state: setattr(g.bit_generator, "state", state)
    ),
    np.random.RandomState: StateAccess(lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    random.Random: StateAccess(lambda g: g.getstate(), lambda g, state: g.setstate(state)),
    np.ndarray: StateAccess(lambda a: a.copy(), lambda a, values: np.copyto(a, values, casting="no")),
}


def state_access(value: Any) -> StateAccess | None:
    """Returns how the state of a generator or an array is read and written; None for other objects."""
    return next((access for kind, access in STATE_OF.items() if isinstance(value, kind)), None)


def _object(value: Any) -> Callable[[Any], Any]:
    access = state_access(value)
    if access is None:
        return lambda _: value
    state = access.read(value)
    return lambda _: (value, access.write(value, state))[0]


def _tensor(value: Tensor, memories: Memories, keeps: bool) -> Callable[[Any], Any]:
    if value.is_meta or is_lazy(value):
        return lambda _: value  # It has no values, and takes no memory.
    if id(value) not in memories:
        memories[id(value)] = TensorMemory(value)
    memory, reference = memories[id(value)], weakref.ref(value)
    if memory is None and not keeps:  # What has taken the place of one that is gone stays there.
        return lambda now: now if reference() is None else reference()
    put_back = reference if memory is None else memory.put_back
    return (lambda _: (put_back(), value)[1]) if keeps else (lambda _: put_back())


def remembered_space(space: Space, memories: Memories | None = None, *, keeps: bool = False) -> Callable[[], None]:
    """Remembers a space (attributes, say); the returned function puts it back, and deletes names that have come since.

    Args:
        space: the named references of any object.
        memories, keeps: arguments as for ``Snapshot``.
    """
    remembered = {name: Snapshot(value, memories, keeps=keeps) for name, value in space.read().items()}

    def put_back() -> None:
        now = space.read()
        for name in now.keys() - remembered.keys():
            space.delete(name)
        for name, before in remembered.items():
            value = before.put_back(now.get(name))
            if name not in now or value is not now[name]:
                space.write(name, value)

    return put_back


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
                f"{what} cannot be copied to host memory and put back after the measured steps: {_said(error)}; keep "
                "it out of the workload, or make it a plain tensor"
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
        f"{len(failures)} things could not be put back after the measured steps ({named}{more}); all else is as it "
        "was. Build what is named anew, or load it from a checkpoint"
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
