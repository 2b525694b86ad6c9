"""The catalogue: tiny models of every family of transformers, planned at three budgets, against the unplanned model.

Each is trained for three steps from one seed, as a user's loop would, by an outside meter: the events of the device's
allocator around the whole step.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import multiprocessing
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import planner
from benchmarks.budgets import smallest_budget
from benchmarks.catalogue_families import FAMILIES, Batch, Family
from benchmarks.outside_meter import meter_on
from benchmarks.reporting import RESULTS, result_name, write_rows
from profiler.workload.tensor_trees import map_tensors
from profiler.workload.workload import own_loss

STEPS = 3
# Between the smallest feasible budget (0) and the unplanned peak (1).
DEPTHS = (0.0, 0.4, 0.9)
COLUMNS = [
    "model",
    "stages",
    "run_once",
    "captured",
    "budget_bytes",
    "of_unplanned",
    "predicted_peak_bytes",
    "measured_peak_bytes",
    "unplanned_peak_bytes",
    "recomputed_ops",
    "differs",
    "said",
]


def rows_of(
    family: Family, *, menus: bool = True, device: str = "cpu", link_gbps: float | None = None
) -> Iterator[dict[str, Any]]:
    """One row per budget: predicted and measured peak, and what differs from the unplanned model's training.

    Args:
        family: of the model.
        menus: stages may run as programs.
        device: that it trains on.
        link_gbps: of an artificial link to host memory, for a device that has none; plans may send over it.
    """
    offload = planner.Offload() if link_gbps is None else planner.Offload(link_gbps=link_gbps)
    model, batch = _built(family, device)
    loss = family.loss or own_loss
    work = planner.Workload(model=model, inputs=batch, loss=loss, optimizer=_optimizer(model))
    profile = planner.profile(work, menus=menus)
    expected, plain_peak = trained(family, None, device)
    smallest = smallest_budget(profile, offload=offload)
    stages = [stage for stage in profile.stages if stage.kind == "stage"]
    for depth in DEPTHS:
        budget = int(smallest + depth * (profile.unplanned_peak_bytes - smallest))
        plan = planner.solve(profile, budget, offload=offload)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            got, peak = trained(family, plan, device)
        yield {
            "model": family.model,
            "stages": len(stages),
            "run_once": sum(not stage.recomputable for stage in stages),
            "captured": sum(profile.menus[stage.menu].graph is not None for stage in stages),
            "budget_bytes": budget,
            "of_unplanned": budget / profile.unplanned_peak_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "measured_peak_bytes": peak,
            "unplanned_peak_bytes": plain_peak,
            "recomputed_ops": plan.recomputed_ops,
            "differs": ", ".join(sorted(differences(expected, got))[:3]),
            "said": "; ".join(sorted({str(w.message) for w in warned if "peak is not promised" in str(w.message)})),
        }


def trained(family: Family, plan: planner.Plan | None, device: str) -> tuple[dict[str, Any], int]:
    """What three steps leave (losses, gradients, state, random state), and the highest peak of those that are metered.

    The first step makes the optimizer's states; the others are metered. No model builds a cache of keys and values,
    which planned training leaves out: with one, matrix products read another layout, and round otherwise.
    """
    with meter_on(device) as meter:
        model, batch = _built(family, device)
        configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
        for config in configs if plan is None else []:
            if hasattr(config, "use_cache"):
                config.use_cache = False
        optimizer = _optimizer(model)
        handle = None if plan is None else planner.apply(model, plan)
        loss_of = family.loss or own_loss
        _seed(1)
        losses: list[float] = []
        for number in range(STEPS):
            gc.collect()  # Some outputs are in reference cycles.
            if number == 1:
                meter.begin()
            optimizer.zero_grad()
            outputs = model(**batch)
            loss = loss_of(outputs)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())  # A tensor would stay.
    left: dict[str, Any] = {"losses": torch.tensor(losses)}
    left |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    left |= {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    left |= {"torch's random state": torch.get_rng_state(), "Python's random state": random.getstate()}
    left["numpy's random state"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))  # type: ignore[index]
    if device != "cpu":
        left["the device's random state"] = torch.cuda.get_rng_state(device)
    if handle is not None:
        handle.remove()
    return left, meter.peak_bytes


def differences(expected: dict[str, Any], got: dict[str, Any]) -> set[str]:
    """Names of what is not the same, bit for bit; NaN equals itself."""
    return {name for name in expected.keys() | got.keys() if not _equal(expected.get(name), got.get(name))}


def _equal(left: Any, right: Any) -> bool:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return left is right or (not isinstance(left, Tensor) and not isinstance(right, Tensor) and left == right)
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all())


def _built(family: Family, device: str) -> tuple[nn.Module, Batch]:
    _seed(0)
    model, batch = family.build()
    return model.to(device), map_tensors(lambda tensor: tensor.to(device), batch)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def all_rows(
    names: Sequence[str], *, jobs: int, menus: bool, device: str, link_gbps: float | None
) -> Iterator[dict[str, Any]]:
    """The rows of these families as they come, in the order of the names."""
    found = functools.partial(rows_or_error, menus=menus, device=device, link_gbps=link_gbps)
    if jobs == 1:
        yield from itertools.chain.from_iterable(map(found, names))
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), begin, (device,)) as pool:
        yield from itertools.chain.from_iterable(pool.map(found, names))


def begin(device: str) -> None:
    """Set up a process: one thread; on a CUDA device kernels that give the same bits every time, where there are."""
    torch.set_num_threads(1)
    if device != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def rows_or_error(name: str, **settings: Any) -> list[dict[str, Any]]:
    """The rows of a family; one that fails altogether has the error in its ``differs``."""
    try:
        return list(rows_of(FAMILIES[name], **settings))
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, AssertionError) as error:
        return [{"model": name, "differs": f"{type(error).__name__}: {error}".splitlines()[0]}]
    finally:
        gc.collect()
        gc.freeze()  # Modules imported for a model stay: looking through them takes most of the time otherwise.


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """What the table says about the promises."""
    frame = pd.DataFrame(rows, columns=COLUMNS)
    over = frame[(frame["measured_peak_bytes"] > frame["budget_bytes"]) & (frame["said"] == "")]
    errors = frame["measured_peak_bytes"] - frame["predicted_peak_bytes"]
    return [
        f"model classes: {frame['model'].nunique()}; plans: {len(frame)}; with a difference or an error: "
        f"{(frame['differs'] != '').sum()}; above the budget without having said so: {len(over)}",
        f"measured equals predicted to the byte: {(errors == 0).sum()}; measured above predicted: {(errors > 0).sum()}",
        "run_once: stages that must not run again, most of them since they fill a cache (use_cache is on by default)",
        f"captured: stages that can run as programs, {_of_all(rows, 'captured')} of {_of_all(rows, 'stages')}",
    ]


def _of_all(rows: list[dict[str, Any]], column: str) -> int:
    """The sum of a column over the models, each counted once."""
    return sum({row["model"]: row.get(column, 0) for row in rows}.values())


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="CLASS")
    parser.add_argument("--no-menus", action="store_true", help="stages are kept or recomputed as a whole")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--link", type=float, metavar="GB/S", help="an artificial link to host memory")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    begin(options.device)
    settings = {"menus": not options.no_menus, "device": options.device, "link_gbps": options.link}
    rows = all_rows(options.families, jobs=options.jobs, **settings)
    base = "catalogue" if options.link is None else "catalogue-link"
    name, title = result_name(base, options.device), "Catalogue: families of transformers under a plan"
    write_rows(options.out, name, title, rows, summary, COLUMNS)


if __name__ == "__main__":
    main()
