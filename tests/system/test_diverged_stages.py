"""A stage that runs other ops than when profiled is right all the same, and from then on it runs again as a whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import planner
from planner import Rule, Rules
from profiler.workload.workload import Workload
from tests.support.events import Events
from tests.support.exactness import assert_same, profile_of_opaque, state_after, state_of
from tests.support.odd_models import workload

RULES = Rules(rules=[Rule(modules="blocks.*", ops=["gelu", "native_layer_norm"])])
STRAY = (
    r"planned stage 'blocks.1': it runs other ops than when profiled \(from its 2\. watched op on\); it is recomputed"
)


def altered() -> Workload:
    """The second block's activation is another one than it was."""
    work = workload("dropout")
    setattr(work.model.get_submodule("blocks.1.inner"), "2", nn.SiLU())
    return work


@pytest.fixture(scope="module")
def plan() -> planner.Plan:
    found = planner.state(profile_of_opaque(workload("dropout"), RULES), RULES)
    assert {stage.decision for stage in found.stages if stage.name.startswith("blocks")} == {"selective"}
    return found


def counted(work: Workload, name: str) -> Callable[[], int]:
    """How often a module has run since it was asked before."""
    calls = Events()
    work.model.get_submodule(name).register_forward_hook(lambda *_: calls.note())
    return lambda: len(calls.taken())


def test_a_stage_that_strays_says_so_once_and_is_recomputed_whole_from_the_next_step_on(plan: planner.Plan) -> None:
    expected, work = state_after(altered(), steps=3), altered()
    stray, other = counted(work, "blocks.1.inner.0"), counted(work, "blocks.0.inner.0")
    runs = []
    torch.manual_seed(7)
    with planner.apply(work.model, plan):
        with pytest.warns(RuntimeWarning, match=STRAY) as caught:
            losses = [work.step()]
        runs.append((stray(), other()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                losses.append(work.step())
                runs.append((stray(), other()))
    assert len([warning for warning in caught if "runs other ops" in str(warning.message)]) == 1
    assert runs == [(1, 1), (2, 1), (2, 1)]
    found = {
        "losses": losses,
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in work.model.named_parameters()},
        "state": state_of(work),
        "random": torch.get_rng_state(),
    }
    assert_same(found, expected)


def test_a_plan_applied_anew_gives_a_stage_another_chance(plan: planner.Plan) -> None:
    work = altered()
    ran = counted(work, "blocks.1.inner.0")
    for _ in range(2):
        with planner.apply(work.model, plan), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work.step()
            assert ran() == 1
