"""Formulas of optimizer states and of casts: bytes from the shapes and types of the parameters alone.

The usual counting, in bytes for each of P parameters (weights + gradients + what the optimizer holds):

======================================  ==========================
float32 SGD with momentum               4 + 4 + 4            = 12
mixed precision SGD with momentum       2 + 2 + (4 + 4)      = 12
float32 Adam, AdamW                     4 + 4 + (4 + 4)      = 16
mixed precision Adam, AdamW             2 + 2 + (4 + 4 + 4)  = 16
bfloat16 throughout, Adam, AdamW        2 + 2 + (2 + 2)      = 8
======================================  ==========================

Mixed precision is here half-precision weights beside a float32 master copy of them. Autocast is another thing: weights,
gradients and states are those of float32, and casts of weights are added while forward runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from profiler.tensors.tensor_parts import storage_key

_BLOCK = 256  # elements that share a scale in bitsandbytes' 8-bit optimizers (Optimizer2State.init_state)
_QUANTILES = 256 * 4  # bytes of each of the two maps from 8 bits to float32 that all weights share there
GroupSettings = dict[str, Any]  # of one parameter group, as the optimizer has them
BytesByState = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter as far as its optimizer is concerned.

    Attributes:
        shape: of the parameter, and of its gradient.
        item_bytes: of one element.
        on_host: whether it lies on the host, as the numbers of steps do.
    """

    shape: tuple[int, ...]
    item_bytes: int = 4
    on_host: bool = True

    @property
    def count(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """What it takes on its device."""
        return self.bytes_of(self.shape)

    def bytes_of(self, shape: Sequence[int], item_bytes: int | None = None) -> int:
        """What a tensor of ``shape`` takes, of its own type or another."""
        return math.prod(shape) * (item_bytes or self.item_bytes)


def state_bytes_of(optimizers: Sequence[torch.optim.Optimizer]) -> BytesByState | None:
    """What optimizers keep from step to step, by name, from the shapes and types of their parameters alone.

    Returns:
        None where one is not known, or in a mode that is not: it has to be measured.
    """
    kept: list[BytesByState] = []
    for optimizer in optimizers:
        states = _state_bytes_of(optimizer)
        if states is None:
            return None
        kept.append(states)
    return _added(kept)


def _state_bytes_of(optimizer: torch.optim.Optimizer) -> BytesByState | None:
    groups = []
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.requires_grad]
        if any(p.layout is not torch.strided or p.is_complex() for p in parameters):
            return None
        groups.append(([weight_of(p) for p in parameters], {k: v for k, v in group.items() if k != "params"}))
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return state_bytes_by_name(name, groups)


def state_bytes_by_name(name: str, groups: Sequence[tuple[Sequence[Weight], GroupSettings]]) -> BytesByState | None:
    """The same for an optimizer that need not be there: its full name, and weights with settings for each group."""
    formula = _KNOWN.get(name)
    if formula is None or any(_is_unknown_mode(settings) for _, settings in groups):
        return None
    states = _added([formula(weights, settings) for weights, settings in groups])
    return {state: size for state, size in states.items() if size}


def _added(several: Sequence[BytesByState]) -> BytesByState:
    added: BytesByState = {}
    for states in several:
        for name, size in states.items():
            added[name] = added.get(name, 0) + size
    return added


def weight_of(parameter: torch.Tensor) -> Weight:
    """A parameter as its optimizer's formula takes it."""
    return Weight(
        shape=tuple(parameter.shape),
        item_bytes=parameter.element_size(),
        on_host=parameter.device.type == "cpu",
    )


def cast_bytes(model: nn.Module, autocast: torch.dtype | None) -> int:
    """Bytes of the casts that autocast makes of a model's parameters, and holds until it ends.

    Those that matrix products and convolutions take, of float32 parameters that are trained; each once.
    """
    if autocast is None:
        return 0
    cast: dict[int, Weight] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False) if _casts(module) else ():
            if parameter.dtype == torch.float32 and parameter.requires_grad:
                cast[storage_key(parameter)] = weight_of(parameter)
    return sum(weight.bytes_of(weight.shape, autocast.itemsize) for weight in cast.values())


