"""What torch keeps for all models, read, set and put back: flags that decide how kernels compute, and its stacks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch as dispatch

_C: Any = torch._C
# By what kernels of each kind compute in float32 where they may do so with fewer bits.
_PRECISIONS = (
    *(("generic", "all"), ("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
    *(
        (("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"))
        if torch.backends.cuda.is_built()
        else ()
    ),
)


def _precisions() -> tuple[Any, ...]:
    try:
        of_matmul = _C._get_float32_matmul_precision()
    except RuntimeError:  # It was set place by place, to what none of its three names means.
        of_matmul = None
    return (of_matmul, *(_C._get_fp32_precision_getter(*place) for place in _PRECISIONS))


def _set_precisions(values: tuple[Any, ...]) -> None:
    if values[0] is not None:
        _C._set_float32_matmul_precision(values[0])  # It sets some of the others along with it.
    for place, value in zip(_PRECISIONS, values[1:], strict=True):
        _C._set_fp32_precision_setter(*place, value)


def _deterministic() -> tuple[bool, bool]:
    return _C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()


def _set_deterministic(values: tuple[bool, bool]) -> None:
    _C._set_deterministic_algorithms(values[0], warn_only=values[1])


_Flag = tuple[Callable[[], Any], Callable[[Any], Any]]  # a function that reads it, and one that writes it


def _of_torch(*names: str) -> list[_Flag]:
    """Flags that this build has."""
    return [(getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}")) for name in names if hasattr(_C, f"_get_{name}")]


_OF_OPS: list[_Flag] = [  # by which functions choose the ops that they call
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, _set_deterministic),
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    *((getattr(_C, f"_get_{kind}_sdp_enabled"), getattr(_C, f"_set_sdp_use_{kind}"))
      for kind in ("flash", "mem_efficient", "math", "cudnn", "overrideable")),
    *_of_torch("mkldnn_enabled", "cudnn_enabled"),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
]  # fmt: skip
_FLAGS = [
    *_OF_OPS,
    # The others are read by kernels, as they run.
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (_C._get_deterministic_fill_uninitialized_memory, _C._set_deterministic_fill_uninitialized_memory),
    (_precisions, _set_precisions),
    *_of_torch(
        "mkldnn_deterministic",
        "cudnn_benchmark",
        "cudnn_deterministic",
        "nnpack_enabled",
        "linalg_preferred_backend",
    ),
]
_READERS = tuple(read for read, _ in _FLAGS)
_READERS_OF_OPS = _READERS[: len(_OF_OPS)]


def flags_now() -> list[Any]:
    """The flags that kernels read."""
    return [read() for read in _READERS]


def same_ops_chosen(flags: list[Any]) -> bool:
    """Whether the flags by which functions choose their ops are as they were when ``flags_now`` gave these."""
    return [read() for read in _READERS_OF_OPS] == flags[: len(_READERS_OF_OPS)]


def set_flags(flags: list[Any], now: list[Any]) -> None:
    """Set those flags that are others now."""
    if flags == now:
        return  # As nearly always.
    for (_, write), flag, is_now in zip(_FLAGS, flags, now, strict=True):
        if flag != is_now:
            write(flag)


def current_flags() -> Callable[[], None]:
    """Read the flags; the returned function sets those that have changed since."""
    before = flags_now()
    return lambda: set_flags(before, flags_now())


_IN_MODE = tuple(name for name in vars(dispatch) if name.startswith("_is_in_") and type(vars(dispatch)[name]) is bool)


class stacks_kept:  # a generator would take longer, and this is around every forward and every second run
    """Where an error leaves this, modes, saved-tensor hooks and whether gradients are on are as on entering.

    Torch enters and leaves a mode in several lines of Python. An interrupt between two of them leaves on what no exit
    will ever take off, and under a mode nothing is compiled any more.
    """

    __slots__ = ("_gradients", "_hooks", "_in_mode", "_modes")

    def __enter__(self) -> None:
        self._modes = dispatch._get_current_dispatch_mode_stack()
        self._in_mode = [getattr(dispatch, name) for name in _IN_MODE]
        self._hooks = _C._autograd._top_saved_tensors_default_hooks(False)
        self._gradients = torch.is_grad_enabled()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._put_back()

    def _put_back(self) -> None:
        while dispatch._len_torch_dispatch_stack():
            dispatch._pop_mode()
        for mode in self._modes:
            dispatch._push_mode(mode)
        for name, value in zip(_IN_MODE, self._in_mode, strict=True):
            setattr(dispatch, name, value)
        if "_is_in_any_mode_without_ignore_compile_internals" in _IN_MODE:  # Torch's own C++ has it, too.
            dispatch.set_is_in_mode_without_ignore_compile_internals(
                dispatch._is_in_any_mode_without_ignore_compile_internals
            )
        hooks = _C._autograd
        while (top := hooks._top_saved_tensors_default_hooks(False)) is not None and top != self._hooks:
            hooks._pop_saved_tensors_default_hooks()
        if top is None and self._hooks is not None:
            hooks._push_saved_tensors_default_hooks(*self._hooks)
        _C._set_grad_enabled(self._gradients)


def under_transform() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is under way."""
    level = torch._C._functorch.maybe_current_level()  # type: ignore[attr-defined]  # without a stub
    return level is not None or forward_ad._current_level >= 0


def under_compiled_autograd() -> bool:
    """Whether compiled autograd is on: it asks for all that was saved before it runs anything of a backward."""
    enabled = getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False)
    return enabled or getattr(sys.modules.get("torch._dynamo.config"), "compiled_autograd", False)
