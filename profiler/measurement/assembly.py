"""Puts what was traced and metered of one workload together into a Profile."""

from __future__ import annotations

import platform
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from profiler.measurement.meter import Mark, PhasesOfMark, Place, extended, highest, joined
from profiler.measurement.stage_probe import PlainStep
from profiler.measurement.stage_reruns import RerunTimes
from profiler.recomputation.op_schema import overload_of, traits_of
from profiler.records import (
    HeadRecord,
    LeftOutRecord,
    MenuRecord,
    OpRecord,
    Phase,
    Profile,
    ResidentBytes,
    SharedRecord,
    StageRecord,
)
from profiler.trace.partition import ChosenStage, alike, name_outside, parents_of, remedy_for, why_not_recomputable
from profiler.trace.step_record import Call, Op, Trace
from profiler.workload.compiled_forwards import COMPILED, is_compiled
from profiler.workload.data_parallel import given_back_bytes, units_of
from profiler.workload.given_models import class_name, inner_model, precision_of
from profiler.workload.tensor_parts import COLLECTIVES, distinct_bytes
from profiler.workload.workload import Workload


@dataclass(slots=True, kw_only=True)
class Measured:
    """Everything measured about one workload, before it is put together."""

    trace: Trace
    stages: tuple[ChosenStage, ...]
    plain: PlainStep
    memory: PhasesOfMark
    seconds: dict[Mark, float]
    step_seconds: list[float]
    dropped_memory: PhasesOfMark
    dropped_seconds: dict[Mark, float]
    freed: list[bool]
    reruns: list[RerunTimes]
    menus: list[MenuRecord]
    menu_of: dict[int, int]
    unsteady: tuple[str, ...]
    batch_sized: tuple[str, ...]
    unseen: tuple[str, ...] = ()
    left_out: tuple[LeftOutRecord, ...] = ()
    heads: tuple[HeadRecord, ...] = ()


def environment_fields(workload: Workload) -> dict[str, Any]:
    """The model, batch, device and torch of a profile, by the names of its attributes."""
    device = workload.device
    return {
        "model_class": class_name(inner_model(workload.model)),
        "input_shapes": workload.input_shapes,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch_version": str(torch.__version__),
    }


def assemble(workload: Workload, measured: Measured, resident: ResidentBytes) -> Profile:
    """Makes the profile of the measured steps."""
    optimizer = joined(measured.memory.get(Mark("optimizer")), measured.seconds.get(Mark("optimizer"), 0.0))
    evaluations = measured.memory.get(Mark("evaluation"), [])
    assembly = _Assembly(measured, resident.total)
    stages = assembly.records()
    return Profile(
        **environment_fields(workload),
        precision=precision_of(workload.model, workload.autocast) + (COMPILED if is_compiled(workload.model) else ""),
        stages=stages,
        shared=assembly.shared(),
        resident=resident,
        optimizer=optimizer,
        unplanned_peak_bytes=max(phase.peak_bytes for phases in measured.memory.values() for phase in phases),
        unplanned_seconds=statistics.median(measured.step_seconds),
        step_seconds=tuple(measured.step_seconds),
        op_records=_op_records(measured),
        menus=tuple(_with_held_outputs(menu, number, stages) for number, menu in enumerate(measured.menus)),
        unseen=measured.unseen,
        unsteady=measured.unsteady,
        batch_sized=measured.batch_sized,
        forward_nodes=_forward_nodes(workload, measured.trace),
        left_out=measured.left_out,
        heads=measured.heads,
        evaluation=_evaluation(workload, evaluations, measured.seconds.get(Mark("evaluation"), 0.0)),
        evaluations=1 + len(evaluations),
        collective_bytes=_collective_bytes(workload, measured.trace),
    )


def _with_held_outputs(menu: MenuRecord, number: int, stages: Sequence[StageRecord]) -> MenuRecord:
    """The menu whose programs take into account that others hold what one of its stages returns through backward."""
    held = any(s.menu == number and s.lasting_output_bytes > s.own_output_bytes for s in stages)
    if menu.compiled is not None:
        return replace(menu, compiled=_with_held_outputs(menu.compiled, number, stages))
    if menu.graph is None or not held:
        return menu
    orders = [option.runs for option in menu.options if option.runs is not None]
    return replace(menu, outputs_held=True).with_programs(orders)


def _evaluation(workload: Workload, evaluations: list[Phase], seconds: float) -> Phase:
    """Returns the phase of a forward and backward within the optimizer's step; the loop's loss stays beside theirs."""
    evaluation = highest(evaluations, seconds)
    return replace(evaluation, start_bytes=evaluation.start_bytes + distinct_bytes(workload.held_loss))


