"""Graph problems of steps, by hand."""

from __future__ import annotations

from dataclasses import replace

from planner.step_problem import LEAST_SECONDS, StepSurroundings, problem_of_call
from profiler.step_graph import StepGraph, StepOp, StepStorage

KIB = 2**10
BIG, OUT, SMALL = 10_000 * KIB, 20_000 * KIB, KIB


def small_step(statistics_bytes: int) -> StepGraph:
    """A norm whose statistics backward reads and whose output the next op alone reads; a gradient at the end."""
    return StepGraph(
        ops=(
            StepOp(name="norm", op="aten.norm.default", makes=(0, 1), seconds=2.0, transient_bytes=7),
            StepOp(name="exp", op="aten.exp.default", reads=(0,), makes=(2,), seconds=1.0),
            StepOp(
                name="back",
                op="aten.mul.Tensor",
                side="backward",
                reads=(1, 4),
                makes=(3,),
                once_reason="an effect",
            ),
        ),
        storages=(
            StepStorage(size_bytes=BIG),
            StepStorage(size_bytes=statistics_bytes),
            StepStorage(size_bytes=OUT, returned=True),
            StepStorage(size_bytes=SMALL, gradient=True),
            StepStorage(size_bytes=OUT, of_loss=True),
        ),
        resident_bytes=1000,
    )


AROUND = StepSurroundings(forward_bytes=1000, backward_bytes=1000, loss_bytes=1000)


def test_small_parts_that_live_longer_are_resident() -> None:
    graph = problem_of_call(small_step(SMALL), AROUND).graph
    assert [node.name for node in graph.nodes] == ["norm", "exp", "loss", "back"]
    assert graph.resident_bytes == 1000 + 2 * SMALL  # and the gradient
    norm, exp, loss, back = graph.nodes
    assert (norm.output_bytes, norm.transient_bytes, norm.seconds) == (BIG, 7, 2.0)
    assert (exp.inputs, loss.inputs, back.inputs) == (("norm",), ("exp",), ("loss",))
    assert (loss.output_bytes, loss.once, back.once, norm.once) == (OUT, True, True, False)
    assert back.seconds == LEAST_SECONDS


def test_large_parts_are_nodes_without_work() -> None:
    problem = problem_of_call(small_step(BIG), AROUND)
    norm, saved, *_, back = problem.graph.nodes
    assert (norm.output_bytes, norm.transient_bytes) == (2 * BIG, 7)
    assert (saved.name, saved.inputs, saved.output_bytes) == ("norm_saved", ("norm",), BIG)
    assert back.inputs == ("norm_saved", "loss")
    assert {name: group.ops[0] for name, group in problem.groups.items()} == {"norm": 0, "exp": 1, "back": 2}


def test_a_second_run_that_draws_holds_the_state_of_now_beside_the_one_of_then() -> None:
    step = small_step(SMALL)
    drawing = replace(step, ops=(replace(step.ops[0], state_bytes=KIB), *step.ops[1:]))
    plain, drawn = (problem_of_call(each, AROUND).graph for each in (step, drawing))
    assert drawn.resident_bytes - plain.resident_bytes == KIB
    assert drawn.nodes[0].transient_bytes - plain.nodes[0].transient_bytes == KIB


def test_an_op_may_be_called_loss() -> None:
    step = small_step(SMALL)
    named = StepGraph(
        ops=(StepOp(name="loss", op="aten.norm.default", makes=(0, 1)), *step.ops[1:]),
        storages=step.storages,
        resident_bytes=0,
    )
    assert problem_of_call(named, AROUND).loss == "loss_0"


def test_backward_may_have_no_ops() -> None:
    step = small_step(SMALL)
    problem = problem_of_call(replace(step, ops=step.ops[:2]), AROUND)
    assert [node.name for node in problem.graph.nodes] == ["norm", "exp", "loss"]
