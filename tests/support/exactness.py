"""Holding a planned model against the unplanned one: what training leaves, bit for bit, at several budgets."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import planner
from planner.plans.cost_model import chain_of
from planner.plans.solving import plan_of
from profiler.workload.workload import Workload
from solvers import Chain, Problem, Schedule, Solution, replay
from solvers.chain.baselines import Segment, droppable_runs, segmented_schedule
from solvers.problem.chain import Link

DEPTHS = (0.0, 0.3, 0.6)


def state_after(work: Workload, steps: int = 2) -> dict[str, Any]:
    """Losses, gradients, parameters, buffers and random state after some steps from a fixed seed."""
    torch.manual_seed(7)
    losses = [work.step() for _ in range(steps)]
    return {
        "losses": losses,
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in work.model.named_parameters()},
        "state": state_of(work),
        "random": torch.get_rng_state(),
    }


def state_of(work: Workload) -> dict[str, Any]:
    """A copy of the model's state; torch can clone tensors that it cannot copy deeply (compressed sparse ones)."""
    state = work.model.state_dict()
    return {n: v.clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v) for n, v in state.items()}


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


def budgets(profile: planner.Profile) -> Iterator[int]:
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, 1, solver="rotor")
    smallest = caught.value.minimum_budget_bytes
    for depth in DEPTHS:
        yield int(smallest + depth * (profile.unplanned_peak_bytes - smallest))


def choosing_inside(chain: Chain) -> Schedule:
    """Every stage with its last option: a third of them run once, a third again alone, a third again together."""
    found: list[Segment] = []
    for run in droppable_runs(chain):
        third = (run.end - run.start) // 3
        alone = [
            Segment(k, k + 1, None if k >= run.start + third else 0) for k in range(run.start, run.start + 2 * third)
        ]
        found += [run] if run.kept else [*alone, Segment(run.start + 2 * third, run.end)]
    return Schedule(
        tuple(
            action if action.option is None else replace(action, option=len(chain.stages[action.stage].options) - 1)
            for action in segmented_schedule(found).actions
        )
    )


def following(profile: planner.Profile, schedule: Schedule, link: Link | None = None) -> planner.Plan:
    """The plan that does what a schedule says."""
    chain = chain_of(profile)
    replayed = replay(chain, schedule, link)
    solution = Solution(
        solver="stated",
        status="feasible",
        schedule=schedule,
        peak_bytes=replayed.peak_bytes,
        seconds=replayed.seconds,
        lower_bound_seconds=0.0,
        solve_seconds=0.0,
    )
    return plan_of(profile, Problem(chain=chain, budget_bytes=replayed.peak_bytes, link=link), solution)
