"""Has a head wait for its loss, so that both run a few rows at a time.

Functions that take each row of the head's output by itself give a stand-in again. A loss over the rows runs piece by
piece, and each piece goes backward before the next begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from profiler.current_device import active_device
from profiler.recomputation.head_output import ROW_FUNCTIONS, GradientSums, HeadCall, HeadOutput, Inside, LossScale, Row
from profiler.workload.compiled_forwards import Forward
from profiler.workload.tensor_parts import any_distributed
from profiler.workload.torch_state import TorchState

_ROWS = {"cpu": 128}  # fewer would not fill the cores
_ROWS_ELSEWHERE = 1024


def rows_at_once(device: torch.device) -> int:
    """How many rows of a head make up a piece on this device, or on the one that is simulated."""
    simulated = active_device()
    return _ROWS.get(device.type if simulated is None else simulated.record.kind, _ROWS_ELSEWHERE)


class HeadInPieces:
    """Calls of a head that give a stand-in for their output, which its loss makes in pieces.

    Args:
        head: a module that takes each row by itself.
        rows_at_once: the rows that run together; a call of no more runs as it is.
        say_whole: called where all of an output is made at once after all.

    Attributes:
        made_whole: the number of calls that had to make all of their output at once.
        waited: the number of calls that waited for a loss.
    """

    def __init__(self, head: nn.Module, rows_at_once: int, say_whole: Callable[[], None] | None = None) -> None:
        self._head, self._rows_at_once, self._say_whole = head, rows_at_once, say_whole
        self._scale = LossScale(next(head.parameters(), torch.empty(0)).device)
        self._kinds: dict[Any, Row] = {}  # of the output, by all that its type depends on
        self.made_whole = self.waited = 0

    def wrapped(self, forward: Forward) -> Forward:
        """Returns the function that runs in place of the head's forward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._may_wait(args, kwargs):
                return forward(*args, **kwargs)
            self.waited += 1
            return self._output(forward, args[0])

        return run

    def _may_wait(self, args: Any, kwargs: Any) -> bool:
        if not torch.is_grad_enabled() or kwargs or len(args) != 1 or not self._head.training:
            return False
        (rows,) = args
        if type(rows) not in (Tensor, FakeTensor) or not rows.is_floating_point() or rows.dim() < 2:
            return False
        if rows.shape[:-1].numel() <= self._rows_at_once or any_distributed(map(type, self._head.parameters())):
            return False
        return rows.requires_grad or any(p.requires_grad for p in self._head.parameters())

    def _output(self, forward: Callable[..., Any], rows: Tensor) -> HeadOutput:
        call = HeadCall(
            forward=forward,
            state=TorchState(rows.device),
            parameters=tuple(p for p in self._head.parameters() if p.requires_grad),
            rows_at_once=self._rows_at_once,
            whole=self._note_whole,
            scale=self._scale,
        )
        given = rows.dtype, rows.shape[-1], call.state.casts() and torch.get_autocast_dtype(rows.device.type)
        if given not in self._kinds:
            with torch.no_grad():
                row = call.outputs(rows.detach().reshape(-1, rows.shape[-1])[:1])[0]
            self._kinds[given] = Row(len(row), row.dtype)
        return HeadOutput.of(call, rows, self._kinds[given])

    def _note_whole(self) -> None:
        self.made_whole += 1
        if self._say_whole is not None:
            self._say_whole()


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
    """Returns ``cross_entropy`` or ``nll_loss`` of a head's output; NotImplemented for kinds without a rule."""
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
    """Returns the divisor of the mean."""
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
        call: the call of the head.
        targets: the target of each row.
        function: the loss of outputs, targets and a reduction.
        reduction: the wanted reduction: ``mean``, ``sum`` or ``none``.
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


_Rule = Callable[..., Any]


def _reshaped(output: Any, *shape: Any) -> Any:
    sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    if not isinstance(output, HeadOutput) or not output.classes_last or not all(isinstance(n, int) for n in sizes):
        return NotImplemented
    if sizes.count(-1) == 1:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = output.numel() // known if known else 0
    if len(sizes) < 2 or sizes[-1] != output.shape[-1] or math.prod(sizes) != output.numel():
        return NotImplemented
    return output.of_rows(output.rows.reshape(*sizes[:-1], output.rows.shape[-1]))


def _flattened(output: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not isinstance(output, HeadOutput) or not output.classes_last or end_dim % output.dim() == output.dim() - 1:
        return NotImplemented
    return output.of_rows(output.rows.flatten(start_dim % output.dim(), end_dim % output.dim()))


def _indexed(output: Any, index: Any) -> Any:
    if not isinstance(output, HeadOutput) or not output.classes_last:
        return NotImplemented
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, (int, slice, Tensor)) or part is Ellipsis for part in parts):
        return NotImplemented
    if any(isinstance(part, HeadOutput) for part in parts):
        return NotImplemented
    taken = sum(_dimensions(part) for part in parts)
    of_classes = Ellipsis in [part for part in parts if not isinstance(part, Tensor)] or taken == output.dim()
    reaches_classes = of_classes and parts[-1] is not Ellipsis
    if taken > output.dim() or (reaches_classes and not _is_all(parts[-1])):
        return NotImplemented
    return output.of_rows(output.rows[index])


