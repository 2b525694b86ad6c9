"""Rules in Python and in TOML and JSON files: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import json

import pytest
from torch import nn

import planner
from planner.plans.rules import Rule, Rules, RuleTarget, rules_from

TOML = """
checkpoints = ["h.3", "h.7"]
rest = "solve"

[[rules]]
modules = "h.*.mlp"
ops = ["gelu", 12]

[[rules]]
modules = ["h.0:softmax#1", "Attention"]
action = "keep"
force = true
"""
RULES = Rules(
    rules=[
        Rule(modules="h.*.mlp", ops=["gelu", "#12"]),
        Rule(modules=["h.0:softmax#1", "Attention"], action="keep", force=True),
    ],
    checkpoints=["h.3", "h.7"],
    rest="solve",
)


def written(folder, name, text):
    (folder / name).write_text(text)
    return folder / name


def test_a_toml_file_and_a_json_file_say_the_same(tmp_path):
    assert Rules.load(written(tmp_path, "rules.toml", TOML)) == RULES
    assert Rules.load(written(tmp_path, "rules.JSON", json.dumps(RULES.to_document()))) == RULES


def test_what_a_rule_names():
    assert RULES.rules[0].targets == (RuleTarget("h.*.mlp", ("gelu", "#12")),)
    assert RULES.rules[1].targets == (RuleTarget("h.0", ("softmax#1",)), RuleTarget("Attention", ()))
    assert Rule(modules=nn.GELU).targets == (RuleTarget("GELU", ()),)
    assert Rule(ops=3).targets == (RuleTarget("*", ("#3",)),)
    assert Rule(modules=["a", nn.GELU], action="solve").text == "solve for a, GELU"
    assert RULES.rules[1].text == "keep softmax#1 in h.0, Attention (forced)"


def test_one_and_several_are_the_same():
    assert Rule(modules="a", ops="mm") == Rule(modules=("a",), ops=["mm"])
    assert rules_from(Rule(modules="a")) == rules_from([Rule(modules="a")]) == Rules(rules=[Rule(modules="a")])
    assert rules_from(RULES) is RULES


def test_rules_may_come_as_a_path(tmp_path):
    path = written(tmp_path, "rules.toml", TOML)
    assert rules_from(path) == rules_from(str(path)) == RULES


def test_they_are_public():
    assert (planner.Rule, planner.Rules) == (Rule, Rules)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "neither modules nor ops"),
        ({"modules": [], "action": "keep"}, "neither modules nor ops"),
        ({"modules": ""}, "a glob pattern or a class.*got ''"),
        ({"modules": ["a", 3]}, "got 3"),
        ({"ops": True}, "an op's name or number.*got True"),
        ({"ops": -1}, "got -1"),
        ({"ops": 1.5}, "got 1.5"),
        ({"ops": "gelu#x"}, "'gelu#x' is not an op; write gelu, gelu#1 or #12"),
        ({"modules": "h.0:"}, "is not an op; write gelu"),
        ({"modules": "h.0:gelu", "ops": "mm"}, "name them in one place"),
        ({"action": "drop"}, "no action 'drop'; choose 'recompute' or 'keep' or 'solve'"),
        ({"action": ["keep"]}, "no action \\['keep'\\]"),
        ({"force": "yes"}, "force is 'yes'; write true or false"),
        ({"ops": "mm", "action": "solve"}, "only whole stages"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(values, words):
    with pytest.raises(ValueError, match=words):
        Rule(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "neither a rule nor a checkpoint"),
        ({"rest": "solve"}, "neither a rule nor a checkpoint"),
        ({"rules": Rule(modules="a")}, "put the rules into a list"),
        ({"rules": ["a"]}, "planner.Rule"),
        ({"checkpoints": [1]}, "checkpoints: expected a name.*got 1"),
        ({"checkpoints": "a", "rest": "recompute"}, "no rest 'recompute'; choose 'keep' or 'solve'"),
    ],
)
def test_rules_that_make_no_sense_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        Rules(**values)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("r.toml", "[[rules]\n", "expected TOML, got something else"),
        ("r.json", "{", "expected JSON, got something else"),
        ("r.json", "[]", "r.json: expected a table with rules, checkpoints, rest, got \\[\\]"),
        ("r.json", "null", "expected a table"),
        ("r.json", "[" * 100_000, "expected JSON"),
        ("r.yaml", "rules: []", "ending in '.yaml'; use .toml or .json"),
        ("r.toml", "", "r.toml: rules: there is neither a rule"),
        ("r.toml", "rule = 3", "got rule; remove or rename"),
        ("r.toml", "rules = 3", "write \\[\\[rules\\]\\] above each"),
        ("r.toml", "rules = [3]", "rule 1: expected a table with modules, ops, action, force, got 3"),
        ("r.toml", "[[rules]]\nmodule = 'a'", "rule 1: expected modules.*got module"),
        (
            "r.toml",
            "[[rules]]\nmodules = 'a'\n[[rules]]\nforce = 1",
            "rule 2: a rule: force is",
        ),
        ("r.toml", "[[rules]]\nmodules = 1979-05-27", "got datetime.date"),
        ("r.toml", "checkpoints = {a = 1}", "r.toml: checkpoints: expected"),
        ("r.toml", "checkpoints = 'a'\ncheckpoints = 'b'", "expected TOML"),
        ("r.json", '{"checkpoints": "a", "rest": null}', "no rest None; choose 'keep' or 'solve'"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path, name, text, words):
    with pytest.raises(ValueError, match=words):
        Rules.load(written(tmp_path, name, text))


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothere.toml: there is no file of that name; check the path$"):
        Rules.load(tmp_path / "nothere.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ValueError, match="folder.toml: it cannot be read"):
        Rules.load(tmp_path / "folder.toml")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="bytes.json: it cannot be read"):
        Rules.load(tmp_path / "bytes.json")
