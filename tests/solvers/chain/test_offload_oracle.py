"""Tiny chains with a link against the oracle: nothing beats it, bounds hold, and short chains are mostly solved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from solvers import Chain, Link, Problem, replay, solve_chain
from solvers.chain.persistent import shortage
from tests.support.chains import UNIT, random_chain, with_offload_units
from tests.support.nightly import by_day
from tests.support.offload_oracle import fastest_seconds

SAME = 1e-9


def problems(block: int) -> Iterator[Problem]:
    """Budgets around the smallest that recomputation alone can meet; links from slow to fast, some of little memory."""
    for seed in range(10 * block, 10 * block + 10):
        random = Random(seed)
        chain = with_offload_units(random_chain(seed, most_stages=3, odd=seed % 3 == 0), random, most=1 + seed % 2)
        link = Link(
            to_host_bytes_per_second=random.choice([0.5, 1, 2, 4]),
            to_device_bytes_per_second=random.choice([0.5, 1, 2, 4]),
            latency_seconds=random.choice([0, 0.5]),
            host_bytes=random.choice([None, None, 5]),
        )
        low = shortage(chain).minimum_budget_bytes
        for extra in (-2, 0, random.randint(1, 6)):
            yield Problem(chain=chain, budget_bytes=max(0, low + extra), link=link)


@pytest.mark.slow
@pytest.mark.parametrize("block", by_day(range(3), [0, 1]))
def test_no_answer_beats_the_oracle_and_no_claim_is_false(block: int) -> None:
    met = found = 0
    for problem in problems(block):
        best, solution = fastest_seconds(problem), solve_chain(problem)
        if solution.schedule is None or solution.seconds is None:
            assert solution.status == "unknown" or (solution.status == "infeasible" and best is None)
            met += best is not None
            continue
        assert best is not None and solution.peak_bytes is not None
        result = replay(problem.chain, solution.schedule, problem.link)
        assert (result.peak_bytes, result.seconds) == (solution.peak_bytes, solution.seconds)
        assert result.peak_bytes <= problem.budget_bytes
        assert solution.seconds >= best - SAME and solution.lower_bound_seconds <= best + SAME
        if solution.status == "optimal":
            assert solution.seconds == pytest.approx(best)
        met += 1
        found += solution.seconds <= best + SAME
    assert found > met / 2


# Two unit stages, whose kept 4 may travel. Both kept: 5 after the first, 5 + 6 = 11 in the second, 10 in its backward
# once its boundary is freed. At 9 the first is away from before the second's forward until after its backward: out and
# back in turn, all waited for, 4 ms each at 1000 bytes a second, 1 s each at 4; dropping it costs 1 s. At 10 it may be
# back before that backward, so that only the way out is waited for.
@pytest.mark.parametrize(
    ("budget", "rate", "seconds"),
    [(9, 1000.0, 6.008), (9, 4.0, 7.0), (9, 1.0, 7.0), (9, math.inf, 6.0), (10, 1000.0, 6.004), (11, 1.0, 6.0)],
)
def test_two_stages_by_hand(budget: int, rate: float, seconds: float) -> None:
    way = replace(UNIT.options[0], offload_units=(4,))
    chain = Chain(stages=(replace(UNIT, options=(way,)),) * 2)
    link = Link(to_host_bytes_per_second=rate, to_device_bytes_per_second=rate)
    problem = Problem(chain=chain, budget_bytes=budget, link=link)
    assert fastest_seconds(problem) == pytest.approx(seconds)
    assert solve_chain(problem).seconds == pytest.approx(seconds)
