"""A call that runs other ops than expected is right all the same; and one that fails leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from profiler.op_graph import StageOps
from profiler.recomputation.selection import Selection
from profiler.recomputation.selective_call import SelectiveCall
from tests.support.op_cases.blocks import ADD, BLOCK, DROPOUT, GELU, SECOND, SPIED
from tests.support.op_cases.observed import Observer
from tests.support.op_cases.registry import WIDTH, Case
from tests.support.op_cases.runs import flow_of, inner, total


@pytest.fixture(scope="module")
def flow() -> StageOps:
    return flow_of(BLOCK)


def diverged(stage: nn.Module, inputs: tuple[Tensor, ...], selection: Selection) -> int | None:
    """Where a call diverged; its gradients are those of the plain stage."""
    gradients = []
    for selected in (False, True):
        torch.manual_seed(3)
        stage.zero_grad()
        call = SelectiveCall(stage, selection)
        output = call.run(stage.forward, inner(inputs), {}) if selected else stage(*inner(inputs))
        total(output).backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in stage.parameters()])
    for plain, found in zip(*gradients, strict=True):
        assert plain is found is None or torch.equal(plain, found)
    return call.diverged


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.gelu(x))


@pytest.mark.parametrize(
    ("rerun", "module", "other", "where"),
    [
        ({GELU}, "act.0", nn.GELU(), None),
        ({GELU}, "act.0", nn.SiLU(), 0),
        ({GELU}, "act.0", nn.Identity(), 0),  # None at all.
        ({GELU}, "act.0", Twice(), 1),  # One more than expected.
        ({GELU}, "act.1", nn.SiLU(), None),  # Nobody looks there.
        ({GELU, *DROPOUT}, "act.1", nn.Identity(), 1),
        ({GELU, *DROPOUT}, "act.1", nn.SiLU(), 1),
        (set(range(11)), "second", nn.Linear(2 * WIDTH, WIDTH, bias=False), SECOND),
        (set(range(11)), "norm", nn.Identity(), 0),
        ({GELU}, "act", nn.GELU(), 0),  # Its name is another one now.
    ],
)
def test_a_call_diverges_where_a_recorded_module_runs_another_op(
    flow: StageOps, rerun: set[int], module: str, other: nn.Module, where: int | None
) -> None:
    stage, inputs = BLOCK.make()
    owner, _, leaf = module.rpartition(".")
    setattr(stage.get_submodule(owner), leaf, other)
    assert diverged(stage, inputs, Selection.of(flow, rerun)) == where


class Sometimes(nn.Module):
    """A branch that the profile did not see, after ops that run again and that backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.changes = False

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        z = y.exp()
        if self.changes:
            y.data.zero_()  # No version shows it.
        return z + y * y


@pytest.mark.parametrize("rerun", [{0, 1}, {1}, {0}, {0, 1, 2, 3}])
def test_what_a_divergence_may_change_is_taken_before_it_and_kept_after_it(rerun: set[int]) -> None:
    """To make the exponential again after the change, or the product without it, would be wrong."""
    made = Case(Sometimes)
    flow = flow_of(made)
    assert [op.kind for op in flow.ops] == ["mul", "exp", "mul", "add"]
    stage, inputs = made.make()
    stage.__dict__["changes"] = True
    assert diverged(stage, inputs, Selection.of(flow, rerun)) == 2


def test_after_a_divergence_nothing_runs_again_though_the_next_ops_are_the_expected_ones(flow: StageOps) -> None:
    stage, inputs = BLOCK.make()
    stage.get_submodule("act").__setattr__("0", Twice())
    given = inner(inputs)
    observer = Observer([])
    with observer:
        output = SelectiveCall(stage, Selection.of(flow, {GELU, *DROPOUT})).run(stage.forward, given, {})
        output.sum().backward()
    assert observer.again == []


def test_modules_deep_in_one_that_was_replaced_turn_nothing() -> None:
    flow = flow_of(SPIED)
    stage, inputs = SPIED.make()
    stage.act = nn.GELU()
    gelu = next(k for k, op in enumerate(flow.ops) if op.kind == "gelu")
    selection = Selection.of(flow, {gelu})
    assert [switch.module for switch in selection.switches] == ["act.0.inside"]
    assert diverged(stage, inputs, selection) == 0


# What is left behind -----------------------------------------------------------------


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        F.gelu(x)
        raise OverflowError("of the model's own")


@pytest.mark.parametrize("rerun", [{GELU}, {ADD, GELU}, set(range(11))])
def test_an_exception_in_forward_leaves_nothing_behind(flow: StageOps, rerun: set[int]) -> None:
    stage, inputs = BLOCK.make()
    working = stage.act
    stage.act = nn.Sequential(Fails(), nn.Dropout(0.3))
    norm = stage.get_submodule("norm")
    norm.forward = patched = norm.forward
    with pytest.raises(OverflowError, match="of the model's own"):
        SelectiveCall(stage, Selection.of(flow, rerun)).run(stage.forward, inner(inputs), {})
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # type: ignore[attr-defined]
    assert [name for name, module in stage.named_modules() if "forward" in module.__dict__] == ["norm"]
    assert norm.__dict__["forward"] is patched
    stage.act = working
    assert diverged(stage, inputs, Selection.of(flow, rerun)) is None
