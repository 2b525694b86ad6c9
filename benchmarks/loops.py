"""Loops as people write them, planned for the smallest budget, and metered from outside."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

import planner
from benchmarks.budgets import smallest_budget
from benchmarks.outside_meter import meter_on
from benchmarks.reporting import RESULTS, result_name, write_rows
from planner.zoo import build
from profiler.workload.workload import Workload

MODELS = ("gpt2", "vit", "resnet50", "unet")
STEPS = 4
MICRO_BATCHES = 3


@dataclass(frozen=True, slots=True)
class Training:
    """What a loop trains."""

    model: nn.Module
    batch: Any
    criterion: Callable[[Any], Tensor] | None
    optimizer: torch.optim.Optimizer

    def output(self) -> Any:
        """Of the model on the batch."""
        return self.model(**self.batch) if isinstance(self.batch, dict) else self.model(self.batch)

    def loss_of(self, output: Any) -> Tensor:
        """By the criterion, or the output's own."""
        return output.loss if self.criterion is None else self.criterion(output)

    def workload(self, **options: Any) -> Workload:
        """With the step that is built in."""
        return Workload(model=self.model, inputs=self.batch, loss=self.criterion, optimizer=self.optimizer, **options)

    def own(self, step: Callable[[], Any]) -> Workload:
        """With a custom step."""
        return Workload(model=self.model, step=step, optimizer=self.optimizer)


Run = Callable[[int], None]  # trains so many steps
Loop = Callable[[Training], tuple[Workload, Run]]  # how the loop is described for planning, and the loop


def usual(train: Training) -> tuple[Workload, Run]:
    """Output bound, zero_grad last."""

    def run(steps: int) -> None:
        for _ in range(steps):
            outputs = train.output()
            loss = train.loss_of(outputs)
            loss.backward()
            train.optimizer.step()
            train.optimizer.zero_grad()

    return train.workload(), run


def zero_grad_first(train: Training) -> tuple[Workload, Run]:
    """Output bound, zero_grad before forward."""

    def run(steps: int) -> None:
        for _ in range(steps):
            train.optimizer.zero_grad()
            outputs = train.output()
            loss = train.loss_of(outputs)
            loss.backward()
            train.optimizer.step()

    return train.workload(), run


def zero_grad_between(train: Training) -> tuple[Workload, Run]:
    """The tutorial's order: zero_grad between forward and backward."""
    held: dict[str, Any] = {}

    def step() -> None:
        held["outputs"] = train.output()
        held["loss"] = train.loss_of(held["outputs"])
        train.optimizer.zero_grad()
        held["loss"].backward()
        train.optimizer.step()

    return train.own(step), repeated(step)


def output_let_go(train: Training) -> tuple[Workload, Run]:
    """The output is never bound, the loss is returned."""

    def step() -> Tensor:
        loss = train.loss_of(train.output())
        loss.backward()
        train.optimizer.step()
        train.optimizer.zero_grad()
        return loss

    return train.own(step), repeated(step)


def gradients_stay(train: Training) -> tuple[Workload, Run]:
    """zero_grad(set_to_none=False)."""

    def run(steps: int) -> None:
        for _ in range(steps):
            train.optimizer.zero_grad(set_to_none=False)
            outputs = train.output()
            loss = train.loss_of(outputs)
            loss.backward()
            train.optimizer.step()

    return train.workload(accumulate=True), run


def accumulation(train: Training) -> tuple[Workload, Run]:
    """Gradients of three micro-batches, clipped."""

    def step() -> float:
        total = 0.0
        train.optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            loss = train.loss_of(train.output()) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(train.model.parameters(), 1.0)
        train.optimizer.step()
        return total

    return train.own(step), repeated(step)


def evaluation_between(train: Training) -> tuple[Workload, Run]:
    """Every step followed by an evaluation, whose scores stay bound."""
    held: dict[str, Any] = {}

    def step() -> float:
        loss = train.loss_of(train.output())
        loss.backward()
        train.optimizer.step()
        train.optimizer.zero_grad()
        train.model.eval()
        with torch.no_grad():
            held["scores"] = train.output()
        train.model.train()
        return loss.item()

    return train.own(step), repeated(step)


