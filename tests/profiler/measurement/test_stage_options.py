"""How choices are put into groups, spread over steps and weighed, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from profiler.measurement import stage_options
from profiler.measurement.meter import memory_meter
from profiler.measurement.option_steps import OptionSteps, _beaten, _menu
from profiler.measurement.stage_options import (
    KEEP,
    ChoiceCost,
    OptionGroup,
    at_fault,
    families_of,
    grouped,
    memory_assignments,
    rounds_for,
    selections,
    spread_out,
    steps_for,
    take_turns,
    time_assignments,
    unforced,
    without,
)
from profiler.measurement.stage_probe import SelectiveStep, StageProbe
from profiler.op_graph import Choice, ChoiceError, StageOp, StageOps, StageStorage
from profiler.records import MenuRecord, OptionRecord
from profiler.trace.obstacles import GOES_BACKWARD, why_not_recomputable
from profiler.trace.partition import choose_stages
from profiler.trace.step_trace import trace_step
from profiler.workload.snapshot import RandomState
from profiler.workload.workload import Workload
from tests.support.odd_models import workload
from tests.support.option_groups import BACKWARD, FIRST, FORWARD, SECOND, THIRD, choices, flow, group, marked

# Which stages share a menu -----------------------------------------------------------


def test_stages_that_do_the_same_share_a_menu_unless_their_bytes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six equal blocks: the first one takes the batch; in the backward of the last one other bytes are alive."""
    trace = trace_step(workload("plain"))
    stages = choose_stages(trace, ["blocks.*"])
    plain = dict(
        marked(phase, k, start_bytes=5, peak_bytes=9 + (phase == BACKWARD and k == 5), end_bytes=7)
        for phase in (FORWARD, BACKWARD)
        for k in range(len(stages))
    )
    proposed: list[StageOps] = []

    def everything(ops: StageOps) -> list[Choice]:
        proposed.append(ops)
        return [Choice.of(ops, [k for k, s in enumerate(ops.storages) if s.op < 0])]

    groups = grouped(trace, stages, [0] * 6, plain, everything)
    assert [each.members for each in groups] == [[0], [1, 2, 3, 4], [5]]
    assert [each.family for each in groups] == [0, 1, 1] and len(proposed) == 2
    assert [len(each.choices) for each in groups] == [1, 1, 1]
    # Stages of other kinds share nothing.
    assert [each.family for each in grouped(trace, stages, [0, 0, 0, 0, 0, 1], plain, everything)] == [0, 1, 2]
    # Those that save little together are not looked into: the first block is a sixth.
    monkeypatch.setattr(stage_options, "SMALLEST_SHARE", 0.2)
    assert [len(each.choices) for each in grouped(trace, stages, [0] * 6, plain, everything)] == [0, 1, 1]


# Which step runs which choice --------------------------------------------------------


def test_every_choice_is_run_once_by_stages_that_take_turns() -> None:
    found = memory_assignments([group([0, 1, 2], 5), group([3], 2, family=1)])
    assert found == [{0: (0, 0), 1: (0, 1), 2: (0, 2), 3: (1, 0)}, {0: (0, 3), 1: (0, 4), 3: (1, 1)}]


def test_seconds_are_compared_with_those_of_keeping_everything_on_other_stages_each_time() -> None:
    families = families_of([group([0, 1], 3), group([2], 1, family=1)])
    kept = (0, KEEP)
    assert time_assignments(families) == [{0: (0, 0), 1: (0, 1), 2: (1, 0)}, {0: (0, 2), 1: kept, 2: (1, KEEP)}]
    assert time_assignments(families, 1) == [{1: (0, 0), 0: (0, 1), 2: (1, 0)}, {1: (0, 2), 0: kept, 2: (1, KEEP)}]
    assert time_assignments(families, 2) == time_assignments(families)


def ends(*, saves: bool, lets_go: bool) -> StageOps:
    ops = flow()
    taken = StageStorage(size_bytes=8, op=-1, dies_after_stage=True, always_live=not lets_go)
    last = replace(ops.storages[THIRD], saved=saves, returned=True)
    return replace(ops, storages=(taken, ops.storages[FIRST], ops.storages[SECOND], last))


