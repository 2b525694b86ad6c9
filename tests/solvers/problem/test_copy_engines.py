"""Schedules with copies: a timeline worked out by hand, every rule that a copy can break, and laws."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from solvers import Chain, ReplayError, Schedule, replay
from solvers.problem.chain import Link
from solvers.problem.simulator import alive_before
from tests.support.chains import UNIT, actions

KEPT = replace(UNIT, options=(replace(UNIT.options[0], offload_units=(3, 1)),), offload_units=(1,))
CHAIN = Chain(stages=(KEPT,) * 3)
LINK = Link(to_host_bytes_per_second=2.0, to_device_bytes_per_second=1.0, latency_seconds=0.5)


# Unit stages: forward 1 s, backward 2 s, kept 4 as offload units of 3 and 1, boundary 1, forward peak 6, backward peak
# 1.
HAND = [
    ("forward", 0, 0),  # 0 to 1; leaves 5
    ("send", 0, 0),  # 3 bytes out: 1 to 1 + 0.5 + 1.5 = 3
    ("send", 0, 1),  # 1 byte out: 3 to 3 + 0.5 + 0.5 = 4
    ("forward", 1, 0),  # 1 to 2; 5 + 6 = 11; leaves 10
    ("release", 0, 0),  # waits from 2 to 3; leaves 7
    ("forward", 2, 0),  # 3 to 4; 7 + 6 = 13; leaves 12
    ("release", 0, 1),  # its copy is done at 4: no wait; leaves 11
    ("free", 2),  # 10
    ("backward", 2),  # 4 to 6; 11 at most, leaves 6
    ("free", 1),  # 5
    ("fetch", 0, 0),  # back from 6 to 6 + 0.5 + 3 = 9.5; leaves 8
    ("backward", 1),  # 6 to 8; 9 at most, leaves 4
    ("fetch", 0, 1),  # 9.5 to 11; leaves 5
    ("free", 0),  # 4
    ("backward", 0),  # waits from 8 to 11, then until 13; 5 at most
]


def test_three_stages_with_stalls_in_both_directions() -> None:
    result = replay(CHAIN, actions(*HAND), LINK)
    assert [m.after_bytes for m in result.timeline] == [5, 5, 5, 10, 7, 12, 11, 10, 6, 5, 8, 4, 5, 4, 0]
    assert [m.peak_bytes for m in result.timeline] == [6, 5, 5, 11, 10, 13, 12, 11, 11, 6, 8, 9, 5, 5, 5]
    assert [m.begin_seconds for m in result.timeline] == [0, 1, 1, 1, 2, 3, 4, 4, 4, 6, 6, 6, 8, 8, 8]
    assert {p: m.stall_seconds for p, m in enumerate(result.timeline) if m.stall_seconds} == {4: 1.0, 14: 3.0}
    assert (result.peak_bytes, result.seconds, result.stall_seconds, result.host_peak_bytes) == (13, 13.0, 4.0, 4)
    copies = [(c.unit, c.direction, c.begin_seconds, c.end_seconds, c.size_bytes) for c in result.copies]
    assert copies == [
        (0, "to_host", 1.0, 3.0, 3),
        (1, "to_host", 3.0, 4.0, 1),
        (0, "to_device", 6.0, 9.5, 3),
        (1, "to_device", 9.5, 11.0, 1),
    ]


# Stage 1 is dropped and holds boundary 0 (1 byte), which travels; it runs again from it.
DROPPED = [
    ("forward", 0, 0),  # 0 to 1; leaves 5
    ("forward", 1),  # 1 to 2; leaves 6
    ("send", 1, 0),  # out from 2 to 3
    ("forward", 2, 0),  # 2 to 3; leaves 11
    ("release", 1, 0),  # no wait; 10
    ("backward", 2),  # 3 to 5; 6
    ("fetch", 1, 0),  # back from 5 to 6.5; 7
    ("recompute", 1, 0),  # waits until 6.5, ends at 7.5; 11
    ("backward", 1),  # 9.5; 7
    ("backward", 0),  # 11.5; boundaries 0 to 2 remain: 3
]


def test_the_input_of_a_dropped_stage_travels_while_it_waits() -> None:
    result = replay(CHAIN, actions(*DROPPED), LINK)
    assert [m.after_bytes for m in result.timeline] == [5, 6, 6, 11, 10, 6, 7, 11, 7, 3]
    assert (result.seconds, result.stall_seconds, result.host_peak_bytes) == (11.5, 1.5, 1)


def test_an_input_may_travel_again_after_a_run_that_drops_its_stage_again() -> None:
    again = [("forward", 1), ("send", 1, 0), ("release", 1, 0), ("fetch", 1, 0)]
    result = replay(CHAIN, actions(*DROPPED[:7], *again, *DROPPED[7:]), LINK)
    assert [(c.begin_seconds, c.end_seconds) for c in result.copies[2:]] == [(7.5, 8.5), (8.5, 10.0)]
    assert (result.seconds, result.host_peak_bytes) == (15.0, 1)


def test_what_is_away_is_known_before_every_action() -> None:
    found = [alive_before(CHAIN, actions(*HAND), k).away for k in range(len(HAND))]
    one, both = ((0, 0),), ((0, 0), (0, 1))
    assert found == [(), (), (), (), (), one, one, both, both, both, both, ((0, 1),), ((0, 1),), (), ()]


def test_a_link_without_latency_and_of_endless_rate_never_stalls() -> None:
    result = replay(CHAIN, actions(*HAND), Link(to_host_bytes_per_second=math.inf, to_device_bytes_per_second=math.inf))
    assert (result.peak_bytes, result.seconds, result.stall_seconds) == (13, 9.0, 0.0)


def test_host_memory_has_a_limit() -> None:
    assert replay(CHAIN, actions(*HAND), replace(LINK, host_bytes=4)).host_peak_bytes == 4
    with pytest.raises(ReplayError, match="action 2: 4 bytes of host memory are used, the limit is 3"):
        replay(CHAIN, actions(*HAND), replace(LINK, host_bytes=3))


@pytest.mark.parametrize("link", [None, replace(LINK, to_host_bytes_per_second=0.0), replace(LINK, host_bytes=0)])
def test_copies_need_a_usable_link(link: Link | None) -> None:
    with pytest.raises(ReplayError, match="action 1: .*no usable link"):
        replay(CHAIN, actions(*HAND), link)


FIRST = [("forward", 0, 0), ("forward", 1), ("forward", 2, 0)]
OUT = [("send", 0, 0), ("release", 0, 0)]
LEFT = [("send", 1, 0), ("release", 1, 0)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("run", 0)], "a chain has no action 'run'"),
        ([("send", 0, 0)], "stage 0 holds nothing that can be offloaded"),
        ([("forward", 0, 0), ("send", 0, 2)], "stage 0 holds no offload unit 2"),
        ([("forward", 0, 0), ("send", 0)], "stage 0 holds no offload unit None"),
        ([("forward", 0, 0), ("send", 0, 0), ("send", 0, 0)], "is sent twice"),
        ([("forward", 0, 0), ("release", 0, 0)], "offload unit 0 of stage 0 is not on its way to host memory"),
        ([("forward", 0, 0), *OUT, ("release", 0, 0)], "is not on its way to host memory"),
        ([("forward", 0, 0), ("send", 0, 0), ("fetch", 0, 0)], "is not in host memory alone"),
        ([("forward", 0), ("forward", 1), ("free", 0), ("send", 1, 0)], "stage 1 holds nothing"),
        ([*FIRST, *LEFT, ("forward", 1)], "stage 1 needs its offload unit 0, which is not fetched back"),
        ([*FIRST, *LEFT, ("backward", 2), ("recompute", 1, 0)], "stage 1 needs its offload unit 0"),
        ([*FIRST, ("send", 2, 0), ("backward", 2)], "stage 2 needs its offload unit 0"),
        ([*FIRST, *LEFT, ("free", 0)], "boundary 0 is freed while parts of it"),
        ([*FIRST, ("free", 1), ("send", 2, 0), ("backward", 2)], "boundary 1 is freed while stage 2, which is kept"),
        ([("forward", 0), *FIRST[1:], *LEFT, ("forward", 0)], "stage 0 is run again while parts of its output"),
    ],
)
def test_impossible_copies_are_refused_with_the_reason(rows: list[tuple], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        replay(CHAIN, actions(*rows), LINK)


@pytest.mark.parametrize("schedule", [actions(*HAND), actions(*DROPPED)])
def test_a_faster_link_is_never_slower(schedule: Schedule) -> None:
    rates = [0.01 * 1.7**i for i in range(24)] + [math.inf]
    results = [replay(CHAIN, schedule, Link(to_host_bytes_per_second=r, to_device_bytes_per_second=r)) for r in rates]
    assert [r.seconds for r in results] == sorted((r.seconds for r in results), reverse=True)
    assert len({r.peak_bytes for r in results}) == 1
    assert results[0].seconds > results[-1].seconds
