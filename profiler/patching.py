"""Patched forwards: put a wrapper in front of a module's ``forward`` and take it off again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]
_MISSING = object()


class ForwardPatches:
    """Wrappers installed on instances' ``forward``, removable in reverse order.

    ``forward`` is patched and not ``__call__``, so that hooks of the user, of
    FSDP and of DDP stay outside. The module tree, names and state_dict do not change.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[nn.Module, Any]] = []

    def wrap(self, module: nn.Module, wrapper: Callable[[Forward], Forward]) -> None:
        """Replace ``module.forward`` by ``wrapper(module.forward)``."""
        before = module.__dict__.get("forward", _MISSING)
        module.__dict__["forward"] = wrapper(module.forward)
        self._undo.append((module, before))

    def remove(self) -> None:
        """Put every forward back as it was; calling it again does nothing."""
        while self._undo:
            module, before = self._undo.pop()
            if before is _MISSING:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before
