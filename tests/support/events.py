"""Events of a step that tests count: lists, counters and globals of a step are put back after a recomputation."""

from __future__ import annotations

import queue
from typing import Any


class Events:
    """What happened, in order; kept where nothing that is put back reaches it."""

    def __init__(self) -> None:
        self._kept: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def note(self, event: Any = None) -> None:
        self._kept.put(event)

    def taken(self) -> list[Any]:
        """What was noted since this was last asked for."""
        return [self._kept.get() for _ in range(self._kept.qsize())]
