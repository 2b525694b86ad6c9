"""Plans of single ops that send values to host memory: the same numbers, the predicted bytes, nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.compiled import host_copies
from planner.plans.offload_request import Offload
from planner.runtime import plan_checks
from planner.runtime.simulated_link import SimulatedCopy, SimulatedCopyEngine
from profiler.graph_profile import GraphProfile

WIDTH, BATCH = 32, 64
ENDLESS = float("inf")


class Dense(nn.Module):
    """Each layer reads what all layers before it have made; norms, and random numbers."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH * (k + 1), WIDTH) for k in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(layers))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            made.append(self.drop(torch.nn.functional.gelu(norm(layer(torch.cat(made, 1))))))
        return torch.cat(made, 1)


def work_of(model: Callable[[], nn.Module] = Dense, **more: Any) -> planner.Workload:
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    inputs = torch.randn(BATCH, WIDTH)
    return planner.Workload(model=net, inputs=inputs, loss=lambda y: y.square().mean(), optimizer=optimizer, **more)


@pytest.fixture(scope="module")
def profiled() -> GraphProfile:
    return planner.profile(work_of(), graph=True)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedCopyEngine]:
    """Those that the test's plans make."""
    found: list[SimulatedCopyEngine] = []
    make = host_copies.engine_on

    def noted(*args: Any) -> Any:
        engine = make(*args)
        assert isinstance(engine, SimulatedCopyEngine)
        found.append(engine)
        return engine

    monkeypatch.setattr(host_copies, "engine_on", noted)
    return found


def plan_of(profile: GraphProfile, share: float, gbps: float = ENDLESS, **more: Any) -> planner.GraphPlan:
    """For a share of the room between the least and the unplanned peak; of ops so small, no gap ends the search."""
    with pytest.raises((planner.Infeasible, planner.NothingFound)) as refused:
        planner.solve(profile, 1, time_limit_seconds=2, offload="never")
    least = refused.value.minimum_budget_bytes
    budget = least + int(share * (profile.unplanned_peak_bytes - least))
    return planner.solve(profile, budget, time_limit_seconds=1, gap=0.0, offload=Offload(link_gbps=gbps, **more))


@pytest.fixture(scope="module")
def plan(profiled: GraphProfile) -> planner.GraphPlan:
    return plan_of(profiled, 0.2)


@pytest.fixture(scope="module")
def without(profiled: GraphProfile) -> planner.GraphPlan:
    return planner.solve(profiled, profiled.unplanned_peak_bytes, offload="never")


def trained(work: planner.Workload) -> list[Tensor]:
    """Losses of three steps, parameters, buffers, and what the generator has come to."""
    torch.manual_seed(1)
    losses = [work.step() for _ in range(3)]
    return [torch.tensor(losses), *work.model.parameters(), *work.model.buffers(), torch.get_rng_state()]


def gradients(work: planner.Workload, output: Tensor | None = None, **more: Any) -> list[Tensor]:
    torch.manual_seed(1)
    work.zero_grad()
    (work.model(work.inputs) if output is None else output).square().mean().backward(**more)
    return [p.grad.clone() for p in work.model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("share", "mode"), [(0.0, "auto"), (0.2, "auto"), (0.6, "auto"), (0.6, "only")])
def test_what_travels_changes_no_number_and_takes_the_predicted_bytes(
    share: float, mode: Any, profiled: GraphProfile, without: planner.GraphPlan, engines: list[SimulatedCopyEngine]
) -> None:
    plan = plan_of(profiled, share, mode=mode)
    assert plan.copies
    measured, plain, planned = work_of(), work_of(), work_of()
    with planner.apply(measured.model, plan):
        assert planner.measure(measured, repeats=1).peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes
    assert engines[-1].memory.peak_bytes == plan.host_bytes > 0
    with planner.apply(plain.model, without):
        expected = trained(plain)
    with planner.apply(planned.model, plan):
        assert all(map(torch.equal, trained(planned), expected))
    assert engines[-1].memory.held_bytes == 0


@pytest.mark.parametrize("gbps", [1e-3, 1.0, ENDLESS])
def test_bytes_do_not_depend_on_how_fast_the_link_is(
    gbps: float, plan: planner.GraphPlan, engines: list[SimulatedCopyEngine]
) -> None:
    rate = gbps * 1e9
    assert plan.link is not None
    other = replace(plan, link=replace(plan.link, to_host_bytes_per_second=rate, to_device_bytes_per_second=rate))
    work = work_of()
    with planner.apply(work.model, other):
        assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes
    engine = engines[-1]
    assert engine.memory.peak_bytes == plan.host_bytes and engine.memory.held_bytes == 0
    if gbps == 1e-3:  # Far too slow: the computation waits for nearly all of it.
        assert engine.stall_seconds > 0.5 * plan.host_bytes / rate


