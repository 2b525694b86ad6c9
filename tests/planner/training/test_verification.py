"""A plan checked against its own run, where seconds are made up: what is corrected, and which plan comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import planner
from planner import zoo
from planner.plans.plan import chain_in
from planner.training import verification
from planner.training.verification import corrected
from profiler.measurement.meter import Mark, Place
from profiler.records import Phase
from solvers import Chain, replay
from solvers.problem.schedule import RUNS

SMALL = {"layers": 6, "hidden": 32, "seq": 32, "batch": 4, "vocab": 64}


def workload() -> planner.Workload:
    return zoo.build("gpt2", **SMALL)


@pytest.fixture(scope="module")
def profile() -> planner.Profile:
    """Real bytes, and seconds of which every run of the tests has the same: 20 microseconds an op that runs again."""
    measured = planner.profile(workload())
    stages = [
        replace(
            record,
            forward=replace(record.forward, seconds=1e-3),
            dropped=replace(record.dropped, seconds=1e-3),
            backward=replace(record.backward, seconds=2e-3),
            recompute_seconds=1e-3 if record.recomputable else record.recompute_seconds,
        )
        for record in measured.stages
    ]
    menus = [
        replace(
            menu,
            ops=replace(menu.ops, ops=tuple(replace(op, seconds=1e-6) for op in menu.ops.ops)),
            keep_forward_seconds=1e-3,
            keep_backward_seconds=2e-3,
            options=tuple(
                replace(option, forward_seconds=1e-3, backward_seconds=2e-3 + 2e-5 * len(option.rerun))
                for option in menu.options
            ),
        )
        for menu in measured.menus
    ]
    return replace(measured, stages=tuple(stages), menus=tuple(menus))


def plan_at(profile: planner.Profile, share: float) -> planner.Plan:
    plan = planner.solve(profile, int(share * profile.unplanned_peak_bytes))
    assert plan.recomputed_ops
    return plan


def seconds_under(chain: Chain, plan: planner.Plan | None) -> dict[Mark, float]:
    """What a step takes place by place where everything costs what this chain says."""
    found: dict[Mark, float] = {}

    def add(phase: Any, place: int, seconds: float) -> None:
        mark = Mark(phase, Place("stage", place))
        found[mark] = found.get(mark, 0.0) + seconds

    assert plan is None or plan.chain is not None
    modules = [k for k, stage in enumerate(chain.stages) if stage.recomputable or len(stage.options) > 1]
    for k, stage in enumerate(chain.stages):
        if k not in modules:
            continue
        if plan is None:
            add("forward", modules.index(k), stage.options[0].forward_seconds)
            add("backward", modules.index(k), stage.options[0].backward_seconds)
    if plan is not None:
        seen: set[int] = set()
        for moment in replay(chain, plan.schedule).timeline:
            action = moment.action
            if action.stage in modules and action.kind in (*RUNS, "backward"):
                first = action.kind == "forward" and action.stage not in seen
                phase = "forward" if first else "backward" if action.kind == "backward" else "again"
                add(phase, modules.index(action.stage), moment.seconds)
                seen.add(action.stage)
    return found


def dearer(chain: Chain, change: Callable[[int, int], float]) -> Chain:
    """The chain with these seconds more for each option of each stage: in the backward, or where it is run again."""
    stages = []
    for k, stage in enumerate(chain.stages):
        keep, *others = stage.options
        keep = replace(keep, recompute_seconds=keep.recompute_seconds + change(k, 0))
        options = [
            replace(each, backward_seconds=each.backward_seconds + change(k, number))
            for number, each in enumerate(others, start=1)
        ]
        stages.append(replace(stage, options=(keep, *options)))
    return replace(chain, stages=tuple(stages))


@pytest.mark.slow
def test_a_plan_that_was_right_is_left_as_it_is(profile):
    plan = plan_at(profile, 0.7)
    assert plan.chain is not None
    chain, corrections = corrected(plan, [seconds_under(plan.chain, None)], [seconds_under(plan.chain, plan)])
    assert corrections == ()
    assert [stage.options[0] for stage in chain.stages] == [stage.options[0] for stage in plan.chain.stages]


@pytest.mark.slow
@pytest.mark.parametrize("pace", [1.0, 1.7])
def test_what_ran_is_corrected_to_what_it_took_at_the_plans_pace(profile, pace):
    plan = plan_at(profile, 0.7)
    assert plan.chain is not None
    true = dearer(plan.chain, lambda k, option: 3e-3)
    unplanned, planned = ({m: pace * s for m, s in seconds_under(true, p).items()} for p in (None, plan))
    chain, corrections = corrected(plan, [unplanned] * 3, [planned] * 3)
    assert corrections
    for correction in corrections:
        assert correction.measured_seconds == pytest.approx(correction.predicted_seconds + 3e-3)
    assert replay(chain, plan.schedule).seconds == pytest.approx(replay(true, plan.schedule).seconds)


@pytest.mark.slow
def test_what_only_some_pairs_of_steps_show_is_noise(profile):
    plan = plan_at(profile, 0.7)
    assert plan.chain is not None
    true = dearer(plan.chain, lambda k, option: 3e-3)
    right, slow = seconds_under(plan.chain, plan), seconds_under(true, plan)
    _, corrections = corrected(plan, [seconds_under(plan.chain, None)] * 3, [slow, right, slow])
    assert corrections == ()


@pytest.mark.slow
def test_options_that_did_not_run_have_the_seconds_per_op_of_those_that_did(profile):
    plan = plan_at(profile, 0.7)
    assert plan.chain is not None
    menus = [stage.menu for stage in plan.stages]

    def ops(k: int, option: int) -> int:
        return len(plan.menus[menus[k]].options[option - 1].rerun)

    true = dearer(plan.chain, lambda k, option: 1e-3 * ops(k, option) if option else 0.0)
    chain, corrections = corrected(plan, [seconds_under(true, None)], [seconds_under(true, plan)])
    assert any(correction.option for correction in corrections)
    for found, expected in zip(chain.stages, true.stages, strict=True):
        for option, wanted in zip(found.options[1:], expected.options[1:], strict=True):
            assert option.backward_seconds == pytest.approx(wanted.backward_seconds)


class Machine:
    """Takes the seconds of a chain for every step; stands in for the timed steps."""

    def __init__(self, true: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
        self.true = true
        self.ran: list[planner.Plan] = []
        monkeypatch.setattr(verification, "_in_turns", self.in_turns)
        monkeypatch.setattr(verification, "seconds_in_turns", self.seconds_in_turns)

    def in_turns(self, work: planner.Workload, plan: planner.Plan, randomness: Any) -> Any:
        self.ran.append(plan)
        return tuple(
            [[(mark, Phase(seconds=seconds)) for mark, seconds in seconds_under(self.true, each).items()]]
            for each in (None, plan)
        )

    def seconds_in_turns(self, work: planner.Workload, plans: dict[str, planner.Plan]) -> dict[str, float]:
        return {name: replay(self.true, plan.schedule).seconds for name, plan in plans.items()}


@pytest.mark.slow
def test_an_option_that_only_seemed_cheap_is_found_out_and_the_fastest_plan_is_handed_back(profile, monkeypatch):
    plan = plan_at(profile, 0.6)
    true = chain_in(plan)  # With the programs that were found for this budget.
    again = {k for k, stage in enumerate(plan.stages) if stage.extra_ops}
    true = dearer(true, lambda k, option: 0.1 if k in again and option == _option_of(plan, k) else 0.0)
    machine = Machine(true, monkeypatch)
    verified = planner.verify(workload(), plan)
    seconds = [replay(true, each.schedule).seconds for each in machine.ran]
    assert 1 < len(machine.ran) <= verification.ROUNDS
    assert replay(true, verified.plan.schedule).seconds == min(seconds) < seconds[0]
    assert verified.plan.predicted_peak_bytes <= plan.budget_bytes
    first = verified.rounds[0]
    assert first.corrections and first.plan is plan
    assert first.corrected_seconds > plan.predicted_seconds


def _option_of(plan: planner.Plan, k: int) -> int:
    runs = [action for action in plan.schedule.actions if action.kind in RUNS and action.stage == k]
    return runs[0].option or 0


@pytest.mark.slow
def test_the_first_plan_is_kept_where_the_others_turn_out_slower(profile, monkeypatch):
    plan = plan_at(profile, 0.6)
    machine = Machine(dearer(chain_in(plan), lambda k, option: 0.1), monkeypatch)
    machine.seconds_in_turns = lambda work, plans: {name: float(name) for name in plans}  # type: ignore[method-assign]
    monkeypatch.setattr(verification, "seconds_in_turns", machine.seconds_in_turns)
    verified = planner.verify(workload(), plan)
    assert verified.plan.schedule == plan.schedule
    assert verified.plan.predicted_seconds > plan.predicted_seconds
    assert verified.plan.lower_bound_seconds <= verified.plan.predicted_seconds


@pytest.mark.slow
def test_it_runs_the_real_model_and_leaves_it_as_it_was(profile, monkeypatch):
    measure = verification.seconds_in_turns
    monkeypatch.setattr(
        verification, "seconds_in_turns", lambda work, plans: dict.fromkeys(measure(work, plans), 1e-2)
    )  # Every run of the test chooses the same plan.
    work = workload()
    before = {name: tensor.clone() for name, tensor in work.model.state_dict().items()}
    verified = planner.verify(work, plan_at(profile, 0.6))
    assert 1 <= len(verified.rounds) <= verification.ROUNDS
    assert all((work.model.state_dict()[name] == tensor).all() for name, tensor in before.items())
    with planner.apply(work.model, verified.plan):
        assert planner.measure(work, repeats=1).peak_bytes == verified.plan.predicted_peak_bytes


@pytest.mark.slow
def test_a_stated_plan_and_a_step_that_does_not_fit_are_refused(profile):
    plan = plan_at(profile, 0.6)
    for given, got in ((replace(plan, frugal=True), "does not fit"), (replace(plan, stated=("keep",)), "by hand")):
        with pytest.raises(ValueError, match=f"verify: .*{got}"):
            planner.verify(workload(), given)
