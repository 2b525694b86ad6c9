"""Which outputs of a forward no loss uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner import Workload
from profiler.capture.detached_outputs import unused_outputs

OUTPUTS: list[tuple[Callable[[Tensor, Tensor, nn.Linear], tuple[Tensor, ...]], tuple[int, ...]]] = [
    (lambda x, y, layer: (y, 2 * y), (1,)),
    (lambda x, y, layer: (y, 2 * x), ()),
    (lambda x, y, layer: (y, (2 * y).detach()), ()),
    (lambda x, y, layer: (y, y.t()), ()),
    (lambda x, y, layer: (y, y), ()),
    (lambda x, y, layer: (y, x.t()), ()),
    (lambda x, y, layer: (y, layer.weight), ()),
    (lambda x, y, layer: (y, layer.weight.t()), ()),
]


class Returning(nn.Module):
    def __init__(self, outputs: Callable[[Tensor, Tensor, nn.Linear], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.layer, self.outputs = nn.Linear(8, 8), outputs

    def forward(self, x: Tensor) -> Any:
        return self.outputs(x, torch.sigmoid(self.layer(x)), self.layer)


@pytest.mark.parametrize(("outputs", "unused"), OUTPUTS)
def test_outputs_alone_in_their_storage_that_the_loss_does_not_use(
    outputs: Callable[[Tensor, Tensor, nn.Linear], tuple[Tensor, ...]], unused: tuple[int, ...]
) -> None:
    work = Workload(model=Returning(outputs), inputs=torch.randn(4, 8), loss=lambda y: y[0].square().mean())
    assert unused_outputs(work) == unused
