"""``recompute`` has a function drop what it saves for backward, and run its ops again there."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from profiler.recomputation.op_schema import traits_of, why_not_rerunnable
from profiler.recomputation.op_tape import OpTape
from profiler.recomputation.outer_hooks import hooks_now, packing_by
from profiler.recomputation.saved_tensors import (
    PLAIN_TENSORS,
    SavedParameter,
    SavedTensor,
    TensorStandIn,
    is_there_anyway,
    unpack,
)
from profiler.tensors.local_tensors import any_distributed
from profiler.tensors.storages import storage_key

P = ParamSpec("P")
R = TypeVar("R")


def recompute(function: Callable[P, R]) -> Callable[P, R]:
    """A function that does what ``function`` does, and keeps nothing for backward but what it reads.

    With gradients enabled, the ops that it runs are recorded, and what autograd saves of their results is dropped.
    When backward asks for it, those ops run again, below autograd: the same kernels on the same inputs, with the same
    random numbers. The function's own code runs once, so what else it does it does once. Needs no plan, and may be
    used inside a model that is profiled and planned, inside ``torch.utils.checkpoint`` and inside itself. What must
    not run again (ops that communicate, that change what is not their own, that draw from a generator of their own)
    is kept.

    Args:
        function: a function, method, lambda, ``functools.partial`` or any other callable; works as a decorator.

    Returns:
        The wrapped function, with the name and the documentation of its own.

    Raises:
        ValueError: no callable, or one that returns before it has run (a generator, a coroutine).

    >>> act = recompute(torch.nn.functional.gelu)
    >>> act.__name__
    'gelu'
    """
    if not callable(function):
        raise ValueError(f"recompute: expected a function, got {type(function).__name__}; pass the function itself")
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_kind(function) for is_kind in kinds):
        raise ValueError(
            "recompute: expected a function that has run when it returns, got a generator or coroutine; "
            "wrap the functions that it calls"
        )

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():  # The compiler knows torch's own checkpoint and builds it into its graph.
            return checkpoint(function, *args, use_reentrant=False, **kwargs)  # type: ignore[return-value]
        return _RecomputedCall().run(function, args, kwargs)

    # A module's attributes are its own: they are not copied to the function.
    return functools.wraps(function, updated=() if isinstance(function, nn.Module) else ("__dict__",))(run)


class _RecomputedCall:
    """One call of such a function."""

    def __init__(self) -> None:
        self._outer_hooks = hooks_now()
        self._recorder = _RerunnableOps()
        self._kept: list[SavedTensor] = []

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run it and return what it returns."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, unpack), self._recorder:
            output = function(*args, **kwargs)
        tape, kept = self._recorder.tape, self._kept
        tape.end_recording()
        tape.forget_unneeded()
        self._kept = []  # Nodes of the graph hold this call by its hooks, and must not hold tensors by it.
        if self._outer_hooks is not None:
            holder_of = packing_by(self._outer_hooks)
            tape.pass_inputs_on(holder_of)
            for saved in kept:
                saved.pass_on(holder_of)
        return output

    def _pack(self, tensor: Tensor) -> TensorStandIn:
        if is_there_anyway(tensor):
            return self._passed_on(SavedParameter(tensor))
        recomputed = self._recorder.tape.placeholder_of(tensor)
        if recomputed is not None:
            return recomputed
        with torch._C._DisableTorchDispatch() if type(tensor) in PLAIN_TENSORS else self._recorder.not_recording():
            kept = tensor.detach()
        return self._passed_on(SavedTensor(kept))

    def _passed_on(self, saved: SavedTensor) -> SavedTensor:
        if self._outer_hooks is not None:
            self._kept.append(saved)
        return saved


class _RerunnableOps(TorchDispatchMode):
    """Has every op recorded that may run again."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = OpTape()
        self._ordinal = 0
        self._read: set[int] = set()  # storages from outside that recorded ops read
        self._paused = False
        self._autocast = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any_distributed(types):
            return NotImplemented
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        given = _tensors((*args, *kwargs.values()))
        self._before_writing(func, args, kwargs)
        plain = all(type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided for tensor in given)
        traits = traits_of(func)
        if not plain or why_not_rerunnable(traits, args, kwargs):
            self.tape.keep_written(func, args, kwargs)
            with self._casting() if traits.casts else contextlib.nullcontext():
                return func(*args, **kwargs)
        self._read.update(storage_key(tensor) for tensor in given if self.tape.recomputed_storage_of(tensor) is None)
        self._ordinal += 1
        return self.tape.run(self._ordinal, func, args, kwargs)

    def _before_writing(self, func: Any, args: Any, kwargs: Any) -> None:
        """What was recorded cannot run again once an op changes what it reads from outside: it is kept instead."""
        traits = traits_of(func)
        if not traits.written:
            return
        outside = [t for t in traits.writes(args, kwargs) if self.tape.recomputed_storage_of(t) is None]
        if any(storage_key(tensor) in self._read for tensor in outside):
            self.tape.fill_all()
            self.tape.end_recording()
            self.tape = OpTape()
            self._read.clear()

    @contextmanager
    def _casting(self) -> Iterator[None]:
        """Autocast is on inside, as it was where the function began; torch turns it off below a mode."""
        with contextlib.ExitStack() as contexts:
            for kind in self._autocast:
                contexts.enter_context(torch.autocast(kind, dtype=torch.get_autocast_dtype(kind)))
            yield

    @contextmanager
    def not_recording(self) -> Iterator[None]:
        """Inside, ops are no ops of the function."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among an op's arguments; every op waits for this."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += _tensors(tuple(value))
    return tensors
