"""Notes which tests reach a changed place: ``tests.support.changed_places`` puts the calls where it looks for them."""

from __future__ import annotations

import inspect
import os
import sys

FILE = "REACHED_PLACES_FILE"
_noted: set[tuple[int, str]] = set()


def note(number: int) -> None:
    """Adds the place's number and the running test to the file that is named in the environment, once per process.

    Where no test runs, or a module is being imported, the test is left empty: others may depend on it as well.
    """
    in_function = sys._getframe(1).f_code.co_flags & inspect.CO_OPTIMIZED
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0] if in_function else ""
    if (number, test) not in _noted and FILE in os.environ:
        _noted.add((number, test))
        with open(os.environ[FILE], "a", encoding="utf-8") as file:
            file.write(f"{number}\t{test}\n")
