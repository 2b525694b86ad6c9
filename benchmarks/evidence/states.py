"""Result files, and whether the code that they measured is the code of today."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd

from benchmarks.evidence.benchmark_list import BENCHMARKS
from benchmarks.evidence.fingerprints import ROOT, Read, files_of, fingerprint, of_commit, statements, working_tree
from benchmarks.evidence.listing import Benchmark, Table
from benchmarks.evidence.reviews import add_review, is_reviewed
from profiler.json_files import write_whole

RESULTS = ROOT / "benchmarks" / "results"
FRESH, OLDER, UNKNOWN, MISSING = "as measured", "older than the code", "unknown", "missing"
REVIEWED = "as measured, changes read"
OF_TODAY = (FRESH, REVIEWED)
_FACTS = ("command: ", "hardware: ", "versions: ", "date: ", "code: ")


@dataclass(frozen=True, slots=True)
class ResultFile:
    """What a result file says of itself, in the lines above its table."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether it is there, with its table."""
        return self.path.is_file() and self.path.with_suffix(".csv").is_file()

    def frame(self) -> pd.DataFrame:
        """Its table."""
        return pd.read_csv(self.path.with_suffix(".csv"))

    def fact(self, key: str) -> str:
        """A fact, or nothing."""
        found = re.search(rf"^- {key}: (.*)$", self.path.read_text(encoding="utf-8"), re.M)
        return found[1] if found else ""

    @property
    def notes(self) -> list[str]:
        """What it says of its rows."""
        lines = re.findall(r"^- (.*)$", self.path.read_text(encoding="utf-8"), re.M)
        return [line for line in lines if not line.startswith(_FACTS)]

    @property
    def command(self) -> str:
        """That wrote it."""
        return self.fact("command").strip("`")

    @property
    def date(self) -> str:
        """On which it was measured."""
        return self.fact("date")[:10]

    @property
    def code(self) -> str:
        """The fingerprint of what it measured."""
        return self.fact("code")[:12]


def result_of(table: Table, folder: Path = RESULTS) -> ResultFile:
    """A table's file."""
    return ResultFile(folder / f"{table.name}.md")


def minutes_taken(benchmark: Benchmark, folder: Path = RESULTS) -> str:
    """Returns the minutes that the command took to write its tables; a question mark where no table says so."""
    results = [result_of(table, folder) for table in benchmark.tables]
    facts = " ".join(result.fact("date") for result in results if result.exists)
    seconds = [int(each) for each in re.findall(r"had taken (\d+) s", facts)]
    return f"{max(seconds) / 60:.0f}" if seconds else "?"


def state_of(benchmark: Benchmark, table: Table, folder: Path = RESULTS) -> str:
    """Whether what the table measures has changed since, in a few words."""
    result = result_of(table, folder)
    if not result.exists:
        return MISSING
    if not result.code:
        return UNKNOWN
    today = code_today(benchmark.module)
    if result.code == today:
        return FRESH
    return REVIEWED if is_reviewed(result.code, today) else OLDER


@cache
def code_today(module: str) -> str:
    """The fingerprint of what a benchmark measures as it lies here."""
    return fingerprint(module)


def review(commit: str, why: str, but: Collection[str] = ()) -> int:
    """Write down that what has changed since a commit changes nothing that is measured; of how many fingerprints.

    Args:
        commit: before the change.
        why: in a sentence.
        but: names of benchmarks of which it does; others of the same module are not reviewed either.
    """
    modules = {each.module for each in BENCHMARKS.values()} - {BENCHMARKS[name].module for name in but}
    pairs = {code_today(module): _fingerprint_at(commit, module) for module in modules}
    pairs = {after: before for after, before in pairs.items() if after != before}
    add_review(_git("rev-parse", "--short", commit), why, pairs)
    return len(pairs)


def derive_missing(folder: Path = RESULTS) -> list[str]:
    """Give result files without a fingerprint that of the commit with which they came; returns their names.

    Where a file was committed on a later day than it was measured on, the last commit of that day counts: so a result
    may be called older than it is, but not newer.
    """
    done = []
    for benchmark in BENCHMARKS.values():
        for table in benchmark.tables:
            result = result_of(table, folder)
            if result.exists and not result.code:
                commit = _commit_of(result)
                line = f"- code: {_fingerprint_at(commit, benchmark.module)} (derived: of commit {commit})"
                text = result.path.read_text(encoding="utf-8")
                write_whole(result.path, re.sub(r"^(- date: .*)$", rf"\1\n{line}", text, count=1, flags=re.M))
                done.append(table.name)
    return done


def changed_files(benchmark: Benchmark, table: Table, folder: Path = RESULTS) -> list[str]:
    """What a result depends on and has changed since its commit; nothing where git does not know."""
    try:
        then = of_commit(_commit_of(result_of(table, folder)))
        paths = {*files_of(benchmark.module), *files_of(benchmark.module, then)}
    except (OSError, ValueError, subprocess.CalledProcessError):
        return []
    return sorted(path for path in paths if _statements_in(path, then) != _statements_in(path, working_tree))


def _statements_in(path: str, read: Read) -> str | None:
    text = read(path)
    return None if text is None else statements(text)


def _commit_of(result: ResultFile) -> str:
    path = result.path.with_suffix(".csv").relative_to(ROOT).as_posix()
    commit, day = _git("log", "-1", "--format=%h %as", "--", path).split()
    if day > result.date:
        commit = _git("log", "-1", "--format=%h", f"--before={result.date}T23:59:59", commit)
    return commit


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@cache
def _fingerprint_at(commit: str, module: str) -> str:
    return fingerprint(module, of_commit(commit))
