"""Ctrl-C ends every command with one line and exit code 130; of a search and of training what there is until then."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import planner
from planner.plans.plan import Interrupted
from planner.training.oom_recovery import StepRollback
from solvers.chain import registry
from solvers.problem.examples import training_graph
from tests.support.chains import random_chain
from tests.support.command_line import SMALL, SOLVE_KEYS, done, run

BUDGET = "22"  # The fastest plan is found without the integer program, and takes 23 s; the fastest baseline 28 s.

PRESSED_IN_ILP = """
import signal
from planner.cli import main
from solvers.chain import registry
registry.ilp.solve = lambda *_: signal.raise_signal(signal.SIGINT)
main()
"""
# In the search for what a graph plans, in code that takes an interrupt for the end of its time, as HiGHS under PuLP.
PRESSED_AND_GONE_ON = """
import signal
from planner.cli import main
from solvers.graph import registry

def interrupted():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return tuple(range(16))

registry.METHODS["demand"] = lambda incumbent: incumbent.offer(interrupted(), "demand")
main()
"""
PRESSED_IN_IMPORT = """
import signal, sys
from planner.cli import main

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt as interrupt:
                raise {becomes}

sys.meta_path.insert(0, Press())
main()
"""
# Where Python drops whatever is raised: it was lost, and the command went on.
PRESSED_IN_CALLBACK = """
import gc, signal, time, weakref
from planner.cli.interrupts import ending_by_ctrl_c

class Thing:
    {method}

with ending_by_ctrl_c():
    thing = Thing()
    reference = weakref.ref(thing, {callback})
    del thing
    for _ in range(100):
        time.sleep(0.1)
    print("went on")
"""
TARGET = """
import sys, time
import torch
import planner

calls = 0

def loss(y):
    global calls
    calls += 1
    if calls == 1 + LAST:
        print("in the step", file=sys.stderr, flush=True)
        time.sleep(60)
    return y.sum()

def build():
    return planner.Workload(model=torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)),
                            inputs=torch.ones(2, 4), loss=loss)
