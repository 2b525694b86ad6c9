"""What torch keeps beside tensors and modules and what kernels read: flags, autocast, the default device and the like.

Recorded in a first run and reinstated for a second one, which may come after the contexts around the first have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any

import torch
from torch.nn.utils import parametrize

from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.torch_flags import flags_now, set_flags

leave_uncompiled(__name__)

_C: Any = torch._C
_Autocast = tuple[tuple[str, bool, torch.dtype], ...]


class TorchState:
    """The state as it is now, for a call whose arguments lie on ``device``."""

    __slots__ = ("_autocast", "_cached_parametrizations", "_flags", "_function_modes")

    def __init__(self, device: torch.device) -> None:
        self._flags = flags_now()
        self._autocast = _autocast_state(("cpu",) if device.type == "cpu" else (device.type, "cpu"))
        self._function_modes = _function_modes()
        self._cached_parametrizations = _cached_parametrizations()

    @contextmanager
    def reinstated(self) -> Iterator[None]:
        """Inside, it is as it was when this was made; on leaving, as it was on entering."""
        with ExitStack() as contexts:
            # Each is put back from whatever it is then: what ends early may not have set back what it had set.
            flags = flags_now()
            contexts.callback(_put_back_flags, flags)
            set_flags(self._flags, flags)
            contexts.callback(_set_autocast, _autocast_state(kind for kind, *_ in self._autocast[0]))
            _enter_autocast(contexts, *self._autocast)
            contexts.callback(_set_function_modes, _function_modes())
            _set_function_modes(self._function_modes)
            if self._cached_parametrizations is not None or parametrize._cache_enabled:
                contexts.callback(_set_cached_parametrizations, parametrize._cache, parametrize._cache_enabled)
                cached = self._cached_parametrizations
                _set_cached_parametrizations({} if cached is None else dict(cached), int(cached is not None))
            yield


def _put_back_flags(flags: list[Any]) -> None:
    set_flags(flags, flags_now())


def _autocast_state(kinds: Iterable[str]) -> tuple[_Autocast, bool]:
    states = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return states, torch.is_autocast_cache_enabled()


def _set_autocast(state: tuple[_Autocast, bool]) -> None:
    kinds, cache = state
    if state != _autocast_state(kind for kind, *_ in kinds):
        for kind, on, dtype in kinds:
            torch.set_autocast_enabled(kind, on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cache)


def _enter_autocast(contexts: ExitStack, kinds: _Autocast, cache: bool) -> None:
    if not any(on or torch.is_autocast_enabled(kind) for kind, on, _ in kinds):
        return  # Nothing to change; entering the contexts would cost time on small stages.
    for kind, on, dtype in kinds:
        contexts.enter_context(torch.autocast(kind, enabled=on, dtype=dtype, cache_enabled=cache))


def _function_modes() -> tuple[Any, ...]:
    """Those that are active, the default device's among them."""
    return tuple(_C._get_function_stack_at(k) for k in range(_C._len_torch_function_stack()))


def _set_function_modes(modes: tuple[Any, ...]) -> None:
    now = _function_modes()
    if len(modes) == len(now) and all(map(is_, modes, now)):
        return
    while _C._len_torch_function_stack():
        _C._pop_torch_function_stack()
    for mode in modes:  # Without entering them again: they are no contexts of their own a second time.
        _C._push_on_torch_function_stack(mode)


def _cached_parametrizations() -> dict[Any, Any] | None:
    """What ``parametrize.cached()`` holds; None outside of it."""
    return dict(parametrize._cache) if parametrize._cache_enabled else None


def _set_cached_parametrizations(cache: dict[Any, Any], enabled: int) -> None:
    parametrize._cache, parametrize._cache_enabled = cache, enabled  # type: ignore[assignment]  # narrower there
