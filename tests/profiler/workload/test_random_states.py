"""Random states are read and put back, and those that are kept are no bytes of a metered step."""

from __future__ import annotations

import torch
from torch import Tensor

from profiler.measurement.meter import memory_meter, metered
from profiler.workload.random_states import RandomState


def test_a_state_that_is_kept_or_let_go_within_a_step_is_not_counted_as_held() -> None:
    kept: list[RandomState] = []
    reading = metered(memory_meter(torch.device("cpu"), 10_000), lambda: kept.append(RandomState()))
    letting_go = metered(memory_meter(torch.device("cpu"), 10_000), kept.clear)
    assert reading.end_bytes == 10_000
    assert letting_go.end_bytes == 10_000


def test_what_was_drawn_is_drawn_again() -> None:
    state = RandomState()
    drawn = torch.rand(3)
    assert state.torch_differs()
    state.restore()
    assert not state.torch_differs()
    assert torch.equal(torch.rand(3), drawn)


def test_states_are_read_and_compared_where_torch_func_wraps_what_is_made() -> None:
    def drawing(x: Tensor) -> Tensor:
        state = RandomState()
        torch.rand(3)
        assert state.torch_differs()
        state.restore()
        assert not state.torch_differs()
        return 2 * x

    x = torch.ones(2, 3)
    assert torch.equal(torch.func.jvp(drawing, (x,), (x,))[1], 2 * x)
    assert torch.equal(
        torch.func.vmap(torch.func.grad(lambda row: drawing(row).sum()), randomness="different")(x), 2 * x
    )
