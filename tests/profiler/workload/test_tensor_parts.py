"""Collectives under way are known and can be waited for; which tensors over one storage show a common element."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from profiler.workload.tensor_memory import TensorMemory, same_values
from profiler.workload.tensor_parts import (
    ShownElements,
    collectives_under_way,
    copied_gradient_bytes,
    wait_for_results,
)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_results_that_nobody_reads_are_waited_for(group: None) -> None:
    before = collectives_under_way()  # of other tests in this process
    result = collectives.all_reduce(torch.ones(4), "sum", dist.distributed_c10d._get_default_group())
    assert collectives_under_way() == before + 1
    assert wait_for_results([result])[0] is result
    assert collectives_under_way() == before


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_a_tensor_that_ranks_share_unevenly_is_put_back(two_ranks: None) -> None:
    """Three rows: two of them here. Views of the whole are not defined for it."""
    local, mesh = torch.randn(2, 4), init_device_mesh("cpu", (2,))
    whole = torch.Size((3, 4))
    shared = DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False, shape=whole, stride=(4, 1))
    memory, other = TensorMemory(shared), shared.detach().clone()
    assert same_values(shared, other)
    shared.to_local().zero_()
    assert not same_values(shared, other)
    assert memory.put_back() is shared
    assert torch.equal(shared.to_local(), local)


ROWS = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        (ROWS[:, :3], ROWS[:, 3:], False),  # Side by side in every row: the one begins before the other has ended.
        (ROWS[:, :4], ROWS[:, 3:], True),
        (ROWS[:2], ROWS[2:], False),
        (ROWS[::2], ROWS[1::2], False),
        (ROWS, ROWS.t(), True),
        (ROWS[:1, :1].expand(4, 6), ROWS[:, 1:], False),  # One element, shown 24 times.
        (ROWS[:1, :1].expand(4, 6), ROWS[:, :1], True),
        (ROWS[:0], ROWS, False),
        (ROWS, ROWS.view(torch.int32), True),
        (ROWS[:2], ROWS.view(torch.float16)[2:], True),  # Not looked into.
        (ROWS, torch.zeros(4, 6), False),
    ],
)
def test_regions_meet_where_both_show_an_element(one: Tensor, other: Tensor, meet: bool) -> None:
    assert (
        ShownElements.of(one).meets(ShownElements.of(other))
        == ShownElements.of(other).meets(ShownElements.of(one))
        == meet
    )


class Given(torch.autograd.Function):
    """Has one gradient, whatever comes in."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradients: list[Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.gradients = gradients
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *came: Tensor) -> tuple[Tensor, None]:
        return ctx.gradients.pop(), None


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(4, 3, 2, 2),
        torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.ones(()).expand(4, 3, 2, 2),
        torch.ones(3, 4, 2, 2).transpose(0, 1),
    ],
    ids=["contiguous", "channels last", "expanded", "transposed"],
)
def test_gradients_are_copied_where_autograd_does_not_take_them(gradient: Tensor, channels_last: bool) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    parameter = nn.Parameter(torch.ones(4, 3, 2, 2).to(memory_format=layout))
    copied_bytes, pointer = copied_gradient_bytes([(parameter, gradient)]), gradient.data_ptr()
    given = [gradient.view_as(gradient)]
    Given.apply(parameter, given).backward()
    assert parameter.grad is not None
    assert copied_bytes == (0 if parameter.grad.data_ptr() == pointer else 4 * parameter.numel())
    assert copied_gradient_bytes([(parameter, gradient)]) == 0  # The next is added to it.


def test_copies_are_made_one_by_one_and_memory_under_several_gradients_goes_with_the_last() -> None:
    square = nn.Parameter(torch.ones(4, 4))
    turned, views = torch.ones(4, 4).t(), torch.ones(4, 8).split(4, dim=1)
    assert copied_gradient_bytes([(square, turned), (square, torch.ones(4, 4).t())]) == 64
    assert copied_gradient_bytes([(square, views[0]), (square, views[1])]) == 128
    assert copied_gradient_bytes([(square, torch.ones(()).expand(4, 4))] * 2) == 128
    # A size of 1 has no stride of its own.
    assert copied_gradient_bytes([(nn.Parameter(torch.ones(5, 1)), torch.ones(1, 5).t())]) == 0
