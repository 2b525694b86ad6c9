"""Fuzzes plans: generated models, training habits and budgets, each held to the unplanned model's training.

``--replay JSON`` judges one case again, the text of which a result names, and prints its script.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.fuzz.cases import Case, case_from, drawn
from benchmarks.fuzz.report import distinct_failures, habit_table, notes
from benchmarks.fuzz.script import script
from benchmarks.fuzz.verdicts import BAD, Outcome
from benchmarks.fuzz.workers import alone, run, smallest
from benchmarks.reporting import RESULTS, write_result


def main() -> None:
    """Draw, run, shrink what failed, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--prepare", default="", help="module:function, called first in every worker")
    parser.add_argument("--shrink", type=int, default=10, help="so many distinct failures are made small and printed")
    parser.add_argument("--replay", help="a case as JSON, or a file of it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.replay is not None:
        replay(options.replay, options.prepare)
        return
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for outcome in run(drawn(options.count, options.seed), jobs=options.jobs, prepare=options.prepare):
        outcomes.append(outcome)
        if outcome.verdict in BAD:
            print(f"{outcome.verdict}: {outcome.detail}\n  --replay '{as_json(outcome.case)}'", file=sys.stderr)
        if len(outcomes) % 200 == 0:
            print(len(outcomes), dict(Counter(o.verdict for o in outcomes)), file=sys.stderr)
    seconds = time.monotonic() - started
    write_result(
        options.out,
        "fuzz",
        "Fuzz: generated models, habits and budgets",
        habit_table(outcomes),
        notes(outcomes, seconds),
    )
    for failure in distinct_failures(outcomes)[: options.shrink]:
        show_smallest(failure, options.prepare)
    sys.exit(any(outcome.verdict in BAD for outcome in outcomes))


def replay(text: str, prepare: str) -> None:
    """Judge one case again and print what comes of it, with its script."""
    case = case_from(json.loads(Path(text).read_text() if Path(text).is_file() else text))
    outcome = alone(case, prepare)
    print(script(case))
    print(f"# {outcome.verdict}: {outcome.detail} {' '.join(outcome.warned)}")


def show_smallest(failure: Outcome, prepare: str = "") -> None:
    """Print the script of the smallest case that fails as this one did."""
    found = smallest(failure, prepare)
    head = f"\n## {found.verdict}: {found.detail}\n\n`{as_json(found.case)}`\n"
    print(f"{head}\n```python\n{script(found.case)}```")


def as_json(case: Case) -> str:
    """A case in one line."""
    return json.dumps(case.as_dict())


if __name__ == "__main__":
    main()