def test_neighbours_do_not_run_in_one_step_where_one_s_choice_shows_in_the_other_s_bytes() -> None:
    odd_and_even = [{0: (0, 0), 2: (0, 2)}, {1: (0, 1)}]
    assert memory_assignments([group([0, 1, 2], 3, ops=ends(saves=True, lets_go=True))]) == odd_and_even
    for saves, lets_go in ((True, False), (False, True), (False, False)):
        alone = memory_assignments([group([0, 1, 2], 3, ops=ends(saves=saves, lets_go=lets_go))])
        assert alone == [{0: (0, 0), 1: (0, 1), 2: (0, 2)}]
    # The one that lets its input go comes before the one that keeps its output: they do not touch.
    apart = [group([1], 1, 0, ends(saves=True, lets_go=False)), group([0], 1, 1, ends(saves=False, lets_go=True))]
    assert memory_assignments(apart) == [{0: (1, 0), 1: (0, 0)}]
    apart = [group([0], 1, 0, ends(saves=True, lets_go=False)), group([1], 1, 1, ends(saves=False, lets_go=True))]
    assert memory_assignments(apart) == [{0: (0, 0)}, {1: (1, 0)}]


def test_calls_of_a_module_that_stores_tensors_do_not_run_choices_in_one_step() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    trace = trace_step(
        Workload(
            model=nn.Sequential(first, second, first, second, first),
            inputs=torch.randn(4, 8),
            loss=lambda output: output.sum(),
        )
    )
    groups = [group([0, 2, 4], 3), group([1, 3], 2, family=1)]
    together = memory_assignments(groups)
    assert together == [{0: (0, 0), 2: (0, 1), 4: (0, 2), 1: (1, 0), 3: (1, 1)}]
    take_turns(groups, choose_stages(trace, [nn.Linear]), [])
    assert memory_assignments(groups) == together
    take_turns(groups, choose_stages(trace, [nn.Linear]), [0, 2, 4])
    assert memory_assignments(groups) == [{0: (0, 0), 1: (1, 0), 3: (1, 1)}, {2: (0, 1)}, {4: (0, 2)}]
    take_turns(groups, choose_stages(trace, [nn.Linear]), range(5))
    assert memory_assignments(groups) == [{0: (0, 0), 1: (1, 0)}, {2: (0, 1), 3: (1, 1)}, {4: (0, 2)}]


def test_how_many_steps_the_measurement_takes() -> None:
    assert [rounds_for(steps) for steps in (0, 1, 2, 3, 4, 5, 100)] == [3, 3, 1, 1, 1, 1, 1]
    groups = [group([0, 1], 3), group([2], 1, family=1)]
    # Bytes: 3 choices on 2 stages. Seconds the same.
    assert steps_for(groups) == 2 + 2


def chained(seconds: Sequence[float]) -> StageOps:
    """As ``flow``, with ops of these seconds."""
    ops = tuple(replace(op, seconds=spent) for op, spent in zip(flow().ops, seconds, strict=True))
    return flow(ops=ops)


def test_where_there_is_room_for_few_choices_those_that_seem_beaten_go_first() -> None:
    ops = chained((1.0, 5.0, 2.0))
    much, dear, little = (
        Choice("much", (), frozenset({0, 2})),
        Choice("dear", (FIRST,), frozenset({1})),  # frees less than "much" and takes longer
        Choice("little", (FIRST, SECOND), frozenset({2})),
    )
    offered = [dear, little, much]
    assert spread_out(offered, ops, 3) == offered
    assert spread_out(offered, ops, 2) == [little, much]
    assert spread_out(offered, ops, 1) == [much]
    own = OptionGroup(ops, [0], [replace(dear, stated=True)], most=1)
    own.take(offered)
    assert [(choice.name, choice.stated) for choice in own.choices] == [("dear", True), ("much", False)]


def test_stages_are_told_what_runs_again_and_kept_ones_nothing() -> None:
    found = selections([group([0, 1], 2)], {0: (0, 1), 1: (0, KEEP)})
    assert list(found) == [0] and found[0].rerun == {1} and found[0].ordinals == (0, 1, 2)


