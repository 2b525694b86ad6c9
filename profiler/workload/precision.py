"""What a model computes in, in words: the types of its parameters and what autocast casts to."""

from __future__ import annotations

import torch
from torch import nn

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
    """What autocast casts to at this moment; None outside of it, and on devices that know none."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.get_autocast_dtype(device.type) if known and torch.is_autocast_enabled(device.type) else None


def types_part(precision: str) -> str:
    """The types of the parameters.

    >>> types_part("float32, autocast float16, compiled"), types_part("float32")
    ('float32', 'float32')
    """
    return precision.partition(",")[0]


def autocast_part(precision: str) -> torch.dtype | None:
    """What autocast casts to; None where it does not.

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