"""


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(random_chain(12).to_dict()))
    return path


def program(text: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", text, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_search_that_a_signal_ends_prints_and_writes_its_best_plan(chain, tmp_path):
    plan = tmp_path / "plan.json"
    ended = program(PRESSED_IN_ILP, "solve", chain, "--budget", BUDGET, "-o", plan, "--json")
    assert (ended.returncode, json.loads(plan.read_text())["interrupted"]) == (130, True)
    assert f"interrupted: best plan so far\nwritten: {plan}" in ended.stderr and "Traceback" not in ended.stderr
    solved = json.loads(ended.stdout)
    assert set(solved) >= SOLVE_KEYS
    assert (solved["interrupted"], solved["status"], solved["predicted_seconds"]) == (True, "feasible", 23.0)


def test_the_plan_of_a_search_that_was_interrupted_says_so(chain, tmp_path, monkeypatch):
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry.ilp, "solve", pressed)
    plan = tmp_path / "plan.json"
    ended = run("solve", chain, "--budget", BUDGET, "-o", plan)
    assert ended.exit_code == 130 and "interrupted: the best until then" in ended.stdout
    assert json.loads(plan.read_text())["interrupted"] is True
    assert "interrupted: the best until then" in done("show", plan).stdout


def test_before_any_plan_is_known_it_says_so(chain, tmp_path, monkeypatch):
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "_fastest", lambda *_: None)
    monkeypatch.setattr(registry._Search, "run", pressed)
    ended = run("solve", chain, "--budget", BUDGET, "-o", tmp_path / "plan.json", "--json")
    document = json.loads(ended.stdout)
    assert (ended.exit_code, ended.stderr) == (130, "interrupted\n")
    assert set(document) >= SOLVE_KEYS and (document["status"], document["interrupted"]) == ("interrupted", True)
    assert not (tmp_path / "plan.json").exists()


def test_a_method_that_takes_the_signal_for_its_end_ends_the_command_all_the_same(tmp_path):
    graph = tmp_path / "graph.json"
    graph.write_text(json.dumps(training_graph(8, size_bytes=1000).to_dict()))
    ended = program(PRESSED_AND_GONE_ON, "solve", graph, "--budget", "100%", "--solver", "demand", "--json")
    assert (ended.returncode, json.loads(ended.stdout)["interrupted"]) == (130, True)
    assert ended.stderr == "interrupted: best plan so far\n"


@pytest.mark.parametrize(
    ("module", "becomes"),
    [(name, becomes) for name in ("typer", "numpy") for becomes in ("interrupt", "ImportError()")],
)
def test_in_an_import_it_is_one_line_too(chain, module, becomes):
    text = PRESSED_IN_IMPORT.format(module=module, becomes=becomes)
    ended = program(text, "solve", chain, "--budget", BUDGET)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("method", "callback"),
    [("pass", "lambda _: signal.raise_signal(2)"), ("__del__ = lambda self: signal.raise_signal(2)", "None")],
)
def test_where_python_drops_exceptions_it_is_raised_again(method, callback):
    ended = program(PRESSED_IN_CALLBACK.format(method=method, callback=callback))
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_other_commands_end_in_one_line(chain, monkeypatch):
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("solvers.chain.registry.rotor_frontier", pressed)
    ended = run("pareto", chain)
    assert (ended.exit_code, ended.stdout, ended.stderr) == (130, "", "interrupted\n")
    ended = run("pareto", chain, "--json")
    assert (ended.exit_code, json.loads(ended.stdout)) == (130, {"status": "interrupted", "interrupted": True})


def test_a_plan_that_is_there_is_not_lost_while_it_is_verified(files, tmp_path, monkeypatch):
    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.training.verification.verify", pressed)
    plan = tmp_path / "plan.json"
    ended = run("solve", files / "profile.json", "--budget", "80%", "--verify", "-o", plan, "--json")
    document = json.loads(ended.stdout)
    assert ended.exit_code == 130 and document["interrupted"] and document["predicted_peak_bytes"] > 0
    assert planner.Plan.load(plan).interrupted


def test_a_curve_of_a_graph_is_not_drawn_from_a_part_of_its_search(tmp_path, monkeypatch):
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("solvers.graph.moments.MomentSearch.step", pressed)
    with pytest.raises(KeyboardInterrupt):
        planner.pareto(training_graph(8, size_bytes=1000))


def test_in_python_the_interrupt_carries_the_best_plan(files, tmp_path, monkeypatch):
    profile = planner.Profile.load(files / "profile.json")
    expected = planner.solve(profile, "80%", solver="rotor")

    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry.ilp, "solve", pressed)
    monkeypatch.setattr(registry, "_is_proven", lambda *_: False)
    monkeypatch.setattr(registry, "AUTO_ILP_STAGES", 100)
    with pytest.raises(Interrupted) as caught:
        planner.solve(profile, "80%")
    plan = caught.value.plan
    assert plan.interrupted and plan.predicted_seconds == expected.predicted_seconds
    assert isinstance(plan, planner.Plan) and "interrupted, feasible" in plan.summary()
    plan.save(tmp_path / "plan.json")
    assert planner.Plan.load(tmp_path / "plan.json") == plan


def test_training_has_the_losses_until_then(files, monkeypatch):
    steps, run_step = iter(range(10)), StepRollback.run

    def pressed(self: StepRollback, number: int) -> float:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return run_step(self, number)

    monkeypatch.setattr(StepRollback, "run", pressed)
    args = ("train", "zoo:mlp", *SMALL, "--plan", files / "plan.json", "--steps", "9")
    ended = run(*args, "--json")
    document = json.loads(ended.stdout)
    assert (ended.exit_code, document["status"], len(document["losses"])) == (130, "interrupted", 3)
    assert ended.stderr.endswith("interrupted after 3 of 9 steps\n")


@pytest.mark.slow
def test_a_signal_from_outside_ends_training_in_its_step(tmp_path):
    (tmp_path / "model.py").write_text(TARGET.replace("LAST", "10**9"))
    target = f"{tmp_path / 'model.py'}:build"
    done("profile", target, "-o", tmp_path / "profile.json")
    done("solve", tmp_path / "profile.json", "--budget", "100%", "-o", tmp_path / "plan.json")
    (tmp_path / "model.py").write_text(TARGET.replace("LAST", "8"))
    command = [sys.executable, "-m", "planner", "train", target, "--plan", tmp_path / "plan.json", "--steps", "50"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
        assert training.stderr is not None and training.stdout is not None
        lines = [line for line in iter(training.stderr.readline, "in the step\n") if line]
        training.send_signal(signal.SIGINT)
        said, printed = training.stderr.read(), training.stdout.read()
    assert training.returncode == 130, (lines, said)
    assert said.splitlines()[-1].startswith("interrupted after") and "Traceback" not in said
    assert printed.startswith("losses")
