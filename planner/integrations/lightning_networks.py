"""The network that the manual optimization of a LightningModule trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from profiler.workload.snapshot import preserved
from profiler.workload.workload import Workload


def trained_network(owner: nn.Module, step: Callable[[], Any], optimizers: Any, *, redirected: bool) -> nn.Module:
    """The one network that a step calls: the owner itself, where it calls its forward, or a module in it.

    Runs the step once; whatever it changes is put back.

    Args:
        owner: the LightningModule.
        step: its training step, with backward and the optimizers' steps.
        optimizers: that it uses.
        redirected: whether the step itself runs within a call of the owner, as under DDP.

    Raises:
        ValueError: the step calls none, or several; names them.
    """
    calls = _Calls(owner, 1 if redirected else 0)
    workload = Workload(model=owner, step=step, optimizer=optimizers)
    with preserved(workload):
        hooks = [hook for name, module in owner.named_modules() for hook in calls.watch(name, module)]
        try:
            step()
        finally:
            for hook in hooks:
                hook.remove()
    if calls.names and not calls.outside:
        return owner
    if len(calls.names) == 1:
        return owner.get_submodule(next(iter(calls.names)))
    got = " and ".join(map(repr, calls.names)) or "none"
    raise ValueError(
        f"MemoryBudgetCallback: expected a manual optimization that trains one network, got {got} in a "
        f"{type(owner).__name__}; name the one to plan, which runs once for each backward: "
        f"MemoryBudgetCallback(..., network={next(iter(calls.names), 'NAME')!r})"
    )


class _Calls:
    """The outermost calls of modules in which gradients flow."""

    def __init__(self, owner: nn.Module, around: int) -> None:
        self._owner = owner
        self._around = around  # calls of the owner that are none of its forward
        self._owner_depth = self._depth = 0
        self.names: dict[str, None] = {}
        self.outside = False

    def watch(self, name: str, module: nn.Module) -> list[Any]:
        def begins(*_: Any) -> None:
            if module is self._owner:
                self._owner_depth += 1
                return
            trains = any(parameter.requires_grad for parameter in module.parameters())
            if not self._depth and torch.is_grad_enabled() and module.training and trains:
                self.names[name] = None
                self.outside |= self._owner_depth <= self._around
            self._depth += 1

        def ends(*_: Any) -> None:
            if module is self._owner:
                self._owner_depth -= 1
            else:
                self._depth -= 1

        return [module.register_forward_pre_hook(begins), module.register_forward_hook(ends, always_call=True)]
