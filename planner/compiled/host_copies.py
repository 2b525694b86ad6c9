"""What the programs of a plan call to copy values to host memory and back.

Autograd saves a tensor without bytes in the place of each value that waits in host memory; it has the copy with it, so
the host memory goes when the graph does, whatever happens in a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from planner.runtime.applier import engine_on
from planner.runtime.copy_engine import CopyEngine, OffloadedCopy, PendingFetch, bytes_of
from planner.runtime.plan_checks import warn_once
from profiler.capture.programs import CopyCalls
from profiler.recomputation.saved_tensors import Geometry, geometry_of, tensor_over
from profiler.workload.compiled_forwards import leave_uncompiled
from solvers.problem.link import Link

leave_uncompiled(__name__)

_COPY = "_planner_copy"  # the attribute of the tensor that stands for a copy


class HostCopies:
    """Makes the copies of one applied plan.

    Args:
        model_class: of its model, for warnings.
        link: that the plan counts on.
        host_bytes: the most that it holds in host memory at once; allocated at the first copy, once.
    """

    def __init__(self, model_class: str, link: Link | None, host_bytes: int) -> None:
        self._model_class, self._link, self._host_bytes = model_class, link, host_bytes
        self._engines: dict[torch.device, CopyEngine | None] = {}

    @property
    def calls(self) -> CopyCalls:
        """For programs."""
        return CopyCalls(self.send, self.release, self.fetch, self.arrive)

    def send(self, *values: Tensor) -> Tensor:
        """Begin to copy the storage under all of these to host memory; returns what stands for the copy."""
        device = values[0].device
        if device not in self._engines:
            self._engines[device] = engine_on(device, self._link, self._host_bytes)
        engine = self._engines[device]
        with torch._C._DisableTorchDispatch():
            copy = None if engine is None else engine.send(bytes_of(values[0]))
            ticket = torch.empty(0, device="cpu")
        if copy is None and engine is not None:
            why = "host memory is full, with more than one step's values in it; the rest stays on the device"
            warn_once(self._model_class, f"{why}; the peak is not promised")
        setattr(ticket, _COPY, _SentValues(values, copy))
        return ticket

    def release(self, ticket: Tensor, *_: Tensor) -> None:
        """The computation waits for a copy, whose source may go then."""
        _sent(ticket).wait()

    def fetch(self, ticket: Tensor) -> _ValuesComing:
        """Begin to copy back."""
        return _sent(ticket).fetch()

    def arrive(self, coming: _ValuesComing, place: int) -> Tensor:
        """One of the values on the device; the computation waits until it has arrived."""
        return coming.value(place)


class _SentValues:
    """Values over one storage, in host memory; or themselves, where there is no room."""

    def __init__(self, values: tuple[Tensor, ...], copy: OffloadedCopy | None) -> None:
        self._geometries = [geometry_of(value) for value in values]
        self._copy = copy
        self._storage = values[0].untyped_storage() if copy is None else None

    def wait(self) -> None:
        if self._copy is not None:
            self._copy.wait()

    def fetch(self) -> _ValuesComing:
        with torch._C._DisableTorchDispatch():
            pending = None if self._copy is None else self._copy.fetch(keep=True)
        return _ValuesComing(self._geometries, pending, self._storage)


class _ValuesComing:
    """Values on their way back."""

    def __init__(
        self, geometries: list[Geometry], pending: PendingFetch | None, storage: torch.UntypedStorage | None
    ) -> None:
        self._geometries, self._pending, self._storage = geometries, pending, storage

    def value(self, place: int) -> Tensor:
        with torch._C._DisableTorchDispatch():
            if self._pending is not None:
                self._storage, self._pending = self._pending.wait().untyped_storage(), None
            assert self._storage is not None
            return tensor_over(self._storage, self._geometries[place])


def _sent(ticket: Tensor) -> _SentValues:
    sent = getattr(ticket, _COPY, None)
    if sent is None:
        raise RuntimeError(
            "a plan that sends values to host memory: expected saved tensors as its forward left them, got others; "
            "train without hooks on saved tensors (save_on_cpu), or solve without offloading"
        )
    return sent
