"""The watch: a dispatch mode over those modules of a stage in which ops run again, and over no others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.recomputation.module_rerun import RUNNING_AGAIN
from profiler.recomputation.op_schema import traits_of
from profiler.recomputation.op_tape import OpTape
from profiler.recomputation.selection import ModuleSwitch, Selection
from profiler.workload.forward_patches import replace_forward, reset_forward

_NOTHING = nullcontext()


class RecordingMode(TorchDispatchMode):
    """Counts the ops of one call in the watched modules, and has those recorded that will run again.

    A dispatch mode costs about 5 microseconds an op, so it is left while a module runs in which nothing runs again.
    """

    def __init__(self, tape: OpTape, module: nn.Module, selection: Selection) -> None:
        super().__init__()
        self._tape = tape
        self._expected, self._writing = _overloads(selection.ops)
        self._rerun = selection.rerun
        self._turns = _turning(module, selection)
        self._ordinal = 0
        self._diverged: int | None = None
        self._watching = False
        self._entered = False
        self._hooks: Any = None
        self._hooked = False
        self._depth = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would wrap ``__torch_dispatch__`` so that Dynamo leaves it alone, at several microseconds an op;
        # a watched stage runs outside of what Dynamo compiles anyway.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._watching or self._diverged is not None or RUNNING_AGAIN.get() != self._depth:
            return func(*args, **(kwargs or {}))
        ordinal = self._ordinal
        if ordinal >= len(self._expected) or func is not self._expected[ordinal]:
            self._diverged = ordinal
            self._tape.settle()
            return func(*args, **(kwargs or {}))
        self._ordinal = ordinal + 1
        if ordinal in self._rerun:
            return self._tape.run(ordinal, func, args, kwargs or {})
        if ordinal in self._writing:
            self._tape.spoil(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def turned(self, watching: bool, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call watched, or not."""
        if watching == self._watching:
            return call(*args, **kwargs)
        leave = not watching and torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1) is self
        enter = watching and not self._entered
        self._watching = watching
        if enter or leave:
            self._set(enter)
        try:
            return call(*args, **kwargs)
        finally:
            self._watching = not watching
            if enter or leave:
                self._set(leave)

    def _set(self, entered: bool) -> None:
        self._entered = entered
        if entered:
            self.__enter__()
        else:
            self.__exit__(None, None, None)

    def whole(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the stage's own call inside ``turns``."""
        own = next((turn for module, turn in self._turns if module is None), None)
        return call(*args, **kwargs) if own is None else self._turn(own, call, *args, **kwargs)

    @contextmanager
    def turns(self, hooks: Any) -> Iterator[None]:
        """Inside, modules at which something changes make it do so.

        Args:
            hooks: for tensors that autograd saves there; None where hooks of the caller see all of them.
        """
        self._depth = RUNNING_AGAIN.get()
        self._hooks = hooks
        replaced = [
            (module, replace_forward(module, functools.partial(self._turn, turn, module.forward)))
            for module, turn in self._turns
            if module is not None
        ]
        try:
            yield
        finally:
            self._hooks = None  # They refer to the call, and so to what the tape holds.
            for module, before in reversed(replaced):  # One module may stand there twice.
                reset_forward(module, before)

    def _turn(self, turn: ModuleSwitch, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # As the trace did not tell modules apart there.
            return forward(*args, **kwargs)
        watching = self._watching if turn.watched is None else turn.watched
        if not turn.saves or self._hooks is None or self._hooked:
            return self.turned(watching, forward, args, kwargs)
        self._hooked = True
        try:
            with self._hooks:
                return self.turned(watching, forward, args, kwargs)
        finally:
            self._hooked = False

    def unseen(self, tensor: Tensor) -> AbstractContextManager[Any]:
        """Inside, what is done with ``tensor`` is no op of the call."""
        if type(tensor) is Tensor or not self._watching:
            return torch._C._DisableTorchDispatch() if self._watching else _NOTHING
        return self._paused()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Slower, but right for subclasses of tensors, which need torch's dispatch themselves."""
        self._watching = False
        try:
            yield
        finally:
            self._watching = True

    def finish(self) -> int | None:
        """The call is over: where it diverged; fewer ops than expected are a divergence too."""
        if self._diverged is None and self._ordinal != len(self._expected):
            self._diverged = self._ordinal
        return self._diverged


def _turning(module: nn.Module, selection: Selection) -> list[tuple[nn.Module | None, ModuleSwitch]]:
    """The turns with their modules; None for the stage itself. Modules that are not there any more turn nothing."""
    found = [(_module_at(module, turn.module) if turn.module else None, turn) for turn in selection.turns]
    return [(inner, turn) for inner, turn in found if inner is not None or not turn.module]


def _module_at(stage: nn.Module, name: str) -> nn.Module | None:
    found: Any = stage
    for part in name.split("."):
        # Its own table is read several times as fast; a compiled module passes on what it wraps.
        found = found._modules.get(part) or getattr(found, part, None)
        if not isinstance(found, nn.Module):
            return None
    return found


@functools.lru_cache(maxsize=256)
def _overloads(names: tuple[str, ...]) -> tuple[tuple[Any, ...], frozenset[int]]:
    """The ops of these names, and which of them change something in place."""
    found = tuple(_overload(name) for name in names)
    return found, frozenset(k for k, op in enumerate(found) if op is None or traits_of(op).changes_in_place)


def _overload(name: str) -> Any:
    """``torch.ops.aten.mm.default`` of ``aten.mm.default``; None of what is no plain op here."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
