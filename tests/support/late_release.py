"""How much gloo may hold longer than predicted under ``fully_shard``.

Each of gloo's two threads lets go of what it has communicated when it comes to run again: late where cores are busy
(docs/distributed.md). Under DistributedDataParallel nothing is late.
"""

from __future__ import annotations

from torch import nn

THREADS = 2


def late_bytes(unit: nn.Module) -> int:
    """At most what the threads hold: of the largest unit its gathered parameters each, and this rank's half of them."""
    return THREADS * 3 * sum(parameter.nbytes for parameter in unit.parameters()) // 2
