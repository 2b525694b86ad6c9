"""The model as it is given: whether it can run, which model is inside of its wrappers, what it computes in, its caches.

Its parameters have to be there, and hold data. A plan means names inside of ``torch.compile``, DDP and FSDP2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from profiler.messages import warn_caller
from profiler.workload.compiled_forwards import leave_uncompiled, plain_name, unwrapped
from profiler.workload.data_parallel import steps_can_end

leave_uncompiled(__name__)

_NAMED = 3  # parameters that an error names


def check_initialised(model: nn.Module, who: str) -> None:
    """Refuse a model with lazy modules that have not run yet; ``who`` begins the message. Raises ValueError."""
    lazy = [name for name, tensor in _tensors(model) if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"{who}: the model has lazy modules that have not run ({_some(lazy)}); "
            "run one forward first: model(batch), and only then make the optimizer"
        )


def check_ready(model: nn.Module, who: str) -> None:
    """Refuse a model that cannot run, or be left in the middle of a step; ``who`` begins the message.

    Raises:
        ValueError: parameters have no shapes yet, or no data; units of ``fully_shard`` need a newer torch.
    """
    check_initialised(model, who)
    if not steps_can_end(model):
        raise ValueError(
            f"{who}: the model is under fully_shard, whose steps this torch cannot leave in the middle as profiling "
            f"does; expected torch 2.13 or newer, got {torch.__version__}; update torch, or use DistributedDataParallel"
        )
    meta = [name for name, tensor in _tensors(model) if tensor.is_meta]
    if meta:
        raise ValueError(
            f"{who}: the model is on the meta device ({_some(meta)}), where parameters hold no data; allocate it: "
            "model.to_empty(device=...), and then load or initialise its weights"
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


_CAST = ", autocast "


def precision_of(model: nn.Module, autocast: torch.dtype | None) -> str:
    """The precision of a model's step.

    >>> precision_of(nn.Linear(1, 1).bfloat16(), None)
    'bfloat16'
    >>> precision_of(nn.Linear(1, 1), torch.float16)
    'float32, autocast float16'
    """
    kinds = sorted({type_name(parameter.dtype) for parameter in model.parameters()})
    return "+".join(kinds) + ("" if autocast is None else _CAST + type_name(autocast))


def casts_of_parameters(device: torch.device) -> object | None:
    """Stands for the casts that autocast has made of parameters, and uses again: the same object as long as these last.

    None where it makes none, or keeps none.
    """
    if not torch.is_autocast_enabled(device.type) or not torch.is_autocast_cache_enabled():
        return None
    probe = _PROBES.get(device)
    if probe is None:
        probe = _PROBES[device] = torch.empty(0, 0, device=device, requires_grad=True)
    with torch.enable_grad(), torch._C._DisableTorchDispatch():
        product = torch.mm(probe, probe)
    return None if product.grad_fn is None else product.grad_fn.next_functions[0][0]


_PROBES: dict[torch.device, torch.Tensor] = {}  # parameters without elements


def autocast_now(device: torch.device) -> torch.dtype | None:
    """Returns the type that autocast casts to at this moment; None outside of it, and on devices that know none."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.get_autocast_dtype(device.type) if known and torch.is_autocast_enabled(device.type) else None


def types_part(precision: str) -> str:
    """The types of the parameters.

    >>> types_part("float32, autocast float16, compiled"), types_part("float32")
    ('float32', 'float32')
    """
    return precision.partition(",")[0]


def autocast_part(precision: str) -> torch.dtype | None:
    """Returns the type that autocast casts to; None where it does not.

    >>> autocast_part("float32, autocast float16, compiled"), autocast_part("float32")
    (torch.float16, None)

    Raises:
        ValueError: it names no type of torch's.
    """
    name = precision.partition(_CAST)[2].partition(",")[0]
    found = getattr(torch, name, None) if name else None
    if name and not isinstance(found, torch.dtype):
        raise ValueError(f"precision: expected a type of torch's after autocast, got {name!r}; make the plan again")
    return found


def type_name(dtype: torch.dtype) -> str:
    """A type as it is written here.

    >>> type_name(torch.float16)
    'float16'
    """
    return str(dtype).removeprefix("torch.")


# What transformers, diffusers, timm and open_clip call the switch of their own checkpointing, and what turns it off.
_CHECKPOINTING = ("gradient_checkpointing", "grad_checkpointing")
_OFF = ("gradient_checkpointing_disable()", "disable_gradient_checkpointing()", "set_grad_checkpointing(False)")
_WRAPPERS = ("CheckpointWrapper", "OffloadWrapper")  # torch's own, which torchtitan and accelerate put around blocks


class ModelCaches:
    """The caches that a model of transformers builds by its ``config.use_cache``.

    A cache keeps every layer's keys and values in the output, and a recomputed layer would add its own twice.

    Args:
        model: the model whose modules are looked through, once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._name, self._warned = type(model).__name__, False
        found: list[Any] = [vars(module).get("config") for module in model.modules()]
        self._configs = list({id(config): config for config in found if hasattr(config, "use_cache")}.values())

    @contextlib.contextmanager
    def off(self, given: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Has training calls inside build none, as under transformers' own checkpointing; the first one warns.

        Args:
            given: the keyword arguments of a call; one that brings a cache along is left as it is.
        """
        brought = given is not None and given.get("past_key_values") is not None
        configs = [] if brought else [config for config in self._configs if config.use_cache is True]
        if configs and not self._warned:
            self._warned = True
            warn_caller(
                f"planner: use_cache is off in training calls of {self._name}, as under its own checkpointing: a cache "
                "would keep the keys and values of every layer. Evaluation and generate are as before; "
                "model.config.use_cache = False says the same",
                UserWarning,
            )
        try:
            for config in configs:
                config.use_cache = False
            yield
        finally:
            for config in configs:
                config.use_cache = True


def check_no_checkpointing(model: nn.Module, who: str) -> None:
    """Refuse a model whose own checkpointing is on: beside a plan its blocks would run three times.

    Raises:
        ValueError: with what to switch off; ``who`` begins the message.
    """
    for name, module in model.named_modules():
        kinds = {base.__name__ for base in type(module).__mro__}  # fully_shard makes a class of its own.
        if wrapper := next((each for each in _WRAPPERS if each in kinds), None):
            raise ValueError(
                f"{who}: torch's {wrapper} is around {repr(name) if name else 'the model'}; make the model without it "
                "(the activation checkpointing of torchtitan, or of accelerate's FSDP): the plan chooses what is "
                "recomputed"
            )
        if any(vars(module).get(switch) is True for switch in _CHECKPOINTING):
            off = next((call for call in _OFF if hasattr(model, call.partition("(")[0])), _OFF[-1])
            raise ValueError(
                f"{who}: the model's own checkpointing is on{f' in {name!r}' if name else ''}; call model.{off}: the "
                "plan chooses what is recomputed"
            )
