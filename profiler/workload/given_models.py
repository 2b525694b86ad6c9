"""The model as it is given: whether it can run at all, and which model is inside of its wrappers.

Its parameters have to be there, and hold data. A plan means names inside of ``torch.compile``, DDP and FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from profiler.workload.compiled_forwards import plain_name, unwrapped

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


_REFUSED = {
    "FullyShardedDataParallel": "it flattens parameters; use torch.distributed.fsdp.fully_shard",
    "DataParallel": "it copies the model for every step; use DistributedDataParallel",
}


def inner_model(model: nn.Module) -> nn.Module:
    """The model as it was before ``torch.compile`` and ``DistributedDataParallel``; the same object where none is.

    Raises:
        ValueError: a wrapper that no plan holds in.
    """
    kind = type(model).__name__
    if isinstance(model, DataParallel) or kind == "FullyShardedDataParallel":
        raise ValueError(
            f"a {kind}: expected a model, or one in DistributedDataParallel or fully_shard, got a {kind}: "
            f"{_REFUSED.get(kind, _REFUSED['DataParallel'])}"
        )
    inner = model.module if isinstance(model, DistributedDataParallel) else unwrapped(model)
    return model if inner is model else inner_model(inner)


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of the model inside, by the names that they had before any of them was compiled."""
    modules = inner_model(model).named_modules()
    return [(plain_name(name), module) for name, module in modules if unwrapped(module) is module]


def class_name(module: nn.Module) -> str:
    """The name of a module's class; that of before where ``fully_shard`` has made one of its own."""
    kind = type(module)
    sharded = any(base.__name__ == "FSDPModule" for base in kind.__bases__)
    return kind.__bases__[-1].__name__ if sharded else kind.__name__


def autocasts_inside(model: nn.Module) -> bool:
    """Whether accelerate has put autocast around the model's own forward, where it is not seen from outside."""
    return "_original_forward" in vars(model)
