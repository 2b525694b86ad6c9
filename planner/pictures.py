"""Shared parts of all pictures: file formats, units of axes, writing; and the small picture of a plan in notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from planner.units import format_bytes, shown_units
from profiler.json_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FORMATS = (".png", ".svg", ".pdf")

# Colours close to those of Okabe and Ito, which colour-blind eyes tell apart, on white and on black paper. Every
# picture takes its colours from here; a test holds that those of one picture differ.
BLUE, SKY, GREEN, ORANGE, VERMILION, PINK, RED, BROWN, GREY, YELLOW, SLATE = (
    "#1F77C4", "#56B4E9", "#0BA27A", "#E69F00", "#D55E00", "#CC79A7", "#B00020", "#8B4513", "#8A8F98",
    "#F0E442", "#5A6070",
)  # fmt: skip
BUDGET, STATES = RED, GREY
CURVES = {
    "with the plan": BLUE,
    "without the plan": GREY,
    "measured with the plan": VERMILION,
    "measured without the plan": "#B8A100",
}
ACTIONS = {
    "forward": SKY,
    "backward": ORANGE,
    "backward, some ops recomputed": "#F6DC9C",
    "recompute": PINK,
    "optimizer": GREEN,
    "waits for a copy": RED,
    "to host": BLUE,
    "to device": BROWN,
}
FITS, MISSES = GREEN, "#BBBBBB"
_PARTS = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, BROWN, YELLOW, SLATE)
_HATCHES = ("", "/", "x", ".", "+", "-", "|", "\\")


def part_look(number: int) -> tuple[str, str]:
    """Colour and hatch of one part of many in a picture: no two of 72 parts look alike.

    >>> part_look(0), part_look(9)
    (('#1F77C4', ''), ('#1F77C4', '/'))
    """
    again, place = divmod(number, len(_PARTS))
    return _PARTS[place], _HATCHES[again % len(_HATCHES)]


class AxisUnits(NamedTuple):
    """The units of bytes and seconds on the axes."""

    bytes_name: str
    bytes_each: float
    seconds_name: str
    seconds_each: float


def check_picture(path: str | Path) -> str:
    """The format that a picture's file name asks for; ValueError for one that cannot be drawn."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"{path}: expected a picture's name ending in {', '.join(FORMATS)}, got {suffix!r}; rename it")
    return suffix[1:]


def new_figure(width: float, height: float, *, dpi: int) -> Figure:
    """An empty figure of so many inches, whose parts leave each other room."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_picture(figure: Figure, path: str | Path) -> None:
    """Write a figure whole or not at all, in the format that the file's name asks for.

    Raises:
        ValueError: another kind of file, or a folder that is not there.
    """
    from matplotlib.text import Text

    ticks = {label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in axis.get_ticklabels()}
    for text in set(figure.findobj(Text)) - ticks:
        text.set_parse_math(False)  # Names are text, dollars and all.
    content = BytesIO()
    figure.savefig(content, format=check_picture(path))
    write_whole(path, content.getvalue())


def units_up_to(largest_bytes: int, longest_seconds: float = 0.0) -> AxisUnits:
    """The units for axes that reach so far: of bytes the largest of which that is four or more.

    >>> units_up_to(5 * 2**30, 12.0), units_up_to(3)[:2]
    (AxisUnits(bytes_name='GiB', bytes_each=1073741824.0, seconds_name='s', seconds_each=1.0), ('B', 1.0))
    """
    name, each = next((unit for unit in reversed(shown_units()) if largest_bytes >= 4 * unit[1]), ("B", 1))
    return AxisUnits(name, float(each), *(("s", 1.0) if longest_seconds >= 10 else ("ms", 1e-3)))


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
        f'<polygon points="0,{bottom} {points} {_WIDTH},{bottom}" fill="{SKY}"/>'
        f'<line x1="0" x2="{_WIDTH}" y1="{budget}" y2="{budget}" stroke="{BUDGET}" stroke-dasharray="2 3"/>'
        f'<text x="2" y="{_MARGIN - 3}" font-size="11" fill="{GREY}">{said}</text></svg>'
    )


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text; nothing where it has no rows."""
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else ""
