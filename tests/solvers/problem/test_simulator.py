"""The simulator: a timeline worked out by hand, and every rule that a schedule can break."""

from __future__ import annotations

from dataclasses import replace

import pytest

from solvers import Chain, Problem, ReplayError, replay, solve_chain
from solvers.problem.chain import Shared
from solvers.problem.examples import equal_stages
from solvers.problem.simulator import LiveSet, alive_before
from tests.support.chains import UNIT, actions, random_chain


def test_two_stages_kept() -> None:
    # resident 10. Forward 0: 10 + 6; leaves kept 4 + boundary 1 = 15. Forward 1: 15 + 6; leaves 20, and the loss's
    # gradient 3 -> 23. Boundary 1 freed: 22. Backward 1: 22 + 1, then kept 4 gone, gradients 2 + 3 stay:
    # 10 + 5 + 2 + 3 = 20. Boundary 0 freed: 19. Backward 0: 19 + 1; afterwards parameter gradients 2 + 2: 14.
    stage = replace(UNIT, parameter_gradient_bytes=2, gradient_bytes=3)
    chain = Chain(stages=(stage, stage), resident_bytes=10)
    rows = [("forward", 0, 0), ("forward", 1, 0), ("free", 1), ("backward", 1), ("free", 0), ("backward", 0)]
    result = replay(chain, actions(*rows))
    assert [m.after_bytes for m in result.timeline] == [15, 23, 22, 20, 19, 14]
    assert [m.peak_bytes for m in result.timeline] == [16, 23, 23, 23, 20, 20]
    assert (result.peak_bytes, result.seconds) == (23, 6)


def test_a_dropped_stage_leaves_its_residue_until_it_runs_again() -> None:
    # Forward 0 leaves residue 2; the recomputation starts without it and leaves kept 4.
    chain = Chain(stages=(replace(UNIT, residue_bytes=2),))
    result = replay(chain, actions(("forward", 0), ("free", 0), ("recompute", 0, 0), ("backward", 0)))
    assert [m.after_bytes for m in result.timeline] == [3, 2, 4, 0]
    assert result.timeline[2].before_bytes == 0
    assert result.seconds == 1 + 1 + 2


def test_kept_output_counts_once_its_boundary_is_gone() -> None:
    way = replace(UNIT.options[0], kept_output_bytes=1)
    chain = Chain(stages=(replace(UNIT, options=(way,)),))
    result = replay(chain, actions(("forward", 0, 0), ("free", 0), ("backward", 0)))
    assert [m.after_bytes for m in result.timeline] == [5, 5, 0]


def test_the_optimizer_has_its_own_peak() -> None:
    chain = replace(equal_stages(1), optimizer_peak_bytes=99)
    assert replay(chain, actions(("forward", 0, 0), ("free", 0), ("backward", 0))).peak_bytes == 99


def test_a_shared_tensor_lives_while_a_reader_waits() -> None:
    # 8 bytes made by stage 0, held while stage 1 is dropped and not yet run again.
    shared = (Shared(size_bytes=8, born=0, forward_death=0, readers=(1,)),)
    chain = replace(equal_stages(2), shared=shared)
    rows = [("forward", 0, 0), ("forward", 1), ("free", 1), ("recompute", 1, 0), ("backward", 1), ("backward", 0)]
    assert [m.after_bytes for m in replay(chain, actions(*rows)).timeline] == [5, 14, 13, 9, 5, 1]


BACKWARD = [("backward", 2), ("backward", 1), ("backward", 0)]
ALL_KEPT = [*(("forward", k, 0) for k in range(3)), *BACKWARD]
FIRST_DROPPED = [("forward", 0), ("forward", 1, 0), ("forward", 2, 0), *BACKWARD[:2], ("recompute", 0, 0), BACKWARD[2]]


def peaks(chain: Chain, rows: list[tuple]) -> dict[tuple[str, int], int]:
    return {(m.action.kind, m.action.stage): m.peak_bytes for m in replay(chain, actions(*rows)).timeline}


@pytest.mark.parametrize(("readers", "more"), [((), 0), ((0,), 8), ((2,), 0)])
def test_a_forward_that_lets_go_of_a_shared_tensor_peaks_higher_where_a_reader_waits(readers, more) -> None:
    plain = Shared(size_bytes=8, born=0, forward_death=2, readers=readers)
    early = replace(plain, forward_death_is_early=True)
    before, after = (peaks(replace(equal_stages(3), shared=(tensor,)), FIRST_DROPPED) for tensor in (plain, early))
    assert after.pop(("forward", 2)) == before.pop(("forward", 2)) + more
    assert after == before


