"""Orders without runs that nobody reads: as fast or faster, no higher, and with nothing left to drop."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.random_graphs import random_tiny_graph
from solvers.graph.orders import IndexedGraph, last_reads, peak_profile, seconds_of, without_unread_runs


def random_order(indexed: IndexedGraph, seed: int) -> list[int]:
    """First runs in order with repeated ones strewn between them."""
    rng, order = np.random.default_rng(seed), []
    for k in range(indexed.count):
        order += [k, *rng.integers(0, k + 1, size=int(rng.integers(0, 4))).tolist()]
    return order


@pytest.mark.parametrize("seed", range(100))
def test_what_is_left_is_read_and_the_peak_does_not_rise(seed):
    indexed = IndexedGraph(random_tiny_graph(seed))
    order = random_order(indexed, seed)
    kept = without_unread_runs(indexed, order)
    last, seen = last_reads(indexed, kept), set()
    for place, k in enumerate(kept):
        assert k not in seen or last[place] > place
        seen.add(k)
    assert seen == set(range(indexed.count))
    assert peak_profile(indexed, kept).max() <= peak_profile(indexed, order).max()
    assert seconds_of(indexed, kept) <= seconds_of(indexed, order)
    assert without_unread_runs(indexed, range(indexed.count)) == list(range(indexed.count))
