"""Plans of single ops compiled by Inductor: values as Inductor's own, random numbers as without a plan, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.graph_profile import GraphProfile

WIDTH, BATCH = 16, 128


class Dense(nn.Module):
    """Each layer reads what all layers before it have made; every dropout draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH * (k + 1), WIDTH) for k in range(3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        made = [x * torch.tensor([2.0])]
        for layer in self.layers:
            made.append(self.drop(torch.nn.functional.gelu(layer(torch.cat(made, 1)))))
        return torch.cat(made, 1)


def work_of(**more: Any) -> planner.Workload:
    torch.manual_seed(0)
    net = Dense()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inputs = torch.randn(BATCH, WIDTH)
    return planner.Workload(model=net, inputs=inputs, loss=lambda y: y.square().mean(), optimizer=optimizer, **more)


@pytest.fixture(scope="module")
def profiled() -> GraphProfile:
    return planner.profile(work_of(), graph=True)


def smallest_plan(profile: GraphProfile) -> planner.GraphPlan:
    with pytest.raises((planner.Infeasible, planner.NothingFound)) as refused:
        planner.solve(profile, 1, time_limit_seconds=2)
    return planner.solve(profile, refused.value.minimum_budget_bytes, time_limit_seconds=2)


def trained(work: planner.Workload) -> list[Tensor]:
    """Losses of two steps, parameters, and what the generator has come to."""
    torch.manual_seed(1)
    losses = [work.step() for _ in range(2)]
    return [torch.tensor(losses), *work.model.parameters(), torch.get_rng_state()]


@pytest.mark.slow
def test_values_and_random_numbers_are_those_of_inductor_without_a_plan(profiled: GraphProfile) -> None:
    plan = smallest_plan(profiled)
    again = {plan.graph.ops[ordinal].kind for ordinal in {*plan.runs.forward} & {*plan.runs.backward}}
    assert again & {"bernoulli", "native_dropout"}
    plain, planned = work_of(), work_of()
    plain.model.forward = torch.compile(plain.model.forward, backend="inductor", options={"fallback_random": True})
    with planner.apply(planned.model, plan, backend="inductor"):
        torch.testing.assert_close(trained(planned), trained(plain))
        assert planner.measure(planned, repeats=1).peak_bytes < profiled.unplanned_peak_bytes


def test_a_compiler_or_a_plan_that_cannot_be_is_refused(profiled: GraphProfile) -> None:
    work, plan = work_of(), planner.solve(profiled, "90%")
    with pytest.raises(ValueError, match="expected one of .*'eager', 'inductor'.* got 'fast'"):
        planner.apply(work.model, plan, backend="fast")  # type: ignore[arg-type]
    stages = planner.solve(planner.profile(work), "100%")
    with pytest.raises(ValueError, match="expected 'eager' for a plan of stages"):
        planner.apply(work.model, stages, backend="inductor")
    from torch._inductor import config

    missing = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(ValueError, match=r"expected a C\+\+ compiler"):
        planner.apply(work.model, plan, backend="inductor")
