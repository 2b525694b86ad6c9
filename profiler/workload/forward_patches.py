"""Wrappers put in place of modules' ``forward``, and the forwards of before put back."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from profiler.workload.compiled_forwards import Forward, between_graphs, leave_frame_uncompiled

_OF_CLASS = object()  # stands for a forward that is not the instance's own


class PatchedForward:
    """A wrapper on one module; copies and pickles of the module get the forward of before instead."""

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
    """Whether a forward of the model or of a module in it is patched by a plan, or for a measurement."""
    return any(isinstance(module.__dict__.get("forward"), PatchedForward) for module in model.modules())


def replace_forward(module: nn.Module, forward: Forward) -> Any:
    """Make ``forward`` the instance's own; returns what ``reset_forward`` needs to undo it."""
    before = module.__dict__.get("forward", _OF_CLASS)
    module.__dict__["forward"] = forward
    return before


def reset_forward(module: nn.Module, before: Any) -> None:
    """Undo ``replace_forward``, which returned ``before``."""
    if before is _OF_CLASS:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = before


class ForwardPatches:
    """Wrappers installed on instances' ``forward``, removable in reverse order.

    ``forward`` is patched and not ``__call__``, so that hooks of the user, of
    FSDP and of DDP stay outside. The module tree, names and state_dict do not change.

    Args:
        compile_safe: whether compiled code may call the modules, and copies and pickles be made of them. Without it a
            wrapper costs nothing but its own call, and does not count for ``is_patched``: a plan can be applied on
            top of it, and has to be taken off before it.
    """

    def __init__(self, *, compile_safe: bool = True) -> None:
        self._compile_safe = compile_safe
        self._undo: list[tuple[weakref.ref[nn.Module], Any, weakref.ref[Any]]] = []

    def wrap(self, module: nn.Module, wrapper: Callable[[Forward], Forward], what: str = "it is measured") -> None:
        """Replace ``module.forward`` by ``wrapper(module.forward)``; ``what`` says why compiled code ends there."""
        plain = module.forward
        patch = PatchedForward(module, wrapper, what) if self._compile_safe else functools.wraps(plain)(wrapper(plain))
        before = replace_forward(module, patch)
        self._undo.append((weakref.ref(module), before, weakref.ref(patch)))  # Whoever holds this holds no model.

    def remove(self) -> None:
        """Put every forward back as it was; calling it again does nothing."""
        while self._undo:
            module_ref, before, patch_ref = self._undo.pop()
            module, patch = module_ref(), patch_ref()
            if isinstance(patch, PatchedForward):
                patch.retire()
            # Where something else stands that holds the patch, it is not ours to remove.
            if module is not None and module.__dict__.get("forward") is patch:
                reset_forward(module, before)
