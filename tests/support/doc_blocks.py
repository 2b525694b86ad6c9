"""The code blocks of README.md and docs/, with the marks that say how the tests treat them.

A block is fenced at the left margin and names its language:

- ``python`` is run, ``sh`` holds commands; both share one folder and one namespace with the blocks before them on the
  page. A line of ``sh`` is one command; ``#`` begins a comment and a backslash goes on in the next line.
- Any of them, or ``toml`` or ``json``, with ``title="NAME"`` is written to the file NAME instead.
- ``text`` is what the block before it printed, in part. Of each line the words before the first number have to be
  there; ``...`` stands for lines left out.

Marks are comments of their own line, before the block that they are about::

    <!-- test: skip because REASON -->        not run; its commands have to be there all the same
    <!-- test: slow because REASON -->        its page is run by a test marked slow
    <!-- test: exit code 3 -->                of the block's last command

and after it, for what the page claims about the result::

    <!-- test: assert EXPRESSION -->

The expression sees the page's names, ``output`` (what the block printed) and ``json_of(path)``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md"))]

RUN, COMMANDS, WRITTEN, PRINTED = "python", "sh", ("toml", "json"), "text"
READ_ELSEWHERE = "rooms"  # the table in docs/architecture.md, which tests/test_architecture.py reads

_FENCE = re.compile(r"^```(?P<language>\S*)(?: +title=\"(?P<title>[^\"]+)\")?(?P<rest>.*)$")
_MARK = re.compile(r"<!-- test: (.*?) -->", re.S)
_BEFORE = re.compile(r"(?P<kind>skip|slow) because (?P<reason>\S.*)|exit code (?P<code>[0-9]+)", re.S)
_CLAIM = re.compile(r"assert (\S.*)", re.S)


class PageError(ValueError):
    """A page has a block or a mark that no test would see."""


@dataclass(kw_only=True)
class Block:
    """One code block.

    Attributes:
        page: its file.
        line: of its fence, from 1.
        language: as the fence names it.
        title: name of the file that it is; empty for what is run or was printed.
        text: what stands between the fences.
        skip: why it is not run; empty where it is.
        slow: why only slow tests run it.
        exit_code: of its last command.
        claims: expressions that hold afterwards.
    """

    page: Path
    line: int
    language: str
    title: str = ""
    text: str
    skip: str = ""
    slow: str = ""
    exit_code: int = 0
    claims: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        """File and line, as editors read them."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[list[str]]:
        """The words of each command."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page in order.

    Raises:
        PageError: a block without a known language, one that is not at the left margin, or a mark that means nothing.
    """
    return blocks_in(page.read_text(encoding="utf-8"), page)


def blocks_in(text: str, page: Path) -> list[Block]:
    """The blocks of a page's text."""
    found: list[Block] = []
    waiting: list[str] = []
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        if line.startswith("<!-- test:"):
            mark = _mark(line, lines, f"{page.relative_to(ROOT)}:{number}")
            claim = _CLAIM.fullmatch(mark)
            if claim is None:
                waiting.append(mark)
            elif found:
                found[-1].claims.append(" ".join(claim[1].split()))
            continue
        if line.startswith("```"):
            found.append(_block(page, number, line, lines, waiting))
            waiting = []
        elif line.strip():
            _check_prose(line, waiting, f"{page.relative_to(ROOT)}:{number}")
    if waiting:
        raise PageError(f"{page.relative_to(ROOT)}: expected a block after <!-- test: {waiting[0]} -->, got none")
    return found


def _mark(line: str, lines: Iterator[tuple[int, str]], where: str) -> str:
    """A mark's own text; it may go on over several lines."""
    while "-->" not in line:
        line += "\n" + next(lines, (0, "-->"))[1]
    match = _MARK.fullmatch(line.strip())
    if match is None or not (_BEFORE.fullmatch(match[1]) or _CLAIM.fullmatch(match[1])):
        raise PageError(f"{where}: expected a mark as in tests/support/doc_blocks.py, got {line!r}")
    return match[1]


def _block(page: Path, number: int, line: str, lines: Iterator[tuple[int, str]], marks: list[str]) -> Block:
    fence = _FENCE.fullmatch(line)
    where = f"{page.relative_to(ROOT)}:{number}"
    if fence is None or fence["rest"].strip():
        raise PageError(f'{where}: expected ```language or ```language title="NAME", got {line!r}')
    block = Block(
        page=page, line=number, language=fence["language"], title=fence["title"] or "", text=_inside(lines, where)
    )
    _check_language(block)
    for mark in marks:
        _apply(mark, block)
    return block


def _inside(lines: Iterator[tuple[int, str]], where: str) -> str:
    found: list[str] = []
    for _, line in lines:
        if line == "```":
            return "".join(f"{each}\n" for each in found)
        found.append(line)
    raise PageError(f"{where}: expected the block to end, got the end of the page")


def _check_language(block: Block) -> None:
    known = (RUN, COMMANDS, PRINTED, READ_ELSEWHERE, *WRITTEN)
    if block.language not in known:
        raise PageError(f"{block.where}: expected a language of {', '.join(known)}, got {block.language!r}")
    if block.language in WRITTEN and not block.title:
        raise PageError(f'{block.where}: expected title="NAME" beside {block.language}, got none: no test reads it')


def _apply(mark: str, block: Block) -> None:
    match = _BEFORE.fullmatch(mark)
    assert match is not None
    if match["code"]:
        block.exit_code = int(match["code"])
    elif match["kind"] == "skip":
        block.skip = " ".join(match["reason"].split())
    else:
        block.slow = " ".join(match["reason"].split())


def _check_prose(line: str, waiting: list[str], where: str) -> None:
    """Code that is not fenced at the margin would be tested by nobody, and a mark must stand right before its block."""
    if line.startswith(("    ", "\t", "~~~")) or re.match(r"[\s>]+```", line) or "<pre" in line:
        raise PageError(f"{where}: expected code in ``` fences at the left margin, got {line!r}")
    if waiting:
        raise PageError(f"{where}: expected a block after <!-- test: {waiting[0]} -->, got {line!r}")
