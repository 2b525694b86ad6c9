"""Programs of orders with ops run again compute, bit for bit, what torch.compile computes without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from planner import zoo
from planner.plans.graph_solving import runs_of
from planner.steps.graph_problem import StepSurroundings, step_problem
from profiler.capture.backend import eager_backend
from profiler.capture.joint_graph import JointGraph
from profiler.capture.programs import StepOrder
from profiler.capture.step_dataflow import step_graph_of
from profiler.workload.workload import Workload
from solvers.graph.liveness import unplanned_replay
from solvers.graph.registry import solve_graph
from solvers.problem.solution import GraphProblem
from tests.support.nightly import by_day

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 1, "hidden": 32, "seq": 16, "vocab": 200},
    "unet": {"batch": 2, "hidden": 8, "image": 32},
    "densenet": {"batch": 2, "layers": 2, "hidden": 8, "image": 16},
}
RUNS: list[int] = []


def solved(graph: JointGraph, share: float) -> StepOrder:
    """The order of a plan between the least and the unplanned peak."""
    step = step_graph_of(graph)
    base = step.resident_bytes
    around = StepSurroundings(forward_bytes=base, backward_bytes=base, loss_bytes=base)
    problem = step_problem(step, around, small_share=0.0)
    peak = unplanned_replay(problem.graph).peak_bytes
    refused = solve_graph(GraphProblem(graph=problem.graph, budget_bytes=1), time_limit_seconds=10)
    assert refused.shortage is not None
    least = refused.shortage.minimum_budget_bytes
    budget = least + int(share * (peak - least))
    solution = solve_graph(GraphProblem(graph=problem.graph, budget_bytes=budget), time_limit_seconds=10, gap=0.1)
    assert solution.schedule is not None
    runs = runs_of(problem, solution)
    RUNS.append(sum(map(len, runs)) - len(step.ops))
    return StepOrder.of(step, runs)


def trained(work: Workload, backend: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of two steps, then parameters and buffers."""
    work.model.forward = torch.compile(work.model.forward, backend=backend, fullgraph=True, dynamic=False)
    torch.manual_seed(1)
    losses = [work.step() for _ in range(2)]
    return losses, [*work.model.parameters(), *work.model.buffers()]


@pytest.mark.parametrize("share", by_day([0.2, 0.6], [0.2]))
@pytest.mark.parametrize("name", SMALL)
def test_a_plan_computes_what_no_plan_does(name: str, share: float) -> None:
    torch._dynamo.reset()
    plain = trained(zoo.build(name, **SMALL[name]), aot_autograd(fw_compiler=boxed))
    RUNS.clear()
    planned = trained(zoo.build(name, **SMALL[name]), eager_backend(lambda graph: solved(graph, share)))
    assert RUNS and RUNS[0] > 0
    assert planned[0] == plain[0]
    assert all(map(torch.equal, planned[1], plain[1]))


def boxed(module: fx.GraphModule, _: Any) -> Any:
    return make_boxed_func(module.forward)
