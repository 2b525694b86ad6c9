"""Modules that store tensors of their forward: each call lets go of what the call before it stored."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import planner
from tests.support.step_peaks import peaks_of_steps


class Normed(nn.Module):
    """Sets its weight as a plain attribute in every forward, where it stays until the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.utils.spectral_norm(nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Storing(nn.Module):
    """Stores what is inside, graph and all."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.tanh(self.wide(x))
        return x + self.narrow(nn.functional.gelu(self.last))


class Repeating(nn.Module):
    """Two blocks that take turns."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for turn in range(6):
            x = self.blocks[turn % 2](x)
        return x


def repeating(kind: type[nn.Module]) -> planner.Workload:
    torch.manual_seed(0)
    return planner.Workload(
        model=Repeating(kind), inputs=torch.randn(4, 8, 16), loss=lambda output: output.square().mean()
    )


@pytest.mark.parametrize("kind", [Normed, Storing])
def test_several_calls_of_a_module_are_kept_and_take_what_is_predicted(kind: type[nn.Module]) -> None:
    profile = planner.profile(repeating(kind))
    stages = [record for record in profile.stages if record.kind == "stage"]
    assert len(stages) == 6 and all("stores tensors of its forward" in record.reason for record in stages)
    assert not any(menu.options for menu in profile.menus)
    plan = planner.state(profile, planner.Rule(modules="blocks.*", action="keep"))
    assert max(peaks_of_steps(repeating(kind), plan)) <= plan.predicted_peak_bytes


@pytest.mark.parametrize("kind", [Normed, Storing])
def test_a_model_that_was_profiled_is_let_go_of(kind: type[nn.Module]) -> None:
    work = repeating(kind)
    model = weakref.ref(work.model)
    planner.profile(work)
    del work
    gc.collect()
    assert model() is None
