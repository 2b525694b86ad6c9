"""The one loop of a training step: its phases in order, and what is alive as each of them begins."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

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

    Workload(model=nn.Linear(2, 2), inputs=torch.ones(1, 2), loss=loss).step(on_phase)
    assert alive == {"forward": False, "backward": True, "optimizer": False, "end": False}
