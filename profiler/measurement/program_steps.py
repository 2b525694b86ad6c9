"""Real steps with stages run as programs, first for the bytes and then for the seconds of these, and their costs.

What a program costs comes from several steps: bytes as they were seen, seconds made steady. Stages that are alike run
as programs in the same steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

from profiler.agreement import first_failure, gathered, made_by_rank0, merged_largest
from profiler.measurement.captured_stages import CapturedKind, ProposeRuns
from profiler.measurement.meter import Mark, MarkedPhases, Meter, PhasesOfMark, Place, by_mark, time_meter
from profiler.measurement.stage_probe import StageProbe
from profiler.op_graph import StageOps
from profiler.records import MenuRecord, OptionRecord, Phase
from profiler.step_graph import runs_once
from profiler.trace.partition import ChosenStage
from profiler.trace.stage_dataflow import pooled, stage_ops_of, without_seconds
from profiler.trace.step_record import Trace
from profiler.workload.forward_patches import Forward
from profiler.workload.random_states import RandomState


@dataclass(slots=True)
class ProgramCost:
    """The measured cost of the program in which each op runs once.

    Attributes:
        forward_seconds, backward_seconds: the time of the program.
        keep_forward_seconds, keep_backward_seconds: the time of the stage's own code in the same steps.
        freed_bytes: the bytes by which a forward leaves less alive than that of the unplanned stage.
        forward_peak_bytes, backward_peak_bytes: above what is alive at the phase's start.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    keep_forward_seconds: float = 0.0
    keep_backward_seconds: float = 0.0
    freed_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0


class Costs:
    """Collects what the steps showed."""

    def __init__(self, groups: Sequence[OptionGroup], plain: Mapping[Mark, list[Phase]]) -> None:
        self._plain, self._groups = plain, groups
        self._costs = [ProgramCost() for _ in groups]
        self._samples: list[Sample] = []
        self._steps = 0

    def add_memory(self, programs: Collection[int], step: Mapping[Mark, list[Phase]]) -> None:
        """Take the bytes of a step under the memory meter, in which these stages ran as programs."""
        for group, cost in zip(self._groups, self._costs, strict=True):
            for k in (k for k in group.members if k in programs):
                forward, backward = (step.get(mark, []) for mark in marks_of(k))
                cost.freed_bytes = growth_of(self._plain[marks_of(k)[0]]) - growth_of(forward)
                cost.forward_peak_bytes, cost.backward_peak_bytes = peak_of(forward), peak_of(backward)

    def add_seconds(self, programs: Collection[int], step: Mapping[Mark, list[Phase]]) -> None:
        """Take the seconds of a step under the time meter, in which these stages ran as programs."""
        for group in (group for group in self._groups if group.is_captured):
            for k in group.members:
                for mark in marks_of(k):
                    seconds = sum(phase.seconds for phase in step.get(mark, []))
                    self._samples.append(Sample(self._steps, (mark.phase, group.family, k in programs), seconds))
        for mark, phases in step.items():
            if mark.place is None or mark.place.kind == "outside":  # The same in every step: it shows their pace.
                self._samples.append(Sample(self._steps, mark, sum(phase.seconds for phase in phases)))
        self._steps += 1

    def finish(self) -> list[ProgramCost]:
        """The costs by group."""
        seconds = steady_seconds(self._samples)
        for group, cost in zip(self._groups, self._costs, strict=True):
            for phase in ("forward", "backward"):
                keep, program = (seconds.get((phase, group.family, is_program), 0.0) for is_program in (False, True))
                setattr(cost, f"keep_{phase}_seconds", keep)
                setattr(cost, f"{phase}_seconds", program)
        return self._costs


class Sample(NamedTuple):
    """One timing of one thing, in one step."""

    step: int
    what: Hashable
    seconds: float


def steady_seconds(samples: Sequence[Sample]) -> dict[Hashable, float]:
    """Returns the seconds of each thing at the pace of a typical step.

    A machine stalls and never hurries, so of several timings the lower quartile
    counts. It may be slower throughout a whole step, as others use it: every
    step's pace is the median, over the things timed in it, of their seconds there
    over their typical ones, each with the weight of these, and timings are divided by it before they count. What is
    timed once shows no pace.

    >>> slow = [Sample(0, "a", 2.0), Sample(0, "b", 4.0)]
    >>> steady_seconds([*slow, Sample(1, "a", 1.0), Sample(1, "b", 2.0)])
    {'a': 1.0, 'b': 2.0}
    """
    typical = _quartiles(samples)
    paces: dict[int, list[tuple[float, float]]] = {}
    times = Counter(sample.what for sample in samples)
    for step, what, seconds in samples:
        if typical[what] > 0 and times[what] > 1:
            paces.setdefault(step, []).append((seconds / typical[what], typical[what]))
    # The quartile is the pace of a quick step: none is counted as quicker.
    pace = {step: max(1.0, _weighted_median(ratios)) for step, ratios in paces.items()}
    return _quartiles([Sample(step, what, seconds / pace.get(step, 1.0)) for step, what, seconds in samples])


def _weighted_median(ratios: Sequence[tuple[float, float]]) -> float:
    """The ratio below and above which the others have the same weight."""
    half = sum(weight for _, weight in ratios) / 2
    below = 0.0
    for ratio, weight in sorted(ratios):
        below += weight
        if below >= half:
            return ratio
    return 1.0


