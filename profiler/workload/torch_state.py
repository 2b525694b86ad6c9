"""The state of torch beside tensors and modules: flags that kernels read, autocast, the default device, its stacks.

They are read, set and put back; recorded in a first run, and reinstated for a recomputation, which may come after the
contexts around the first have ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from operator import is_
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch as dispatch

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


class stacks_kept:  # a generator would take longer, and this is around every forward and recomputation
    """Puts modes, saved-tensor hooks and the grad mode back as they were on entering where an error leaves this.

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


class _Reinstated:  # A class: a generator would be slower, and this surrounds every recomputation.
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
    """Returns the active modes, the default device's among them."""
    return tuple(_C._get_function_stack_at(k) for k in range(_C._len_torch_function_stack()))


def _set_function_modes(modes: tuple[Any, ...]) -> None:
    now = _function_modes()
    if len(modes) == len(now) and all(map(is_, modes, now)):
        return
    while _C._len_torch_function_stack():
        _C._pop_torch_function_stack()
    for mode in modes:  # Without entering them again: they are no contexts of their own here.
        _C._push_on_torch_function_stack(mode)


def _cached_parametrizations() -> dict[Any, Any] | None:
    """Returns the contents of ``parametrize.cached()``; None outside of it."""
    return dict(parametrize._cache) if parametrize._cache_enabled else None


def _set_cached_parametrizations(cache: dict[Any, Any], enabled: int) -> None:
    parametrize._cache, parametrize._cache_enabled = cache, enabled  # type: ignore[assignment]  # narrower there
