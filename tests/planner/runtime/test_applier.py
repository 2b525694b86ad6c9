"""Applying plans: what is refused, before anything runs, and what a schedule is lowered to."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import pickle
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.plans.lowering import Rerun, UnsupportedPlan, lower_schedule
from planner.runtime.plan_checks import check_not_captured
from profiler.workload.compiled_forwards import check_no_cuda_graphs
from profiler.workload.workload import Workload
from solvers import Action, Schedule
from tests.support.odd_models import workload
from tests.support.small_blocks import WIDTH, Residual, Stack


def smallest_plan(work: Workload, **settings: Any) -> planner.Plan:
    profile = planner.profile(work, menus=False, **settings)
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, 1, solver="rotor")
    return planner.solve(profile, caught.value.minimum_budget_bytes, solver="rotor")


@functools.cache
def plan_of(name: str) -> planner.Plan:
    """The smallest plan of a model as ``workload`` builds it."""
    return smallest_plan(workload(name))


@pytest.mark.slow
def test_a_model_with_other_names_is_refused() -> None:
    plan = plan_of("plain")
    other = nn.Sequential(Residual(), Residual())
    with pytest.raises(planner.errors.PlanMismatch, match=r"no module 'blocks.0'.*profile and solve"):
        planner.apply(other, plan)


CUDA = torch.device("cuda")  # named, and not there


@pytest.mark.parametrize("compiled", [torch.compile, lambda module, **how: module.compile(**how) or module])
def test_models_that_are_compiled_with_cuda_graphs_are_refused(compiled: Any) -> None:
    graphed = nn.Sequential(compiled(nn.Linear(2, 2), mode="reduce-overhead"))
    with pytest.raises(ValueError, match="apply: .*compile it with mode='default'"):
        check_no_cuda_graphs(graphed, CUDA, "apply")
    check_no_cuda_graphs(graphed, torch.device("cpu"), "apply")
    for mode in (None, "default", "max-autotune-no-cudagraphs"):
        check_no_cuda_graphs(nn.Sequential(compiled(nn.Linear(2, 2), mode=mode)), CUDA, "apply")


def test_steps_are_not_captured_as_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    check_not_captured(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    check_not_captured(CUDA)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    check_not_captured(None)
    with pytest.raises(ValueError, match="captured as a CUDA graph"):
        check_not_captured(CUDA)


@pytest.mark.slow
def test_a_model_with_other_shapes_is_refused() -> None:
    plan = plan_of("plain")
    model = Stack([Residual() for _ in range(6)])
    model.blocks[2].inner[1] = nn.Linear(WIDTH, 8 * WIDTH)  # type: ignore[index,operator]
    with pytest.raises(
        planner.errors.PlanMismatch, match=r"blocks.2.inner.1.bias has shape \(128,\), expected \(64,\)"
    ):
        planner.apply(model, plan)
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.slow
def test_two_plans_at_once_are_refused() -> None:
    work = workload("plain")
    plan = plan_of("plain")
    with planner.apply(work.model, plan), pytest.raises(ValueError, match="remove"):
        planner.apply(work.model, plan)
    planner.apply(work.model, plan).remove()


@pytest.mark.slow
def test_a_plan_whose_forward_somebody_replaced_by_the_one_of_before_is_taken_off_and_said() -> None:
    """As accelerate's unwrap_model(keep_fp32_wrapper=False) does: the stages alone would be half a plan."""
    expected, work = workload("plain"), workload("plain")
    losses = [expected.step() for _ in range(2)]
    planner.apply(work.model, plan_of("plain"))
    got = [work.step()]
    work.model.forward = types.MethodType(type(work.model).forward, work.model)
    with pytest.warns(RuntimeWarning, match=r"the plan is taken off.*keep_fp32_wrapper=True"):
        got.append(work.step())
    assert got == losses
    assert planner.handle_of(work.model) is None
    assert [name for name, module in work.model.named_modules() if "forward" in module.__dict__] == [""]


@pytest.mark.slow
def test_a_plan_that_keeps_everything_patches_no_stage() -> None:
    work = workload("plain")
    profile = planner.profile(work, menus=False)
    with planner.apply(work.model, planner.solve(profile, "100%")):
        assert [name for name, module in work.model.named_modules() if "forward" in module.__dict__] == [""]


@pytest.mark.slow
def test_another_batch_size_still_computes_the_same_with_a_warning() -> None:
    plan = plan_of("batchnorm")
    expected, work = workload("batchnorm", batch=32), workload("batchnorm", batch=32)
    losses = [expected.step() for _ in range(2)]
    with planner.apply(work.model, plan), pytest.warns(RuntimeWarning, match="is smaller than the profiled one"):
        assert [work.step() for _ in range(2)] == losses


