"""Planned steps that send tensors to host memory: the same numbers, the predicted bytes, and nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import planner
from planner import zoo
from planner.plans import offload_request
from planner.runtime import applier
from planner.runtime.copy_engines import SimulatedCopyEngine
from profiler.workload.workload import Workload
from solvers import Chain, Schedule
from solvers.problem.chain import Link
from solvers.problem.schedule import Action
from tests.support.exactness import assert_same, choosing_inside, state_after
from tests.support.nightly import by_day
from tests.support.odd_models import workload
from tests.support.offload_plans import SCHEDULES, kept, planned

CASES = [("dropout", "kept"), ("dropout", "recomputed"), ("dropout", "halves"), ("dropout", "inside")]
CASES += [
    ("batchnorm", "kept"),
    ("batchnorm", "inside"),
    ("skip", "halves"),
    ("in_place", "kept"),
    ("in_place", "inside"),
]
MODELS = list(dict.fromkeys(name for name, _ in CASES))
STAGES = {name: ["down.*", "up.*"] if name == "skip" else ["blocks.*"] for name in MODELS}


@pytest.fixture(autouse=True)
def small_offload_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are tiny."""
    monkeypatch.setattr(offload_request, "SMALLEST_OFFLOAD_UNIT_BYTES", 64)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedCopyEngine]:
    """The engines of all plans that the test applies."""
    found: list[SimulatedCopyEngine] = []
    make = applier.engine_for

    def noted(*args: Any) -> Any:
        engine = make(*args)
        if isinstance(engine, SimulatedCopyEngine):
            found.append(engine)
        return engine

    monkeypatch.setattr(applier, "engine_for", noted)
    return found


@pytest.fixture(scope="module")
def profiles() -> Iterator[dict[str, planner.Profile]]:
    patch = pytest.MonkeyPatch()
    patch.setattr(offload_request, "SMALLEST_OFFLOAD_UNIT_BYTES", 64)
    yield {name: planner.profile(workload(name), stages=STAGES[name]) for name in MODELS}
    patch.undo()


@pytest.mark.parametrize(("name", "make"), CASES)
def test_what_travels_changes_no_number_and_takes_the_predicted_bytes(
    name: str, make: str, profiles: dict[str, planner.Profile], engines: list[SimulatedCopyEngine]
) -> None:
    expected = state_after(workload(name))
    plan = planned(profiles[name], SCHEDULES[make])
    work = workload(name)
    with planner.apply(work.model, plan):
        assert_same(state_after(work), expected)
        measured = planner.measure(work, repeats=1)
    assert measured.peak_bytes <= plan.predicted_peak_bytes
    assert plan.predicted_peak_bytes - measured.peak_bytes <= 0.02 * measured.peak_bytes
    assert engines[-1].memory.peak_bytes == plan.host_bytes > 0
    assert engines[-1].memory.held_bytes == 0


@pytest.fixture(scope="module")
def everything(profiles: dict[str, planner.Profile]) -> planner.Plan:
    """A plan of the model with dropout that recomputes, chooses inside, and sends all that may be sent."""
    return planned(profiles["dropout"], SCHEDULES["inside"])


@pytest.mark.parametrize("rate", [3e5, 1e7, 1e12, float("inf")])
def test_bytes_do_not_depend_on_how_fast_the_link_is(
    rate: float, profiles: dict[str, planner.Profile], engines: list[SimulatedCopyEngine]
) -> None:
    link = Link(to_host_bytes_per_second=rate, to_device_bytes_per_second=2 * rate, latency_seconds=1e-6)
    plan = planned(profiles["dropout"], kept, share=0.5, link=link)
    work, plain = workload("dropout"), workload("dropout")
    expected = gradients(plain)
    with planner.apply(work.model, plan):
        assert_same(gradients(work), expected)
        engine = engines[0]
        assert engine.memory.peak_bytes == plan.host_bytes and engine.memory.held_bytes == 0
        if rate > 1e6:
            measured = planner.measure(work, repeats=1)
            assert measured.peak_bytes == plan.predicted_peak_bytes
    if rate == 3e5:  # Far too slow: the computation waits for nearly all of it.
        assert engine.stall_seconds > 0.5 * plan.host_bytes / rate


