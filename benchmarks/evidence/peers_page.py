"""docs/peers.md: what other ways to save activation memory can do, and their measured rows beside ours."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.evidence.benchmark_list import BENCHMARKS
from benchmarks.evidence.states import RESULTS, result_of, state_of
from benchmarks.evidence.wording import of

MODELS = ("gpt2", "bert", "llama", "resnet50", "unet")
HEADINGS = {"peers": "gpt2 and MindSpore's blocks", "peers-models": "Five models"}

INTRO = """
What else saves activation memory in PyTorch, on the same models, at the same measured peak. Every row gives our
planner the peak that the other way was measured at as its budget, and times both in turns, so that their ratio holds on
a machine whose speed drifts. This page is written from the result files by `python -m benchmarks.all --page`. Where we
are slower the row stays, with what is known of the reason.
"""

ABILITY_COLUMNS = ("way", "who chooses what runs again", "budget", "unit", "needs", "also")
ABILITIES = (
    (
        "`torch.utils.checkpoint`",
        "you",
        "none",
        "a call",
        "eager or compiled",
        "in torch",
    ),
    (
        "selective checkpointing",
        "you, by op type",
        "none",
        "an op type in a call",
        "eager or compiled",
        "in torch",
    ),
    (
        "`activation_memory_budget`",
        "one of five solvers",
        "a share of what is saved, not of the peak",
        "an op",
        "`torch.compile`",
        "in torch",
    ),
    (
        "transformers' gradient checkpointing",
        "you",
        "none",
        "every block",
        "a model of transformers that has it",
        "one line",
    ),
    (
        "torch_remat 0.2.2",
        "you, by regions in the source",
        "none",
        "a region in a block",
        "changes in `forward`",
        "reports of what is saved",
    ),
    (
        "ckptplan 0.1.0rc1",
        "greedy or dynamic program",
        "bytes of activations, not the peak",
        "a block",
        "CUDA; blocks in a row, without dropout",
        "Python below 3.13",
    ),
    (
        "Rockmate 2.0.0",
        "integer program over a hierarchy",
        "peak",
        "an op",
        "CUDA, one output, a graph that it captures",
        "offload",
    ),
    (
        "planner",
        "solver with a bound, or rules by hand",
        "true peak, in bytes",
        "a block, or the ops in it and their order",
        "eager; any loop",
        "offload, Inductor, several ranks, Trainer, batch search",
    ),
)

OTHERS = """
- torch_remat 0.2.2 installs (`pip install torch_remat`) and runs: every block as a region, with a hook that puts random
  numbers back. Regions inside blocks need changes in a model's source and are not part of the comparison.
- ckptplan 0.1.0rc1 installs (`pip install --pre ckptplan`), but refuses to plan from a profile made on a CPU, and
  leaves out blocks with dropout. `python -m benchmarks.peers --device cuda` runs it where it fits.
- Rockmate 2.0.0 requires `pulp==2.7.0`, we 3.3.2 or newer, so both cannot be in one environment; beside that
  `import rockmate` fails: rkgb 2.0.0 of the package index lacks its module `rkgb.core`. It needs CUDA, too. No row.
"""


def peers_page(folder: Path = RESULTS) -> str:
    """The page's text."""
    parts = [
        "# Peers",
        _wrapped(INTRO),
        "## What each can do",
        _table(ABILITY_COLUMNS, ABILITIES),
        "## What is measured, and what is not",
        "Rows for each model; a dash: not measured yet. None is measured on a GPU.",
        _coverage(folder),
        OTHERS.strip(),
        *_measured(folder),
    ]
    return "\n\n".join(parts) + "\n"


def why_slower(ratio: float, noise: float, row: dict[str, Any]) -> str:
    """What is known of the reason, where our step took longer; nothing where it did not.

    >>> why_slower(1.02, 0.05, {}), why_slower(0.9, 0.05, {})
    ('within 5 %, as far as rows differ where nothing runs again', '')
    """
    if not ratio > 1:
        return "" if ratio == ratio else "no plan of ours fits"
    if ratio - 1 <= noise:
        return f"within {100 * noise:.0f} %, as far as rows differ where nothing runs again"
    predicted = row["plan_predicted_slowdown"]
    if predicted <= row["peer_slowdown"]:
        return f"predicted {predicted:.2f} of the plain step, took longer: what runs again costs more than measured"
    gap = f"{row['plan_gap']:.1%} above its bound"
    return f"no better plan of stages was found: {predicted:.2f} of the plain step predicted, {gap}"


def _coverage(folder: Path) -> str:
    frame = _frame(tuple(HEADINGS), folder)
    ways = {
        "`torch.utils.checkpoint`, every block": _count(frame, peer="checkpoint"),
        "selective checkpointing": _count(frame, peer="selective checkpoint"),
        "transformers' gradient checkpointing": _count(frame, peer="transformers"),
        "torch_remat": _count(frame, peer="torch_remat"),
        "ckptplan": _count(frame, peer="ckptplan"),
        "Rockmate": {},
        "`activation_memory_budget`": _count(frame, peer="memory budget"),
    }
    rows = [
        f"| {way} | " + " | ".join(str(counts.get(name) or "–") for name in MODELS) + " |"
        for way, counts in ways.items()
    ]
    return "\n".join([f"| way | {' | '.join(MODELS)} |", "| --- |" + " --- |" * len(MODELS), *rows])


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _count(frame: Any, **values: str) -> dict[Any, int]:
    for key, value in values.items():
        frame = frame[frame[key] == value] if key in frame else frame.iloc[:0]
    return frame.model.value_counts().to_dict() if len(frame) else {}


def _frame(names: tuple[str, ...], folder: Path) -> pd.DataFrame:
    frames = [pd.read_csv(path) for name in names if (path := folder / f"{name}.csv").is_file()]
    return pd.concat(frames) if frames else pd.DataFrame()


def _measured(folder: Path) -> Iterator[str]:
    for name, heading in HEADINGS.items():
        benchmark = BENCHMARKS[name]
        (table,) = benchmark.tables
        result = result_of(table, folder)
        yield f"## {heading}"
        if not result.exists:
            yield f"Not measured yet: `{benchmark.command}`."
            continue
        rows = _rows(result.frame())
        ratios = pd.Series([row[-2] for row in rows], dtype=float)
        yield _wrapped(
            f"As fast or faster in {of(int((ratios <= 1).sum()), len(ratios))} rows. `{result.command}`, "
            f"{result.date}, {result.fact('hardware')}: [{name}](../benchmarks/results/{name}.md)."
        )
        yield f"Age: {state_of(benchmark, table, folder)}."
        columns = ("model", "theirs", "their peak, MiB", "our peak, MiB", "our time over theirs", "where we are slower")
        yield _table(columns, [(*row[:-2], f"{row[-2]:.3f}", row[-1]) for row in rows])


def _rows(frame: Any) -> list[tuple[Any, ...]]:
    plain = frame[frame.peer == "plain"]
    noise = (plain.plan_over_peer - 1).abs().max() if len(plain) else 0.0
    return [
        (
            row["model"],
            f"{row['peer']} {'' if pd.isna(row['setting']) else row['setting']}".strip(),
            f"{row['peer_peak_MiB']:.1f}",
            f"{row['plan_peak_MiB']:.1f}",
            row["plan_over_peer"],
            why_slower(row["plan_over_peer"], noise, row),
        )
        for row in frame.to_dict("records")
    ]


def _wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 118, break_long_words=False, break_on_hyphens=False)
