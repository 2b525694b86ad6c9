"""README.md and docs/ hang together: sizes, navigation, links, headings, and blocks that the tests see."""

from __future__ import annotations

import json
import posixpath
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import planner
import profiler
import solvers
from docs.hooks.rooms_picture import PICTURE, WIDTH, drawn, laid_out
from docs.hooks.rooms_table import rooms, rooms_in
from planner import errors, results
from tests.support.doc_blocks import PAGES, ROOT, RUN, WRITTEN, Block, PageError, blocks_in, blocks_of

README_BYTES = 8000
PACKAGES = {package.__name__: package for package in (planner, errors, results, profiler, solvers)}
OTHERS = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")]
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)
_LINK = re.compile(r"!?\[[^]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.M)


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose_of(page: Path) -> str:
    return _CODE.sub("", page.read_text(encoding="utf-8"))


# Links


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings; a page of the API reference has one for each public name, too."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    names = re.findall(r"<!-- public names of ([\w.]+) -->", text)
    public = {f"{name}.{each}" for name in names for each in getattr(PACKAGES[name], "__all__", ())}
    return {slug(heading) for heading in _HEADING.findall(text)} | public


def slug(heading: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(page: Path, text: str) -> Iterator[str]:
    for link in _LINK.findall(text):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = Path(posixpath.normpath(page.parent / path)) if path else page
        if not target.exists():
            yield f"{link}: there is no such file"
        elif anchor and anchor not in anchors_of(target):
            yield f"{link}: no heading of {page_name(target)} has that anchor"


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=page_name)
def test_every_link_leads_somewhere(page):
    assert list(broken_links(page, prose_of(page))) == []


@pytest.mark.parametrize("link", ["no-such-page.md", "index.md#no-such-heading", "#no-such-heading", "../no.csv"])
def test_a_broken_link_is_found(link):
    page = ROOT / "docs" / "index.md"
    assert len(list(broken_links(page, f"[here]({link})"))) == 1


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_headings_have_the_same_anchor_on_github_and_in_the_site(page):
    """GitHub keeps two hyphens where a character between blanks goes; Python-Markdown makes one of them."""
    assert [heading for heading in _HEADING.findall(prose_of(page)) if "--" in slug(heading)] == []


# Pages


def nav_pages(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for each in nav.values():
            yield from nav_pages(each)
    elif isinstance(nav, list):
        for each in nav:
            yield from nav_pages(each)


def test_every_page_is_in_the_navigation_once():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.name != "README.md"]
    assert sorted(nav_pages(nav)) == sorted(pages)


def test_every_page_is_linked_from_the_index():
    linked = set(_LINK.findall(prose_of(ROOT / "docs" / "index.md")))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.name not in ("README.md", "index.md")}
    assert pages - linked == set()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= README_BYTES


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_page_has_one_title_and_short_lines(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert len(re.findall(r"^# ", text, re.M)) == 1
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|") and "](" not in line]
    assert long == []


# Blocks


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_the_tests_see_every_block(page):
    blocks_of(page)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_file_that_a_page_shows_is_used_there(page):
    blocks = blocks_of(page)
    shown = [(number, block) for number, block in enumerate(blocks) if block.title]
    assert [block.where for number, block in shown if not any(uses(each, block) for each in blocks[number + 1 :])] == []


def uses(block: Block, shown: Block) -> bool:
    return not block.skip and (shown.title in block.text or f"import {Path(shown.title).stem}" in block.text)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_files_that_a_page_shows_are_well_formed(page):
    for block in blocks_of(page):
        if block.title and block.language == RUN:
            compile(block.text, block.where, "exec")
        elif block.title and block.language in WRITTEN and block.title.endswith(".json"):
            json.loads(block.text)


@pytest.mark.parametrize(
    "text",
    [
        "```\nplanner demo\n```\n",
        "```bash\nplanner demo\n```\n",
        '```json\n{"a": 1}\n```\n',
        "```python hl_lines=1\nx = 1\n```\n",
        "   ```python\n   x = 1\n   ```\n",
        "> ```python\n> x = 1\n> ```\n",
        "~~~python\nx = 1\n~~~\n",
        "Code:\n\n    planner demo\n",
        "<pre>planner demo</pre>\n",
        "```python\nx = 1\n",
        "<!-- test: skip -->\n```sh\nplanner demo\n```\n",
        "<!-- test: skip because -->\n```sh\nplanner demo\n```\n",
        "<!-- test: sometimes -->\n```sh\nplanner demo\n```\n",
        "<!-- test: skip because it is long -->\n\nText.\n\n```sh\nplanner demo\n```\n",
        "<!-- test: skip because it is long -->\n",
    ],
)
def test_a_block_that_no_test_would_see_is_found(text):
    with pytest.raises(PageError):
        blocks_in(text, ROOT / "docs" / "page.md")


def test_marks_belong_to_their_blocks():
    text = (
        "<!-- test: slow because it\nis long -->\n<!-- test: exit code 3 -->\n\n```sh\nplanner demo\n```\n"
        "<!-- test: assert 'one' in\n  output -->\n\n```python\nx = 1\n```\n"
    )
    first, second = blocks_in(text, ROOT / "docs" / "page.md")
    assert (first.slow, first.exit_code, first.claims) == ("it is long", 3, ["'one' in output"])
    assert (second.skip, second.slow, second.exit_code, second.claims) == ("", "", 0, [])


# The picture and the packages


def test_the_picture_shows_the_rooms_of_the_architecture():
    assert PICTURE.read_text(encoding="utf-8") == drawn(rooms()), "run python -m docs.hooks.rooms_picture"


def test_the_picture_has_every_room():
    table = rooms_in("```rooms\nprofiler: records < trace, links\nsolvers: problem\n```\n")
    assert re.findall(r">(\w+)</text>", drawn(table)) == [
        "profiler", "measures", "records", "trace", "links", "solvers", "choose", "problem",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_nothing_in_the_picture_lies_over_another_or_outside(seed):
    draws = random.Random(seed)
    table = {
        package: [["a" * draws.randint(1, 24)] * draws.randint(1, 20) for _ in range(draws.randint(1, 20))]
        for package in ("profiler", "solvers", "planner")
    }
    boxes = [box for row in laid_out(table) for line in row.lines for box in line]
    height = float(re.search(r'viewBox="0 0 \d+ (\d+)"', drawn(table))[1])  # type: ignore[index]
    for n, one in enumerate(boxes):
        assert one.left >= 0 and one.top >= 0 and one.left + one.width <= WIDTH and one.top + one.height <= height
        for other in boxes[:n]:
            beside = one.left >= other.left + other.width or other.left >= one.left + one.width
            assert beside or one.top >= other.top + other.height or other.top >= one.top + one.height


def test_no_page_denies_what_was_measured_on_a_gpu():
    """There are tables from a GPU, so no page says that nothing was measured there."""
    assert list((ROOT / "benchmarks" / "results-gpu").glob("*.csv"))
    denial = re.compile(r"\b(?:nothing|never|not) (?:has )?been (?:measured|run|tried) on a GPU (?:yet|so far)", re.I)
    texts = {page_name(page): " ".join(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert [name for name, text in texts.items() if denial.search(text)] == []


def test_pages_name_no_path_of_a_machine():
    pattern = re.compile(r"(?<![\w./])/(?:home|root|tmp|work|Users)/")
    assert [page_name(page) for page in PAGES if pattern.search(page.read_text(encoding="utf-8"))] == []
