"""What is claimed of plans that are stated in part is proven, also where several stages share a tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import planner
from planner import Rule, Rules
from planner.plans import cost_model, stated_plan
from profiler.records import Profile
from solvers import Chain, replay
from solvers.chain.fixed_stages import restricted
from solvers.problem.chain import Shared

MIB = 2**20
RULES = Rules(rules=[Rule(modules="*.h.0"), Rule(modules="*.h.1")], rest="solve")


@pytest.fixture
def chain(blocks: Profile, monkeypatch: pytest.MonkeyPatch) -> Chain:
    """The chain of the profile with a tensor that a stage before its blocks makes, and the second block lets go of."""
    alone = cost_model.chain_of(blocks)
    second = next(k for k, stage in enumerate(alone.stages) if stage.name.endswith("h.1"))
    chain = replace(alone, shared=(Shared(size_bytes=MIB, born=0, forward_death=second, forward_death_is_early=True),))
    monkeypatch.setattr(stated_plan, "chain_of", lambda _: chain)
    return chain


def test_a_tensor_that_is_gone_in_time_counts_once(blocks: Profile, chain: Chain) -> None:
    for share in (0.9, 1.0):
        budget_bytes = MIB + int(share * blocks.unplanned_peak_bytes)
        plan = planner.state(blocks, RULES, budget=budget_bytes)
        assert replay(chain, plan.schedule).peak_bytes == plan.predicted_peak_bytes <= budget_bytes
    # The bound holds for all programs that captured stages could have.
    assert plan.restricted and plan.lower_bound_seconds <= plan.predicted_seconds


def test_nothing_is_proven_by_a_count_that_may_be_too_high(
    blocks: Profile, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the restricted chain had needed more than there is; and the solver's own bound is not the plan's."""

    def counted(bytes_more: int) -> None:
        def with_more(whole: Chain, spans: Any) -> Chain:
            more = bytes_more if whole.shared else 0
            return replace(restricted(whole, spans), resident_bytes=whole.resident_bytes + more)

        monkeypatch.setattr(stated_plan, "restricted", with_more)

    budget_bytes = MIB + blocks.unplanned_peak_bytes
    counted(2 * budget_bytes)
    with pytest.raises(planner.Infeasible) as refusal:
        planner.state(blocks, RULES, budget=budget_bytes)
    assert not refusal.value.proven
    with pytest.raises(planner.Infeasible):
        planner.state(blocks, RULES, budget=1000)

    counted(0)
    assert planner.state(blocks, RULES, budget=budget_bytes).lower_bound_seconds > 0
    monkeypatch.setattr(stated_plan, "bound_seconds", lambda *_: 0.0)
    plan = planner.state(blocks, RULES, budget=budget_bytes)
    assert plan.status == "feasible" and plan.lower_bound_seconds < plan.predicted_seconds
