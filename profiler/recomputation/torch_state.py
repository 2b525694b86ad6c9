"""What torch keeps beside tensors and modules and what kernels read: flags, autocast, the default device and the like.

Recorded in a first run and reinstated for a second one, which may come after the contexts around the first have ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from operator import is_
from typing import Any

import torch
from torch.nn.utils import parametrize

from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.torch_flags import flags_now, same_ops_chosen, set_flags

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

    def casts(self) -> bool:
        """Whether autocast is on."""
        return any(on for _, on, _ in self._autocast[0])

    def is_now(self) -> bool:
        """Whether everything by which functions choose their ops is as it was when this was made."""
        modes = _function_modes()
        return (
            same_ops_chosen(self._flags)
            and self._autocast == _autocast_state(kind for kind, *_ in self._autocast[0])
            and len(modes) == len(self._function_modes)
            and all(map(is_, modes, self._function_modes))
            and self._cached_parametrizations == _cached_parametrizations()
        )

    def reinstated(self) -> _Reinstated:
        """A context: inside, it is as it was when this was made; on leaving, as it was on entering."""
        return _Reinstated(self)


class _Reinstated:  # A class: a generator would be slower, and this surrounds every second run.
    """Sets a recorded state, and restores on exit what was set on entry, even if the code inside ended early."""

    __slots__ = ("_before", "_contexts", "_recorded")

    def __init__(self, recorded: TorchState) -> None:
        self._recorded = recorded
        self._contexts: ExitStack | None = None

    def __enter__(self) -> None:
        recorded = self._recorded
        autocast = _autocast_state(kind for kind, *_ in recorded._autocast[0])
        cache = parametrize._cache, parametrize._cache_enabled
        self._before = flags_now(), autocast, _function_modes(), cache
        try:
            set_flags(recorded._flags, self._before[0])
            if any(on for _, on, _ in (*recorded._autocast[0], *autocast[0])):
                self._contexts = ExitStack()
                for kind, on, dtype in recorded._autocast[0]:
                    context = torch.autocast(kind, enabled=on, dtype=dtype, cache_enabled=recorded._autocast[1])
                    self._contexts.enter_context(context)
            _set_function_modes(recorded._function_modes)
            cached = recorded._cached_parametrizations
            if cached is not None or parametrize._cache_enabled:
                _set_cached_parametrizations({} if cached is None else dict(cached), int(cached is not None))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        flags, autocast, modes, (cache, enabled) = self._before
        try:
            if enabled or parametrize._cache_enabled:
                _set_cached_parametrizations(cache, enabled)
            _set_function_modes(modes)
            if self._contexts is not None:
                self._contexts.close()
        finally:
            _set_autocast(autocast)
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
