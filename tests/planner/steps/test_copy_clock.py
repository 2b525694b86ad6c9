"""The seconds of copies beside a step, by hand."""

from __future__ import annotations

import pytest

from planner.steps.copy_clock import StepSeconds, copy_times
from profiler.step_replay import StepCopy, StepRuns, runs_once
from solvers.problem.link import Link
from tests.support.step_profiles import chain_step, profile_of

STEP = chain_step(layers=4, size_bytes=100)
ONCE = runs_once(STEP)  # four seconds forward, eight back
SECONDS = StepSeconds(of_op=tuple(op.seconds for op in STEP.ops), between=1.0)


def link(to_host: float, to_device: float) -> Link:
    """With so many seconds for each copy."""
    return Link(to_host_bytes_per_second=100 / to_host, to_device_bytes_per_second=100 / to_device)


def sent(storage: int, let_go: int, fetched: int) -> list[StepCopy]:
    return [
        StepCopy(kind="send", storage=storage, side="forward", before=storage + 1),
        StepCopy(kind="release", storage=storage, side="forward", before=let_go),
        StepCopy(kind="fetch", storage=storage, side="backward", before=fetched),
    ]


def stall(copies: list[StepCopy], to_host: float, to_device: float) -> float:
    return copy_times(STEP, ONCE, copies, link(to_host, to_device), SECONDS).stall_seconds


def test_what_is_copied_in_time_costs_nothing() -> None:
    # Layer 0 is made at 1 s, let go of at 4 s; backward begins at 5 s, and reads it from 9 s on (third run).
    assert stall(sent(0, let_go=4, fetched=1), 3.0, 2.0) == 0.0


def test_letting_go_waits_for_the_copy_out_and_a_use_for_the_copy_back() -> None:
    assert stall(sent(0, let_go=2, fetched=1), 3.0, 1.0) == 2.0  # at 2 s, and the copy is done at 4 s
    assert stall(sent(0, let_go=4, fetched=2), 1.0, 3.0) == 3.0  # fetched at 9 s, and needed then


def test_an_engine_takes_one_copy_after_the_other_and_the_other_engine_does_not_wait() -> None:
    both = sorted(sent(0, let_go=4, fetched=0) + sent(1, let_go=4, fetched=0), key=lambda copy: copy.kind == "fetch")
    assert stall(both, 2.0, 0.1) == 1.0  # from 1 to 3 s, from 3 to 5 s, and let go of at 4 s
    # Both begin at 5 s; that of layer 0 is first, though layer 1 is needed first, by the second run of backward at 7 s.
    assert stall(both, 0.1, 2.0) == 2.0


def test_host_memory_is_held_until_the_last_copy_back_is_read() -> None:
    again = StepRuns((0, 1, 2, 1, 3), ONCE.backward)  # layer 1 runs again, and reads layer 0
    back = StepCopy(kind="fetch", storage=0, side="forward", before=3)
    copies = [*sent(0, let_go=2, fetched=2)[:2], back, sent(0, let_go=2, fetched=2)[2]]
    later = [StepCopy(kind="send", storage=2, side="forward", before=4), *sent(2, let_go=5, fetched=0)[1:]]
    times = copy_times(STEP, again, [*copies, *later], link(0.1, 0.1), SECONDS)
    assert times.host_peak_bytes == 200
    assert times.stall_seconds == pytest.approx(0.1 + 0.1 + 0.1)  # once back in forward, twice in backward


def test_an_endless_link_takes_no_time() -> None:
    assert stall(sent(0, let_go=1, fetched=2), 1e-300, 1e-300) == pytest.approx(0.0)


def test_ops_share_the_seconds_of_their_program() -> None:
    profile = profile_of(STEP)
    seconds = StepSeconds.of(profile)
    assert seconds == StepSeconds(of_op=tuple(op.seconds for op in STEP.ops), between=0.0)
