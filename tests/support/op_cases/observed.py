"""What one step of a stage runs again, and what it leaves alive: as seen from outside, and as the dataflow says."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.op_graph import StageOps
from profiler.recomputation.module_rerun import RERUN_DEPTH
from profiler.recomputation.selection import Selection
from profiler.recomputation.selective_call import SelectiveCall
from profiler.tensors.tensor_trees import tensors_in
from tests.support.op_cases.registry import Case
from tests.support.op_cases.runs import inner, total

# What the tape itself runs: views of what was made again, spare statistics, random states, shapes.
BOOKKEEPING = (
    *("aten.detach.default", "aten.as_strided.default", "aten.view.dtype", "aten._conj.default"),
    *("aten._neg_view.default", "aten.set_.source_Storage_storage_offset", "aten.clone.default"),
    *("aten.empty.memory_format", "aten.empty_strided.default", "aten.lift_fresh.default"),
)


class Observer(TorchDispatchMode):
    """Lists the ops that run again, and knows the storages that ops have made.

    Args:
        there: tensors whose storages were there before.
    """

    def __init__(self, there: Collection[Tensor]) -> None:
        super().__init__()
        self.again: list[str] = []
        # Bytes that were alive before each of them.
        self.alive_bytes: list[int] = []
        self._there = [tensor.untyped_storage() for tensor in there]
        self._known = {storage._cdata for storage in self._there}
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if RERUN_DEPTH.get() and str(func) not in BOOKKEEPING:
            self.again.append(str(func))
            self.alive_bytes.append(sum(size * count for size, count in self.alive().items()))
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return output

    def alive(self) -> Counter[int]:
        """How many storages of which size are alive, of those that ops have made."""
        return Counter(
            size for key, (storage, size) in self._made.items() if storage() is not None and key not in self._known
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """Ops that ran again, and storages by size: alive after forward, and after backward without its gradients."""

    again: Counter[str]
    after_forward: Counter[int]
    after_backward: Counter[int]


def observe(made: Case, selection: Selection | None) -> Observed:
    """One step, plain without a selection; for use without garbage collection, so that cycles count as alive."""
    stage, inputs = made.make()
    leaves = [*stage.parameters(), *inputs]
    given = inner(inputs)
    observer = Observer([*leaves, *stage.buffers(), *given])
    with observer:
        if selection is None:
            output = stage(*given)
        else:
            output = SelectiveCall(stage, selection).run(stage.forward, given, {})
        after_forward = observer.alive()
        loss = total(output)
        del output, given
        loss.backward()
        del loss
    for leaf in leaves:
        leaf.grad = None
    return Observed(Counter(observer.again), after_forward, observer.alive())


def expected_again(flow: StageOps, rerun: Collection[int]) -> Counter[str]:
    """The ops of a choice."""
    return Counter(flow.ops[ordinal].op for ordinal in rerun if flow.ops[ordinal].op not in BOOKKEEPING)


def expected_more(flow: StageOps, rerun: Collection[int]) -> dict[int, int]:
    """How many more storages of which size a choice keeps than the plain stage does; fewer count below zero."""
    versions = [storage.versions for storage in flow.storages]
    last = {number: op for (number, version), op in flow.writers().items() if version == versions[number]}
    read = {n for ordinal in rerun for n, version in flow.ops[ordinal].reads if version == versions[n]}
    found: Counter[int] = Counter()
    for number, storage in enumerate(flow.storages):
        if storage.op >= 0 and not storage.returned:
            found[storage.size_bytes] -= storage.saved and last[number] in rerun
            found[storage.size_bytes] += not storage.saved and number in read and last[number] not in rerun
    return {size: count for size, count in found.items() if count}


def more(left: Counter[int], right: Counter[int]) -> dict[int, int]:
    """How many more there are in the first."""
    return {size: left[size] - right[size] for size in left | right if left[size] != right[size]}
