"""Runs benchmarks of the list one after another, each in a process of its own, and keeps what they wrote."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Literal

from benchmarks.evidence.fingerprints import ROOT
from benchmarks.evidence.listing import Benchmark
from benchmarks.evidence.states import RESULTS, code_today
from profiler.json_files import write_whole

Form = Literal["quick", "full"]
WORK = ROOT / "build" / "benchmarks"  # what git ignores
TAIL = 8  # lines of the log that are shown after a failure
QUICK_SECONDS = 600.0
LEAST_SECONDS = 15.0  # in less nothing is measured


def run_all(
    benchmarks: Iterable[Benchmark],
    form: Form,
    *,
    work: Path = WORK,
    results: Path = RESULTS,
    again: bool = False,
    partial: bool = False,
    limit_seconds: float | None = None,
    all_seconds: float | None = None,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Run them; returns the names of those that failed.

    One that was done before with the same arguments on the same code is not run again. Results of the full form are
    put into ``results`` once all tables of a benchmark are there; those of the quick form stay in ``work``. One that
    takes more than ``limit_seconds`` is ended, and failed; with ``partial`` the tables that it has written are kept.
    After ``all_seconds`` none begins, the one that runs is ended, and those that are left count as failed.
    """
    failed = []
    end = None if all_seconds is None else time.perf_counter() + all_seconds
    chosen = [each for each in benchmarks if form == "full" or each.quick is not None]
    for number, each in enumerate(chosen, start=1):
        head = f"[{number}/{len(chosen)}] {each.name}"
        folder = work / form / each.name
        done = folder / "done.json"
        arguments = arguments_of(each, form)
        asked = {"arguments": arguments, "code": code_today(each.module)}
        if not again and done.is_file() and asked.items() <= json.loads(done.read_text(encoding="utf-8")).items():
            say(f"{head}: done before")
            continue
        begin = time.perf_counter()
        limit = limit_seconds or (QUICK_SECONDS if form == "quick" else None)
        if end is not None:
            limit = min(limit or math.inf, end - begin)
            if limit < LEAST_SECONDS:
                failed.append(each.name)
                say(f"{head}: no time is left")
                continue
        say(f"{head}: {shlex.join(['python', *arguments])}")
        why = _run(each, arguments, folder, limit)
        seconds = time.perf_counter() - begin
        if form == "full" and (partial or not why):
            why = "; ".join(filter(None, [why, _put(each, folder, results)]))
        if why:
            failed.append(each.name)
            say(f"{head}: failed after {seconds:.0f} s: {why}")
        else:
            write_whole(done, json.dumps({**asked, "seconds": seconds}, indent=1))
            say(f"{head}: {seconds:.0f} s")
    return failed


def arguments_of(benchmark: Benchmark, form: Form) -> list[str]:
    """What follows ``python``, without the folder of the results."""
    if form == "full":
        return ["-m", benchmark.module, *shlex.split(benchmark.full)]
    return ["-m", benchmark.quick_module or benchmark.module, *shlex.split(benchmark.quick or "")]


def _run(benchmark: Benchmark, arguments: list[str], folder: Path, limit_seconds: float | None) -> str:
    """Why it failed, or nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    with log.open("wb") as stream:
        code = exit_code([sys.executable, *arguments, "--out", str(folder)], stream, limit_seconds)
    if code is None:
        return f"took more than {limit_seconds:g} s; its output: {log}"
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"exit code {code}; its output: {log}", *(f"    {line}" for line in lines[-TAIL:])])
    if benchmark.tables and not any(folder.glob("*.csv")):
        return f"it wrote no table; its output: {log}"
    return ""


def exit_code(command: list[str], stream: IO[bytes], limit_seconds: float | None) -> int | None:
    """That of a command from the repository's root; None where it was ended after its time.

    All that it has started is ended with it (pytest, compiling, other ranks): else these would hold the device, and
    their part of the cores, while the next one is measured.
    """
    process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True)
    try:
        return process.wait(limit_seconds)
    except BaseException as error:  # The terminal interrupts this process alone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return None
        raise


def _put(benchmark: Benchmark, folder: Path, results: Path) -> str:
    """Copy its tables to where they are committed; says what is missing, and copies nothing then."""
    pairs = [
        (folder / f"{table.written_as or table.name}{ending}", results / f"{table.name}{ending}")
        for table in benchmark.tables
        for ending in (".csv", ".md")
    ]
    missing = [source.name for source, _ in pairs if not source.is_file()]
    if missing:
        return f"it did not write {', '.join(missing)}"
    for source, target in pairs:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, source.read_text(encoding="utf-8"))
    return ""