def _collective_bytes(workload: Workload, trace: Trace) -> int:
    if workload.device.type != "cpu":
        return 0  # There streams say when memory may be used again.
    ops = (*trace.ops, *trace.backward_ops)
    return max((op.output_bytes for op in ops if op.name.startswith(COLLECTIVES)), default=0)


def _forward_nodes(workload: Workload, trace: Trace) -> int:
    if is_compiled(workload.model) or any(traits_of(overload_of(op.name)).casts for op in trace.ops):
        return 0  # Of the latter a trace does not see the casts.
    return sum(call.end_node - call.first_node for call in trace.calls if call.parent < 0)


class _Assembly:
    """Puts the phases of stages, and of what runs outside of them, together in forward order."""

    def __init__(self, measured: Measured, resident_bytes: int) -> None:
        self._measured = measured
        self._alike = alike(measured.stages)
        self._names = {stage.call.module: stage.call.name for stage in measured.stages}
        backward = [p for mark, phases in measured.memory.items() if mark.phase == "backward" for p in phases]
        self._after_backward = backward[-1].end_bytes if backward else resident_bytes
        self._records: list[StageRecord] = []
        self._index: dict[Place, int] = {}

    def records(self) -> tuple[StageRecord, ...]:
        for k in range(len(self._measured.stages) + 1):
            self._add_outside(k)
            self._index[Place("outside", k)] = len(self._records) - 1
            if k < len(self._measured.stages):
                self._records.append(self._stage(k))
                self._index[Place("stage", k)] = len(self._records) - 1
        return tuple(self._with_late_releases())

    def _with_late_releases(self) -> Iterator[StageRecord]:
        released = [Counter[int]() for _ in self._records]
        for k, size_bytes, mark in self._measured.plain.late_releases:
            begin = self._index[Place("stage", k)]
            if mark.place is not None and (end := self._index[mark.place]) > begin:
                released[begin][end] += size_bytes
        for record, later in zip(self._records, released, strict=True):
            yield replace(record, late_releases=tuple(sorted(later.items())))

    def shared(self) -> tuple[SharedRecord, ...]:
        """The storages that stages take as input, but for boundaries that live for one link only."""
        trace, stages = self._measured.trace, self._measured.stages
        leaves: dict[int, list[tuple[int, int]]] = {}
        for k, stage in enumerate(stages):
            exclusive = stage.boundary_storages if self._measured.freed[k] else frozenset()
            for leaf, tensor in enumerate(stage.call.inputs):
                if tensor.storage is not None and tensor.storage not in exclusive | trace.always_alive:
                    leaves.setdefault(tensor.storage, []).append((k, leaf))
        inputs = (self._shared(number, places) for number, places in leaves.items())
        return (*inputs, *self._casts(trace.casts - leaves.keys()))

    def _casts(self, numbers: set[int]) -> list[SharedRecord]:
        """Casts of parameters, those that are made and saved in the same stages together."""
        together: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
        for number in sorted(numbers):
            born = self._born(number)
            key = born, tuple(sorted(self._savers(number))), tuple(sorted(self._users(number) - {born}))
            together[key] = together.get(key, 0) + self._measured.trace.storages.bytes_of[number]
        return [
            SharedRecord(
                size_bytes=size_bytes,
                born=born,
                readers=(),
                linked_readers=(),
                savers=savers,
                death_phase="backward" if savers else "forward",
                death=min(savers, default=len(self._records) - 1),
                cast=True,
                recast_in=users,
            )
            for (born, savers, users), size_bytes in together.items()
        ]

    def _users(self, number: int) -> set[int]:
        """Records of the stages whose ops read a storage."""
        ops = self._measured.trace.ops
        return {
            self._index[Place("stage", k)]
            for k, stage in enumerate(self._measured.stages)
            if any(number == read for op in ops[stage.call.first_op : stage.call.end_op] for read, _ in op.access.reads)
        }

    def _shared(self, number: int, leaves: list[tuple[int, int]]) -> SharedRecord:
        stages, trace = self._measured.stages, self._measured.trace
        linked = {(k, leaf) for k, leaf in leaves if leaf in {i for i, _ in stages[k].links}}
        readers = {self._index[Place("stage", k)] for k, leaf in leaves if (k, leaf) not in linked}
        linked_readers = {self._index[Place("stage", k)] for k, _ in linked} - readers
        phase, death = self._death(leaves)
        return SharedRecord(
            size_bytes=trace.storages.bytes_of[number],
            born=self._born(number),
            readers=tuple(sorted(readers)),
            linked_readers=tuple(sorted(linked_readers)),
            savers=tuple(sorted(self._savers(number))),
            death_phase=phase,
            death=death,
        )

    def _death(self, leaves: list[tuple[int, int]]) -> tuple[Literal["forward", "backward", "never"], int]:
        deaths = self._measured.plain.input_deaths
        mark = next((deaths[leaf] for leaf in leaves if leaf in deaths), None)
        if mark is None or mark.place is None:
            return "never", 0
        return ("forward" if mark.phase == "forward" else "backward"), self._index[mark.place]

    def _born(self, number: int) -> int:
        position = next((i for i, op in enumerate(self._measured.trace.ops) if number in op.storages), -1)
        return self._at(position, lambda call: (call.first_op, call.end_op))

    def _savers(self, number: int) -> set[int]:
        return {
            self._at(position, lambda call: (call.first_save, call.end_save))
            for position, save in enumerate(self._measured.trace.saves)
            if save.storage == number
        }

    def _at(self, position: int, span: Callable[[Call], tuple[int, int]]) -> int:
        """Number of the record for the stage in whose span a position lies, or that it comes outside before."""
        for k, stage in enumerate(self._measured.stages):
            first, end = span(stage.call)
            if position < end:
                return self._index[Place("outside", k) if position < first else Place("stage", k)]
        return len(self._records) - 1

    def _phases(self, place: Place) -> tuple[Phase, Phase, Phase]:
        m = self._measured
        forward, backward = Mark("forward", place), Mark("backward", place)
        after = Phase(start_bytes=self._after_backward, peak_bytes=self._after_backward, end_bytes=self._after_backward)
        return (
            joined(m.memory.get(forward), self._pooled(m.seconds, forward)),
            joined(m.memory[backward], self._pooled(m.seconds, backward)) if backward in m.memory else after,
            joined(m.dropped_memory.get(forward), self._pooled(m.dropped_seconds, forward)),
        )

    def _pooled(self, seconds: dict[Mark, float], mark: Mark) -> float:
        """A stage's seconds: the median over all stages like it."""
        if mark.place is None or mark.place.kind != "stage":
            return seconds.get(mark, 0.0)
        like = [k for k, number in enumerate(self._alike) if number == self._alike[mark.place.index]]
        return statistics.median(seconds.get(Mark(mark.phase, Place("stage", k)), 0.0) for k in like)

    def _add_outside(self, k: int) -> None:
        forward, backward, dropped = self._phases(Place("outside", k))
        if self._records and Mark("backward", Place("outside", k)) not in self._measured.memory:
            self._records[-1] = _with_trailing(self._records[-1], forward, dropped)
            return
        stages = self._measured.stages
        name = name_outside([stage.name for stage in stages], k)
        self._records.append(
            StageRecord(name=name, kind="outside", forward=forward, backward=backward, dropped=dropped)
        )

    def _stage(self, k: int) -> StageRecord:
        m, stage, place = self._measured, self._measured.stages[k], Place("stage", k)
        forward, backward, dropped = self._phases(place)
        rerun, reason = m.reruns[k], self._reason(k, m.reruns[k])
        calls = sum(call.module is stage.call.module for call in m.trace.calls)
        unit_bytes = given_back_bytes(stage.call.module) if calls == 1 else 0
        marks = m.memory.get(Mark("forward", place), [])
        gathered_bytes = 0
        if k in m.plain.gathered_bytes:  # In its backward its parameters are there before it is recomputed.
            gathered_bytes = marks[1].start_bytes + m.plain.gathered_bytes[k] - marks[0].start_bytes
            marks = marks[1:]
        until_saved = marks if units_of(stage.call.module).inside else marks[:-1]
        first_bytes = forward.start_bytes + gathered_bytes
        last_save_peak = max((phase.peak_bytes for phase in until_saved), default=first_bytes)
        record = StageRecord(
            name=stage.name,
            kind="stage",
            forward=forward,
            backward=backward,
            dropped=dropped,
            # It is a part of that forward; a longer time can only be noise.
            recompute_seconds=min(rerun.seconds, dropped.seconds),
            recompute_peak_bytes=last_save_peak - first_bytes,
            copied_bytes=m.plain.copied_bytes.get(k, 0),
            gathered_bytes=gathered_bytes,
            unit_bytes=unit_bytes,
            gather_seconds=rerun.gather_seconds if unit_bytes else 0.0,
            links=stage.links,
            gradient_strides=tuple(m.plain.gradient_strides.get(k, ())),
            reason=reason,
            remedy=remedy_for(stage.call) or rerun.remedy if reason else "",
            menu=m.menu_of[k],
            parents=parents_of(m.trace, stage.call),
            calls=calls,
            inner_calls=tuple((self._names[module], times) for module, times in stage.inner_calls),
        )
        return self._with_bytes(k, _with_call(record, stage.call))

    def _with_bytes(self, k: int, record: StageRecord) -> StageRecord:
        """The record with what its call saves and returns."""
        m, call = self._measured, self._measured.stages[k].call
        total_bytes = m.trace.storages.total_bytes
        saves = m.trace.saves[call.first_save : call.end_save]
        saved = m.trace.saved(call.first_save, call.end_save)
        boundary = m.stages[k + 1].boundary_storages if k + 1 < len(m.stages) and m.freed[k + 1] else frozenset()
        return replace(
            record,
            recompute_ops=saves[-1].op - call.first_op if saves else 0,
            boundary_bytes=total_bytes(boundary),
            kept_output_bytes=total_bytes(boundary & saved),
            lasting_output_bytes=total_bytes(self._lasting(k, boundary)),
            own_output_bytes=total_bytes((call.output_storages & saved) - boundary - self._needed_elsewhere(k)),
            kept_bytes=total_bytes(saved - call.input_storages),
        )

    def _needed_elsewhere(self, k: int) -> set[int]:
        """Storages that are saved outside of stage k, or go into a stage."""
        trace, stages = self._measured.trace, self._measured.stages
        call = stages[k].call
        saved = trace.saved(0, call.first_save) | trace.saved(call.end_save, len(trace.saves))
        return saved.union(*(stage.call.input_storages for stage in stages))

    def _lasting(self, k: int, boundary: frozenset[int]) -> set[int]:
        """Storages of the output besides the boundary that are alive when the stage's backward begins."""
        m = self._measured
        passed = boundary.union(m.trace.always_alive, *(stage.call.input_storages for stage in m.stages))
        gone = {leaf for (j, leaf), mark in m.plain.output_deaths.items() if j == k and _before_backward(k, mark)}
        outputs = enumerate(m.stages[k].call.outputs)
        return {t.storage for leaf, t in outputs if leaf not in gone and t.storage is not None} - passed

    def _reason(self, k: int, rerun: RerunTimes) -> str:
        seen = why_not_recomputable(self._measured.stages[k].call)
        if seen:
            return seen
        if Mark("backward", Place("stage", k)) not in self._measured.memory:
            return "it has no backward"
        return rerun.failure


