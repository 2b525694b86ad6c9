"""Wrappers put in place of modules' ``forward``, and the forwards of before put back."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from profiler.workload.compiled_forwards import Forward, between_graphs, leave_frame_uncompiled
from profiler.workload.data_parallel import move_hooks_back, move_hooks_inside

OF_CLASS = object()  # stands for a forward that is not the instance's own


class PatchedForward:
    """A wrapper on one module; copies and pickles of the module have the forward of before instead.

    Attributes:
        plain: the forward of before.
        installed: the function to put in the forward's place: a method where that is one, with its signature.
        counts: whether ``is_patched`` counts it.
    """

    def __init__(
        self, module: nn.Module, wrapper: Callable[[Forward], Forward], what: str, *, counts: bool = True
    ) -> None:
        self._module = weakref.ref(module)
        self.counts = counts
        self.plain: Forward = module.forward
        self._run = between_graphs(wrapper, self.plain, module, what)
        of_module = isinstance(self.plain, types.MethodType) and self.plain.__self__ is module
        self.installed: Forward | None = self._as_method(module) if of_module else self._as_function()

    def retire(self) -> None:
        """Pass calls on to the plain forward from now on, for whoever still holds the installed one."""
        self._run, self.installed = self.plain, None  # No circle is left that would hold the module.

    def _acting(self) -> Forward:
        """The function that a call runs: an export cannot trace into the wrapper, and exports the model without it."""
        return self.plain if torch.compiler.is_exporting() else self._run

    def _as_method(self, module: nn.Module) -> Forward:
        def forward(owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if owner is not self._module():  # A copy that a class of the user's makes by itself has it, too.
                return plain_forward(owner)(*args, **kwargs)
            return self._acting()(*args, **kwargs)

        return types.MethodType(self._dressed(forward, self.plain.__func__), module)  # type: ignore[attr-defined]

    def _as_function(self) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._acting()(*args, **kwargs)

        return self._dressed(forward, self.plain)

    def _dressed(self, forward: Any, plain: Forward) -> Any:
        """Gives a function the name, docstring, annotations and signature of the plain one."""
        functools.update_wrapper(forward, plain, updated=())
        with contextlib.suppress(TypeError, ValueError):  # Code in C has none.
            forward.__signature__ = inspect.signature(plain)
        forward.plain, forward.patch = self.plain, self
        leave_frame_uncompiled(forward)
        return forward


def plain_forward(module: Any) -> Forward:
    """The forward that the module's class defines, bound to the module."""
    return types.MethodType(type(module).forward, module)


def users_forward(forward: Any) -> Any:
    """Returns the user's own forward, whatever module it is bound to, below all patches."""
    while (plain := getattr(forward, "plain", None)) is not None:
        forward = plain
    return getattr(forward, "__func__", forward)


def patch_of(forward: Any) -> PatchedForward | None:
    """The patch that installed a forward; None where it is the user's."""
    patch = getattr(forward, "patch", None)
    # Who wraps a function may take over its attributes.
    return patch if isinstance(patch, PatchedForward) and patch.installed is forward else None


def is_patched(model: nn.Module) -> bool:
    """Whether a forward of the model or of a module in it is patched by a plan, or for a measurement."""
    patches = (patch_of(module.__dict__.get("forward")) for module in model.modules())
    return any(patch is not None and patch.counts for patch in patches)


def replace_forward(module: nn.Module, forward: Forward) -> Any:
    """Make ``forward`` the instance's own; returns what ``reset_forward`` needs to undo it."""
    before = module.__dict__.get("forward", OF_CLASS)
    module.__dict__["forward"] = forward
    return before


def reset_forward(module: nn.Module, before: Any) -> None:
    """Undo ``replace_forward``, which returned ``before``."""
    if before is OF_CLASS:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = before


