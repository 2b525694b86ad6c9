"""What of a step may be sent to host memory, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planner.steps.copy_candidates import candidates_of, sets_to_send
from planner.steps.graph_problem import LEAST_SECONDS, step_problem
from solvers.graph.liveness import unplanned_replay
from solvers.problem.link import Link
from tests.support.step_profiles import AROUND, KIB, chain_step

SIZE = 100 * KIB


def test_results_that_backward_reads_may_be_sent_the_dearest_first() -> None:
    step = chain_step(layers=5)
    dear = tuple(replace(op, seconds=9.0) if op.name == "layer_2" else op for op in step.ops)
    found = candidates_of(replace(step, ops=dear), AROUND)
    assert [each.storages for each in found] == [(2,), (0,), (1,), (3,)]  # what is returned is not among them
    assert [(each.size_bytes, each.seconds) for each in found][:2] == [(SIZE, 9.0), (SIZE, 1.0)]


def test_what_is_small_written_or_not_read_in_backward_is_not_sent() -> None:
    assert candidates_of(chain_step(size_bytes=1000), AROUND) == []
    step = chain_step(layers=3)
    written = (replace(step.storages[0], written=True), *step.storages[1:])
    assert [each.storages for each in candidates_of(replace(step, storages=written), AROUND)] == [(1,)]
    unread = tuple(replace(op, reads=(4,)) if op.name in ("back_1", "back_2") else op for op in step.ops)
    assert [each.storages for each in candidates_of(replace(step, ops=unread), AROUND)] == [(0,)]


def test_a_sent_result_leaves_its_op_nothing_and_comes_back_from_nothing() -> None:
    step = chain_step(layers=3)
    problem = step_problem(step, AROUND, sent={0})
    op, here, reader, *_ = problem.graph.nodes
    assert (op.name, op.output_bytes, op.transient_bytes, op.once) == ("layer_0", 0, SIZE, True)
    assert (here.inputs, here.output_bytes, here.seconds, here.once) == (("layer_0",), SIZE, LEAST_SECONDS, False)
    assert reader.inputs == (here.name,)
    assert problem.fetched == {here.name: (0,)}
    plain = step_problem(step, AROUND).graph
    assert unplanned_replay(problem.graph).peak_bytes == unplanned_replay(plain).peak_bytes


def test_where_nothing_runs_again_only_what_was_sent_does() -> None:
    nodes = step_problem(chain_step(layers=3), AROUND, sent={0}, rerun=False).graph.nodes
    assert [node.name for node in nodes if not node.once] == ["layer_0_here"]


@pytest.mark.parametrize(
    ("seconds", "host_bytes", "counts"),
    [(2.5, None, [1, 2, 4]), (0.5, None, [2, 4]), (1e-9, None, [4]), (2.5, 3 * SIZE, [1, 2, 3]), (2.5, SIZE - 1, [])],
)
def test_sets_take_shares_of_the_link_s_time_and_no_more_than_the_host_holds(
    seconds: float, host_bytes: int | None, counts: list[int]
) -> None:
    candidates = candidates_of(chain_step(layers=5), AROUND)
    link = Link(to_host_bytes_per_second=SIZE / seconds, to_device_bytes_per_second=math.inf, host_bytes=host_bytes)
    if seconds == 0.5:
        counts = [2, 4]
    assert [len(each) for each in sets_to_send(candidates, link, 5.0, 10.0)] == counts
