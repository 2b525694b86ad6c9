"""Manual plans are exact: they compute what the model computes and take the bytes that were predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import planner
from planner import Rule, Rules, zoo
from planner.plans.cost_model import chain_of
from profiler.op_graph import ChoiceError
from solvers import replay
from tests.support import ROOT
from tests.support.exactness import assert_same, state_after
from tests.support.nightly import by_day
from tests.support.odd_models import workload

GPT2 = {"layers": 3, "hidden": 64, "seq": 32, "batch": 2}
BERT = {"layers": 2, "hidden": 64, "seq": 32, "batch": 2}
RESNET = {"image": 64, "batch": 8, "hidden": 8, "optimizer": "none"}
EXAMPLE = ROOT / "examples" / "gpt2-rules.toml"
BLOCKS = Rule(modules="transformer.h")


def gpt2() -> planner.Workload:
    return zoo.build("gpt2", **GPT2)


def profiled(work: planner.Workload, rules: Rules, stages: list[str] | None = None) -> planner.Profile:
    """With the programs of the rules alone."""
    return planner.profile(work, stages=stages, rules=rules, menus=False)


def checked(make, rules: Rules, stages: list[str] | None = None) -> planner.Plan:
    """The plan that rules state, measured against its prediction and the unplanned model."""
    plan = planner.state(profiled(make(), rules, stages), rules)
    expected, work = state_after(make()), make()
    with planner.apply(work.model, plan):
        assert_same(state_after(work), expected)
        measured = planner.measure(work, repeats=1)
    assert plan.predicted_peak_bytes == measured.peak_bytes <= plan.budget_bytes
    return plan


def decisions(plan: planner.Plan) -> list[str]:
    return [stage.decision for stage in plan.stages if stage.kind == "stage"]


@pytest.mark.parametrize(
    ("name", "settings", "rules"),
    [
        ("gpt2", GPT2, Rules(rules=[Rule(modules="*.attn"), Rule(modules="*.mlp", ops=["tanh", "mul"])])),
        ("gpt2", GPT2, Rules(rules=[BLOCKS, Rule(ops=["addmm", "bmm"], action="keep")])),
        ("bert", BERT, Rules(rules=[Rule(modules="BertIntermediate", ops="gelu"), Rule(modules="*.0.attention")])),
        ("gpt2", {**GPT2, "layers": 4}, Rules.load(EXAMPLE)),
        pytest.param(
            "resnet50",
            RESNET,
            Rules(rules=[Rule(modules="*.stages.0"), Rule(ops=["*batch_norm", "relu"])]),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_stated_plans_of_real_networks(name, settings, rules):
    plan = checked(lambda: zoo.build(name, **settings), rules)
    assert plan.solver == "by hand" and plan.status == "feasible" and not plan.restricted
    assert plan.predicted_peak_bytes == plan.budget_bytes < plan.unplanned_peak_bytes
    assert plan.lower_bound_seconds <= plan.predicted_seconds and plan.recomputed_ops > 0


@pytest.mark.parametrize(
    "name", by_day(["dropout", "batchnorm", "shared", "skip", "in_place", "sequential"], ["dropout", "in_place"])
)
@pytest.mark.parametrize("rule", [Rule(modules="*"), Rule(ops="*")], ids=["stages", "ops"])
def test_stated_plans_of_odd_networks(name, rule):
    plan = checked(lambda: workload(name), Rules(rules=[rule]))
    assert set(decisions(plan)) <= ({"recompute"} if not rule.ops else {"selective", "keep"})
    assert len(set(decisions(plan))) == 1 or "selective" in decisions(plan)


class Bare(nn.Module):
    """Lets go of its input; to run its first op again, the input has to be held."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(torch.sigmoid(torch.tanh(x)))))


@pytest.mark.parametrize("ops", ["tanh#0", "tanh", ["tanh", "sigmoid"], "*"])
def test_inputs_that_a_choice_holds_are_counted(ops):
    def make() -> planner.Workload:
        torch.manual_seed(0)
        model = nn.Sequential(*[Bare() for _ in range(4)])
        return planner.Workload(model=model, inputs=torch.randn(128, 16), loss=lambda y: y.square().mean())

    checked(make, Rules(rules=[Rule(modules="Bare", ops=ops)]))


def test_what_is_stated_is_what_is_planned():
    rules = Rules(
        checkpoints=["transformer.h.0"],
        rules=[Rule(modules="transformer.drop", action="keep"), Rule(modules="transformer.h.2.mlp")],
    )
    plan = planner.state(profiled(gpt2(), rules), rules)
    assert decisions(plan) == ["keep", "recompute", "keep", "selective", "keep"]
    assert plan.stated == (
        "checkpoints transformer.h.0: 1 stage in segments",
        "keep transformer.drop: 1 stage",
        "recompute transformer.h.2.mlp: 10 ops in 1 stage",
    )
    assert plan.chain is not None and replay(plan.chain, plan.schedule).peak_bytes == plan.predicted_peak_bytes


