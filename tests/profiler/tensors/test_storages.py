"""Which tensors over one storage show an element that another one shows, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from profiler.tensors.storages import ShownElements

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
