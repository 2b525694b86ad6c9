"""The ops of a traced stage call as ``StageOps``, pooled over the stages that are alike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from profiler.op_graph import StageOp, StageOps, StageStorage
from profiler.trace.partition import ChosenStage, calls_inside, modules_inside
from profiler.trace.step_record import Op, Trace


def stage_ops_of(trace: Trace, stage: ChosenStage) -> StageOps:
    """Returns the inputs, results and costs of the ops of one stage's forward, storages numbered from 0."""
    return _Reader(trace, stage).read()


def pooled(alike: Sequence[StageOps]) -> StageOps:
    """One of several equal dataflows, each op's seconds the median over them."""
    seconds = [statistics.median(ops.ops[k].seconds for ops in alike) for k in range(len(alike[0].ops))]
    first = alike[0]
    return replace(first, ops=tuple(replace(op, seconds=value) for op, value in zip(first.ops, seconds, strict=True)))


def without_seconds(ops: StageOps) -> StageOps:
    """The dataflow alone: equal for stages that do the same."""
    return replace(ops, ops=tuple(replace(op, seconds=0.0) for op in ops.ops))


class _Reader:
    def __init__(self, trace: Trace, stage: ChosenStage) -> None:
        self._trace = trace
        self._stage = stage
        self._local: dict[int, int] = {}
        self._storages: list[StageStorage] = []
        self._base: dict[int, int] = {}
        call = stage.call
        self._saved: dict[int | None, set[str]] = {}
        inside = [(trace.calls[k], name) for k, name in calls_inside(trace, call).items()]
        saving = _innermost([(inner.first_save, inner.end_save, name) for inner, name in inside])
        for save, module in zip(trace.saves[call.first_save : call.end_save], saving, strict=True):
            self._saved.setdefault(save.storage, set()).add(module)
        saves = trace.saves[call.first_save : call.end_save]
        self._used = {save.storage for save in saves if not save.unused}
        self._modules = _innermost([(inner.first_op, inner.end_op, name) for inner, name in inside])
        self._returned = call.output_storages

    def read(self) -> StageOps:
        call = self._stage.call
        ops = [self._op(ordinal, op) for ordinal, op in enumerate(self._trace.ops[call.first_op : call.end_op])]
        for storage in sorted(s for s in self._saved if s is not None and s not in self._local):
            self._outside(storage, 0)  # Saved without an op of the stage having touched it.
        saves = [save.storage for save in self._trace.saves[call.first_save : call.end_save]]
        return StageOps(
            ops=tuple(ops),
            storages=tuple(self._storages),
            modules=modules_inside(self._trace, call),
            saves=tuple(-1 if s is None or s in self._trace.always_alive else self._local[s] for s in saves),
            inputs=tuple(-1 if leaf.storage is None else self._local.get(leaf.storage, -1) for leaf in call.inputs),
        )

    def _op(self, ordinal: int, op: Op) -> StageOp:
        access = op.access
        reads = tuple((self._number(s, v), v - self._base[s]) for s, v in access.reads)
        writes = tuple(self._number(s, 0) for s in access.writes)
        for local in writes:
            self._storages[local] = replace(self._storages[local], versions=self._storages[local].versions + 1)
        made = tuple(self._made(s, ordinal, output) for output, s in enumerate(op.storages))
        return StageOp(
            op=op.name,
            module=self._modules[ordinal],
            seconds=op.seconds,
            reads=reads,
            allocates=made,
            writes=writes,
            random=access.random,
        )

    def _number(self, storage: int, version: int) -> int:
        return self._local[storage] if storage in self._local else self._outside(storage, version)

    def _outside(self, storage: int, version: int) -> int:
        """A storage that was there before the stage; its versions count from what it finds."""
        held = storage in self._trace.always_alive or storage in self._saved
        exclusive = storage in self._stage.boundary_storages and not self._goes_unused(storage)
        return self._add(storage, version, op=-1, always_live=held, dies_after_stage=exclusive)

    def _made(self, storage: int, ordinal: int, output: int) -> int:
        held = storage in self._trace.casts and storage in self._saved
        return self._add(storage, 0, op=ordinal, output=output, always_live=held or self._goes_unused(storage))

    def _goes_unused(self, storage: int) -> bool:
        """Whether it is saved, and goes before backward: then no plan can let go of it."""
        return storage in self._saved and storage not in self._used

    def _add(self, storage: int, version: int, **fields: Any) -> int:
        self._base[storage] = version
        self._local[storage] = len(self._storages)
        saved_in = tuple(sorted(self._saved.get(storage, ())))
        fields |= {"saved": bool(saved_in), "saved_in": saved_in, "returned": storage in self._returned}
        self._storages.append(StageStorage(size_bytes=self._trace.storages.bytes_of[storage], **fields))
        return len(self._storages) - 1


def _innermost(spans: Sequence[tuple[int, int, str]]) -> list[str]:
    """Returns the innermost span's name for every position of the first span; spans stand with outer ones first."""
    first, end, name = spans[0]
    names = [name] * (end - first)
    for start, stop, inner in spans[1:]:
        names[start - first : stop - first] = [inner] * (stop - start)
    return names
