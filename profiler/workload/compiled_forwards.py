"""Compiled models and patched forwards: a wrapper runs between compiled graphs, what it calls is compiled by itself.

Dynamo would trace into a wrapper and lose what it does. So compiled code ends
before a patched forward, the wrapper runs with Dynamo off, and the module's own
forward is called with the compiler that was on before: in forward, and by
whoever calls it again in backward, where no compiler is on by itself.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame  # type: ignore[import-not-found]
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from profiler.workload.compiled_regions import compiled_region, region_of
from profiler.workload.tensor_trees import cached_by_identity

Forward = Callable[..., Any]
COMPILED = ", compiled"  # ends the precision of a profile whose model was compiled
_WRAPPED = "_orig_mod"  # the name under which the result of torch.compile(module) holds the module
_TO_LEAVE: set[str] = set()  # modules of which Dynamo has not been told yet


class CompiledForward:
    """A forward together with the compiler that was on when it was reached.

    The first call compiles it, or takes what fits of what has been compiled; later calls run the same code again.
    """

    def __init__(self, forward: Forward, module: nn.Module, compiler: Any) -> None:
        self.plain = forward
        self._region = region_of(module)
        self._settled = False
        self._compiler = compiler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_in_torch_dispatch_mode():
            return uncompiled(self.plain)(*args, **kwargs)
        before = set_eval_frame(self._compiler)
        try:
            return self._region(self.plain, args, kwargs)
        finally:
            set_eval_frame(before)
            if not self._settled:
                self._region, self._settled = compiled_region(self._region), True


def between_graphs(wrapper: Callable[[Forward], Forward], forward: Forward, module: nn.Module, what: str) -> Forward:
    """``wrapper(forward)`` for compiled and uncompiled callers.

    Args:
        wrapper: the function that makes the one that runs in place of a forward.
        forward: the module's own; the wrapper gets it as a ``CompiledForward``
            where compiled code calls.
        module: the module of the forward.
        what: said where the compiler was told to make one graph of everything.
    """
    plain = wrapper(_uncompiled_under_modes(forward))

    def crossing(*args: Any, **kwargs: Any) -> Any:
        compiler = set_eval_frame(None)
        if compiler is None:
            return plain(*args, **kwargs)
        try:
            return wrapper(CompiledForward(forward, module, compiler))(*args, **kwargs)
        finally:
            set_eval_frame(compiler)

    _tell_dynamo()
    return torch.compiler.disable(crossing, recursive=False, reason=what)


def leave_uncompiled(module: str) -> None:
    """Dynamo will compile no frame of a module of ours; what it calls is not affected.

    Called as ``leave_uncompiled(__name__)`` by every module whose frames run while a compiler is on: saved-tensor
    hooks, for example, which are called from within the model's forward.
    """
    _TO_LEAVE.add(module)


def _tell_dynamo() -> None:
    from torch._dynamo import trace_rules  # Slow to import; models, optimizers and compilers have done so already.

    while _TO_LEAVE:
        trace_rules.add(_TO_LEAVE.pop())


leave_uncompiled(__name__)


def leave_frame_uncompiled(function: Any) -> None:
    """Dynamo compiles no frame of a function; it may trace into it, and what it calls is not affected."""
    _skip_code(function.__code__)


@cached_by_identity
def _skip_code(code: types.CodeType) -> None:
    from torch._dynamo.eval_frame import skip_code

    skip_code(code)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module itself, also where it is given as the result of ``torch.compile(module)``."""
    # Not by get: the modules of what torch.jit.script has made are no dict.
    return unwrapped(module._modules[_WRAPPED]) if _WRAPPED in module._modules else module  # type: ignore[arg-type]


def plain_name(name: str) -> str:
    """The name of a module without what ``torch.compile`` put in."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


def is_compiled(module: nn.Module) -> bool:
    """Whether the module or one within it is compiled by itself (and not only called by compiled code)."""
    return any(m._compiled_call_impl is not None or _is_compiled(m) for m in module.modules())


def _is_compiled(module: nn.Module) -> bool:
    return any(
        hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False)
        for forward in _forwards_of(module)
    )


def _forwards_of(module: nn.Module) -> tuple[Any, Any]:
    """Its forward and what a patch of ours stands for: compilers copy attributes of what they wrap, "plain" too."""
    return module.forward, getattr(module.forward, "plain", None)


def check_no_cuda_graphs(module: nn.Module, device: torch.device, who: str) -> None:
    """Refuse a model whose compiled code runs as CUDA graphs on this device.

    A graph's results lie in memory that its next run writes to, so nothing of it can be kept while it runs again.

    Raises:
        ValueError: with what to compile it with; ``who`` begins the message.
    """
    if device.type == "cuda" and any(map(_has_cuda_graphs, module.modules())):
        raise ValueError(
            f"{who}: the model is compiled with CUDA graphs (mode='reduce-overhead' or 'max-autotune'), whose results "
            "are overwritten when a stage runs again; compile it with mode='default' or 'max-autotune-no-cudagraphs'"
        )


def _has_cuda_graphs(module: nn.Module) -> bool:
    for forward in (module._compiled_call_impl, *_forwards_of(module)):
        config_of = getattr(forward, "get_compiler_config", None)
        if config_of is not None and (config_of() or {}).get("triton.cudagraphs"):
            return True
    return False


def uncompiled(forward: Forward) -> Forward:
    """The forward without what is compiled of it or in it; patches of ours stay."""
    patch = getattr(forward, "patch", None)
    # Compilers copy the attributes of what they wrap: only what a patch itself installed is one.
    is_patch = patch is not None and getattr(patch, "installed", None) is forward
    plain = forward if is_patch else getattr(forward, "plain", forward)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return plain(*args, **kwargs)

    return call


def _uncompiled_under_modes(forward: Forward) -> Forward:
    """Keeps Dynamo from code under a dispatch mode: it would skip the code object for good."""
    bare = uncompiled(forward)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (bare if is_in_torch_dispatch_mode() else forward)(*args, **kwargs)

    call.plain = forward  # type: ignore[attr-defined]
    return call
