"""Whether a model can run at all: that its parameters are there, and hold data."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_NAMED = 3  # parameters that an error names


def check_initialised(model: nn.Module, who: str) -> None:
    """Refuse a model with lazy modules that have not run yet; ``who`` begins the message. Raises ValueError."""
    lazy = [name for name, tensor in _tensors(model) if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"{who}: expected a model whose parameters have shapes, got lazy modules that have not run "
            f"({_some(lazy)}); "
            "run one forward first: model(batch), and only then make the optimizer"
        )


def check_ready(model: nn.Module, who: str) -> None:
    """Refuse a model whose parameters have no shapes yet, or no data; ``who`` begins the message. Raises ValueError."""
    check_initialised(model, who)
    meta = [name for name, tensor in _tensors(model) if tensor.is_meta]
    if meta:
        raise ValueError(
            f"{who}: expected a model whose parameters hold data, got a model on the meta device ({_some(meta)}); "
            "materialise it: model.to_empty(device=...), and then load or initialise its weights"
        )


def _tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return (*model.named_parameters(), *model.named_buffers())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
