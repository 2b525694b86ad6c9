"""Preservation: whatever a model and an optimizer keep from step to step is after profiling as it was before."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter, OrderedDict, deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.workload.remembered_values import Restoring, Snapshot
from profiler.workload.snapshot import modules_of, preserved, remember_modules
from profiler.workload.workload import Workload


class Recurrent(nn.Module):
    """Goes on from the state in which the last batch left it, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(4))
        self.hidden: tuple[Tensor, list[Tensor]] | None = None
        self.calls = 0
        self.graph = torch.eye(16).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.latest = {"calls": self.calls}
        if self.hidden is not None:
            x = x + self.hidden[0] / self.calls + self.hidden[1][0]
        for cell in self.cells:
            x = x + cell(x)
        self.hidden = x.detach().mean(0), [x.detach().amax(0)]
        return x.square().mean()


class Historical(torch.optim.Optimizer):
    """Keeps a list, tensors in a dict, a state of no parameter, a counter of its own and a tensor for its rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.01)})
        self.norms: Any = self.state  # which may have keys that are no parameters
        self.norms["norm"] = torch.zeros(())
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["lr"].mul_(0.9)
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("past", []).append(float(parameter.grad.norm()))
                inner = state.setdefault("inner", {"mean": torch.zeros_like(parameter)})
                inner["mean"] = inner["mean"] * 0.9 + parameter.grad
                self.norms["norm"].add_(parameter.grad.norm())
                weight = float(group["lr"]) / (self.calls + sum(state["past"]) + float(self.norms["norm"]))
                parameter.add_(inner["mean"], alpha=-weight)


def workload(optimizer: type[Any] = torch.optim.SGD) -> Workload:
    torch.manual_seed(2)
    model = Recurrent()
    return Workload(model=model, inputs=torch.randn(64, 16), optimizer=optimizer(model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, Historical])
@pytest.mark.parametrize("before", [0, 2])
def test_training_goes_on_after_profiling_as_if_there_had_been_none(optimizer, before):
    plain, work = workload(optimizer), workload(optimizer)
    expected = [plain.step() for _ in range(before + 3)]
    found = [work.step() for _ in range(before)]
    profile = planner.profile(work, menus=False)
    if optimizer is Historical:
        assert profile.resident.optimizer == profile.resident.parameters + 4
    with planner.apply(work.model, planner.solve(profile, "100%", solver="rotor")):
        planner.measure(work, repeats=1)
        found += [work.step() for _ in range(3)]
    assert found == expected


def test_attributes_that_came_meanwhile_go_and_nothing_is_kept_alive():
    work = workload()
    with preserved(work):
        work.step()
        assert work.model.calls == 1
    assert work.model.calls == 0 and work.model.hidden is None and not hasattr(work.model, "latest")
    work.step()
    assert isinstance(work.model.hidden, tuple)
    hidden = weakref.ref(work.model.hidden[0])
    remembered = Restoring()
    remember_modules(modules_of(work), remembered)
    value = work.model.hidden[0].clone()
    work.step()
    assert hidden() is None
    remembered.restore()
    assert torch.equal(work.model.hidden[0], value) and work.model.calls == 1


class Schedule:
    """Counts its calls, in a slot as well."""

    __slots__ = ("__dict__", "late", "seen")

    def __init__(self) -> None:
        self.step, self.seen = 0, [0]

    def __call__(self) -> int:
        self.step += 1
        self.seen.append(self.step)
        self.late = self.step
        return self.step


class Scheduled(nn.Module):
    """Keeps its state in objects, in long and odd containers, and in a module that nobody registers."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.schedule = nn.Linear(16, 16), Schedule()
        self.at = SimpleNamespace(inner=SimpleNamespace(step=0, mean=torch.zeros(16)))
        self.kinds, self.long, self.hidden = Counter(), [0] * 1001, [nn.BatchNorm1d(16), nn.Linear(16, 16)]

    def forward(self, x: Tensor) -> Tensor:
        self.kinds["x"] += self.schedule()
        self.long.append(1)
        self.at.inner.step += 1
        self.at.inner.mean.add_(1)
        norm, line = self.hidden
        return line(norm(self.line(x))) * self.schedule.step

    def seen(self) -> list[Any]:
        norm, line = self.hidden
        gradients = [None if p.grad is None else p.grad.tolist() for p in line.parameters()]
        inner = self.at.inner
        counts = [self.schedule.step, self.schedule.seen, hasattr(self.schedule, "late"), self.kinds, len(self.long)]
        return [*counts, inner.step, inner.mean.tolist(), norm.running_mean.tolist(), gradients]


