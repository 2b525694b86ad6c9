"""Runs a step with parts of the model in pieces, and compares it with the step as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from profiler.agreement import any_rank, gathered
from profiler.current_device import active_device
from profiler.recomputation.head_output import ChangedInPlace
from profiler.recomputation.heads import HeadInPieces, rows_at_once
from profiler.recomputation.module_pieces import ModuleInPieces
from profiler.records import HeadRecord, PiecesRecord
from profiler.workload.data_parallel import keep_parameters_of
from profiler.workload.forward_patches import ForwardPatches
from profiler.workload.given_models import named_modules
from profiler.workload.random_states import RandomState
from profiler.workload.snapshot import preserved
from profiler.workload.steps import causes_of
from profiler.workload.workload import StepPhase, Workload

_PATCHED = "it runs in pieces"


class NotInPieces(ValueError):
    """A part of a model cannot run in pieces; the message says why."""


def run_in_pieces(
    model: nn.Module, pieces: PiecesRecord, patches: ForwardPatches, say_whole: Callable[[], None] | None = None
) -> HeadInPieces | None:
    """Has parts of a model run in pieces until the patches are removed; returns the record of its head.

    Args:
        model: the model of the named modules.
        pieces: the parts, and the number of their pieces.
        patches: the patches that install the wrappers.
        say_whole: called where all of the head's output is computed at once after all.
    """
    named = dict(named_modules(model))
    for part in pieces.modules:
        patches.wrap(named[part.name], ModuleInPieces(named[part.name], part.dim, part.count).wrapped, _PATCHED)
    if not pieces.head:
        return None
    head = HeadInPieces(named[pieces.head], pieces.rows_at_once, say_whole)
    for undo in keep_parameters_of(named[pieces.head]):  # Its loss comes after its forward.
        patches.undo_with(undo)
    patches.wrap(named[pieces.head], head.wrapped, _PATCHED, inside_sharding=True)
    return head


@contextmanager
def in_pieces(workload: Workload, pieces: PiecesRecord) -> Iterator[HeadInPieces | None]:
    """Has parts of the workload's model run in pieces inside, where a plan can be put on top."""
    patches = ForwardPatches(counts=False)
    try:
        yield run_in_pieces(workload.model, pieces, patches)
    finally:
        patches.remove()


def of_head(workload: Workload, head: HeadRecord) -> PiecesRecord:
    """Pieces of a head."""
    return PiecesRecord(head=head.name, rows=head.rows, rows_at_once=rows_at_once(workload.device))


def compared(workload: Workload, pieces: PiecesRecord, *, frugal: bool) -> PiecesRecord:
    """Run a step in pieces and one as it is, or in smaller pieces where that does not fit; the workload is left alone.

    Returns:
        The pieces, with how far the loss and the gradients are off; on a simulated device that is not known.

    Raises:
        NotInPieces: something needs all of the head's output at once, or the results differ by more than rounding.
    """
    randomness = RandomState()
    if active_device() is not None:  # Tensors have no values there: rows are known to be apart by the head's type.
        if type(workload.model.get_submodule(pieces.head)) is not nn.Linear:
            raise NotInPieces("whether its rows depend on each other is only seen on the device, as it is no nn.Linear")
        _in_pieces(workload, randomness, pieces)
        return pieces
    plain = _in_pieces(workload, randomness, _finer(pieces)) if frugal else _step(workload, randomness)
    apart = _in_pieces(workload, randomness, pieces)
    if any_rank(plain.gradients.keys() != apart.gradients.keys()):
        raise NotInPieces("other parameters have gradients where rows are taken apart")
    of_loss = abs(apart.loss - plain.loss) / max(abs(plain.loss), torch.finfo(torch.float32).tiny)
    of_gradients = [relative_difference(apart.gradients[k], each) for k, each in plain.gradients.items()]
    # Each rank has its part of the batch, and of sharded gradients.
    difference, gradients = map(max, zip(*gathered((of_loss, max(of_gradients, default=0.0))), strict=True))
    allowed = math.sqrt(max(torch.finfo(dtype).eps for dtype in (plain.precision, apart.precision)))
    if any_rank(not all(each <= allowed for each in (of_loss, *of_gradients))):
        raise NotInPieces(
            f"its rows depend on each other: taken apart, the loss differs by {difference:.1e} and the gradients by "
            f"{gradients:.1e}"
        )
    return replace(pieces, loss_difference=difference, gradient_difference=gradients)


def _finer(pieces: PiecesRecord) -> PiecesRecord:
    """Twice as many pieces."""
    modules = tuple(replace(module, count=2 * module.count) for module in pieces.modules)
    return replace(pieces, rows_at_once=max(1, pieces.rows_at_once // 2), modules=modules)


class _Step(NamedTuple):
    """The loss of a step, its gradients by the place of their parameter, and the coarsest type of these."""

    loss: float
    gradients: dict[int, Tensor]
    precision: torch.dtype


def _in_pieces(workload: Workload, randomness: RandomState, pieces: PiecesRecord) -> _Step:
    with in_pieces(workload, pieces) as head:
        try:
            step = _step(workload, randomness)
        except Exception as error:  # The user's code runs here.
            changed = next((cause for cause in causes_of(error) if isinstance(cause, ChangedInPlace)), None)
            if changed is None:
                raise
            raise NotInPieces(str(changed)) from error
    if head is not None and any_rank(head.made_whole > 0):
        raise NotInPieces(f"something but its loss needs all of what {pieces.head!r} returns")
    if head is not None and any_rank(not head.waited):
        raise NotInPieces(f"{pieces.head!r} is not called with one tensor of rows")
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
        workload.step(note, until="optimizer" if workload.custom_step is None else None)
    autocast = torch.float32 if workload.autocast is None else workload.autocast
    types = [autocast, *(each.dtype for each in gradients.values())]
    return _Step(math.fsum(losses), gradients, max(types, key=lambda dtype: torch.finfo(dtype).eps))


def relative_difference(one: Tensor, other: Tensor) -> float:
    """Returns the norm of the difference over the norm of the other tensor."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    size = float(other.double().norm())
    return float((one.double() - other.double()).norm()) / size if size > 0 else float(one.double().norm())
