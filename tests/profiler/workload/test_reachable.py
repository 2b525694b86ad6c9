"""What a step reaches is found in whatever holds it, and nothing of the user's runs meanwhile."""

from __future__ import annotations

import abc
import functools
import types
import weakref
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import profiler.workload.reachable as reachable
from profiler.workload.reachable import reached_from, tensors_held, tensors_of
from profiler.workload.snapshot import preserved
from profiler.workload.steps import resident_bytes_of
from profiler.workload.workload import Workload

COUNTED: list[int] = []
TOTAL = 0


class Closed:
    """Whatever is asked of it fails; and it is in a circle."""

    __slots__ = ("__weakref__", "inner", "itself")

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "itself", [self])

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    def __len__(self) -> int:
        raise AssertionError

    __eq__ = __hash__ = __iter__ = __bool__ = __setattr__ = __len__  # type: ignore[assignment]

    @property
    def made(self) -> Tensor:
        raise AssertionError


class Names(tuple[Any, ...]):
    """A tuple whose methods do not do what a tuple's do, as e3nn's ``Irreps``."""

    def __len__(self) -> int:
        raise NotImplementedError

    __iter__ = __len__  # type: ignore[assignment]


@dataclass
class Graph:
    x: Any


class Stacked(list[Any]):
    """A list with attributes beside its items."""


@functools.lru_cache(maxsize=4)
def table(size: int) -> Tensor:
    return torch.zeros(size)


def with_attribute(value: Any) -> Tensor:
    tensor: Any = torch.zeros(1)
    tensor.main_grad = value
    return tensor


def of_a_made_class(make: Callable[[], type]) -> Callable[[Any], Any]:
    """Such a class says that it is of the module in which the call that makes it stands."""

    def around(value: Any) -> Any:
        found: Any = object.__new__(make())
        found.x = value
        return found

    return around


def stacked(value: Any) -> Stacked:
    found: Any = Stacked()
    found.extra = value
    return found


def hooked(value: Any) -> nn.Module:
    module = nn.Linear(1, 1)
    module.register_forward_hook(lambda *_: value)
    return module


def generated(value: Any) -> Any:
    yield 1
    yield value


def begun(value: Any) -> Any:
    found = generated(value)
    next(found)
    return found


AROUND: list[Callable[[Any], Any]] = [
    Closed,
    Graph,
    stacked,
    hooked,
    begun,
    with_attribute,
    iter,
    lambda value: UserDict(x=value),
    lambda value: Names((value,)),
    lambda value: deque([value]),
    lambda value: functools.partial(print, value),
    lambda value: lambda: value,
    lambda value: lambda given=value: given,
    lambda value: {"x": [Closed(value)]},
    of_a_made_class(lambda: types.new_class("Made", (Graph,))),
    of_a_made_class(lambda: abc.ABCMeta.__new__(abc.ABCMeta, "Made", (Graph,), {})),
    of_a_made_class(lambda: make_dataclass("Made", ["x"])),
]


@pytest.mark.parametrize("around", AROUND)
def test_a_tensor_is_found_in_whatever_holds_it(around: Callable[[Any], Any]) -> None:
    tensor = torch.zeros(3)
    held = [weakref.proxy(nn.Linear(1, 1)), around([tensor])]
    assert any(each is tensor for each in tensors_of(reached_from(held)))


def test_so_is_one_that_a_cached_function_keeps() -> None:
    kept = table(7)
    assert any(each is kept for each in tensors_held(lambda: table(7)))


def test_of_a_table_of_plain_data_nothing_is_looked_at_and_of_many_objects_only_the_nearest(monkeypatch: Any) -> None:
    assert len(reached_from([0] * 100_000)) == 1
    monkeypatch.setattr(reachable, "MOST_REACHED", 50)
    reached = reached_from([Graph(i) for i in range(1000)])
    assert reached.is_cut and len(reached) == 50
    model = nn.Linear(2, 2)
    model.rows = [Graph(i) for i in range(1000)]  # pyright: ignore[reportArgumentType]
    work = Workload(model=model, step=lambda: model)
    with pytest.warns(RuntimeWarning, match="refers to more than 50 objects"), preserved(work):
        pass


class Counting(nn.Module):
    """Counts in all places but its own attributes: what its class holds, globals, hooks, parameters."""

    calls = 0
    seen: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.line, self.hidden = nn.Linear(4, 4), [0]
        outside, number = self.hidden, 0

        def count(*_: Any) -> None:
            nonlocal number
            number += 1
            outside.append(number)

        self.line.register_forward_hook(count)

    def note(self) -> None:
        global TOTAL
        TOTAL += 1
        COUNTED.append(TOTAL)
        Counting.calls += 1
        self.seen.append(1)
        weight: Any = self.line.weight
        weight.calls = getattr(weight, "calls", 0) + 1
        weight.main_grad.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        return self.line(x)

    def state(self) -> list[Any]:
        weight: Any = self.line.weight
        counts = [Counting.calls, [*self.seen], TOTAL, [*COUNTED], [*self.hidden]]
        return [*counts, getattr(weight, "calls", None), weight.main_grad.tolist()]


@pytest.mark.parametrize("own", [False, True])
def test_what_a_step_counts_anywhere_is_put_back(own: bool) -> None:
    model, x, outputs = Counting(), torch.randn(2, 4), list[Tensor]()
    model.line.weight.main_grad = torch.zeros(3)  # pyright: ignore[reportAttributeAccessIssue]

    def step() -> None:
        outputs.append(model(x))
        outputs[-1].sum().backward()

    def loss(y: Tensor) -> Tensor:
        outputs.append(y)
        return y.sum()

    before = model.state()
    work = Workload(model=model, step=step) if own else Workload(model=model, inputs=x, loss=loss)
    for _ in range(2):
        with preserved(work):
            work.step()
            work.step()
            assert model.state() != before and len(outputs) == 2
        assert model.state() == before and not outputs
        work.step()
        before = model.state()
        outputs.clear()


def test_bytes_that_objects_hold_are_counted_where_they_are() -> None:
    model, x = nn.Linear(4, 4), torch.zeros(100, 4)
    bare = resident_bytes_of(Workload(model=model, inputs=x, loss=torch.sum))
    assert resident_bytes_of(Workload(model=model, inputs=(Graph(x),), loss=torch.sum)) == bare
    model.context = Closed(torch.zeros(1000))  # pyright: ignore[reportArgumentType]
    model.weight.main_grad = torch.zeros(10)  # pyright: ignore[reportAttributeAccessIssue]
    resident = resident_bytes_of(Workload(model=model, inputs=x, loss=torch.sum))
    assert resident.total == bare.total + 4000 + 40
