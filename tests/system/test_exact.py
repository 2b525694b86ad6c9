"""A planned model computes what the unplanned one computes, bit for bit, and takes the bytes that were predicted."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import planner
from planner.plans.cost_model import chain_of
from planner.runtime.dropped_stage import DroppedStage
from profiler.recomputation import module_rerun
from profiler.workload.workload import Workload
from solvers import replay
from solvers.chain.baselines import Segment, droppable_runs, segmented_schedule
from tests.support.exactness import assert_same, budgets, choosing_inside, following, state_after
from tests.support.nightly import by_day
from tests.support.odd_models import MODELS, workload


class CountOps(TorchDispatchMode):
    """Counts the model's aten ops: not ``detach``, and none of the applier's own bookkeeping."""

    muted = False

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.count, self._kind = 0, kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = not self._kind or func._schema.name == f"aten::{self._kind}"
        if named and func is not torch.ops.aten.detach.default and not CountOps.muted:
            self.count += 1
        return func(*args, **(kwargs or {}))


def muted(call: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        before, CountOps.muted = CountOps.muted, True
        try:
            return call(*args, **kwargs)
        finally:
            CountOps.muted = before

    return run


def muted_around(manager: Any) -> Any:
    @contextmanager
    def run(*args: Any) -> Iterator[None]:
        entered = manager(*args)
        muted(entered.__enter__)()
        try:
            yield
        finally:
            muted(entered.__exit__)(None, None, None)

    return run


@pytest.fixture
def bookkeeping_muted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_rerun.CallState, "__init__", muted(module_rerun.CallState.__init__))
    monkeypatch.setattr(module_rerun.CallState, "reinstated", muted_around(module_rerun.CallState.reinstated))


RANDOM_STATE_BYTES = torch.get_rng_state().nbytes


@functools.cache
def profiled(name: str) -> planner.Profile:
    """The profile of a model as ``workload`` builds it."""
    return planner.profile(workload(name))


BY_DAY = ["dropout", "in_place"]


@pytest.mark.parametrize("name", by_day(MODELS, BY_DAY))
def test_every_plan_is_exact_and_takes_the_predicted_bytes(name: str) -> None:
    profile = profiled(name)
    expected = state_after(workload(name))
    for budget in budgets(profile):
        plan = planner.solve(profile, budget, solver="rotor")
        work = workload(name)
        with planner.apply(work.model, plan):
            assert_same(state_after(work), expected)
            measured = planner.measure(work, repeats=1)
        if name == "remembers":
            continue  # What a model stored on itself in the step before is not known as resident.
        assert measured.peak_bytes <= plan.predicted_peak_bytes <= budget
        assert plan.predicted_peak_bytes - measured.peak_bytes <= 0.02 * measured.peak_bytes


KEPT = ["plain", "dropout", "batchnorm", "skip", "sequential", "tuple", "shared", "in_place"]


@pytest.mark.parametrize("name", by_day(KEPT[:-1], ["tuple"]))
def test_keeping_everything_replays_the_measured_peak_exactly(name: str) -> None:
    work = workload(name)
    profile = planner.profile(work)
    plan = planner.solve(profile, profile.unplanned_peak_bytes)
    assert plan.recomputed_ops == 0 and plan.status == "optimal"
    assert replay(chain_of(profile), plan.schedule).peak_bytes == profile.unplanned_peak_bytes
    assert planner.measure(work, repeats=1).peak_bytes == profile.unplanned_peak_bytes


def extra_ops(work: Workload, plan: planner.Plan) -> int:
    """Ops of a planned step beyond those of a plain one."""
    work.step()  # Momentum is made in the first step only.
    with CountOps() as plain:
        work.step()
    with planner.apply(work.model, plan), CountOps() as planned:
        work.step()
    return planned.count - plain.count


@pytest.mark.parametrize("name", ["plain", "dropout", "batchnorm", "skip", "tuple", "in_place"])
def test_extra_ops_are_those_of_the_plan(name: str, bookkeeping_muted: None) -> None:
    work = workload(name)
    profile = planner.profile(work, menus=False)
    plan = planner.solve(profile, next(budgets(profile)), solver="rotor")
    assert plan.recomputed_ops > 0
    assert extra_ops(work, plan) == plan.recomputed_ops


@pytest.mark.parametrize("name", by_day(["plain", "dropout", "batchnorm", "skip", "in_place"], ["dropout", "in_place"]))
def test_programs_run_the_ops_of_the_plan(name: str) -> None:
    work = workload(name)
    profile = profiled(name)
    plan = following(profile, choosing_inside(chain_of(profile)))
    assert any(a.option for a in plan.schedule.actions)
    options = {a.stage: a.option for a in plan.schedule.actions if a.option}
    expected = 0
    for k, stage in enumerate(plan.stages):
        if stage.menu < 0:
            continue
        menu = plan.menus[stage.menu]
        if k not in options:  # One that is not captured runs again up to the last tensor that it saves.
            expected += [op.kind for op in menu.ops.ops[: stage.extra_ops]].count("addmm")
            continue
        assert menu.graph is not None
        runs = menu.options[options[k] - 1].runs
        forward = [menu.graph.ops[ordinal].kind for ordinal in runs.forward]
        again = [menu.graph.ops[ordinal].kind for ordinal in runs.again.elements()]
        assert stage.extra_ops == (stage.runs - 1) * len(forward) + len(again)
        expected += (stage.runs - 1) * forward.count("addmm") + again.count("addmm")
    with CountOps("addmm") as plain:
        work.step()
    with planner.apply(work.model, plan), CountOps("addmm") as planned:
        work.step()
    assert planned.count - plain.count == expected > 0


def test_what_nobody_takes_of_a_stage_run_again_does_not_outlive_it() -> None:
    work = workload("explains")
    profile = planner.profile(work, menus=False)
    chain = chain_of(profile)
    (first, end) = next((run.start, run.end) for run in droppable_runs(chain) if not run.kept)
    for k in range(first, end - 1):
        before = [Segment(j, j + 1, option=0) for j in range(k)]
        after = [Segment(j, j + 1, option=0) for j in range(k + 2, len(chain.stages))]
        plan = following(profile, segmented_schedule([*before, Segment(k, k + 2), *after]))
        with planner.apply(work.model, plan):
            assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes


@pytest.mark.parametrize("where", ["blocks.*", "blocks.2", "blocks.4"])
def test_an_output_that_only_a_program_holds_is_predicted(where: str) -> None:
    rule = planner.Rule(modules=where, ops="sigmoid")
    work = workload("hints")
    plan = planner.state(planner.profile(work, menus=False, rules=rule), rule)
    with planner.apply(work.model, plan):
        assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes


@pytest.mark.parametrize("where", ["*.blocks.*", "*.blocks.2", "*.blocks.4"])
def test_what_stages_store_in_a_list_that_lets_go_is_not_predicted_too_low(where: str) -> None:
    work = workload("notes")
    profile = planner.profile(work, stages=["*.blocks.*"], menus=False)
    with pytest.raises(ValueError, match="stores tensors of its forward"):
        planner.state(profile, planner.Rule(modules=where))
    plan = planner.state(profile, planner.Rule(modules=where, action="keep"))
    with planner.apply(work.model, plan):
        assert planner.measure(work, repeats=1).peak_bytes <= plan.predicted_peak_bytes <= profile.unplanned_peak_bytes


def test_recomputing_under_autocast_casts_as_forward_did() -> None:
    profile = planner.profile(workload("dropout", autocast=torch.bfloat16))
    expected = state_after(workload("dropout", autocast=torch.bfloat16))
    for budget in budgets(profile):
        work = workload("dropout", autocast=torch.bfloat16)
        with planner.apply(work.model, planner.solve(profile, budget, solver="rotor")):
            assert_same(state_after(work), expected)


def test_gradients_accumulate_over_two_backwards() -> None:
    def gradients(work: Workload) -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        work.zero_grad()
        first, second = work.forward(), work.forward()
        second.backward()
        first.backward()
        return [p.grad for p in work.model.parameters()]

    work = workload("dropout")
    profile = profiled("dropout")
    expected = [g.clone() for g in gradients(work) if g is not None]
    with planner.apply(work.model, planner.solve(profile, next(budgets(profile)), solver="rotor")):
        planned = [g for g in gradients(work) if g is not None]
    assert all(torch.equal(a, b) for a, b in zip(expected, planned, strict=True))


def test_a_retained_graph_can_go_backward_twice() -> None:
    work = workload("dropout")
    profile = profiled("dropout")
    with planner.apply(work.model, planner.solve(profile, next(budgets(profile)), solver="rotor")):
        loss = work.forward()
        parameters = [p for p in work.model.parameters() if p.requires_grad]
        with pytest.warns(RuntimeWarning, match="retain_graph=True .* until its graph is freed"):
            first = torch.autograd.grad(loss, parameters, retain_graph=True)
        second = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_part_of_the_graph_can_be_differentiated() -> None:
    work = workload("plain")
    profile = profiled("plain")
    wanted = [p for n, p in work.model.named_parameters() if n.startswith("blocks.1.")]
    expected = torch.autograd.grad(work.forward(), wanted)
    with planner.apply(work.model, planner.solve(profile, next(budgets(profile)), solver="rotor")):
        planned = torch.autograd.grad(work.forward(), wanted)
    assert all(torch.equal(a, b) for a, b in zip(expected, planned, strict=True))


def test_second_derivatives_are_exact() -> None:
    def curvature(work: Workload) -> torch.Tensor:
        parameters = list(work.model.parameters())
        gradients = torch.autograd.grad(work.forward(), parameters, create_graph=True)
        return torch.autograd.grad(torch.stack([(g**2).sum() for g in gradients]).sum(), parameters)[0]

    work = workload("plain")
    profile = planner.profile(work, menus=False)
    expected = curvature(work)
    with planner.apply(work.model, planner.solve(profile, next(budgets(profile)), solver="rotor")):
        assert torch.equal(curvature(work), expected)
    plan = following(profile := planner.profile(work), choosing_inside(chain_of(profile)))
    with planner.apply(work.model, plan), pytest.raises(ValueError, match="create_graph=True.*menus=False"):
        curvature(work)  # No program has a graph of its gradients.


def test_remove_puts_the_model_back() -> None:
    work = workload("dropout")
    profile = profiled("dropout")
    keys, names = list(work.model.state_dict()), [n for n, _ in work.model.named_modules()]
    handle = planner.apply(work.model, planner.solve(profile, next(budgets(profile)), solver="rotor"))
    assert planner.handle_of(work.model) is handle
    assert list(work.model.state_dict()) == keys and [n for n, _ in work.model.named_modules()] == names
    assert planner.measure(work, repeats=1).peak_bytes < profile.unplanned_peak_bytes
    handle.remove()
    handle.remove()
    assert all("forward" not in module.__dict__ for module in work.model.modules())
    assert planner.measure(work, repeats=1).peak_bytes == profile.unplanned_peak_bytes


def test_a_plan_is_inactive_in_eval_mode_and_without_gradients() -> None:
    work = workload("dropout")
    profile = profiled("dropout")
    plan = planner.solve(profile, next(budgets(profile)), solver="rotor")
    with planner.apply(work.model, plan):
        with torch.no_grad(), CountOps() as ops:
            work.model(work.inputs)
        work.model.eval()
        expected = work.model(work.inputs)
        work.zero_grad()
        loss = work.forward()
        with CountOps() as backward:
            loss.backward()
    with torch.no_grad(), CountOps() as plain:
        work.model.train()
        work.model(work.inputs)
    assert ops.count == plain.count
    assert torch.equal(work.model.eval()(work.inputs), expected)
    work.zero_grad()
    loss = work.forward()
    with CountOps() as plain_backward:
        loss.backward()
    assert backward.count == plain_backward.count


def test_nothing_stays_behind_when_backward_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[weakref.ref[DroppedStage]] = []
    first = DroppedStage.run_first
    monkeypatch.setattr(DroppedStage, "run_first", lambda self, *a: stages.append(weakref.ref(self)) or first(self, *a))
    work = workload("dropout")
    profile = planner.profile(work, menus=False)  # So that a stage is dropped.
    with planner.apply(work.model, planner.solve(profile, next(budgets(profile)), solver="rotor")):
        gc.disable()  # No cycles: everything goes when the graph does.
        try:
            loss = work.forward()
            assert any(stage() is not None for stage in stages)
            del loss
            work.release()
            assert all(stage() is None for stage in stages)
        finally:
            gc.enable()


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x.data.add_(1)], ids=["in place", "through data"])
@pytest.mark.parametrize("menus", [True, False])
def test_an_input_changed_between_forward_and_backward_is_refused(
    menus: bool, write: Callable[[Tensor], object]
) -> None:
    work = workload("plain")
    profile = planner.profile(work, stages=["blocks.*"], menus=menus)
    first = next(stage.name for stage in profile.stages if stage.kind == "stage")
    with planner.apply(work.model, planner.state(profile, planner.Rules(checkpoints=[first]))):
        loss = work.forward()
        write(work.inputs)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="changed in place|modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("name", by_day(KEPT, ["in_place"]))
def test_keeping_everything_replays_every_measured_phase_exactly(name: str) -> None:
    profile = profiled(name)
    chain = chain_of(profile)
    plan = planner.solve(profile, profile.unplanned_peak_bytes)
    for moment in replay(chain, plan.schedule).timeline:
        record = profile.stages[moment.action.stage]
        if moment.action.kind == "free":
            continue
        phase = record.forward if moment.action.kind == "forward" else record.backward
        peak_bytes = phase.peak_bytes
        if moment.action.kind == "forward" and record.kind == "stage" and record.recomputable:
            # Each may be a second run, which reads the random state first; without making the whole plan's peak higher.
            peak_bytes = max(peak_bytes, min(phase.start_bytes + RANDOM_STATE_BYTES, profile.unplanned_peak_bytes))
        assert (moment.before_bytes, moment.peak_bytes) == (phase.start_bytes, peak_bytes), record.name
