"""Changes of the code since results were measured that were read, and change nothing of what these measure.

``benchmarks/results/reviews.json`` has each with its commit before, why, and of every benchmark the fingerprints of the
code after it and before it. Any further change makes the results older again, until it is read as well.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.evidence.fingerprints import ROOT
from profiler.json_files import write_whole

REVIEWS = ROOT / "benchmarks" / "results" / "reviews.json"


def reviews(path: Path = REVIEWS) -> list[dict[str, Any]]:
    """All of them, in the order in which they were written; none where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def is_reviewed(measured: str, today: str, path: Path = REVIEWS) -> bool:
    """Whether every change from the measured code to today's was read.

    Args:
        measured, today: fingerprints.
        path: the file of reviews.
    """
    before = {after: earlier for review in reviews(path) for after, earlier in review["before_by_after"].items()}
    seen: set[str] = set()
    while today in before and today not in seen:
        seen.add(today)
        today = before[today]
        if today == measured:
            return True
    return False


def add_review(commit: str, why: str, before_by_after: Mapping[str, str], path: Path = REVIEWS) -> None:
    """Write one down.

    Args:
        commit: the last one before the change.
        why: nothing that is measured is another.
        before_by_after: fingerprints of what benchmarks measure.
        path: the file of reviews.
    """
    added = {
        "before": commit,
        "date": datetime.date.today().isoformat(),
        "why": why,
        "before_by_after": dict(sorted(before_by_after.items())),
    }
    write_whole(path, json.dumps([*reviews(path), added], indent=1) + "\n")
