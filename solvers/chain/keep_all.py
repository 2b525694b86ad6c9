"""Keep everything: what the model does without a plan.

Formulation: every stage runs once with option 0 and goes backward; nothing is recomputed.
Guarantee: the reference point, with the peak that every other schedule is held against; not always the fastest,
since another option of a stage may be faster. Complexity: O(L). Units: bytes and seconds of the chain.
"""

from __future__ import annotations

from solvers.chain.segments import Segment, segmented_schedule
from solvers.problem.chain import Chain
from solvers.problem.chain_schedule import Schedule
from solvers.problem.chain_simulator import Replay, replay


def schedules(chain: Chain) -> list[Schedule]:
    """The one schedule that keeps every stage.

    >>> from solvers.problem.chain import Option, Stage
    >>> way = Option(forward_seconds=1, backward_seconds=2, kept_bytes=4, forward_peak_bytes=6,
    ...              backward_peak_bytes=1, recompute_seconds=1, recompute_peak_bytes=4)
    >>> stage = Stage(name="s", options=(way,), boundary_bytes=1, forward_seconds=1, forward_peak_bytes=2)
    >>> schedules(Chain(stages=(stage,) * 3))[0].forward_runs()
    3
    """
    return [segmented_schedule([Segment(0, len(chain.stages), kept=True)])]


def keep_all_replay(chain: Chain) -> Replay:
    """The step that keeps everything: what 100% of a budget and the unplanned seconds mean for a chain."""
    return replay(chain, schedules(chain)[0])
