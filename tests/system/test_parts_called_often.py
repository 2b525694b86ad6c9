"""Models whose Python calls few modules many times, in an order of its own: trees, unrolled cells, a field."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.explain.measured_step import view_step
from planner.plans.cost_model import chain_of
from profiler.program_replay import runs_with
from profiler.workload.workload import Workload
from solvers import Schedule, replay
from solvers.chain.candidates import keep_all
from tests.support.exactness import assert_same, following, state_after
from tests.support.nightly import by_day

WIDTH, ROWS = 32, 64


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cell = self.cell(x)
        return self.out(x).sigmoid() * cell.tanh(), cell


class Compose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(WIDTH, 5 * WIDTH, bias=False)

    def forward(self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        i, o, u, f, g = (self.left(left[0]) + self.right(right[0])).chunk(5, -1)
        cell = i.sigmoid() * u.tanh() + f.sigmoid() * left[1] + g.sigmoid() * right[1]
        return o.sigmoid() * cell.tanh(), cell


class TreeLSTM(nn.Module):
    """Tai et al., "Improved semantic representations from tree-structured LSTM networks" (2015), of binary trees."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.leaf, self.compose = nn.Embedding(100, WIDTH), Leaf(), Compose()

    def forward(self, words: Tensor, tree: Any) -> Tensor:
        return self.visit(tree, self.words(words))[0]

    def visit(self, tree: Any, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Not a closure that calls itself: such a one would leave ``embedded`` in a reference cycle."""
        if isinstance(tree, int):
            return self.leaf(embedded[:, tree])
        left, right = tree
        return self.compose(self.visit(left, embedded), self.visit(right, embedded))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given, self.state = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        i, f, g, o = (self.given(x) + self.state(state[0])).chunk(4, 1)
        cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell


class Unrolled(nn.Module):
    def __init__(self, cell: nn.Module, *, every: bool) -> None:
        super().__init__()
        self.cell, self.drop, self.head, self.every = cell, nn.Dropout(0.1), nn.Linear(WIDTH, 7), every

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), WIDTH), x.new_zeros(len(x), WIDTH)
        outputs = []
        for moment in x.unbind(1):
            state = self.cell(moment, state)
            outputs.append(state[0])
        return self.head(self.drop(torch.stack(outputs, 1) if self.every else outputs[-1]))


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH + 1, 96), nn.Linear(96, WIDTH)

    def forward(self, time: float, y: Tensor) -> Tensor:
        return self.last(self.first(torch.cat([y, y.new_full((len(y), 1), time)], 1)).tanh())


class Flow(nn.Module):
    """Four steps of the classical Runge-Kutta method."""

    def __init__(self) -> None:
        super().__init__()
        self.field = Field()

    def forward(self, y: Tensor) -> Tensor:
        h = 0.25
        for k in range(4):
            one = self.field(k * h, y)
            two = self.field(k * h + h / 2, y + h / 2 * one)
            three = self.field(k * h + h / 2, y + h / 2 * two)
            y = y + h / 6 * (one + 2 * two + 2 * three + self.field(k * h + h, y + h * three))
        return y


def random_tree(first: int, end: int, rng: random.Random) -> Any:
    if end - first == 1:
        return first
    middle = rng.randint(first + 1, end - 1)
    return random_tree(first, middle, rng), random_tree(middle, end, rng)


def of_sequences(cell: Callable[[], nn.Module], *, every: bool) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (Unrolled(cell(), every=every), (torch.randn(ROWS, 12, WIDTH),))


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "tree": lambda: (TreeLSTM(), (torch.randint(100, (ROWS, 8)), random_tree(0, 8, random.Random(1)))),
    "every output": of_sequences(Gated, every=True),
    "last output": of_sequences(lambda: nn.LSTMCell(WIDTH, WIDTH), every=False),
    "flow": lambda: (Flow(), (torch.randn(256, WIDTH),)),
}


def workload(name: str) -> Workload:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = model(*inputs).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return Workload(model=model, step=step)


@pytest.mark.parametrize("name", by_day(MODELS, ["tree", "flow"]))
def test_parts_that_are_called_often_train_as_without_a_plan(name: str) -> None:
    expected, profile = state_after(workload(name)), planner.profile(workload(name), menus=False)
    with pytest.raises(planner.Infeasible) as refusal:
        planner.solve(profile, 1)
    least_bytes, most_bytes = refusal.value.minimum_budget_bytes, profile.unplanned_peak_bytes
    assert least_bytes < most_bytes
    for budget_bytes in (least_bytes, (least_bytes + most_bytes) // 2):
        plan = planner.solve(profile, budget_bytes)
        assert plan.recomputed_ops
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with planner.apply((work := workload(name)).model, plan):
                assert planner.measure(work).peak_bytes <= plan.predicted_peak_bytes <= budget_bytes
            with planner.apply((work := workload(name)).model, plan):
                assert_same(state_after(work), expected)


@pytest.mark.nightly
def test_a_program_of_a_part_whose_input_comes_from_further_back_takes_what_is_predicted() -> None:
    """The right child lies between the left one and their parent, and the left one goes in the parent's backward."""
    profile = planner.profile(workload("tree"))
    parent = next(stage for stage in profile.stages if stage.name == "compose#3")
    menu = profile.menus[parent.menu]
    assert menu.graph is not None
    returned = {number for number, storage in enumerate(menu.graph.storages) if storage.returned}
    forward = [k for k, op in enumerate(menu.graph.ops) if op.side == "forward" and not returned & {*op.makes}]
    program = menu.program(runs_with(menu.graph, forward))
    menus = [*profile.menus]
    menus[parent.menu] = replace(menu, options=(*menu.options, program))
    profile = replace(profile, menus=tuple(menus))
    number, option = profile.stages.index(parent), len(menu.options) + 1
    actions = [
        replace(action, option=option) if action.stage == number and action.option is not None else action
        for action in keep_all(chain_of(profile))[0].actions
    ]
    plan = following(profile, Schedule(tuple(actions)))
    predicted = next(
        entry.peak_bytes
        for entry in replay(chain_of(profile), plan.schedule).timeline
        if (entry.action.stage, entry.action.kind) == (number, "backward")
    )
    spans = view_step(workload("tree"), plan, rounds=1).planned.spans
    measured = next(span for span in spans if (span.stage, span.phase) == (parent.name, "backward"))
    assert measured.peak_bytes == predicted
