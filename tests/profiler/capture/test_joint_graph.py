"""The joint graph of a step: it computes what the model computes, and breaks are named."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from planner import zoo
from profiler.capture import joint_graph
from profiler.capture.joint_graph import CaptureError, capture, storages_of
from profiler.whole.graph_profiling import profile_graph
from profiler.workload.workload import Workload

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 1, "hidden": 32, "seq": 16, "vocab": 200},
    "t5": {"layers": 1, "hidden": 32, "seq": 16, "vocab": 200},
    "resnet50": {"batch": 4, "hidden": 8, "image": 32},
    "mlp": {"layers": 3, "hidden": 16, "batch": 64},
}


def workload(model: nn.Module) -> Workload:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model=model, inputs=torch.randn(8, 16), loss=lambda y: y.square().mean(), optimizer=optimizer)


@pytest.mark.parametrize("name", SMALL)
def test_ops_come_in_order_and_an_output_needs_each(name: str) -> None:
    graph = capture(zoo.build(name, **SMALL[name]))
    seen: set[fx.Node] = {*graph.inputs, *graph.tangents, *graph.constants}
    for op in graph.ops:
        assert seen.issuperset(op.all_input_nodes)
        seen.add(op)
    assert seen.issuperset(output for output in graph.outputs if isinstance(output, fx.Node))
    assert any(storages_of(op) for op in graph.ops)


def test_it_computes_outputs_and_gradients() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    work = workload(model)
    graph = capture(work)
    output = model(work.inputs)
    gradient = torch.randn_like(output)
    values: dict[torch.Size, Tensor] = {each.shape: each.detach() for each in (work.inputs, *model.parameters())}
    arguments = [values[node.meta["val"].shape] for node in graph.inputs]
    made = pytree.tree_leaves(graph.module(arguments, [gradient]), is_leaf=lambda leaf: leaf is None)
    assert torch.equal(made[0], output)
    expected = torch.autograd.grad(output, list(model.parameters()), gradient)
    gradients = {each.shape: each for each in made[graph.forward_outputs :] if each is not None}
    assert all(torch.equal(gradients[each.shape], each) for each in expected)


def test_the_workload_is_left_as_it_was() -> None:
    work = zoo.build("resnet50", **SMALL["resnet50"])
    before = {name: tensor.clone() for name, tensor in work.model.state_dict().items()}
    randomness = torch.get_rng_state()
    capture(work)
    assert all(torch.equal(before[name], tensor) for name, tensor in work.model.state_dict().items())
    assert torch.equal(randomness, torch.get_rng_state())
    assert "forward" not in vars(work.model)
    assert all(parameter.grad is None for parameter in work.model.parameters())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.sum() > 0:
            y = y + 1
        return y


def test_a_branch_by_a_value_is_named_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"(?s)got a break \(.*test_joint_graph.py.*if y.sum\(\) > 0.*without graph"):
        capture(workload(Branching()))


def test_a_model_without_gradients_is_refused() -> None:
    work = workload(nn.Linear(16, 4))
    work.model.requires_grad_(False)
    work.inputs.requires_grad_(False)
    with pytest.raises(CaptureError, match="one without; unfreeze"):
        capture(work)


class Returning(nn.Module):
    """Returns a parameter as it is: there is nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


def test_a_model_that_computes_nothing_to_train_is_refused_by_a_profile_too() -> None:
    with pytest.raises(CaptureError, match="one without; unfreeze"):
        profile_graph(workload(Returning()))


class Drawing(nn.Module):
    """Draws with probabilities that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.bernoulli(x.sigmoid()[:, :4])


def test_ops_are_measured_with_values_that_may_be_probabilities() -> None:
    assert any(op.kind == "bernoulli" for op in profile_graph(workload(Drawing())).graph.ops)


@torch.library.custom_op("planner_tests::above_one", mutates_args=())
def above_one(x: Tensor) -> Tensor:
    if x.min() <= 1:
        raise RuntimeError("a value of at most 1")
    return x.clone()


above_one.register_fake(torch.empty_like)
above_one.register_autograd(lambda _, grad: grad.clone())


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return above_one(torch.sigmoid(self.layer(x)) + 2)


def test_an_op_that_cannot_be_measured_by_itself_is_named() -> None:
    """It is measured with values between 0 and 1."""
    with pytest.raises(CaptureError, match=r"got planner_tests\.above_one.*at most 1.*a plan of stages works there"):
        profile_graph(workload(Picky()))


@torch.library.custom_op("planner_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("planner_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


for custom in (noisy, doubled):
    custom.register_fake(torch.empty_like)
    custom.register_autograd(lambda _, grad: grad.clone())


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(doubled(torch.sigmoid(noisy(self.layer(x)))))


def test_ops_of_other_libraries_run_again_only_if_they_make_the_same() -> None:
    once = {op.kind: op.once_reason for op in profile_graph(workload(Custom())).graph.ops}
    assert once["noisy"] == "a second run of it on the same tensors made something else"
    assert not once["doubled"]


def test_what_a_log_may_be_called_by_is_written_as_json_and_copied_as_torch_does() -> None:
    """Of torch 2.11, which cannot write functions, and logs an error instead."""
    calls = joint_graph._Functions([print, len])
    assert print in calls and max not in calls and {*calls} == {print, len}
    assert json.dumps(copy.deepcopy(calls)) == "{}"
    assert len in copy.deepcopy(calls)
