"""What a package's model is here: its training step as a user writes it, and the checkpointing that it has itself."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Training:
    """A model in its loop.

    Attributes:
        model: what is planned.
        step: one whole training step; returns the loss.
        optimizer: named to the planner where the step does not show it.
    """

    model: nn.Module
    step: Callable[[], Any]
    optimizer: Any = None


# Makes the training anew; with True the package's own checkpointing is on.
Build = Callable[[bool], Training]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageModel:
    """An entry of the table.

    Attributes:
        name: of the package and the model.
        needs: the packages' import names.
        build: makes it.
        own: what turns the package's own checkpointing on; empty where it has none.
    """

    name: str
    needs: tuple[str, ...]
    build: Build
    own: str

    @property
    def installed(self) -> bool:
        """Whether all that it needs is there; nothing is imported."""
        return all(importlib.util.find_spec(each) is not None for each in self.needs)


MODELS: dict[str, PackageModel] = {}


def model(*needs: str, own: str = "") -> Callable[[Build], Build]:
    """Register a builder under the name of the first package and its own."""

    def registered(build: Build) -> Build:
        name = f"{needs[0]} {build.__name__.strip('_').replace('__', '-')}"
        MODELS[name] = PackageModel(name=name, needs=needs, build=build, own=own)
        return build

    return registered


def of(name: str) -> Any:
    """A module, or what it holds: ``timm.create_model``. It is imported now, so that others need not have it."""
    parts = name.split(".")
    for k in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:k]))
        except ModuleNotFoundError as error:
            if k == 1 or error.name != ".".join(parts[:k]):
                raise
            continue
        for part in parts[k:]:
            found = getattr(found, part)
        return found
    raise AssertionError("unreachable: a name has a part")


def trained(
    model: nn.Module, loss: Callable[[], Tensor], optimizer: Any = None, *, clip_norm: float | None = None
) -> Training:
    """The usual step: clear, forward and loss, backward, clip where asked, step."""
    used: Any = torch.optim.AdamW(model.parameters(), lr=1e-3) if optimizer is None else optimizer

    def step() -> float:
        used.zero_grad()
        value = loss()
        value.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        used.step()
        return value.item()

    return Training(model, step, used)


class Called(nn.Module):
    """A module whose forward is what a loop calls of another one: a method that trains, or several calls."""

    def __init__(self, net: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self._call = net, call

    def forward(self, *inputs: Any) -> Any:
        return self._call(*inputs)


def classified(model: nn.Module, images: Tensor, classes: int = 10) -> Training:
    """A classifier of images, or whatever gives scores, with labels that are drawn."""
    labels = torch.randint(classes, (len(images),))
    return trained(model, lambda: nn.functional.cross_entropy(model(images), labels))


def tokens(batch: int, length: int, kinds: int = 256) -> Tensor:
    """Drawn."""
    return torch.randint(kinds, (batch, length))
