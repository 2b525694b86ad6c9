"""Other optimizers: what is computed for them equals what a profile with them measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import planner
from planner.capacity.levers import optimizer_named, replacements_for, with_optimizer
from planner.plans.cost_model import chain_of
from profiler.measurement.step_measurement import OptimizerCost, measure_optimizer
from profiler.records import Phase
from profiler.workload.workload import varied
from solvers import replay
from solvers.chain import baselines


def workload(make: Callable[..., torch.optim.Optimizer] | None = torch.optim.AdamW, **settings):
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = None if make is None else make(model.parameters(), **settings)
    return planner.Workload(
        model=model, inputs=torch.randn(64, 32), loss=lambda y: y.square().mean(), optimizer=optimizer
    )


def reasons(work):
    found = replacements_for(work, planner.profile(work, menus=False).resident.optimizer)
    return {each.lever.name: each.lever.reason for each in found}


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_the_computed_profile_is_the_measured_one(clip_norm):
    work = varied(workload(), clip_norm=clip_norm)
    profile = planner.profile(work, menus=False)
    found = replacements_for(work, profile.resident.optimizer)
    assert [each.lever.name for each in found if each.cost] == ["Adafactor", "SGD with momentum"]
    for each in found:
        assert each.cost is not None
        computed = with_optimizer(profile, each.cost)
        real = varied(work, optimizer=optimizer_named(each.lever.name, list(work.model.parameters())))
        measured = planner.profile(real, menus=False)
        assert computed.unplanned_peak_bytes == measured.unplanned_peak_bytes
        assert computed.resident == measured.resident
        assert (computed.optimizer.start_bytes, computed.optimizer.peak_bytes) == (
            measured.optimizer.start_bytes,
            measured.optimizer.peak_bytes,
        )
        chain = chain_of(computed)
        assert replay(chain, baselines.keep_all(chain)[0]).peak_bytes <= computed.unplanned_peak_bytes
        assert chain.optimizer_peak_bytes == measured.optimizer.peak_bytes


def test_states_of_sgd_are_one_momentum():
    work = workload()
    own = varied(work, optimizer=optimizer_named("SGD with momentum", list(work.model.parameters())))
    momentum_bytes = sum(4 * p.numel() for p in work.model.parameters())
    assert measure_optimizer(own).state_bytes == momentum_bytes
    _, sgd = replacements_for(work, momentum_bytes)
    assert sgd.cost is None and "keeps no less" in sgd.lever.reason
    _, sgd = replacements_for(work, momentum_bytes + 1)
    assert sgd.cost is not None and sgd.lever.applies


def test_measuring_leaves_the_workload_as_it_was():
    work = workload()
    before = [p.detach().clone() for p in work.model.parameters()]
    replacements_for(work, 10**6)
    assert all(torch.equal(a, b) for a, b in zip(before, work.model.parameters(), strict=True))
    assert all(p.grad is None for p in work.model.parameters())
    assert work.optimizer is not None and not work.optimizer.state


class Plenty(torch.optim.Optimizer):
    """Known to no formula: it keeps five copies of every parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter]["copies"] = torch.stack([parameter.detach()] * 5)


def test_an_optimizer_that_no_formula_knows_is_replaced_like_any_other():
    assert set(reasons(workload(Plenty)).values()) == {""}


def test_levers_that_do_not_apply_say_why():
    assert set(reasons(workload(None)).values()) == {"the workload has no optimizer"}
    sgd = reasons(workload(torch.optim.SGD, lr=0.1))
    assert sgd["SGD with momentum"] == "the workload has SGD already"
    factored = reasons(workload(torch.optim.Adafactor))
    assert factored["Adafactor"] == "the workload has Adafactor already"
    assert "keeps no less" in factored["SGD with momentum"]


def test_parameters_of_the_optimizers_own_stand_against_another():
    work = workload(None)
    copies = [p.detach().clone().requires_grad_() for p in work.model.parameters()]
    for parameter, copy in zip(work.model.parameters(), copies, strict=True):
        parameter.register_post_accumulate_grad_hook(lambda p, c=copy: setattr(c, "grad", p.grad.clone()))
    work = varied(work, optimizer=torch.optim.AdamW(copies))
    assert all("parameters of its own" in why for why in reasons(work).values())


@pytest.mark.parametrize("temporary_bytes", [0, 10**9])
def test_everything_stands_on_the_other_states_and_the_higher_moment_is_the_peak(temporary_bytes):
    """The other one keeps 1000 bytes less, and its step takes 5 seconds."""
    profile = planner.profile(workload(), menus=False)
    first, *others = profile.stages
    profile = replace(profile, stages=(replace(first, dropped=Phase()), *others))  # as where it cannot run again
    state_bytes = profile.resident.optimizer - 1000
    found = with_optimizer(
        profile, OptimizerCost(state_bytes=state_bytes, temporary_bytes=temporary_bytes, seconds=5.0)
    )
    step = max(phase.peak_bytes for stage in profile.stages for phase in (stage.forward, stage.backward)) - 1000
    own = profile.optimizer.start_bytes - 1000 + temporary_bytes
    assert found.unplanned_peak_bytes == (own if temporary_bytes else step) and own != step
    assert found.unplanned_seconds == pytest.approx(profile.unplanned_seconds - profile.optimizer.seconds + 5.0)
    assert [stage.dropped == Phase() for stage in found.stages] == [True] + [False] * len(others)
