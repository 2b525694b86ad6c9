"""How stages are put into groups, and which of them run as programs in which step, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from profiler.measurement.program_steps import (
    TIME_STEPS,
    OptionGroup,
    families_worth_capturing,
    grouped,
    growth_of,
    memory_steps,
    peak_of,
    steps_for,
    timed_steps,
)
from profiler.op_graph import StageOps, StageStorage
from profiler.records import Phase
from profiler.trace.partition import choose_stages
from profiler.trace.step_trace import trace_step
from tests.support.odd_models import workload
from tests.support.option_groups import BACKWARD, FIRST, FORWARD, SECOND, THIRD, flow, group, marked

# Which stages share a menu -----------------------------------------------------------


def test_stages_that_do_the_same_share_a_menu_unless_their_bytes_differ() -> None:
    """Six equal blocks: the first one takes the batch; in the backward of the last one other bytes are alive."""
    trace = trace_step(workload("plain"))
    stages = choose_stages(trace, ["blocks.*"])
    plain = dict(
        marked(phase, k, start_bytes=5, peak_bytes=9 + (phase == BACKWARD and k == 5), end_bytes=7)
        for phase in (FORWARD, BACKWARD)
        for k in range(len(stages))
    )
    groups = grouped(trace, stages, [0] * 6, plain)
    assert [each.members for each in groups] == [[0], [1, 2, 3, 4], [5]]
    assert [each.family for each in groups] == [0, 1, 1]
    assert groups[1].ops == groups[2].ops != groups[0].ops
    assert not any(each.is_captured for each in groups)
    # Stages of other kinds share nothing.
    assert [each.family for each in grouped(trace, stages, [0, 0, 0, 0, 0, 1], plain)] == [0, 1, 2]


def sized(size_bytes: int) -> StageOps:
    """As ``flow``, with storages of this size."""
    return flow(storages=tuple(replace(s, size_bytes=size_bytes) for s in flow().storages))


def test_families_that_save_little_together_are_captured_only_where_every_stage_is_to_be() -> None:
    """Six storages of a byte each are less than a hundredth of 3 x 200 + 6; nine are not."""
    large, little = OptionGroup(sized(200), [0], family=0), OptionGroup(sized(1), [4], family=1)
    groups = [large, little, replace(little, members=[2])]
    assert families_worth_capturing(groups, every=False) == {0: [0]}
    assert families_worth_capturing(groups, every=True) == {0: [0], 1: [2, 4]}
    groups.append(replace(little, members=[1]))
    assert families_worth_capturing(groups, every=False) == {0: [0], 1: [1, 2, 4]}


def test_where_nothing_is_saved_nothing_is_too_little() -> None:
    assert families_worth_capturing([OptionGroup(sized(0), [0])], every=False) == {0: [0]}
    assert families_worth_capturing([], every=True) == {}


# Which stages run as programs in which step ------------------------------------------


def running(steps: list[dict[int, OptionGroup]]) -> list[list[int]]:
    return [sorted(step) for step in steps]


def test_bytes_are_those_of_one_stage_of_each_group_and_seconds_those_of_all() -> None:
    groups = [group([0, 1, 2]), group([3, 5]), group([4], opaque="it is not")]
    assert memory_steps(groups) == [{0: groups[0], 3: groups[1]}]
    assert timed_steps(groups) == [{**dict.fromkeys((0, 1, 2), groups[0]), 3: groups[1], 5: groups[1]}] * TIME_STEPS
    assert steps_for(groups) == 1 + TIME_STEPS


def test_without_programs_there_are_no_steps() -> None:
    for groups in ([], [group([0], opaque="it is not")], [OptionGroup(flow(), [0, 1])]):
        assert memory_steps(groups) == timed_steps(groups) == []
        assert steps_for(groups) == 0


def ends(*, saves: bool, lets_go: bool) -> StageOps:
    """As ``flow``, of a stage that saves what it returns, or lets go of what it is given."""
    ops = flow()
    taken = StageStorage(size_bytes=8, op=-1, dies_after_stage=True, always_live=not lets_go)
    last = replace(ops.storages[THIRD], saved=saves, returned=True)
    return replace(ops, storages=(taken, ops.storages[FIRST], ops.storages[SECOND], last))


def test_neighbours_do_not_run_in_one_step_where_one_s_program_shows_in_the_other_s_bytes() -> None:
    def steps_of(**of: bool) -> list[list[int]]:
        return running(memory_steps([group([k], family=k, ops=ends(**of)) for k in range(3)]))

    assert steps_of(saves=True, lets_go=True) == [[0, 2], [1]]
    for saves, lets_go in ((True, False), (False, True), (False, False)):
        assert steps_of(saves=saves, lets_go=lets_go) == [[0, 1, 2]]
    # The one that lets its input go comes before the one that keeps its output: they do not touch.
    keeps, goes = ends(saves=True, lets_go=False), ends(saves=False, lets_go=True)
    assert running(memory_steps([group([1], ops=keeps), group([0], ops=goes)])) == [[0, 1]]
    assert running(memory_steps([group([0], ops=keeps), group([1], ops=goes)])) == [[0], [1]]
    # Only even ones: there is no second step.
    assert running(memory_steps([group([0, 1, 2], ops=ends(saves=True, lets_go=True))])) == [[0]]


# Phases ------------------------------------------------------------------------------


def test_phases_that_follow_each_other_grow_from_the_first_start_to_the_last_end() -> None:
    phases = [Phase(start_bytes=10, peak_bytes=30, end_bytes=20), Phase(start_bytes=20, peak_bytes=25, end_bytes=7)]
    assert (growth_of(phases), peak_of(phases)) == (-3, 20)
    assert (growth_of([]), peak_of([])) == (0, 0)