Tensors = dict[int, torch.Tensor]


def gradients(work: Workload, step: Callable[[Workload], None] | None = None) -> Tensors:
    """Gradients of one step from a fixed seed."""
    torch.manual_seed(5)
    work.zero_grad()
    if step is None:
        work.forward().backward()
    else:
        step(work)
    found = [parameter.grad for parameter in work.model.parameters()]
    return {k: gradient.clone() for k, gradient in enumerate(found) if gradient is not None}


def numbered(tensors: Sequence[torch.Tensor]) -> Tensors:
    return dict(enumerate(tensors))


def tiny() -> Workload:
    """A step of hardly any work, with three stages."""
    torch.manual_seed(0)
    stages = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)) for _ in range(3)]
    model = torch.nn.Sequential(*stages)
    return Workload(model=model, inputs=torch.randn(16, 8, requires_grad=True), loss=lambda y: y.square().mean())


class Gated(torch.nn.Module):
    """Saves two views of a tensor that itself nobody saves, the second one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = torch.nn.Linear(32, 64, bias=False), torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.both(x)
        return x + self.out((both[:, :32].t() * both[:, 32:].t()).t())


def test_views_whose_base_nobody_saves_travel_with_all_of_it(engines: list[SimulatedCopyEngine]) -> None:
    def fresh() -> Workload:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[Gated() for _ in range(3)])
        return Workload(model=model, inputs=torch.randn(64, 32), loss=lambda y: y.square().mean())

    plan = planned(planner.profile(fresh(), stages=["0", "1", "2"]), kept)
    expected, work = gradients(fresh()), fresh()
    with planner.apply(work.model, plan):
        assert_same(gradients(work), expected)
        assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes
    views_bytes = 64 * 64 * 4  # of one block; those of two are away at once
    assert engines[0].memory.peak_bytes == plan.host_bytes >= 2 * views_bytes


@pytest.mark.parametrize("make", by_day(["kept", "recomputed"], ["recomputed"]))
def test_nothing_is_left_after_a_thousand_steps(make: str, engines: list[SimulatedCopyEngine]) -> None:
    work = tiny()
    plan = planned(planner.profile(work, stages=["0", "1", "2"]), SCHEDULES[make])
    with planner.apply(work.model, plan):
        engine = engines[0]
        work.step()
        gc.collect()
        gc.disable()  # Cycles would count: nothing collects them.
        try:
            objects = len(gc.get_objects())
            for _ in range(1000):
                work.step()
            assert len(gc.get_objects()) - objects < 100
        finally:
            gc.enable()
        assert engine.memory.held_bytes == 0 and engine.memory.peak_bytes == plan.host_bytes == len(engine.bytes) > 0


class Breaks(Exception):
    """What goes wrong in a step."""


def breaking(*_: Any) -> Any:
    raise Breaks


def test_an_exception_in_forward_or_backward_leaves_nothing_behind(
    engines: list[SimulatedCopyEngine], everything: planner.Plan
) -> None:
    work = workload("dropout")
    expected = gradients(workload("dropout"))
    blocks = next(iter(work.model.children()))
    assert isinstance(blocks, torch.nn.ModuleList)
    with planner.apply(work.model, everything):
        for block in (blocks[2], blocks[-1]):
            failing = block.register_forward_hook(breaking)
            with pytest.raises(Breaks):
                work.forward()
            failing.remove()
            assert engines[0].memory.held_bytes == 0
        failing = blocks[2].register_full_backward_pre_hook(breaking)
        with pytest.raises(Breaks):
            work.forward().backward()
        failing.remove()
        work.release()
        assert engines[0].memory.held_bytes == 0
        assert_same(gradients(work), expected)


def test_nothing_stays_in_host_memory_when_backward_never_comes(
    engines: list[SimulatedCopyEngine], everything: planner.Plan
) -> None:
    work = workload("dropout")
    with planner.apply(work.model, everything):
        gc.disable()  # No cycles: everything goes when the graph does.
        try:
            loss = work.forward()
            assert engines[0].memory.held_bytes > 0
            del loss
            work.release()
            assert engines[0].memory.held_bytes == 0
        finally:
            gc.enable()


@pytest.mark.parametrize("make", ["kept", "inside"])
def test_a_retained_graph_goes_backward_twice(
    make: str, profiles: dict[str, planner.Profile], engines: list[SimulatedCopyEngine]
) -> None:
    work, expected = workload("dropout"), gradients(workload("dropout"))
    parameters = list(work.model.parameters())
    with planner.apply(work.model, planned(profiles["dropout"], SCHEDULES[make])):
        torch.manual_seed(5)
        loss = work.forward()
        for again in (True, True, False):
            assert_same(numbered(torch.autograd.grad(loss, parameters, retain_graph=again)), expected)
        assert engines[0].memory.held_bytes == 0


@pytest.mark.parametrize("make", ["kept", "recomputed", "halves", "inside"])
def test_a_part_of_the_graph_is_differentiated_and_the_rest_later(
    make: str, profiles: dict[str, planner.Profile], engines: list[SimulatedCopyEngine]
) -> None:
    def in_parts(work: Workload) -> Tensors:
        torch.manual_seed(5)
        named = [(n, p) for n, p in work.model.named_parameters() if p.requires_grad]
        late = [p for n, p in named if n.startswith(("blocks.4.", "head."))]
        early = [p for n, p in named if n.startswith("blocks.1.")]
        loss = work.forward()
        found = list(torch.autograd.grad(loss, late, retain_graph=True))
        found += torch.autograd.grad(loss, early)
        work.release()
        return numbered(found)

    work = workload("dropout")
    with planner.apply(work.model, planned(profiles["dropout"], SCHEDULES[make])):
        assert_same(in_parts(work), in_parts(workload("dropout")))
        assert engines[0].memory.held_bytes == 0


def test_two_graphs_alive_at_once_share_the_host_memory_and_say_what_does_not_fit(
    profiles: dict[str, planner.Profile], engines: list[SimulatedCopyEngine]
) -> None:
    def both(work: Workload) -> None:
        first, second = work.forward(), work.forward()
        second.backward()
        first.backward()

    work, expected = workload("dropout"), gradients(workload("dropout"), both)
    plan = planned(profiles["dropout"], kept)
    with planner.apply(work.model, plan):
        with pytest.warns(RuntimeWarning, match="host memory is full"):
            assert_same(gradients(work, both), expected)
        assert engines[0].memory.held_bytes == 0 and engines[0].memory.peak_bytes <= plan.host_bytes


def test_gradients_accumulate_over_micro_steps(everything: planner.Plan, engines: list[SimulatedCopyEngine]) -> None:
    def three(work: Workload) -> None:
        for _ in range(3):
            (work.forward() / 3).backward()

    work = workload("dropout")
    with planner.apply(work.model, everything):
        assert_same(gradients(work, three), gradients(workload("dropout"), three))
        assert engines[0].memory.held_bytes == 0


def test_under_autocast_the_same_bytes_travel(engines: list[SimulatedCopyEngine]) -> None:
    profile = planner.profile(workload("dropout", autocast=torch.bfloat16))
    for make in (kept, choosing_inside):
        plan = planned(profile, make)
        work = workload("dropout", autocast=torch.bfloat16)
        with planner.apply(work.model, plan):
            assert_same(state_after(work), state_after(workload("dropout", autocast=torch.bfloat16)))
            assert planner.measure(work, repeats=1).peak_bytes <= plan.predicted_peak_bytes
        assert engines[-1].memory.peak_bytes == plan.host_bytes > 0


@pytest.mark.parametrize("make", ["kept", "halves"])
def test_with_other_shapes_nothing_of_a_kept_stage_travels_and_all_is_right(
    make: str, profiles: dict[str, planner.Profile], engines: list[SimulatedCopyEngine]
) -> None:
    work, other = workload("dropout"), workload("dropout")
    for each in (work, other):
        each.inputs = each.inputs[:-3]  # type: ignore[index]
    with planner.apply(work.model, planned(profiles["dropout"], SCHEDULES[make])):
        with pytest.warns(RuntimeWarning, match="other tensors than when profiled"):
            assert_same(gradients(work), gradients(other))
        assert engines[0].memory.held_bytes == 0


def sent_late(chain: Chain) -> Schedule:
    """Everything is kept; what stage 3 saves is sent as its forward ends, and let go of after the last forward."""
    actions: list[Action] = []
    units = range(len(chain.stages[3].options[0].offload_units))
    for action in kept(chain).actions:
        actions.append(action)
        if action == Action("forward", 3, 0):
            actions += [Action("send", 3, i) for i in units]
        if action == Action("forward", len(chain.stages) - 1, 0):
            actions += [Action("release", 3, i) for i in units]
        if action == Action("backward", 5):
            actions += [Action("fetch", 3, i) for i in units]
    return Schedule(tuple(actions))


def test_a_saved_tensor_changed_in_place_is_refused_as_without_a_plan(profiles: dict[str, planner.Profile]) -> None:
    def changed(work: Workload) -> None:
        caught: list[torch.Tensor] = []

        def change(*_: Any) -> None:
            with torch.no_grad():
                caught.pop().add_(1)

        saved, later = (work.model.get_submodule(name) for name in ("blocks.2.inner.2", "blocks.4"))
        hooks = [saved.register_forward_hook(lambda *given: caught.append(given[-1]))]
        hooks.append(later.register_forward_pre_hook(change))
        loss = work.forward()
        for hook in hooks:
            hook.remove()
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed(workload("dropout"))
    work, plan = workload("dropout"), planned(profiles["dropout"], sent_late)
    with planner.apply(work.model, plan), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed(work)


def with_option(number: int) -> Callable[[Chain], Schedule]:
    """Every second stage as its program of this number, or its last; the others are kept."""

    def option(chain: Chain, action: Action) -> int | None:
        if action.option is None or action.stage % 2:
            return action.option
        return min(number, len(chain.stages[action.stage].options) - 1)

    def make(chain: Chain) -> Schedule:
        return Schedule(tuple(replace(action, option=option(chain, action)) for action in kept(chain).actions))

    return make


@pytest.mark.filterwarnings("error:planned stage")
@pytest.mark.nightly
def test_beside_every_program_of_a_transformers_block_what_others_keep_travels(
    engines: list[SimulatedCopyEngine],
) -> None:
    settings = {"layers": 3, "batch": 2, "hidden": 32, "seq": 32, "vocab": 100}
    blocks = planner.profile(zoo.build("gpt2", **settings), stages=["transformer.h.*"])
    expected = gradients(zoo.build("gpt2", **settings))
    for number in range(1, 1 + max(len(menu.options) for menu in blocks.menus)):
        plan, work = planned(blocks, with_option(number)), zoo.build("gpt2", **settings)
        assert {"selective", "offload"} <= {stage.decision for stage in plan.stages}
        with planner.apply(work.model, plan):
            assert_same(gradients(work), expected)
            assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes
        assert engines[-1].memory.peak_bytes == plan.host_bytes > 0


def test_on_a_device_without_streams_nothing_travels_which_is_said(
    profiles: dict[str, planner.Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applier, "model_device", lambda _: torch.device("meta"))
    work, plan = workload("dropout"), planned(profiles["dropout"], sent_late)
    with pytest.warns(RuntimeWarning, match="meta cannot copy beside its computation; nothing is sent"):
        handle = planner.apply(work.model, plan)
    with handle:
        assert_same(gradients(work), gradients(workload("dropout")))
        assert planner.measure(work, repeats=1).peak_bytes == profiles["dropout"].unplanned_peak_bytes


def test_the_engine_is_that_of_the_device_that_the_model_is_on(
    everything: planner.Plan, engines: list[SimulatedCopyEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    work, model_device = workload("dropout"), applier.model_device
    monkeypatch.setattr(applier, "model_device", lambda _: torch.device("meta"))
    with pytest.warns(RuntimeWarning, match="nothing is sent"):
        handle = planner.apply(work.model, everything)
    monkeypatch.setattr(applier, "model_device", model_device)
    with handle:
        work.step()
        work.step()
        assert len(engines) == 1 and engines[0].memory.peak_bytes == everything.host_bytes
