"""Stages that are alike, and which of them run as programs in which of the steps that measure those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from profiler.measurement.captured_stages import CapturedKind
from profiler.measurement.meter import Mark, Place
from profiler.op_graph import StageOps
from profiler.records import Phase
from profiler.trace.partition import ChosenStage
from profiler.trace.stage_dataflow import pooled, stage_ops_of, without_seconds
from profiler.trace.step_record import Trace

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
        captured: what is known of the stages as a graph; None where that was not tried.
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
    """Where a stage's forward and its backward begin."""
    return Mark("forward", Place("stage", stage)), Mark("backward", Place("stage", stage))


def growth_of(phases: Sequence[Phase]) -> int:
    """How much more is alive after phases that follow each other than before them."""
    return phases[-1].end_bytes - phases[0].start_bytes if phases else 0


def peak_of(phases: Sequence[Phase]) -> int:
    """The most bytes in phases that follow each other, above those at their start."""
    return max((phase.peak_bytes for phase in phases), default=0) - (phases[0].start_bytes if phases else 0)
