"""Modules in pieces against the same modules at once, in double precision; and which modules are found to take rows."""

import itertools
import math

import pytest
import torch
from torch import nn

from profiler.recomputation import steps_in_pieces
from profiler.recomputation.module_pieces import ModuleInPieces
from profiler.recomputation.steps_in_pieces import NotInPieces, compared
from profiler.records import ModulePieces, PiecesRecord
from profiler.trace.divisible import divisible_modules
from profiler.workload.workload import Workload


class Scaled(nn.Module):
    """Rows times a tensor for all rows, plus another for each; the second by name."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("shift", torch.ones(6))

    def forward(self, rows, factor, *, more):
        return self.linear(rows * factor) + more + self.shift


class TwiceUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, rows, factor, *, more):
        return self.linear(self.linear(rows).tanh()) * factor + more


class Partly(Scaled):
    def __init__(self):
        super().__init__()
        self.linear.weight.requires_grad_(False)


@pytest.mark.parametrize("pieces", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", [Scaled, TwiceUsed, Partly])
def test_a_module_in_pieces_has_the_result_and_gradients_of_the_module_at_once(kind, dim, pieces):
    torch.manual_seed(0)
    module = kind().double()
    rows = torch.randn(5, 7, 6, dtype=torch.float64)
    found = []
    for run in (module.forward, ModuleInPieces(module, dim, pieces).wrapped(module.forward)):
        module.zero_grad()
        given, more = rows.clone().requires_grad_(), rows.cos().requires_grad_()
        factor = torch.linspace(1, 2, 6, dtype=torch.float64).requires_grad_()
        made = run(given * 1, factor, more=more)
        made.sin().sum().backward()
        found.append([made.detach(), given.grad, more.grad, factor.grad, *(p.grad for p in module.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_features_are_never_taken_apart():
    module = nn.Linear(8, 8)
    rows = torch.randn(16, 8)
    assert torch.equal(ModuleInPieces(module, 1, 4).wrapped(module.forward)(rows), module(rows))


def test_nothing_is_kept_but_what_it_is_given():
    module, sizes = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), []
    run = ModuleInPieces(module, 0, 4).wrapped(module.forward)
    rows = torch.randn(100, 8, requires_grad=True)

    def saved(tensor):
        sizes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        made = run(rows)
    assert sizes == [(100, 8), *(tuple(p.shape) for p in module.parameters())]
    made.sum().backward()


class Mixed(nn.Module):
    """Attention, which takes rows of a batch by itself; an MLP, tokens too; BatchNorm and dropout, none."""

    def __init__(self):
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(8, 2, 64, dropout=0.0, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
        self.norm = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
        self.dropped = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8))

    def forward(self, rows):
        rows = self.mlp(self.attention(rows))
        flat = self.norm(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
        return self.dropped(rows + flat)


def test_modules_are_found_that_take_each_row_by_itself():
    torch.manual_seed(0)
    model = Mixed()
    workload = Workload(model=model, inputs=torch.randn(4, 16, 8), loss=lambda output: output.square().mean())
    before = [p.clone() for p in model.parameters()]
    inside, whole = divisible_modules(workload)
    assert inside == (
        ModulePieces(name="attention", dim=0, count=2),
        ModulePieces(name="mlp", dim=1, count=2),
    )
    assert whole == ()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_a_model_whose_batch_can_be_taken_apart_is_found_as_a_whole():
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    workload = Workload(model=model, inputs=torch.randn(32, 8), loss=lambda output: output.square().mean())
    inside, whole = divisible_modules(workload)
    assert whole == (ModulePieces(name="", dim=0, count=2),)
    assert all(each.dim == 0 for each in inside)


def test_what_a_head_is_a_part_of_is_not_taken_apart():
    class Inner(nn.Sequential):
        pass

    inner = Inner(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8), nn.Linear(8, 32))
    model = nn.Sequential(inner, nn.Dropout(0.5))
    workload = Workload(model=model, inputs=torch.randn(4, 16, 8), loss=lambda output: output.square().mean())
    assert divisible_modules(workload)[0] == (ModulePieces(name="0", dim=1, count=2),)
    inside, whole = divisible_modules(workload, head="0.3")
    assert "0" not in [each.name for each in inside]
    assert whole == ()


def test_a_gradient_that_is_no_number_is_no_agreement(monkeypatch):
    """Whichever parameter's it is: ``max`` would pass over it."""
    differences = itertools.cycle([0.0, math.nan])
    monkeypatch.setattr(steps_in_pieces, "relative_difference", lambda one, other: next(differences))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    workload = Workload(model=model, inputs=torch.randn(4, 6, 8), loss=lambda output: output.square().mean())
    with pytest.raises(NotInPieces, match="its rows depend on each other"):
        compared(workload, PiecesRecord(modules=(ModulePieces(name="0", dim=1, count=2),)), frugal=False)
