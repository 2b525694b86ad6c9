"""Breaks what fuzz workers run, so that the fuzz has something to find."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.fuzz import verdicts


def die_at_two_losses() -> None:
    """From now on a case with two losses ends the process."""
    judge = verdicts._judged

    def dying(case: Any, prepared: Any) -> Any:
        if "two losses" in case.habits:
            os.abort()
        return judge(case, prepared)

    verdicts._judged = dying


def never_end() -> None:
    """From now on no case comes to an end."""

    def waiting(case: Any, prepared: Any) -> Any:
        while True:
            time.sleep(60)

    verdicts._judged = waiting
