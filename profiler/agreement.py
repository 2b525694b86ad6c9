"""Decisions that ranks which measure one step together have to take as one: how many steps run, and which.

A step of a model that is spread over ranks has collectives in it, and a rank that ran a step more than the others would
wait for them in vain. So whatever follows from numbers measured on one rank, or from values there, goes through here
before it decides what runs next. A process that measures by itself agrees with itself.

Records of several ranks are put together by ``merged_largest``: the largest of what was measured, and the same in
everything else.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

Value = TypeVar("Value")


class MeasuringRanks(Protocol):
    """Processes that run the same code, each with its part of the same step."""

    def gathered(self, value: Value) -> list[Value]:
        """Returns the values that the ranks have given, in their order."""
        ...

    def from_first(self, value: Value) -> Value:
        """Returns the value that the first rank has given."""
        ...

    def made_by_rank0(self, make: Callable[[], Value]) -> Value:
        """Returns the value that the first rank makes, on all ranks."""
        ...

    def check_answered(self, error: Exception | None) -> None:
        """Raise where an error on any rank says that another one did not answer in a collective."""
        ...


_together: list[MeasuringRanks | None] = []  # of the processes that measure together now; the innermost last


@contextlib.contextmanager
def measured_with(ranks: MeasuringRanks | None) -> Iterator[None]:
    """Has measurements inside made together with these ranks; with None by this process alone."""
    _together.append(ranks)
    try:
        yield
    finally:
        _together.pop()


def is_together() -> bool:
    """Whether other ranks measure with this one."""
    return _others() is not None


def _others() -> MeasuringRanks | None:
    return _together[-1] if _together else None


def gathered(value: Value) -> list[Value]:
    """Returns the value of each rank."""
    return [value] if (ranks := _others()) is None else ranks.gathered(value)


def agreed(value: Value) -> Value:
    """Returns the value of the first rank."""
    return value if (ranks := _others()) is None else ranks.from_first(value)


def made_by_rank0(make: Callable[[], Value]) -> Value:
    """Returns the result of ``make`` on the first rank; a ValueError that it raises there is raised on all ranks."""
    return make() if (ranks := _others()) is None else ranks.made_by_rank0(make)


def any_rank(flag: Any) -> bool:
    """Whether it is true on any rank."""
    return any(gathered(bool(flag)))


def largest(value: Value) -> Value:
    """The largest of what the ranks have measured; raises UnlikeValues where they differ in more than that."""
    return merged_largest(gathered(value))


def first_failure(failure: str, error: Exception | None = None) -> str:
    """The first rank's words on what failed there, of those on which something did; empty where nothing did.

    Args:
        failure: the reason on this rank; empty where it succeeded.
        error: the exception behind the reason. Where it came of another rank that did not answer, all ranks raise.
    """
    if (ranks := _others()) is not None:
        ranks.check_answered(error)
    return next(filter(None, gathered(failure)), "")


MergeRules = Mapping[str, Callable[[Sequence[Any]], Any]]
_MEASURED = ("bytes", "seconds")
_NO_RULES: MergeRules = MappingProxyType({})


class UnlikeValues(ValueError):
    """Records that differ in what has to be the same.

    Attributes:
        number: the number of the record that differs from the first.
        where: the attribute.
        expected: the value in the first record.
        got: the value in the record that differs.
    """

    def __init__(self, number: int, where: str, expected: Any, got: Any) -> None:
        self.number, self.where, self.expected, self.got = number, where, expected, got
        super().__init__(f"expected {_short(expected)} in {where or 'all'}, got {_short(got)} in number {number}")


def merged_largest(values: Sequence[Value], rules: MergeRules = _NO_RULES) -> Value:
    """One record out of several.

    Attributes whose names end in ``bytes`` or ``seconds`` hold what was measured: the largest counts, also in tuples of
    such numbers.

    Args:
        values: dataclasses, tuples, lists, mappings and plain data; at least one.
        rules: by the name of an attribute, the function that joins its values instead.

    Raises:
        UnlikeValues: something else differs.

    >>> from profiler.records import Phase
    >>> merged_largest([Phase(peak_bytes=1, seconds=2.0), Phase(peak_bytes=3, seconds=1.0)]).peak_bytes
    3
    """
    return _merged(list(values), "", rules, measured=False)


def _merged(values: list[Any], where: str, rules: MergeRules, *, measured: bool) -> Any:
    first = values[0]
    if measured and all(isinstance(value, (int, float)) for value in values):
        return max(values)
    for number, value in enumerate(values):
        if type(value) is not type(first) or (isinstance(first, (list, tuple)) and len(value) != len(first)):
            raise UnlikeValues(number, where, first, value)
    if dataclasses.is_dataclass(first):
        return _merged_record(values, where, rules)
    if isinstance(first, Mapping):
        for number, value in enumerate(values):
            if list(value) != list(first):
                raise UnlikeValues(number, where, list(first), list(value))
        return {key: _merged([v[key] for v in values], f"{where}[{key!r}]", rules, measured=measured) for key in first}
    if isinstance(first, (list, tuple)):
        items = [
            _merged(list(each), f"{where}[{n}]", rules, measured=measured)
            for n, each in enumerate(zip(*values, strict=True))
        ]
        return getattr(type(first), "_make", type(first))(items)
    for number, value in enumerate(values):
        if value != first:
            raise UnlikeValues(number, where, first, value)
    return first


def _merged_record(values: list[Any], where: str, rules: MergeRules) -> Any:
    merged: dict[str, Any] = {}
    for field in dataclasses.fields(values[0]):
        each, inside = [getattr(value, field.name) for value in values], f"{where}.{field.name}".lstrip(".")
        if (rule := rules.get(field.name)) is not None:
            merged[field.name] = rule(each)
        else:
            merged[field.name] = _merged(each, inside, rules, measured=field.name.endswith(_MEASURED))
    return dataclasses.replace(values[0], **merged)


_MOST_SHOWN = 80


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
