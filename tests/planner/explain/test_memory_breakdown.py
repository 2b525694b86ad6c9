"""Where the memory goes: items that add up to the peak exactly, and states that follow from the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import planner
from planner import zoo
from planner.explain.memory_breakdown import GROUPS, OPTIMIZER, STEP, memory_breakdowns
from profiler.records import Phase

WIDTH, LAYERS, ROWS = 32, 3, 64
PARAMETERS = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
TENSORS = 2 * LAYERS


Make = Callable[..., torch.optim.Optimizer]


def workload(*, accumulate=False, optimizer: Make | None = torch.optim.AdamW, rows=ROWS):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)])
    return planner.Workload(
        model=model,
        inputs=torch.randn(rows, WIDTH),
        loss=lambda y: y.square().mean(),
        optimizer=None if optimizer is None else optimizer(model.parameters()),
        accumulate=accumulate,
    )


def by_moment(profile):
    return {breakdown.moment: breakdown for breakdown in memory_breakdowns(profile)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda: zoo.build("gpt2", layers=2, batch=2, hidden=32, seq=32, vocab=100),
        lambda: zoo.build("resnet50", batch=2, hidden=8, image=32),
        workload,
        lambda: workload(optimizer=None),
        lambda: workload(accumulate=True),
        lambda: workload(rows=1),
    ],
    ids=["gpt2", "resnet50", "mlp", "without an optimizer", "accumulating", "states above activations"],
)
def test_items_add_up_to_the_unplanned_peak(build):
    profile = planner.profile(build(), menus=False)
    breakdowns = memory_breakdowns(profile)
    assert breakdowns[0].peak_bytes == profile.unplanned_peak_bytes
    for breakdown in breakdowns:
        assert sum(item.size_bytes for item in breakdown.items) == breakdown.peak_bytes
        assert sum(breakdown.of_group(group) for group in GROUPS) == breakdown.peak_bytes
        whole = breakdown.of_group("activations")
        assert sum(breakdown.activations_by_stage().values()) == whole
        assert sum(breakdown.activations_by_stage_class().values()) == whole
        assert sum(breakdown.activations_by_op().values()) == whole


def test_states_follow_from_the_parameters():
    profile = planner.profile(workload(), menus=False)
    adam = 2 * PARAMETERS + 4 * TENSORS  # two moments, and the number of steps of each tensor
    in_optimizer = by_moment(profile)[OPTIMIZER]
    parts = in_optimizer.by_what("model states")
    assert parts == {"optimizer states": adam, "parameters": PARAMETERS, "gradients": PARAMETERS}
    assert in_optimizer.by_what("inputs") == {"batch": 4 * ROWS * WIDTH}
    assert profile.states_bytes == 2 * PARAMETERS + adam
    in_step = by_moment(profile)[STEP]
    assert in_step.by_what("model states")["parameters"] == PARAMETERS
    assert in_step.of_group("activations") >= 2 * (LAYERS - 1) * 4 * ROWS * WIDTH  # what Linear and GELU keep


def test_what_the_optimizers_step_makes_is_what_it_adds_to_its_start():
    """1000 bytes more while it runs, of which it leaves 600; beside it stands a loss scale of 8 bytes."""
    profile = planner.profile(workload(), menus=False)
    profile = replace(profile, resident=replace(profile.resident, scaler=8))
    start_bytes = profile.optimizer.start_bytes + 8
    step = Phase(start_bytes=start_bytes, peak_bytes=start_bytes + 1000, end_bytes=start_bytes + 600, seconds=1.0)
    breakdown = by_moment(replace(profile, optimizer=step))[OPTIMIZER]
    assert breakdown.by_what("temporaries")["made by the optimizer's step"] == 1000
    assert breakdown.by_what("model states")["loss scale"] == 8
    assert sum(item.size_bytes for item in breakdown.items) == breakdown.peak_bytes == start_bytes + 1000


def test_gradients_of_before_are_states():
    profile = planner.profile(workload(accumulate=True), menus=False)
    assert by_moment(profile)[STEP].by_what("model states")["gradients"] == PARAMETERS
    assert profile.states_bytes == planner.profile(workload(), menus=False).states_bytes


def test_without_an_optimizer_there_is_one_moment():
    profile = planner.profile(workload(optimizer=None), menus=False)
    assert list(by_moment(profile)) == [STEP]
    assert profile.states_bytes == 2 * PARAMETERS


def test_the_higher_moment_comes_first():
    few = memory_breakdowns(planner.profile(workload(rows=1), menus=False))
    many = memory_breakdowns(planner.profile(workload(rows=1024), menus=False))
    assert (few[0].moment, many[0].moment) == (OPTIMIZER, STEP)
    assert few[0].of_group("activations") == 0


def test_blocks_tell_activations_by_op(blocks):
    breakdown = by_moment(blocks)[STEP]
    ops = breakdown.activations_by_op()
    assert ops["addmm"] > 0 and ops["tanh"] > 0
    assert list(ops.values()) == sorted(ops.values(), reverse=True)
    assert "transformer.h.0 to 2 (3 stages)" in breakdown.activations_by_stage_class()
