"""Where the iterators stand that a step takes from: there others take their place, which give the same items again."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from profiler.workload.plain_objects import attributes_of, base_of, copied, in_slots, refill, set_slots
from profiler.workload.reachable import globals_of, in_cell, is_iterator, is_known_otherwise, reached_from
from profiler.workload.replayed_iterators import ReplayedIterator

_Place = Callable[[Any], object]  # puts a value there


def replace_iterators(*roots: Any) -> tuple[list[ReplayedIterator], Callable[[], None]]:
    """Put replayed iterators in the place of those that can be reached; returns them, and what ends that.

    Where nothing was taken the iterators themselves stand there again in the end.
    """
    places: dict[int, tuple[Any, list[_Place]]] = {}
    for holder in reached_from(*roots, through_iterators=False):
        for value, place in () if is_known_otherwise(holder) else _places_of(holder):
            places.setdefault(id(value), (value, []))[1].append(place)
    holder = value = place = None  # What still holds an iterator here counts below.
    replays: list[tuple[ReplayedIterator, list[_Place]]] = []
    for found in places.values():
        if isinstance(found[0], ReplayedIterator):
            replays.append((found[0], []))
        else:  # It is held by each place, by ``found`` and by the call.
            shared = sys.getrefcount(found[0]) > len(found[1]) + 2
            replays.append((ReplayedIterator(found[0], shared=shared), found[1]))
    places.clear()
    for replay, where in replays:
        for place in where:
            place(replay)

    def end() -> None:
        for replay, where in replays:
            if not replay.end():
                for place in where:
                    place(replay.source)

    return [replay for replay, _ in replays], end


def _places_of(holder: Any) -> Iterator[tuple[Any, _Place]]:
    """The iterators that something holds, each with what puts another value in its place."""
    if isinstance(holder, types.CellType):
        yield from ((v, functools.partial(setattr, holder, "cell_contents")) for v in in_cell(holder) if is_iterator(v))
    elif isinstance(holder, types.FunctionType):
        names = [(name, holder.__globals__[name]) for name in globals_of(holder)]
        yield from ((v, functools.partial(holder.__globals__.__setitem__, n)) for n, v in names if is_iterator(v))
        for number, value in enumerate(holder.__defaults__ or ()):
            if is_iterator(value):
                yield value, functools.partial(_set_default, holder, number)
        yield from _in_dict(holder.__kwdefaults__ or {})
    elif isinstance(holder, functools.partial):
        for number, value in enumerate(holder.args):
            if is_iterator(value):
                yield value, functools.partial(_set_argument, holder, number)
        yield from _in_dict(holder.keywords)
    else:
        base = base_of(type(holder))
        if isinstance(base, type) and issubclass(base, dict):
            yield from _in_dict(holder)
        elif base is not None:
            items = copied(holder) if base is not set else ()
            for number, value in enumerate(items):
                if is_iterator(value):
                    yield value, functools.partial(_set_item, holder, number)
        yield from _in_dict(attributes_of(holder) or {})
        if not isinstance(holder, nn.Module):
            for number, value in enumerate(in_slots(holder)):
                if is_iterator(value):
                    yield value, functools.partial(_set_slot, holder, number)


def _in_dict(items: Any) -> Iterator[tuple[Any, _Place]]:
    for key, value in list(dict.items(items)):
        if is_iterator(value):
            yield value, functools.partial(dict.__setitem__, items, key)


def _set_item(container: Any, number: int, value: Any) -> None:
    contents = copied(container)
    contents[number] = value
    refill(container, contents)


def _set_slot(owner: Any, number: int, value: Any) -> None:
    contents = list(in_slots(owner))
    contents[number] = value
    set_slots(owner, tuple(contents))


def _set_default(function: types.FunctionType, number: int, value: Any) -> None:
    defaults = list(function.__defaults__ or ())
    defaults[number] = value
    function.__defaults__ = tuple(defaults)


def _set_argument(call: functools.partial[Any], number: int, value: Any) -> None:
    arguments = list(call.args)
    arguments[number] = value
    state = (call.func, tuple(arguments), call.keywords, vars(call))
    call.__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]
