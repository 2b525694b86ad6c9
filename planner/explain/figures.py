"""What every picture shares: its file format, the units of its axes, and how it is written."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from planner.units import shown_units
from profiler.json_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


class AxisUnits(NamedTuple):
    """What the axes count bytes and seconds in."""

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
