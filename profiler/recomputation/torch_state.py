"""What torch keeps beside tensors and modules and what kernels read: flags, autocast, the default device and the like.

Recorded in a first run and reinstated for a second one, which may come after the contexts around the first have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.utils import parametrize

from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)

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

_Autocast = tuple[tuple[str, bool, torch.dtype], ...]


class TorchState:
    """The state as it is now, for a call whose arguments lie on ``device``."""

    __slots__ = ("_autocast", "_cached_parametrizations", "_flags", "_function_modes")

    def __init__(self, device: torch.device) -> None:
        self._flags = flags_now()
        self._autocast = _autocast_state(device)
        self._function_modes = _function_modes()
        self._cached_parametrizations = _cached_parametrizations()

    @contextmanager
    def reinstated(self) -> Iterator[None]:
        """Inside, it is as it was when this was made; on leaving, as it was on entering."""
        with with_flags(self._flags), ExitStack() as contexts:
            _enter_autocast(contexts, *self._autocast)
            modes = _function_modes()
            if len(modes) != len(self._function_modes) or any(map(_differ, modes, self._function_modes)):
                contexts.callback(_set_function_modes, modes)
                _set_function_modes(self._function_modes)
            if self._cached_parametrizations is not None or parametrize._cache_enabled:
                contexts.callback(_set_cached_parametrizations, parametrize._cache, parametrize._cache_enabled)
                cached = self._cached_parametrizations
                _set_cached_parametrizations({} if cached is None else dict(cached), int(cached is not None))
            yield


def _differ(one: Any, other: Any) -> bool:
    return one is not other


def flags_now() -> list[Any]:
    """The flags that kernels read."""
    return [read() for read in _READERS]


@contextmanager
def with_flags(flags: list[Any]) -> Iterator[None]:
    """Inside, the flags are these; on leaving, as on entering."""
    now = flags_now()
    if now == flags:
        yield
        return
    changed = [k for k, value in enumerate(now) if value != flags[k]]
    _set_flags({k: flags[k] for k in changed})
    try:
        yield
    finally:
        _set_flags({k: now[k] for k in changed})


def _set_flags(values: dict[int, Any]) -> None:
    for k, value in values.items():
        _FLAGS[k][1](value)


def _autocast_state(device: torch.device) -> tuple[_Autocast, bool]:
    kinds = dict.fromkeys((device.type, "cpu"))
    states = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return states, torch.is_autocast_cache_enabled()


def _enter_autocast(contexts: ExitStack, kinds: _Autocast, cache: bool) -> None:
    if not any(on or torch.is_autocast_enabled(kind) for kind, on, _ in kinds):
        return  # Nothing to change; entering the contexts would cost time on small stages.
    for kind, on, dtype in kinds:
        contexts.enter_context(torch.autocast(kind, enabled=on, dtype=dtype, cache_enabled=cache))


def _function_modes() -> tuple[Any, ...]:
    """Those that are active, the default device's among them."""
    return tuple(_C._get_function_stack_at(k) for k in range(_C._len_torch_function_stack()))


def _set_function_modes(modes: tuple[Any, ...]) -> None:
    while _C._len_torch_function_stack():
        _C._pop_torch_function_stack()
    for mode in modes:  # Without entering them again: they are no contexts of their own a second time.
        _C._push_on_torch_function_stack(mode)


def _cached_parametrizations() -> dict[Any, Any] | None:
    """What ``parametrize.cached()`` holds; None outside of it."""
    return dict(parametrize._cache) if parametrize._cache_enabled else None


def _set_cached_parametrizations(cache: dict[Any, Any], enabled: int) -> None:
    parametrize._cache, parametrize._cache_enabled = cache, enabled  # type: ignore[assignment]  # narrower there
