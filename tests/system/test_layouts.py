"""Sparse and nested inputs, quantization-aware training and buffers that a first forward makes: exact under plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.workload.workload import Workload
from tests.support.exactness import assert_same, budgets, state_after, state_of
from tests.support.nightly import by_day

EDGES = torch.arange(1024).reshape(32, 32) % 7 < 2
ADJACENCY = torch.rand(32, 32, generator=torch.Generator().manual_seed(3)) * EDGES


class Block(nn.Module):
    """What follows a graph convolution: state, randomness and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.1)
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.inner(self.norm(x)))


class Convolution(Block):
    """With the graph as an argument."""

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(graph @ x)


class Graph(nn.Module):
    """With the graph as an input, a buffer and an attribute; the buffer is written to in every step."""

    adjacency: Tensor

    def __init__(self, sparse: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(Convolution() for _ in range(4))
        self.register_buffer("adjacency", sparse(ADJACENCY))
        self.graph = sparse(ADJACENCY)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        values = self.adjacency._values() if self.adjacency.layout is torch.sparse_coo else self.adjacency.values()
        values.mul_(0.99)
        for number, convolution in enumerate(self.convolutions):
            x = convolution(x, (graph, self.adjacency, self.graph)[number % 3])
        return x.square().mean()


class Fading(Block):
    """Writes to its graph in every forward."""

    adjacency: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", ADJACENCY.to_sparse_csr())

    def forward(self, x: Tensor) -> Tensor:
        self.adjacency.values().mul_(0.99)
        return super().forward(self.adjacency @ x)


class Sized(Block):
    """Sizes the buffer of its running mean in the first forward."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.mean.numel() == 0:
            self.mean.resize_(x.shape[-1]).fill_(0.5)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x - self.mean)


class Chain(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x.values() if x.layout is torch.jagged else x).square().mean()


def in_training_for_quantization() -> nn.Module:
    from torch.ao import quantization

    parts = ((nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(3))
    model = Chain(quantization.QuantStub(), *(nn.Sequential(*part) for part in parts))
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    return quantization.prepare_qat(model.train())


def rows() -> Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(4))


def ragged() -> Tensor:
    return torch.nested.nested_tensor([*rows().split([5, 9, 18])], layout=torch.jagged)


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


CASES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "coo": lambda: (Graph(Tensor.to_sparse), (rows(), ADJACENCY.to_sparse())),
    "csr": lambda: (Graph(Tensor.to_sparse_csr), (rows(), ADJACENCY.to_sparse_csr())),
    "csc": lambda: (Graph(Tensor.to_sparse_csc), (rows(), ADJACENCY.to_sparse_csc())),
    "written in a stage": lambda: (Chain(*(Fading() for _ in range(4))), rows()),
    "sized by the first forward": lambda: (Chain(*(Sized() for _ in range(4))), rows()),
    "jagged": lambda: (Chain(*(feed_forward() for _ in range(4))), ragged()),
    "prepared for quantization": lambda: (in_training_for_quantization(), rows()),
}


def workload(name: str) -> Workload:
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    return Workload(model=model, inputs=inputs, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))


def dense(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to_dense() if value.layout is not torch.strided else value for name, value in state.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", by_day(CASES, list(CASES)[:3]))
def test_training_is_exact_and_profiling_leaves_no_trace(name: str, tmp_path: Any) -> None:
    work = workload(name)
    before, random = state_of(work), torch.get_rng_state()
    profile = planner.profile(work, menus=False)
    profile.save(tmp_path / "profile.json")
    assert planner.Profile.load(tmp_path / "profile.json") == profile
    assert_same(dense(work.model.state_dict()), dense(before))
    assert torch.equal(random, torch.get_rng_state())
    expected = state_after(workload(name), steps=3)
    for budget in budgets(profile):
        planned = workload(name)
        with planner.apply(planned.model, planner.solve(profile, budget, solver="rotor")):
            assert planner.measure(planned, repeats=1).peak_bytes <= budget
            found = state_after(planned, steps=3)
        assert_same({**found, "state": dense(found["state"])}, {**expected, "state": dense(expected["state"])})
