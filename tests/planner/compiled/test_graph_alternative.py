"""The same step as one graph of ops, where plans of stages save little."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import planner


class Functional(nn.Module):
    """Everything in one forward: there is nothing to cut it at."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(32, 32) / 6) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = nn.functional.gelu(x @ weight)
        return x


def workload(model: nn.Module) -> planner.Workload:
    return planner.Workload(model=model, inputs=torch.randn(512, 32), loss=lambda y: y.square().mean())


def test_a_model_of_one_module_is_refused_with_what_its_graph_needs_and_that_is_enough() -> None:
    work = workload(Functional())
    profile = planner.profile(work)
    with pytest.raises(planner.Infeasible, match=r"graph=True .--graph.: .* within \d+ bytes") as refused:
        planner.solve(profile, "60%")
    least = profile.whole_graph_bytes
    assert least is not None and str(least) in str(refused.value) and least < 0.6 * profile.unplanned_peak_bytes
    plan = planner.solve(planner.profile(work, graph=True), least, time_limit_seconds=3)
    with planner.apply(work.model, plan):
        assert planner.measure(work).peak_bytes <= least


LEFT = """
import gc, planner, tests.planner.compiled.test_graph_alternative as it
from torch._subclasses.fake_tensor import FakeTensor
assert planner.profile(it.workload(it.Functional())).whole_graph_bytes
gc.collect(), gc.collect()
print(sum(issubclass(type(each), FakeTensor) for each in gc.get_objects()))
"""


def test_trying_the_graph_leaves_nothing_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, check=False)
    assert done.stdout == "0\n", done.stderr


def test_where_stages_save_enough_the_graph_is_not_tried() -> None:
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)]
    assert planner.profile(workload(nn.Sequential(*blocks))).whole_graph_bytes is None
    assert planner.profile(workload(Functional()), limit="1GiB").whole_graph_bytes is None
