"""What is raised where no plan came out, and what it says is proven."""

from __future__ import annotations

import pickle

import pytest

import planner
from planner.capacity.batch_limits import StateBytes
from planner.plans.refusals import require_schedule
from solvers import Solution
from solvers.problem.solution import Shortage, Status


def none_found(status: Status, moment: str) -> Solution:
    shortage = Shortage(minimum_budget_bytes=401, stage="last", moment=moment)
    return Solution(solver="auto", status=status, lower_bound_seconds=1.0, solve_seconds=0.0, shortage=shortage)


@pytest.mark.parametrize("moment", ["backward", "run"])
def test_what_is_proven_is_infeasible(moment: str) -> None:
    with pytest.raises(planner.Infeasible) as refused:
        require_schedule(none_found("infeasible", moment), 380, "auto")
    assert (type(refused.value), refused.value.status) == (planner.Infeasible, "infeasible")


@pytest.mark.parametrize("moment", ["backward", "run"])
def test_where_nothing_is_proven_the_status_says_so(moment: str) -> None:
    words = "not proven that none exists.*known to be enough is 401 bytes.*allow more time, or raise the budget"
    with pytest.raises(planner.Infeasible, match=words) as refused:
        require_schedule(none_found("unknown", moment), 380, "auto")
    again = pickle.loads(pickle.dumps(refused.value))
    for refusal in (refused.value, again):
        assert type(refusal) is planner.Infeasible
        assert (refusal.status, refusal.minimum_budget_bytes) == ("unknown", 401)


@pytest.mark.parametrize("status", ["infeasible", "unknown"])
def test_no_batch_is_as_proven_as_that_there_is_no_plan_at_the_smallest_size(status: Status) -> None:
    with pytest.raises(planner.Infeasible) as refused:
        require_schedule(none_found(status, "backward"), 380, "auto")
    states = StateBytes(total_bytes=100, optimizer_bytes=50, halves=True)
    no_batch = planner.errors.NoBatch(refused.value, vary="batch", size=1, states=states)
    again = pickle.loads(pickle.dumps(no_batch))
    for refusal in (no_batch, again):
        assert (refusal.status, refusal.short_bytes, refusal.size, str(refusal)) == (status, 21, 1, str(no_batch))
