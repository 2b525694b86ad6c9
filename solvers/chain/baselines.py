"""The two schedules that need no solver: keep every stage, or recompute every stage on its own.

Formulation: ``keep_all`` runs every stage once with option 0. ``recompute_all`` makes every stage a segment of its own:
the boundary before it is held and the stage is recomputed directly before its backward; stages that must run once are
kept with option 0.
Guarantee: ``keep_all`` is the reference point, with the peak that every other schedule is compared with; not always the
fastest, since another option of a stage may be faster. With ``recompute_all`` every stage runs forward at most twice.
Complexity: O(L). Units: bytes and seconds of the chain.
Paper: the per-layer checkpoints of Chen et al., "Training deep nets with sublinear memory cost" (2016), section 4.
"""

from __future__ import annotations

from solvers.chain.segments import Segment, segmented_schedule
from solvers.problem.chain import Chain
from solvers.problem.schedule import Schedule
from solvers.problem.simulator import Replay, replay


def keep_all(chain: Chain) -> list[Schedule]:
    """The one schedule that keeps every stage.

    >>> from solvers.problem.examples import equal_stages
    >>> keep_all(equal_stages(3))[0].forward_runs()
    3
    """
    return [segmented_schedule([Segment(0, len(chain.stages), option=0)])]


def keep_all_replay(chain: Chain) -> Replay:
    """The step that keeps everything: what 100% of a budget and the unplanned seconds mean for a chain."""
    return replay(chain, keep_all(chain)[0])


def recompute_all(chain: Chain) -> list[Schedule]:
    """The one schedule that recomputes every stage on its own.

    >>> from solvers.problem.examples import equal_stages
    >>> recompute_all(equal_stages(3))[0].forward_runs()
    6
    """
    segments = [Segment(k, k + 1, None if stage.recomputable else 0) for k, stage in enumerate(chain.stages)]
    return [segmented_schedule(segments)]
