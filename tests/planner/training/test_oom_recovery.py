"""Running out of memory: reported with its place, undone without loss, and retried with a smaller plan."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.training import oom_recovery
from planner.training.oom_recovery import StepRollback, smaller_plan
from planner.training.oom_report import FailureReport
from planner.training.training import OutOfMemory, train_planned
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import Workload
from tests.support.events import Events
from tests.support.small_device import Limit

STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def workload(*, scaler: bool = False, accumulate: bool = False) -> Workload:
    torch.manual_seed(5)
    model = nn.Sequential(*[Block(16) for _ in range(6)])
    return Workload(
        model=model,
        inputs=torch.randn(512, 16),
        loss=lambda y: y.square().mean(),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0) if scaler else None,
        clip_norm=1.0 if scaler else None,
        accumulate=accumulate,
    )


@pytest.fixture(scope="module")
def plan():
    return planner.solve(planner.profile(workload(), stages=["Block"]), "100%")


def state_of(work: Workload) -> Any:
    assert work.optimizer is not None
    return copy.deepcopy([work.model.state_dict(), work.optimizer.state_dict(), torch.get_rng_state()])


def same(a: Any, b: Any) -> bool:
    left, right = tensors_in(a), tensors_in(b)
    return len(left) == len(right) and all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def expected():
    """Losses and the state after training without a plan and without a failure."""
    work = workload()
    return [work.step() for _ in range(STEPS)], state_of(work)


@pytest.mark.slow
def test_a_smaller_device_gets_a_smaller_plan_and_the_same_losses(plan, expected):
    with Limit(2**60) as roomy:
        train_planned(workload(), plan, steps=1)
    with Limit(int(0.8 * roomy.peak_bytes)):
        found = train_planned(workload(), plan, steps=STEPS, retries=9)
    assert list(found.losses) == expected[0]
    assert found.failures and found.plan.budget_bytes < plan.budget_bytes
    first = found.failures[0]
    assert first.repeated and first.restored
    assert (first.step, first.phase) == (1, "forward")
    assert first.stage in [stage.name for stage in plan.stages]
    assert first.actual_bytes is not None and first.predicted_bytes is not None and first.allocation_bytes
    assert first.actual_bytes <= first.predicted_bytes  # without the allocation that was refused
    assert first.timeline[-1].stage == first.stage
    assert {row.phase for row in first.timeline} == {"forward"}
    assert all(row.actual_bytes <= row.predicted_bytes for row in first.timeline if row.predicted_bytes is not None)
    budgets = [failure.next_budget_bytes for failure in found.failures]
    assert budgets[-1] == found.plan.budget_bytes
    assert all(b <= 0.95 * f.predicted_peak_bytes for b, f in zip(budgets, found.failures, strict=True) if b)


class Bomb:
    """Runs out of memory once, in the second training step, in the middle of a phase."""

    def __init__(self, work: Workload, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._phase, self._work = phase, work
        self._armed = Events()  # not put back as what a failed step changed is
        run_before, armed_in = StepRollback.run, list[int]()

        def guarded(guard: StepRollback, step: int) -> float:
            if step == 1 and not armed_in:
                armed_in.append(step)
                self._armed.note()
            return run_before(guard, step)

        monkeypatch.setattr(StepRollback, "run", guarded)
        last = list(work.model.children())[3]
        last.register_forward_hook(lambda *_: self.go_off("forward"))
        next(last.parameters()).register_hook(lambda _: self.go_off("backward"))
        assert work.optimizer is not None
        step_of = torch.optim.Adam.step
        monkeypatch.setattr(work.optimizer, "step", lambda *a: self.half_an_update(step_of))

    def go_off(self, phase: str) -> None:
        if phase == self._phase and self._armed.taken():
            self.out_of_memory()

    def out_of_memory(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    def half_an_update(self, step_of: Any) -> None:
        group = self._work.optimizer.param_groups[0]  # type: ignore[union-attr]
        whole = group["params"]
        if fails := self._phase == "optimizer" and bool(self._armed.taken()):
            group["params"] = whole[: len(whole) // 2]
        try:
            step_of(self._work.optimizer)
        finally:
            group["params"] = whole
        if fails:
            self.out_of_memory()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("kind", ["plain", "scaler", "accumulate"])
def test_a_failure_in_any_phase_loses_nothing(plan, phase, kind, monkeypatch):
    options = {} if kind == "plain" else {kind: True}
    calm = workload(**options)
    losses = [calm.step() for _ in range(STEPS)]
    work = workload(**options)
    Bomb(work, phase, monkeypatch)
    found = train_planned(work, plan, steps=STEPS, retries=1)
    assert len(found.failures) == 1
    report = found.failures[0]
    assert (report.step, report.phase, report.restored, report.repeated) == (2, phase, True, False)
    assert report.allocation_bytes == 2 * 2**20
    assert list(found.losses) == losses
    assert same(state_of(work), state_of(calm))


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_without_retry_the_step_is_undone_and_the_failure_raised(plan, phase, monkeypatch):
    calm, work = workload(), workload()
    first = calm.step()
    Bomb(work, phase, monkeypatch)
    torch.manual_seed(5)
    workload()
    with pytest.raises(OutOfMemory, match=f"step 2, {phase}") as failure:
        train_planned(work, plan, steps=STEPS)
    assert failure.value.losses == (first,)
    assert "nothing was lost" in str(failure.value) and "--retry" in str(failure.value)
    before = torch.get_rng_state()
    found = work.step(), state_of(work)
    torch.set_rng_state(before)
    assert found[0] == calm.step() and same(found[1], state_of(calm))


@pytest.mark.slow
def test_half_an_update_without_a_copy_is_said_and_not_retried(plan, monkeypatch):
    work = workload()
    Bomb(work, "optimizer", monkeypatch)
    with pytest.raises(OutOfMemory, match="may be half done") as failure:
        train_planned(work, plan, steps=STEPS)
    assert not failure.value.reports[-1].restored


def report_with(plan: planner.Plan, **values: Any) -> FailureReport:
    known = {"step": 1, "phase": "forward", "stage": "", "predicted_bytes": None, "actual_bytes": None}
    known |= {"allocation_bytes": None, "message": "", "timeline": (), "repeated": True, "restored": True}
    sizes = {name: getattr(plan, name) for name in ("budget_bytes", "headroom_bytes", "predicted_peak_bytes")}
    return FailureReport(**{**known, **sizes, **values})


def test_the_next_budget_is_what_the_device_gave_and_a_twentieth_less_at_least(plan):
    roomy = replace(plan, budget_bytes=2 * plan.predicted_peak_bytes)  # what it needs counts, not what it may have
    twentieth = int(0.95 * plan.predicted_peak_bytes)
    assert smaller_plan(roomy, report_with(plan)).budget_bytes == twentieth
    assert smaller_plan(plan, report_with(plan, actual_bytes=plan.predicted_peak_bytes)).budget_bytes == twentieth
    given = int(0.9 * plan.predicted_peak_bytes)
    assert smaller_plan(plan, report_with(plan, actual_bytes=given)).budget_bytes == given
    # What was alive elsewhere than at the failure, or in a step that no plan makes smaller, says nothing of the device.
    for values in ({"phase": "optimizer"}, {"repeated": False}):
        assert smaller_plan(plan, report_with(plan, actual_bytes=given, **values)).budget_bytes == twentieth
    least = smaller_plan(plan, report_with(plan, actual_bytes=1))
    assert least.predicted_peak_bytes == least.budget_bytes
    with pytest.raises(ValueError, match="no plan needs less"):
        smaller_plan(least, report_with(least))
    with pytest.raises(ValueError, match="no plan needs less"):
        smaller_plan(replace(least, budget_bytes=2 * least.budget_bytes), report_with(least))


def fails_once(work: Workload, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on steps change what is usually changed by a whole update alone, and run out of memory after that."""
    first, last = next(work.model.parameters()), list(work.model.parameters())[-1]

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def changed(tensor: torch.Tensor) -> None:
        with torch.no_grad():
            tensor.add_(1.0)

    if place == "optimizer":

        def update(*_: Any) -> None:
            optimizer: Any = work.optimizer
            changed(optimizer.state[first]["exp_avg"])
            out_of_memory()

        monkeypatch.setattr(work.optimizer, "step", update)
        return
    if place == "forward":
        assert isinstance(work.inputs, torch.Tensor)
        batch = work.inputs
        work.model.register_forward_hook(lambda *_: changed(batch))
        work.model.register_forward_hook(out_of_memory)
        return
    other = last if place == "backward" or not isinstance(work.loss, nn.Module) else next(work.loss.parameters())
    last.register_post_accumulate_grad_hook(lambda _: changed(other))
    first.register_hook(out_of_memory)


