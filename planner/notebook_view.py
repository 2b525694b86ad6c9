"""What notebooks show of a plan: a small picture of the bytes alive, and a table of what is done."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.units import format_bytes

_WIDTH, _HEIGHT, _MARGIN = 480, 110, 14  # pixels


@dataclass(frozen=True, slots=True)
class SvgPicture:
    """A small picture as SVG text, which notebooks show."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg


class AliveDuring(NamedTuple):
    """Seconds of an action of a step, and the bytes alive before, at its peak and after it."""

    seconds: float
    before_bytes: int
    peak_bytes: int
    after_bytes: int


def small_timeline(actions: Iterable[AliveDuring], *, peak_bytes: int, budget_bytes: int) -> SvgPicture:
    """The bytes alive over forward and backward; a line is the budget.

    Args:
        actions: in their order.
        peak_bytes: of the whole step, which the words above name.
        budget_bytes: of the whole step.
    """
    actions = list(actions)
    top_bytes = max([budget_bytes, 1, *(action.peak_bytes for action in actions)])
    across = _WIDTH / (sum(action.seconds for action in actions) or 1.0)

    def down(size_bytes: int) -> str:
        return f"{_MARGIN + _HEIGHT * (1 - size_bytes / top_bytes):.1f}"

    highest: dict[int, int] = {}  # by pixels to the right, so that a long step is no long text
    now = 0.0
    for action in actions:
        for share, size_bytes in ((0, action.before_bytes), (0.5, action.peak_bytes), (1, action.after_bytes)):
            place = round((now + share * action.seconds) * across)
            highest[place] = max(highest.get(place, 0), size_bytes)
        now += action.seconds
    points = " ".join(f"{place},{down(size_bytes)}" for place, size_bytes in sorted(highest.items()))
    bottom, budget = _MARGIN + _HEIGHT, down(budget_bytes)
    said = f"forward and backward: peak {format_bytes(peak_bytes)} of {format_bytes(budget_bytes)}"
    return SvgPicture(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom}" width="{_WIDTH}" role="img">'
        f'<polygon points="0,{bottom} {points} {_WIDTH},{bottom}" fill="#56B4E9"/>'
        f'<line x1="0" x2="{_WIDTH}" y1="{budget}" y2="{budget}" stroke="#B00020" stroke-dasharray="2 3"/>'
        f'<text x="2" y="{_MARGIN - 3}" font-size="11" fill="#808080">{said}</text></svg>'
    )


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text; nothing where it has no rows."""
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else ""
