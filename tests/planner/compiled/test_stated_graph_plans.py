"""Plans of single ops stated by hand, carried out on a real model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import planner
from planner import Rule, Rules
from profiler.graph_profile import GraphProfile
from profiler.op_graph import ChoiceError

WIDTH, ROWS = 32, 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sigmoid(self.second(self.first(x))))


def work_of() -> planner.Workload:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return planner.Workload(
        model=net, inputs=torch.randn(ROWS, WIDTH), loss=lambda y: y.square().mean(), optimizer=optimizer
    )


@pytest.fixture(scope="module")
def profiled() -> GraphProfile:
    return planner.profile(work_of(), graph=True)


def again(plan: planner.GraphPlan) -> set[str]:
    """Names of ops that run again."""
    runs = Counter([*plan.runs.forward, *plan.runs.backward])
    return {plan.graph.ops[ordinal].name for ordinal, count in runs.items() if count > 1}


def gradients(work: planner.Workload) -> list[Tensor | None]:
    torch.manual_seed(1)
    work.model(work.inputs).square().mean().backward()
    return [parameter.grad for parameter in work.model.parameters()]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([Rule(ops="gelu")], set()),  # Backward reads none of what these make.
        ([Rule(ops="native_dropout")], {"native_dropout", "native_dropout_1"}),
        (
            [Rule(modules="second", ops=["gelu", "native_dropout"]), Rule(ops="sigmoid")],
            {"gelu_1", "native_dropout_1", "sigmoid"},
        ),
        (
            [Rule(modules="*"), Rule(modules="first", action="keep")],
            {"addmm_1", "gelu_1", "native_dropout_1", "sigmoid"},
        ),
        ([Rule(ops=["gelu", "native_dropout"])], {"gelu", "gelu_1", "native_dropout", "native_dropout_1"}),
        ([Rule(ops="gelu", action="keep")], set()),
    ],
)
def test_what_is_stated_runs_again_and_nothing_else(
    profiled: GraphProfile, rules: list[Rule], expected: set[str]
) -> None:
    plan = planner.state(profiled, rules)
    assert again(plan) == expected
    assert plan.recomputed_ops == len(expected) and len(plan.stated) == len(rules)
    planned, plain = work_of(), work_of()
    with planner.apply(planned.model, plan):
        assert planner.measure(work := planned, repeats=1).peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes
        assert all(
            a is not None and b is not None and torch.equal(a, b)
            for a, b in zip(gradients(work_of_same(work)), gradients(plain), strict=True)
        )


def work_of_same(work: planner.Workload) -> planner.Workload:
    """The same model, its weights as at first."""
    work.model.load_state_dict(work_of().model.state_dict())
    work.model.zero_grad()
    return work


def test_the_solver_decides_on_the_rest(profiled: GraphProfile) -> None:
    rules = Rules(rules=[Rule(modules="first.*", action="keep")], rest="solve")
    with pytest.raises(ValueError, match="expected a budget for the ops left to the solver"):
        planner.state(profiled, rules)
    with pytest.raises((planner.Infeasible, planner.NothingFound)) as refused:
        planner.state(profiled, rules, budget=1, time_limit_seconds=2)
    budget = refused.value.minimum_budget_bytes
    plan = planner.state(profiled, rules, budget=budget, time_limit_seconds=2)
    assert plan.predicted_peak_bytes <= budget and plan.restricted
    assert again(plan) and not {"gelu", "native_dropout"} & again(plan)


def test_what_cannot_be_is_refused(profiled: GraphProfile) -> None:
    kept = planner.state(profiled, Rule(ops="gelu", action="keep"))
    with pytest.raises(planner.Infeasible, match="what is stated needs them") as refused:
        planner.state(profiled, Rule(ops="gelu", action="keep"), budget=kept.predicted_peak_bytes - 1)
    assert refused.value.minimum_budget_bytes == kept.predicted_peak_bytes
    for rules, said in [
        (Rules(checkpoints=["first"]), "about checkpoints"),
        ([Rule(ops="gelo")], "nearest: gelu"),
        ([Rule(modules="frist", ops="gelu")], "nearest: first"),
    ]:
        with pytest.raises(ChoiceError, match=said):
            planner.state(profiled, rules)


def test_rules_come_in_files(profiled: GraphProfile, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text('[[rules]]\nmodules = "*"\nops = ["gelu"]\n')
    profiled.save(tmp_path / "ops.json")
    plan = planner.state(tmp_path / "ops.json", tmp_path / "rules.toml")
    assert isinstance(plan, planner.GraphPlan) and plan.stated == ("recompute gelu in *: 2 ops",)
    plan.save(tmp_path / "plan.json")
    assert planner.GraphPlan.load(tmp_path / "plan.json") == plan
