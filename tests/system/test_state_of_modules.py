"""What modules keep on themselves, of every kind, changes once in a planned step, as in an unplanned one."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import mtrand
from torch import Tensor, nn

import planner
from profiler.workload.random_states import HostRandomness
from profiler.workload.workload import Workload
from tests.support.habits import WIDTH, Net, batch, blocks_of, loss_of

LONG = 1001  # items, of which no copy is made


class Slotted:
    __slots__ = ("__hidden", "count", "late")

    def __init__(self) -> None:
        self.__hidden, self.count = 0, 0

    def advance(self) -> None:
        self.__hidden += 1
        self.count += 1
        self.late = self.count

    def seen(self) -> list[int]:
        return [self.__hidden, self.count]


class Ramp:
    """A schedule that is asked by calling it."""

    def __init__(self) -> None:
        self.step, self.past = 0, [0]

    def __call__(self) -> None:
        self.step += 1
        self.past.append(self.step)


class Noted(list[int]):
    total = 0

    def append(self, item: int) -> None:
        super().append(item)
        self.total += item


def _ring() -> OrderedDict[str, int]:
    return OrderedDict(a=1, b=2, c=3)


# What a module keeps, how a call changes it, and what is seen of it.
KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "long list": (lambda: [0.0] * LONG, lambda kept: kept.append(1.0), len),
    "long dict": (lambda: dict.fromkeys(range(LONG)), lambda kept: kept.setdefault(len(kept)), len),
    "long OrderedDict": (lambda: OrderedDict.fromkeys(range(LONG)), lambda kept: kept.setdefault(len(kept)), list),
    "long deque": (lambda: deque(range(LONG), maxlen=LONG), lambda kept: kept.append(len(kept)), list),
    "long set": (lambda: set(range(LONG)), lambda kept: kept.add(len(kept)), len),
    "array": (lambda: np.zeros(2), lambda kept: kept.__iadd__(1), lambda kept: kept.tolist()),
    "Counter": (Counter, lambda kept: kept.update("x"), dict),
    "moved to the end": (_ring, lambda kept: kept.move_to_end(next(iter(kept))), list),
    "UserDict": (lambda: UserDict(n=0), lambda kept: kept.update(n=kept["n"] + 1), dict),
    "list subclass": (Noted, lambda kept: kept.append(2), lambda kept: [*kept, kept.total]),
    "slots": (Slotted, lambda kept: kept.advance(), lambda kept: [*kept.seen(), kept.late]),
    "callable": (Ramp, lambda kept: kept(), lambda kept: [kept.step, kept.past]),
    "object in an object": (
        lambda: SimpleNamespace(inner=Ramp(), slots=Slotted()),
        lambda kept: (kept.inner(), kept.slots.advance()),
        lambda kept: [kept.inner.step, kept.inner.past, kept.slots.seen()],
    ),
    "module in a list": (
        lambda: [nn.BatchNorm1d(WIDTH)],
        lambda kept: kept[0](torch.ones(4, WIDTH)),
        lambda kept: [kept[0].running_mean.tolist(), kept[0].num_batches_tracked.item()],
    ),
}


class Keeping(nn.Module):
    def __init__(self, make: Callable[[], Any], change: Callable[[Any], object]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept, self._change = make(), change

    def forward(self, x: Tensor) -> Tensor:
        self._change(self.kept)
        return x + self.last(torch.tanh(self.first(x)))


def _net(make: Callable[[], Any], change: Callable[[Any], object]) -> Net:
    torch.manual_seed(0)
    return Net([Keeping(make, change) for _ in range(4)])


def _plan(model: nn.Module) -> planner.Plan:
    work = Workload(model=model, inputs=(batch(),), loss=loss_of)
    profile = planner.profile(work, stages=["blocks.*", "out"], menus=False)
    return planner.state(profile, planner.Rules(checkpoints="out"))


@pytest.mark.parametrize("kind", KEPT)
def test_what_modules_keep_changes_once(kind: str) -> None:
    make, change, seen = KEPT[kind]
    plain, planned = _net(make, change), _net(make, change)
    plan = _plan(_net(make, change))
    for _ in range(2):
        loss_of(plain(batch())).backward()
    with planner.apply(planned, plan):
        for _ in range(2):
            loss_of(planned(batch())).backward()
    for one, other in zip(blocks_of(plain), blocks_of(planned), strict=True):
        assert seen(other.kept) == seen(one.kept)


@pytest.mark.parametrize("make", [lambda: [*range(LONG)], lambda: OrderedDict.fromkeys(range(LONG))])
def test_a_long_container_that_does_more_than_grow_is_refused(make: Callable[[], Any]) -> None:
    begun: list[bool] = []

    def turn(kept: Any) -> None:
        if begun and isinstance(kept, list):
            kept.append(kept.pop(0))
        elif begun:
            kept.popitem(last=False)
            kept[object()] = None

    plan, model = _plan(_net(make, turn)), _net(make, turn)
    begun.append(True)
    expected = r"'kept', a .* of 1001 items, has lost or replaced items"
    with planner.apply(model, plan), pytest.raises(RuntimeError, match=expected):
        loss_of(model(batch())).backward()
    with pytest.raises(ValueError, match=expected):
        _plan(_net(make, turn))


class Late(nn.Module):
    """Begins after it was profiled: to write to a buffer uncounted, and to draw from Python and numpy."""

    ema: Tensor
    begun = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("ema", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.begun:
            self.ema.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            x = x * self.ema.clone() * (1 + random.random()) + float(np.random.randn())
            if self.ema.data[0] > random.random():
                x = x + float(np.random.rand())
        return x + self.last(torch.tanh(self.first(x)))


def test_what_begins_after_profiling_happens_once_and_the_same_again() -> None:
    def trained(model: nn.Module) -> list[Any]:
        random.seed(1)
        np.random.seed(1)
        for block in blocks_of(model):
            block.begun = True
        for step in range(4):
            if step == 2:  # Nor does this count.
                blocks_of(model)[0].ema.data.fill_(2)
            loss_of(model(batch())).backward()
        seen = [random.random(), np.random.rand(), np.random.randn()]
        tensors = [*(p.grad for p in model.parameters()), *model.buffers()]
        return [*seen, *(None if tensor is None else tensor.tolist() for tensor in tensors)]

    def build() -> Net:
        torch.manual_seed(0)
        return Net([Late() for _ in range(4)])

    plan, planned = _plan(build()), build()
    expected = trained(build())
    with planner.apply(planned, plan):
        assert trained(planned) == expected


@pytest.mark.parametrize("generator", [np.random.MT19937(3), np.random.PCG64(3)])
def test_the_global_generators_give_the_same_again_and_go_on(generator: Any) -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.randn()), float(np.random.rand())

    before = mtrand.get_bit_generator()
    mtrand.set_bit_generator(generator)
    try:
        for _ in range(3):  # A normal is left of each second pair.
            state, first = HostRandomness(), draw()
            after = random.getstate(), str(np.random.get_state(legacy=False))
            with state:
                assert draw() == first
            assert after == (random.getstate(), str(np.random.get_state(legacy=False)))
    finally:
        mtrand.set_bit_generator(before)


def test_the_second_number_of_a_pair_is_given_out_again() -> None:
    for _ in range(3):
        state, first = HostRandomness(), (random.gauss(0, 1), float(np.random.randn()))
        with state:
            assert (random.gauss(0, 1), float(np.random.randn())) == first


def test_a_module_that_holds_its_parent_in_a_list_runs_again_as_before() -> None:
    def build() -> Net:
        model = _net(list, lambda kept: None)
        for block in blocks_of(model):
            block.kept.append(model)
        return model

    plain, planned = build(), build()
    loss_of(plain(batch())).backward()
    with planner.apply(planned, _plan(build())):
        loss_of(planned(batch())).backward()
    for one, other in zip(plain.parameters(), planned.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


class Counted(nn.Module):
    """Has a parameter of its own beside a list that its forward appends to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.eye(8)), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(self.calls))
        return torch.tanh(x @ self.weight) * len(self.calls)


def test_a_list_beside_parameters_in_one_module_is_as_after_one_run() -> None:
    model, x = nn.Sequential(*(Counted() for _ in range(3))), torch.rand(4, 8)
    work = planner.Workload(model=model, inputs=x, loss=lambda output: output.sum())
    profile = planner.profile(work, stages=["0", "1", "2"], menus=False)
    planner.apply(model, planner.state(profile, planner.Rule(modules="*")))
    model(x).sum().backward()
    assert [block.calls for block in model] == [[0, 1]] * 3
