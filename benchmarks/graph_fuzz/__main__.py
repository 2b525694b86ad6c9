"""Fuzzes plans of single ops: generated programs at three budgets, values bit for bit and bytes as predicted.

``--show SEED`` prints a program and what comes of it.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from benchmarks.graph_fuzz.verdicts import BAD, Outcome, judged
from benchmarks.graph_fuzz.workers import run
from benchmarks.reporting import RESULTS, write_result

VERDICTS = ("passed", "refused", *BAD)


def main() -> None:
    """Draw, run, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=15, help="of the first program; the others follow")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--show", type=int, help="a seed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.show is not None:
        outcome = judged(options.show)
        print(f"{outcome.source}# {outcome.verdict}: {outcome.detail}")
        return
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for outcome in run(range(options.seed, options.seed + options.count), options.jobs):
        outcomes.append(outcome)
        if outcome.verdict in BAD:
            print(f"seed {outcome.seed}: {outcome.verdict}: {outcome.detail}", file=sys.stderr)
        if len(outcomes) % 50 == 0:
            print(len(outcomes), dict(Counter(o.verdict for o in outcomes)), file=sys.stderr)
    write_result(
        options.out,
        "graph-fuzz",
        "Fuzz: generated programs planned op by op",
        table(outcomes),
        notes(outcomes, time.monotonic() - started),
    )
    sys.exit(any(outcome.verdict in BAD for outcome in outcomes))


def table(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """A row for all programs and for each kind of line, output and training: how many had each verdict."""
    kinds = sorted({kind for outcome in outcomes for kind in outcome.kinds})
    rows = [_row("all programs", outcomes)]
    rows += [_row(kind, [outcome for outcome in outcomes if kind in outcome.kinds]) for kind in kinds]
    return pd.DataFrame(rows)


def _row(name: str, outcomes: Sequence[Outcome]) -> dict[str, str | int]:
    counts = Counter(outcome.verdict for outcome in outcomes)
    plans = [plan for outcome in outcomes for plan in outcome.plans]
    return {
        "with": name,
        "programs": len(outcomes),
        **{verdict: counts[verdict] for verdict in VERDICTS},
        "plans": len(plans),
        "as eager": sum(plan.values == "eager" for plan in plans),
        "as compiled": sum(plan.values == "compiled" for plan in plans),
        "bytes equal": sum(plan.bytes == "equal" for plan in plans),
        "bytes below": sum(plan.bytes == "below" for plan in plans),
    }


def notes(outcomes: Sequence[Outcome], seconds: float) -> list[str]:
    """What the counts mean, and the distinct texts of refusals and failures."""
    plans = [plan for outcome in outcomes for plan in outcome.plans]
    again = sum(plan.recomputed_ops > 0 for plan in plans)
    off = [plan.measured_bytes / plan.predicted_bytes - 1 for plan in plans if plan.bytes == "below"]
    found = [
        f"{len(outcomes)} programs in {seconds:.0f} s, {len(plans)} plans of them, {again} with ops that run again",
        "budgets: the unplanned peak, the smallest that is known to be enough, and midway",
        "values: losses, outputs (with strides and shared storages), gradients, parameters, buffers, optimizer states "
        "and random state of two steps are those of the eager model, bit for bit, or else those of the ops that "
        "torch.compile captures, run eagerly in the order in which they were captured",
        "bytes: the measured peak is the predicted one, or below it; over: above the budget; above: above the "
        "prediction alone; lost: no plan at the budget that was said to be enough; raw: an error of other words",
        f"furthest below: {min(off, default=0.0):.2%}",
    ]
    for verdict in VERDICTS[1:]:
        texts = Counter(_general(o.detail) for o in outcomes if o.verdict == verdict)
        found += [f"{verdict} {count} times: {text}" for text, count in texts.most_common()]
    return found


def _general(text: str) -> str:
    """A text without what differs from program to program."""
    text = re.sub(r"'[^']*'|\[[^]]*\]|File [^:]*:", "…", text.replace("\n", " "))
    return re.sub(r"[+-]?\d[\d.,]*", "N", text)[:300]


if __name__ == "__main__":
    main()
