"""Progress and results told through ``logging``, and warnings that name the line of the user's own program."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable

LINE_SECONDS = 5.0  # between lines of progress: what goes on, without a line for every run
# Packages whose calls are not what the user wrote.
_BETWEEN = {"planner", "profiler", "solvers", "torch", "contextlib", "functools"}


def tell(name: str, text: str) -> None:
    """Log a line at INFO to the logger ``name``; of several ranks the first one does.

    Where the application has set neither a handler nor a level, the line goes to stderr all the same, as warnings do:
    who calls one function and waits for half a minute sees what it does.
    ``logging.getLogger("planner").setLevel("WARNING")`` silences it.
    """
    if not _is_first_rank():
        return
    logger = logging.getLogger(name)
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(text)
    elif not logger.disabled and _shows_without_handlers(logger):
        record = logger.makeRecord(name, logging.INFO, "", 0, f"{name}: {text}", (), None)
        logging.StreamHandler(sys.stderr).emit(record)


def _shows_without_handlers(logger: logging.Logger) -> bool:
    """Whether nobody handles its records, and nobody has asked for less than warnings' neighbours."""
    left_alone = logger.getEffectiveLevel() <= logging.INFO or (
        logger.level == logging.NOTSET and logger.getEffectiveLevel() == logging.WARNING
    )
    return left_alone and not logger.hasHandlers() and logger.manager.disable < logging.INFO


def _is_first_rank() -> bool:
    distributed = sys.modules.get("torch.distributed")  # Where it is not loaded nobody has initialised a group.
    return distributed is None or not (
        distributed.is_available() and distributed.is_initialized() and distributed.get_rank()
    )


def told_by(name: str, doing: str) -> Callable[[str, int, int], None]:
    """A ``progress`` function that tells the first part at once, and then what is under way some seconds apart.

    Args:
        name: the name of the logger.
        doing: the activity of which the parts are reported, as ``"profiling"``.
    """
    told = float("-inf")

    def progress(what: str, done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told < LINE_SECONDS:
            return
        told = now
        count = f" of about {total}" if total else ""
        tell(name, f"{doing}: {what} (step {done + 1}{count})")

    return progress


def warn_caller(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn at the innermost line that is neither this project's nor torch's."""
    level, frame = 1, sys._getframe()
    while frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
