"""``auto_checkpoint`` tells its parts, and its result in one line."""

from __future__ import annotations

import logging

import torch
from torch import nn

import planner


def test_auto_checkpoint_tells_profiling_solving_and_the_result(caplog, capsys):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    with caplog.at_level(logging.INFO):
        workload = planner.Workload(model, torch.randn(64, 32), loss=lambda out: out.sum())
        planner.auto_checkpoint(workload, budget="80%", verify=False)
    handle = planner.handle_of(model)
    assert handle is not None
    plan = handle.plan
    told = [(record.name, record.getMessage()) for record in caplog.records]
    profiling, (profiled, solving, result) = told[0], told[-3:]
    assert profiling[0] == "profiler" and profiling[1].startswith("profiling: warm up (step 1 of about ")
    assert profiled[0] == "planner" and profiled[1].startswith("profiled Sequential: unplanned peak ")
    assert solving == ("planner", "solving for a budget of 80%")
    assert result == ("planner", plan.in_one_line())
    assert "of 4 stages " in result[1] and f"{plan.slowdown:.2f} times" in result[1]
    assert f"{plan.status}, by {plan.solver}" in result[1]
    assert capsys.readouterr() == ("", "")
