"""The bound on time by hand, and held against every schedule at hand: no replayed schedule may refute it."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from benchmarks.random_chains import large_chain
from solvers import Chain, Link, Schedule, replay
from solvers.chain import revolve
from solvers.chain.baselines import sqrt_segments
from solvers.chain.lower_bound import bound_seconds
from solvers.chain.rotor import Table
from solvers.chain.transfer_placement import Placement
from tests.support.chains import UNIT, random_chain, with_offload_units


def refuters(chain: Chain, table_chain: Chain | None = None) -> list[Schedule]:
    table = Table(table_chain or chain)
    return [table.schedule(p) for p in table.points()] + sqrt_segments(chain) + revolve.schedules(chain)


@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_of_a_small_chain_refutes_it(seed: int) -> None:
    chain = random_chain(seed, most_stages=12, odd=seed % 3 == 0, shared=seed % 4 == 0)
    for schedule in refuters(chain, chain.folded()):
        result = replay(chain, schedule)
        assert bound_seconds(chain, result.peak_bytes) <= result.seconds * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("menu", [1, 3])
@pytest.mark.parametrize("count", [9, 40])
def test_no_schedule_of_a_large_chain_refutes_it(menu: int, count: int) -> None:
    for chain in (large_chain(menu, count, menu), Chain(stages=(UNIT,) * count)):
        for schedule in refuters(chain):
            result = replay(chain, schedule)
            assert bound_seconds(chain, result.peak_bytes) <= result.seconds * (1 + 1e-12)


# Four stages of 1 s forward and 2 s backward; kept 4, boundary 1, backward peak 1. At the last backward: its own kept 4
# and peak 1, the boundary before it 1; a budget of 6 + r leaves r. Stages 0..2 cost no bytes dropped, with the
# boundaries between them gone: 12 + 3 s. Stage 2 kept: 4 and the boundary before it (that after it is alive), 5 bytes
# for 1 s. Stage 0 kept alone: 4 and the boundary after it: 5 as well. All kept: 4 each and two boundaries: 14.
# The moments before are as tight with fewer stages: at the backward of stage 2, two stages and the same room.
@pytest.mark.parametrize(("room", "seconds"), [(0, 15.0), (14, 12.0), (100, 12.0)])
def test_four_stages_by_hand(room: int, seconds: float) -> None:
    assert bound_seconds(Chain(stages=(UNIT,) * 4), 6 + room) == pytest.approx(seconds, rel=1e-9)


def test_keeping_every_other_stage_pays_for_the_boundaries_around_them() -> None:
    # Seven pairs of a stage that keeps 1000 bytes and one that keeps 1, then one that keeps 1000; boundaries of 10.
    # Beside the last backward (kept 1000, peak 1, the boundary before it 10) 32 bytes hold two of the small stages: the
    # last one (1 and the boundary before it) and another (1 and the boundaries around it). Twelve run twice.
    small = replace(UNIT.options[0], kept_bytes=1, recompute_peak_bytes=1, forward_peak_bytes=11)
    big = replace(UNIT.options[0], kept_bytes=1000, recompute_peak_bytes=1000, forward_peak_bytes=1010)
    wide = [replace(UNIT, options=(way,), boundary_bytes=10) for way in (big, small)]
    chain = Chain(stages=(*wide * 7, wide[0]))
    assert bound_seconds(chain, 1000 + 1 + 10 + 32) == pytest.approx(15 * 3 + 12, rel=1e-9)


def test_a_budget_that_cannot_hold_one_backward_has_no_finite_bound() -> None:
    chain = Chain(stages=(UNIT,) * 3, optimizer_peak_bytes=9)
    assert bound_seconds(chain, 8) == float("inf")  # the optimizer
    assert bound_seconds(replace(chain, optimizer_peak_bytes=0), 5) == float("inf")  # boundary 1, kept 4, backward 1
    assert bound_seconds(chain, 9) < float("inf")


def test_larger_budgets_have_smaller_bounds() -> None:
    chain = large_chain(5, 60, 3)
    bounds = [bound_seconds(chain, 20_000_000 + 4_000_000 * i) for i in range(120)]
    assert bounds == sorted(bounds, reverse=True)


# Two stages kept in full: 8 bytes and one boundary at the first backward, of which stage 0's 4 may be away. At a budget
# of 6 + 1 (own kept, backward peak, boundary) stage 0 is dropped (1 s more) or sent: 4 bytes out and back.
def test_with_a_link_a_stage_is_sent_or_dropped_whichever_takes_less_by_hand() -> None:
    way = replace(UNIT.options[0], offload_units=(4,))
    chain = Chain(stages=(replace(UNIT, options=(way,)), UNIT))
    assert bound_seconds(chain, 6) == pytest.approx(7.0)
    for rate, seconds in ((1e-9, 7.0), (1.0, 7.0), (2.0, 6.0), (math.inf, 6.0)):
        link = Link(to_host_bytes_per_second=rate, to_device_bytes_per_second=rate)
        assert bound_seconds(chain, 6, link) <= seconds
    slow = Link(to_host_bytes_per_second=0.5, to_device_bytes_per_second=0.5)
    assert bound_seconds(chain, 6, slow) > 6.2


@pytest.mark.parametrize("seed", range(40))
def test_no_placed_schedule_refutes_it(seed: int) -> None:
    random = Random(seed)
    chain = with_offload_units(random_chain(seed, most_stages=12, odd=seed % 3 == 0, shared=seed % 4 == 0), random)
    link = Link(to_host_bytes_per_second=random.choice([0.5, 2, 8]), to_device_bytes_per_second=random.choice([1, 4]))
    for schedule in refuters(chain, chain.folded())[::3]:
        placement = Placement(chain, schedule)
        least = placement.smallest_peak()
        for budget in {least, (least + placement.peaks[0]) // 2}:
            result = replay(chain, placement.placed(budget, placement.absences_needed(budget) or 0), link)
            assert result.peak_bytes <= budget
            assert bound_seconds(chain, budget, link) <= result.seconds * (1 + 1e-12)
