"""What rich tables and reports look like when they are printed."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType


def text_of(renderable: RenderableType) -> str:
    """Printed on 100 columns."""
    stream = StringIO()
    Console(file=stream, width=100).print(renderable)
    return stream.getvalue()
