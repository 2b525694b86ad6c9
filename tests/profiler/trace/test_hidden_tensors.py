"""Functions that keep tensors in attributes of their context, as bitsandbytes' 8-bit layers do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from benchmarks.outside_meter import OutsideMeter

WIDTH, ROWS = 16, 128


class Eight(torch.autograd.Function):
    """Keeps its input and its weight as bitsandbytes' ``MatMul8bitLt`` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.tensors = (x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.tensors
        return gradient @ weight, gradient.t() @ x


class Four(torch.autograd.Function):
    """Keeps a frozen weight alone, as its ``MatMul4Bit`` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.tensors = (None, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient @ ctx.tensors[1], None


class Block(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.norm = nn.LayerNorm(WIDTH)
        trained = function is not Four
        self.up = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) / 4, requires_grad=trained)
        self.down = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / 8, requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        up = self.function.apply(self.norm(x), self.up)
        return x + self.function.apply(nn.functional.gelu(up), self.down)


def workload(*functions: Any) -> planner.Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(function) for function in functions])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, foreach=False)
    return planner.Workload(
        model=model, inputs=torch.randn(ROWS, WIDTH), loss=lambda y: y.square().mean(), optimizer=optimizer
    )


def peak_and_losses(functions: tuple[Any, ...], plan: planner.Plan | None) -> tuple[int, list[float]]:
    with OutsideMeter() as meter:
        work = workload(*functions)
        handle = None if plan is None else planner.apply(work.model, plan)
        losses = [work.step() for _ in range(3)]
        meter.begin()
        losses += [work.step() for _ in range(2)]
        if handle is not None:
            handle.remove()
        del work, handle
    return meter.peak_bytes, losses


@pytest.mark.slow
def test_stages_that_hide_tensors_are_kept_by_name_and_what_hides_counts_while_the_graph_is_there() -> None:
    functions = (Four, Eight, Eight, Four, Four)
    profile = planner.profile(workload(*functions))
    (left_out,) = profile.left_out
    assert left_out.names == ("1", "2")
    assert left_out.reason.startswith("Eight keeps tensors for backward in attributes of its context")
    assert "4-bit" in left_out.remedy
    unplanned_bytes, expected = peak_and_losses(functions, None)
    assert unplanned_bytes == profile.unplanned_peak_bytes
    with pytest.raises(planner.Infeasible, match=r"1, 2 \(2 Block\) cannot run again: Eight keeps") as refusal:
        planner.solve(profile, "50%")
    for budget in (refusal.value.minimum_budget_bytes, (refusal.value.minimum_budget_bytes + unplanned_bytes) // 2):
        plan = planner.solve(profile, budget)
        again = {stage.name for stage in plan.stages if stage.decision != "keep"}
        assert again and again.isdisjoint({"1", "2"})
        peak_bytes, losses = peak_and_losses(functions, plan)
        assert losses == expected
        assert peak_bytes <= plan.predicted_peak_bytes <= budget


@pytest.mark.slow
def test_a_function_that_keeps_only_what_is_there_anyway_hides_nothing() -> None:
    profile = planner.profile(workload(Four, Four, Four))
    assert profile.left_out == ()
    assert all(stage.recomputable for stage in profile.stages if stage.kind == "stage")