def _casts(module: nn.Module) -> bool:
    kinds = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.modules.conv._ConvNd)
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    return isinstance(module, kinds) or name == "transformers.pytorch_utils.Conv1D"


def _is_unknown_mode(settings: GroupSettings) -> bool:
    """What the formulas have not been written for."""
    modes = any(settings.get(name) for name in ("capturable", "differentiable"))
    return modes or any(isinstance(value, torch.Tensor) for value in settings.values())


def _sgd_states(weight: Weight, settings: GroupSettings) -> BytesByState:
    return {"momentum_buffer": weight.size_bytes} if settings["momentum"] else {}


def _adam_states(weight: Weight, settings: GroupSettings) -> BytesByState:
    moments = {"exp_avg": weight.size_bytes, "exp_avg_sq": weight.size_bytes}
    if settings.get("amsgrad"):
        moments["max_exp_avg_sq"] = weight.size_bytes
    return {"step": _step_bytes(weight, settings), **moments}


def _step_bytes(weight: Weight, settings: GroupSettings) -> int:
    """The number of steps is a float32 tensor, on the host but for fused variants."""
    return weight.bytes_of((), 4) if settings.get("fused") or weight.on_host else 0


def _adafactor_states(weight: Weight, settings: GroupSettings) -> BytesByState:
    shape = weight.shape
    step = {"step": _step_bytes(weight, settings)}
    if len(shape) <= 1:
        return {**step, "variance": weight.size_bytes}
    rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
    return {**step, "row_var": weight.bytes_of(rows), "col_var": weight.bytes_of(columns)}


def _transformers_adafactor_states(weight: Weight, settings: GroupSettings) -> BytesByState:
    shape = weight.shape
    states = {"RMS": weight.bytes_of((), 4)}
    if settings["beta1"] is not None:
        states["exp_avg"] = weight.bytes_of(shape, 4)
    if len(shape) <= 1:
        return {**states, "exp_avg_sq": weight.bytes_of(shape, 4)}
    rows, columns = shape[:-1], (*shape[:-2], shape[-1])
    return {**states, "exp_avg_sq_row": weight.bytes_of(rows, 4), "exp_avg_sq_col": weight.bytes_of(columns, 4)}


def _adam_8bit_states(weight: Weight, settings: GroupSettings) -> BytesByState:
    """Two moments of 8 bits with a scale for each block; small weights have them in float32."""
    if not _in_8bit(weight, settings):
        return {"state1": weight.bytes_of(weight.shape, 4), "state2": weight.bytes_of(weight.shape, 4)}
    moment, scales = weight.bytes_of(weight.shape, 1), weight.bytes_of((-(-weight.count // _BLOCK),), 4)
    return {"state1": moment, "state2": moment, "absmax1": scales, "absmax2": scales}


def _in_8bit(weight: Weight, settings: GroupSettings) -> bool:
    return weight.count >= settings.get("min_8bit_size", 4096)


def _adam_8bit_of_group(weights: Sequence[Weight], settings: GroupSettings) -> BytesByState:
    """With the maps, which all weights in 8 bits share."""
    mapped = any(_in_8bit(weight, settings) for weight in weights)
    maps = {"qmap1": _QUANTILES, "qmap2": _QUANTILES} if mapped else {}
    return _added([*(_adam_8bit_states(weight, settings) for weight in weights), maps])


GroupFormula = Callable[[Sequence[Weight], GroupSettings], BytesByState]


def _each(of_weight: Callable[[Weight, GroupSettings], BytesByState]) -> GroupFormula:
    """The formula of a group in which each weight has states of its own."""
    return lambda weights, settings: _added([of_weight(weight, settings) for weight in weights])


_KNOWN: dict[str, GroupFormula] = {
    "torch.optim.sgd.SGD": _each(_sgd_states),
    "torch.optim.adam.Adam": _each(_adam_states),
    "torch.optim.adamw.AdamW": _each(_adam_states),
    "torch.optim.Adafactor": _each(_adafactor_states),
    "transformers.optimization.Adafactor": _each(_transformers_adafactor_states),
    "bitsandbytes.optim.adam.Adam8bit": _adam_8bit_of_group,
    "bitsandbytes.optim.adamw.AdamW8bit": _adam_8bit_of_group,
}