def averaged(train: Training) -> tuple[Workload, Run]:
    """An exponential moving average of the weights, losses in a list, a schedule, tutorial's order."""
    average = copy.deepcopy(train.model)
    schedule = torch.optim.lr_scheduler.StepLR(train.optimizer, 10)
    losses: list[Tensor] = []

    def step() -> None:
        outputs = train.output()
        loss = train.loss_of(outputs)
        train.optimizer.zero_grad()
        loss.backward()
        train.optimizer.step()
        schedule.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), train.model.parameters(), strict=True):
                mean.lerp_(weight, 0.01)
        losses.append(loss.detach())

    return train.own(step), repeated(step)


def repeated(step: Callable[[], Any]) -> Run:
    """A loop that binds what the step returns."""

    def run(steps: int) -> None:
        for _ in range(steps):
            result = step()  # noqa: F841  Bound until the next one comes.

    return run


LOOPS = (
    usual,
    zero_grad_first,
    zero_grad_between,
    output_let_go,
    gradients_stay,
    accumulation,
    evaluation_between,
    averaged,
)


def training(name: str, **settings: Any) -> Training:
    """A model of the zoo with AdamW and one batch."""
    work = build(name, **settings)
    return Training(work.model, work.inputs, work.loss, work.optimizer)


def smallest_plan(workload: Workload) -> planner.Plan:
    """The plan that needs the least memory, and no more than that for its budget."""
    profile = planner.profile(workload)
    return planner.solve(profile, smallest_budget(profile))


def row(name: str, loop: Loop, **settings: Any) -> dict[str, Any]:
    """One loop of one model, without a plan and with the smallest one."""
    workload, _ = loop(training(name, **settings))
    plan = smallest_plan(workload)
    measured_bytes = peak_bytes(name, loop, plan, **settings)
    return {
        "model": name,
        "loop": (loop.__doc__ or "").strip().rstrip("."),
        "described_by": "built-in step" if workload.custom_step is None else "step=",
        "unplanned_bytes": peak_bytes(name, loop, None, **settings),
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": plan.predicted_peak_bytes,
        "measured_bytes": measured_bytes,
        "above_budget": max(0, measured_bytes - plan.budget_bytes),
        "off": measured_bytes / plan.predicted_peak_bytes - 1,
        "said": "; ".join(plan.unsteady),
    }


def peak_bytes(name: str, loop: Loop, plan: planner.Plan | None, **settings: Any) -> int:
    """Of the loop in a process that has nothing else, by the outside meter."""
    with meter_on(settings.get("device", "cpu")) as meter:
        train = training(name, **settings)
        _, run = loop(train)
        if plan is not None:
            planner.apply(train.model, plan)
        meter.begin()
        run(STEPS)
    return meter.peak_bytes


def rows(models: tuple[str, ...], **settings: Any) -> Iterator[dict[str, Any]]:
    """All rows, as they come."""
    for name in models:
        for loop in LOOPS:
            yield row(name, loop, **settings)


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    name = result_name("loops", options.device)
    found = rows(tuple(options.models), device=options.device)
    write_rows(options.out, name, "Loops as people write them, at the smallest budget", found, summary)


def summary(found: list[dict[str, Any]]) -> list[str]:
    """What the table says about the promises."""
    frame = pd.DataFrame(found)
    above = frame.above_budget > 0
    return [
        f"{len(frame)} loops of {STEPS} steps with AdamW at the smallest budget: {above.sum()} above it, "
        f"{(above & (frame.said == '')).sum()} of them without having said so; measured within "
        f"{frame.off.abs().max():.3%} of predicted, {(frame.off == 0).sum()} to the byte",
        "measured: every byte of the process's tensors, from before the model is made, by the allocator's events",
    ]


if __name__ == "__main__":
    main()
