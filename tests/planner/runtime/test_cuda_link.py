"""The copy engine of CUDA devices, on streams of which only the order is kept: whatever may overlap does not clash."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.runtime import copy_engines
from planner.runtime.copy_engines import CudaCopyEngine, bytes_of, pinned_bytes

CPU = torch.device("cpu")


class Access(NamedTuple):
    number: int
    begin: int
    end: int
    writes: bool


class FakeStream:
    """What is known to have happened before the next op on it."""

    def __init__(self, *_: Any) -> None:
        self.before: set[int] = set()

    def wait_stream(self, other: FakeStream) -> None:
        self.before |= other.before

    def wait_event(self, event: FakeEvent) -> None:
        self.before |= event.before


class FakeEvent:
    def __init__(self) -> None:
        self.before: set[int] = set()

    def record(self, stream: FakeStream) -> None:
        self.before = set(stream.before)


class Device(TorchDispatchMode):
    """Runs ops at once, and holds against each other those that a device might run at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.own = self.current = FakeStream()
        self.accesses: list[Access] = []
        self.clashes: list[tuple[Access, Access]] = []
        self.count = 0

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.op([(args[0], True), (args[1], False)])
        elif func in (torch.ops.aten.full.default, torch.ops.aten.fill_.Scalar):
            self.op([(result, True)])
        elif func is torch.ops.aten.eq.Scalar:
            self.op([(args[0], False), (result, True)])
        return result

    def op(self, touched: list[tuple[torch.Tensor, bool]]) -> None:
        self.count += 1
        for tensor, writes in touched:
            now = Access(self.count, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, writes)
            for earlier in self.accesses:
                apart = now.end <= earlier.begin or earlier.end <= now.begin
                if (
                    not apart
                    and (writes or earlier.writes)
                    and earlier.number not in {*self.current.before, self.count}
                ):
                    self.clashes.append((earlier, now))
            self.accesses.append(now)
        self.current.before.add(self.count)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", found.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: found.current)
    monkeypatch.setattr(copy_engines, "host_buffer", lambda size: torch.zeros(size, dtype=torch.uint8))
    return found


def travel(engine: CudaCopyEngine, seed: int, turns: int) -> None:
    """Tensors go and come back in any order; some are let go of while they are under way."""
    drawn = random.Random(seed)
    away: list[tuple[int, Any]] = []
    back: list[tuple[int, Any]] = []
    for turn in range(turns):
        value = turn % 251
        # Few sizes: the allocator gives the same memory again at once.
        copy = engine.send(bytes_of(torch.full((drawn.choice((700, 1500)),), value, dtype=torch.uint8)))
        if copy is not None:
            if drawn.random() < 0.7:
                copy.wait()
            away.append((value, copy))
        if away and (copy is None or drawn.random() < 0.5):
            value, copy = away.pop(drawn.randrange(len(away)))
            if drawn.random() < 0.8:
                back.append((value, copy.fetch()))
        del copy
        if back and drawn.random() < 0.6:
            value, fetched = back.pop(drawn.randrange(len(back)))
            if drawn.random() < 0.8:
                assert bool((fetched.wait() == value).all())
            del fetched


@pytest.mark.parametrize("seed", range(4))
def test_no_op_touches_what_a_copy_under_way_reads_or_writes(device: Device, seed: int) -> None:
    engine = CudaCopyEngine(CPU, 6000)
    with device:
        travel(engine, seed, turns=120)
    assert device.count > 300 and not device.clashes
    assert engine.memory.held_bytes == 0 and engine.memory.peak_bytes > 4000


def test_the_computation_waits_for_no_copy_that_it_does_not_need(device: Device) -> None:
    engine = CudaCopyEngine(CPU, 6000)
    with device:
        first, second = (engine.send(bytes_of(torch.full((700,), 1, dtype=torch.uint8))) for _ in range(2))
        assert first is not None and second is not None
        own = set(device.own.before)
        first.wait()
        assert len(device.own.before - own) == 1
        fetched = first.fetch()
        waited = set(device.own.before)
        assert len(waited - own) == 1
        fetched.wait()
    assert not device.clashes


def test_host_memory_is_written_again_only_after_it_was_read_also_from_another_stream(device: Device) -> None:
    engine = CudaCopyEngine(CPU, 1024)
    with device:
        copy = engine.send(bytes_of(torch.full((1000,), 1, dtype=torch.uint8)))
        assert copy is not None
        target = copy.fetch().wait()
        with device.on(FakeStream()):
            again = engine.send(bytes_of(torch.full((900,), 2, dtype=torch.uint8)))
    assert again is not None and target.numel() == 1000 and not device.clashes


def test_small_tensors_fit_into_what_a_plan_counts_for_them(device: Device) -> None:
    """A plan adds up their bytes, and here each begins at a multiple of 512."""
    engine = CudaCopyEngine(CPU, 3 * 700)
    assert engine.memory.size_bytes == engine.bytes.numel() == 4096
    with device:
        copies = [engine.send(bytes_of(torch.full((700,), 1, dtype=torch.uint8))) for _ in range(3)]
    assert all(copy is not None for copy in copies)
    assert [pinned_bytes(size) for size in (0, 1, 4096, 4097)] == [0, 1, 4096, 8192]


def test_without_pinned_memory_there_is_a_warning_and_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty

    def refusing(*sizes: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nand more lines")
        return plain(*sizes, **settings)

    monkeypatch.setattr(torch, "empty", refusing)
    with pytest.warns(
        RuntimeWarning, match=r"100 bytes of pinned host memory could not be had.*out of memory\).*steps take longer"
    ):
        assert copy_engines.host_buffer(100).numel() == 100
