"""docs/results.md, written from the result files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.evidence.benchmark_list import BENCHMARKS, TOPICS
from benchmarks.evidence.fingerprints import ROOT
from benchmarks.evidence.listing import Benchmark, Table
from benchmarks.evidence.peers_page import peers_page
from benchmarks.evidence.states import RESULTS, ResultFile, minutes_taken, result_of, state_of
from benchmarks.gpu import parts as gpu_parts

DOCS = ROOT / "docs"
WIDTH = 118
INTRO = (
    "What was measured, each with the file that holds all rows, the command, versions and date. This page is written "
    "from these files by `python -m benchmarks.all --page`. Its last column says whether any statement of the "
    "benchmark, or of what it imports of our packages, has changed since: a result that is older may still hold, but "
    "nobody has looked. Where somebody has read what changed, and says why nothing that is measured is another, the "
    "column says so, and [reviews.json](../benchmarks/results/reviews.json) has the reason. It is as of the last "
    "writing of this page (in the site: of the build); "
    "`python -m benchmarks.all --stale` says it of now, with the files that changed."
)
GPU_RESULTS = RESULTS.with_name("results-gpu")
ON_A_GPU = (
    "Parts of `python -m benchmarks.gpu`, which [Contributing](contributing.md#benchmarks-on-a-gpu) describes, as far "
    "as a device was at hand: a quarter of an hour in all. Those that were ended before their last row say so. Many "
    "ran at the same time, so bytes count here and seconds do not, but for those of fidelity, which ran alone. What is "
    "not here has not been run on a GPU: BERT-Large, the Llama of 7B's shape, the peers, seconds of copies. "
    "The 5 plans of the catalogue that are above their budgets without having said so are so by 1 MiB each, once in a "
    "process: a workspace that a library takes as a planned step first needs it, and keeps."
)


def results_page(folder: Path = RESULTS) -> str:
    """The page's text."""
    parts = ["# Results", _wrapped(INTRO), *_places(folder)]
    for topic in TOPICS:
        parts += [f"## {topic.heading}", *([_wrapped(topic.intro)] if topic.intro else [])]
        lines = [_row(each, table, folder) for each in topic.benchmarks for table in each.tables]
        parts.append("\n".join(["| what | measured | file, date | code |", "| --- | --- | --- | --- |", *lines]))
    return "\n\n".join([*parts, *_on_a_gpu(), *_commands()]) + "\n"


def _row(benchmark: Benchmark, table: Table, folder: Path) -> str:
    result = result_of(table, folder)
    if not result.exists:
        return f"| {table.what} | not measured | | |"
    link = f"[{table.name}](../benchmarks/results/{table.name}.md), {result.date}"
    return f"| {table.what} | {table.says(result.frame())} | {link} | {state_of(benchmark, table, folder)} |"


def _on_a_gpu(folder: Path = GPU_RESULTS) -> Iterator[str]:
    """The tables of the parts that were run on a device, each with what it says of itself."""
    listed = [(part, table, result_of(table, folder)) for part in gpu_parts() for table in part.tables]
    found = [(part, table, result) for part, table, result in listed if result.exists]
    yield "## On a GPU"
    yield _wrapped(ON_A_GPU)
    yield _wrapped(f"Hardware and software: {'; '.join(dict.fromkeys(_place(result) for _, _, result in found))}.")
    lines = []
    for part, table, result in found:
        link = f"[{table.name}](../benchmarks/{folder.name}/{table.name}.md), {result.date}"
        says = "; ".join(result.notes).replace("|", r"\|")
        lines.append(f"| {part.name} | {says} | {link} | {state_of(part, table, folder)} |")
    yield "\n".join(["| part | measured | file, date | code |", "| --- | --- | --- | --- |", *lines])


def _places(folder: Path) -> Iterator[str]:
    """The hardware and versions that result files name: one paragraph, or one for each that differs."""
    known: dict[str, list[str]] = {}
    for result in _existing(folder):
        known.setdefault(_place(result), []).append(result.path.stem)
    most = max(known, key=lambda place: len(known[place]), default="")
    if most:
        yield _wrapped(f"Hardware and software: {most}.")
    for place, names in known.items():
        if place != most:
            yield _wrapped(f"Of {', '.join(names)}: {place}.")


def _place(result: ResultFile) -> str:
    """The hardware and versions that a result file names."""
    return f"{result.fact('hardware').partition('; torch threads')[0]}; {result.fact('versions')}"


def _existing(folder: Path) -> Iterator[ResultFile]:
    results = (result_of(table, folder) for each in BENCHMARKS.values() for table in each.tables)
    return (result for result in results if result.exists)


def _commands() -> Iterator[str]:
    yield "## Running them again"
    yield _wrapped(
        "All in one command, which goes on after a failure, and where it was interrupted when it is started again:"
    )
    yield (
        "<!-- test: skip because they take minutes to hours -->\n"
        "```sh\n"
        "python -m benchmarks.all --quick              # small settings, into build/benchmarks/quick\n"
        "python -m benchmarks.all --full               # the commands below: hours; writes benchmarks/results\n"
        "python -m benchmarks.all --full --only solvers fidelity\n"
        "python -m benchmarks.all --list               # names, commands, results\n"
        "python -m benchmarks.all --stale              # what is older than the code; --check: exit code 1 if any is\n"
        "```"
    )
    yield "Or one by one:"
    rows = [f"| {each.name} | `{each.command}` | {minutes_taken(each)} |" for each in BENCHMARKS.values()]
    yield "\n".join(["| name | command | minutes that it took |", "| --- | --- | --- |", *rows])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


# Pages of docs/ that are written from result files.
PAGES: dict[str, Callable[[], str]] = {"results.md": results_page, "peers.md": peers_page}
