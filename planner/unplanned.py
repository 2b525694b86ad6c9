"""The unplanned step of a chain: everything is kept, as the replay has it."""

from __future__ import annotations

from solvers import Chain, Replay, replay
from solvers.chain import keep_all


def keep_all_replay(chain: Chain) -> Replay:
    """The step that keeps everything: what 100% of a budget and the unplanned seconds mean for a chain."""
    return replay(chain, keep_all.schedules(chain)[0])