def is_frozen(each: object) -> bool:
    return not any(known is each for known in gc.get_objects())


@pytest.mark.usefixtures("nothing_frozen")
def test_garbage_is_looked_for_only_among_objects_made_inside() -> None:
    work = Workload(nn.Linear(4, 4), torch.randn(2, 4), loss=torch.sum)
    with preserved(work):
        assert is_frozen(work.model)
        with preserved(work):
            assert is_frozen(work.model)
        assert is_frozen(work.model)
    assert not is_frozen(work.model)


@pytest.mark.usefixtures("nothing_frozen")
def test_what_the_caller_has_frozen_stays_frozen() -> None:
    work = Workload(nn.Linear(4, 4), torch.randn(2, 4), loss=torch.sum)
    gc.freeze()
    try:
        with preserved(work):
            assert is_frozen(work.model)
        assert is_frozen(work.model)
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.slow
def test_what_is_inside_of_objects_is_put_back_as_well(own: bool, trained: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Scheduled(), nn.Linear(16, 16)), torch.randn(8, 16)
    scheduled: Any = model[0]

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    if trained:
        step()
    expected = copy.deepcopy(scheduled.seen())
    inputs: dict[str, Any] = {"step": step} if own else {"inputs": x, "loss": lambda y: y.square().mean()}
    planner.profile(Workload(model=model, **inputs), menus=False)
    assert scheduled.seen() == expected


class Balanced:
    """A loss that is no module: counts its calls, and keeps a mean in a tensor."""

    def __init__(self) -> None:
        self.calls, self.mean, self.scale = 0, torch.zeros(16), nn.Parameter(torch.ones(16))

    def __call__(self, y: Tensor) -> Tensor:
        self.calls += 1
        self.mean.add_(y.detach().mean(0))
        return (y * self.scale).square().mean() + self.calls


def test_so_is_what_a_loss_counts_that_is_no_module() -> None:
    torch.manual_seed(0)
    loss, ahead = Balanced(), [0]

    def counted(y: Tensor) -> Tensor:
        ahead[0] += 1
        return loss(y)

    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(8, 16)
    for each in (loss, counted):
        planner.profile(Workload(model=model, inputs=x, loss=each), menus=False)
        assert (loss.calls, ahead, loss.mean.tolist()) == (0, [0], [0.0] * 16)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_containers_are_filled_again_and_made_anew_where_they_are_gone():
    shared = torch.zeros(2)
    value = {"past": deque([1, 2], maxlen=3), "named": Pair([shared], "x"), "by": OrderedDict(a=shared), "it": iter(())}
    remembered, past, opaque = Snapshot(value), value["past"], value["it"]
    value["past"].append(3)
    value["named"].first.append(4)
    shared.add_(1)
    value["by"] = OrderedDict()
    value["more"] = 5
    assert remembered.put_back(value) is value
    assert list(value) == ["past", "named", "by", "it"] and value["it"] is opaque
    assert value["past"] is past and list(past) == [1, 2] and past.maxlen == 3
    assert isinstance(value["named"], Pair) and value["named"].first[0] is shared and len(value["named"].first) == 1
    assert value["by"]["a"] is shared and not shared.any()
    assert list(remembered.put_back(None)) == list(value)
    endless: list[Any] = []
    endless.append(endless)
    assert Snapshot(endless).put_back(endless) is endless
