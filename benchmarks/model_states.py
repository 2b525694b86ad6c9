"""Model states: what optimizers take in every precision, measured in real steps and by formula."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

import planner
from benchmarks.reporting import RESULTS, result_name, write_result
from planner.explain.state_table import CASTS, GRADIENTS, PARAMETERS, STATES, TEMPORARIES
from planner.zoo import build
from planner.zoo.training import OPTIMIZERS, PRECISIONS, transformers

# Model states do not depend on the batch, so it is small. A batch of 4 gives batch norm something to average over.
MODELS: dict[str, dict[str, int]] = {
    "gpt2": {"batch": 1},
    "bert": {"batch": 1},
    "vit": {"batch": 1},
    "resnet50": {"batch": 4, "image": 32},
    "unet": {"batch": 1, "image": 32},
}
PARTS = {
    "parameters": PARAMETERS,
    "gradients": GRADIENTS,
    "states": STATES,
    "temporaries": TEMPORARIES,
    "casts": CASTS,
}
Make = Callable[[nn.Module], torch.optim.Optimizer]


def optimizers() -> dict[str, Make]:
    """The zoo's optimizers, those of other packages that are installed, and foreach variants, by name."""
    named: dict[str, Make] = {
        name: (lambda model, make=make: make(model.parameters(), lr=1e-3))
        for name, make in OPTIMIZERS.items()
        if make is not None
    }
    named["adam, foreach"] = lambda model: torch.optim.Adam(model.parameters(), foreach=True)
    library = transformers()
    named["adafactor of transformers"] = lambda model: library.optimization.Adafactor(model.parameters())
    if importlib.util.find_spec("bitsandbytes") is not None:
        kinds = importlib.import_module("bitsandbytes").optim
        named["adam, 8 bits"] = lambda model: kinds.Adam8bit(model.parameters())
    return named


def row(name: str, precision: str, optimizer: str, make: Make, device: str) -> dict[str, Any]:
    """One model in one precision with one optimizer."""
    workload = build(name, precision=precision, device=device, **MODELS[name])
    workload.optimizer = make(workload.model)
    states = planner.model_states(workload)
    found: dict[str, Any] = {"model": name, "precision": precision, "optimizer": optimizer}
    worst = 0.0
    for part, title in PARTS.items():
        rows = [each for each in states.rows if each.part == title or each.part.startswith(title + ": ")]
        measured = sum(each.measured_bytes for each in rows)
        formulas = [each.formula_bytes for each in rows if each.formula_bytes is not None]
        known = len(formulas) == len(rows)
        found[part] = measured
        if part == "temporaries":  # They depend on the code of the optimizer's step.
            continue
        found[f"{part}_by_formula"] = sum(formulas) if known else "measured only"
        if known and sum(formulas) != measured:
            worst = max(worst, 100 * abs(sum(formulas) - measured) / max(measured, 1))
    return {**found, "largest_difference_percent": worst}


def table(models: list[str], device: str) -> pd.DataFrame:
    """Every model in every precision with every optimizer."""
    return pd.DataFrame(
        [
            row(name, precision, optimizer, make, device)
            for name in models
            for precision in PRECISIONS
            for optimizer, make in optimizers().items()
        ]
    )


def summary(frame: pd.DataFrame) -> list[str]:
    """What the table says."""
    exact = sum(value == 0 for value in frame["largest_difference_percent"])
    missing = sum((frame[f"{part}_by_formula"] == "measured only").any() for part in PARTS if part != "temporaries")
    return [
        f"rows: {len(frame)}; every part equal to the byte: {exact}; parts without a formula: {missing}; largest "
        f"difference of any part: {frame['largest_difference_percent'].max():.4f} % of measured",
        "bytes; parameters, gradients and states stay, temporaries are what the optimizer's step holds beside them at "
        "most, casts what autocast caches of the parameters at most",
    ]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    frame = table(options.models, options.device)
    name = result_name("model-states", options.device)
    write_result(options.out, name, "Model states: measured and by formula", frame, summary(frame))


if __name__ == "__main__":
    main()
