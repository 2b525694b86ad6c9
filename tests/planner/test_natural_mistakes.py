# pyright: reportArgumentType=false, reportCallIssue=false
"""Mistakes that people make in Python: each is answered in a sentence that names its cause and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import planner
from tests.support.small_blocks import Residual

X = torch.randn(2048, 16)


def squared(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def workload(**changed: Any) -> planner.Workload:
    return planner.Workload(**{"model": model(), "inputs": X, "loss": squared, **changed})


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    work = workload()
    profile = planner.profile(work, menus=False)
    return {"work": work, "profile": profile, "plan": planner.solve(profile, "100%")}


# Each with words of the cause and of the remedy.
MISTAKES: list[tuple[Callable[[dict[str, Any]], Any], str, str]] = [
    (lambda made: planner.profile(model()), "expected a planner.Workload, got a Sequential", "planner.Workload("),
    (lambda made: planner.Workload(model=nn.Linear, inputs=X), "got type", "pass one"),
    (lambda made: planner.Workload(model=model()), "it has no inputs", "pass inputs=batch"),
    (lambda made: workload(inputs=torch.utils.data.DataLoader([X])), "got DataLoader", "pass one batch of it"),
    (lambda made: workload(loss=X.mean()), "expected loss to be callable", "pass one"),
    (lambda made: workload(loss=nn.MSELoss()), "takes input and target, and", "lambda output: loss(output, target)"),
    (lambda made: workload(optimizer=torch.optim.Adam), "got type", "pass an instance"),
    (lambda made: workload(clip_norm=1.0), "beside scaler and clip_norm, got none", "pass optimizer="),
    (lambda made: planner.Workload(model=model(), step=squared(X)), "function of no arguments", "got Tensor"),
    (lambda made: planner.profile(workload(loss=None)), "a tensor of shape (2048, 16)", "pass loss="),
    (lambda made: planner.profile(workload(model=model().eval())), "eval mode", "call model.train()"),
    (lambda made: planner.profile(workload(model=model().requires_grad_(False))), "nothing trained", "unfreeze"),
    (lambda made: planner.profile(workload(inputs=torch.randn(8, 15))), "mat1 and mat2", "correct the model"),
    (lambda made: planner.profile(workload(), stages=["layers.*"]), "'layers.*'", "nearest: 0, 1, 2"),
    (lambda made: planner.solve(made["profile"], 0.8), "got 0.8", "write 80%"),
    (lambda made: planner.solve(made["profile"], "0.8"), "without a unit", "write 80%"),
    (lambda made: planner.solve(made["profile"], 80), "80 bytes (80 B;", "did you mean 80%?"),
    (lambda made: planner.solve(made["profile"], "80%", solver="ilpp"), "got 'ilpp'", "did you mean ilp?"),
    (lambda made: planner.solve(made["work"], "80%"), "a Workload is neither", "profile it first"),
    (lambda made: planner.solve(made["plan"], "80%"), "a Plan is neither", "pass the profile that it was made from"),
    (lambda made: planner.apply(made["plan"], model()), "a Plan, not a", "the model first"),
    (lambda made: planner.apply(made["work"], made["plan"]), "a Workload, not a", "pass workload.model"),
    (lambda made: planner.apply(model(), made["profile"]), "a Profile is neither", "solve it first"),
    (lambda made: planner.apply(Residual(), made["plan"]), "this Residual differs", "profile and solve for this model"),
    (lambda made: planner.apply(model(), "nothere.json"), "no file of that name", "check the path"),
    (lambda made: planner.verify(made["work"], made["profile"]), "a Profile is neither", "solve it first"),
    (lambda made: planner.verify(made["plan"], made["work"]), "got a Plan", "planner.Workload("),
    (lambda made: planner.verify(model(), made["plan"]), "got a Sequential", "planner.Workload("),
    (lambda made: planner.measure(model()), "got a Sequential", "planner.Workload("),
    (lambda made: planner.max_batch(made["work"], "8GiB"), "got a Workload", "lambda batch: planner.Workload("),
    (lambda made: planner.pareto(made["work"]), "a Workload is neither", "profile it first"),
    (lambda made: planner.pareto(made["plan"]), "a Plan is neither", "pass the profile that it was made from"),
]


@pytest.mark.parametrize(("mistake", "cause", "remedy"), MISTAKES)
def test_a_mistake_is_answered_with_cause_and_remedy(made, mistake, cause, remedy):
    with pytest.raises(ValueError) as caught:
        mistake(made)
    message = str(caught.value)
    assert cause in message and remedy in message


def test_what_a_step_is_told_stands_alone():
    """No second remedy that does not help."""
    other = model()
    for step, cause in (
        (lambda: squared(other(X)).backward(), "does not call the model"),
        (lambda: None, "does not call the model"),
    ):
        with pytest.raises(planner.errors.ProfileError, match=cause) as caught:
            planner.profile(planner.Workload(model=model(), step=step))
        assert "correct the model" not in str(caught.value)


def test_model_and_batch_need_no_names():
    assert planner.Workload(model(), X, loss=squared).inputs is X
