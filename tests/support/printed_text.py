"""What rich tables and reports look like when they are printed."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType


def text_of(renderable: RenderableType, *, width: int = 100) -> str:
    """Printed on so many columns."""
    stream = StringIO()
    Console(file=stream, width=width).print(renderable)
    return stream.getvalue()
