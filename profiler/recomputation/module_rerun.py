"""Running a module call a second time so that it computes exactly what it computed the first time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.tensor_trees import map_tensors

leave_uncompiled(__name__)

Packed = TypeVar("Packed")
# How deep what runs now is a second run inside another one; 0 in a first run.
RERUN_DEPTH: ContextVar[int] = ContextVar("RERUN_DEPTH", default=0)


class _AllSaved(BaseException):
    """Raised inside a rerun once everything that backward needs has been made; no user code should catch it."""


class RerunError(RuntimeError):
    """A second run did not do what the first one did."""


class CallState:
    """What a call depends on besides its arguments, captured before its first run: autocast, random state, buffers.

    Random states and buffers are copied to host memory, outside the device's budget.

    Args:
        module: whose call it is.
        device: of its arguments.
        draws_random: it advances a random generator.
        mutated_buffers: names (relative to the module) of buffers that it changes.
    """

    __slots__ = ("_autocast", "_buffers", "_cpu_random", "_cuda_random", "_device", "_module")

    def __init__(
        self, module: nn.Module, device: torch.device, *, draws_random: bool, mutated_buffers: tuple[str, ...] = ()
    ) -> None:
        self._module = module
        self._device = device
        self._autocast = _autocast_state(device)
        self._cpu_random: Any = None
        self._cuda_random: Tensor | None = None
        if draws_random:
            self._cpu_random = torch.get_rng_state().numpy().copy()
            if device.type == "cuda":
                self._cuda_random = torch.cuda.get_rng_state(device)
        names = (*mutated_buffers, *_norm_buffers(module))
        self._buffers = {name: _value_before(module, name) for name in dict.fromkeys(names)}

    @contextmanager
    def reinstated(self) -> Iterator[None]:
        """Inside, everything is as before the first run; on leaving, it is as it was on entering."""
        buffers, autocast = _with_buffers(self._module, self._buffers), _with_autocast(self._autocast)
        with running_again(), _with_random_state(self), buffers, autocast:
            yield


@contextmanager
def running_again() -> Iterator[None]:
    """Inside, ops run for the second time: what records the ops of a first run leaves them out."""
    token = RERUN_DEPTH.set(RERUN_DEPTH.get() + 1)
    try:
        yield
    finally:
        RERUN_DEPTH.reset(token)


def rerun_dropping(call: Callable[..., Any], state: CallState, args: Any, kwargs: Any) -> Any:
    """Run again, keep nothing for backward, return the output cut off from the graph."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _not_to_be_unpacked)
    with state.reinstated(), torch.enable_grad(), hooks:
        return detached(call(*args, **kwargs))


def rerun_keeping(call: Callable[..., Any], state: CallState, args: Any, kwargs: Any) -> tuple[list[Tensor], Any]:
    """Run again to the end; returns what autograd saved, in order, and the output cut off from the graph."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> None:
        saved.append(tensor.detach())

    with state.reinstated(), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, _not_to_be_unpacked):
        output = detached(call(*args, **kwargs))
    return emptied(saved), output


def rerun_until_saved(
    call: Callable[..., Any], state: CallState, args: Any, kwargs: Any, expected: int
) -> list[Tensor]:
    """Run again only until ``expected`` tensors have been saved; returns them in order.

    Raises:
        RerunError: the call ended before.
    """
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> None:
        saved.append(tensor.detach())
        if len(saved) == expected:
            raise _AllSaved

    if expected == 0:
        return saved
    with state.reinstated(), torch.enable_grad():
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, _not_to_be_unpacked):
                call(*args, **kwargs)
        except _AllSaved:
            return emptied(saved)
    raise RerunError(
        f"expected {expected} tensors saved for backward as in the first run, got {len(saved)}; "
        "the call depends on something that changed in between (a cache, a counter, other inputs)"
    )


def emptied(saved: list[Packed]) -> list[Packed]:
    """Empty the hook's own list: a node that outlives the rerun (a tensor stored somewhere) keeps the hook alive."""
    taken = list(saved)
    saved.clear()
    return taken


def detached(tree: Any) -> Any:
    """The same tensors without their history; what required grad still does, and no leaf has become of it.

    A tensor that stands there several times is one tensor afterwards, too: attention asks whether its inputs are.
    """
    cuts: dict[int, Tensor] = {}

    def cut(tensor: Tensor) -> Tensor:
        if tensor.grad_fn is None:
            return tensor
        if id(tensor) not in cuts:
            with torch.enable_grad():
                cuts[id(tensor)] = _Cut.apply(_ANCHOR, [tensor])  # pyright: ignore[reportArgumentType]
        return cuts[id(tensor)]

    return map_tensors(cut, tree)


_ANCHOR = torch.zeros((), requires_grad=True)


