"""Real steps with stages run as programs, first for the bytes and then for the seconds of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from profiler.agreement import first_failure, gathered, made_by_rank0
from profiler.largest_values import merged_largest
from profiler.measurement.captured_stages import ProposeRuns
from profiler.measurement.meter import Mark, MarkedPhases, Meter, PhasesOfMark, by_mark, time_meter
from profiler.measurement.option_groups import OptionGroup, ProgramsOf, memory_steps, timed_steps
from profiler.measurement.program_costs import Costs, ProgramCost
from profiler.measurement.stage_probe import StageProbe
from profiler.records import MenuRecord, OptionRecord, Phase
from profiler.step_replay import runs_once
from profiler.workload.forward_patches import Forward
from profiler.workload.snapshot import RandomState


class ProgramSteps:
    """Runs the steps under one probe, and makes the menus of what they cost.

    Args:
        probe: of the workload's stages.
        plain: the intervals of an unplanned step under the memory meter, by mark.
        memory_meter: makes one for a step.
        randomness: that every step is run from.
        report: is told what runs next.
        timed: unplanned steps under the time meter: what programs are compared with.

    Attributes:
        late_phases: the optimizers' part of the step that was run late in training, under the memory meter.
    """

    def __init__(
        self,
        probe: StageProbe,
        plain: PhasesOfMark,
        memory_meter: Callable[[], Meter],
        randomness: RandomState,
        report: Callable[[str], None],
        timed: Sequence[MarkedPhases] = (),
    ) -> None:
        self._probe = probe
        self._plain = plain
        self._device = probe.workload.device
        self._memory_meter = memory_meter
        self._randomness = randomness
        self._report = report
        self._timed = timed
        self.late_phases: list[Phase] = []

    def measure(
        self,
        groups: Sequence[OptionGroup],
        programs: ProposeRuns | None,
        late_in_training: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[MenuRecord]:
        """One menu per group; a group whose program cannot be carried out is opaque and says why.

        Args:
            groups: captured where that is possible.
            programs: names the orders of a graph's ops that are worth having; each op once comes first.
            late_in_training: the last step under the memory meter is run in it; its optimizers' part is noted.
        """
        costs = self._costs(groups, late_in_training)
        if isinstance(costs, str) and len(groups) > 1:  # Some group fails: find out which, each on its own.
            self.late_phases = []
            return [menu for group in groups for menu in self.measure([group], programs)]
        if isinstance(costs, str):
            return [MenuRecord(ops=group.ops, opaque=costs) for group in groups]
        costs = merged_largest(gathered(costs), {"freed_bytes": min})
        return [self._menu(*each, programs) for each in zip(groups, costs, strict=True)]

    def _costs(
        self, groups: Sequence[OptionGroup], late_in_training: Callable[[], AbstractContextManager[None]]
    ) -> list[ProgramCost] | str:
        """The costs by group; or why a step failed."""
        costs, failure, raised = Costs(groups, self._plain), "", None
        for step in self._timed:
            costs.add_seconds((), by_mark(step))
        try:
            steps = memory_steps(groups)
            for left, running in zip(reversed(range(len(steps))), steps, strict=True):
                self._report("memory, programs")
                with nullcontext() if left else late_in_training():
                    step = by_mark(self._step(self._memory_meter(), running))
                costs.add_memory(running, step)
                self.late_phases = step.get(Mark("optimizer"), [])
            for running in timed_steps(groups):
                self._report("time, programs")
                costs.add_seconds(running, by_mark(self._step(time_meter(self._device), running)))
        except Exception as error:  # noqa: BLE001 - user code runs here; whatever it raises, programs cannot be used.
            failure, raised = f"running it as a program fails: {type(error).__name__}: {error}", error
        return first_failure(failure, raised) or costs.finish()

    def _step(self, meter: Meter, running: ProgramsOf) -> MarkedPhases:
        self._randomness.restore()
        return self._probe.replacing_step(meter, {k: _as_program(group, k) for k, group in running.items()}).phases

    def _menu(self, group: OptionGroup, cost: ProgramCost, programs: ProposeRuns | None) -> MenuRecord:
        captured = group.captured
        if captured is None or (graph := captured.graph) is None:
            return MenuRecord(ops=group.ops, opaque="" if captured is None else captured.opaque)
        assert programs is not None
        runs = runs_once(graph)
        once = OptionRecord(
            name="as a program",
            runs=runs,
            kept=(),
            rerun=(),
            forward_seconds=cost.forward_seconds,
            backward_seconds=cost.backward_seconds,
            freed_bytes=cost.freed_bytes,
            forward_peak_bytes=cost.forward_peak_bytes,
            backward_peak_bytes=cost.backward_peak_bytes,
        )
        menu = MenuRecord(
            ops=group.ops,
            options=(once,),
            keep_forward_seconds=cost.keep_forward_seconds,
            keep_backward_seconds=cost.keep_backward_seconds,
            graph=graph,
            unread=tuple(sorted(captured.unread)),
            gradients_held=any(captured.once[k].gradients_held for k in group.members),
        )
        if captured.orders is None:
            captured.orders = made_by_rank0(lambda: [*programs(graph)])
        menu = menu.with_programs(captured.orders)
        if not captured.other_bits:
            return menu
        return MenuRecord(
            ops=group.ops, opaque=captured.other_bits, compiled=replace(menu, other_bits=captured.other_bits)
        )


def _as_program(group: OptionGroup, k: int) -> Forward:
    captured = group.captured
    assert captured is not None
    return lambda *args, **kwargs: captured.run(k, args, kwargs)
