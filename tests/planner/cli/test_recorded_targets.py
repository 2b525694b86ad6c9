"""A profile and a plan know the target that they were made of: training needs neither it nor its settings again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import planner
from profiler.target_record import TargetRecord
from tests.support.command_line import TARGETS, done, refused

BUILD = (
    TARGETS
    + """
def sized(width=8, depth=2):
    blocks = [torch.nn.Linear(width, width) for _ in range(depth)]
    return Workload(model=torch.nn.Sequential(*blocks), inputs=torch.ones(4, width), loss=lambda y: y.sum())
"""
)


TINY = ["--set", "layers=2", "hidden=8", "batch=4"]


def losses_of(*args):
    return json.loads(done("train", *args, "--steps", "2", "--json").stdout)["losses"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    done("profile", "zoo:mlp", *TINY, "--no-menus", "-o", folder / "profile.json")
    done("solve", folder / "profile.json", "--budget", "100%", "-o", folder / "plan.json")
    return folder


def test_the_plan_of_a_zoo_model_is_trained_without_naming_it(tiny):
    plan = tiny / "plan.json"
    assert planner.Plan.load(plan).target == TargetRecord(text="zoo:mlp", settings=tuple(TINY[1:]))
    assert json.loads(done("show", plan, "--json").stdout)["target"]["settings"] == TINY[1:]
    named = losses_of("zoo:mlp", *TINY, "--plan", plan)
    assert losses_of("--plan", plan) == named
    seeded = losses_of("--plan", plan, "--set", "seed=5")
    assert seeded == losses_of("zoo:mlp", *TINY, "seed=5", "--plan", plan) != named


@pytest.fixture
def plan_of_a_file(tmp_path, monkeypatch):
    """Of sized() in a folder of its own; the current folder is another one."""
    for name in ("code", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "code" / "own.py").write_text(BUILD)
    monkeypatch.chdir(tmp_path / "code")
    done("profile", "own.py:sized", "--set", "depth=3", "--no-menus", "-o", "profile.json")
    done("solve", "profile.json", "--budget", "100%", "-o", tmp_path / "elsewhere" / "plan.json")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def test_the_plan_of_a_file_is_trained_from_another_folder(plan_of_a_file):
    assert len(losses_of("--plan", "plan.json")) == 2


def test_a_file_that_is_gone_is_refused_with_its_place_unless_it_lies_here(plan_of_a_file):
    (plan_of_a_file / "code" / "own.py").rename(plan_of_a_file / "own.py")
    message = refused("train", "--plan", "plan.json")
    assert f"the file of 'own.py:sized', which was profiled, is neither at '{plan_of_a_file}/code/own" in message
    (plan_of_a_file / "own.py").rename("own.py")
    assert len(losses_of("--plan", "plan.json")) == 2


def test_a_target_given_beside_the_plan_comes_first_and_a_mismatch_names_the_plan_s(plan_of_a_file):
    message = refused("train", "../code/own.py:sized", "--plan", "plan.json")
    assert "has no module '2'" in message and "plan.json was made of own.py:sized --set depth=3" in message


def test_without_any_target_training_is_refused(tiny, tmp_path):
    replace(planner.Plan.load(tiny / "plan.json"), target=None).save(tmp_path / "plan.json")
    assert "plan.json records none" in refused("train", "--plan", tmp_path / "plan.json")
    assert "TARGET: the command needs a model to run, and none is named; " in refused("train", "--budget", "60%")


def test_files_of_releases_without_targets_are_read(tiny, tmp_path):
    for name, kind in (("profile.json", planner.Profile), ("plan.json", planner.Plan)):
        document = json.loads((tiny / name).read_text())
        del document["target"]
        (tmp_path / name).write_text(json.dumps(document))
        assert kind.load(tmp_path / name).target is None


def test_a_module_is_found_in_the_folder_where_it_was_profiled(tmp_path, monkeypatch):
    (tmp_path / "recorded_module.py").write_text(BUILD)
    record = TargetRecord(text="recorded_module:talks", folder=str(tmp_path))
    from planner.targets import NoTarget, build_recorded

    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    assert len([*build_recorded(record, {}).model.children()]) == 3
    with pytest.raises(NoTarget, match="the folder in which .* is gone"):
        build_recorded(replace(record, folder=str(tmp_path / "gone")), {})


def test_a_plan_is_measured_and_verified_on_its_own_model_where_none_is_named(tiny, tmp_path):
    plan = tmp_path / "plan.json"
    done("solve", tiny / "profile.json", "--verify", "--budget", "100%", "-o", plan)
    assert "measured" in done("show", plan, "--measure").stdout
    (tmp_path / "model.py").write_text(BUILD)
    assert "peak with the plan" in done("show", plan, "--measure").stdout
    assert "has no module" in refused("show", plan, "--measure", f"{tmp_path / 'model.py'}:sized")
    done("show", plan, "--measure", "-o", tmp_path / "page.html")


def test_measuring_a_plan_that_records_no_target_is_refused(tiny, tmp_path):
    replace(planner.Plan.load(tiny / "plan.json"), target=None).save(tmp_path / "plan.json")
    message = refused("show", tmp_path / "plan.json", "--measure")
    assert "--measure: the command needs a model to run, and none is named" in message
    assert "plan.json records none" in message


def test_a_page_that_could_not_be_written_is_refused_before_training(tiny, tmp_path):
    replace(planner.Plan.load(tiny / "plan.json"), chain=None).save(tmp_path / "old.json")
    for file in ("page.html", "step.pickle"):
        message = refused("train", "--plan", tmp_path / "old.json", "-o", tmp_path / file)
        assert "old.json: this plan of an older release lacks the chain" in message and "loss" not in message
        assert not (tmp_path / file).exists()


def test_a_step_that_was_never_run_whole_is_not_verified(tiny, tmp_path):
    replace(planner.Profile.load(tiny / "profile.json"), frugal=True).save(tmp_path / "frugal.json")
    assert "--verify: it compares the planned step with the unplanned one, which does not fit" in refused(
        "solve", tmp_path / "frugal.json", "--budget", "100%", "--verify"
    )


@pytest.fixture
def foreign(tiny, tmp_path, monkeypatch):
    """A function that saves a plan of somebody else's whose target is the given one; the current folder is empty."""
    monkeypatch.chdir(tmp_path)

    def save(**target):
        plan = replace(planner.Plan.load(tiny / "plan.json"), target=TargetRecord(**target))
        plan.save("plan.json")
        return "plan.json"

    return save