def with_loss_module() -> Workload:
    work = workload()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1  # another tensor, where BatchNorm changes its own in place
            return self.norm(y).pow(4).mean()

    return Workload(model=work.model, inputs=work.inputs, loss=Loss(), optimizer=work.optimizer)


def everything(work: Workload) -> Any:
    assert isinstance(work.loss, nn.Module)
    return [state_of(work), copy.deepcopy([work.inputs, work.loss.state_dict()])]


@pytest.mark.parametrize("place", ["forward", "backward", "loss", "optimizer"])
def test_a_change_that_cannot_be_put_back_alone_is_undone_from_the_copy_or_said(place, monkeypatch):
    """Of moments before any parameter, of parameters by hooks in backward, or of the batch."""
    for copies in (True, False):
        work = with_loss_module()
        guard = StepRollback(work, copies=copies)
        before = everything(work)
        guard.run(0)
        fails_once(work, place, monkeypatch)
        with pytest.raises(torch.OutOfMemoryError):
            guard.run(1)
        assert guard.undo() == (0 if copies else None)
        if copies:
            assert same(everything(work), before)


def test_buffers_of_the_loss_are_put_back(monkeypatch):
    work = with_loss_module()
    guard = StepRollback(work, copies=False)
    guard.run(0)
    before = everything(work)
    next(work.model.parameters()).register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        guard.run(1)
    assert guard.undo() == 1
    assert same(everything(work), before)


