"""One model of a package under plans at three budgets: what differs from the unplanned loop, and its peak."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import planner
from benchmarks.budgets import smallest_budget
from benchmarks.outside_meter import OutsideMeter
from benchmarks.packages.training import PackageModel, Training

STEPS = 3
BUDGETS = ("80%", "60%", "smallest")


def rows_of(entry: PackageModel) -> Iterator[dict[str, Any]]:
    """One row a budget.

    The first plan is put on the very model that was profiled, so that what profiling leaves behind shows in the
    numbers; the peak is measured on a fresh one, and counts all that the process makes from before its model on.
    """
    built(entry)
    gc.collect()
    gc.freeze()  # Modules imported for a model stay: looking through them takes most of the time otherwise.
    expected, unplanned_bytes = run(entry)
    own_bytes = run(entry, checkpointed=True)[1] if entry.own else None
    training = built(entry)
    profile, said = profiled(training)
    smallest_bytes = smallest_budget(profile)
    common = {"model": entry.name, "unplanned_bytes": unplanned_bytes, "smallest_bytes": smallest_bytes}
    common |= {"own": entry.own, "own_bytes": own_bytes, "stages": len(profile.stages)}
    for budget in BUDGETS:
        row = {**common, "budget": budget, "said": said}
        try:
            plan = planner.solve(profile, smallest_bytes if budget == "smallest" else budget)
        except planner.Infeasible:
            yield {**row, "differs": "", "refused": True}
            continue
        got, measured_bytes = run(entry, plan)
        differs = differences(expected, got)
        if training is not None:
            differs |= {f"{name}, after profiling" for name in differences(expected, stepped(training, plan))}
            training = None
        yield row | {
            "refused": False,
            "budget_bytes": plan.budget_bytes,
            "predicted_bytes": plan.predicted_peak_bytes,
            "measured_bytes": measured_bytes,
            "above_bytes": max(0, measured_bytes - plan.budget_bytes),
            "differs": ", ".join(sorted(differs)[:4]),
        }


def profiled(training: Training) -> tuple[planner.Profile, str]:
    """The profile as a user makes it, and what the planner said meanwhile and as it was applied."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        work = planner.Workload(model=training.model, step=training.step, optimizer=training.optimizer)
        profile = planner.profile(work)
        planner.apply(training.model, planner.solve(profile, "100%")).remove()
    ours = [str(each.message) for each in warned if Path(each.filename).parent == Path(__file__).parent]
    return profile, " | ".join(dict.fromkeys(ours))


def run(entry: PackageModel, plan: planner.Plan | None = None, *, checkpointed: bool = False) -> tuple[dict, int]:
    """What a fresh model's steps leave, and their highest peak."""
    with OutsideMeter() as meter:
        training = built(entry, checkpointed=checkpointed)
        meter.begin()
        left = stepped(training, plan)
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in left.items()
    }, meter.peak_bytes


def stepped(training: Training, plan: planner.Plan | None) -> dict[str, Any]:
    """Losses, gradients, parameters, buffers and random states that the steps leave under a plan, or without one."""
    handle = None if plan is None else planner.apply(training.model, plan)
    seed(1)
    left: dict[str, Any] = {}
    for number in range(STEPS):
        gc.collect()  # Some packages' outputs lie in circles of references.
        left[f"loss {number}"] = training.step()
    model = training.model
    left |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    left |= {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    left |= {"torch's random state": torch.get_rng_state(), "Python's random state": random.getstate()}
    left["numpy's random state"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))  # type: ignore[index]
    if handle is not None:
        handle.remove()
    return left


def differences(expected: dict[str, Any], got: dict[str, Any]) -> set[str]:
    """Names of what is not the same, bit for bit; NaN equals itself."""
    return {name for name in expected.keys() | got.keys() if not _same(expected.get(name), got.get(name))}


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        return torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all())
    return type(left) is type(right) and bool(left == right or (left != left and right != right))


def built(entry: PackageModel, *, checkpointed: bool = False) -> Training:
    """From one seed."""
    gc.collect()
    seed(0)
    return entry.build(checkpointed)


def seed(number: int) -> None:
    """Of all generators that a step may draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