@pytest.mark.parametrize(("rows", "more"), [(ALL_KEPT, 0), (FIRST_DROPPED, 8)])
def test_a_backward_that_lets_go_of_a_shared_tensor_peaks_higher_where_a_reader_waits(rows, more) -> None:
    plain = Shared(size_bytes=8, born=0, forward_death=2, readers=(0,), savers=(1,))
    early = replace(plain, early_backward_death=1)
    before, after = (peaks(replace(equal_stages(3), shared=(tensor,)), rows) for tensor in (plain, early))
    assert after.pop(("backward", 1)) == before.pop(("backward", 1)) + more
    assert after == before


def test_a_reader_that_is_dropped_where_a_tensor_goes_has_it_in_its_peak() -> None:
    early = Shared(size_bytes=8, born=0, forward_death=1, readers=(1,), forward_death_is_early=True)
    rows = [("forward", 0, 0), ("forward", 1), ("forward", 2, 0), ("backward", 2), ("recompute", 1, 0), *BACKWARD[1:]]
    chain = equal_stages(3)
    late = replace(early, forward_death_is_early=False)
    assert peaks(replace(chain, shared=(early,)), rows) == peaks(replace(chain, shared=(late,)), rows)


KEPT = [("forward", 0, 0), ("forward", 1, 0)]
DROPPED = [("forward", 0), ("forward", 1), ("free", 1)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("forward", 1)], "needs boundary 0"),
        ([*KEPT, ("backward", 0)], "out of order; stage 1 is next"),
        ([*DROPPED, ("backward", 1)], "nothing of it is kept"),
        ([*KEPT, ("free", 0)], "which is kept, still needs it"),
        ([("forward", 0), ("free", 0)], "before stage 1 has run"),
        ([*DROPPED, ("recompute", 0, 0)], "not the next to go backward"),
        ([*KEPT, ("forward", 0)], "run again while it is kept"),
        ([*KEPT, ("backward", 1), ("forward", 1)], "after its backward"),
        ([("forward", 0, 7)], "has no option 7"),
        ([("forward", 5)], "stage 5 does not exist"),
        ([("free", 0)], "not alive"),
        (KEPT, "ends before the backward of stage 1"),
    ],
)
def test_impossible_actions_are_refused_with_the_reason(rows: list[tuple], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        replay(equal_stages(2), actions(*rows))


def test_stages_that_run_once_and_boundaries_that_cannot_come_back() -> None:
    once = Chain(stages=(replace(UNIT, recomputable=False),))
    with pytest.raises(ReplayError, match="must run once and be kept"):
        replay(once, actions(("forward", 0)))
    unlinked = Chain(stages=(UNIT, replace(UNIT, linked=False)))
    with pytest.raises(ReplayError, match="not linked"):
        replay(unlinked, actions(*DROPPED, ("free", 0)))


def bytes_of(chain: Chain, alive: LiveSet) -> int:
    stages = chain.stages
    kept = sum(o.kept_bytes + (0 if k in alive.boundaries else o.kept_output_bytes) for k, o in alive.kept.items())
    return (
        chain.resident_bytes
        + sum(stages[k].boundary_bytes for k in alive.boundaries)
        + kept
        + sum(stages[k].residue_bytes for k in alive.residues)
        + sum(chain.shared[i].size_bytes for i in alive.shared)
        + sum(stages[k].parameter_gradient_bytes for k in alive.gradients)
        + (0 if alive.incoming is None else stages[alive.incoming].gradient_bytes)
    )


@pytest.mark.parametrize("seed", range(40))
def test_what_is_alive_before_an_action_adds_up_to_its_bytes(seed) -> None:
    chain = random_chain(seed, odd=seed % 2 == 0, shared=True)
    for budget in (10, 15, 20, 30, 10**6):
        schedule = solve_chain(Problem(chain=chain, budget_bytes=budget), solver="rotor").schedule
        if schedule is None:
            continue
        timeline = replay(chain, schedule).timeline
        found = [bytes_of(chain, alive_before(chain, schedule, k)) for k in range(len(timeline))]
        assert found == [moment.before_bytes for moment in timeline]
