"""Runs a training step on fake tensors, and counts the bytes and the seconds that it would take on a device.

Floating-point tensors are fake: they have a layout and a lifetime, and no values. Whole numbers (token ids, positions,
masks) are real as long as nothing but whole numbers went into them, so that code which looks at them takes the branch
that it takes in training. A storage counts from the op that makes it until nothing refers to it, autograd included,
which is how an allocator counts; the clock is advanced by what each op would take.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Larger tensors of whole numbers are fake as well.
MOST_REAL_BYTES = 64 * 2**20
_aten = torch.ops.aten


class OpCosts(Protocol):
    """Tells what ops take on a device."""

    def seconds(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
        """Returns how long an op takes."""
        ...

    def transient_bytes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        """Returns the most bytes that an op holds while it runs, beside its arguments and its result."""
        ...


class SimulatedDevice(TorchDispatchMode):
    """Counts what the ops inside take on a device that is not there.

    Args:
        costs: of ops on the device.

    Attributes:
        live_bytes: the bytes of all storages that are alive now.
        peak_bytes: the most since ``forget_peak``.
        seconds: the time that all ops so far would have taken.
    """

    def __init__(self, costs: OpCosts) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.seconds = 0.0
        self._costs = costs
        self._size_bytes: dict[int, int] = {}  # by storage

    def forget_peak(self) -> None:
        """The peak is what is alive now."""
        self.peak_bytes = self.live_bytes

    def hold(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor until it is gone."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._size_bytes:
            return
        self._size_bytes[key] = size_bytes = storage.nbytes()
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        # Torch keeps the Python object of a storage for as long as anything refers to the storage itself.
        weakref.finalize(storage, self._let_go, key)

    def _let_go(self, key: int) -> None:
        self.live_bytes -= self._size_bytes.pop(key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # Asks for a fake tensor's device.
            return func(*args, **kwargs)
        result = _run(func, args, kwargs)
        made = _tensors_in(result)
        transient_bytes = self._costs.transient_bytes(func, args, kwargs, result)
        for tensor in made:
            self.hold(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + transient_bytes)
        self.seconds += self._costs.seconds(func, args, kwargs, result)
        return result


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op on fake tensors, or for real where it makes whole numbers of whole numbers."""
    given = _tensors_in((args, kwargs))
    if any(isinstance(tensor, FakeTensor) for tensor in given):
        return _run_fake(func, args, kwargs, given)
    if func in _READERS:
        with unset_fake_temporarily():
            return func(*args, **kwargs)
    result = func(*args, **kwargs)
    if all(map(_is_whole, (*given, *_tensors_in(result)))):
        with unset_fake_temporarily():
            return func(*args, **kwargs)
    return result


# Ops that hand values to Python.
_READERS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.allclose.default}


def _run_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> Any:
    """Runs an op on fake tensors; whoever asks for their values is told what a step without accidents would show."""
    if func is _aten._local_scalar_dense.default:
        if given[0].dtype is torch.bool:
            return False
        return 1.0 if given[0].is_floating_point() else 1
    if func in _READERS:
        return True
    result = func(*args, **kwargs)
    if func._schema.name in ("aten::any", "aten::all") and result.dtype is torch.bool:
        with unset_fake_temporarily():  # Nothing is NaN, nothing lies outside of what is asked for.
            return torch.full(result.shape, func._schema.name == "aten::all")
    return result


def _is_whole(tensor: Tensor) -> bool:
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    return whole and tensor.layout is torch.strided and tensor.untyped_storage().nbytes() <= MOST_REAL_BYTES


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


_active: SimulatedDevice | None = None


def simulated_device() -> SimulatedDevice | None:
    """Returns the device that steps are simulated on now; None where they run on a real one."""
    return _active


@contextlib.contextmanager
def simulating(costs: OpCosts) -> Iterator[SimulatedDevice]:
    """Tensors that are made inside are fake, and ops count on a simulated device."""
    global _active
    if _active is not None:
        raise RuntimeError("simulating: a device is being simulated already; leave it first")
    device, fakes = SimulatedDevice(costs), FakeTensorMode(allow_non_fake_inputs=True)
    with fakes, device, _swaps_of(fakes):
        _active = device
        try:
            yield device
        finally:
            _active = None


@contextlib.contextmanager
def _swaps_of(fakes: FakeTensorMode) -> Iterator[None]:
    """Lets ``Module.to`` swap fake parameters: a mode remembers fakes by weak references, which ``swap_tensors`` refuses."""
    swap_tensors, remembered = torch.utils.swap_tensors, fakes.fake_tensor_converter.meta_converter.tensor_memo

    def swap(first: Tensor, second: Tensor) -> None:
        remembered.clear()
        swap_tensors(first, second)

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap_tensors
