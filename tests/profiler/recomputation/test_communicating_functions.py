"""Functions that talk with other processes: what came from them is kept, and plans that would ask again are refused."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from planner import Rule, Rules, recompute


@pytest.fixture
def alone():
    """A process group of one."""
    dist = torch.distributed
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class Talks(nn.Module):
    """Sums its activations over all processes, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        watched.append(weakref.ref(h.untyped_storage()))
        with torch.no_grad():
            torch.distributed.all_reduce(h)
        return x + torch.tanh(F.gelu(h))


watched: list[Any] = []


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_what_others_have_added_to_is_kept(alone):
    """Made again, it would lack what came from the other processes."""
    watched.clear()
    torch.manual_seed(0)
    x, talks = torch.randn(4, 8), Talks()
    expected = torch.autograd.grad(talks(x).sum(), talks.linear.weight)
    y = recompute(talks)(x)
    assert watched[1]() is not None
    assert torch.equal(torch.autograd.grad(y.sum(), talks.linear.weight)[0], expected[0])


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_ops_that_communicate_are_refused_by_name(alone):
    torch.manual_seed(0)
    model = nn.Sequential(*[Talks() for _ in range(3)])
    work = planner.Workload(model=model, inputs=torch.randn(16, 8), loss=lambda y: y.square().mean())
    with pytest.raises(ValueError, match="allreduce_.*communicates with other processes.*force = true"):
        planner.profile(work, stages=["Talks"], rules=Rule(ops="*"), menus=False)
    rules = Rules(rules=[Rule(modules="Talks", ops=["gelu", "tanh"])])
    plan = planner.state(planner.profile(work, stages=["Talks"], rules=rules), rules)
    assert [stage.decision for stage in plan.stages if stage.kind == "stage"] == ["selective"] * 3
    with planner.apply(model, plan):
        measured = planner.measure(work, repeats=1).peak_bytes
    # Every forward counts with the random state that second runs read: nearly all there is in a model as small as this.
    assert measured <= plan.predicted_peak_bytes <= measured + torch.get_rng_state().nbytes
