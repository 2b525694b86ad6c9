"""A headless Chromium for tests of pages, driven by playwright; where there is none tests are skipped, and say why.

The browser is the one that ``PLANNER_TEST_BROWSER`` names, one on the PATH, or the one that ``playwright install`` got.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")


@contextmanager
def headless_browser() -> Iterator[Any]:
    """A browser of playwright's; skips the test where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with api.sync_playwright() as playwright:
        program = _found(playwright.chromium.executable_path)
        if program is None:
            pytest.skip(
                "needs a Chromium: apt-get install chromium, playwright install chromium, or PLANNER_TEST_BROWSER=PATH"
            )
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


def _found(own: str) -> str | None:
    named = os.environ.get("PLANNER_TEST_BROWSER")
    if named is not None:
        return named
    installed = next(filter(None, map(shutil.which, NAMES)), None)
    return installed or (own if Path(own).exists() else None)
