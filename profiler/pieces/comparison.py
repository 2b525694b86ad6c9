"""Runs a step with its head in pieces, and holds it against the step as it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from profiler.agreement import agreed, any_rank, largest
from profiler.pieces.heads import HeadInPieces, rows_at_once
from profiler.records import HeadRecord, PiecesRecord
from profiler.workload.forward_patches import ForwardPatches
from profiler.workload.snapshot import RandomState, preserved
from profiler.workload.steps import causes_of
from profiler.workload.workload import StepPhase, Workload
from profiler.workload.wrapped_models import named_modules


class NotInPieces(ValueError):
    """A head cannot run in pieces; the message says why."""


@contextmanager
def head_in_pieces(workload: Workload, name: str, rows: int) -> Iterator[HeadInPieces]:
    """Inside, this module of the workload's model waits for its loss, and runs so many rows at a time."""
    module = dict(named_modules(workload.model))[name]
    head = HeadInPieces(module, rows)
    patches = ForwardPatches(counts=False)
    try:
        patches.wrap(module, head.wrapped)
        yield head
    finally:
        patches.remove()


def compared(workload: Workload, head: HeadRecord, *, frugal: bool) -> PiecesRecord:
    """Run a step in pieces and one as it is, or in smaller pieces where that does not fit; the workload is left alone.

    Raises:
        NotInPieces: something needs all of the head's output at once, or the results differ by more than rounding.
    """
    rows = rows_at_once(workload.device.type)
    randomness = RandomState.capture()
    if frugal:
        plain = _in_pieces(workload, randomness, head.name, max(1, rows // 2))
    else:
        plain = _step(workload, randomness)
    pieces = _in_pieces(workload, randomness, head.name, rows)
    if any_rank(plain.gradients.keys() != pieces.gradients.keys()):
        raise NotInPieces(f"other parameters have gradients where rows of {head.name!r} are taken apart")
    difference, gradients = largest(
        [
            abs(pieces.loss - plain.loss) / max(abs(plain.loss), torch.finfo(torch.float32).tiny),
            max((_difference(pieces.gradients[k], each) for k, each in plain.gradients.items()), default=0.0),
        ]
    )
    allowed = math.sqrt(max(torch.finfo(dtype).eps for dtype in (plain.precision, pieces.precision)))
    if not agreed(max(difference, gradients) <= allowed):
        raise NotInPieces(
            f"expected rows of {head.name!r} that do not depend on each other, got a loss that differs by "
            f"{difference:.1e} and gradients that differ by {gradients:.1e} where they are taken apart"
        )
    return PiecesRecord(
        head=head.name,
        rows=head.rows,
        rows_at_once=rows,
        loss_difference=difference,
        gradient_difference=gradients,
    )


class _Step(NamedTuple):
    """The loss of a step, its gradients by the place of their parameter, and the coarsest type of these."""

    loss: float
    gradients: dict[int, Tensor]
    precision: torch.dtype


def _in_pieces(workload: Workload, randomness: RandomState, name: str, rows: int) -> _Step:
    with head_in_pieces(workload, name, rows) as head:
        try:
            step = _step(workload, randomness)
        except Exception as error:  # The user's code runs here.
            if said := next((str(cause) for cause in causes_of(error) if "in pieces" in str(cause)), ""):
                raise NotInPieces(said) from error
            raise
    if any_rank(head.made_whole > 0):
        raise NotInPieces(f"something but its loss needs all of what {name!r} returns")
    if any_rank(not head.waited):
        raise NotInPieces(f"{name!r} is not called with one tensor of rows")
    return step


def _step(workload: Workload, randomness: RandomState) -> _Step:
    losses, gradients = list[float](), dict[int, Tensor]()

    def note(phase: StepPhase, loss: Tensor | None) -> None:
        if phase == "backward" and loss is not None:
            losses.append(float(loss.detach()))
        if phase == "optimizer":
            gradients.update(
                (k, parameter.grad.detach().clone())
                for k, parameter in enumerate(workload.with_gradients())
                if parameter.grad is not None
            )

    with preserved(workload):
        randomness.restore()
        workload.step(note, until="optimizer" if workload.own is None else None)
    autocast = torch.float32 if workload.autocast is None else workload.autocast
    types = [autocast, *(each.dtype for each in gradients.values())]
    return _Step(math.fsum(losses), gradients, max(types, key=lambda dtype: torch.finfo(dtype).eps))


def _difference(one: Tensor, other: Tensor) -> float:
    """Relative, by norms."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    size = float(other.double().norm())
    return float((one.double() - other.double()).norm()) / size if size > 0 else float(one.double().norm())
