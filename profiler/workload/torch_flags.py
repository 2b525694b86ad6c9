"""The flags of torch that hold for all models and decide how kernels compute: read, set, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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


# Each a function that reads a flag and one that writes it.
_FLAGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (_deterministic, _set_deterministic),
    (_C._get_deterministic_fill_uninitialized_memory, _C._set_deterministic_fill_uninitialized_memory),
    (_precisions, _set_precisions),
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    *((getattr(_C, f"_get_{kind}_sdp_enabled"), getattr(_C, f"_set_sdp_use_{kind}"))
      for kind in ("flash", "mem_efficient", "math", "cudnn", "overrideable")),
    *((getattr(_C, f"_get_{flag}"), getattr(_C, f"_set_{flag}"))
      for flag in ("mkldnn_enabled", "mkldnn_deterministic", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic",
                   "nnpack_enabled", "linalg_preferred_backend") if hasattr(_C, f"_get_{flag}")),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
]  # fmt: skip
_READERS = tuple(read for read, _ in _FLAGS)


def flags_now() -> list[Any]:
    """The flags that kernels read."""
    return [read() for read in _READERS]


def set_flags(flags: list[Any], now: list[Any]) -> None:
    """Set those flags that are others now."""
    if flags == now:
        return  # As nearly always.
    for (_, write), flag, is_now in zip(_FLAGS, flags, now, strict=True):
        if flag != is_now:
            write(flag)


class with_flags:  # as torch.no_grad; a generator would take longer, and ops that run again ask often
    """Inside, where nothing sets any, the flags are these; on leaving, as on entering."""

    __slots__ = ("_before", "_flags")

    def __init__(self, flags: list[Any]) -> None:
        self._flags = flags

    def __enter__(self) -> None:
        self._before = flags_now()
        set_flags(self._flags, self._before)

    def __exit__(self, *error: object) -> None:
        set_flags(self._before, self._flags)


def current_flags() -> Callable[[], None]:
    """Read the flags; the returned function sets those that have changed since."""
    before = flags_now()
    return lambda: set_flags(before, flags_now())
