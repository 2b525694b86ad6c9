"""Short names for several modules."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from planner.units import counted

_NAMED = 3  # ranges of numbers; of more the first ones and the last
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")  # what stands before and behind the last number


def names_in_short(names: Sequence[str], what: str = "stage", *, ranges: int = _NAMED) -> str:
    """Numbered names as ranges, at most ``ranges`` of them, and how many there are of ``what``, where that is said.

    >>> names_in_short(["transformer.h.0"])
    'transformer.h.0'
    >>> names_in_short([f"transformer.h.{k}" for k in (3, 4, 5, 7)])
    'transformer.h.3 to 5, 7 (4 stages)'
    >>> names_in_short([str(k) for k in range(0, 20, 2)])
    '0, 2, ... 18 (10 stages)'
    >>> names_in_short(["layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.2.mlp"])
    'layers.0.attn ... layers.2.mlp (4 stages)'
    """
    if len(names) == 1:
        return names[0]
    if not in_one_series(names):
        shown = f"{names[0]}{', ' if len(names) == 2 else ' ... '}{names[-1].removeprefix(common_path(names))}"
    else:
        runs = _ranges(names)
        shown = ", ".join(runs if len(runs) <= ranges else [*runs[: ranges - 1], f"... {runs[-1]}"])
    return f"{shown} ({counted(len(names), what)})" if what else shown


def in_one_series(names: Sequence[str]) -> bool:
    """Whether names differ by one number alone.

    >>> in_one_series(["h.0.mlp", "h.3.mlp"]), in_one_series(["h.0.mlp", "ln_f"])
    (True, False)
    """
    return len({_number_cut_out(name) for name in names}) == 1


def common_path(names: Sequence[str]) -> str:
    """The modules that contain all of these, with the last dot; empty where there are none.

    A number alone says too little: the module that it counts in stays with it.

    >>> common_path(["transformer.drop", "transformer.h.0", "transformer.h.1"])
    'transformer.'
    >>> common_path(["transformer.h.0", "transformer.h.1"])
    'transformer.'
    """
    paths = [name.split(".") for name in names]
    columns = zip(*(path[:-1] for path in paths), strict=False)
    common = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, columns)]
    while common and any(parts[len(common)][:1].isdigit() for parts in paths):
        common.pop()
    return "".join(f"{part}." for part in common)


def _number_cut_out(name: str) -> tuple[str, str]:
    """What stands before and behind the last number in a name."""
    match = _NUMBERED.fullmatch(name)
    return (name, name) if match is None else (match[1], match[3])


def _ranges(names: Sequence[str]) -> list[str]:
    """Neighbouring numbers as one; what stands before and behind the numbers is the same for all."""
    before, behind = _number_cut_out(names[0])
    numbers = [int(name[len(before) : len(name) - len(behind)]) for name in names]
    ranges: list[str] = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [value for _, value in run]
        ranges += [f"{values[0]} to {values[-1]}"] if len(values) > 2 else [str(value) for value in values]
    return [f"{'' if k else before}{text}{behind}" for k, text in enumerate(ranges)]
