"""What becomes of the output of a head that has not run, where a function takes each of its rows by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from profiler.pieces.head_output import ROW_FUNCTIONS, HeadOutput
from profiler.pieces.row_losses import loss_in_pieces

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
