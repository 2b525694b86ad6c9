"""The bound over all programs of captured stages: below every program that there is."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import planner
from planner.plans.call_programs import chain_with_any_programs, least_costs, program_menu
from planner.plans.cost_model import chain_of
from profiler.program_replay import call_replay, runs_with
from profiler.step_graph import StepGraph, StepOp, StepStorage, runs_once
from solvers import Problem, solve_chain
from solvers.chain.lower_bound import bound_seconds


def random_graph(seed: int) -> StepGraph:
    """A forward in which each op reads one or two before it, and a backward that reads some of what these make."""
    rng = random.Random(seed)
    count = rng.randint(2, 7)
    storages = [StepStorage(size_bytes=rng.randint(1, 20)) for _ in range(count)]
    ops = [
        StepOp(
            name=f"f{k}",
            op="aten.f",
            reads=tuple(sorted({rng.randrange(k) for _ in range(rng.randint(1, 2))})) if k else (),
            makes=(k,),
            seconds=rng.randint(1, 9) / 1000,
            once_reason="it says so" if rng.random() < 0.2 else "",
        )
        for k in range(count)
    ]
    for k in reversed(range(count)):
        storages.append(StepStorage(size_bytes=1, gradient=True))
        reads = tuple(s for s in range(count) if s == k or rng.random() < 0.2)
        ops.append(StepOp(name=f"b{k}", op="aten.b", side="backward", reads=reads, makes=(len(storages) - 1,)))
    return StepGraph(ops=tuple(ops), storages=tuple(storages), resident_bytes=0)


@pytest.mark.parametrize("seed", range(40))
def test_no_program_beats_the_least_costs_at_any_price(seed: int) -> None:
    graph = random_graph(seed)
    once = call_replay(graph, runs_once(graph))
    forward = [k for k, op in enumerate(graph.ops) if op.side == "forward" and not op.once_reason]
    costs = least_costs(graph)
    for picked in range(1 << len(forward)):
        again = [k for n, k in enumerate(forward) if picked >> n & 1]
        program = call_replay(graph, runs_with(graph, again))
        seconds = program.seconds - once.seconds
        for price in (0.0, 1e-5, 1e-4, 3e-4, 1e-3, 1e-2, 1.0):
            bound = min(cost.seconds + price * cost.kept_bytes for cost in costs)
            assert bound <= seconds + price * program.kept_bytes + 1e-9


def test_the_least_costs_of_ops_in_a_row_are_met() -> None:
    """Of two storages of a thousand bytes that backward reads, an op of one second or of three runs again."""
    ops = (
        StepOp(name="a", op="aten.a", makes=(0,), seconds=1.0),
        StepOp(name="b", op="aten.b", makes=(1,), seconds=3.0),
        StepOp(name="c", op="aten.c", side="backward", reads=(0, 1), makes=(2,)),
    )
    graph = StepGraph(
        ops=ops, storages=tuple(StepStorage(size_bytes=size) for size in (1000, 1000, 1)), resident_bytes=0
    )
    costs = least_costs(graph)
    for price in (0.5, 2.0, 7.0):
        least = min(cost.seconds + price / 1000 * cost.kept_bytes for cost in costs)
        assert 0.5 * (expected := min(price, 1.0) + min(price, 3.0)) <= least <= expected
    assert min(cost.seconds + 8.0 * cost.kept_bytes for cost in costs) == pytest.approx(4.0, rel=1e-3)


def test_plans_are_held_against_all_programs_and_not_those_of_the_menu_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    work = planner.Workload(model=model, inputs=torch.randn(512, 64), loss=lambda y: y.square().mean())
    profile = planner.profile(work)
    chain = chain_of(profile)
    relaxed = chain_with_any_programs(chain, [stage.menu for stage in profile.stages], profile.menus)
    assert relaxed != chain
    for percent in (60, 75, 90):
        budget = profile.unplanned_peak_bytes * percent // 100
        best = solve_chain(Problem(chain=chain, budget_bytes=budget), solver="rotor")
        assert best.seconds is not None and bound_seconds(relaxed, budget) <= best.seconds * (1 + 1e-9)
        plan = planner.solve(profile, budget)
        assert plan.lower_bound_seconds <= plan.predicted_seconds
        if plan.status == "optimal":
            assert plan.lower_bound_seconds == pytest.approx(plan.predicted_seconds)
    menu = next(menu for menu in profile.menus if menu.graph is not None)
    assert menu.graph is not None and len(program_menu(menu.graph)) > 1
