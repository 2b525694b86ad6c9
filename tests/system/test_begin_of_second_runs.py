"""A stage runs again before its own backward makes anything, as the cost model counts it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import planner
from solvers.chain.baselines import Segment, segmented_schedule
from tests.support.exactness import assert_same, budgets, following, state_after
from tests.support.step_peaks import peaks_of_steps

WIDTH, INNER, BATCH = 16, 128, 64


class Narrows(nn.Module):
    """Returns a part of what it makes: the backward of that makes all of it, and needs nothing that was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x)
        return torch.tanh(made + made.flip(0))[:, :WIDTH]


class Widens(nn.Module):
    """Computes in float32 and returns half of it: under autocast the backward of the cast doubles the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x).float()
        return torch.tanh(made + made.flip(0) + made.flip(1)).bfloat16()


def build(kind: type[nn.Module]) -> planner.Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(4)))
    return planner.Workload(
        model=model,
        inputs=torch.randn(BATCH, WIDTH),
        loss=lambda output: output.float().square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        autocast=torch.bfloat16 if kind is Widens else None,
    )


@pytest.mark.parametrize("kind", [Narrows, Widens])
def test_gradients_made_without_saved_tensors_are_not_there_yet(kind: type[nn.Module]) -> None:
    profile = planner.profile(build(kind), menus=False)
    expected = state_after(build(kind))
    for budget in budgets(profile):
        plan = planner.solve(profile, budget, solver="rotor")
        assert plan.recomputed_ops
        work = build(kind)
        with planner.apply(work.model, plan):
            assert_same(state_after(work), expected)
            assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", [Narrows, Widens])
def test_no_plan_takes_more_while_the_loop_holds_the_output_of_the_last_stage(
    kind: type[nn.Module], together: bool
) -> None:
    """Stages that are dropped one after the other run again each by itself, or together."""
    profile = planner.profile(build(kind), menus=False)
    choices = [[0] if record.kind == "outside" else [None, 0] for record in profile.stages]
    for choice in itertools.product(*choices):
        spans: list[Segment] = []
        for k, option in enumerate(choice):
            if together and option is None and spans and not spans[-1].kept:
                spans[-1] = Segment(spans[-1].start, k + 1)
            else:
                spans.append(Segment(k, k + 1, option))
        plan = following(profile, segmented_schedule(spans))
        assert max(peaks_of_steps(build(kind), plan, 1)) <= plan.predicted_peak_bytes, choice


def test_a_backward_that_needs_nothing_of_a_stage_runs_nothing_again() -> None:
    """Of the gradient of a stage's output alone, say."""
    work = build(Narrows)
    profile = planner.profile(work, menus=False)
    plan = planner.solve(profile, next(budgets(profile)), solver="rotor")
    runs: list[None] = []
    work.model.get_submodule("3.layer").register_forward_hook(lambda *_: runs.append(None))
    with planner.apply(work.model, plan):
        output = work.model(work.inputs)
        torch.autograd.grad(output.sum(), output)
    assert len(runs) == 1