def test_steps_since_the_latest_copy_are_trained_again(monkeypatch):
    monkeypatch.setattr("planner.training.oom_recovery.COPY_EVERY_STEPS", 2)
    work = workload()
    guard, before = StepRollback(work, copies=True), []
    for step in range(5):
        before.append(state_of(work))
        guard.run(step)
    fails_once(work, "optimizer", monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        guard.run(5)
    assert guard.undo() == 4
    assert same(state_of(work), before[4])


class Counting(nn.Module):
    """Counts on itself, and goes on from the state in which the last batch left it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.calls, self.state = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        before, self.state = self.state, x.detach().mean(0)
        return x + torch.tanh(self.layer(x if before is None else x + before)) / self.calls


def counting() -> Workload:
    torch.manual_seed(5)
    model = nn.Sequential(*[nn.Sequential(Counting(), Block(16)) for _ in range(4)])
    inputs, optimizer = torch.randn(512, 16), torch.optim.Adam(model.parameters(), lr=1e-2)
    return Workload(model=model, inputs=inputs, loss=lambda y: y.square().mean(), optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_what_modules_keep_on_themselves_is_undone_too(phase, monkeypatch):
    calm = counting()
    losses = [calm.step() for _ in range(STEPS)]
    work = counting()
    plan = planner.solve(planner.profile(work, stages=["Block"], menus=False), "100%", solver="rotor")
    Bomb(work, phase, monkeypatch)
    assert list(train_planned(work, plan, steps=STEPS, retries=1).losses) == losses


@pytest.mark.slow
@pytest.mark.parametrize("retries", [0, 1])
def test_memory_that_runs_out_before_forward_undoes_nothing_and_loses_nothing(plan, retries, monkeypatch):
    calm = workload()
    losses = [calm.step()]
    after_one = state_of(calm)
    losses += [calm.step() for _ in range(STEPS - 1)]
    after_all, work = state_of(calm), workload()
    copied = iter([True, False, *[True] * STEPS])

    class Short(oom_recovery._BeforeStep):
        def __init__(self, work: Workload) -> None:
            if not next(copied):
                raise MemoryError("no room for a copy")
            super().__init__(work)

    monkeypatch.setattr(oom_recovery, "_BeforeStep", Short)
    if retries:
        assert list(train_planned(work, plan, steps=STEPS, retries=1).losses) == losses
        assert same(state_of(work), after_all)
        return
    with pytest.raises(OutOfMemory, match="nothing was lost") as failure:
        train_planned(work, plan, steps=STEPS)
    assert list(failure.value.losses) == losses[:1] and same(state_of(work), after_one)


def test_copies_leave_gradients_that_are_added_to_where_they_are(monkeypatch):
    monkeypatch.setattr("planner.training.oom_recovery.COPY_EVERY_STEPS", 1)
    work = workload(accumulate=True)
    guard = StepRollback(work, copies=True)
    guard.run(0)
    before = [parameter.grad for parameter in work.model.parameters()]
    guard.run(1)
    assert all(p.grad is grad for p, grad in zip(work.model.parameters(), before, strict=True))
