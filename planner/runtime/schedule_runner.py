"""Carries out what a plan's schedule says before each backward: which stages run, which inputs are released.

It knows positions of stages and moments, and no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.plans.lowering import LoweredSchedule
from planner.runtime.dropped_stage import DroppedStage
from planner.runtime.transfers import TransferExecutor
from profiler.recomputation.dropped_call import Recomputed
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)


class ScheduleRunner:
    """The backward of one planned step.

    Args:
        lowered: what the schedule does at each stage.
        count: number of stages in the plan.
        stages: the dropped stages of the step by position, as far as the graph needs them.
        transfers: the step's copies to host memory and back; None where nothing is sent.
    """

    def __init__(
        self,
        lowered: LoweredSchedule,
        count: int,
        stages: Mapping[int, DroppedStage],
        transfers: TransferExecutor | None,
    ) -> None:
        self._lowered, self._count, self._stages, self._transfers = lowered, count, stages, transfers
        self._reached = count  # The first of the stages whose turn in backward has come.

    @property
    def backward_begun(self) -> bool:
        """Whether backward has reached a dropped stage."""
        return self._reached < self._count

    def before_backward(self, stage: DroppedStage) -> None:
        """Recompute a stage that backward has reached, and what the schedule has before it and those passed over."""
        position = stage.position
        passed = range(self._reached - 1, position, -1)
        self._reached = min(self._reached, position)
        output: Recomputed | None = None
        for other in passed:
            waiting = self._stages.get(other)
            if waiting is None or not waiting.needed:
                output = self._recompute_before(other, output)
                self._release_inputs(other)
        self._recompute_before(position, output)
        if not stage.done:
            # Backward came here in an order the plan does not know (a part of the graph): do what is needed.
            stage.run_again("until_saved")
        self._release_inputs(position)

    def _recompute_before(self, position: int, output: Recomputed | None) -> Recomputed | None:
        """Recompute what the schedule has before the backward of a stage, also where this step left that stage out."""
        transfers = self._transfers
        for number, rerun in enumerate(self._lowered.reruns.get(position, ())):
            if transfers is not None:
                transfers.backward_begins(position, number)
            stage = self._standing_for(rerun.stage)
            if stage is None or stage.done:
                continue
            if rerun.hold:
                stage.held_boundaries.add(rerun.stage)
            if stage.position == rerun.stage:
                output = stage.run_again(rerun.mode, output)
        if transfers is not None:
            transfers.backward_begins(position)
        return output

    def _release_inputs(self, position: int) -> None:
        """Release the boundaries that the schedule does not hold beyond the recomputations before a backward."""
        for boundary in self._lowered.input_releases.get(position, ()):
            stage = self._standing_for(boundary)
            if stage is not None:
                stage.release_boundary(boundary)

    def _standing_for(self, position: int) -> DroppedStage | None:
        """The stage, or the next one where this step left it out: the input of both is the same."""
        for following in range(position, self._count):
            stage = self._stages.get(following)
            if stage is not None:
                return stage if position in stage.boundaries else None
        return None
