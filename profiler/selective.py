"""Running a stage call so that a choice of what it saves is kept, and the rest is made again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.op_traits import traits_of
from profiler.rerun import CallState, detached
from profiler.tape import Lazy, Tape

_PLAIN, _WATCHED, _TAPED = range(3)


@dataclass(frozen=True, slots=True)
class Selection:
    """What to do with the ops of a stage, by their ordinals.

    Attributes:
        ops: their names in order; a call that runs others does not follow the selection.
        rerun: ordinals of those that run again in backward; what all others make is kept where backward needs it.
    """

    ops: tuple[str, ...]
    rerun: frozenset[int]


class Kept:
    """In the graph: a saved tensor that is kept, with the version that autograd would have checked."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def tensor(self) -> Tensor:
        """The tensor; raises RuntimeError where it was changed in place, as autograd does."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(self._tensor.shape)} is at version {self._tensor._version}, "
                f"expected version {self._version}"
            )
        return self._tensor


class SelectiveCall:
    """One call of a stage under a selection.

    Attributes:
        diverged: the ordinal at which the call ran another op than the
            selection expects; None where it followed. From there on everything is kept.
    """

    def __init__(self, selection: Selection) -> None:
        self.diverged: int | None = None
        self._tape = Tape()
        self._selection = selection

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the call and return its output."""
        return self._run(call, args, kwargs, self._pack)

    def run_aside(self, call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        """Run the call for what it would save, in order; its own graph must not be walked."""
        saved: list[Any] = []

        def pack(tensor: Tensor) -> None:
            saved.append(self._pack(tensor))

        output = detached(self._run(call, args, kwargs, pack))
        taken = list(saved)
        saved.clear()  # A node that outlives the rerun (a tensor stored somewhere) keeps the hook alive.
        return taken, output

    def _run(self, call: Callable[..., Any], args: Any, kwargs: Any, pack: Callable[[Tensor], Any]) -> Any:
        mode = _Recording(self._tape, self._selection)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack), mode:
            output = call(*args, **kwargs)
        self.diverged = mode.finish()
        return output

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.is_leaf and tensor.requires_grad:
            return tensor
        remade = self._tape.remade_of(tensor) if tensor.layout is torch.strided else None
        if remade is not None:
            return Lazy(self._tape, remade, tensor)
        with torch._C._DisableTorchDispatch():
            return Kept(tensor.detach())


def unpack(packed: Any) -> Tensor:
    """The saved tensor itself."""
    return packed if isinstance(packed, Tensor) else packed.tensor()


def rerun_selecting(
    call: Callable[..., Any], state: CallState, args: Any, kwargs: Any, selection: Selection
) -> tuple[SelectiveCall, list[Any], Any]:
    """Run a call again under a selection: the run, what it saves in order, and the output cut off from the graph."""
    selective = SelectiveCall(selection)
    with state.reinstated(), torch.enable_grad():
        saved, output = selective.run_aside(call, args, kwargs)
    return selective, saved, output


class _Recording(TorchDispatchMode):
    """Counts the ops of a call, and has those recorded that will run again."""

    def __init__(self, tape: Tape, selection: Selection) -> None:
        super().__init__()
        self._tape = tape
        self._diverged: int | None = None
        self._expected, self._kinds = _script(selection)
        self._ordinal = 0
        self._follows = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        ordinal = self._ordinal
        self._ordinal = ordinal + 1
        if self._follows and (ordinal >= len(self._expected) or func is not self._expected[ordinal]):
            self._leave(ordinal)
        kind = self._kinds[ordinal] if self._follows else _WATCHED
        if kind == _TAPED:
            return self._tape.run(ordinal, func, args, kwargs or {})
        if kind == _WATCHED:
            self._tape.spoil(args, kwargs or {}, traits_of(func))
        return func(*args, **(kwargs or {}))

    def _leave(self, ordinal: int) -> None:
        self._follows = False
        self._diverged = ordinal

    def finish(self) -> int | None:
        """The call is over: where it diverged; fewer ops than expected are a divergence too."""
        if self._follows and self._ordinal != len(self._expected):
            self._leave(self._ordinal)
        return self._diverged


@functools.lru_cache(maxsize=256)
def _script(selection: Selection) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The ops as overloads, and how each is run."""
    expected = tuple(_overload(name) for name in selection.ops)
    return expected, tuple(_kind(k in selection.rerun, op) for k, op in enumerate(expected))


def _overload(name: str) -> Any:
    """``torch.ops.aten.mm.default`` of ``aten.mm.default``; None of what is no plain op here."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _kind(rerun: bool, op: Any) -> int:
    if rerun:
        return _TAPED
    written = op is None or traits_of(op).written or traits_of(op).written_names
    return _WATCHED if written else _PLAIN
