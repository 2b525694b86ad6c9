"""Frameworks' own training loops with a memory budget: losses against those without, and peaks against the budget."""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import Trainer

import planner
from benchmarks.loop_builds import accelerate_run, lightning_run
from benchmarks.reporting import RESULTS, write_result
from benchmarks.trainer_builds import StepMeter, dpo_trainer, plain_trainer, sft_trainer
from planner.integrations.transformers import MemoryBudgetCallback
from planner.plans.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRun:
    """What a framework's loop did.

    Attributes:
        losses: of each step.
        peaks_bytes: of each step, from outside.
        budget_bytes, predicted_bytes: that the plan claims; of several the largest; 0 without one.
    """

    losses: tuple[float, ...]
    peaks_bytes: tuple[int, ...]
    budget_bytes: int = 0
    predicted_bytes: int = 0


# Runs a loop of a framework from its beginning, with a budget or without.
Loop = Callable[[str | int | None], LoopRun]


def trained(build: Callable[[str], Trainer], budget: str | int | None) -> LoopRun:
    """A trainer's run; ``build`` makes it anew."""
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        trainer, meter = build(folder), StepMeter()
        if budget is not None:
            trainer.add_callback(MemoryBudgetCallback(trainer, budget=budget, verify=False))
        trainer.add_callback(meter)
        trainer.train()
    log: list[dict[str, Any]] = trainer.state.log_history
    return LoopRun(
        losses=tuple(entry["loss"] for entry in log if "loss" in entry),
        peaks_bytes=tuple(meter.steps.peaks_bytes),
        budget_bytes=max((entry["budget_bytes"] for entry in log if "budget_bytes" in entry), default=0),
        predicted_bytes=max((entry["predicted_peak_bytes"] for entry in log if "budget_bytes" in entry), default=0),
    )


def of_trainer(build: Callable[..., Trainer], **settings: Any) -> Loop:
    """The loop of a trainer with these settings."""
    return lambda budget: trained(lambda folder: build(folder, **settings), budget)


def of_run(run: Callable[[str | int | None], tuple[list[float], list[int], Plan | None]]) -> Loop:
    """The loop of what gives losses, peaks and the plan."""

    def loop(budget: str | int | None) -> LoopRun:
        losses, peaks_bytes, plan = run(budget)
        return LoopRun(
            losses=tuple(losses),
            peaks_bytes=tuple(peaks_bytes),
            budget_bytes=0 if plan is None else plan.budget_bytes,
            predicted_bytes=0 if plan is None else plan.predicted_peak_bytes,
        )

    return loop


LARGE: dict[str, Any] = {"layers": 6, "hidden": 64}
LOOPS: dict[str, Loop] = {
    "Trainer": of_trainer(plain_trainer, **LARGE),
    "Trainer, bf16": of_trainer(plain_trainer, **{**LARGE, "bf16": True}),
    "Trainer, 3 micro-batches": of_trainer(plain_trainer, gradient_accumulation_steps=3, **LARGE),
    "Trainer, LoRA": of_trainer(plain_trainer, adapter="LoRA", **LARGE),
    "Trainer, DoRA": of_trainer(plain_trainer, adapter="DoRA", **LARGE),
    "Trainer, prompt tuning": of_trainer(plain_trainer, adapter="prompt tuning", **LARGE),
    "SFTTrainer": of_trainer(sft_trainer, **LARGE),
    "SFTTrainer, LoRA": of_trainer(sft_trainer, adapter="LoRA", **LARGE),
    "DPOTrainer": of_trainer(dpo_trainer, **LARGE),
    "DPOTrainer, LoRA": of_trainer(dpo_trainer, adapter="LoRA", **LARGE),
    "accelerate": of_run(lambda budget: accelerate_run(budget, **LARGE)),
    "accelerate, bf16": of_run(lambda budget: accelerate_run(budget, precision="bf16", **LARGE)),
    "accelerate, LoRA": of_run(lambda budget: accelerate_run(budget, adapter="LoRA", **LARGE)),
    "Lightning": of_run(lambda budget: lightning_run(budget, sizes=LARGE)),
    "Lightning, 2 micro-batches": of_run(lambda budget: lightning_run(budget, sizes=LARGE, accumulate_grad_batches=2)),
    "Lightning, LoRA": of_run(lambda budget: lightning_run(budget, adapter="LoRA", sizes=LARGE)),
}


def smallest_budget(loop: Loop) -> int:
    """The smallest budget, by the refusal of one that is too small."""
    try:
        loop(1)
    except planner.Infeasible as refusal:
        return refusal.minimum_budget_bytes
    raise ValueError("a budget of one byte: expected a refusal, got a plan; count what the loop holds")


def run_within(loop: Loop, budget_bytes: int) -> LoopRun:
    """The loop within a budget, or within the smallest of its own profile: profiles differ in what was fast in them."""
    for _ in range(3):
        try:
            return loop(budget_bytes)
        except planner.Infeasible as refusal:
            budget_bytes = refusal.minimum_budget_bytes
    return loop(budget_bytes)


def loop_rows(name: str, loop: Loop) -> Iterator[dict[str, Any]]:
    """One loop without a budget, with the smallest one, and with one halfway."""
    plain = loop(None)
    unplanned_bytes, least_bytes = max(plain.peaks_bytes), smallest_budget(loop)
    for budget in ((least_bytes + unplanned_bytes) // 2, least_bytes):
        run = run_within(loop, budget)
        measured_bytes = max(run.peaks_bytes)
        yield {
            "loop": name,
            "steps": len(run.losses),
            "losses_equal": run.losses == plain.losses,
            "unplanned_bytes": unplanned_bytes,
            "budget_bytes": run.budget_bytes,
            "predicted_bytes": run.predicted_bytes,
            "measured_bytes": measured_bytes,
            "above_budget": max(0, measured_bytes - run.budget_bytes),
            "off": measured_bytes / run.predicted_bytes - 1,
        }


def rows(names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """All rows, told as they come."""
    for name in names:
        for found in loop_rows(name, LOOPS[name]):
            print(
                f"{name:26} equal {found['losses_equal']}, {found['above_budget']:>8} above, {found['off']:+.4%}",
                flush=True,
            )
            yield found


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", nargs="+", default=list(LOOPS), choices=list(LOOPS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # What is imported by now stays: the meter collects garbage before every step.
    frame = pd.DataFrame(rows(tuple(options.loops)))
    notes = [
        f"{len(frame)} runs: losses equal bit for bit to the run without the callback, step by step, in "
        f"{frame.losses_equal.sum()}; above the budget {(frame.above_budget > 0).sum()}; measured within "
        f"{frame.off.abs().max():.4%} of predicted, {(frame.off == 0).sum()} to the byte",
        "measured: every byte of the process's tensors in any step, the first included, by the allocator's events and "
        "what was there as the step began",
        "two budgets each: the smallest, of its own profile where that needs more, and halfway to the unplanned peak; "
        "the callback, or planner.auto_checkpoint after accelerate's prepare, is the only line added",
    ]
    write_result(options.out, "trainers", "Frameworks' own loops within a memory budget", frame, notes)


if __name__ == "__main__":
    main()
