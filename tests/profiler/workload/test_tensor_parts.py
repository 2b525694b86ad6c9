"""Collectives under way are known and can be waited for; which tensors over one storage show a common element."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from profiler.workload.tensor_memory import TensorMemory, same_values
from profiler.workload.tensor_parts import ShownElements, collectives_under_way, wait_for_results


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
