"""The peak explained: by hand, and its parts against the replay on many plans."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import planner
from benchmarks.estimates import A_CPU
from planner import zoo
from planner.explain.peak import COLUMNS, Peak, peak_parts, peak_rows, predicted_moments, predicted_peak
from planner.explain.timeline import predicted_timelines
from planner.plans.plan import Plan, chain_in
from solvers import Chain, Problem, Schedule, solve_chain
from tests.support.chains import random_chain
from tests.support.small_chain import DROPPED, two_stages


def peak_of(chain: Chain, schedule: Schedule, plan: Plan | None = None) -> Peak:
    _, planned = predicted_timelines(chain, schedule)
    return predicted_peak(chain, schedule, planned, plan=plan)


def sizes(peak: Peak) -> dict[tuple[str, str], int]:
    return {(part.what, part.stage): part.size_bytes for part in peak.parts}


def test_a_peak_worked_out_by_hand() -> None:
    peak = peak_of(two_stages(), DROPPED)
    assert (peak.phase, peak.stage, peak.action, peak.peak_bytes) == ("forward", "second", "forward", 17)
    assert sizes(peak) == {
        ("resident", ""): 10,
        ("outputs of stages", "first"): 1,
        ("made as its forward runs", "second"): 6,
    }


def test_a_peak_in_backward_has_what_is_kept_and_the_gradients() -> None:
    stage = replace(two_stages().stages[0], parameter_gradient_bytes=2, gradient_bytes=3)
    heavy = replace(stage.options[0], backward_peak_bytes=9)
    chain = replace(two_stages(), stages=(replace(stage, name="a", options=(heavy,)), replace(stage, name="b")))
    rows = [("forward", 0, 0), ("forward", 1, 0), ("free", 1), ("backward", 1), ("free", 0), ("backward", 0)]
    peak = peak_of(chain, Schedule.from_list([[*row, None][:3] for row in rows]))
    assert (peak.stage, peak.action) == ("a", "backward")
    assert sizes(peak) == {
        ("resident", ""): 10,
        ("kept from forward", "a"): 4,
        ("gradients of parameters", "b"): 2,
        ("gradients of activations", "a"): 3,
        ("backward temporaries", "a"): 9,
    }


def test_a_peak_in_the_optimizer_s_step() -> None:
    stage = replace(two_stages().stages[0], parameter_gradient_bytes=2)
    chain = replace(two_stages(), stages=(stage, replace(stage, name="second")), optimizer_peak_bytes=40)
    peak = peak_of(chain, DROPPED)
    assert (peak.phase, peak.action) == ("optimizer", "optimizer")
    assert sizes(peak) == {
        ("resident", ""): 10,
        ("gradients of parameters", "first"): 2,
        ("gradients of parameters", "second"): 2,
        ("made by the optimizer's step", ""): 26,
    }


@pytest.mark.parametrize("seed", range(30))
def test_the_parts_add_up_to_the_peak_on_odd_chains(seed: int) -> None:
    chain = random_chain(seed, odd=seed % 2 == 0, shared=True)
    for budget in (12, 18, 10**6):
        schedule = solve_chain(Problem(chain=chain, budget_bytes=budget), solver="rotor").schedule
        if schedule is not None:
            peak = peak_of(chain, schedule)
            assert sum(part.size_bytes for part in peak.parts) == peak.peak_bytes
            assert all(part.size_bytes >= 0 for part in peak.parts if part.what == "outputs of stages")


@pytest.mark.parametrize("seed", range(10))
def test_every_action_of_a_step_is_explained(seed: int) -> None:
    chain = replace(random_chain(seed, odd=seed % 2 == 0, shared=True), optimizer_peak_bytes=30)
    schedule = solve_chain(Problem(chain=chain, budget_bytes=10**6), solver="rotor").schedule
    assert schedule is not None
    _, planned = predicted_timelines(chain, schedule)
    moments = [*predicted_moments(chain, schedule, planned)]
    assert [sum(part.size_bytes for part in moment.parts) for moment in moments] == [
        s.peak_bytes for s in planned.spans
    ]
    assert moments[planned.spans.index(planned.peak)] == predicted_peak(chain, schedule, planned)


@pytest.fixture(scope="module")
def estimated() -> planner.Profile:
    """Blocks whose plans are always the same ones: their times are not measured."""
    build = partial(zoo.build, "gpt2", layers=3, batch=2, hidden=32, seq=32, vocab=100)
    return planner.estimate(build, device=A_CPU, stages=["transformer.h.*"])


@pytest.mark.parametrize("budget", ["100%", "85%", "70%"])
@pytest.mark.slow
def test_the_parts_of_a_model_s_peak_are_named_by_op(estimated: planner.Profile, budget: str) -> None:
    plan = planner.solve(estimated, budget, solver="rotor")
    peak = peak_of(chain_in(plan), plan.schedule, plan)
    assert sum(part.size_bytes for part in peak.parts) == peak.peak_bytes == plan.predicted_peak_bytes
    assert plan.resident is not None
    parameters = [part for part in peak.parts if part.what == "parameters"]
    assert [part.size_bytes for part in parameters] == [plan.resident.parameters]
    kept = [part for part in peak.parts if part.what == "kept from forward"]
    expected = {"aten.tanh.default", "aten.addmm.default"} if budget == "100%" else set()
    assert expected <= {part.op for part in kept}
    # Nothing but a few numbers of each stage is left without a name.
    assert all(abs(part.size_bytes) < 100 for part in peak.parts if part.what == "kept, not told apart")


def test_what_a_dropped_stage_holds_is_made_again(blocks: planner.Profile) -> None:
    plan = planner.solve(blocks.stage_level(), "75%", solver="recompute_all")
    chain = chain_in(plan)
    _, planned = predicted_timelines(chain, plan.schedule)
    last = next(s for s in reversed(planned.spans) if s.action == "backward" and s.stage.startswith("transformer.h"))
    highest = replace(planned, spans=(*(replace(s, peak_bytes=s.before_bytes) for s in planned.spans),))
    raised = [s if s is not last else replace(last, peak_bytes=10**12) for s in planned.spans]
    peak = predicted_peak(chain, plan.schedule, replace(highest, spans=tuple(raised)), plan=plan)
    assert {part.what for part in peak.parts if part.stage == last.stage} >= {"made again"}
    assert not any(part.what == "kept from forward" and part.stage == last.stage and part.op for part in peak.parts)


def test_alike_parts_are_shown_together_and_none_is_lost(blocks: planner.Profile) -> None:
    plan = planner.solve(blocks, "100%")
    peak = peak_of(chain_in(plan), plan.schedule, plan)
    rows = peak_rows(peak, plan)
    assert sum(row.size_bytes for row in rows) == peak.peak_bytes
    assert [row.size_bytes for row in rows] == sorted((row.size_bytes for row in rows), reverse=True)
    assert len(rows) < len(peak.parts)
    softmax = next(row for row in rows if row.op.startswith("_safe_softmax"))
    assert (softmax.op, softmax.tensors) == ("_safe_softmax (attn)", 3)
    assert softmax.where == "h.0 to 2 (3 stages)"


def test_the_peak_s_table_has_every_part_once(blocks: planner.Profile) -> None:
    plan = planner.solve(blocks, "85%", solver="rotor")
    peak = peak_of(chain_in(plan), plan.schedule, plan)
    parts = peak_parts([peak])
    assert all(tuple(part) == COLUMNS for part in parts)
    assert (len(parts), sum(int(part["bytes"]) for part in parts)) == (len(peak.parts), peak.peak_bytes)
    assert {part["series"] for part in parts} == {"predicted"}
