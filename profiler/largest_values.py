"""Records of one kind put together: the largest of what was measured, and the same in everything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

Value = TypeVar("Value")
MergeRules = Mapping[str, Callable[[Sequence[Any]], Any]]
_MEASURED = ("bytes", "seconds")
_NO_RULES: MergeRules = MappingProxyType({})


class UnlikeValues(ValueError):
    """Records that differ in what has to be the same.

    Attributes:
        number: which of the records differs from the first.
        where: the attribute.
        expected, got: what the first has there, and what that one has.
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
        rules: by the name of an attribute, what to make of its values instead.

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
