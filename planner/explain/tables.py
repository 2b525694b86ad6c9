"""Tables and lists of facts as every report of the planner prints them: no line breaks inside a word or a number."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from planner.units import common_path, in_one_series, names_in_short

# Behind a space, and between the parts of a name: "encoder.layers.0", "native_batch_norm"; never inside "2.57".
_BREAKS = re.compile(r"(?<= )(?=\S)|(?<=[A-Za-z][._/])(?=\w)|(?<=\w[._/])(?=[A-Za-z])")
_GAP, _NARROW_GAP = 3, 2  # characters between two columns of a table, the second where it is too wide
_LEAST = 20  # characters of a line that a fact has


class PlainTable:
    """A table with one line, below its head; its columns of text stand before those of numbers.

    Where it is too wide, texts and the heads of numbers go over several lines; where even that does not do, texts stand
    in lines of their own above the numbers.
    """

    def __init__(self, title: str, texts: Sequence[str], numbers: Sequence[str]) -> None:
        self._title = title
        self._heads = [Text(name, style="bold") for name in (*texts, *numbers)]
        self._texts = len(texts)
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text, style: str | None = None) -> None:
        """Add a row; what a string holds is text, and no markup."""
        assert len(cells) == len(self._heads)
        self._rows.append([Text(cell, style=style or "") if isinstance(cell, str) else cell for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the lines that Rich prints."""
        gap, widths, stacked = self._layout(options.max_width)
        if self._title:
            yield from map(_line, wrapped(Text(self._title, style="bold"), options.max_width))
            yield _line(Text())
        numbers, shown = (widths[self._texts :], self._texts) if stacked else (widths, 0)
        for row in (self._heads, *self._rows):
            if stacked:
                texts = Text("  ").join(cell for cell in row[: self._texts] if cell.plain)
                yield from (_line(Text(" ") + part) for part in wrapped(texts, options.max_width - 1))
            yield from self._row(row[shown:], numbers, gap, self._texts - shown, last=row is self._heads)
            if row is self._heads:
                yield _line(Text(" " + "─" * (sum(numbers) + gap * (len(numbers) - 1))))
        yield _line(Text())

    def _layout(self, room: int) -> tuple[int, list[int], bool]:
        """The gap between columns, their widths, and whether texts stand in lines of their own above the numbers."""
        columns = list(zip(self._heads, *self._rows, strict=True))
        widths = [max(_widest(str(cell).split("\n")) for cell in column) for column in columns]
        if 1 + sum(widths) + _GAP * (len(widths) - 1) <= room:
            return _GAP, widths, False
        room -= 1 + _NARROW_GAP * (len(widths) - 1)
        for k in range(self._texts, len(widths)):
            head, *values = columns[k]
            widths[k] = max(_widest(_words(str(head))), *(_widest(str(cell).split("\n")) for cell in values), 0)
        least = [max(_widest(_words(str(cell))) for cell in column) for column in columns[: self._texts]]
        if sum(least) + sum(widths[self._texts :]) > room:
            return _NARROW_GAP, widths, True
        while sum(widths) > room:
            most = max(range(self._texts), key=lambda k: (widths[k] > least[k], widths[k]))
            widths[most] -= 1
        return _NARROW_GAP, widths, False

    def _row(self, cells: Sequence[Text], widths: Sequence[int], gap: int, texts: int, *, last: bool) -> Iterator[Text]:
        """The lines of a row; with ``last`` its cells end in the last one of them."""
        lines = [wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
        height = max(map(len, lines))
        if last:
            lines = [[*[Text()] * (height - len(column)), *column] for column in lines]
        for number in range(height):
            line = Text(" ")
            for k, (column, width) in enumerate(zip(lines, widths, strict=True)):
                part = column[number].copy() if number < len(column) else Text()
                part.align("left" if k < texts else "right", width)
                line += part if k == 0 else Text(" " * gap) + part
            yield _line(line)


class Facts:
    """Names in bold with what is said of each, beside each other."""

    def __init__(self, rows: Sequence[tuple[str, str | Text]]) -> None:
        self._rows = [(Text(name, style="bold"), Text(text) if isinstance(text, str) else text) for name, text in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the lines that Rich prints."""
        indent = max((len(name) for name, _ in self._rows), default=0) + 2
        for name, text in self._rows:
            for number, part in enumerate(wrapped(text, max(_LEAST, options.max_width - indent))):
                head = Text() if number else name.copy()
                head.align("left", indent)
                yield _line(head + part)


def plain_table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> PlainTable:
    """A table without rows, its columns of text before those of numbers."""
    return PlainTable(title, texts, numbers)


def facts(rows: Sequence[tuple[str, str | Text]]) -> Facts:
    """Names in bold with what is said of each, one a line; what a string holds is text, and no markup."""
    return Facts(rows)


def wrapped(text: Text, width: int) -> list[Text]:
    """The lines of a text in so many columns, broken behind spaces and between the parts of names.

    >>> [str(line) for line in wrapped(Text("encoder.layers.10 to 12, 2.57 MiB"), 10)]
    ['encoder.', 'layers.10', 'to 12,', '2.57 MiB']
    """
    width = max(1, width)  # At least a character a line, where there is no room.
    lines: list[Text] = []
    for paragraph in text.split("\n", allow_blank=True):
        plain, begin = str(paragraph), 0
        ends = [*(match.start() for match in _BREAKS.finditer(plain)), len(plain)]
        while True:
            fitting = [end for end in ends if end > begin and len(plain[begin:end].rstrip()) <= width]
            end = max(fitting, default=min(begin + width, len(plain)))
            line = paragraph[begin:end]
            line.rstrip()
            lines.append(line)
            begin = end
            if begin >= len(plain):
                break
    return lines


def _words(plain: str) -> list[str]:
    return [word.rstrip() for part in plain.split("\n") for word in _BREAKS.split(part)]


def _widest(lines: Sequence[str]) -> int:
    return max(map(len, lines), default=0)


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ignore"
    text.rstrip()
    return text


def losses_in_short(losses: Sequence[float]) -> str:
    """All of a few losses, the first ones and the last of many."""
    texts = [f"{loss:.6g}" if math.isfinite(loss) else "not finite" for loss in losses]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:7], "...", texts[-1]]) or "none yet"


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
    """The notes below the table."""
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