# What it costs -----------------------------------------------------------------------


def option(seconds: float = 1.0, freed: int = 10, forward: int = 5, backward: int = 5) -> OptionRecord:
    return OptionRecord(
        name="",
        kept=(),
        rerun=(0,),
        forward_seconds=seconds,
        backward_seconds=seconds,
        freed_bytes=freed,
        forward_peak_bytes=forward,
        backward_peak_bytes=backward,
    )


@pytest.mark.parametrize(
    ("other", "beaten"),
    [
        (option(), False),  # Equal ones both stay.
        (option(seconds=0.5), True),
        (option(freed=11), True),
        (option(forward=4), True),
        (option(backward=4), True),
        (option(seconds=0.5, freed=9), False),
        (option(seconds=0.5, forward=6), False),
        (option(freed=20, backward=6), False),
        (option(seconds=2.0), False),
    ],
)
def test_an_option_that_is_worse_in_everything_is_left_out(other: OptionRecord, beaten: bool) -> None:
    mine = option()
    assert _beaten(mine, MenuRecord(ops=flow(), options=(mine, other))) is beaten


# Three ops of a second each: one that runs again costs a third of the forward, here 3 of 9 seconds, at least.
@pytest.mark.parametrize(
    ("forward", "backward", "extra"),
    [
        (9.0, 10.0, (0.0, 3.0)),  # Measured as if it cost nothing.
        (8.0, 5.0, (0.0, 3.0)),  # Measured as if it were faster.
        (9.5, 14.0, (0.5, 4.0)),  # More than its share: as measured.
    ],
)
def test_what_runs_again_costs_its_share_of_the_forward_at_least(
    forward: float, backward: float, extra: tuple[float, float]
) -> None:
    own = replace(option(), forward_seconds=forward, backward_seconds=backward)
    menu = MenuRecord(ops=flow(), options=(own,), keep_forward_seconds=9.0, keep_backward_seconds=10.0)
    assert menu.extra_seconds(own) == pytest.approx(extra)


def test_ops_without_seconds_have_no_share() -> None:
    ops = flow(ops=tuple(replace(op, seconds=0.0) for op in flow().ops))
    menu = MenuRecord(ops=ops, options=(option(),), keep_forward_seconds=9.0, keep_backward_seconds=1.0)
    assert menu.extra_seconds(option()) == (0.0, 0.0)


def test_a_lucky_measurement_beats_nothing() -> None:
    """Frees as much with two ops run again as another one with one, and was measured as if that took no time."""
    lucky = replace(option(seconds=0.5), name="lucky", rerun=(0, 1))
    menu = MenuRecord(ops=flow(), options=(option(), lucky), keep_forward_seconds=3.0, keep_backward_seconds=0.5)
    assert not _beaten(menu.options[0], menu)
    assert _beaten(lucky, menu)


def test_an_option_that_frees_nothing_is_left_out_unless_a_person_asked_for_it() -> None:
    costs = [ChoiceCost(1.0, 2.0, 0, 3, 4), ChoiceCost(1.5, 2.5, 6, 7, 8), ChoiceCost(0.5, 0.75)]
    for stated, names in ((False, ["choice 1"]), (True, ["choice 0", "choice 1"])):
        own = OptionGroup(flow(), [0], [replace(choice, stated=stated) for choice in choices(2)])
        menu = _menu(own, costs, "")
        assert [each.name for each in menu.options] == names
        last = menu.options[-1]
        assert (last.forward_seconds, last.backward_seconds, last.freed_bytes) == (1.5, 2.5, 6)
        assert (last.forward_peak_bytes, last.backward_peak_bytes, last.rerun) == (7, 8, (1,))
        assert (menu.keep_forward_seconds, menu.keep_backward_seconds) == (0.5, 0.75)
    strayed = _menu(own, costs, "it strays")
    assert strayed.options == () and strayed.reason == "it strays"


# Ops that do not give the same again -------------------------------------------------


