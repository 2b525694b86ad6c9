"""Profiling where memory runs out: it goes on with less, or says so, and leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.capacity.step_trial import measured_states_bytes
from planner.errors import ProfileError
from profiler.measurement import device_memory, profiling
from profiler.measurement.device_memory import RoomWatch
from profiler.measurement.shortage import where_raised
from profiler.workload.workload import Workload

WIDTH, BATCH = 64, 256
BLOCK_BYTES = BATCH * 4 * WIDTH * 4


SAVED: weakref.WeakSet[Tensor] = weakref.WeakSet()  # of the large ones, those that are alive


class Short(nn.Module):
    """Blocks on a device that has no room for what more than a few of them save."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if len(SAVED) > self.room:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")
            x = x + block(x)
        return x


def alive_of(size_bytes: int) -> int:
    """How many tensors of a size are alive, as far as Python sees them."""
    gc.collect()
    return sum(1 for each in gc.get_objects() if type(each) is Tensor and each.untyped_storage().nbytes() == size_bytes)


def step(room: int) -> Workload:
    torch.manual_seed(0)
    model = Short(room)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(
        model=model, inputs=torch.randn(BATCH, WIDTH), loss=lambda y: y.square().mean(), optimizer=optimizer
    )


def _noted(tensor: Tensor) -> Tensor:
    saved = tensor.detach()
    if saved.untyped_storage().nbytes() == BLOCK_BYTES:
        SAVED.add(saved)
    return saved


class Hooked:
    """Counts the large tensors that autograd holds."""

    def __enter__(self) -> Hooked:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(_noted, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


def test_a_step_that_fits_in_no_way_says_what_ran_out_and_leaves_nothing() -> None:
    work, before = step(-1), alive_of(BLOCK_BYTES)
    weights = [parameter.detach().clone() for parameter in work.model.parameters()]
    with pytest.raises(ProfileError, match="a step that recomputes every stage runs out of memory"):
        planner.profile(work, menus=False)
    assert alive_of(BLOCK_BYTES) == before
    assert all(map(torch.equal, weights, work.model.parameters()))


def test_other_failures_are_no_shortage() -> None:
    work = step(100)
    work.inputs = torch.randn(BATCH, WIDTH + 1)
    with pytest.raises(ProfileError, match="the training step fails: RuntimeError"):
        planner.profile(work, menus=False)


def test_where_a_plain_step_runs_out_profiling_goes_on_with_less() -> None:
    with Hooked():
        short = planner.profile(step(6), menus=False)
    plain = planner.profile(step(10_000), menus=False)
    assert (short.frugal, plain.frugal) == (True, False)
    assert short.unplanned_peak_bytes == plain.unplanned_peak_bytes


def test_an_error_without_a_word_is_named_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_left(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(torch.nn.functional, "gelu", nothing_left)
    with pytest.raises(
        ProfileError, match=r"recomputes every stage runs out of memory \(MemoryError, in module 'blocks.0.1'\)"
    ):
        planner.profile(step(room=100), menus=False)


def test_code_that_checks_no_allocation_has_run_out_only_where_the_process_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = SystemError("error return without exception set")
    for limited in (True, False):
        monkeypatch.setattr(device_memory, "is_limited", lambda limited=limited: limited)
        assert device_memory.ran_out(error) is limited


@pytest.mark.slow
def test_the_states_of_a_model_whose_plain_step_runs_out_are_those_of_one_that_fits() -> None:
    with Hooked():
        short = measured_states_bytes(step(6))
    assert short == measured_states_bytes(step(10_000))


@pytest.mark.parametrize(("left_mib", "ends"), [(9, False), (7, True)])
def test_a_watched_step_ends_where_an_eighth_of_the_room_is_left(left_mib: int, ends: bool) -> None:
    room = iter([64 * 2**20, left_mib * 2**20])
    with RoomWatch(lambda: next(room)) as watch:
        kept = [torch.ones(2**19)]  # 2 MiB: the room is read for the second one
        assert watch.used_bytes == 0
        if ends:
            with pytest.raises(MemoryError, match=r"7340032 bytes are left to this process, after aten::ones made"):
                torch.ones(2**19)
        else:
            kept.append(torch.ones(2**19))
        assert watch.used_bytes == (64 - left_mib) * 2**20


def test_a_step_that_the_system_would_end_with_its_process_is_profiled_with_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profiling, "RoomWatch", lambda: RoomWatch(lambda: BLOCK_BYTES * (8 - len(SAVED))))
    with Hooked():
        short = planner.profile(step(10_000), menus=False)
    monkeypatch.undo()
    plain = planner.profile(step(10_000), menus=False)
    assert (short.frugal, plain.frugal) == (True, False)
    assert short.unplanned_peak_bytes == plain.unplanned_peak_bytes


def test_a_chain_of_causes_that_leads_back_into_itself_ends() -> None:
    inner = ValueError("inner")
    outer = RuntimeError("outer")
    outer.__cause__, inner.__cause__ = inner, outer
    assert not device_memory.ran_out(outer)
    assert where_raised(outer, torch.nn.Linear(1, 1)) == ""
