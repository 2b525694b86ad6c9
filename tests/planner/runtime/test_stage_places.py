"""Which stage of the plan a call is, where a step makes other calls than the profiled one did."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import planner
from planner.plans.cost_model import chain_of
from planner.runtime.stage_places import StagePlace, StagePlaces
from profiler.workload.workload import Workload
from solvers.chain.baselines import droppable_runs, segmented_schedule
from tests.support.drawn_depth import WIDTH, Drawing, Layer, assert_promises_kept, run_of
from tests.support.events import Events
from tests.support.exactness import following
from tests.support.planned_blocks import with_record


def depth_of(count: int, layers: int = 5) -> Workload:
    """A step of so many of the layers."""
    torch.manual_seed(0)
    model = Drawing(lambda layers: iter(list(layers)[:count]), [Layer() for _ in range(layers)])
    return Workload(model=model, inputs=torch.randn(64, WIDTH), loss=lambda y: y.square().mean())


@pytest.fixture(scope="module")
def plan() -> planner.Plan:
    """Of three of the five layers, all recomputed."""
    profile = planner.profile(depth_of(3), menus=False)
    found = following(profile, segmented_schedule(droppable_runs(chain_of(profile))))
    assert [s.name for s in found.stages if s.name.startswith("layers")] == ["layers.0", "layers.1", "layers.2"]
    return found


def places_of(plan: planner.Plan) -> StagePlaces:
    model = depth_of(3).model
    return StagePlaces(plan, model, [k for k, stage in enumerate(plan.stages) if stage.name.startswith("layers")])


def test_an_unseen_module_takes_the_next_place_of_its_kind(plan: planner.Plan) -> None:
    assert plan.unseen == ("layers.3", "layers.4")
    places = places_of(plan)
    first = next(k for k, stage in enumerate(plan.stages) if stage.name == "layers.0")
    assert {"layers.3", "layers.4"} <= set(places.names)
    for _ in range(2):
        places.begin()
        found = [places.next_of(f"layers.{k}", inside=False) for k in (3, 1, 4, 2)]
        expected = [StagePlace(first), StagePlace(first + 1), StagePlace(first + 2), StagePlace(first, unseen=True)]
        assert found == expected


def test_calls_inside_stages_and_calls_that_were_profiled_take_no_place(plan: planner.Plan) -> None:
    twice = replace(
        plan, stages=tuple(with_record(s, calls=2) if s.name == "layers.0" else s for s in plan.stages), unseen=()
    )
    places = places_of(twice)
    assert places.next_of("layers.1", inside=True) is None
    assert places.next_of("layers.0", inside=False) is not None
    assert places.next_of("layers.0", inside=False) is None
    third = places.next_of("layers.0", inside=False)
    assert third is not None
    older = replace(plan, stages=tuple(with_record(stage, calls=0) for stage in plan.stages), unseen=())
    places = places_of(older)
    assert [places.next_of("layers.0", inside=False) is None for _ in range(3)] == [False, True, True]


def test_a_step_that_leaves_the_first_call_of_a_module_out_makes_the_later_one(plan: planner.Plan) -> None:
    names = {"layers.2": "layers.0#1"}
    stages = tuple(with_record(stage, name=names.get(stage.name, stage.name)) for stage in plan.stages)
    again = replace(plan, stages=stages, unseen=())
    first, second, last = (k for k, stage in enumerate(stages) if stage.name.startswith("layers"))
    places = StagePlaces(again, depth_of(3).model, [first, second])
    assert [places.next_of(name, inside=False) for name in ("layers.1", "layers.0")] == [
        StagePlace(second),
        StagePlace(last),
    ]
    places.begin()
    found = [places.next_of(name, inside=False) for name in ("layers.0", "layers.1", "layers.0")]
    assert found == [StagePlace(first), StagePlace(second), StagePlace(last)]


@pytest.mark.slow
def test_layers_on_top_of_the_profiled_ones_are_recomputed_and_that_is_said_once(plan: planner.Plan) -> None:
    work, plain = depth_of(5), depth_of(5)
    ran = Events()
    work.model.get_submodule("layers.4.up").register_forward_hook(lambda *_: ran.note())
    torch.manual_seed(5)
    plain.step()
    torch.manual_seed(5)
    with planner.apply(work.model, plan):
        with pytest.warns(RuntimeWarning, match=r"'layers\.4': it runs in a step though it did not .* not promised"):
            work.step()
        assert len(ran.taken()) == 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            work.step()
    again = depth_of(5)
    torch.manual_seed(5)
    with planner.apply(again.model, plan), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.step()
    for left, right in zip(again.model.parameters(), plain.model.parameters(), strict=True):
        assert left.grad is right.grad is None or torch.equal(left.grad, right.grad)  # type: ignore[arg-type]


class Thin(nn.Module):
    """Saves no more than what it hands on, so that every boundary held counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.slow
def test_nested_segments_hold_no_more_when_stages_are_left_out() -> None:
    left_out: set[int] = set()

    def draw(layers: nn.ModuleList) -> Iterator[nn.Module]:
        return (layer for k, layer in enumerate(layers) if k not in left_out)

    model = Drawing(draw, [Thin() for _ in range(9)])
    work = Workload(model=model, inputs=torch.randn(512, WIDTH), loss=lambda y: y.square().mean())
    profile = planner.profile(work, menus=False)
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, 1, solver="rotor")
    plans = [planner.solve(profile, caught.value.minimum_budget_bytes, solver="rotor")]
    plans += [following(profile, segmented_schedule(droppable_runs(chain_of(profile))))]
    for gone in ((), (0,), (2,), (8,), (3, 7), (5, 8), (0, 1), (1, 4, 7, 8), (1, 3, 7, 8), range(9)):
        left_out.clear()
        left_out.update(gone)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            expected = run_of(work, torch.optim.SGD(model.parameters()), 1)
            for plan in plans:
                assert_promises_kept(work, plan, expected, torch.optim.SGD(model.parameters()))


class Mixing(nn.Module):
    """Has an activation that it shares with the model around it."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.act, self.down = (
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
            act,
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.norm(self.up(x))))


class SharedActivation(nn.Module):
    """One activation runs in the layers and between them, and what they return is joined, as in PyG's GIN."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.layers = nn.ModuleList(Mixing(self.act) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))
        self.head = nn.Linear(4 * WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.act(norm(layer(x)))
            outputs.append(x)
        return self.head(torch.cat(outputs, -1))


@pytest.mark.slow
@pytest.mark.parametrize("menus", [True, False])
def test_a_module_that_stages_share_has_its_places_whatever_they_run_as(menus: bool) -> None:
    torch.manual_seed(0)
    model = SharedActivation()
    work = Workload(model=model, inputs=torch.randn(960, WIDTH), loss=lambda y: y.square().mean())
    profile = planner.profile(work, menus=menus)
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, 1)
    low_bytes, high_bytes = caught.value.minimum_budget_bytes, profile.unplanned_peak_bytes
    programs = [profile.menus[s.menu].once for s in profile.stages if s.name.startswith("act") and s.menu >= 0]
    assert len(programs) == 4
    assert all(once is None or once.forward_peak_bytes == 960 * WIDTH * 4 for once in programs)
    expected = run_of(work, torch.optim.SGD(model.parameters()), 2)
    for share in (0.0, 0.3, 0.6, 0.9):
        plan = planner.solve(profile, round(low_bytes + share * (high_bytes - low_bytes)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_promises_kept(work, plan, expected, torch.optim.SGD(model.parameters()))
