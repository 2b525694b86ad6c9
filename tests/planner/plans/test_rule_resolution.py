"""What rules make of the stages of a small network written down by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.plans.rules import Rule, Rules, makers_of_outputs, ops_inside
from planner.plans.stated_plan import StageDirective, resolve_rules
from profiler.op_graph import ChoiceError, NamedStage, StageOp, StageOps, StageStorage

# A block: norm, then a module "mlp" of a linear layer, an activation and a linear layer, then a sum. Storage 0 is the
# input; op k makes storage k + 1. All but the results of the last two are saved.
NORM, FIRST, GELU, SECOND, SUM = range(5)
MODULES = (("", "Block"), ("norm", "Norm"), ("mlp", "Mlp"), ("mlp.act", "Gelu"), ("off", "Dropout"))
OPS = StageOps(
    ops=(
        StageOp(op="aten.native_layer_norm.default", module="norm", seconds=1.0, reads=((0, 0),), allocates=(1,)),
        StageOp(op="aten.addmm.default", module="mlp", seconds=1.0, reads=((1, 0),), allocates=(2,)),
        StageOp(op="aten.gelu.default", module="mlp.act", seconds=1.0, reads=((2, 0),), allocates=(3,)),
        StageOp(op="aten.addmm.default", module="mlp", seconds=1.0, reads=((3, 0),), allocates=(4,)),
        StageOp(op="aten.add.Tensor", module="", seconds=1.0, reads=((0, 0), (4, 0)), allocates=(5,)),
    ),
    storages=(
        StageStorage(size_bytes=8, op=-1, always_live=True, dies_after_stage=True),
        StageStorage(size_bytes=8, op=NORM, saved=True),
        StageStorage(size_bytes=32, op=FIRST, saved=True),
        StageStorage(size_bytes=32, op=GELU, saved=True),
        StageStorage(size_bytes=8, op=SECOND),
        StageStorage(size_bytes=8, op=SUM, returned=True),
    ),
    modules=MODULES,
)
PARENTS = (("", "Model"), ("body", "Body"))
STAGES = [NamedStage(name=f"body.h.{k}", parents=PARENTS, ops=OPS) for k in range(4)]
EVERYTHING_SAVED = {NORM, FIRST, GELU}


def directives(*rules: Rule, stages=STAGES, **more) -> tuple[StageDirective, ...]:
    return resolve_rules(Rules(rules=rules, **more), stages, ["embedding"]).directives


def kinds(*rules: Rule, **more) -> str:
    """One letter per stage: (k)eep, (r)ecompute, (s)egment, (c)hoice; (S)olve."""
    return "".join("S" if directive.kind == "solve" else directive.kind[0] for directive in directives(*rules, **more))


def again(*rules: Rule, stages=STAGES) -> set[int]:
    """What runs again in the first stage; the others must say the same."""
    first, *others = directives(*rules, stages=stages)
    assert all(directive.rerun == first.rerun for directive in others)
    assert bool(first.rerun) == (first.kind == "choice")
    return set(first.rerun)


def lines(*rules: Rule, **more) -> tuple[str, ...]:
    return resolve_rules(Rules(rules=rules, **more), STAGES, []).lines


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("body.h.1", "krkk"),
        ("body.h.[02]", "rkrk"),
        ("body.h.*", "rrrr"),
        ("body.h", "rrrr"),
        ("body", "rrrr"),
        ("Body", "rrrr"),
        ("Model", "rrrr"),
        ("Block", "rrrr"),
        ("*", "rrrr"),
        ("*.2", "kkrk"),
        ("*.norm", "kkkk"),  # its output is its only op's
    ],
)
def test_whole_stages_by_name_pattern_and_class(pattern, expected):
    assert kinds(Rule(modules=pattern)) == expected


def test_calls_of_one_module_have_its_name_and_their_own():
    stages = [replace(STAGES[0], name=name) for name in ("shared", "shared#1", "shared#2")]
    assert kinds(Rule(modules="shared"), stages=stages) == "rrr"
    assert kinds(Rule(modules="shared#1"), stages=stages) == "krk"


def test_a_module_inside_a_stage_runs_again_but_for_its_output():
    assert again(Rule(modules="*.mlp")) == {FIRST, GELU}
    assert again(Rule(modules="Mlp")) == {FIRST, GELU}


def test_modules_beside_each_other_keep_their_own_outputs():
    """The norm's output is read by the other module alone, and still is an output."""
    assert again(Rule(modules=["*.norm", "*.mlp"])) == {FIRST, GELU}


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        ("gelu", {GELU}),
        ("aten.gelu.default", {GELU}),
        ("aten.gelu", {GELU}),
        ("*norm", {NORM}),
        (["gelu", "native_layer_norm"], {NORM, GELU}),
        ("addmm", {FIRST}),  # nothing needs the second one's result
        ("addmm#0", {FIRST}),
        ("addmm#1", set()),
        (1, {FIRST}),
        ("#2", {GELU}),
        ("*", EVERYTHING_SAVED),
    ],
)
def test_ops_by_kind_name_pattern_and_number(ops, expected):
    assert again(Rule(modules="Block", ops=ops)) == expected