@pytest.mark.slow
def test_the_same_plan_fits_another_model_of_the_same_kind() -> None:
    plan = plan_of("dropout")
    torch.manual_seed(5)
    model = Stack([Residual(dropout=0.3) for _ in range(6)])
    with planner.apply(model, plan):
        model(torch.randn(64, WIDTH)).sum().backward()


@pytest.mark.slow
def test_plans_survive_their_file_and_refuse_spoilt_ones(tmp_path: Any) -> None:
    plan = plan_of("skip")
    path = tmp_path / "plan.json"
    plan.save(path)
    assert planner.Plan.load(path) == plan
    text = path.read_text()
    for spoilt, message in [
        (text[:-40], "breaks off"),
        (text.replace('"version": 3', '"version": 4'), "version 3, got 4"),
        (text.replace('"forward"', '"foward"'), "fields of this plan"),
        (text.replace('"schedule"', '"sched"'), "fields of this plan"),
    ]:
        path.write_text(spoilt)
        with pytest.raises(ValueError, match=message):
            planner.Plan.load(path)


@pytest.mark.slow
def test_a_schedule_that_reruns_what_is_outside_is_refused() -> None:
    work = workload("plain")
    profile = planner.profile(work, stages=["blocks.*"], menus=False)
    plan = smallest_plan(work, stages=["blocks.*"])
    outside = next(k for k, stage in enumerate(profile.stages) if stage.kind == "outside")
    actions = tuple(
        dataclasses.replace(a, option=None) if a.kind == "forward" and a.stage == outside else a
        for a in plan.schedule.actions
    )
    spoilt = dataclasses.replace(plan, schedule=Schedule(actions))
    with pytest.raises(UnsupportedPlan, match="outside"):
        planner.apply(work.model, spoilt)


@pytest.mark.slow
def test_a_nested_segment_lowered_by_hand() -> None:
    # Linked stages a, b, c: drop all with only the input of a held; before the backward of c run a and b again,
    # holding the inputs of both b and a, then c; before that of b run b; before that of a run a.
    work = workload("plain")
    profile = planner.profile(work, stages=["blocks.0", "blocks.1", "blocks.2"], menus=False)
    plan = planner.solve(profile, profile.unplanned_peak_bytes)
    first = [s.name for s in plan.stages].index("blocks.0")
    a, b, c = first, first + 1, first + 2
    stages = plan.stages[: c + 1]
    before = [Action("forward", k, 0) for k in range(first)]
    after = [x for k in reversed(range(first)) for x in (Action("backward", k), Action("free", k))]
    schedule = Schedule(
        (
            *before,
            Action("forward", a), Action("forward", b), Action("free", a), Action("forward", c), Action("free", b),
            Action("forward", a), Action("forward", b), Action("recompute", c, 0), Action("backward", c),
            Action("free", b), Action("recompute", b, 0), Action("backward", b), Action("free", a),
            Action("recompute", a, 0), Action("backward", a),
            *after,
        )
    )  # fmt: skip
    lowered = lower_schedule(stages, schedule)
    assert lowered.dropped == {a, b, c} and lowered.holding_input == {a}
    again = (Rerun(a, "drop", True), Rerun(b, "drop", True), Rerun(c, "until_saved", False))
    assert lowered.reruns[c] == again
    assert lowered.reruns[b] == (Rerun(b, "until_saved", False),)
    assert lowered.reruns[a] == (Rerun(a, "until_saved", False),)


@pytest.mark.slow
def test_auto_checkpoint_does_it_in_one_call() -> None:
    work = workload("dropout")
    profile = planner.profile(work, menus=False)
    budget = int(0.8 * profile.unplanned_peak_bytes)
    model = planner.auto_checkpoint(work, budget=budget, solver="rotor")
    assert model is work.model
    handle = planner.handle_of(model)
    assert handle is not None and handle.plan.predicted_peak_bytes <= budget
    assert planner.measure(work, repeats=1).peak_bytes <= budget
    handle.remove()


@pytest.mark.slow
def test_infeasible_says_the_smallest_budget_and_what_forces_it() -> None:
    profile = planner.profile(workload("plain"), menus=False)
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, "1KiB")
    error = caught.value
    assert planner.solve(profile, error.minimum_budget_bytes).predicted_peak_bytes <= error.minimum_budget_bytes
    with pytest.raises(planner.Infeasible):
        planner.solve(profile, error.minimum_budget_bytes - 1)
    assert "blocks." in error.reason or "optimizer" in error.reason


