"""Mistakes that people make at the command line: each is answered in a sentence that names its cause and a remedy."""

from __future__ import annotations

import pytest

from tests.support.command_line import refused, run

# What is typed, with {files} for a folder that has a profile, a plan and targets; words of the cause and of the remedy.
MISTAKES = [
    ("solve {files}/profile.json --budget 0.6", "'0.6' without a unit", "write 60%"),
    ("solve {files}/profile.json --budget 8.5", "'8.5' without a unit", "write 8.5GiB, or 8.5%"),
    ("solve {files}/profile.json --budget 1e9", "'1e9'", "write 1000000000"),
    ("solve {files}/profile.json --budget 8GX", "unknown unit 'GX'", "GiB"),
    ("solve {files}/profile.json --budget 0", "less than one byte", "give a larger one"),
    ("solve {files}/profile.json --budget=-5", "'-5'", "write a positive number"),
    ("solve {files}/profile.json", "--budget: it is missing", "70%"),
    ("solve {files}/profile.json --bugdet 80%", "has no such option", "--budget"),
    ("sovle {files}/profile.json", "got 'sovle'", "did you mean 'solve'?"),
    ("solve {files}/profile.json --budget 80% --solver rottor", "got 'rottor'", "did you mean rotor?"),
    ("solve {files}/profile.json --budget 80% --solver demand", "got 'demand'", "others are for graphs"),
    ("solve {files}/plan.json --budget 80%", "a plan, which planner solve writes", "a profile, which planner profile"),
    ("solve {files}/targets.py --budget 80%", "no JSON document", "pass a file of format planner-profile"),
    ("solve {files}/profile.json --budget 80% --host-memory 50%", "no unplanned peak is known", "in bytes"),
    ("pareto {files}/plan.json", "a plan, which planner solve writes", "a profile, which planner profile writes"),
    ("show {files}/targets.py", "no JSON document", "a plan, which planner solve writes"),
    ("show nothere.json", "no file of that name", "check the path"),
    ("show {files}/profile.json -o page.html", "it holds a planner-profile", "pass the plan that planner solve"),
    ("show {files}/plan.json --html page.pdf", "'.pdf'", ".html"),
    ("train zoo:mlp", "--plan, --budget: neither of them is given", "give a plan's file or a budget"),
    ("train zoo:mlp --plan {files}/profile.json", "a profile, which planner profile writes", "planner solve writes"),
    ("compare zoo:mlp", "--budget: it is missing", "add it"),
    ("train {files}/profile.json --budget 80%", "profile.json'", "name what builds the model"),
    ("profile {files}/targets.py", "targets.py'", "add its function"),
    ("profile {files}/targets.py:brokn", "nothing of that name", "broken"),
    ("profile {files}/targets.py:number", "expected a Workload, got int", "return planner.Workload("),
    ("profile gpt2", "got 'gpt2'", "did you mean zoo:gpt2?"),
    ("profile zoo:gpt-2", "got 'gpt-2'", "did you mean gpt2?"),
    ("profile zoo:mlp --set batch 32", "got 'batch 32'", "write --set batch=32"),
    ("profile zoo:mlp --set bacth=32", "got 'bacth'", "did you mean batch?"),
    ("profile zoo:mlp --set batch=big", "got 'big'", "write for example batch=4096"),
    ("profile zoo:mlp --device gpu", "got 'gpu'", "use cpu"),
    ("max-batch zoo:mlp --budget 80%", "a part of an unplanned peak", "in bytes"),
]


@pytest.mark.parametrize(("typed", "cause", "remedy"), MISTAKES)
def test_a_mistake_is_answered_with_cause_and_remedy(files, typed, cause, remedy):
    message = " ".join(refused(*typed.format(files=files).split()).split())
    assert cause in message and remedy in message


def test_a_budget_in_percent_is_refused_in_percent_and_bytes(files):
    result = run("solve", files / "profile.json", "--budget", "30%")
    assert result.exit_code == 3
    assert ", 30% of the unplanned peak)" in result.stderr and " bytes (" in result.stderr


def test_the_smallest_budget_told_in_percent_is_enough(files):
    told = run("solve", files / "profile.json", "--budget", "30%").stderr
    share = told.rpartition("% of the unplanned peak")[0].rpartition(" ")[2]
    assert run("solve", files / "profile.json", "--budget", f"{share}%").exit_code == 0
