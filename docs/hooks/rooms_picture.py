"""Draws the rooms of the three packages as docs/rooms.svg: ``python -m docs.hooks.rooms_picture`` after a change."""

from __future__ import annotations

from docs.hooks.rooms_table import ROOT, rooms

PICTURE = ROOT / "docs" / "rooms.svg"
WIDTH, ROW, TOP = 920, 92, 30
LEFT, BOX, GAP, LINE = 108, 100, 14, 15
COLOURS = {"profiler": ("#e3f2fd", "#1565c0"), "solvers": ("#e8f5e9", "#2e7d32"), "planner": ("#fff3e0", "#ef6c00")}
CAPTION = "Arrows follow the imports: a room uses those left of it. planner also uses the two packages above it."
SAYS = {"profiler": "measures", "solvers": "choose", "planner": "plans, applies"}


def drawn(table: dict[str, list[list[str]]]) -> str:
    """The picture as SVG text: a row for each package, a box for each place in the order of its rooms."""
    height = TOP + ROW * len(table) + 26
    bottom = height - 12
    rows = [part for row, (package, places) in enumerate(table.items()) for part in _row(package, places, row)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" role="img">'
    )
    return "\n".join(
        [
            head,
            "<title>The rooms of profiler, solvers and planner, in the order of imports</title>",
            '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#555"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
            *rows,
            f'<text x="{WIDTH / 2:g}" y="{bottom}" font-size="12" fill="#555" text-anchor="middle">{CAPTION}</text>',
            "</svg>\n",
        ]
    )


def _row(package: str, places: list[list[str]], row: int) -> list[str]:
    middle = TOP + ROW * row + 32
    fill, edge = COLOURS.get(package, ("#f5f5f5", "#555"))
    parts = [
        f'<text x="16" y="{middle}" font-size="15" font-weight="bold" fill="{edge}">{package}</text>',
        f'<text x="16" y="{middle + 17}" font-size="12" fill="#555">{SAYS.get(package, "")}</text>',
    ]
    for number, names in enumerate(places):
        parts += _box(LEFT + (BOX + GAP) * number, middle, names, fill, edge)
        if number:
            end = LEFT + (BOX + GAP) * number
            parts.append(
                f'<line x1="{end}" y1="{middle}" x2="{end - GAP + 1}" y2="{middle}" stroke="#555" '
                'marker-end="url(#to)"/>'
            )
    return parts


def _box(left: int, middle: int, names: list[str], fill: str, edge: str) -> list[str]:
    half = max(20, LINE * len(names) // 2 + 9)
    first = middle + 4 - LINE * (len(names) - 1) / 2
    return [
        f'<rect x="{left}" y="{middle - half}" width="{BOX}" height="{2 * half}" rx="5" fill="{fill}" '
        f'stroke="{edge}"/>',
        *(
            f'<text x="{left + BOX / 2:g}" y="{first + LINE * k:g}" font-size="12" text-anchor="middle">{name}</text>'
            for k, name in enumerate(names)
        ),
    ]


if __name__ == "__main__":
    PICTURE.write_text(drawn(rooms()), encoding="utf-8")