class Branches(nn.Module):
    """Two blocks read the same tensor: the second one's input is not what the first one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = Bare(), Bare(), Bare(), Bare()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        left, right = self.left(x), self.right(x)
        return self.last(left + right)


def test_segments_end_where_a_stage_does_not_follow_from_the_one_before():
    def make() -> planner.Workload:
        torch.manual_seed(0)
        return planner.Workload(model=Branches(), inputs=torch.randn(128, 16), loss=lambda y: y.square().mean())

    plan = checked(make, Rules(checkpoints="last"))
    assert decisions(plan)[2:] == ["recompute", "recompute"]


@pytest.fixture(scope="module")
def solved_rules() -> Rules:
    return Rules(rules=[Rule(modules="*.h.0"), Rule(modules="*.h.1", ops="*softmax")], rest="solve")


@pytest.fixture(scope="module")
def gpt2_profile(solved_rules) -> planner.Profile:
    return planner.profile(gpt2(), rules=solved_rules)


def test_the_rest_is_solved_for(gpt2_profile, solved_rules):
    work = gpt2()
    expected = state_after(gpt2())
    with pytest.raises(planner.Infeasible) as caught:
        planner.state(gpt2_profile, solved_rules, budget="10%")
    smallest, largest = caught.value.minimum_budget_bytes, gpt2_profile.unplanned_peak_bytes
    assert smallest < 0.85 * largest
    for budget in (smallest, (smallest + largest) // 2, largest):
        plan = planner.state(gpt2_profile, solved_rules, budget=budget)
        assert plan.restricted and plan.solver.startswith("by hand and ")
        assert decisions(plan)[1] == "recompute" and decisions(plan)[2] == "selective"
        assert "softmax" in plan.stages[3].option
        best = planner.solve(gpt2_profile, budget)
        assert plan.predicted_seconds >= best.lower_bound_seconds
        with planner.apply(work.model, plan):
            measured = planner.measure(work, repeats=1).peak_bytes
            # A stage that runs as a program leaves none of the numbers of 8 bytes that its own code wraps.
            assert 0 <= plan.predicted_peak_bytes - measured <= 8 * len(plan.stages) <= plan.budget_bytes
    with planner.apply(work.model, plan):
        assert_same(state_after(work), expected)


def test_named_parts_stay_as_stated_where_the_solver_would_do_otherwise(gpt2_profile, solved_rules):
    plan = planner.state(gpt2_profile, solved_rules, budget="100%")
    assert planner.solve(gpt2_profile, "100%").recomputed_ops == 0
    assert decisions(plan) == ["keep", "recompute", "selective", "keep", "keep"]
    assert plan.lower_bound_seconds <= plan.predicted_seconds


def test_too_small_a_budget_is_refused_with_what_is_needed(gpt2_profile, solved_rules):
    with pytest.raises(planner.Infeasible) as caught:
        planner.state(gpt2_profile, Rules(rules=[BLOCKS]), budget="10%")
    assert caught.value.minimum_budget_bytes == planner.state(gpt2_profile, BLOCKS).predicted_peak_bytes
    assert "what is stated needs them" in str(caught.value) and "'by hand'" in str(caught.value)
    with pytest.raises(planner.Infeasible) as caught:
        planner.state(gpt2_profile, solved_rules, budget="10%")
    needed = caught.value.minimum_budget_bytes
    assert planner.state(gpt2_profile, solved_rules, budget=needed).predicted_peak_bytes <= needed


def test_a_budget_above_what_is_needed_is_the_plan_s(gpt2_profile):
    plan = planner.state(gpt2_profile, [BLOCKS], budget="100%")
    assert plan.budget_bytes == plan.unplanned_peak_bytes
    assert plan.lower_bound_seconds <= plan.unplanned_seconds * (1 + 1e-9)


def test_a_plan_and_its_words_go_through_a_file(gpt2_profile, solved_rules, tmp_path):
    plan = planner.state(gpt2_profile, solved_rules, budget="90%")
    plan.save(tmp_path / "plan.json")
    assert planner.Plan.load(tmp_path / "plan.json") == plan


def test_rules_and_profile_may_come_from_files(gpt2_profile, tmp_path):
    gpt2_profile.save(tmp_path / "profile.json")
    (tmp_path / "rules.toml").write_text('[[rules]]\nmodules = "transformer.h"\n')
    plan = planner.state(tmp_path / "profile.json", tmp_path / "rules.toml")
    assert replace(plan, solve_seconds=0) == replace(planner.state(gpt2_profile, BLOCKS), solve_seconds=0)


def test_keeping_everything_is_the_unplanned_step(gpt2_profile):
    plan = planner.state(gpt2_profile, Rule(modules="*", action="keep"))
    assert plan.predicted_peak_bytes == gpt2_profile.unplanned_peak_bytes and plan.recomputed_ops == 0


def test_checkpoints_cost_what_chen_s_segments_cost(gpt2_profile):
    """All stages in one segment of the hand-written schedule; each one its own segment is to recompute it."""
    one, each = Rules(checkpoints="transformer.ln_f"), Rules(checkpoints="*")
    assert planner.state(gpt2_profile, each).schedule == planner.state(gpt2_profile, Rule(modules="*")).schedule
    segment = planner.state(gpt2_profile, one)
    assert decisions(segment) == ["recompute", "segment", "segment", "segment", "segment"]
    assert replay(chain_of(gpt2_profile), segment.schedule).peak_bytes == segment.predicted_peak_bytes


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (Rules(rules=[Rule(modules="*.h.9")]), "h.9' matches .* no module that runs; nearest: "),
        (Rules(rules=[Rule(modules="lm_head")]), "'lm_head' runs outside of stages"),
        (Rules(rules=[Rule(modules="*.mlp", ops="gelu")]), "no op that runs in .*; nearest: "),
        (Rules(rules=[BLOCKS], rest="solve"), "which needs a budget; add --budget"),
        (Rules(rules=[Rule(modules="*", action="solve")]), "which needs a budget"),
    ],
)
def test_rules_that_do_not_fit_the_profile_are_refused(gpt2_profile, rules, words):
    with pytest.raises(ValueError, match=words):
        planner.state(gpt2_profile.stage_level(), rules)


def test_wrong_names_are_refused_by_the_profile():
    with pytest.raises(ChoiceError, match="nearest: blocks.1"):
        planner.profile(workload("plain"), rules=[Rule(modules="block.1")])


def test_a_stage_that_cannot_be_recomputed_is_refused_with_the_reason_and_so_are_its_ops():
    profile = planner.profile(workload("cache"), stages=["CachingBlock"], menus=False)
    with pytest.raises(ValueError, match="rule 1 .*'blocks.0'.*puts tensors into a Cache.*keep it with a later rule"):
        planner.state(profile, Rule(modules="*"))
    with pytest.raises(ValueError, match="checkpoints blocks.1.*'blocks.0'.*tensors into a Cache"):
        planner.state(profile, Rules(checkpoints="blocks.1"))
    with pytest.raises(
        ChoiceError, match="captured as a graph .* 'blocks.0' was not captured .*puts tensors into a Cache"
    ):
        planner.state(profile, Rule(ops="*"))
    assert decisions(planner.state(profile, Rule(modules="*", action="keep"))) == ["keep"] * 3


class OwnGenerator(nn.Module):
    """Draws from a generator of its own, whose state nobody knows how to bring back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self.generator)
        return x + torch.tanh(self.linear(x) * noise)


