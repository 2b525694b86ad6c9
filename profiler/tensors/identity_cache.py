"""A cache for functions of types and pieces of code that does not keep them alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def cached_by_identity(function: Callable[[Key], Value]) -> Callable[[Key], Value]:
    """What a function returned for an object the first time, for as long as that object lives.

    ``functools.cache`` would keep it for good: a class that is made inside a function, and all that its methods refer
    to. What the function returns must not refer to the object.
    """
    known: dict[int, Value] = {}
    references: dict[int, weakref.ref[Key]] = {}

    @functools.wraps(function)
    def cached(key: Key) -> Value:
        place = id(key)
        if place in known:
            return known[place]

        def forget(_: weakref.ref[Key]) -> None:
            known.pop(place, None)
            references.pop(place, None)

        value = function(key)
        references[place] = weakref.ref(key, forget)
        known[place] = value
        return value

    return cached
