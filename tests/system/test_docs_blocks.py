"""Every command and code block of README.md and docs/ runs, page by page, and does what the page says.

How blocks are written and marked stands in tests/support/doc_blocks.py. A reader would run them in a clone of the
repository: here that is a folder of the page's own with benchmarks/ and examples/ in it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

import pytest
import typer.main

from planner.cli.commands import app
from planner.cli.output import Output
from tests.support.doc_blocks import COMMANDS, PAGES, PRINTED, READ_ELSEWHERE, ROOT, RUN, Block, blocks_in, blocks_of

WITH_BLOCKS = [page for page in PAGES if blocks_of(page)]
# The longest pages.
AT_NIGHT = (
    *("advice", "estimate", "frameworks", "getting-started", "max-batch", "offload", "out-of-memory", "plans"),
    *("reading-a-plan", "solvers"),
)
WITH_SLOW_BLOCKS = [page for page in WITH_BLOCKS if any(block.slow for block in blocks_of(page))]
_BEFORE_A_NUMBER = re.compile(r"[^0-9]*")


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


class PageRun:
    """The blocks of one page, run in order in one folder and one namespace."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._output = ""
        for name in ("benchmarks", "examples"):
            (folder / name).symlink_to(ROOT / name)

    def run(self, block: Block) -> None:
        """Run a block, write it, or hold it against what was printed; then check what the page claims."""
        if block.title:
            (self._folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == RUN:
            self._python(block)
        elif block.language == COMMANDS:
            self._commands(block)
        elif block.language == PRINTED:
            check_printed(block, self._output)
        for claim in block.claims:
            names = {**self._names, "output": self._output, "json_of": _json_of}
            assert eval(claim, names), f"{block.where}: {claim}\n{self._output}"

    def _python(self, block: Block) -> None:
        # Empty lines above put the page's own line numbers into tracebacks.
        code = compile("\n" * block.line + block.text, str(block.page), "exec")
        with captured() as output:
            exec(code, self._names)
        self._output = output.getvalue()

    def _commands(self, block: Block) -> None:
        commands, outputs = block.commands(), []
        for number, words in enumerate(commands, start=1):
            expected = block.exit_code if number == len(commands) else 0
            code, output = run_planner(words)
            assert code == expected, f"{block.where}: {' '.join(words)}: exit code {code}\n{output}"
            outputs.append(output)
        self._output = "".join(outputs)


@contextlib.contextmanager
def captured():
    """What is printed meanwhile, to stdout and stderr."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield output


def run_planner(words: list[str]) -> tuple[int, str]:
    """Run what the console script runs, in this process; its exit code and what it printed.

    With ``> FILE`` at the end its stdout goes into that file.
    """
    if words[-2:-1] == [">"]:
        with Path(words[-1]).open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            return _ran(words[:-2], sys.stdout)
    return _ran(words)


def _ran(words: list[str], stdout: TextIO | None = None) -> tuple[int, str]:
    assert words[0] == "planner", f"expected a planner command, got {words[0]!r}; mark its block with a reason to skip"
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="planner")
    redirected = contextlib.nullcontext() if stdout is None else contextlib.redirect_stdout(stdout)
    with captured() as output, redirected, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        patch.setattr(sys, "path", list(sys.path))
        try:
            script.load()()
            code = 0
        except SystemExit as end:
            code = end.code
        except Exception:  # noqa: BLE001 - whatever a command raises is shown with what it printed
            traceback.print_exc()
            code = 1
    return int(code or 0), output.getvalue()


def check_printed(block: Block, output: str) -> None:
    """Of each line shown the words before its first number begin a line that was printed."""
    printed = [" ".join(line.split()) for line in output.splitlines()]
    for line in block.text.splitlines():
        words = " ".join(_BEFORE_A_NUMBER.match(" ".join(line.split()))[0].split())  # type: ignore[index]
        if words and words != "...":
            there = any(each.startswith(words) for each in printed)
            assert there, f"{block.where}: {words!r} was not printed\n{output}"


def _json_of(path: str) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def run_page(page: Path, folder: Path) -> None:
    runs = PageRun(folder)
    for block in blocks_of(page):
        if not block.skip and block.language != READ_ELSEWHERE:
            runs.run(block)


def marked(page: Path) -> Any:
    marks = [pytest.mark.slow] * (page in WITH_SLOW_BLOCKS) + [pytest.mark.nightly] * (page.stem in AT_NIGHT)
    return pytest.param(page, id=page_name(page), marks=marks)


@pytest.mark.parametrize("page", map(marked, WITH_BLOCKS))
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page, tmp_path)


# Blocks that are not run


def check_options(name: str, args: list[str]) -> None:
    """Have a command read its options, without running it."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert name in commands, f"there is no command {name!r}"
    try:
        commands[name].make_context(name, args, obj=Output())
    except Exception as error:  # typer has a private copy of click, whose errors have no public name
        raise AssertionError(f"planner {name}: {error}") from error


def check_command(words: list[str]) -> None:
    """A command that is not run is at least one that there is, with options that there are."""
    words = words[next(k for k, word in enumerate(words) if "=" not in word) :]  # variables of the environment
    if words[0] == "planner":
        check_options(words[1], words[2:])
    elif words[:2] == ["torchrun", "--nproc-per-node"] and words[3:5] == ["-m", "planner"]:
        check_options(words[5], words[6:])
    elif words[:2] == ["python", "-m"]:
        module = ROOT.joinpath(*words[2].split("."))
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), words
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert {word for word in words[1:] if "=" not in word} <= set(targets), words
    else:
        assert words[0] in {"git", "cd", "pip", ".venv/bin/pip"}, f"expected a command that is known here, got {words}"