def test_evaluation_and_gradients_that_add_up_are_as_without(
    plan: planner.GraphPlan, without: planner.GraphPlan, engines: list[SimulatedCopyEngine]
) -> None:
    found: list[list[Tensor]] = []
    for each in (plan, without):
        work = work_of()
        with planner.apply(work.model, each):
            torch.manual_seed(1)
            for _ in range(2):
                work.forward().backward()
                with torch.no_grad():
                    seen = work.model(work.inputs)
            found.append([seen, *(p.grad for p in work.model.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *found))
    assert engines[-1].memory.held_bytes == 0


def test_nothing_stays_in_host_memory_when_backward_never_comes_or_fails(
    plan: planner.GraphPlan, engines: list[SimulatedCopyEngine]
) -> None:
    work = work_of()

    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    with planner.apply(work.model, plan):
        expected = gradients(work)
        output = work.model(work.inputs)
        assert engines[-1].memory.held_bytes == plan.host_bytes
        del output
        assert engines[-1].memory.held_bytes == 0
        output = work.model(work.inputs)
        hook = next(iter(work.model.parameters())).register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            output.square().mean().backward()
        hook.remove()
        del output
        gc.collect()
        assert engines[-1].memory.held_bytes == 0
        assert all(map(torch.equal, gradients(work), expected))


def test_an_error_in_forward_leaves_nothing_behind(
    plan: planner.GraphPlan, engines: list[SimulatedCopyEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_of()
    with planner.apply(work.model, plan):
        expected = gradients(work)
        send, left = SimulatedCopyEngine.send, [2]

        def failing(self: SimulatedCopyEngine, source: Tensor) -> Any:
            if not left[0]:
                raise MemoryError("on purpose")
            left[0] -= 1
            return send(self, source)

        with monkeypatch.context() as patch:
            patch.setattr(SimulatedCopyEngine, "send", failing)
            with pytest.raises(MemoryError, match="on purpose"):
                work.model(work.inputs)
        gc.collect()
        assert engines[-1].memory.held_bytes == 0
        assert all(map(torch.equal, gradients(work), expected))


def test_two_graphs_alive_at_once_share_the_host_memory_and_say_what_does_not_fit(
    plan: planner.GraphPlan, engines: list[SimulatedCopyEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_checks, "_WARNED", set())
    work = work_of()
    with planner.apply(work.model, plan):
        expected = gradients(work)
        torch.manual_seed(1)
        first = work.model(work.inputs)
        with pytest.warns(RuntimeWarning, match="host memory is full"):
            second = work.model(work.inputs)
        del second
        assert all(map(torch.equal, gradients(work, first), expected))
        del first
        assert engines[-1].memory.held_bytes == 0


def test_steps_leave_no_copies_to_the_collector(plan: planner.GraphPlan, engines: list[SimulatedCopyEngine]) -> None:
    work = work_of()
    with planner.apply(work.model, plan):
        work.step()
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                work.step()
                assert engines[-1].memory.held_bytes == 0
            assert not any(isinstance(each, SimulatedCopy) for each in gc.get_objects())
        finally:
            gc.enable()


def test_inductor_and_hooks_on_saved_tensors_are_refused_in_words(plan: planner.GraphPlan) -> None:
    work = work_of()
    with pytest.raises(ValueError, match="solve with offload='never'"):
        planner.apply(work.model, plan, backend="inductor")
    with planner.apply(work.model, plan):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            output = work.model(work.inputs)
        with pytest.raises(RuntimeError, match="train without hooks on saved tensors"):
            output.sum().backward()


def test_a_plan_that_sends_is_verified_over_its_own_link(profiled: GraphProfile, plan: planner.GraphPlan) -> None:
    tight = replace(plan, budget_bytes=plan.predicted_peak_bytes - 1)
    verified = planner.verify(work_of(), tight, profile=profiled, time_limit_seconds=2)
    assert len(verified.rounds) == 2
    assert verified.plan.link == plan.link and verified.rounds[-1].peak_bytes <= tight.budget_bytes
