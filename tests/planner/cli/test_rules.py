"""A plan stated in a file goes the whole way at the command line: profile, solve, show and train."""

from __future__ import annotations

import json

import pytest

import planner
from profiler.json_files import write_document
from tests.support.command_line import SMALL, done, refused, run
from tests.support.small_chain import small_chain

RULES = """
checkpoints = "blocks.1"

[[rules]]
modules = "Block"
ops = "native_layer_norm"

[[rules]]
modules = "blocks.[01]"
"""
REST = """
rest = "solve"

[[rules]]
modules = "blocks.2"
ops = "*norm"
"""
TARGET = """
import torch
import planner

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(32), torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(5)])

    def forward(self, x):
        for each in self.blocks:
            x = each(x)
        return x

def build():
    torch.manual_seed(0)
    net = Net()
    return planner.Workload(model=net, inputs=torch.randn(256, 32), loss=lambda y: y.square().mean(),
                            optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("rules")
    for name, text in (("net.py", TARGET), ("rules.toml", RULES), ("rest.toml", REST)):
        (made / name).write_text(text)
    for name in ("rules", "rest"):
        done("profile", f"{made}/net.py:build", "--rules", made / f"{name}.toml", "-o", made / f"{name}.profile.json")
    return made


@pytest.mark.slow
def test_the_whole_way(folder):
    profile, plan = folder / "rules.profile.json", folder / "plan.json"
    document = json.loads(done("solve", profile, "--rules", folder / "rules.toml", "-o", plan, "--json").stdout)
    assert [stage["decision"] for stage in document["stages"] if stage["kind"] == "stage"] == [
        "recompute", "recompute", "selective", "selective", "selective"
    ]  # fmt: skip
    assert document["solver"] == "by hand" and document["status"] == "feasible" and document["restricted"] is False
    assert document["budget_bytes"] == document["predicted_peak_bytes"] < document["unplanned_peak_bytes"]
    assert document["stated"][1].startswith("recompute native_layer_norm in Block: 3 ops in 3 stages")
    trained = json.loads(done("train", f"{folder}/net.py:build", "--plan", plan, "--steps", "2", "--json").stdout)
    assert trained["measured_peak_bytes"] == trained["predicted_peak_bytes"] == document["predicted_peak_bytes"]
    shown = done("show", plan).stdout
    assert "recompute native_layer_norm in Block" in " ".join(shown.split())
    assert planner.Plan.load(plan).stated == tuple(document["stated"])


def test_the_rest_is_solved_for_within_the_budget(folder):
    profile, rules = folder / "rest.profile.json", folder / "rest.toml"
    document = json.loads(done("solve", profile, "--rules", rules, "--budget", "80%", "--json").stdout)
    assert document["restricted"] is True and document["predicted_peak_bytes"] <= document["budget_bytes"]
    assert document["stages"][3]["decision"] == "selective"
    shown = done("solve", profile, "--rules", rules, "--budget", "80%").stdout
    assert "plan that does what is stated" in shown and "the rest: solved for" in shown


def test_what_is_stated_may_not_fit_the_budget(folder):
    result = run("solve", folder / "rules.profile.json", "--rules", folder / "rules.toml", "--budget", "1KiB", "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 3
    assert document["status"] == "infeasible" and document["minimum_budget_bytes"] > 1024
    assert "what is stated needs them" in document["reason"]


def test_ops_of_captured_stages_need_no_profile_of_their_own(files, folder, tmp_path):
    (tmp_path / "rules.json").write_text('{"rules": [{"modules": "*", "ops": "gelu"}]}')
    assert (
        "recompute gelu in *: 5 ops in 5 stages"
        in done("solve", folder / "rest.profile.json", "--rules", tmp_path / "rules.json").output
    )


@pytest.mark.slow
def test_bad_rules_are_refused(files, folder, tmp_path):
    (tmp_path / "typo.toml").write_text('[[rules]]\nmodules = "blocks.9"\n')
    (tmp_path / "broken.toml").write_text("[[rules]\n")
    profile, target = folder / "rules.profile.json", f"{folder}/net.py:build"
    assert "nearest: blocks." in refused("solve", profile, "--rules", tmp_path / "typo.toml")
    assert "nearest: blocks." in refused(
        "profile", target, "--rules", tmp_path / "typo.toml", "-o", tmp_path / "p.json"
    )
    assert "expected TOML" in refused("solve", profile, "--rules", tmp_path / "broken.toml")
    assert "nothere.toml" in refused("profile", target, "--rules", tmp_path / "nothere.toml")
    assert "which needs a budget; add --budget" in refused(
        "solve", folder / "rest.profile.json", "--rules", folder / "rest.toml"
    )
    assert not (tmp_path / "p.json").exists()


def test_bad_rules_are_refused_before_the_model_is_built(tmp_path, monkeypatch):
    def never(*_: object) -> None:
        raise AssertionError("built the model before reading the rules")

    monkeypatch.setattr("planner.cli.profiling.workload_of", never)
    (tmp_path / "empty.toml").write_text("")
    assert "neither a rule nor a checkpoint" in refused(
        "profile", "zoo:mlp", *SMALL, "--rules", tmp_path / "empty.toml"
    )


def test_rules_are_of_profiles_and_a_budget_is_of_all_else(files, folder, tmp_path):
    write_document(tmp_path / "chain.json", small_chain().to_dict())
    assert "--rules: rules name stages of a model" in refused(
        "solve", tmp_path / "chain.json", "--rules", folder / "rules.toml"
    )
    assert "--budget: it is missing" in refused("solve", tmp_path / "chain.json")
    assert "--budget: it is missing" in refused("solve", files / "profile.json")
