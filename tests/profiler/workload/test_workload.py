"""The one loop of a training step: its phases in order, and what is alive as each of them begins."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.workload.steps import resident_bytes_of
from profiler.workload.workload import StepPhase, Workload
from tests.support.odd_models import workload


def test_a_step_tells_its_phases_and_gives_the_loss_to_backward_alone() -> None:
    work = workload("plain")
    told: list[tuple[StepPhase, bool]] = []
    gradients: list[bool] = []

    def on_phase(phase: StepPhase, loss: Tensor | None) -> None:
        told.append((phase, loss is not None))
        gradients.append(any(p.grad is not None for p in work.model.parameters()))

    work.step()
    loss = work.step(on_phase)
    assert told == [("forward", False), ("backward", True), ("optimizer", False), ("end", False)]
    assert gradients == [False, False, True, True]
    assert loss > 0


def test_the_optimizer_s_phase_begins_though_there_is_none() -> None:
    phases: list[StepPhase] = []
    work = Workload(model=nn.Linear(2, 2), inputs=torch.ones(1, 2), loss=torch.sum)
    work.step(lambda phase, _: phases.append(phase))
    assert phases == ["forward", "backward", "optimizer", "end"]


class Companion:
    """Lives as long as the node of the graph that it is given to."""


class Accompanied(nn.Module):
    """A loss whose graph can be seen going."""

    companion: weakref.ref[Companion] | None = None

    def forward(self, x: Tensor) -> Tensor:
        loss, companion = x.square().sum(), Companion()
        node: Any = loss.grad_fn
        node.metadata["companion"] = companion
        self.companion = weakref.ref(companion)
        return loss


def test_the_graph_is_gone_before_the_optimizer_s_step() -> None:
    loss = Accompanied()
    alive: dict[StepPhase, bool] = {}

    def on_phase(phase: StepPhase, _: Tensor | None) -> None:
        alive[phase] = loss.companion is not None and loss.companion() is not None

    Workload(model=nn.Linear(2, 2), inputs=torch.ones(1, 2), loss=loss, keeps_output=False).step(on_phase)
    assert alive == {"forward": False, "backward": True, "optimizer": False, "end": False}


def test_output_and_loss_stay_bound_until_the_next_ones_come() -> None:
    outputs: list[weakref.ref[Tensor]] = []
    alive: list[list[bool]] = []

    def loss(output: Tensor) -> Tensor:
        outputs.append(weakref.ref(output))
        return output.square().sum()

    work = Workload(model=nn.Linear(2, 2), inputs=torch.ones(1, 2), loss=loss)
    for _ in range(2):
        work.step(lambda phase, _: alive.append([output() is not None for output in outputs]))
    assert alive == [[], [True], [True], [True], [True], [False, True], [False, True], [False, True]]
    work.release()
    assert [output() for output in outputs] == [None, None]


@pytest.mark.parametrize(("keeps", "held"), [(True, (64 * 500 + 1) * 4), (False, 0)])
def test_the_held_output_is_in_the_profile_and_in_what_a_step_is_measured_to_take(keeps: bool, held: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 500))
    work = Workload(model=model, inputs=torch.ones(64, 8), loss=cross_entropy_to_zero, keeps_output=keeps)
    profile = planner.profile(work, stages=["1", "2"])
    states = sum(p.numel() * 4 for p in model.parameters()) + 64 * 8 * 4
    # At the begin of its backward the loss has saved log-softmax's output and the total weight beside the logits.
    backward = profile.stages[-1].backward
    assert (profile.resident.loop, profile.stages[0].forward.start_bytes) == (held, states + held)
    assert backward.start_bytes >= states + held + 64 * 500 * 4
    assert planner.measure(work).peak_bytes == profile.unplanned_peak_bytes


class Returning(nn.Module):
    """Returns its logits and losses in some form."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(4, 4), form

    def forward(self, x: Tensor) -> Any:
        logits = self.linear(x)
        return self.form(logits, logits.square().mean(), logits.abs().mean())


@dataclass
class Result:
    logits: Tensor
    nll: Tensor


class WithoutLabels(Result):
    loss = None


@pytest.mark.parametrize(
    "form",
    [
        lambda logits, loss, other: (logits, loss),
        lambda logits, loss, other: [loss, logits, other.detach()],
        lambda logits, loss, other: {"logits": logits, "nll": loss},
        lambda logits, loss, other: (logits, {"losses": [loss.view(1)]}),
        lambda logits, loss, other: Result(logits, loss),
        lambda logits, loss, other: {"loss": loss, "aux": other},
    ],
)
def test_the_one_scalar_of_an_output_is_its_loss(form: Any) -> None:
    torch.manual_seed(0)
    model, x = Returning(form), torch.rand(3, 4)
    assert Workload(model=model, inputs=x).step() == model.linear(x).square().mean().item()


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (lambda logits, loss, other: {"a": loss, "b": other}, r"2 scalars .* loss=lambda output: sum\(output.values"),
        (lambda logits, loss, other: (loss, other, logits), r"2 scalars .* loss=lambda output: output\[0\]"),
        (lambda logits, loss, other: (logits, loss.detach()), "pass loss=, a callable on the model's output"),
        (lambda logits, loss, other: WithoutLabels(logits, loss), "pass loss=, a callable on .* or labels in the"),
    ],
)
def test_what_may_or_may_not_be_the_loss_is_asked_for(form: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Workload(model=Returning(form), inputs=torch.rand(3, 4)).step()


def cross_entropy_to_zero(logits: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def test_targets_that_the_loss_refers_to_are_a_part_of_the_batch() -> None:
    target, x = torch.ones(64, 500), torch.ones(64, 8)
    work = Workload(model=nn.Linear(8, 500), inputs=x, loss=lambda output: (output - target).square().mean())
    assert planner.profile(work, menus=False).resident.inputs == (64 * 500 + 64 * 8) * 4


class Distance(nn.Module):
    """A loss that keeps its target in one of several ways."""

    def __init__(self, target: Tensor, how: str) -> None:
        super().__init__()
        if how == "buffer":
            self.register_buffer("target", target)
            self.of = lambda output: (output - self.target).square().mean()
        else:
            self.of = lambda output: (output - target).square().mean()

    def forward(self, output: Tensor) -> Tensor:
        return self.of(output)


@pytest.mark.parametrize("how", ["buffer", "function"])
def test_what_a_loss_that_is_a_module_holds_counts(how: str) -> None:
    model = nn.Linear(8, 4)
    target = torch.randn(16, 4)
    held, plain = (
        resident_bytes_of(Workload(model=model, inputs=torch.randn(16, 8), loss=loss)).total
        for loss in (Distance(target, how), nn.Identity())
    )
    assert held - plain == target.nbytes