def _with_trailing(record: StageRecord, forward: Phase, dropped: Phase) -> StageRecord:
    """A stage with what runs outside behind it: Python letting go of tensors, and ops without gradients."""
    return replace(
        record,
        forward=extended(record.forward, forward),
        dropped=extended(record.dropped, dropped),
        trailing_peak_bytes=_rise(record.forward, forward),
        dropped_trailing_peak_bytes=_rise(record.dropped, dropped),
    )


def _rise(phase: Phase, following: Phase) -> int:
    """How far the following phase rises above the start of one; 0 where it allocates nothing of note."""
    return following.peak_bytes - phase.start_bytes if following.peak_bytes > following.start_bytes else 0


def _before_backward(k: int, mark: Mark) -> bool:
    """Whether what begins at a mark lies before the backward of stage k."""
    if mark.phase == "backward":
        return mark.place is not None and mark.place.index > k
    return mark.phase in ("forward", "loss")


def _with_call(record: StageRecord, call: Call) -> StageRecord:
    """The record with what the traced call and its module are."""
    parameters = dict(call.module.named_parameters())
    return replace(
        record,
        module_class=class_name(call.module),
        forward_ops=call.end_op - call.first_op,
        parameter_gradient_bytes=distinct_bytes(p for p in parameters.values() if p.requires_grad),
        parameter_shapes=tuple((name, tuple(p.shape)) for name, p in parameters.items()),
        input_shapes=tuple(leaf.shape for leaf in call.inputs),
        draws_random=call.draws_random,
        mutated_buffers=call.mutated_buffers,
    )


def _op_records(measured: Measured) -> tuple[OpRecord, ...]:
    def record(op: Op, is_inside: Callable[[Call], bool]) -> OpRecord:
        place = next((stage.name for stage in measured.stages if is_inside(stage.call)), "outside")
        return OpRecord(op.side, place, op.module, op.name, op.seconds, op.output_bytes, op.kept)

    forward, backward = measured.trace.ops, measured.trace.backward_ops
    return (
        *(record(op, lambda call, k=k: call.first_op <= k < call.end_op) for k, op in enumerate(forward)),
        *(record(op, lambda call, node=op.node: call.first_node <= node < call.end_node) for op in backward),
    )
