"""Models inside wrappers: whose names a plan means where ``torch.compile``, DDP or FSDP2 stands around them."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from profiler.workload.compiled_forwards import plain_name, unwrapped

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
