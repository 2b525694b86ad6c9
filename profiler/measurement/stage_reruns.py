"""Recomputed stage calls: whether the result is the same, and how long it takes up to the last saved tensor."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.agreement import any_rank, first_failure, gathered
from profiler.current_device import host_seconds
from profiler.measurement.stage_probe import FirstRun
from profiler.recomputation.module_rerun import rerun_keeping, rerun_until_saved
from profiler.recomputation.saved_tensors import PLAIN_OR_FAKE, SignatureCheck, change_counter, version_of
from profiler.trace.partition import ChosenStage
from profiler.trace.step_record import Trace
from profiler.workload.data_parallel import SHARDING
from profiler.workload.tensor_parts import any_distributed, has_storage, parts_of, sizes_of, storage_of
from profiler.workload.tensor_trees import in_new_containers, tensors_in


@dataclass(slots=True, kw_only=True)
class RerunTimes:
    """Seconds of recomputing a stage, and of gathering its parameters before that; or why it cannot be recomputed."""

    seconds: float = 0.0
    gather_seconds: float = 0.0
    failure: str = ""

    @property
    def remedy(self) -> str:
        """The change in the model that would make the stage recomputable; empty where none is known."""
        return _REMEDIES.get(self.failure, "")


_CHANGED_AFTERWARDS = "its input is changed in place afterwards"
STORES = "it stores tensors of its forward (in an attribute, a cache or a hook)"
_OTHER_SAVES = "recomputing it saves other tensors (a cache or a counter changed)"
_OTHER_RESULT = "recomputing it gives another result"
_REMEDIES = {
    _CHANGED_AFTERWARDS: "write into a new tensor there (x = x + y for x += y)",
    STORES: "return them, or store them in evaluation mode only (if not self.training: ...); take weight_norm and "
    "spectral_norm of torch.nn.utils.parametrizations",
    _OTHER_SAVES: "change caches and counters outside of forward (of transformers: use_cache=False)",
    _OTHER_RESULT: "let forward depend on inputs, parameters and buffers alone, and draw with torch.rand and its like",
}


HELD = (
    "something else (such as a hook with a graph of its own) holds what it saves: recomputing it would take that twice"
)


def kept_by_hooks(trace: Trace, stages: Sequence[ChosenStage], tensors: Iterable[tuple[int, int]]) -> set[int]:
    """The stages of which a tensor besides inputs and outputs is among these.

    Args:
        trace, stages: the traced step and its stages.
        tensors: saved ones, each with its stage, that are alive although the stage let go of them.
    """
    found = set()
    for k, number in tensors:
        call = stages[k].call
        storage = trace.saves[call.first_save + number].storage
        passed = trace.always_alive | call.input_storages | call.output_storages
        if storage is not None and storage not in passed:
            found.add(k)
    return found


def rerun_stages(
    first_runs: Sequence[FirstRun],
    kinds: Sequence[int],
    device: torch.device,
    *,
    compiled: bool,
    known: Sequence[RerunTimes] | None = None,
) -> list[RerunTimes]:
    """Recomputes one stage of each kind; where one of a kind cannot be recomputed, each of its kind is tried.

    Args:
        first_runs: the first runs of the stages.
        kinds: a number for each stage; equal where structure and shapes are equal.
        device: the device of the model.
        compiled: whether the model is compiled, or something in it.
        known: the results of an earlier call; then the stages are only timed once more.
    """
    first_of: dict[int, RerunTimes] = {}
    reruns: list[RerunTimes] = []
    for k, (first, kind) in enumerate(zip(first_runs, kinds, strict=True)):
        if known is not None:
            if not known[k].failure and kind not in first_of:
                first_of[kind] = _timed(first, device)
            reruns.append(known[k] if known[k].failure else first_of[kind])
        elif any_rank(first.input_changed()):
            reruns.append(RerunTimes(failure=_CHANGED_AFTERWARDS))
        elif kind in first_of and not first_of[kind].failure:
            reruns.append(first_of[kind])
        else:
            reruns.append(_rerun(first, device, compiled=compiled))
            first_of.setdefault(kind, reruns[-1])
    return reruns


class RerunsAtOnce:
    """Recomputes stages as soon as they have run, so that nothing of them is held.

    Args:
        kinds, device: the same as for ``rerun_stages``.
    """

    def __init__(self, kinds: Sequence[int], device: torch.device) -> None:
        self._kinds, self._device = kinds, device
        self._first_of: dict[int, RerunTimes] = {}
        self._reruns: dict[int, RerunTimes] = {}
        self._inputs: dict[int, list[tuple[Tensor, int]]] = {}  # what counts their changes

    def run(self, position: int, first: FirstRun) -> None:
        """Recomputes a stage, unless one like it has been."""
        known = self._first_of.get(self._kinds[position])
        if known is None or known.failure:
            known = _rerun(first, self._device, compiled=False)
            self._first_of.setdefault(self._kinds[position], known)
        self._reruns[position] = known
        plain = [t for t in tensors_in(first.arguments) if type(t) in PLAIN_OR_FAKE and has_storage(t)]
        self._inputs[position] = [(change_counter(t), version_of(t)) for t in plain if not t.is_inference()]

    def finished(self) -> list[RerunTimes]:
        """Returns the times of each stage, once the forward is over."""
        changed = set().union(*gathered({k for k in range(len(self._kinds)) if self._changed(k)}))
        return [
            RerunTimes(failure=_CHANGED_AFTERWARDS) if position in changed else self._reruns[position]
            for position in range(len(self._kinds))
        ]

    def _changed(self, position: int) -> bool:
        return any(version_of(counter) != version for counter, version in self._inputs[position])


def _rerun(first: FirstRun, device: torch.device, *, compiled: bool) -> RerunTimes:
    timed, raised = RerunTimes(), None
    try:
        failure = _why_not_the_same(first, device, compiled=compiled)
        timed = _timed(first, device)
    except Exception as error:  # noqa: BLE001 - user code runs here; whatever it raises, it cannot be recomputed.
        failure, raised = f"recomputing it fails: {error}", error
    return replace(timed, failure=first_failure(failure, raised))


def _why_not_the_same(first: FirstRun, device: torch.device, *, compiled: bool) -> str:
    """Returns the difference of a recomputation, or what it leaves behind; empty for none."""
    args, kwargs = in_new_containers(first.arguments)
    with EscapedTensors() as escaped:

        def call(*args: Any, **kwargs: Any) -> Any:
            output = first.call(*args, **kwargs)
            escaped.note_stored(first.state.tensors_now())  # The recomputation takes back what modules store.
            return output

        saved, output = rerun_keeping(call, first.state, args, kwargs)
    if compiled or first.state.casts():  # Under a dispatch mode it ran uncompiled, and kernels cast nothing themselves.
        args, kwargs = in_new_containers(first.arguments)
        saved, output = rerun_keeping(first.call, first.state, args, kwargs)
    difference = _difference(first, saved, output, device)
    del saved, output, args, kwargs
    if escaped.any_left():
        return difference or STORES
    return difference


def _difference(first: FirstRun, saved: list[Tensor], output: Any, device: torch.device) -> str:
    if [(sizes_of(t), t.dtype) for t in saved] != first.saved:
        return _OTHER_SAVES
    for before, after in zip(_parts_in(first.output), _parts_in(output), strict=True):
        # GPU kernels may add in another order; a wrong mask or input differs by far more than this.
        tolerance = 0.0 if device.type == "cpu" else 0.05
        if not torch.allclose(before, after, rtol=tolerance, atol=tolerance, equal_nan=True):
            return _OTHER_RESULT
    return ""


def _timed(first: FirstRun, device: torch.device) -> RerunTimes:
    args, kwargs = in_new_containers(first.arguments)
    check = SignatureCheck(first.signatures)

    def saw(tensor: Tensor) -> bool:
        check.saw(tensor)
        return True

    asked = _now(device)
    with first.state.units.gathered():  # Before its backward they are there.
        begin = _now(device)
        rerun_until_saved(first.call, first.state, args, kwargs, len(first.saved), saw)
        return RerunTimes(seconds=_now(device) - begin, gather_seconds=begin - asked)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return host_seconds()


def _parts_in(tree: Any) -> list[Tensor]:
    return [part for tensor in tensors_in(tree) for part in parts_of(tensor)]


class EscapedTensors(TorchDispatchMode):
    """Tells, once all results are let go, whether a storage that ops inside have made is still held by anything."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[weakref.ref[Any]] = []
        self._stored = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any_distributed(types):
            return NotImplemented
        known = {id(storage_of(t)) for t in tensors_in((args, kwargs)) if t.layout is torch.strided}
        output = func(*args, **(kwargs or {}))
        if SHARDING.get():  # Threads of the ranks' communication let go of what it gathered when they come to it.
            return output
        for tensor in tensors_in(output):
            if tensor.layout is torch.strided and id(storage := storage_of(tensor)) not in known:
                self._storages.append(weakref.ref(storage))
        return output

    def note_stored(self, tensors: Iterable[Tensor]) -> None:
        """These are stored now, by somebody who will have let go of them when ``any_left`` is asked."""
        made = {id(storage) for reference in self._storages if (storage := reference()) is not None}
        strided = (tensor for tensor in tensors if tensor.layout is torch.strided)
        self._stored = self._stored or any(id(storage_of(tensor)) in made for tensor in strided)

    def any_left(self) -> bool:
        """Whether a storage made inside is still alive, or was stored, cyclic garbage aside."""
        if self._stored:
            return True
        if not any(reference() is not None for reference in self._storages):
            return False
        gc.collect()
        return any(reference() is not None for reference in self._storages)