def _quartiles(samples: Sequence[Sample]) -> dict[Hashable, float]:
    seconds_of: dict[Hashable, list[float]] = {}
    for sample in samples:
        seconds_of.setdefault(sample.what, []).append(sample.seconds)
    return {what: sorted(seconds)[len(seconds) // 4] for what, seconds in seconds_of.items()}


class ProgramSteps:
    """Runs the steps under one probe, and makes the menus of what they cost.

    Args:
        probe: the probe of the workload's stages.
        plain: the intervals of an unplanned step under the memory meter, by mark.
        memory_meter: the function that makes a meter for a step.
        randomness: the random states that every step begins from.
        report: called with the name of each run.
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
            copied_gradient_bytes=max(captured.once[k].copied_gradient_bytes for k in group.members),
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


# Stages of one kind that together save less than this share are not worth capturing: they are kept or recomputed whole.
SMALLEST_SHARE = 0.01
TIME_STEPS = 3
ProgramsOf = dict[int, "OptionGroup"]  # the stages that run as programs in one step, each with its group


@dataclass(slots=True)
class OptionGroup:
    """Stages that do the same ops, on the same kinds of storages and in the same bytes.

    Attributes:
        ops: their common dataflow, seconds pooled.
        members: positions among the stages.
        family: groups with the same number do the same and differ in their neighbours only
            (at the ends of a chain gradients come and go otherwise): in bytes, not in seconds.
        captured: the verdict on the stages as a graph; None where capturing was not tried.
    """

    ops: StageOps
    members: list[int]
    family: int = 0
    captured: CapturedKind | None = None

    @property
    def is_captured(self) -> bool:
        """Whether the stages can run as programs."""
        return self.captured is not None and self.captured.graph is not None


def grouped(
    trace: Trace, stages: Sequence[ChosenStage], kinds: Sequence[int], plain: Mapping[Mark, list[Phase]]
) -> list[OptionGroup]:
    """The groups of stages.

    Args:
        trace, stages: the traced step and its stages.
        kinds: a number for each stage; equal where structure and shapes are equal.
        plain: the intervals of an unplanned step under the memory meter.
    """
    families: dict[tuple[int, StageOps], list[int]] = {}
    flows = [stage_ops_of(trace, stage) for stage in stages]
    for k, flow in enumerate(flows):
        families.setdefault((kinds[k], without_seconds(flow)), []).append(k)
    parts: list[OptionGroup] = []
    for number, members in enumerate(families.values()):
        parts += _parts(OptionGroup(pooled([flows[k] for k in members]), members, number), plain)
    return parts


def _parts(group: OptionGroup, plain: Mapping[Mark, list[Phase]]) -> list[OptionGroup]:
    """The group, split where the bytes of its stages' phases differ."""
    parts: dict[tuple[int, ...], OptionGroup] = {}
    for k in group.members:
        phases = [plain.get(mark, []) for mark in marks_of(k)]
        bytes_of = tuple(number for phase in phases for number in (growth_of(phase), peak_of(phase)))
        parts.setdefault(bytes_of, replace(group, members=[])).members.append(k)
    return list(parts.values())


def families_worth_capturing(groups: Sequence[OptionGroup], *, every: bool) -> dict[int, list[int]]:
    """The members of each family that saves enough, or of ``every`` one, by the family's number."""
    all_bytes = sum(group.ops.saved_bytes * len(group.members) for group in groups)
    members: dict[int, list[int]] = {}
    saved_bytes: dict[int, int] = {}
    for group in groups:
        members[group.family] = sorted([*members.get(group.family, ()), *group.members])
        saved_bytes[group.family] = group.ops.saved_bytes * len(members[group.family])
    return {f: of for f, of in members.items() if every or saved_bytes[f] >= SMALLEST_SHARE * all_bytes}


def steps_for(groups: Sequence[OptionGroup]) -> int:
    """How many steps the measurement takes."""
    return len(memory_steps(groups)) + len(timed_steps(groups))


def memory_steps(groups: Sequence[OptionGroup]) -> list[ProgramsOf]:
    """Steps in which one stage of each group runs as a program.

    Never two neighbouring stages in one step where what the first keeps is the second's input: there what the first
    does would show in the bytes of the second.
    """
    measured = {group.members[0]: group for group in groups if group.is_captured}
    if not _neighbours_interfere(groups):
        return [measured] if measured else []
    steps = ({k: group for k, group in measured.items() if k % 2 == odd} for odd in (0, 1))
    return [step for step in steps if step]


def timed_steps(groups: Sequence[OptionGroup]) -> list[ProgramsOf]:
    """Steps in which all stages that can run as programs do."""
    measured = {k: group for group in groups if group.is_captured for k in group.members}
    return [measured] * TIME_STEPS if measured else []


def _neighbours_interfere(groups: Sequence[OptionGroup]) -> bool:
    """Whether a stage keeps what it returns while the next one, that takes it, does not."""
    flows = {k: group.ops for group in groups for k in group.members}
    keeps = {k for k, ops in flows.items() if any(s.saved and s.returned and s.op >= 0 for s in ops.storages)}
    takes = {k for k, ops in flows.items() if any(s.dies_after_stage and not s.always_live for s in ops.storages)}
    return any(k + 1 in takes for k in keeps)


def marks_of(stage: int) -> tuple[Mark, Mark]:
    """Returns the marks at which a stage's forward and its backward begin."""
    return Mark("forward", Place("stage", stage)), Mark("backward", Place("stage", stage))


def growth_of(phases: Sequence[Phase]) -> int:
    """How much more is alive after phases that follow each other than before them."""
    return phases[-1].end_bytes - phases[0].start_bytes if phases else 0


def peak_of(phases: Sequence[Phase]) -> int:
    """The most bytes in phases that follow each other, above those at their start."""
    return max((phase.peak_bytes for phase in phases), default=0) - (phases[0].start_bytes if phases else 0)