class _Cut(torch.autograd.Function):
    """Gives the tensor in ``box`` another history: of one node, which is never walked.

    Autocast caches the casts of leaves, so with a leaf for its input a second run would cast, and save, less often than
    the first one did.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: list[Tensor]) -> Tensor:
        return box[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("a rerun's graph is never walked")


def _not_to_be_unpacked(_: Any) -> Tensor:
    raise AssertionError("a rerun's graph is never walked")


_NORMS: weakref.WeakKeyDictionary[nn.Module, list[tuple[str, _BatchNorm]]] = weakref.WeakKeyDictionary()


def _norm_buffers(module: nn.Module) -> list[str]:
    """Statistics of BatchNorms that are in training mode now, whatever they were when profiled."""
    norms = _NORMS.get(module)
    if norms is None:
        norms = [(name, inner) for name, inner in module.named_modules() if isinstance(inner, _BatchNorm)]
        _NORMS[module] = norms
    return [
        f"{name}.{leaf}" if name else leaf
        for name, norm in norms
        if norm.training and norm.track_running_stats
        for leaf in norm._buffers
    ]


def _value_before(module: nn.Module, name: str) -> Any:
    """The buffer's value before the first run; None where the result does not depend on it."""
    holder, leaf = _holder(module, name)
    # A BatchNorm that updates its statistics normalises by the batch's own: their old values are not needed.
    if isinstance(holder, _BatchNorm) and holder.training:
        return None
    buffer = holder._buffers[leaf]
    return None if buffer is None else _copy_of(buffer)


def _holder(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return module.get_submodule(owner), leaf


class _HostValues(NamedTuple):
    """A buffer's values, as bytes outside torch's allocator."""

    memory: bytearray
    shape: torch.Size
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        if not self.memory:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(self.memory, dtype=self.dtype).view(self.shape)


def _copy_of(buffer: Tensor) -> Any:
    """A copy of a buffer's values: on the CPU as bytes outside torch's allocator, so that it needs none of the budget.

    On a GPU it is a clone, because a copy to the host would wait for the device; the cost model counts it.
    """
    if buffer.device.type != "cpu":
        return buffer.detach().clone()
    # Not through numpy: torch never lets a storage be resized again that numpy has seen, and observers resize theirs.
    values = _HostValues(bytearray(buffer.nbytes), buffer.shape, buffer.dtype)
    values.tensor().copy_(buffer.detach())
    return values


def _write_values(buffer: Tensor, values: Any) -> None:
    tensor = values.tensor() if isinstance(values, _HostValues) else values
    # Through .data: the version counter, which autograd checks, stays as it was.
    if (tensor.shape, tensor.dtype) == (buffer.shape, buffer.dtype):
        buffer.data.copy_(tensor)
    else:
        buffer.data = tensor.clone()


@contextmanager
def _with_buffers(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    """The rerun sees the buffers as the first run did; on leaving, they are as they were: updated once."""
    before: list[tuple[nn.Module, str, Tensor, Tensor, Any]] = []
    try:
        for name, value in values.items():
            holder, leaf = _holder(module, name)
            buffer = holder._buffers[leaf]
            if buffer is None:
                continue
            before.append((holder, leaf, buffer, buffer.data, _copy_of(buffer)))
            if value is not None:
                _write_values(buffer, value)
        yield
    finally:
        for holder, leaf, buffer, placed, now in before:
            holder._buffers[leaf] = buffer
            if (buffer.shape, buffer.dtype, buffer.data_ptr()) != (placed.shape, placed.dtype, placed.data_ptr()):
                buffer.data = placed  # Its size was another one at the first run, or is now.
            _write_values(buffer, now)


@contextmanager
def _with_random_state(state: CallState) -> Iterator[None]:
    if state._cpu_random is None:
        yield
        return
    now = torch.get_rng_state().numpy().copy()
    cuda_now = torch.cuda.get_rng_state(state._device) if state._cuda_random is not None else None
    torch.set_rng_state(torch.from_numpy(state._cpu_random))
    if state._cuda_random is not None:
        torch.cuda.set_rng_state(state._cuda_random, state._device)
    try:
        yield
    finally:
        torch.set_rng_state(torch.from_numpy(now))
        if cuda_now is not None:
            torch.cuda.set_rng_state(cuda_now, state._device)


_Autocast = tuple[tuple[str, bool, torch.dtype], ...]


def _autocast_state(device: torch.device) -> tuple[_Autocast, bool]:
    kinds = dict.fromkeys((device.type, "cpu"))
    states = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return states, torch.is_autocast_cache_enabled()


@contextmanager
def _with_autocast(state: tuple[_Autocast, bool]) -> Iterator[None]:
    kinds, cache = state
    if not any(on or torch.is_autocast_enabled(kind) for kind, on, _ in kinds):
        yield  # Nothing to change; entering the contexts would cost time on small stages.
        return
    with ExitStack() as contexts:
        for kind, on, dtype in kinds:
            contexts.enter_context(torch.autocast(kind, enabled=on, dtype=dtype, cache_enabled=cache))
        yield
