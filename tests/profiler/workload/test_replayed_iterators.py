"""Iterators that a step takes from give every measured step the same items, and training all of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import planner
from profiler.workload.snapshot import preserved
from profiler.workload.workload import Workload

WIDTH = 4


def drawn(data: Tensor) -> Iterator[Tensor]:
    for rows in data.split(2):
        yield rows + torch.rand(())


def loaded(data: Tensor) -> Iterator[Tensor]:
    return iter(DataLoader(data, batch_size=2, shuffle=True))  # pyright: ignore[reportArgumentType]


def dicts(data: Tensor) -> Iterator[dict[str, Tensor]]:
    return ({"x": rows} for rows in data.split(2))


MAKERS: list[Callable[[Tensor], Iterator[Any]]] = [
    drawn, loaded, dicts, lambda data: iter(data.split(2)), lambda data: map(torch.neg, data.split(2)),
    lambda data: itertools.islice(data.split(2), 1, None),
]  # fmt: skip


def trained(make: Callable[[Tensor], Iterator[Any]], measured: bool, takes: int = 1) -> list[Any]:
    """What the first steps of a loop see, draw and lose; each changes its batch."""
    torch.manual_seed(0)
    data, model, seen = torch.randn(8, WIDTH), nn.Linear(WIDTH, WIDTH), list[Any]()
    at = SimpleNamespace(batches=[make(data)])

    def step() -> None:
        for batch in itertools.islice(at.batches[0], takes):
            x = batch.pop("x") if isinstance(batch, dict) else batch
            loss = (model(x) * torch.rand(x.shape)).square().sum()
            loss.backward()
            seen.append([x.tolist(), loss.item()])
            x.zero_()

    if measured:
        work = Workload(model=model, step=step)
        for _ in range(2):
            with preserved(work):
                for _ in range(9):
                    work.step()
                assert all(each[0] == seen[i % takes][0] for i, each in enumerate(seen))
            assert not seen
    step()
    return [*seen, *(each if isinstance(each, dict) else each.tolist() for each in at.batches[0])]


@pytest.mark.parametrize("takes", [1, 2])
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.slow
def test_training_sees_what_it_would_have_seen(make: Callable[[Tensor], Iterator[Any]], takes: int) -> None:
    assert str(trained(make, True, takes)) == str(trained(make, False, takes))


def held_by_default(batches: Iterator[Tensor], run: Callable[[Tensor], None]) -> Callable[[], None]:
    return lambda held=batches: run(next(held))


def held_by_argument(batches: Iterator[Tensor], run: Callable[[Tensor], None]) -> Callable[[], None]:
    return functools.partial(lambda held, inner: run(next(inner[0] if held is None else held)), None, [batches])


def held_by_partial(batches: Iterator[Tensor], run: Callable[[Tensor], None]) -> Callable[[], None]:
    return functools.partial(lambda held: run(next(held)), batches)


def held_by_slot(batches: Iterator[Tensor], run: Callable[[Tensor], None]) -> Callable[[], None]:
    class Slotted:
        __slots__ = ("held",)

    at = Slotted()
    at.held = batches  # pyright: ignore[reportAttributeAccessIssue]
    return lambda: run(next(at.held))  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("hold", [held_by_default, held_by_argument, held_by_partial, held_by_slot])
def test_wherever_one_is_held(hold: Callable[..., Callable[[], None]], recwarn: pytest.WarningsRecorder) -> None:
    model, seen = nn.Linear(WIDTH, WIDTH), list[float]()

    def run(x: Tensor) -> None:
        seen.append(float(x[0, 0]))
        model(x).sum().backward()

    step = hold(iter([torch.full((2, WIDTH), float(i)) for i in range(2)]), run)
    work = Workload(model=model, step=step)
    with preserved(work):
        work.step()
        work.step()
    step()
    step()
    assert seen == [0.0, 1.0] and not recwarn.list


def test_an_end_comes_in_every_step_and_an_iterator_that_nobody_took_from_is_left() -> None:
    model, seen = nn.Linear(WIDTH, WIDTH), list[int]()
    short, other = iter([torch.ones(2, WIDTH)]), iter([1])

    def step() -> None:
        batches = list(short)
        seen.append(len(batches))
        if not batches:
            next(other)
        else:
            model(batches[0]).sum().backward()

    plain = other
    work = Workload(model=model, step=step)
    with preserved(work):
        for _ in range(3):
            work.step()
        assert seen == [1, 1, 1]
    assert other is plain and len(list(short)) == 1


def test_where_others_hold_it_that_is_said_before_the_first_item_is_taken() -> None:
    model, batches = nn.Linear(WIDTH, WIDTH), iter([torch.ones(2, WIDTH)] * 3)
    others = [enumerate(batches)]
    work = Workload(model=model, step=lambda: model(next(batches)).sum().backward())
    with pytest.warns(RuntimeWarning, match="list_iterator that others hold, too"), preserved(work):
        work.step()
    assert len(list(others[0])) == 2


def test_a_plan_is_made_from_a_loader_of_one_batch_that_counts_as_one_that_is_there() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 1)), torch.randn(64, WIDTH)
    batches = iter(DataLoader(x, batch_size=64))  # pyright: ignore[reportArgumentType]

    def taken() -> None:
        model(next(batches)).square().mean().backward()
        model.zero_grad()

    def there() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    profiles = [planner.profile(Workload(model=model, step=step), menus=False) for step in (taken, there)]
    assert profiles[0].unplanned_peak_bytes == profiles[1].unplanned_peak_bytes
    assert next(batches).shape == x.shape