@pytest.mark.parametrize(
    ("rerun", "wrong", "fault"),
    [
        ({0, 1, 2}, {1, 2}, {1}),  # The third op merely read what the second one made.
        ({0, 1, 2}, {2}, {2}),
        ({0, 1, 2}, {0, 2}, {0}),  # Misled through the second op, whose result nobody looked at.
        ({0, 2}, {0, 2}, {0, 2}),  # What the third reads is kept: it is at fault itself.
        ({0, 1, 2}, set(), set()),
    ],
)
def test_the_op_at_fault_is_the_first_of_those_that_differ(rerun: set[int], wrong: set[int], fault: set[int]) -> None:
    assert at_fault(flow(), rerun, wrong) == fault


def test_an_op_that_changes_what_it_reads_may_itself_be_at_fault() -> None:
    ops = flow().ops
    changing = StageOp(op="aten.op_.default", module="", seconds=1.0, reads=((FIRST, 0),), writes=(FIRST,))
    changed = flow(ops=(ops[0], changing, StageOp(op="aten.op2.default", module="", seconds=1.0, reads=((FIRST, 1),))))
    assert at_fault(changed, {0, 1, 2}, {0, 1, 2}) == {0, 1}


def propose(ops: StageOps) -> Sequence[Choice]:
    """Every single op that may run again."""
    return [Choice(f"choice {k}", (), frozenset({k})) for k, op in enumerate(ops.ops) if not op.not_rerunnable_reason]


def test_choices_are_proposed_anew_without_the_ops_at_fault() -> None:
    own = group([0], 3)
    stated = replace(own.choices[0], name="stated", stated=True)
    own.choices[0] = stated
    without(own, {1}, propose)
    assert [op.not_rerunnable_reason for op in own.ops.ops] == ["", "run again, it did not give the same", ""]
    assert [choice.name for choice in own.choices] == ["stated", "choice 2"]


def test_what_a_person_asked_for_is_refused_if_it_has_an_op_at_fault_unless_it_was_forced() -> None:
    own = group([0], 2)
    own.choices[1] = replace(own.choices[1], stated=True)
    with pytest.raises(ChoiceError, match=r"op 1 \(aten\.op1\.default\): expected one that gives the same"):
        without(own, {1}, propose)
    ops = own.ops.ops
    own.ops = replace(own.ops, ops=(ops[0], replace(ops[1], not_rerunnable_reason="it must not"), ops[2]))
    assert [choice.name for choice in unforced(own)] == ["choice 0"]
    without(own, {1}, propose)
    assert [choice.name for choice in own.choices] == ["choice 1", "choice 0", "choice 2"]
    assert own.ops.ops[1].not_rerunnable_reason == "it must not"


class FailingProbe(StageProbe):
    """Every step of it raises the same."""

    def __init__(self, error: Exception) -> None:
        super().__init__(workload("plain"), ())
        self.error = error

    def selective_step(self, *_: Any, **__: Any) -> SelectiveStep:
        raise self.error


def checking(error: Exception) -> OptionSteps:
    return OptionSteps(
        FailingProbe(error), {}, lambda: memory_meter(torch.device("cpu"), 0), RandomState.capture(), lambda _: None
    )


def test_choices_that_torch_refuses_to_check_together_are_left_to_the_measurement() -> None:
    own = group([0], 2)
    checking(torch.OutOfMemoryError("no room")).check([own], propose)
    assert own.choices == choices(2) and not any(op.not_rerunnable_reason for op in own.ops.ops)


@pytest.mark.parametrize("error", [KeyError(3), AssertionError("ours"), TypeError("ours"), ValueError("ours")])
def test_any_other_error_of_a_check_is_not_swallowed(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        checking(error).check([group([0], 2)], propose)
    assert caught.value is error


def test_nothing_is_offered_inside_a_stage_that_the_forward_goes_backward_through() -> None:
    """What it dropped would be made again while forward goes on, and be kept by the graph of that backward."""
    work = workload("forces")
    trace = trace_step(work)
    stages = choose_stages(trace, ["blocks.*"])
    (own, *others) = grouped(trace, stages, [0] * len(stages), {}, propose)
    assert {group.reason for group in (own, *others)} == {GOES_BACKWARD} and not own.choices
    assert {why_not_recomputable(stage.call) for stage in stages} == {GOES_BACKWARD}
