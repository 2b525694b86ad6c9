"""Steps in which stages run as programs: what fails is opaque alone, and menus have what the steps showed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from profiler.measurement.captured_stages import ProposeRuns
from profiler.measurement.meter import Mark, Meter, memory_meter
from profiler.measurement.program_steps import TIME_STEPS, OptionGroup, ProgramSteps
from profiler.measurement.stage_probe import MarkedStep, StageProbe
from profiler.op_graph import StageStorage
from profiler.records import MenuRecord, Phase
from profiler.step_graph import StepGraph, StepRuns, runs_once
from profiler.workload.forward_patches import Forward
from profiler.workload.random_states import RandomState
from tests.support.odd_models import workload
from tests.support.option_groups import BACKWARD, FORWARD, flow, group, marked, step_graph

AGAIN = StepRuns((0, 1), (0, 2))
UPDATE = Phase(start_bytes=1, peak_bytes=7, end_bytes=1)


def proposed(graph: StepGraph) -> list[StepRuns]:
    return [runs_once(graph), AGAIN]


class StatedProbe(StageProbe):
    """Runs no step: says what each would have shown, and fails where these stages run as programs."""

    def __init__(self, fails: Collection[int] = (), error: Exception | None = None) -> None:
        super().__init__(workload("plain"), ())
        self.fails, self.error = fails, error
        self.ran: list[list[int]] = []

    def replacing_step(self, meter: Meter, instead: Mapping[int, Forward]) -> MarkedStep:
        self.ran.append([*instead])
        if self.error is not None and any(k in self.fails for k in instead):
            raise self.error
        step = MarkedStep(self, meter, instead)
        step.phases = [
            (mark, phase)
            for k in range(4)
            for mark, phases in (
                marked(FORWARD, k, start_bytes=0, peak_bytes=90, end_bytes=20, seconds=2.0),
                marked(BACKWARD, k, start_bytes=30, peak_bytes=100, end_bytes=0, seconds=6.0),
            )
            for phase in phases
        ]
        step.phases.append((Mark("optimizer"), UPDATE))
        return step


class Bound:
    """Stands for the program of a stage, of which only this is asked here."""

    gradients_held = True
    copied_gradient_bytes = 3


def steps_of(probe: StageProbe) -> ProgramSteps:
    plain = dict(marked(FORWARD, k, start_bytes=0, peak_bytes=80, end_bytes=50) for k in range(4))
    own = [each for k in range(4) for each in (marked(FORWARD, k, seconds=1.0), marked(BACKWARD, k, seconds=4.0))]
    timed = [(mark, phase) for mark, phases in own for phase in phases]
    return ProgramSteps(
        probe, plain, lambda: memory_meter(torch.device("cpu"), 0), RandomState(), lambda _: None, [timed]
    )


def measured(probe: StageProbe, groups: list[OptionGroup], programs: ProposeRuns | None = proposed) -> list[MenuRecord]:
    for each in groups:
        if each.captured is not None:
            each.captured.once |= dict.fromkeys(each.members, Bound())  # type: ignore[arg-type]
    return steps_of(probe).measure(groups, programs)


def test_a_menu_has_the_program_that_was_measured_first_and_others_as_their_replay_says() -> None:
    (menu,) = measured(StatedProbe(), [group([0, 1])])
    assert menu.graph == step_graph() and menu.opaque == "" and menu.gradients_held
    assert menu.copied_gradient_bytes == 3
    assert (menu.keep_forward_seconds, menu.keep_backward_seconds) == (1.0, 4.0)
    once, again = menu.options
    assert menu.once is once and once.runs == runs_once(step_graph()) and once.rerun == () and once.ops_again == 0
    assert (once.forward_seconds, once.backward_seconds) == (2.0, 6.0)
    assert (once.freed_bytes, once.forward_peak_bytes, once.backward_peak_bytes) == (50 - 20, 90, 70)
    assert again.runs == AGAIN and again.rerun == (0,) and again.ops_again == 1
    # The op that runs again takes a second where backward takes four; its 16 bytes are no longer handed over.
    assert (again.forward_seconds, again.backward_seconds) == pytest.approx((2.0, 6.0 * 5 / 4))
    assert again.freed_bytes == once.freed_bytes + 16
    assert menu.extra_seconds(once) == pytest.approx((1.0, 2.0))
    assert menu.extra_seconds(again) == pytest.approx((1.0, 2.0 + 1.5))


def test_steps_run_one_stage_of_each_group_for_bytes_and_all_for_seconds() -> None:
    probe = StatedProbe()
    measured(probe, [group([0, 1]), group([2], family=1), group([3], family=2, opaque="it is not")])
    assert probe.ran == [[0, 2], *[[0, 1, 2]] * TIME_STEPS]


def test_a_group_whose_program_fails_is_opaque_and_says_why_and_others_are_measured() -> None:
    groups = [group([0, 1]), group([2], family=1), group([3], family=2, opaque="it is not")]
    first, second, third = measured(StatedProbe({1}, RuntimeError("no more")), groups)
    assert first == MenuRecord(ops=flow(), opaque="running it as a program fails: RuntimeError: no more")
    assert first.once is None
    assert len(second.options) == 2 and second.opaque == ""
    assert third == MenuRecord(ops=flow(), opaque="it is not")


def test_orders_are_asked_for_once_for_the_groups_of_a_family() -> None:
    asked: list[StepGraph] = []

    def counted(graph: StepGraph) -> list[StepRuns]:
        asked.append(graph)
        return proposed(graph)

    groups = [group([0]), group([1])]
    groups[1].captured = groups[0].captured
    measured(StatedProbe(), groups, counted)
    assert len(asked) == 1


def test_what_was_never_tried_is_no_opaque_stage() -> None:
    probe = StatedProbe()
    assert measured(probe, [OptionGroup(flow(), [0])], None) == [MenuRecord(ops=flow())]
    assert probe.ran == []


def test_a_lucky_measurement_makes_no_program_faster_than_the_stage_s_own_code() -> None:
    (menu,) = measured(StatedProbe(), [group([0])])
    lucky = MenuRecord(
        ops=menu.ops, options=menu.options, graph=menu.graph, keep_forward_seconds=9.0, keep_backward_seconds=9.0
    )
    once, again = lucky.options
    assert lucky.extra_seconds(once) == (0.0, 0.0)
    assert lucky.extra_seconds(again) == pytest.approx((0.0, 1.5))


def test_the_last_step_for_bytes_is_late_in_training_and_its_update_is_noted() -> None:
    """Two neighbours, of which the first keeps what the second is given: they run in two steps."""
    ops = flow()
    taken = StageStorage(size_bytes=8, op=-1, dies_after_stage=True)
    ops = replace(ops, storages=(taken, *ops.storages[1:3], replace(ops.storages[3], returned=True)))
    probe, late = StatedProbe(), list[int]()

    @contextmanager
    def late_in_training() -> Iterator[None]:
        late.append(len(probe.ran))
        yield
        late.append(len(probe.ran))

    groups = [group([k], family=k, ops=ops, opaque="" if k < 2 else "it is not") for k in range(3)]
    for each in groups[:2]:
        assert each.captured is not None
        each.captured.once = {each.members[0]: Bound()}  # type: ignore[dict-item]
    steps = steps_of(probe)
    steps.measure(groups, proposed, late_in_training)
    assert probe.ran[:2] == [[0], [1]] and late == [1, 2]
    assert steps.late_phases == [UPDATE]
