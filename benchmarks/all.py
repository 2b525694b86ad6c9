"""All benchmarks: makes their tables again, says which are older than the code, writes docs/results.md from them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence.benchmark_list import BENCHMARKS
from benchmarks.evidence.listing import Benchmark, Table
from benchmarks.evidence.page import DOCS, PAGES
from benchmarks.evidence.running import WORK, run_all
from benchmarks.evidence.states import (
    OF_TODAY,
    RESULTS,
    changed_files,
    derive_missing,
    minutes_taken,
    result_of,
    review,
    state_of,
)
from profiler.json_files import write_whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is asked; 1 where a benchmark failed, or a result is not of today's code and that was to be checked."""
    options = _options(arguments)
    chosen = [BENCHMARKS[name] for name in options.only or BENCHMARKS]
    if options.list:
        _list(chosen)
        return 0
    if options.stale or options.check:
        stale = _stale(chosen)
        return 1 if stale and options.check else 0
    if options.derive:
        print("\n".join(derive_missing()) or "every result has its fingerprint")
        return 0
    if options.review:
        pairs = review(options.review, options.why, options.but)
        print(f"written down: {pairs} fingerprints, with those of before")
        return 0
    if options.page:
        _write_pages()
        return 0
    form = "quick" if options.quick else "full"
    try:
        failed = run_all(chosen, form, work=options.work, again=options.again)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    if form == "full":
        _write_pages()
    else:
        print(f"tables: {options.work / form}")
    if failed:
        print(f"failed: {', '.join(failed)}; the same command tries these again")
    return 1 if failed else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--quick", action="store_true", help="small settings, some minutes in all; no result is replaced")
    what.add_argument("--full", action="store_true", help="as the results say, hours in all; replaces them")
    what.add_argument("--list", action="store_true", help="names, commands and tables")
    what.add_argument("--stale", action="store_true", help="which results are older than the code that they measure")
    what.add_argument("--check", action="store_true", help="the same, with exit code 1 where one is")
    what.add_argument("--page", action="store_true", help="write the pages of results from the result files")
    what.add_argument("--derive", action="store_true", help="give results without a fingerprint that of their commit")
    what.add_argument(
        "--review",
        metavar="COMMIT",
        help="write down that what changed since then was read and changes nothing that is measured, for a reason "
        "(--why), but for what --but names",
    )
    parser.add_argument("--why", default="", metavar="TEXT", help="of --review: in a sentence")
    parser.add_argument("--but", nargs="+", metavar="NAME", default=[], help="of --review: benchmarks that it changes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these benchmarks: names of --list")
    parser.add_argument("--again", action="store_true", help="also those that were done before on the same code")
    parser.add_argument("--work", type=Path, default=WORK, help="logs, and tables until they are whole")
    options = parser.parse_args(arguments)
    for option, names in (("--only", options.only or ()), ("--but", options.but)):
        if unknown := [name for name in names if name not in BENCHMARKS]:
            parser.error(f"{option}: expected names of --list, got {', '.join(unknown)}")
    if bool(options.review) != bool(options.why):
        parser.error("--why: expected a sentence with --review, and only there; say why nothing measured is another")
    return options


def _list(chosen: Sequence[Benchmark]) -> None:
    for each in chosen:
        print(f"{each.name}: {minutes_taken(each)} min: {each.command}")
        for table in each.tables:
            print(f"    benchmarks/results/{table.name}.md: {table.what}")


def _stale(chosen: Sequence[Benchmark]) -> int:
    """Print the state of every table; how many are not of today's code."""
    stale = 0
    for each in chosen:
        for table in each.tables:
            state = state_of(each, table, RESULTS)
            stale += state not in OF_TODAY
            changed = changed_files(each, table) if state not in OF_TODAY else []
            more = f", {len(changed)} files changed, as {changed[0]}" if changed else ""
            print(f"{table.name}: {state}{more}{_date(table)}")
    print(f"{stale} not of today's code" if stale else "all of today's code")
    return stale


def _date(table: Table) -> str:
    result = result_of(table)
    return f" ({result.date})" if result.exists else ""


def _write_pages() -> None:
    for name, text in PAGES.items():
        write_whole(DOCS / name, text())
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    sys.exit(main())
