"""A loss over the rows of a head's output, a few rows at a time: each piece goes backward before the next begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.autograd.function import once_differentiable

from profiler.pieces.head_output import GradientSums, HeadCall, HeadOutput, Inside


def loss_in_pieces(
    function: Callable[..., Tensor],
    output: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    **more: Any,
) -> Any:
    """What ``cross_entropy`` or ``nll_loss`` gives for a head's output; NotImplemented for kinds that have no rule."""
    plain = isinstance(output, HeadOutput) and isinstance(target, Tensor) and not isinstance(target, HeadOutput)
    if not plain or size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    if target.requires_grad or (weight is not None and weight.requires_grad):
        return NotImplemented
    if output.classes_last and output.dim() != 2:
        return NotImplemented
    by_class = not target.is_floating_point()
    if by_class and target.numel() != output.rows.shape[:-1].numel():
        return NotImplemented
    if not by_class and target.shape != output.shape:
        return NotImplemented
    if not by_class and not output.classes_last:
        target = target.transpose(1, 2)
    rows = output.rows.reshape(-1, output.rows.shape[-1])
    targets = target.reshape(-1) if by_class else target.reshape(-1, target.shape[-1])
    options = {"weight": weight, **({"ignore_index": ignore_index} if by_class else {}), **more}
    loss = RowLoss(
        output.call, targets, lambda made, wanted, how: function(made, wanted, reduction=how, **options), reduction
    )
    divisor = _divisor(targets, weight, ignore_index) if reduction == "mean" else None
    made = _LossInPieces.apply(loss, divisor, rows, *output.call.parameters)
    return made.view(output.rows.shape[:-1]) if reduction == "none" else made


def _divisor(targets: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What the mean divides by."""
    if targets.is_floating_point():
        return torch.tensor(len(targets), device=targets.device, dtype=torch.float32)
    counted = targets != ignore_index
    if weight is None:
        return counted.sum().float()
    return weight[targets.where(counted, torch.zeros_like(targets))].where(counted, torch.zeros_like(weight[0])).sum()


@dataclass(frozen=True, slots=True)
class RowLoss:
    """A loss of rows.

    Attributes:
        call: of the head.
        targets: of each row.
        function: gives the loss of outputs, targets and a reduction.
        reduction: what is asked for: ``mean``, ``sum`` or ``none``.
    """

    call: HeadCall
    targets: Tensor
    function: Callable[[Tensor, Tensor, str], Tensor]
    reduction: str

    def of(self, rows: Tensor, piece: slice, inside: Inside | None = None) -> Tensor:
        """The sum over some rows, or the loss of each; the head runs inside a context."""
        return self.function(
            self.call.outputs(rows, inside), self.targets[piece], "none" if self.reduction == "none" else "sum"
        )


class _LossInPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: RowLoss, divisor: Tensor | None, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.loss = loss
        wanted = [*ctx.needs_input_grad[2:]]
        if loss.reduction == "none":
            ctx.save_for_backward(rows, *parameters)
            return torch.cat([loss.of(rows[piece], piece) for piece in loss.call.pieces(len(rows))])
        sums = GradientSums(rows, [*parameters], wanted)
        ctx.expected = expected = loss.call.scale.expected(rows)
        gradient = expected if divisor is None else expected / divisor
        parts = []
        for piece in loss.call.pieces(len(rows)):
            if any(wanted):
                parts.append(
                    sums.add(piece, lambda given, inside, piece=piece: loss.of(given, piece, inside), gradient)
                )
            else:
                parts.append(loss.of(rows[piece], piece))
        ctx.wanted = [each is not None for each in sums.gradients]
        ctx.save_for_backward(*(each for each in sums.gradients if each is not None))
        total = torch.stack(parts)
        exact = total.to(torch.promote_types(total.dtype, torch.float32))
        made = exact.sum() if divisor is None else exact.sum() / divisor
        return made.to(total.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if ctx.loss.reduction == "none":
            rows, *parameters = ctx.saved_tensors
            sums = GradientSums(rows, parameters, [*ctx.needs_input_grad[2:]])
            for piece in ctx.loss.call.pieces(len(rows)):
                sums.add(piece, lambda given, inside, piece=piece: ctx.loss.of(given, piece, inside), gradient[piece])
            return None, None, *sums.gradients
        saved = iter(ctx.saved_tensors)
        made = [next(saved) if wanted else None for wanted in ctx.wanted]
        ctx.loss.call.scale.note(gradient)
        factor = gradient / ctx.expected
        if factor.device.type == "cpu" and factor.item() == 1.0:
            return None, None, *made
        change = torch.mul if _get_current_graph_task_keep_graph() else Tensor.mul_
        return None, None, *(None if each is None else change(each, factor) for each in made)
