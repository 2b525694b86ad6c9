"""Writes pages of results for the site as they are of now: what they say of their age is never out of date."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

from benchmarks.evidence.page import PAGES


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    """The text of a page that result files are written into; any other is read as it lies there."""
    written = PAGES.get(page.file.src_uri)
    return written() if written else None
