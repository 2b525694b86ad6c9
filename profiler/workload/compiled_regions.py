"""The frames in which a patched module's own forward is compiled, one code object for each kind of module."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list  # type: ignore[import-not-found]

Region = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_OF_MODULE: weakref.WeakKeyDictionary[nn.Module, Region] = weakref.WeakKeyDictionary()
_OF_KIND: weakref.WeakKeyDictionary[type[nn.Module], dict[Any, Region]] = weakref.WeakKeyDictionary()


def region_of(module: nn.Module) -> Region:
    """The frame to call the module's forward in.

    Dynamo keeps compiled code by code object. Modules with the same class and
    parameters share one, so that equal blocks are compiled once; modules of
    different sizes do not, so that the sizes of one never become symbols in
    the code of another (nor do they use up each other's recompile limit).
    Modules of torch.nn need such a frame: Dynamo compiles none of torch's own.
    """
    region = _OF_MODULE.get(module)
    if region is None:
        kinds = _OF_KIND.setdefault(type(module), {})
        kind = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())
        if kind not in kinds:
            # A name of its own too: Dynamo knows by file, line and name which sizes have varied.
            name = f"{type(module).__name__}_{len(kinds)}"
            kinds[kind] = types.FunctionType(_region.__code__.replace(co_name=name), _region.__globals__, name)
        region = _OF_MODULE[module] = kinds[kind]
    return region


def compiled_region(region: Region) -> Region:
    """Returns the code of a region's last call without asking Dynamo which fits: code for other sizes may fit by now.

    The tensors that one code saves for backward need not be those that another expects there.
    """
    from torch._dynamo import config
    from torch._dynamo.eval_frame import skip_code

    entries = _debug_get_cache_entry_list(region.__code__)
    # Above the limit Dynamo may have run the frame uncompiled; below it, what ran stands first.
    if not 0 < len(entries) < config.recompile_limit:
        return region
    code = entries[0].code
    skip_code(code)
    return types.FunctionType(code, region.__globals__)


def _region(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)
