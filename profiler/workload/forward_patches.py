"""Patched forwards: put a wrapper in front of a module's ``forward`` and take it off again."""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from profiler.workload.compiled_forwards import Forward, between_graphs, leave_frame_uncompiled

_MISSING = object()


class PatchedForward:
    """A wrapper as it stands on one module; copies and pickles of the module get the forward of before instead."""

    def __init__(self, module: nn.Module, wrapper: Callable[[Forward], Forward], what: str) -> None:
        self._module = weakref.ref(module)
        self.plain: Forward = module.forward
        self._is_own = "forward" in module.__dict__
        self._run = between_graphs(wrapper, self.plain, module, what)
        leave_frame_uncompiled(PatchedForward.__call__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def retire(self) -> None:
        """Pass calls on to the plain forward from now on, for whoever still holds this object."""
        self._run = self.plain

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        if self._is_own:
            return copy.deepcopy(self.plain, memo)
        module = self._module()
        return plain_forward(memo.get(id(module), module))

    def __reduce__(self) -> tuple[Callable[[Any], Forward], tuple[Any]]:
        return (_itself, (self.plain,)) if self._is_own else (plain_forward, (self._module(),))


def _itself(forward: Forward) -> Forward:
    return forward


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
        self._undo: list[tuple[weakref.ref[nn.Module], Any, weakref.ref[PatchedForward]]] = []

    def wrap(self, module: nn.Module, wrapper: Callable[[Forward], Forward], what: str = "it is measured") -> None:
        """Replace ``module.forward`` by ``wrapper(module.forward)``; ``what`` says why compiled code ends there."""
        before = module.__dict__.get("forward", _MISSING)
        patched = module.__dict__["forward"] = PatchedForward(module, wrapper, what)
        self._undo.append(
            (weakref.ref(module), before, weakref.ref(patched))
        )  # Whoever holds this must not hold the model.

    def remove(self) -> None:
        """Put every forward back as it was; calling it again does nothing."""
        while self._undo:
            reference, before, patch = self._undo.pop()
            module, patched = reference(), patch()
            if patched is not None:
                patched.retire()
            if module is None or module.__dict__.get("forward") is not patched:
                continue  # Something else, which holds the patched one, stands there: it is not ours to remove.
            if before is _MISSING:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before
