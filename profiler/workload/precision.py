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