def test_ops_of_one_module_alone():
    assert again(Rule(modules="*.mlp", ops="*")) == {FIRST, GELU}
    assert again(Rule(modules="*.mlp:addmm#0")) == {FIRST}
    assert again(Rule(ops="gelu")) == {GELU}


def test_what_a_stage_returns_is_an_output_of_the_module_that_makes_it():
    inside = {FIRST, GELU, SECOND, SUM}
    assert makers_of_outputs(OPS, inside) == {SUM}
    assert makers_of_outputs(OPS, inside - {SUM}) == {SECOND}
    assert makers_of_outputs(OPS, {NORM}) == {NORM}


def test_a_module_s_ops_are_not_those_of_one_whose_name_goes_on():
    ops = replace(OPS, ops=tuple(replace(op, module=op.module.replace("mlp.act", "mlp2")) for op in OPS.ops))
    assert ops_inside(ops, "mlp") == [FIRST, SECOND]
    assert ops_inside(OPS, "mlp") == [FIRST, GELU, SECOND]


def test_underscores_around_a_kind_may_be_left_out():
    ops = replace(OPS, ops=(*OPS.ops[:2], replace(OPS.ops[GELU], op="aten._softmax.default"), *OPS.ops[3:]))
    stages = [replace(STAGES[0], ops=ops)]
    assert again(Rule(ops="softmax"), stages=stages) == again(Rule(ops="_softmax"), stages=stages) == {GELU}


def test_rules_add_up_and_later_ones_take_out():
    gelu, norm = Rule(ops="gelu"), Rule(ops="native_layer_norm")
    assert again(gelu, norm) == {GELU, NORM}
    assert again(gelu, norm, Rule(modules="Mlp", action="keep"), Rule(ops="gelu")) == {GELU, NORM}
    assert again(Rule(modules="Mlp"), Rule(ops="gelu", action="keep")) == {FIRST}
    assert again(Rule(modules="body.h"), Rule(ops="addmm", action="keep")) == {NORM, GELU}
    assert again(Rule(modules="body.h"), Rule(modules="Mlp", action="keep")) == {NORM}
    assert again(Rule(modules="body.h"), Rule(modules="*.norm", action="keep")) == {FIRST, GELU}
    assert again(Rule(ops="gelu"), Rule(modules="*.h.*")) == set()
    assert kinds(Rule(ops="gelu"), Rule(modules="*.h.1")) == "crcc"
    assert kinds(Rule(modules="*"), Rule(modules="*.h.1", action="keep")) == "rkrr"
    assert kinds(Rule(modules="*"), Rule(modules="*.h.1:gelu")) == "rrrr"


def test_what_no_rule_names_is_kept_or_solved_for():
    assert kinds(Rule(modules="body.h.0")) == "rkkk"
    assert kinds(Rule(modules="body.h.0"), rest="solve") == "rSSS"
    assert kinds(Rule(modules="body.h.0:gelu"), Rule(modules="body.h.1", action="keep"), rest="solve") == "ckSS"
    assert kinds(Rule(modules="*"), Rule(modules="body.h.2", action="solve")) == "rrSr"
    assert kinds(Rule(modules="body.h.1.mlp", action="keep"), rest="solve") == "SkSS"


def test_checkpoints_end_segments():
    stated = directives(checkpoints=["body.h.0", "body.h.2"])
    assert [(stage.kind, stage.ends_segment) for stage in stated] == [
        ("segment", True), ("segment", False), ("segment", True), ("keep", False)
    ]  # fmt: skip
    assert [stage.ends_segment for stage in directives(checkpoints="body.h.*")] == [True] * 4
    assert [stage.ends_segment for stage in directives(checkpoints="body")] == [False, False, False, True]
    assert kinds(Rule(modules="*.h.1", action="keep"), checkpoints="*.h.2") == "sksk"
    assert kinds(Rule(modules="*.h.1"), checkpoints="*.h.2", rest="solve") == "srsS"
    assert kinds(Rule(modules="*.h.1:gelu", action="keep"), checkpoints="*.h.2") == "scsk"


def test_choices_are_stated_by_the_stage_s_position():
    stated = directives(Rule(modules=["body.h.1", "body.h.3"], ops="gelu"))
    assert [directive.kind for directive in stated] == ["keep", "choice", "keep", "choice"]
    assert [set(directive.rerun) for directive in stated] == [set(), {GELU}, set(), {GELU}]