def _dimensions(part: Any) -> int:
    if part is Ellipsis:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype is torch.bool else 1


def _is_all(part: Any) -> bool:
    return isinstance(part, slice) and part == slice(None)


def _same(output: Any, *_: Any, **__: Any) -> Any:
    return output if isinstance(output, HeadOutput) else NotImplemented


def _detached(output: Any) -> Any:
    return HeadOutput.bare(output.call, output.rows.detach(), output.kind, classes_last=output.classes_last)


def _converted(output: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(output, HeadOutput):
        return NotImplemented
    kinds = [each for each in (*args, *kwargs.values()) if not isinstance(each, (bool, type(None)))]
    if not all(isinstance(each, (torch.dtype, torch.device, str)) for each in kinds):
        return NotImplemented
    if any(torch.device(each) != output.device for each in kinds if not isinstance(each, torch.dtype)):
        return NotImplemented
    (dtype,) = [each for each in kinds if isinstance(each, torch.dtype)] or [output.dtype]
    if not dtype.is_floating_point:
        return NotImplemented
    return output if dtype == output.dtype else output.after(lambda made: made.to(dtype))


def _as_type(dtype: torch.dtype) -> _Rule:
    return lambda output: _converted(output, dtype)


def _of_numbers(function: Callable[..., Tensor]) -> _Rule:
    """A function of each element, and of numbers."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        outputs = [k for k, each in enumerate(args) if isinstance(each, HeadOutput)]
        others = [*(each for k, each in enumerate(args) if k not in outputs), *kwargs.values()]
        if len(outputs) != 1 or not all(isinstance(each, (int, float, type(None))) for each in others):
            return NotImplemented
        (place,) = outputs
        before, after = args[:place], args[place + 1 :]  # The step holds no output.
        return args[place].after(lambda made: function(*before, made, *after, **kwargs))

    return rule


def _over_classes(function: Callable[..., Tensor]) -> _Rule:
    def rule(output: Any, dim: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(output, HeadOutput) or not output.classes_last or dim not in (-1, output.dim() - 1):
            return NotImplemented
        return output.after(lambda made: function(made, -1, *args, **kwargs))

    return rule


def _swapped(output: Any, *dims: Any) -> Any:
    if not isinstance(output, HeadOutput) or output.dim() != 3 or not output.classes_last:
        return NotImplemented
    if sorted(dim % 3 for dim in dims) != [1, 2]:
        return NotImplemented
    return HeadOutput.of(output.call, output.rows, output.kind, classes_last=False)


def _permuted(output: Any, *dims: Any) -> Any:
    order = list(dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)
    return _swapped(output, 1, 2) if [dim % 3 for dim in order] == [0, 2, 1] else NotImplemented


def _highest(output: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    if not isinstance(output, HeadOutput) or not output.classes_last or dim not in (-1, output.dim() - 1):
        return NotImplemented
    rows = output.rows.detach().reshape(-1, output.rows.shape[-1])
    with torch.no_grad():
        found = [output.call.outputs(rows[piece]).argmax(-1) for piece in output.call.pieces(len(rows))]
    made = torch.cat(found).reshape(output.shape[:-1])
    return made.unsqueeze(-1) if keepdim else made


_RULES: dict[Any, _Rule] = {
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshaped),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flattened),
    Tensor.contiguous: _same,
    **dict.fromkeys((Tensor.transpose, torch.transpose), _swapped),
    **dict.fromkeys((Tensor.permute, torch.permute), _permuted),
    **dict.fromkeys((Tensor.argmax, torch.argmax), _highest),
    **{
        method: _of_numbers(method)
        for name in ("mul", "div", "true_divide", "add", "sub", "tanh", "clamp")
        for method in (getattr(Tensor, name), getattr(torch, name))
    },
    **{
        method: _of_numbers(method)
        for method in (Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.__add__, Tensor.__sub__)
    },
    **{
        method: _over_classes(method)
        for method in (Tensor.log_softmax, torch.log_softmax, Tensor.softmax, torch.softmax, F.log_softmax, F.softmax)
    },
    Tensor.__getitem__: _indexed,
    Tensor.detach: _detached,
    Tensor.to: _converted,
    Tensor.float: _as_type(torch.float32),
    Tensor.double: _as_type(torch.float64),
    Tensor.half: _as_type(torch.float16),
    Tensor.bfloat16: _as_type(torch.bfloat16),
    F.cross_entropy: partial(loss_in_pieces, F.cross_entropy),
    F.nll_loss: partial(loss_in_pieces, F.nll_loss),
}

ROW_FUNCTIONS.update(_RULES)
