"""The fuzz: a seeded sample of it has no failure, and it finds, shrinks and shows what is broken on purpose."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

import planner
from benchmarks.fuzz.__main__ import as_json
from benchmarks.fuzz.cases import KINDS, Case, Layer, Model, case_from, drawn, drawn_model
from benchmarks.fuzz.habits import HABITS
from benchmarks.fuzz.report import habit_table, notes
from benchmarks.fuzz.script import script, source
from benchmarks.fuzz.shrinking import shrunk, smaller_cases
from benchmarks.fuzz.verdicts import BAD, Outcome, has_remedy, judged, loaded
from benchmarks.fuzz.workers import run
from profiler.recomputation import saved_tensors
from tests.support.nightly import at_night

SAMPLES = [(8, 2), at_night(30, 16)]  # cases, and how many of them have a plan at least
DROPPING = Model(layers=(Layer(kind="Norms"), Layer(kind="Dropping"), Layer(kind="Attends"), Layer(kind="Mlp")))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def judge(case: Case) -> Outcome:
    return next(judged([case]))


@pytest.mark.parametrize(("sample", "planned"), SAMPLES)
def test_a_sample_holds_the_promises(sample: int, planned: int):
    outcomes = list(run(drawn(sample, seed=1)))
    assert len(outcomes) == sample
    failed = [f"{o.verdict}: {o.detail[:300]}\n    --replay '{as_json(o.case)}'" for o in outcomes if o.verdict in BAD]
    assert not failed, f"{len(failed)} cases failed:\n" + "\n".join(failed)
    assert sum(o.verdict in ("exact", "said") for o in outcomes) >= planned


@pytest.mark.nightly
def test_random_numbers_that_are_not_put_back_are_found(monkeypatch: pytest.MonkeyPatch):
    habits = ("collects garbage between", "learning rate changes")
    case = Case(model=DROPPING, habits=habits, solver="recompute_all", share=1.0)
    assert judge(case).verdict == "exact"
    with monkeypatch.context() as broken:
        forget_random_states(broken)
        assert judge(case).verdict == "refused"
        broken.setattr(saved_tensors, "some_values_of", lambda tensor: ())  # Else values tell.
        failure = judge(case)
        assert failure.verdict == "wrong" and "gradient" in failure.detail
        smallest = shrunk(failure, judge)
        assert smallest.verdict == "wrong"
        assert not smallest.case.habits and smallest.case.steps == 1 and len(smallest.case.model.layers) < 4
        # The fastest plan may be one that draws nothing again.
        text = script(replace(smallest.case, solver="recompute_all", share=1.0))
        with pytest.raises(AssertionError, match="did not do what the unplanned one does"):
            exec(text, {"__name__": "__main__"})
    exec(text, {"__name__": "__main__"})


def forget_random_states(broken: pytest.MonkeyPatch) -> None:
    """Once a plan is applied, no random state is put back."""
    applied: list[bool] = []
    apply, profile, set_state = planner.apply, planner.profile, torch.set_rng_state
    broken.setattr(planner, "apply", lambda *given: applied.append(True) or apply(*given))
    broken.setattr(planner, "profile", lambda *given: applied.clear() or profile(*given))
    broken.setattr(torch, "set_rng_state", lambda state: None if applied else set_state(state))


@pytest.mark.nightly
def test_a_peak_above_the_budget_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner, "apply", lambda model, plan: None)
    monkeypatch.setattr("benchmarks.fuzz.script._RUN", _RUN_WITHOUT_HANDLE)
    outcome = judge(Case(model=DROPPING))
    assert outcome.verdict == "over" and outcome.peak_bytes > outcome.budget_bytes


_RUN_WITHOUT_HANDLE = """\
def run(plan, metered=True):
    watch = Watch(metered=metered)
    model, inputs, optimizer, scaler = build()
    train(model, inputs, optimizer, scaler, watch, None, None)
    watch.end()
    return watch.records, watch.peak_bytes
"""


@pytest.mark.nightly
def test_the_end_of_a_process_is_the_outcome_of_one_case():
    cases = [Case(model=DROPPING, habits=habits) for habits in ((), ("two losses",), ("seeded between",))]
    outcomes = list(run([cases], prepare="tests.support.fuzz_sabotage:die_at_two_losses"))
    assert [o.case.habits for o in outcomes] == [case.habits for case in cases]
    assert [o.verdict for o in outcomes] == ["exact", "crash", "exact"]
    assert "ended with -6" in outcomes[1].detail


def test_a_case_without_an_end_is_ended():
    prepare = "tests.support.fuzz_sabotage:never_end"
    (outcome,) = run([[Case(model=DROPPING)]], prepare=prepare, case_seconds=1.0)
    assert outcome.verdict == "crash" and "did not end" in outcome.detail


def test_a_seed_names_its_cases_and_json_keeps_them():
    cases = [case for group in drawn(64, seed=3) for case in group]
    assert cases == [case for group in drawn(64, seed=3) for case in group] and len(cases) == 64
    assert cases[:40] == [case for group in drawn(40, seed=3) for case in group]
    assert cases != [case for group in drawn(64, seed=4) for case in group]
    assert [case_from(json.loads(as_json(case))) for case in cases] == cases


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_trains_without_a_plan(kind: str):
    records, _ = loaded(source(Case(model=Model(layers=(Layer(kind=kind), Layer(kind=kind)))))).run(None, metered=False)
    assert any(name.startswith("step 3") for name in records)


@pytest.mark.parametrize("name", HABITS)
def test_every_habit_is_legal_for_some_model(name: str):
    rng = random.Random(0)
    failures: list[str] = []
    while len(failures) < 20:
        model = drawn_model(rng)
        if not HABITS[name].fits(model):
            continue
        try:
            loaded(source(Case(model=model, habits=(name,)))).run(None, metered=False)
            return
        except (RuntimeError, AttributeError) as error:  # What is deleted is missed where a model checkpoints itself.
            failures.append(str(error))
    raise AssertionError(failures)


@pytest.mark.nightly
def test_smaller_cases_are_cases():
    for case in (case for group in drawn(80, seed=5) for case in group):
        for smaller in smaller_cases(case):
            assert smaller != case
            compile(source(smaller), "case", "exec")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("budget: expected at least 5, got 3; raise the budget", True),
        ("expected 6 tensors saved for backward as in the first run, got 5; the call depends on a cache", False),
        ("stage 'a': expected its parameters as in forward, got others; call backward before", True),
    ],
)
def test_a_remedy_says_what_to_do(text: str, found: bool):
    assert has_remedy(text) == found


def test_the_table_counts_a_case_of_two_habits_twice():
    two = Case(model=DROPPING, habits=("seeded between", "two losses"))
    outcomes = [
        Outcome(case=two, verdict="exact"),
        Outcome(case=Case(model=DROPPING), verdict="refused", detail="x 12"),
    ]
    rows = habit_table(outcomes).set_index("habit")
    assert rows.loc["all cases", "cases"] == 2 and rows.loc["no habit", "refused"] == 1
    assert rows.loc["seeded between", "exact"] == rows.loc["two losses", "exact"] == 1
    assert "refused 1 times: x N" in notes(outcomes, 1.0)
