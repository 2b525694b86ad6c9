"""The tests marked ``gpu``, a file at a time, as a table of their outcomes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd

from benchmarks.reporting import RESULTS, write_result

ROOT = Path(__file__).parent.parent
# Of one test, within the nine minutes of a part; by a signal, since a thread would end pytest with all its outcomes.
TIMEOUT = ("--timeout=240", "--timeout-method=signal")


def outcomes(report: Path) -> pd.DataFrame:
    """A row for each test of a JUnit report: passed, skipped, failed or error, and the first line of why."""
    rows = []
    for case in ElementTree.parse(report).iter("testcase"):
        marks = {child.tag: (child.get("message") or "").splitlines() for child in case}
        outcome = next((tag for tag in ("error", "failure", "skipped") if tag in marks), "passed")
        why = marks.get(outcome, [])
        rows.append({"test": case.get("name"), "outcome": outcome, "why": why[0][:120] if why else ""})
    return pd.DataFrame(rows, columns=["test", "outcome", "why"])


def main() -> int:
    """Run the tests of a file, print and write the table; pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="of tests, from the repository's root")
    parser.add_argument("--name", required=True, help="of the table")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report = options.out.resolve() / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", options.file, f"--junitxml={report}", *TIMEOUT]
    code = subprocess.run(command, cwd=ROOT).returncode
    if not report.is_file():
        return code
    frame = outcomes(report)
    counts = ", ".join(f"{outcome} {count}" for outcome, count in frame.outcome.value_counts().items())
    write_result(options.out, options.name, f"Tests on the device: {options.file}", frame, [counts])
    return code


if __name__ == "__main__":
    sys.exit(main())
