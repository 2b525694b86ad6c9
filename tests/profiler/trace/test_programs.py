"""Programs of orders with ops run again compute, bit for bit, what the module itself does."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn

from planner import zoo
from planner.plans.call_programs import runs_of
from planner.step_problem import StepSurroundings, problem_of_call
from profiler.step_graph import StepGraph, StepRuns
from profiler.trace.call_program import CallProgram
from profiler.trace.captured_call import capture_call
from profiler.trace.captures import difference
from profiler.trace.joint_graph import step_graph_of
from profiler.trace.programs import StepOrder, order_of, programs_of
from solvers.graph.orders import unplanned_replay
from solvers.graph.registry import solve_graph
from tests.support.nightly import by_day

SMALL: dict[str, dict[str, Any]] = {
    "t5": {"layers": 1, "hidden": 32, "seq": 16, "vocab": 200},
    "unet": {"batch": 2, "hidden": 8, "image": 32},
    "densenet": {"batch": 2, "layers": 2, "hidden": 8, "image": 16},
}


def solved(step: StepGraph, share: float) -> StepRuns:
    """The order of a plan between the least and the unplanned peak."""
    base = step.resident_bytes
    around = StepSurroundings(forward_bytes=base, backward_bytes=base, loss_bytes=base)
    problem = problem_of_call(step, around, small_share=0.0)
    peak = unplanned_replay(problem.graph).peak_bytes
    refused = solve_graph(problem.graph, 1, time_limit_seconds=3)
    assert refused.shortage is not None
    least = refused.shortage.minimum_budget_bytes
    budget = least + int(share * (peak - least))
    solution = solve_graph(problem.graph, budget, time_limit_seconds=3, gap=0.1)
    assert solution.schedule is not None
    return runs_of(problem, solution)


@pytest.mark.slow
@pytest.mark.parametrize("share", by_day([0.2, 0.6], [0.2]))
@pytest.mark.parametrize("name", by_day(SMALL, ["t5"]))
def test_a_program_computes_what_the_module_does(name: str, share: float) -> None:
    work = zoo.build(name, **SMALL[name])
    work.step()  # Libraries note things on their models in the first one.
    model = work.model
    args, kwargs = ((), work.inputs) if isinstance(work.inputs, dict) else ((work.inputs,), {})
    captured = capture_call(model, model.forward, args, kwargs)
    step = step_graph_of(captured.graph)
    runs = solved(step, share)
    assert runs.again
    program = CallProgram(captured, StepOrder.of(step, runs)).bound(model)
    assert difference(program, model, model.forward, args, kwargs) == ""


def test_programs_take_no_items_that_nobody_reads() -> None:
    """Run one by one, as under other flags than those of forward, they would be there to the end."""
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    captured = capture_call(module, module.forward, (torch.randn(4, 8, requires_grad=True),), {})
    once = order_of(captured.graph)
    for program in programs_of(captured.graph, StepOrder(once.forward, (*once.forward, *once.backward))):
        assert all(item.users for item in program.graph.find_nodes(op="call_function", target=operator.getitem))


def test_a_forward_that_keeps_nothing_may_draw_again_what_it_has_drawn() -> None:
    """Where an op runs again before the forward's end, it draws the same numbers, and none beside them."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    args = (torch.randn(4, 8, requires_grad=True),)
    captured = capture_call(module, module.forward, args, {})
    once = order_of(captured.graph)
    program = CallProgram(captured, StepOrder((*once.forward, *once.forward), once.backward)).bound(module)
    torch.manual_seed(7)
    expected, state = module(*args), torch.get_rng_state()
    torch.manual_seed(7)
    (output,) = program.outputs(args, {})
    assert torch.equal(output, expected)
    assert torch.equal(torch.get_rng_state(), state)
