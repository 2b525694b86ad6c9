"""State formulas: how many bytes an optimizer holds from step to step, and within one, by the code that it runs.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from planner.explain.optimizer_steps import (
    Room,
    Settings,
    Step,
    Variant,
    Weight,
    adafactor_for_loop,
    adafactor_foreach,
    adam_for_loop,
    adam_foreach,
    adam_fused,
    sgd_for_loop,
    sgd_foreach,
    sgd_fused,
    transformers_adafactor,
)
from profiler.measurement.model_states import product_scratch_bytes
from profiler.workload.precision import type_name
from profiler.workload.storages import CUDA_BLOCK_BYTES

_BLOCK = 256  # elements that share a scale in bitsandbytes' 8-bit optimizers (Optimizer2State.init_state)
_QUANTILES = 256 * 4  # bytes of each of the two maps from 8 bits to float32 that all weights share there
States = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerBytes:
    """What an optimizer needs by formula.

    Attributes:
        state_bytes: its states by name.
        temporary_bytes: the most that its step holds beside gradients and states; None where it is not known.
        variant: how it runs.
    """

    state_bytes: tuple[tuple[str, int], ...]
    temporary_bytes: int | None
    variant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Formula:
    """One optimizer: its states for one weight, and its step in each variant.

    ``shared``: states that are there once. ``multiplies``: its step has matrix products of half-precision factors.
    """

    states: Callable[[Weight, Settings, Variant], States]
    steps: dict[str, Step]
    groups_in_one_call: bool = False
    multiplies: bool = False
    shared: Callable[[Sequence[Weight], Settings], States] | None = None


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> OptimizerBytes | None:
    """What an optimizer holds and needs, from the shapes and types of its parameters alone.

    Returns:
        None for one that is not known, or in a mode that is not: it has to be measured.
    """
    groups = []
    for group in optimizer.param_groups:
        weights = [p for p in group["params"] if p.requires_grad]
        if any(w.layout is not torch.strided or w.is_complex() for w in weights):
            return None
        groups.append(([weight_of(p) for p in weights], {k: v for k, v in group.items() if k != "params"}))
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return bytes_by_name(name, groups)


def bytes_by_name(name: str, groups: Sequence[tuple[Sequence[Weight], Settings]]) -> OptimizerBytes | None:
    """The same for an optimizer that need not be there: its full name, and weights with settings for each group."""
    formula = _KNOWN.get(name)
    if formula is None or any(_is_unknown_mode(settings) for _, settings in groups):
        return None
    states: States = {}
    temporaries: list[int] = []
    room, variants = Room(), []
    for weights, settings in groups:
        variant = _variant(formula, weights, settings)
        variants.append(variant)
        found = [formula.states(weight, settings, variant) for weight in weights]
        for each in [*found, formula.shared(weights, settings) if formula.shared else {}]:
            for key, size in each.items():
                states[key] = states.get(key, 0) + size
        if variant in formula.steps:
            room = room if formula.groups_in_one_call else Room()
            formula.steps[variant](room, _with_products(weights) if formula.multiplies else weights, settings)
            temporaries.append(room.most_bytes)
    known = len(temporaries) == len(groups)
    return OptimizerBytes(
        state_bytes=tuple((key, size) for key, size in states.items() if size),
        temporary_bytes=max(temporaries, default=0) if known else None,
        variant=" and ".join(dict.fromkeys(variants)),
    )


def weight_of(parameter: torch.Tensor) -> Weight:
    """A parameter as its optimizer's formula takes it."""
    return Weight(
        shape=tuple(parameter.shape),
        item_bytes=parameter.element_size(),
        kind=type_name(parameter.dtype),
        block_bytes=CUDA_BLOCK_BYTES if parameter.device.type == "cuda" else 1,
    )


def _with_products(weights: Sequence[Weight]) -> list[Weight]:
    """With the scratch of half-precision products on the CPU: what oneDNN takes there depends on the processor."""
    return [
        replace(w, product_bytes=product_scratch_bytes(w.shape, getattr(torch, w.kind)))
        if w.block_bytes == 1 and w.item_bytes < 4 and len(w.shape) > 1
        else w
        for w in weights
    ]


def cast_bytes(model: nn.Module, autocast: torch.dtype | None) -> int:
    """Bytes of the casts that autocast makes of a model's parameters, and holds until it ends.

    Those that matrix products and convolutions take, of float32 parameters that are trained; each once.
    """
    if autocast is None:
        return 0
    found: dict[int, Weight] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False) if _casts(module) else ():
            if parameter.dtype == torch.float32 and parameter.requires_grad:
                found[parameter.untyped_storage()._cdata] = weight_of(parameter)
    return sum(weight.bytes_of(weight.shape, autocast.itemsize) for weight in found.values())


def _casts(module: nn.Module) -> bool:
    kinds = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.modules.conv._ConvNd)
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    return isinstance(module, kinds) or name == "transformers.pytorch_utils.Conv1D"