@pytest.mark.slow
def test_a_smaller_budget_never_gives_a_larger_peak_nor_a_faster_step() -> None:
    profile = planner.profile(workload("skip"), menus=False)
    plans = []
    for percent in range(100, 0, -5):
        try:
            plans.append(planner.solve(profile, f"{percent}%", solver="rotor"))
        except planner.Infeasible:
            break
    assert len(plans) > 3
    assert all(b.predicted_seconds >= a.predicted_seconds for a, b in itertools.pairwise(plans))
    assert all(plan.predicted_peak_bytes <= plan.budget_bytes for plan in plans)
    assert all(plan.lower_bound_seconds <= plan.predicted_seconds for plan in plans)


@pytest.mark.slow
def test_a_deep_copy_of_a_planned_model_runs_its_own_weights() -> None:
    work = workload("plain")
    plan = plan_of("plain")
    with planner.apply(work.model, plan):
        twin = copy.deepcopy(work.model)
        again = pickle.loads(pickle.dumps(work.model))
    with torch.no_grad():
        for parameter in [*twin.parameters(), *again.parameters()]:
            parameter.zero_()
    assert torch.count_nonzero(twin(work.inputs)) == 0 and torch.count_nonzero(again(work.inputs)) == 0
    assert torch.count_nonzero(work.model(work.inputs)) > 0


@pytest.mark.slow
def test_a_deep_copy_of_a_planned_model_keeps_a_forward_that_somebody_else_put_in() -> None:
    work = workload("plain")
    outer = work.model
    whole = outer.forward
    outer.forward = functools.partial(_doubled, outer)
    plan = smallest_plan(work)
    expected = 2 * whole(work.inputs)
    with planner.apply(outer, plan):
        twin, again = copy.deepcopy(outer), pickle.loads(pickle.dumps(outer))
    assert torch.equal(twin(work.inputs), expected) and torch.equal(again(work.inputs), expected)
    with torch.no_grad():
        for parameter in [*twin.parameters(), *again.parameters()]:
            parameter.zero_()
    assert torch.count_nonzero(twin(work.inputs)) == 0 and torch.count_nonzero(again(work.inputs)) == 0


def _doubled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 2 * type(model).forward(model, x)


@pytest.mark.slow
def test_a_planned_model_goes_when_it_is_dropped() -> None:
    work = workload("plain")
    plan = plan_of("plain")
    model = weakref.ref(work.model)
    planner.apply(work.model, plan)
    del work
    gc.collect()
    assert model() is None


@pytest.mark.slow
def test_a_planned_model_is_not_profiled_nor_planned_again() -> None:
    work = workload("plain")
    plan = plan_of("plain")
    with planner.apply(work.model, plan):
        with pytest.raises(planner.errors.ProfileError, match="is planned already"):
            planner.profile(work)
        with pytest.raises(ValueError, match="the model has a plan already"):
            planner.apply(nn.Sequential(work.model), plan)


@pytest.mark.slow
def test_parameters_changed_between_forward_and_backward_are_refused() -> None:
    work = workload("plain")
    plan = plan_of("plain")
    with planner.apply(work.model, plan):
        loss = work.forward()
        with torch.no_grad():
            for parameter in work.model.parameters():
                parameter.mul_(2)
        with pytest.raises(RuntimeError, match=r"parameters|modified by an inplace operation"):
            loss.backward()


@pytest.mark.slow
def test_a_dropout_rate_and_a_norms_mode_changed_after_profiling_stay_exact() -> None:
    for name, before in [("dropout", nn.Dropout), ("batchnorm", nn.BatchNorm1d)]:

        def changed(work: Workload, kind: type[nn.Module] = before) -> Workload:
            for module in work.model.modules():
                if isinstance(module, kind):
                    module.eval()
            return work

        plan = smallest_plan(changed(workload(name)))
        plain, planned = workload(name), workload(name)
        torch.manual_seed(2)
        losses = [plain.step() for _ in range(2)]
        with planner.apply(planned.model, plan):
            torch.manual_seed(2)
            assert [planned.step() for _ in range(2)] == losses
        state = zip(plain.model.state_dict().values(), planned.model.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in state)


@pytest.mark.slow
def test_two_models_of_one_loop_are_planned_one_after_the_other_without_a_word_on_hooks():
    torch.manual_seed(0)
    first, second = (
        nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)])
        for _ in range(2)
    )
    x = torch.randn(128, 16)

    def step() -> tuple[Tensor, ...]:
        loss = first(x).square().mean() + second(x).square().mean()
        loss.backward()
        found = tuple(p.grad.clone() for each in (first, second) for p in each.parameters() if p.grad is not None)
        first.zero_grad()
        second.zero_grad()
        return found

    expected = step()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*saved-tensor hooks.*")
        for model in (first, second):
            profile = planner.profile(planner.Workload(model=model, step=step), menus=False)
            with pytest.raises(planner.Infeasible) as refused:
                planner.solve(profile, 1)
            planner.apply(model, planner.solve(profile, refused.value.minimum_budget_bytes))
        assert all(map(torch.equal, step(), expected))
