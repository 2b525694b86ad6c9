"""Second runs of stages: what they leave behind is found, and what of them is otherwise is said."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiler.measurement.meter import NoMeter
from profiler.measurement.stage_probe import FirstRun, StageProbe
from profiler.measurement.stage_reruns import STORES, EscapedTensors, RerunsAtOnce, RerunTimes, rerun_stages
from profiler.trace.partition import alike, choose_stages
from profiler.trace.step_trace import trace_step
from profiler.workload.snapshot import preserved
from profiler.workload.workload import Workload

CPU = torch.device("cpu")
WIDTH = 8


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What only the garbage collector would find is alive."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Tensors that outlive what made them ---------------------------------------------------


def test_what_is_let_go_of_has_not_escaped(uncollected: None) -> None:
    with EscapedTensors() as escaped:
        made = [torch.ones(3).exp(), torch.ones(3).sin()]
    assert escaped.any_left()
    del made[0]
    assert escaped.any_left()
    del made[0]
    assert not escaped.any_left()


def test_a_view_holds_what_lies_under_it(uncollected: None) -> None:
    with EscapedTensors() as escaped:
        part = torch.ones(3).exp()[1:]
    assert escaped.any_left()
    del part
    assert not escaped.any_left()


def test_what_was_there_before_is_not_asked_for(uncollected: None) -> None:
    before = torch.ones(3)
    with EscapedTensors() as escaped:
        views = [before.view(3, 1), before.mul_(2), before.t()]
    assert len(views) == 3 and not escaped.any_left()


def test_what_only_a_cycle_holds_is_collected_first(uncollected: None) -> None:
    with EscapedTensors() as escaped:
        cycle: list[Any] = [torch.ones(3).exp()]
    cycle.append(cycle)
    assert escaped.any_left()
    del cycle
    assert not escaped.any_left()


def test_what_was_stored_meanwhile_has_escaped_though_it_is_gone_when_asked(uncollected: None) -> None:
    stored: list[Tensor] = []
    for value, left in (("made", True), ("view", True), ("given", False), ("sparse", False)):
        with EscapedTensors() as escaped:
            given = torch.zeros(())
            made = given.exp()
            stored += {"made": [made], "view": [made[None]], "given": [], "sparse": [torch.eye(2).to_sparse()]}[value]
            escaped.note_stored(stored)
        stored.clear()
        del made, given
        assert escaped.any_left() == left, value


# Stages ------------------------------------------------------------------------------


class Block(nn.Module):
    """Adds what a habit makes of it; a habit may look at how often it was asked."""

    def __init__(self, habit: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.line, self.habit = nn.Linear(WIDTH, WIDTH), habit
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return x + self.habit(self, self.line(x))


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module, changes: bool = False) -> None:
        super().__init__()
        self.blocks, self.changes = nn.ModuleList(blocks), changes

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            given = x * 1
            x = block(given)
            if self.changes:
                with torch.no_grad():
                    given.add_(1)
        return x


def plain(block: nn.Module, y: Tensor) -> Tensor:
    return y.tanh()


def stores(block: nn.Module, y: Tensor) -> Tensor:
    block.__dict__["last"] = y.tanh()
    return block.__dict__["last"]


KEPT: list[Tensor] = []


def stores_elsewhere(block: nn.Module, y: Tensor) -> Tensor:
    KEPT[:] = [y.sigmoid()]
    return y * 2


_COUNT = itertools.count()


def counts(block: nn.Module, y: Tensor) -> Tensor:
    return y * float(next(_COUNT))


def saves_more(block: nn.Module, y: Tensor) -> Tensor:
    for _ in range(next(_COUNT)):
        y = y.tanh()
    return y


def fails_again(block: nn.Module, y: Tensor) -> Tensor:
    if next(_FIRST):
        raise OverflowError("once is enough")
    return y


_FIRST: Iterator[int] = itertools.count()


@pytest.fixture(autouse=True)
def from_the_start() -> Iterator[None]:
    global _COUNT
    _COUNT = itertools.count()
    yield
    KEPT.clear()


def reruns_of(model: nn.Module, before: Callable[[], None] = lambda: None) -> list[list[RerunTimes]]:
    """What is found of stages by a run once all have run, and by one at once."""
    work = Workload(model=model, inputs=torch.randn(4, WIDTH), loss=torch.sum)
    trace = trace_step(work)
    stages = choose_stages(trace, ["blocks.*"])
    kinds = alike(stages)
    found: list[list[RerunTimes]] = []
    with preserved(work), StageProbe(work, stages) as probe:
        before()
        first_runs: list[FirstRun] = probe.dropping_forward(NoMeter(), hold_all=True).first_runs
        found.append(rerun_stages(first_runs, kinds, CPU, compiled=False))
        before()
        at_once = RerunsAtOnce(kinds, CPU)
        probe.dropping_forward(NoMeter(), hold_all=False, on_stage=at_once.run)
        found.append(at_once.finished())
    return found


def test_stages_of_a_kind_are_timed_once_and_none_fails() -> None:
    for reruns in reruns_of(Net(*(Block(plain) for _ in range(3)))):
        assert [each.failure for each in reruns] == ["", "", ""]
        # The first one is of another kind: what goes into it takes no gradient.
        assert all(each.seconds > 0 for each in reruns) and reruns[1] is reruns[2]


@pytest.mark.parametrize(
    ("habit", "failure", "remedy"),
    [
        (stores_elsewhere, "it stores tensors", "return them"),
        (counts, "gives another result", "depend on inputs"),
        (saves_more, "saves other tensors", "use_cache=False"),
    ],
)
def test_what_is_otherwise_in_a_second_run_is_said(habit: Any, failure: str, remedy: str) -> None:
    for reruns in reruns_of(Net(Block(plain), Block(habit))):
        assert reruns[0].failure == "" and reruns[0].remedy == ""
        assert failure in reruns[1].failure and remedy in reruns[1].remedy


def test_what_modules_store_of_a_first_run_stays_and_counts() -> None:
    for reruns in reruns_of(Net(Block(stores))):
        assert reruns[0].failure == STORES


def test_what_a_second_run_raises_is_said() -> None:
    def first_time() -> None:
        global _FIRST
        _FIRST = itertools.chain([0], itertools.repeat(1))

    first_time()
    for reruns in reruns_of(Net(Block(fails_again)), before=first_time):
        assert reruns[0].failure == "recomputing it fails: once is enough" and reruns[0].remedy == ""


def test_an_input_that_is_changed_afterwards_is_said() -> None:
    for reruns in reruns_of(Net(Block(plain), Block(plain), changes=True)):
        assert ["changed in place afterwards" in each.failure for each in reruns] == [True, True]
        assert "x = x + y" in reruns[0].remedy