def _is_unknown_mode(settings: Settings) -> bool:
    """What the formulas have not been written for."""
    modes = any(settings.get(name) for name in ("capturable", "differentiable"))
    return modes or any(isinstance(value, torch.Tensor) for value in settings.values())


def _variant(formula: _Formula, weights: Sequence[Weight], settings: Settings) -> Variant:
    """How torch runs it: as asked for, else foreach where all weights are on CUDA and it is not Adafactor."""
    if settings.get("fused"):
        return "fused"
    if settings.get("foreach") is not None:
        return "foreach" if settings["foreach"] else "for-loop"
    on_cuda = bool(weights) and all(weight.block_bytes > 1 for weight in weights)
    return "foreach" if on_cuda and formula in (_SGD, _ADAM) else "for-loop"


def _sgd_states(weight: Weight, settings: Settings, _: Variant) -> States:
    return {"momentum_buffer": weight.size_bytes} if settings["momentum"] else {}


def _adam_states(weight: Weight, settings: Settings, variant: Variant) -> States:
    found = {"step": _step_bytes(weight, variant), "exp_avg": weight.size_bytes, "exp_avg_sq": weight.size_bytes}
    if settings.get("amsgrad"):
        found["max_exp_avg_sq"] = weight.size_bytes
    return found


def _step_bytes(weight: Weight, variant: Variant) -> int:
    """The number of steps is a float32 tensor, on the host but for fused variants."""
    return weight.bytes_of((), 4) if variant == "fused" or weight.block_bytes == 1 else 0


def _adafactor_states(weight: Weight, _: Settings, variant: Variant) -> States:
    shape = weight.shape
    step = {"step": _step_bytes(weight, variant)}
    if len(shape) <= 1:
        return {**step, "variance": weight.size_bytes}
    rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
    return {**step, "row_var": weight.bytes_of(rows), "col_var": weight.bytes_of(columns)}


def _transformers_adafactor_states(weight: Weight, settings: Settings, _: Variant) -> States:
    shape = weight.shape
    found = {"RMS": weight.bytes_of((), 4)}
    if settings["beta1"] is not None:
        found["exp_avg"] = weight.bytes_of(shape, 4)
    if len(shape) <= 1:
        return {**found, "exp_avg_sq": weight.bytes_of(shape, 4)}
    rows, columns = shape[:-1], (*shape[:-2], shape[-1])
    return {**found, "exp_avg_sq_row": weight.bytes_of(rows, 4), "exp_avg_sq_col": weight.bytes_of(columns, 4)}


def _adam_8bit_states(weight: Weight, settings: Settings, _: Variant) -> States:
    """Two moments of 8 bits with a scale for each block; small weights have them in float32."""
    if not _in_8bit(weight, settings):
        return {"state1": weight.bytes_of(weight.shape, 4), "state2": weight.bytes_of(weight.shape, 4)}
    moment, scales = weight.bytes_of(weight.shape, 1), weight.bytes_of((-(-weight.count // _BLOCK),), 4)
    return {"state1": moment, "state2": moment, "absmax1": scales, "absmax2": scales}


def _adam_8bit_maps(weights: Sequence[Weight], settings: Settings) -> States:
    needed = any(_in_8bit(weight, settings) for weight in weights)
    return {"qmap1": _QUANTILES, "qmap2": _QUANTILES} if needed else {}


def _in_8bit(weight: Weight, settings: Settings) -> bool:
    return weight.count >= settings.get("min_8bit_size", 4096)


_SGD = _Formula(states=_sgd_states, steps={"for-loop": sgd_for_loop, "foreach": sgd_foreach, "fused": sgd_fused})
_ADAM = _Formula(states=_adam_states, steps={"for-loop": adam_for_loop, "foreach": adam_foreach, "fused": adam_fused})
_ADAFACTOR = _Formula(
    states=_adafactor_states,
    steps={"for-loop": adafactor_for_loop, "foreach": adafactor_foreach},
    multiplies=True,
)
_TRANSFORMERS_ADAFACTOR = _Formula(
    states=_transformers_adafactor_states, steps={"for-loop": transformers_adafactor}, groups_in_one_call=True
)
# What its kernels need beside is not known.
_ADAM_8BIT = _Formula(states=_adam_8bit_states, steps={}, shared=_adam_8bit_maps)
_KNOWN: dict[str, _Formula] = {
    "torch.optim.sgd.SGD": _SGD,
    "torch.optim.adam.Adam": _ADAM,
    "torch.optim.adamw.AdamW": _ADAM,
    "torch.optim.Adafactor": _ADAFACTOR,
    "transformers.optimization.Adafactor": _TRANSFORMERS_ADAFACTOR,
    "bitsandbytes.optim.adam.Adam8bit": _ADAM_8BIT,
    "bitsandbytes.optim.adamw.AdamW8bit": _ADAM_8BIT,
}
