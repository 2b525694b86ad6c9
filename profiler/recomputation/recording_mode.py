"""The dispatch mode that records ops of a stage: on in those modules in which ops run again, and in no others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.recomputation.module_rerun import RERUN_DEPTH
from profiler.recomputation.op_schema import overload_of, traits_of
from profiler.recomputation.op_tape import OpTape
from profiler.recomputation.selection import ModuleSwitch, Selection
from profiler.tensors.local_tensors import any_distributed
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.forward_patches import OF_CLASS, replace_forward, reset_forward
from profiler.workload.sharded_units import SHARDING

leave_uncompiled(__name__)

_NO_CONTEXT = nullcontext()


class RecordingMode(TorchDispatchMode):
    """Counts the ops of one call in the modules that a selection names, and has those recorded that will run again.

    A dispatch mode costs about 5 microseconds an op, so it is left while a module runs in which nothing runs again.
    """

    def __init__(self, tape: OpTape, module: nn.Module, selection: Selection) -> None:
        super().__init__()
        self._tape = tape
        self._expected, self._writing = _overloads(selection.ops)
        self._rerun, self._packed = selection.rerun, selection.packed
        self._switches = _switches_in(module, selection)
        self._ordinal = 0
        self._diverged: int | None = None
        self._recording = False
        self._entered = False
        self._hooks: Any = None
        self._in_hooks = False
        self._rerun_depth = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would wrap ``__torch_dispatch__`` so that Dynamo leaves it alone, at several microseconds an op;
        # a stage that is recorded runs outside of what Dynamo compiles anyway.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any_distributed(types):
            return NotImplemented
        if (
            not self._recording
            or self._diverged is not None
            or RERUN_DEPTH.get() != self._rerun_depth
            or SHARDING.get()
        ):
            return func(*args, **(kwargs or {}))
        ordinal = self._ordinal
        if ordinal >= len(self._expected) or func is not self._expected[ordinal]:
            self._diverged = ordinal
            self._tape.fill_all()
            return func(*args, **(kwargs or {}))
        self._ordinal = ordinal + 1
        if ordinal in self._rerun:
            run = self._tape.run_packing if ordinal in self._packed else self._tape.run
            return run(ordinal, func, args, kwargs or {})
        if ordinal in self._writing:
            self._tape.keep_written(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _run_recording(self, recording: bool, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call with recording on or off."""
        if recording == self._recording:
            return call(*args, **kwargs)
        leave = not recording and torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1) is self
        enter = recording and not self._entered
        self._recording = recording
        if enter or leave:
            self._enter_or_exit(enter)
        try:
            return call(*args, **kwargs)
        finally:
            self._recording = not recording
            if enter or leave:
                self._enter_or_exit(leave)

    def _enter_or_exit(self, entered: bool) -> None:
        self._entered = entered
        if entered:
            self.__enter__()
        else:
            self.__exit__(None, None, None)

    def run_stage(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the stage's own call inside ``switching``."""
        switch = next((switch for module, switch in self._switches if module is None), None)
        return call(*args, **kwargs) if switch is None else self._run_switched(switch, call, *args, **kwargs)

    @contextmanager
    def switching(self, hooks: Any) -> Iterator[None]:
        """Inside, the selection's modules switch recording and hooks.

        Args:
            hooks: for tensors that autograd saves there; None where hooks of the caller see all of them.
        """
        self._rerun_depth = RERUN_DEPTH.get()
        self._hooks = hooks
        replaced: list[tuple[nn.Module, Any]] = []
        try:
            for module, switch in self._switches:
                if module is not None:
                    replaced.append((module, module.__dict__.get("forward", OF_CLASS)))
                    replace_forward(module, functools.partial(self._run_switched, switch, module.forward))
            yield
        finally:
            self._hooks = None  # They refer to the call, and so to what the tape holds.
            for module, before in reversed(replaced):  # One module may stand there twice.
                reset_forward(module, before)

    def _run_switched(self, switch: ModuleSwitch, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # As the trace did not tell modules apart there.
            return forward(*args, **kwargs)
        recording = self._recording if switch.recorded is None else switch.recorded
        if not switch.saves or self._hooks is None or self._in_hooks:
            return self._run_recording(recording, forward, args, kwargs)
        self._in_hooks = True
        try:
            with self._hooks:
                return self._run_recording(recording, forward, args, kwargs)
        finally:
            self._in_hooks = False

    def not_recording(self, tensor: Tensor) -> AbstractContextManager[Any]:
        """Inside, what is done with ``tensor`` is no op of the call."""
        if type(tensor) is Tensor or not self._recording:
            return torch._C._DisableTorchDispatch() if self._recording else _NO_CONTEXT
        return self._paused()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Slower, but right for subclasses of tensors, which need torch's dispatch themselves."""
        self._recording = False
        try:
            yield
        finally:
            self._recording = True

    def end_call(self) -> tuple[int | None, bool]:
        """The call is over; the op at which it diverged, if it did, and whether it only ended before the last one.

        Where it ends with the op that is expected last, something in the middle may have been left out: what followed
        was taken for that, and other ops will run again than were chosen.
        """
        run, expected = self._ordinal, self._expected
        if self._diverged is not None or run == len(expected):
            return self._diverged, False
        return run, run == 0 or expected[run - 1] is not expected[-1]


def _switches_in(module: nn.Module, selection: Selection) -> list[tuple[nn.Module | None, ModuleSwitch]]:
    """A selection's switches, each with its module (None: the stage itself), but for modules that are gone."""
    pairs = [(_module_at(module, switch.module) if switch.module else None, switch) for switch in selection.switches]
    return [(inner, switch) for inner, switch in pairs if inner is not None or not switch.module]


def _module_at(stage: nn.Module, name: str) -> nn.Module | None:
    module: Any = stage
    for part in name.split("."):
        # Its own table is read several times as fast; a compiled module passes on what it wraps.
        module = module._modules.get(part) or getattr(module, part, None)
        if not isinstance(module, nn.Module):
            return None
    return module


@functools.lru_cache(maxsize=256)
def _overloads(names: tuple[str, ...]) -> tuple[tuple[Any, ...], frozenset[int]]:
    """The ops of these names, and which of them change something in place."""
    ops = tuple(overload_of(name) for name in names)
    return ops, frozenset(k for k, op in enumerate(ops) if op is None or traits_of(op).written)
