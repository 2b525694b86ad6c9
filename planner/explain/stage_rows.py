"""Stages as rows of a table: equal ones together, under the names that tell them apart."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar

from planner.plans.short_names import common_path, in_one_series, names_in_short

RANGES_SHOWN = 12  # of numbers in one row
_ALIKE = 0.1  # seconds of equal stages differ by no more of the larger
_NO_TIME = 1e-4  # or by no more than this


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str | None: ...


AnyStage = TypeVar("AnyStage", bound=_Named)


def rows_of_stages(
    stages: Sequence[AnyStage],
    key: Callable[[AnyStage], Hashable],
    seconds: Callable[[AnyStage], Sequence[float]],
) -> list[tuple[str, list[AnyStage]]]:
    """The rows, in the order of their first stages: a name in short, and the stages.

    Args:
        stages: in the order in which they run.
        key: what is equal for equal stages.
        seconds: what is about equal.
    """
    path = path_of(stages)
    rows: list[list[AnyStage]] = []
    for stage in stages:
        row = next((row for row in rows if _belongs(stage, row[0], key, seconds)), None)
        if row is None:
            rows.append([stage])
        else:
            row.append(stage)
    return [(name_of_row([stage.name for stage in row], path), row) for row in rows]


def path_of(stages: Sequence[_Named]) -> str:
    """The modules around all stages, which rows leave out."""
    return common_path([stage.name for stage in stages if stage.kind == "stage"] or [""])


def name_of_row(names: Sequence[str], path: str) -> str:
    """Names of stages in short, without the modules around all.

    >>> name_of_row([f"model.h.{k}" for k in (3, 4, 5, 7, 9, 10)], "model.")
    'h.3 to 5, 7, 9, 10'
    >>> name_of_row(["between model.drop and model.h.0"], "model.")
    'between drop and h.0'
    """
    plain = [name.removeprefix("outside, ") for name in names]  # as files of older releases have it
    return names_in_short([name.replace(path, "") if path else name for name in plain], "", ranges=RANGES_SHOWN)


def note_on_rows(path: str, several: bool) -> list[tuple[str, str]]:
    """What is to be said below the table."""
    notes = [f"names of stages without {path!r}"] if path else []
    notes += ["in rows of several stages bytes and times are those of each"] if several else []
    return [("", "; ".join(notes))] if notes else []


def _belongs(
    stage: AnyStage,
    first: AnyStage,
    key: Callable[[AnyStage], Hashable],
    seconds: Callable[[AnyStage], Sequence[float]],
) -> bool:
    names = [stage.name, first.name]
    if not (stage.kind == first.kind == "stage" and len(set(names)) > 1 and in_one_series(names)):
        return False
    pairs = zip(seconds(stage), seconds(first), strict=True)
    return key(stage) == key(first) and all(abs(a - b) <= max(_ALIKE * max(a, b), _NO_TIME) for a, b in pairs)