SKIPPED = [block for page in WITH_BLOCKS for block in blocks_of(page) if block.skip]


@pytest.mark.parametrize("block", SKIPPED, ids=lambda block: block.where)
def test_a_block_that_is_not_run_names_what_there_is(block):
    if block.language == COMMANDS:
        for words in block.commands():
            check_command(words)
    elif block.language == RUN:
        compile(block.text, str(block.page), "exec")


# The checks themselves


def page_of(text: str) -> list[Block]:
    return blocks_in(text, ROOT / "docs" / "page.md")


@pytest.mark.parametrize(
    "words",
    [
        ["planner", "profile", "zoo:gpt2", "--no-such-option"],
        ["planner", "no-such-command"],
        ["python", "-m", "benchmarks.no_such_benchmark"],
        ["make", "no-such-target"],
        ["curl", "somewhere"],
    ],
)
def test_a_command_that_is_not_there_is_found(words):
    with pytest.raises(AssertionError):
        check_command(words)


@pytest.mark.parametrize(
    "text",
    [
        "```python\nraise ValueError\n```\n",
        "```python\nx = 1\n```\n<!-- test: assert x == 2 -->\n",
        "```sh\nplanner show no-such-file.json\n```\n",
        "```sh\nls\n```\n",
        "```python\nprint('one')\n```\n```text\ntwo 1\n```\n",
    ],
)
def test_a_block_that_fails_is_found(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = PageRun(tmp_path)
    with pytest.raises((AssertionError, ValueError)):
        for block in page_of(text):
            runs.run(block)


SHARED = """
```json title="x.json"
{"a": 1}
```

```python
import json
x = json.load(open("x.json"))
print("a is", 1)
```

```text
a is 2
...
```

<!-- test: exit code 2 -->
```sh
planner show x.json  # neither a plan nor a profile
```
<!-- test: assert x == json_of("x.json") and "error" in output -->
"""


def test_blocks_share_names_files_and_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = PageRun(tmp_path)
    for block in page_of(SHARED):
        runs.run(block)
