"""The flags of torch that hold for all models and decide how kernels compute: read, and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

_Flag = tuple[Callable[[], Any], Callable[[Any], object]]


def _of(owner: Any, name: str) -> _Flag:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _set_deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


_FLAGS: tuple[_Flag, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_num_threads, torch.set_num_threads),
    *(_of(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    (lambda: torch._C._get_mkldnn_enabled(), torch._C._set_mkldnn_enabled),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)


def current_flags() -> Callable[[], None]:
    """Read the flags; the returned function sets those that have changed since."""
    before: list[tuple[_Flag, Any]] = []
    for flag in _FLAGS:
        with contextlib.suppress(RuntimeError):  # torch refuses to read one that was set in its newer way.
            before.append((flag, flag[0]()))

    def restore() -> None:
        for (read, write), value in before:
            if read() != value:
                write(value)

    return restore
