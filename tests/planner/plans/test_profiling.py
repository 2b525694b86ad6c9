from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import planner
from benchmarks.outside_meter import OutsideMeter
from planner.plans import profiling
from planner.plans.profiling import with_best_cut
from tests.support.nightly import at_night


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def _smallest_bytes(profile: planner.Profile) -> int:
    with pytest.raises(planner.Infeasible) as refused:
        planner.solve(profile, 1, offload="never")
    return refused.value.minimum_budget_bytes


@pytest.fixture
def _faster_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_WORTH_BYTES", 0)
    monkeypatch.setattr(profiling, "_slowdown", lambda profile, budget_bytes: float(len(profile.stages)))


@pytest.mark.slow
@pytest.mark.usefixtures("_faster_whole")
@pytest.mark.parametrize("accumulates", [True, False])
def test_no_budget_is_lost_to_a_faster_cut(accumulates: bool) -> None:
    """A call planned at once hands over all gradients at its end, which are alive beside those they are added to."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(64) for _ in range(4)))
    batch = torch.randn(128 if accumulates else 1024, 64)

    def step() -> None:
        model(batch).square().sum().backward()
        if not accumulates:
            model.zero_grad()

    workload = planner.Workload(model=model, step=step)
    parts, whole = (planner.profile(workload, stages=stages) for stages in (["0", "1", "2", "3"], "whole"))
    assert (_smallest_bytes(whole) > _smallest_bytes(parts)) == accumulates
    assert with_best_cut(parts, lambda: whole) is (parts if accumulates else whole)


class _Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Holder(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class _Doubling(_Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.net(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        at_night(lambda net: net, "the model"),
        at_night(_Holder, "net"),
        (lambda net: _Holder(_Holder(net)), "net.net"),
        (_Doubling, "the model"),
    ],
)
def test_the_whole_is_the_module_that_others_pass_on_to(wrap: Callable[[nn.Module], nn.Module], name: str) -> None:
    """A loop that calls the module inside (``self.net(x)``) is planned as well."""
    torch.manual_seed(0)

    def loop(plan: planner.Plan | None) -> int:
        with OutsideMeter() as meter:
            model, batch = wrap(_Three()), torch.randn(4096, 16)
            called = model.get_submodule("" if name == "the model" else name)
            with nullcontext() if plan is None else planner.apply(model, plan):
                meter.begin()
                called(batch).square().mean().backward()
        return meter.peak_bytes

    workload = planner.Workload(wrap(_Three()), torch.randn(4096, 16), loss=lambda output: output.square().mean())
    profile = planner.profile(workload, stages="whole")
    assert [stage.name for stage in profile.stages if stage.kind == "stage"] == [name]
    plan = planner.solve(profile, _smallest_bytes(profile))
    assert loop(plan) <= plan.budget_bytes < loop(None)