class OutOfSight(nn.Module):
    """Fills a tensor behind torch's back: made again it would be empty."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.zeros_like(x).detach()
        scale.numpy()[:] = 2.0
        return x + torch.tanh(self.linear(x) * scale)


def of_blocks(block: type[nn.Module]) -> planner.Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*[block() for _ in range(3)])
    return planner.Workload(model=model, inputs=torch.randn(64, 16), loss=lambda y: y.square().mean())


@pytest.mark.parametrize(
    ("block", "why"), [(OwnGenerator, "(capturing it fails|generator)"), (OutOfSight, r"\.numpy\(\)")]
)
@pytest.mark.parametrize("force", [False, True])
def test_ops_of_a_stage_that_is_not_captured_are_refused_with_the_reason(block, why, force):
    """By the profile, and by the plan of a profile in which the stages are kept or recomputed as a whole."""
    rule = Rule(modules=block.__name__, ops="tanh", force=force)
    refusal = f"rule 1 .*captured as a graph .*'0' was not captured .*{why}.*state it for the whole stage"
    with pytest.raises(ChoiceError, match=refusal):
        planner.profile(of_blocks(block), stages=[block.__name__], rules=rule, menus=False)
    profile = planner.profile(of_blocks(block), stages=[block.__name__])
    assert all(menu.opaque and not menu.options for menu in profile.menus)
    with pytest.raises(ChoiceError, match=refusal):
        planner.state(profile, rule)
    assert decisions(planner.state(profile, Rule(modules="0"))) in (["recompute", "keep", "keep"], ["keep"] * 3)


def test_ops_of_a_profile_without_captured_stages_are_refused_with_the_remedy():
    profile = planner.profile(gpt2(), menus=False)
    with pytest.raises(ChoiceError, match="'transformer.h.0' was not captured; profile with these rules"):
        planner.state(profile, Rule(modules="*.h.*", ops="tanh"))
    assert planner.state(profile, BLOCKS).recomputed_ops > 0


def test_an_op_that_reads_a_buffer_that_the_step_changes_does_not_run_again_unless_forced():
    def make() -> planner.Workload:
        return workload("moving_buffer")

    every, blocks = Rule(modules="blocks.*", ops="*"), ["blocks.*"]
    with pytest.raises(ChoiceError, match="clone.*reads a buffer that the step changes.*force = true"):
        profiled(make(), Rules(rules=[every]), blocks)
    checked(make, Rules(rules=[every, Rule(modules="blocks.*", ops="clone", action="keep")]), blocks)
    forced = Rules(rules=[replace(every, force=True)])
    plan, work = planner.state(profiled(make(), forced, blocks), forced), make()
    assert decisions(plan) == ["selective"] * 4 and "(forced)" in plan.stated[0]
    with planner.apply(work.model, plan):
        assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes
