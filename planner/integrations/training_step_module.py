"""The training step of a LightningModule as the forward of a module that has the same parts."""

from __future__ import annotations

import types
from typing import Any

from torch import nn

_PARTS = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


class TrainingStepModule(nn.Module):
    """Has the parameters and modules of another one under the same names, and its ``training_step`` as forward.

    A ``training_step`` calls one network or several and computes the loss: all of it is what a plan is made for. The
    owner's own ``forward`` may not be called at all, and under DDP it is redirected at every step.

    Args:
        owner: whose training step it is. Once this is installed, ``owner.training_step`` calls it.
    """

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        vars(self).update({name: vars(owner)[name] for name in _PARTS})
        self._around = (owner,)  # In a tuple it is no part of this.
        self._plain: Any = owner.training_step
        self._installed: Any = None

    @property
    def training(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As of the owner, which is what is switched between training and evaluation."""
        around = vars(self).get("_around")
        return around[0].training if around else True

    @training.setter
    def training(self, mode: bool) -> None:
        """Set by ``nn.Module`` for each module; the owner's own says it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The owner's training step."""
        return self._plain(*args, **kwargs)

    def install(self) -> None:
        """Calls of ``owner.training_step`` come here from now on; those of copies of the owner do not."""
        (owner,), plain = self._around, self._plain

        def training_step(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module is not owner:
                return type(module).training_step(module, *args, **kwargs)
            return self(*args, **kwargs)

        training_step.__wrapped__ = getattr(plain, "__func__", plain)  # pyright: ignore[reportFunctionMemberAccess]
        self._installed = vars(owner)["training_step"] = types.MethodType(training_step, owner)

    def remove(self) -> None:
        """Put the owner's own training step back; calling it again does nothing."""
        (owner,) = self._around
        if self._installed is not None and vars(owner).get("training_step") is self._installed:
            del vars(owner)["training_step"]
        self._installed = None
