"""Host memory and the simulated link: bytes come back as they went, in the time that the link takes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from planner.runtime.copy_engines import HostPool, SimulatedCopyEngine, bytes_of
from solvers.problem.chain import Link


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def engine(host_bytes: int, *, latency_seconds: float = 0.0) -> tuple[SimulatedCopyEngine, Clock]:
    """100 bytes a second to the host, 50 back."""
    clock = Clock()
    link = Link(to_host_bytes_per_second=100.0, to_device_bytes_per_second=50.0, latency_seconds=latency_seconds)
    return SimulatedCopyEngine(link, host_bytes, now=clock.now, sleep=clock.sleep), clock


def test_host_memory_gives_what_is_free_whatever_the_sizes_before() -> None:
    memory, drawn = HostPool(1000), random.Random(3)
    held: list[tuple] = []
    for _ in range(2000):
        size = drawn.randint(1, 200)
        free = memory.size_bytes - sum(span.size_bytes for spans in held for span in spans)
        spans = memory.take(size)
        assert (spans is not None) == (size <= free)
        if spans is not None:
            assert sum(span.size_bytes for span in spans) == size
            held.append(spans)
        taken = sorted(span for spans in held for span in spans)
        assert all(a.end <= b.begin for a, b in itertools.pairwise(taken))
        assert memory.held_bytes == sum(span.size_bytes for span in taken) <= memory.peak_bytes <= 1000
        if spans is None or drawn.random() < 0.4:
            memory.give(held.pop(drawn.randrange(len(held))))
    for spans in held:
        memory.give(spans)
    assert memory.take(1000) == ((0, 1000),)  # Spans that were cut are one again.


def test_host_memory_is_handed_out_in_granules() -> None:
    memory = HostPool(1500, granule_bytes=512)
    first = memory.take(1)
    assert memory.size_bytes == 1536 and memory.held_bytes == 512
    assert memory.take(1025) is None and memory.take(1024) is not None
    assert first is not None
    memory.give(first)
    assert memory.take(512) == first


def test_bytes_come_back_as_they_went_also_where_host_memory_is_in_pieces() -> None:
    link, _ = engine(900)
    tensors = [torch.randn(50) for _ in range(4)]
    copies = [link.send(bytes_of(tensor)) for tensor in tensors]
    del copies[2], copies[0]  # Two holes of 200 bytes, and 100 bytes at the end.
    wide = torch.randn(100, 5).t()[::2].contiguous().to(torch.bfloat16)[:, :60].clone()
    assert bytes_of(wide).numel() == 360
    copy = link.send(bytes_of(wide))
    assert copy is not None
    back = copy.fetch().wait()
    assert torch.equal(back, bytes_of(wide)) and back.data_ptr() != wide.data_ptr()
    kept = [each.fetch().wait() for each in copies if each is not None]
    assert all(torch.equal(b, bytes_of(tensors[k])) for b, k in zip(kept, (1, 3), strict=True))
    del copy, copies
    assert link.memory.held_bytes == 0 and link.memory.peak_bytes == 800


def test_a_full_host_memory_takes_nothing_until_something_is_given_back() -> None:
    link, _ = engine(400)
    copy = link.send(torch.zeros(300, dtype=torch.uint8))
    assert copy is not None and link.send(torch.zeros(101, dtype=torch.uint8)) is None
    fetched = copy.fetch()
    assert link.send(torch.zeros(101, dtype=torch.uint8)) is None  # Not before it has arrived.
    fetched.wait()
    assert link.send(torch.zeros(400, dtype=torch.uint8)) is not None


def test_host_memory_goes_with_its_owner() -> None:
    link, _ = engine(400)
    copy = link.send(torch.arange(200, dtype=torch.uint8))
    assert copy is not None
    pending = copy.fetch()
    del copy
    assert link.memory.held_bytes == 200  # It is under way.
    del pending
    assert link.memory.held_bytes == 0


def test_copies_of_one_direction_wait_for_each_other_and_those_of_two_do_not() -> None:
    link, clock = engine(1000, latency_seconds=0.5)
    first, second = (link.send(torch.zeros(100, dtype=torch.uint8)) for _ in range(2))
    assert first is not None and second is not None and clock.seconds == 0
    first.wait()
    assert clock.seconds == 1.5
    back = first.fetch()  # arrives at 1.5 + 0.5 + 2
    second.wait()
    assert clock.seconds == 3.0
    again = second.fetch()  # begins when the one before has arrived
    back.wait()
    assert clock.seconds == 4.0
    clock.sleep(1.0)
    again.wait()
    assert clock.seconds == 6.5 and link.stall_seconds == 5.5


def test_what_has_not_been_sent_yet_cannot_come_back_earlier() -> None:
    link, clock = engine(1000)
    copy = link.send(torch.zeros(100, dtype=torch.uint8))
    assert copy is not None
    copy.fetch().wait()
    assert clock.seconds == 3.0


@pytest.mark.parametrize("rate", [1e-9, float("inf")])
def test_any_rate_above_zero_will_do(rate: float) -> None:
    clock = Clock()
    link = Link(to_host_bytes_per_second=rate, to_device_bytes_per_second=rate)
    sender = SimulatedCopyEngine(link, 8, now=clock.now, sleep=clock.sleep)
    copy = sender.send(torch.ones(8, dtype=torch.uint8))
    assert copy is not None
    assert copy.fetch().wait().tolist() == [1] * 8
    assert clock.seconds == 16 / rate
