"""Draws the rooms of the three packages as docs/rooms.svg: ``python -m docs.hooks.rooms_picture`` after a change."""

from __future__ import annotations

from typing import NamedTuple

from docs.hooks.rooms_table import ROOT, rooms

PICTURE = ROOT / "docs" / "rooms.svg"
WIDTH, MARGIN = 920, 14
LEFT, GAP, LINE, ROW_GAP = 108, 16, 15, 14  # where boxes begin, and what lies between boxes, lines of text and rows
LETTER = 6.7  # the mean width of a letter of 12-pixel Helvetica, rounded up
TALLEST = 5  # names below each other in one box; more of them stand in columns
COLOURS = {"profiler": ("#e3f2fd", "#1565c0"), "solvers": ("#e8f5e9", "#2e7d32"), "planner": ("#fff3e0", "#ef6c00")}
CAPTION = "Arrows follow the imports: a room uses those before it. planner also uses the two packages above it."
SAYS = {"profiler": "measures", "solvers": "choose", "planner": "plans, applies"}


class Box(NamedTuple):
    """A rectangle with the names of one place in the order of imports, in pixels from the top left corner."""

    left: float
    top: float
    width: float
    height: float
    columns: list[list[str]]


class Row(NamedTuple):
    """The boxes of a package, on as many lines as the width of the picture asks for."""

    package: str
    top: float
    height: float
    lines: list[list[Box]]


def laid_out(table: dict[str, list[list[str]]]) -> list[Row]:
    """Where everything goes: each line is as tall as its tallest box, so that nothing can lie over anything else."""
    rows, top = [], float(MARGIN)
    for package, places in table.items():
        lines: list[list[Box]] = [[]]
        left, line_top = float(LEFT), top
        for names in places:
            columns = _columns(names)
            width = sum(_width(column) for column in columns) + 10 * (len(columns) - 1) + 16
            if lines[-1] and left + width > WIDTH - MARGIN:
                line_top = max(box.top + box.height for box in lines[-1]) + ROW_GAP
                lines.append([])
                left = float(LEFT)
            lines[-1].append(Box(left, line_top, width, LINE * max(map(len, columns)) + 14, columns))
            left += width + GAP
        lines = [_centred(line) for line in lines]
        bottom = max(box.top + box.height for line in lines for box in line)
        rows.append(Row(package, top, bottom - top, lines))
        top = bottom + 2 * ROW_GAP
    return rows


def drawn(table: dict[str, list[list[str]]]) -> str:
    """The picture as SVG text: a band for each package, a box for each place in the order of its rooms."""
    rows = laid_out(table)
    height = round(rows[-1].top + rows[-1].height + 2 * ROW_GAP + 12)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif" role="img">',
            "<title>The rooms of profiler, solvers and planner, in the order of imports</title>",
            '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#555"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
            *(part for row in rows for part in _row(row)),
            f'<text x="{WIDTH / 2:g}" y="{height - 14}" font-size="12" fill="#555" text-anchor="middle">'
            f"{CAPTION}</text>",
            "</svg>\n",
        ]
    )


def _columns(names: list[str]) -> list[list[str]]:
    many = -(-len(names) // TALLEST)
    tall = -(-len(names) // many)
    return [names[start : start + tall] for start in range(0, len(names), tall)]


def _width(names: list[str]) -> float:
    return round(LETTER * max(map(len, names)))


def _centred(line: list[Box]) -> list[Box]:
    """The boxes of a line with their middles at one height, for straight arrows."""
    tallest = max(box.height for box in line)
    return [box._replace(top=box.top + (tallest - box.height) / 2) for box in line]


def _row(row: Row) -> list[str]:
    fill, edge = COLOURS.get(row.package, ("#f5f5f5", "#555"))
    middle = row.top + row.height / 2
    parts = [
        f'<text x="16" y="{middle:g}" font-size="15" font-weight="bold" fill="{edge}">{row.package}</text>',
        f'<text x="16" y="{middle + 17:g}" font-size="12" fill="#555">{SAYS.get(row.package, "")}</text>',
    ]
    for begun, line in enumerate(row.lines):
        for number, box in enumerate(line):
            parts += _box(box, fill, edge)
            if number or begun:  # a further line begins with an arrow to the end of the one above
                height = box.top + box.height / 2
                parts.append(
                    f'<line x1="{box.left:g}" y1="{height:g}" x2="{box.left - GAP + 1:g}" y2="{height:g}" '
                    'stroke="#555" marker-end="url(#to)"/>'
                )
    return parts


def _box(box: Box, fill: str, edge: str) -> list[str]:
    parts = [
        f'<rect x="{box.left:g}" y="{box.top:g}" width="{box.width:g}" height="{box.height:g}" rx="5" fill="{fill}" '
        f'stroke="{edge}"/>'
    ]
    left = box.left + 8
    for column in box.columns:
        width = _width(column)
        first = box.top + box.height / 2 + 4 - LINE * (len(column) - 1) / 2
        parts += [
            f'<text x="{left + width / 2:g}" y="{first + LINE * k:g}" font-size="12" text-anchor="middle">{name}</text>'
            for k, name in enumerate(column)
        ]
        left += width + 10
    return parts


if __name__ == "__main__":
    PICTURE.write_text(drawn(rooms()), encoding="utf-8")
