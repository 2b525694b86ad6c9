"""Draws ``docs/pieces.svg``: memory over a step of a small GPT, with its logits and with its head in pieces.

``python -m docs.hooks.pieces_picture`` measures and draws anew; the bytes are those that the CPU's allocator tells of.
"""

from __future__ import annotations

import gc
from itertools import accumulate
from pathlib import Path

import torch

import planner
from benchmarks.pieces_models import gpt
from planner.pictures import BLUE, GREEN, STATES, VERMILION, new_figure, write_picture
from planner.plans.solving import least_budget_bytes
from profiler.workload.workload import Workload

_FILE = Path(__file__).parents[1] / "pieces.svg"
_MIB = 2**20


def main() -> None:
    """Measure three steps and draw them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = gpt()
    profile = planner.profile(workload, numerics="rounding")
    without, least = least_budget_bytes(profile), min(map(least_budget_bytes, profile.in_pieces))
    before = planner.solve(profile, without)
    after = planner.solve(profile, least, numerics="rounding")
    curves = [("no plan", VERMILION, _curve(workload))]
    for name, colour, plan in (
        (f"smallest budget without pieces, {without / _MIB:.0f} MiB", BLUE, before),
        (f"smallest budget in pieces, {least / _MIB:.0f} MiB", GREEN, after),
    ):
        with planner.apply(workload.model, plan):
            curves.append((name, colour, _curve(workload)))
    figure = new_figure(8, 4, dpi=100)
    axes = figure.add_subplot()
    for name, colour, (seconds, sizes) in curves:
        axes.step(
            [1e3 * each for each in seconds], [each / _MIB for each in sizes], where="post", color=colour, label=name
        )
    axes.axhline(profile.states_bytes / _MIB, color=STATES, linestyle=":", label="parameters, gradients, optimizer")
    axes.set_xlabel("milliseconds of the step")
    axes.set_ylabel("MiB alive")
    axes.set_ylim(0)
    axes.set_xlim(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    write_picture(figure, _FILE)


def _curve(workload: Workload) -> tuple[list[float], list[float]]:
    """Seconds into a step, and the bytes alive from then on, states and batch included."""
    workload.step()
    workload.zero_grad()
    gc.collect()
    there = sum(t.nbytes for t in [*workload.model.parameters(), *workload.model.buffers(), workload.inputs])
    there += sum(
        value.nbytes
        for state in workload.optimizers[0].state.values()
        for value in state.values()
        if torch.is_tensor(value)
    )
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profiler:
        workload.step()
    kineto = profiler.profiler
    assert kineto is not None and kineto.kineto_results is not None
    events = sorted((e.start_ns(), e.nbytes()) for e in kineto.kineto_results.events() if e.name() == "[memory]")
    first = events[0][0]
    sizes = accumulate((change for _, change in events), initial=there)
    next(sizes)
    return [(at - first) / 1e9 for at, _ in events], [float(size) for size in sizes]


if __name__ == "__main__":
    main()
