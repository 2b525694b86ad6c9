"""Makes pages that are written for GitHub work in the site, too.

Pages link to files of the repository by relative paths, as ``../benchmarks/results/fidelity.md``: GitHub resolves
these, and MkDocs, which knows docs/ alone, would not. Every file that is linked to so is therefore copied into the
site under its own path, Markdown as a page outside of the navigation, anything else as it is, and the links are
rewritten to the copies. The site then needs no address of the repository, and a link to a file that is not there
fails the strict build like any other. Marks for the tests of the pages (``<!-- test: ... -->``) are left out.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from docs.hooks.rooms_table import ROOT

_FENCE = re.compile(r"^```.*?^```", re.M | re.S)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)((?:#[^)\s]*)?)(?=\))")
_MARK = re.compile(r"^<!-- test: .*? -->\n", re.M | re.S)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files of the repository that pages link to, and those that these link to."""
    waiting = list(files.documentation_pages())
    while waiting:
        page = waiting.pop()
        for path in _linked_files(page):
            file = File.generated(config, path, abs_src_path=str(ROOT / path), inclusion=InclusionLevel.NOT_IN_NAV)
            if files.get_file_from_path(path) is None:
                files.append(file)
                waiting += [file] if file.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the copies in the site, and leave out the marks of tests."""
    folder = posixpath.dirname(page.file.src_uri)
    if page.file.inclusion is InclusionLevel.NOT_IN_NAV:
        page.meta["hide"] = ["navigation", "toc"]  # their tables are wide

    def moved(match: re.Match[str]) -> str:
        path = _repository_path(page.file, match[1])
        return posixpath.relpath(path.removeprefix("docs/"), folder or ".") + match[2]

    outside, code = _FENCE.split(markdown), _FENCE.findall(markdown)
    texts = [_LINK.sub(moved, _MARK.sub("", text)) for text in outside]
    return "".join(part for pair in zip(texts, [*code, ""], strict=True) for part in pair)


def _linked_files(page: File) -> Iterator[str]:
    """Paths of files outside docs/ that a page links to; README.md stands for its folder."""
    for match in _LINK.finditer(_FENCE.sub("", page.content_string)):
        path = _repository_path(page, match[1])
        if not path.startswith("docs/") and (ROOT / path).is_file():
            yield path


def _repository_path(page: File, link: str) -> str:
    """Where a link of a page leads, from the repository's root."""
    own = page.src_uri if (ROOT / page.src_uri).is_file() else f"docs/{page.src_uri}"
    path = posixpath.normpath(posixpath.join(posixpath.dirname(own), link))
    return f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path
