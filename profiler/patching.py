"""Patched forwards: put a wrapper in front of a module's ``forward`` and take it off again."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]
_MISSING = object()


class PatchedForward:
    """A wrapper as it stands on one module; copies and pickles of the module get the plain forward instead."""

    def __init__(self, module: nn.Module, run: Forward) -> None:
        self._module = weakref.ref(module)
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        module = self._module()
        return plain_forward(memo.get(id(module), module))

    def __reduce__(self) -> tuple[Callable[[Any], Forward], tuple[Any]]:
        return plain_forward, (self._module(),)


def plain_forward(module: Any) -> Forward:
    """The forward that the module's class defines, bound to the module."""
    return types.MethodType(type(module).forward, module)


def is_patched(model: nn.Module) -> bool:
    """Whether a forward of the model or of a module in it is patched."""
    return any(isinstance(module.__dict__.get("forward"), PatchedForward) for module in model.modules())


class ForwardPatches:
    """Wrappers installed on instances' ``forward``, removable in reverse order.

    ``forward`` is patched and not ``__call__``, so that hooks of the user, of
    FSDP and of DDP stay outside. The module tree, names and state_dict do not change.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[weakref.ref[nn.Module], Any]] = []

    def wrap(self, module: nn.Module, wrapper: Callable[[Forward], Forward]) -> None:
        """Replace ``module.forward`` by ``wrapper(module.forward)``."""
        before = module.__dict__.get("forward", _MISSING)
        module.__dict__["forward"] = PatchedForward(module, wrapper(module.forward))
        self._undo.append((weakref.ref(module), before))

    def remove(self) -> None:
        """Put every forward back as it was; calling it again does nothing."""
        while self._undo:
            reference, before = self._undo.pop()
            module = reference()
            if module is None:
                continue
            if before is _MISSING:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before