class ForwardPatches:
    """Wrappers installed on instances' ``forward``, removable in reverse order.

    ``forward`` is patched and not ``__call__``, so that hooks of the user and
    of DDP stay outside. Those of ``fully_shard`` move inside: what gathers the
    parameters is a part of the call. The module tree, names and state_dict do not change.

    Args:
        compile_safe: whether compiled code may call the modules, and copies and pickles be made of them. Without it a
            wrapper costs nothing but its own call, and does not count for ``is_patched``: a plan can be applied on
            top of it, and has to be taken off before it.
        counts: whether they count for ``is_patched``.
    """

    def __init__(self, *, compile_safe: bool = True, counts: bool = True) -> None:
        self._compile_safe, self._counts = compile_safe, counts
        self._undo: list[tuple[weakref.ref[nn.Module], Any, weakref.ref[Any], bool]] = []
        self._undo_with: list[Callable[[], None]] = []

    def wrap(
        self,
        module: nn.Module,
        wrapper: Callable[[Forward], Forward],
        what: str = "it is measured",
        *,
        inside_sharding: bool = False,
    ) -> None:
        """Replace ``module.forward`` by ``wrapper(module.forward)``; ``what`` says why compiled code ends there.

        ``inside_sharding``: parameters that ``fully_shard`` gathers for the call are there when the wrapper runs.
        """
        plain, before = module.forward, module.__dict__.get("forward", OF_CLASS)
        hooked = move_hooks_inside(module)
        if hooked is not None:
            outermost, around = wrapper, hooked
            if inside_sharding:
                wrapper = lambda forward: around(outermost(forward))  # noqa: E731 - it is called like the one before
            else:
                wrapper = lambda forward: outermost(around(forward))  # noqa: E731 - the same
        if self._compile_safe:
            installed = PatchedForward(module, wrapper, what, counts=self._counts).installed
            assert installed is not None
            _COPIED.add(module)
        else:
            installed = functools.wraps(plain)(wrapper(plain))
            installed.plain = plain  # type: ignore[attr-defined]
        # Whoever holds this holds no model. Noted first: whatever interrupts, it is taken off again.
        self._undo.append((weakref.ref(module), before, weakref.ref(installed), hooked is not None))
        replace_forward(module, installed)

    @property
    def is_undone(self) -> bool:
        """Whether somebody else has put one of the forwards from below in the place of the first wrapper's."""
        if not self._undo:
            return False
        module_ref, _, installed_ref, _ = self._undo[0]
        module, below = module_ref(), installed_ref()
        if module is None or below is None:
            return module is not None
        while (below := getattr(below, "__wrapped__", None)) is not None:
            if getattr(below, "__func__", below) is getattr(module.forward, "__func__", module.forward):
                return True
        return False

    def undo_with(self, undo: Callable[[], None]) -> None:
        """Call this as well when the wrappers are removed."""
        self._undo_with.append(undo)

    def remove(self) -> None:
        """Put every forward back as it was; calling it again does nothing."""
        while self._undo_with:
            self._undo_with.pop()()
        while self._undo:
            module_ref, before, installed_ref, hooked = self._undo[-1]
            module, installed = module_ref(), installed_ref()
            if (patch := patch_of(installed)) is not None:
                patch.retire()
            # Where something else stands that holds the patch, it is not ours to remove.
            if module is not None and installed is not None and module.__dict__.get("forward") is installed:
                reset_forward(module, before)
            if module is not None and hooked:
                move_hooks_back(module)
            self._undo.pop()
        _COPIED.forget()


class _CopiedModules:
    """Sees to it that copies and pickles of patched modules hold no patch, where their class has no say in it.

    ``copy`` and ``pickle`` ask ``copyreg`` first: a class has an entry there while a module of it is patched.
    """

    def __init__(self) -> None:
        self._patched: dict[type[nn.Module], weakref.WeakSet[nn.Module]] = {}

    def add(self, module: nn.Module) -> None:
        """The module is about to be patched."""
        kind = type(module)
        if kind not in self._patched and kind not in copyreg.dispatch_table:
            self._patched[kind] = weakref.WeakSet()
            copyreg.pickle(kind, _reduced)  # pyright: ignore[reportArgumentType]
        if kind in self._patched:
            self._patched[kind].add(module)

    def forget(self) -> None:
        """Take out the entries of classes of which none is patched any more."""
        for kind, modules in [*self._patched.items()]:
            if not any(patch_of(module.__dict__.get("forward")) for module in modules):
                del self._patched[kind]
                copyreg.dispatch_table.pop(kind, None)


_COPIED = _CopiedModules()


def _reduced(module: nn.Module) -> Any:
    """Returns the parts of a copy: as without the entry in ``copyreg``, but for the patch."""
    value = module.__reduce_ex__(4)
    patch = patch_of(module.__dict__.get("forward"))
    if patch is None or not isinstance(value, tuple) or len(value) < 3:
        return value
    return (*value[:2], _without(patch, value[2]), *value[3:])


def _without(patch: PatchedForward, state: Any) -> Any:
    """The state of a module without what a patch, and those below it, installed."""
    if not isinstance(state, dict) or state.get("forward") is not patch.installed:
        return state
    plain = patch.plain
    while (below := patch_of(plain)) is not None:
        plain = below.plain
    rest = {name: value for name, value in state.items() if name != "forward"}
    # What the class defines is found there.
    of_class = isinstance(plain, types.MethodType) and plain.__func__ is getattr(type(plain.__self__), "forward", None)
    return rest if of_class else {**rest, "forward": plain}
