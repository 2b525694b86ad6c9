"""Bytes of each part of the model states (parameters, gradients, optimizer), measured and by formula."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pandas as pd
import torch
from rich.console import Group, RenderableType
from torch import Tensor, nn

from planner.explain.optimizer_formulas import cast_bytes, state_bytes_of, weight_of
from planner.explain.tables import facts, plain_table
from planner.units import format_bytes
from profiler.measurement.model_states import MeasuredStates, measure_states
from profiler.workload.given_models import precision_of
from profiler.workload.optimizers import optimizer_names, with_inner
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
    """Measure a workload's model states, and work out what formulas say they are.

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
    """What mixed precision adds."""
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
    """Those of them that are not the loss's either: the optimizer's own, say master copies."""
    loss = workload.loss
    of_loss = {id(p) for p in loss.parameters()} if isinstance(loss, nn.Module) else set()
    return [p for p in _other_parameters(workload) if id(p) not in of_loss]


_NOTHING = "-"


def states_report(states: ModelStates) -> RenderableType:
    """What each part takes, measured and by formula; what they come to together; the first step and later ones."""
    title = f"Model states of {states.model_class} ({states.precision}, {states.optimizer})"
    table = plain_table(title, ["part", "how"], ["measured", "by formula"])
    for row in states.rows:
        table.add_row(*_cells(row), style=None if row.held else "dim")
    return Group(table, facts(_sums(states)))


def _cells(row: StateRow) -> list[str]:
    size = _NOTHING if row.formula_bytes is None else format_bytes(row.formula_bytes)
    return [row.part, row.how, format_bytes(row.measured_bytes), size]


def _sums(states: ModelStates) -> list[tuple[str, str]]:
    count = states.parameter_count
    mean = f"{states.held_bytes / count:.2f} bytes for each of {count:,} parameters" if count else "no parameters"
    first = states.first_peak_bytes
    begins = [] if first is None else [("first step", f"peak {format_bytes(first)}: states are made in it")]
    return [
        ("together", f"{format_bytes(states.held_bytes)}: {mean}, without those that come and go"),
        *begins,
        ("later steps", f"peak {format_bytes(states.peak_bytes)}, in the {states.peak_phase} phase"),
    ]
