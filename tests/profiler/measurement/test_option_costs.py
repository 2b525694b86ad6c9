"""Steady times find what each thing takes, whatever stalls and whole steps come between."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from profiler.measurement.meter import Mark, Place
from profiler.measurement.option_costs import Costs, Sample, steady_seconds
from profiler.measurement.stage_marks import OpRun
from profiler.measurement.stage_options import KEEP, ChoiceCost, OptionGroup, families_of
from profiler.op_graph import Choice
from profiler.records import Phase
from tests.support.option_groups import BACKWARD, FORWARD, flow, group, marked

TRUE = {"keep": 4.0, "cheap": 4.4, "dear": 9.0}


def samples(paces: list[float], stalls: dict[tuple[int, str], float]) -> list[Sample]:
    return [
        Sample(step, what, seconds * pace * stalls.get((step, what), 1.0))
        for step, pace in enumerate(paces)
        for what, seconds in TRUE.items()
    ]


def test_slow_steps_do_not_count() -> None:
    assert steady_seconds(samples([1.0, 3.0, 1.0, 2.0], {})) == pytest.approx(TRUE)


def test_single_stalls_do_not_count() -> None:
    stalled = samples([1.0] * 4, {(0, "keep"): 50.0, (2, "dear"): 7.0})
    assert steady_seconds(stalled) == pytest.approx(TRUE)


def test_a_thing_that_was_only_timed_in_slow_steps_is_not_blamed_for_them() -> None:
    found = [s for s in samples([1.0, 1.0, 2.0, 2.0], {}) if s.what != "cheap" or s.step > 1]
    assert steady_seconds(found) == pytest.approx(TRUE)


def test_what_was_timed_once_shows_no_pace_and_is_held_against_that_of_its_step() -> None:
    found = [s for s in samples([1.0, 1.0, 2.0, 1.0], {}) if s.what == "keep" or s.step == 2]
    found.append(Sample(2, "cheaper", 2 * 4.2))
    assert steady_seconds(found) == pytest.approx({**TRUE, "cheaper": 4.2})


def test_the_order_of_the_samples_does_not_matter() -> None:
    shuffled = samples([1.0, 2.5, 1.0, 1.5], {(1, "cheap"): 3.0})
    random.Random(0).shuffle(shuffled)
    assert steady_seconds(shuffled) == pytest.approx(TRUE)


def test_nothing_timed_is_nothing() -> None:
    assert steady_seconds([]) == {}


def test_a_family_times_the_choices_of_all_its_groups_each_once() -> None:
    first, second = group([0], 1), group([1, 2], 3)
    first.choices = second.choices[1:2]
    (family,) = families_of([first, second])
    assert [choice.name for choice in family.choices] == ["choice 1", "choice 0", "choice 2"]
    costs = Costs([first, second], {})
    for place, choice in enumerate(family.choices):
        step = {Mark("again", Place("stage", 1)): [Phase(seconds=1.0 + place)]}
        costs.add_seconds({1: (0, place)}, step, {1: [OpRun(op, "runs") for op in choice.rerun]})
    found = [[cost.backward_seconds for cost in costs_of] for costs_of in costs.finish()]
    assert found == [[1.0, 0.0], [2.0, 1.0, 3.0, 0.0]]


def test_bytes_are_those_that_the_plain_stage_keeps_more() -> None:
    groups = [group([0, 1], 1)]
    plain = dict([marked(FORWARD, 0, start_bytes=100, peak_bytes=190, end_bytes=150)])
    costs = Costs(groups, plain)
    costs.add_memory(
        {0: (0, 0)},
        {
            Mark(FORWARD, Place("stage", 0)): [
                Phase(start_bytes=200, peak_bytes=230, end_bytes=210),
                Phase(start_bytes=210, peak_bytes=270, end_bytes=220),
            ],
            Mark(BACKWARD, Place("stage", 0)): [Phase(start_bytes=220, peak_bytes=300, end_bytes=200)],
        },
    )
    assert costs.finish() == [
        [ChoiceCost(freed_bytes=50 - 20, forward_peak_bytes=70, backward_peak_bytes=80), ChoiceCost()]
    ]


def seconds_of(forward: float, backward: float, k: int, again: Sequence[float] = ()) -> dict[Mark, list[Phase]]:
    step = dict([marked(FORWARD, k, seconds=forward), marked(BACKWARD, k, seconds=backward)])
    return {**step, Mark("again", Place("stage", k)): [Phase(seconds=each) for each in again]}


def test_seconds_are_those_of_keeping_everything_with_the_ops_that_ran_again() -> None:
    groups = [group([0], 1), group([1], 1), group([2], 0, family=1)]
    costs = Costs(groups, {})
    step = {**seconds_of(5.2, 8.6, 0, [0.25]), **seconds_of(4.0, 8.0, 1)}
    costs.add_seconds({0: (0, 0), 1: (0, KEEP)}, step, {0: [OpRun(0, "runs")]})
    chosen, kept, other = costs.finish()[0] + costs.finish()[2]
    assert (kept, other) == (ChoiceCost(forward_seconds=4.0, backward_seconds=8.0), ChoiceCost())
    assert (chosen.forward_seconds, chosen.backward_seconds) == pytest.approx((5.2, 8.6 + 0.25))
    assert costs.finish()[1] == [chosen, kept]


def test_an_op_takes_the_same_in_every_choice_and_carrying_out_as_much_as_it_typically_does() -> None:
    both, one, none = (Choice(name="", kept=(), rerun=frozenset(ops)) for ops in ({0, 1}, {1}, {2}))
    groups = [OptionGroup(flow(), [0], [both, one, none])]
    costs = Costs(groups, {})
    seen = (((0, 1), (3.0, 1.0), 0.013), ((1,), (5.0,), 9.0), ((2,), (0.5,), 0.0))
    for place, (ops, seconds, more) in enumerate(seen):
        costs.add_seconds(
            {0: (0, place)}, seconds_of(1.0 + more, 2.0, 0, seconds), {0: [OpRun(op, "runs") for op in ops]}
        )
    costs.add_seconds({0: (0, KEEP)}, seconds_of(1.0, 2.0, 0))
    found = costs.finish()[0]
    # Op 1 was seen at 1 and 5 seconds; the lower quartile counts. Of 0.001, 9 / 12 and 0 each, 0.001 is typical.
    assert [cost.backward_seconds for cost in found] == pytest.approx([2.0 + 4.0, 2.0 + 1.0, 2.0 + 0.5, 2.0])
    assert [cost.forward_seconds for cost in found] == pytest.approx([1.0 + 0.013, 1.0 + 0.012, 1.0 + 0.012, 1.0])


def test_packing_is_a_part_of_the_forward_and_unpacking_of_the_backward() -> None:
    """An op that is packed in one choice and runs again in another is timed in each by itself."""
    family = group([0], 2)
    first, second = family.choices
    family.choices = [
        replace(first, rerun=frozenset({1}), packed=frozenset({1})),
        replace(second, rerun=frozenset({1})),
    ]
    costs = Costs([family], {})
    bits = [OpRun(1, "packs"), OpRun(1, "unpacks")]
    costs.add_seconds({0: (0, 0)}, seconds_of(1.0, 2.0, 0, [0.25, 0.5]), {0: bits})
    costs.add_seconds({0: (0, 1)}, seconds_of(1.0, 2.0, 0, [4.0]), {0: [OpRun(1, "runs")]})
    costs.add_seconds({0: (0, KEEP)}, seconds_of(1.0, 2.0, 0))
    packed, again, _ = costs.finish()[0]
    assert (packed.forward_seconds, packed.backward_seconds) == pytest.approx((1.25, 2.5))
    assert (again.forward_seconds, again.backward_seconds) == pytest.approx((1.0, 6.0))
