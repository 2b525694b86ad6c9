"""Captured calls of a model's modules, kept as long as the model is: a plan need not trace again what was profiled."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import nn

from profiler.capture.call_guard import CallGuard
from profiler.capture.captured_call import CONTIGUOUS, CapturedCall, GradientLayouts, UnsettledError, capture_call
from profiler.workload.compiled_forwards import Forward, leave_uncompiled
from profiler.workload.forward_patches import users_forward

leave_uncompiled(__name__)


class Capture(NamedTuple):
    """A captured call, the module and the function that it is of, and what it takes for granted."""

    call: CapturedCall
    module: nn.Module
    guard: CallGuard
    gradients: GradientLayouts
    function: Any


_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, list[Capture]] = weakref.WeakKeyDictionary()
_MOST = 256  # of one model: the oldest go


def captures_of(model: nn.Module) -> list[Capture]:
    """The captures of a model's modules, the latest first."""
    return _OF_MODELS.get(model, [])


def captured(
    model: nn.Module,
    module: nn.Module,
    forward: Forward,
    args: Any,
    kwargs: Any,
    gradients: GradientLayouts = CONTIGUOUS,
) -> Capture:
    """Trace a call of one of a model's modules and keep the capture; arguments and errors as of ``capture_call``.

    Attributes that a first call sets, and those after it need not (a ``problem_type``), are set then.
    """

    def traced() -> tuple[CallGuard, CapturedCall]:
        return CallGuard(module, args, kwargs), capture_call(module, forward, args, kwargs, gradients)

    try:
        guard, call = traced()
    except UnsettledError as error:
        if not error.changes:
            raise
        try:
            for change in error.changes:
                change.make()
            guard, call = traced()
        except BaseException:  # Whatever ends it, the module is left as it was.
            for change in error.changes:
                change.undo()
            raise
    capture = Capture(call, module, guard, gradients, users_forward(forward))
    if module is not model:  # Captures hold their modules.
        kept = _OF_MODELS.setdefault(model, [])
        kept.insert(0, capture)
        del kept[_MOST:]
    return capture