@pytest.mark.parametrize("how", [("train", "--plan"), ("show", "--measure")])
def test_a_file_from_elsewhere_runs_no_code(foreign, tmp_path, how):
    plan = foreign(text="os:system", settings=("command=touch ran",), folder="/somewhere", proof="0" * 64)
    command, option = how
    arguments = (command, option, plan) if option == "--plan" else (command, plan, option)
    message = refused(*arguments)
    assert "os:system --set 'command=touch ran'" in message and "--trust" in message
    assert not (tmp_path / "ran").exists()


def test_trust_and_a_named_target_run_it(plan_of_a_file):
    plan = planner.Plan.load("plan.json")
    target = plan.target
    assert target is not None
    replace(plan, target=replace(target, proof="")).save("plan.json")
    assert "own.py:sized --set depth=3" in refused("train", "--plan", "plan.json")
    assert len(losses_of("--plan", "plan.json", "--trust")) == 2
    assert len(losses_of("../code/own.py:sized", "--set", "depth=3", "--plan", "plan.json")) == 2


@pytest.mark.parametrize("change", [{"settings": ("depth=4",)}, {"folder": "/"}, {"device": "cpu"}, {"text": "a:b"}])
def test_a_proof_is_of_one_target_alone(change):
    record = TargetRecord.given("own.py:sized", ["depth=3"], None)
    assert record.made_here and not replace(record, **change).made_here and not record.with_changes([], None).made_here


def test_another_user_s_or_machine_s_proof_is_none_and_without_a_home_there_is_none(tmp_path, monkeypatch):
    record = TargetRecord.given("own.py:sized", [], None)
    with monkeypatch.context() as patch:
        patch.setattr("platform.node", lambda: "another")
        assert not record.made_here
    assert record.made_here
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert not record.made_here and TargetRecord.given("own.py:sized", [], None).made_here
    (secret,) = (tmp_path / "sublinear-planner").iterdir()
    assert secret.stat().st_mode & 0o777 == 0o600 and secret.parent.stat().st_mode & 0o777 == 0o700
    secret.chmod(0o644)  # Others may have read it.
    assert TargetRecord.given("own.py:sized", [], None).proof == ""
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/no-home")
    assert TargetRecord.given("own.py:sized", [], None).proof == "" and not replace(record, proof="").made_here


@pytest.mark.parametrize("text", ["zoo:own.py:sized", " zoo:x.py:f", "zoo.py:f"])
def test_what_only_looks_like_the_zoo_is_refused(foreign, text):
    assert "--trust" in refused("train", "--plan", foreign(text=text, folder="/"))


def test_the_recorded_folder_adds_nothing_to_the_path_of_a_zoo_model_and_comes_last_of_all(tmp_path, monkeypatch):
    import sys

    from planner.targets import build_recorded

    monkeypatch.setattr(sys, "path", [*sys.path])
    build_recorded(TargetRecord(text="zoo:mlp", folder=str(tmp_path)), {"layers": 1, "hidden": 4, "batch": 2})
    assert str(tmp_path) not in sys.path
    (tmp_path / "late_module.py").write_text(BUILD)
    build_recorded(TargetRecord(text="late_module:talks", folder=str(tmp_path)), {})
    assert sys.path[-1] == str(tmp_path)