def test_lines_say_what_rules_came_to():
    assert lines(Rule(modules="body")) == ("recompute body: 4 stages as a whole",)
    assert lines(Rule(modules="*.1"), checkpoints="*.2", rest="solve") == (
        "checkpoints *.2: 2 stages in segments",
        "recompute *.1: 1 stage as a whole",
        "the rest: solved for",
    )
    assert lines(Rule(modules=["*.1", "*.2.mlp"]), Rule(modules="*.3", action="keep")) == (
        "recompute *.1, *.2.mlp: 1 stage as a whole and 2 ops in 1 stage",
        "keep *.3: 1 stage",
    )
    assert "nothing runs again" in lines(Rule(ops="add"))[0]


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([Rule(modules="body.hh.1")], "rule 1 .*'body.hh.1' matches .* no module that runs; nearest: body.h.1"),
        ([Rule(modules="Blok")], "nearest: Block"),
        ([Rule(modules="zzz")], "nearest: Model, body, Body"),
        ([Rule(modules="embedding")], "'embedding' runs outside of stages and is always kept.*--stages"),
        ([Rule(modules="Block", ops="gellu")], "'gellu' matches .* no op that runs in 'Block'; nearest: gelu"),
        ([Rule(modules="*.mlp", ops=["gelu", "mm"])], "'mm' matches .* nearest: addmm"),
        ([Rule(modules="*", ops="softmax")], "nearest: .*gelu"),
        ([Rule(modules="*.mlp", ops="#0")], "'#0' matches the kind, name or number of no op"),
        ([Rule(ops=5)], "'#5' matches the kind, name or number of no op"),
        ([Rule(modules="*.off")], "'\\*.off' runs no ops"),
        ([Rule(modules="*.off:gelu")], "runs no ops"),
        (
            [Rule(modules="*.mlp", action="solve")],
            "applies to whole stages, and the named module lies inside stage 'body.h.0'",
        ),
        (
            [Rule(modules="body.h.0"), Rule(modules="*", action="keep")],
            "take back as a whole, got rule 1 .* and after it rule 2 ",
        ),
        ([Rule(ops="gelu"), Rule(modules="Mlp", action="keep")], "take back as a whole"),
        ([Rule(modules="*.h.3", action="keep"), Rule(modules="body.h")], "take back as a whole"),
        ([Rule(modules="*.h.3", action="solve"), Rule(modules="body.h")], "take back as a whole"),
    ],
)
def test_rules_that_name_nothing_or_contradict_are_refused(rules, words):
    with pytest.raises(ChoiceError, match=words):
        directives(*rules)


@pytest.mark.parametrize(
    ("checkpoints", "rules", "words"),
    [
        ("body.h.9", [], "checkpoints: 'body.h.9' matches .*nearest: body.h.3"),
        ("*.mlp", [], "checkpoints: expected stages.*'\\*.mlp', which lies inside stage 'body.h.0'"),
        ("embedding", [], "checkpoints: .*outside of stages"),
        ("body.h.1", [Rule(modules="*", action="keep")], "got checkpoints body.h.1 and after it rule 1"),
    ],
)
def test_checkpoints_that_cannot_be_are_refused(checkpoints, rules, words):
    with pytest.raises(ChoiceError, match=words):
        directives(*rules, checkpoints=checkpoints)


def stages_with(reason: str) -> list[NamedStage]:
    """The activation must not run again."""
    ops = tuple(replace(op, not_rerunnable_reason=reason) if k == GELU else op for k, op in enumerate(OPS.ops))
    return [replace(stage, ops=replace(OPS, ops=ops)) for stage in STAGES]


@pytest.mark.parametrize("rule", [Rule(ops="gelu"), Rule(ops="*"), Rule(modules="*.mlp"), Rule(modules="*.h.0:#2")])
def test_an_op_that_must_not_run_again_is_refused_by_name_unless_forced(rule):
    stages = stages_with("it communicates with other processes")
    with pytest.raises(ChoiceError, match="rule 1 .*op 2 .aten.gelu.default in mlp.act.*communicates.*force = true"):
        directives(rule, stages=stages)
    forced = directives(replace(rule, force=True), stages=stages)
    assert forced[0].kind == "choice" and GELU in forced[0].rerun


def test_what_must_not_run_again_may_be_taken_out_by_a_later_rule():
    stages = stages_with("it communicates with other processes")
    assert again(Rule(ops="*"), Rule(ops="gelu", action="keep"), stages=stages) == {NORM, FIRST}


def test_an_op_that_must_not_run_again_may_be_named_where_it_would_not():
    ops = tuple(
        replace(op, not_rerunnable_reason="it changes what comes from outside") if k == SUM else op
        for k, op in enumerate(OPS.ops)
    )
    assert again(Rule(ops="*"), stages=[replace(STAGES[0], ops=replace(OPS, ops=ops))]) == EVERYTHING_SAVED
