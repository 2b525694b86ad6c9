"""Warnings that name the line of the user's own program, however many of our calls lie between."""

from __future__ import annotations

import sys
import warnings

# Packages whose calls are not what the user wrote.
_BETWEEN = {"planner", "profiler", "solvers", "torch", "contextlib", "functools"}


def warn_caller(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn at the innermost line that is neither this project's nor torch's."""
    level, frame = 1, sys._getframe()
    while frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
