"""Counts of outcomes: in all, by habit, and the distinct texts of refusals and failures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import pandas as pd

from benchmarks.fuzz.habits import HABITS
from benchmarks.fuzz.verdicts import BAD, Outcome, Verdict


def habit_table(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """A row per habit, and one for all cases: how many had each verdict. A case of two habits counts for both."""
    rows = [_row("all cases", outcomes), _row("no habit", [o for o in outcomes if not o.case.habits])]
    rows += [_row(name, [o for o in outcomes if name in o.case.habits]) for name in HABITS]
    return pd.DataFrame(rows)


def _row(name: str, outcomes: Sequence[Outcome]) -> dict[str, str | int]:
    counts = Counter(outcome.verdict for outcome in outcomes)
    return {"habit": name, "cases": len(outcomes), **{verdict: counts[verdict] for verdict in get_args(Verdict)}}


def notes(outcomes: Sequence[Outcome], seconds: float) -> list[str]:
    """What the counts mean, and all distinct texts of refusals and warnings."""
    judged = [outcome for outcome in outcomes if outcome.verdict not in ("no case", "infeasible")]
    refused = [outcome for outcome in judged if outcome.verdict == "refused"]
    failed = [outcome for outcome in judged if outcome.verdict in BAD]
    found = [
        f"{len(outcomes)} cases in {seconds:.0f} s; {len(judged)} say something of a plan; {len(failed)} failed",
        f"refused in words: {len(refused)} ({len(refused) / max(1, len(judged)):.1%})",
        "exact: losses, gradients, parameters, buffers, attributes and random states of three steps equal bit for bit, "
        "peak within the budget; said: the same with a warning, or above the budget with one",
        "no case: it fails, or differs from run to run, without a plan as well; infeasible: a budget that was drawn "
        "below the smallest one, and answered so; speechless: an error that names no remedy",
        *(f"refused {count} times: {text}" for text, count in texts([o.detail for o in refused])),
        *(f"warned {count} times: {text}" for text, count in texts([w for o in judged for w in o.warned])),
    ]
    return found + [f"failed {count} times: {text}" for text, count in texts([kind_of(o) for o in failed])]


def texts(found: Sequence[str]) -> list[tuple[str, int]]:
    """Distinct texts with how often they came, the most frequent first; numbers and names left out."""
    return Counter(_general(text) for text in found).most_common()


def _general(text: str) -> str:
    text = re.sub(r"'[^']*'|\[[^]]*\]", "…", text.replace("\n", " "))
    return re.sub(r"\d[\d.,]*", "N", text)[:400]


def kind_of(outcome: Outcome) -> str:
    """The kind of a failure: its verdict, its message where it has one, and its habits."""
    detail = "" if outcome.verdict in ("wrong", "over") else outcome.detail
    return ", ".join(
        [f"{outcome.verdict} ({' and '.join(outcome.case.habits) or 'no habit'})", *([detail] if detail else [])]
    )


def distinct_failures(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """One failure of each kind, the most frequent kinds first."""
    kinds: dict[str, Outcome] = {}
    failed = [outcome for outcome in outcomes if outcome.verdict in BAD]
    counts = Counter(_general(kind_of(outcome)) for outcome in failed)
    for outcome in failed:
        kinds.setdefault(_general(kind_of(outcome)), outcome)
    return [kinds[kind] for kind, _ in counts.most_common()]
