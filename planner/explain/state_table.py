"""Bytes of each part of the model states (parameters, gradients, optimizer), measured and by formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from planner.units import format_bytes
from profiler.measurement.step_measurement import MeasuredStates, measure_states
from profiler.workload.given_models import precision_of
from profiler.workload.optimizers import optimizer_names, with_inner
from profiler.workload.tensor_parts import storage_key
from profiler.workload.workload import Workload

PARAMETERS, OTHERS, GRADIENTS = "parameters", "other parameters", "gradients"
STATES, SCALER, TEMPORARIES, CASTS = "optimizer", "loss scale", "optimizer's step, beside", "casts of parameters"
_UNKNOWN = "measured: no formula is known"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRow:
    """One part of the model states.

    Attributes:
        part: what it is; ``optimizer: NAME`` for the states of an optimizer.
        measured_bytes: in real steps.
        formula_bytes: from shapes and types alone; None where no formula is known.
        how: how the formula has it, or why there is none.
        held: whether it is there from the end of backward to the optimizer's step.
    """

    part: str
    measured_bytes: int
    formula_bytes: int | None
    how: str
    held: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """The model states of a workload.

    Attributes:
        model_class, optimizer, precision: whose they are.
        parameter_count: P, the model's parameters, each once.
        rows: the parts.
        first_peak_bytes: of the whole step in which the optimizer makes its states, without a plan; None where it
            brought them along.
        peak_bytes, peak_phase: of every later one, and where it is.
    """

    model_class: str
    optimizer: str
    precision: str
    parameter_count: int
    rows: tuple[StateRow, ...]
    first_peak_bytes: int | None
    peak_bytes: int
    peak_phase: str

    @property
    def held_bytes(self) -> int:
        """Parameters, gradients and what the optimizer keeps, as measured: what 12P or 16P is said of."""
        return sum(row.measured_bytes for row in self.rows if row.held)

    @property
    def formula_held_bytes(self) -> int | None:
        """The same by formula; None where a part has none."""
        known = [row.formula_bytes for row in self.rows if row.held and row.formula_bytes is not None]
        return sum(known) if len(known) == sum(row.held for row in self.rows) else None

    def to_frame(self) -> pd.DataFrame:
        """A row per part: ``part``, ``measured_bytes``, ``formula_bytes``, ``how``."""
        columns = ["part", "measured_bytes", "formula_bytes", "how"]
        frame = pd.DataFrame([[getattr(row, name) for name in columns] for row in self.rows], columns=columns)
        return frame.astype({"formula_bytes": "Int64"})


def model_states(workload: Workload) -> ModelStates:
    """Measure a workload's model states, and compute them by formula.

    Runs two whole steps and a forward, and leaves the workload as it was found.

    Raises:
        ProfileError: the step fails, or the model is in eval mode.
    """
    measured = measure_states(workload)
    rows = [*_weights(workload, measured), *_optimizer(workload, measured), *_precision(workload, measured)]
    return ModelStates(
        model_class=type(workload.model).__name__,
        optimizer=optimizer_names(workload.optimizers),
        precision=precision_of(workload.model, workload.autocast),
        parameter_count=sum(p.numel() for p in _distinct(workload.model.parameters())),
        rows=tuple(rows),
        first_peak_bytes=None if measured.first is None else measured.first.peak_bytes,
        peak_bytes=measured.steady.peak_bytes,
        peak_phase=measured.steady.peak_phase,
    )


def _weights(workload: Workload, measured: MeasuredStates) -> Iterator[StateRow]:
    """Parameters and their gradients."""
    parameters, others = _distinct(workload.model.parameters()), _other_parameters(workload)
    yield _of(PARAMETERS, measured.parameter_bytes, parameters)
    if others or measured.other_parameter_bytes:
        yield _of(OTHERS, measured.other_parameter_bytes, others)
    copies = {id(p) for p in _copies(workload)}  # Their gradients are made in the optimizer's step.
    trained = [p for p in [*parameters, *others] if p.requires_grad and id(p) not in copies]
    yield _of(GRADIENTS, measured.steady.gradient_bytes, trained)


def _optimizer(workload: Workload, measured: MeasuredStates) -> Iterator[StateRow]:
    """The optimizer's states by name, and what its step holds besides."""
    if not workload.optimizers:
        return
    formula, states = state_bytes_of(with_inner(workload.optimizers)), dict(measured.state_bytes)
    how = _UNKNOWN if formula is None else "from the parameters' shapes"
    names = dict.fromkeys(states) | dict.fromkeys(formula or {})
    for name in names:
        size_bytes = None if formula is None else formula.get(name, 0)
        yield StateRow(part=f"{STATES}: {name}", measured_bytes=states.get(name, 0), formula_bytes=size_bytes, how=how)
    temporary_bytes = measured.steady.temporary_bytes
    yield StateRow(part=TEMPORARIES, measured_bytes=temporary_bytes, formula_bytes=None, how="measured", held=False)


def _precision(workload: Workload, measured: MeasuredStates) -> Iterator[StateRow]:
    """Bytes that mixed precision adds."""
    if workload.scaler is not None:
        size = 2 * weight_of(_scale(workload)).size_bytes if workload.scaler.is_enabled() else 0
        yield StateRow(
            part=SCALER, measured_bytes=measured.scaler_bytes, formula_bytes=size, how="scale, and steps since"
        )
    if workload.autocast is not None:
        how = f"of matrix products; backward keeps {format_bytes(measured.kept_cast_bytes)}"
        formula = cast_bytes(workload.model, workload.autocast)
        yield StateRow(part=CASTS, measured_bytes=measured.cast_bytes, formula_bytes=formula, how=how, held=False)


def _scale(workload: Workload) -> Tensor:
    """As the scaler makes it: one float32 on the device."""
    return torch.empty((), device=workload.device)


def _of(part: str, measured_bytes: int, tensors: list[Tensor]) -> StateRow:
    """Tensors of known shapes."""
    counts: dict[int, int] = {}
    for tensor in tensors:
        counts[tensor.element_size()] = counts.get(tensor.element_size(), 0) + tensor.numel()
    how = " + ".join(f"{size} x {count:,}" for size, count in counts.items()) or "none"
    size_bytes = sum(weight_of(tensor).size_bytes for tensor in tensors)
    return StateRow(part=part, measured_bytes=measured_bytes, formula_bytes=size_bytes, how=how)


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _other_parameters(workload: Workload) -> list[Tensor]:
    """Parameters that are not the model's."""
    of_model = {id(parameter) for parameter in workload.model.parameters()}
    return [p for p in _distinct(workload.parameters_beside()) if id(p) not in of_model]


def _copies(workload: Workload) -> list[Tensor]:
    """Parameters that belong neither to the model nor to the loss: the optimizer's, such as master copies."""
    loss = workload.loss
    of_loss = {id(p) for p in loss.parameters()} if isinstance(loss, nn.Module) else set()
    return [p for p in _other_parameters(workload) if id(p) not in of_loss]


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
        """Bytes on its device."""
        return self.bytes_of(self.shape)

    def bytes_of(self, shape: Sequence[int], item_bytes: int | None = None) -> int:
        """Bytes of a tensor of ``shape``, of its own type or another."""
        return math.prod(shape) * (item_bytes or self.item_bytes)


def state_bytes_of(optimizers: Sequence[torch.optim.Optimizer]) -> BytesByState | None:
    """State that optimizers keep from step to step, by name, from shapes and types of parameters alone.

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
    """Whether the settings ask for a mode that the formulas do not cover."""
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
