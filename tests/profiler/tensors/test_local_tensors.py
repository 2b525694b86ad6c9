"""Results of collectives that are under way are known, and can be waited for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from profiler.tensors.local_tensors import collectives_under_way, wait_for_results


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_results_that_nobody_reads_are_waited_for(group: None) -> None:
    result = collectives.all_reduce(torch.ones(4), "sum", dist.distributed_c10d._get_default_group())
    assert collectives_under_way() == 1
    assert wait_for_results([result])[0] is result
    assert collectives_under_way() == 0
