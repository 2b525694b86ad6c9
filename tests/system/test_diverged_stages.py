"""A stage that runs other ops than when profiled is right all the same: it runs as no program, but again as a whole."""

from __future__ import annotations

import warnings

import pytest
from torch import nn

import planner
from planner import Rule, Rules
from profiler.workload.workload import Workload
from tests.support.exactness import assert_same, state_after
from tests.support.odd_models import workload

RULES = Rules(rules=[Rule(modules="blocks.*", ops=["gelu", "native_layer_norm"])])
STRAY = (
    r"planned stage 'blocks.1': it does not run as the program that was planned: "
    r"its ops differ from the profiled ones: .*silu.*; it is recomputed as a whole"
)


def altered() -> Workload:
    """The second block's activation is another one than it was."""
    work = workload("dropout")
    setattr(work.model.get_submodule("blocks.1.inner"), "2", nn.SiLU())
    return work


@pytest.fixture(scope="module")
def plan() -> planner.Plan:
    found = planner.state(planner.profile(workload("dropout"), rules=RULES, menus=False), RULES)
    assert {stage.decision for stage in found.stages if stage.name.startswith("blocks")} == {"selective"}
    return found


def test_a_stage_that_strays_says_so_once_and_is_recomputed_whole(plan: planner.Plan) -> None:
    expected, work = state_after(altered(), steps=3), altered()
    with planner.apply(work.model, plan):
        with pytest.warns(RuntimeWarning, match=STRAY) as caught:
            assert_same(state_after(work, steps=3), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert planner.measure(work, repeats=1).peak_bytes <= plan.predicted_peak_bytes
    assert len([warning for warning in caught if "its ops differ" in str(warning.message)]) == 1


def test_a_plan_applied_anew_gives_a_stage_another_chance(plan: planner.Plan) -> None:
    work = altered()
    with planner.apply(work.model, plan), pytest.warns(RuntimeWarning, match=STRAY):
        work.step()
    setattr(work.model.get_submodule("blocks.1.inner"), "2", nn.GELU())
    with planner.apply(work.model, plan), warnings.catch_warnings():
        warnings.simplefilter("error")
        work.step()
        assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes
