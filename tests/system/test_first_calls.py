"""Models that set attributes of theirs in their first call, as transformers' set ``problem_type``, in a planned one."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.trace.captured_call import UnsettledError
from profiler.trace.captures import captured
from tests.support.step_peaks import peaks_of_steps

WIDTH = 32


class Settings:
    """Of a model, as a configuration is."""

    kind: str | None = None


class Net(nn.Module):
    """Decides in its first call what kind of problem it has."""

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.calls = Settings(), 0
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.settings.kind is None:
            self.settings.kind = "regression"
        for layer in self.layers:
            x = torch.tanh(layer(x)).sin().exp()
        return x


class Counting(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def workload(kind: type[Net] = Net) -> planner.Workload:
    torch.manual_seed(0)
    return planner.Workload(kind(), torch.randn(256, WIDTH), loss=lambda y: y.square().mean())


def test_the_first_step_of_a_plan_keeps_the_budget() -> None:
    profile = planner.profile(workload(), stages="whole")
    plan = planner.solve(profile, "60%")
    other = workload()
    assert isinstance(other.model, Net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peaks_of_steps(other, plan) == [plan.predicted_peak_bytes] * 3
    assert other.model.settings.kind == "regression"


def test_a_call_that_never_settles_is_left_as_it_was() -> None:
    module = Counting()
    with pytest.raises(UnsettledError):
        captured(nn.Sequential(module), module, module.forward, (torch.ones(4, WIDTH),), {})
    assert (module.calls, module.settings.kind) == (0, None)
