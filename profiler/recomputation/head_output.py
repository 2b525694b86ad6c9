"""The output of a head that has not run yet: a tensor of its shape, made only where somebody needs all of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from profiler.recomputation.module_pieces import fit_to_cache, slices
from profiler.workload.torch_state import TorchState

Step = Callable[[Tensor], Tensor]
Inside = AbstractContextManager[Any]


class ChangedInPlace(RuntimeError):
    """The output of a head was to be changed in place while it waits for its loss."""


class LossScale:
    """The factor of the last loss before backward: numbers of few bits rely on it.

    It takes no memory while a step runs: its number stands in a tensor that is made beforehand.

    Args:
        device: the device of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._last = torch.ones((), device=device)

    def expected(self, like: Tensor) -> Tensor:
        """The gradient that is expected to come to a loss on the device of ``like``."""
        if self._last.device != like.device:
            self._last = torch.ones((), device=like.device)
        usable = self._last.isfinite() & (self._last != 0)
        return torch.where(usable, self._last, 1.0)

    def note(self, gradient: Tensor) -> None:
        """This one came."""
        self._last.copy_(gradient.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCall:
    """A call of a head that is to run a few rows at a time.

    Attributes:
        forward: the head's forward, for any number of rows: (..., features) in, (..., classes) out.
        state: torch's flags and autocast, as they were at the call.
        parameters: the parameters of the head that take gradients.
        steps: the functions that its outputs go through, each row by itself.
        rows_at_once: the number of rows that run together.
        whole: told when all rows are made at once after all.
        scale: the scale of the losses that go backward through it.
    """

    forward: Callable[[Tensor], Tensor]
    state: TorchState
    parameters: tuple[Tensor, ...]
    rows_at_once: int
    whole: Callable[[], None]
    scale: LossScale
    steps: tuple[Step, ...] = ()

    def outputs(self, rows: Tensor, inside: Inside | None = None) -> Tensor:
        """Returns the head's output for these rows, run inside a context, after the steps."""
        with self.state.reinstated(), fit_to_cache(), inside or nullcontext():
            made = self.forward(rows)
        for step in self.steps:
            made = step(made)
        return made

    def pieces(self, count: int) -> list[slice]:
        """Slices of so many rows."""
        return slices(count, -(-count // self.rows_at_once)) if count else []


class Row(NamedTuple):
    """A row of a head's output: how many classes it has, and their type."""

    classes: int
    dtype: torch.dtype


class HeadOutput(Tensor):
    """Stands for the output of a head. Losses run it in pieces; whatever else needs its values has all of them made.

    Attributes:
        call: the call of the head.
        rows: the input, (..., features).
        classes_last: whether its shape is (..., classes); else (batch, classes, places), of rows (batch, places,
            features).
        kind: the shape and type of each row.
        made: the values, once they were needed.
    """

    call: HeadCall
    rows: Tensor
    classes_last: bool
    kind: Row
    made: Tensor | None

    @staticmethod
    def of(call: HeadCall, rows: Tensor, kind: Row, *, classes_last: bool = True) -> HeadOutput:
        """The output for these rows."""
        output = _Head.apply(call, rows, kind, classes_last, *call.parameters)
        assert isinstance(output, HeadOutput)
        return output

    @staticmethod
    def bare(call: HeadCall, rows: Tensor, kind: Row, *, classes_last: bool) -> HeadOutput:
        """Returns the same output without history."""
        *lead, _ = rows.shape
        shape = (*lead, kind.classes) if classes_last else (lead[0], kind.classes, lead[1])
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            HeadOutput, shape, dtype=kind.dtype, device=rows.device, storage_size=0
        )
        made.call, made.rows, made.classes_last, made.made, made.kind = call, rows, classes_last, None, kind
        return made

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"<output of a head, {tuple(self.shape)}, {self.dtype}, not made yet>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if (rule := ROW_FUNCTIONS.get(func)) is not None:
                result = rule(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            elif func not in _ABOUT and (func.__name__ not in _ACCESSORS or func in _VIEWS):
                for each in pytree.tree_leaves((args, kwargs)):
                    if isinstance(each, HeadOutput):
                        each.values()  # While autocast is as it was: below it is off.
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (given,) = args
            return HeadOutput.bare(given.call, given.rows.detach(), given.kind, classes_last=given.classes_last)
        if func._schema.is_mutable:
            raise ChangedInPlace(
                f"{func} changes the output of a head whose loss runs in pieces; write the result into a new tensor, "
                "or plan without numerics='rounding'"
            )
        args, kwargs = pytree.tree_map_only(HeadOutput, HeadOutput.values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def values(self) -> Tensor:
        """All of them, without history."""
        if self.made is None:
            self.call.whole()
            with torch.no_grad():
                made = self.call.outputs(self.rows.detach())
            self.made = made if self.classes_last else made.transpose(1, 2)
        return self.made

    def of_rows(self, rows: Tensor) -> HeadOutput:
        """The output for other rows, which are made of these."""
        return HeadOutput.of(self.call, rows, self.kind)

    def after(self, step: Step) -> HeadOutput:
        """The output after one more step, which takes each row by itself."""
        call = replace(self.call, steps=(*self.call.steps, step))
        made = step(torch.ones(1, dtype=self.dtype, device=self.device))  # Its type may depend on autocast.
        return HeadOutput.of(call, self.rows, self.kind._replace(dtype=made.dtype), classes_last=self.classes_last)


# What becomes of an output where a function takes each of its rows by itself; NotImplemented where it does not.
ROW_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
_ABOUT = {  # functions that ask for no values, as getters do but for those of views
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "nelement", "is_floating_point", "element_size")),
    *(getattr(Tensor, name) for name in ("untyped_storage", "stride", "storage_offset", "is_contiguous", "__len__")),
    *(getattr(Tensor, name) for name in ("get_device", "__hash__", "register_hook", "is_complex")),
    torch.is_floating_point,
    torch.numel,
}
_ACCESSORS = ("__get__", "__set__", "__delete__")
_VIEWS = {getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}


class _Head(torch.autograd.Function):
    """Gives the output of a head that has not run; gradients of all of it go back through the head in pieces."""

    @staticmethod
    def forward(ctx: Any, call: HeadCall, rows: Tensor, kind: Row, classes_last: bool, *parameters: Tensor) -> Tensor:
        ctx.call, ctx.classes_last = call, classes_last
        ctx.save_for_backward(rows, *parameters)
        return HeadOutput.bare(call, rows, kind, classes_last=classes_last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        rows, *parameters = ctx.saved_tensors
        gradient = gradient if ctx.classes_last else gradient.transpose(1, 2)
        flat = rows.reshape(-1, rows.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        sums = GradientSums(flat[0], parameters, [ctx.needs_input_grad[1], *ctx.needs_input_grad[4:]])
        for piece in ctx.call.pieces(len(flat[0])):
            sums.add(piece, ctx.call.outputs, flat[1][piece])
        of_rows, *of_parameters = sums.gradients
        return None, None if of_rows is None else of_rows.view_as(rows), None, None, *of_parameters


class GradientSums:
    """Gradients of rows and parameters, put together from those of pieces.

    Args:
        rows: (rows, features).
        parameters: the parameters that the pieces may use.
        wanted: whether the gradient of the rows, and of each parameter, is wanted.

    Attributes:
        gradients: the gradients of the rows and of each parameter; None where none is wanted.
    """

    def __init__(self, rows: Tensor, parameters: list[Tensor], wanted: list[bool]) -> None:
        self._rows, self._parameters = rows, parameters
        self.gradients = [
            torch.zeros_like(each, memory_format=torch.contiguous_format) if wants else None
            for each, wants in zip([rows, *parameters], wanted, strict=True)
        ]

    def add(self, piece: slice, run: Callable[[Tensor, Inside], Tensor], gradient: Tensor) -> Tensor:
        """Run some rows forward and backward; what they give, without history.

        Args:
            piece: the rows.
            run: the function that returns the result for these rows; it runs the head inside a context.
            gradient: the gradient of the result.
        """
        of_rows, *of_parameters = self.gradients
        sums = {id(p): into for p, into in zip(self._parameters, of_parameters, strict=True) if into is not None}
        with torch.enable_grad():
            rows = self._rows[piece].detach().requires_grad_(of_rows is not None)
            result = run(rows, _Linears(sums))
        inputs = [*([rows] if of_rows is not None else []), *(p for p in self._parameters if id(p) in sums)]
        # A loop goes backward outside of autocast.
        with torch._C._DisableAutocast():
            made = list(torch.autograd.grad(result, inputs, gradient, allow_unused=True))
        if of_rows is not None and (first := made.pop(0)) is not None:
            of_rows[piece] = first
        for into, each in zip(sums.values(), made, strict=True):
            if each is not None:
                into.add_(each)
        return result.detach()


class _Linears(TorchFunctionMode):
    """Has linear layers add the gradients of their weights to these sums: no tensor of the weight's size is made."""

    def __init__(self, sums: dict[int, Tensor]) -> None:
        super().__init__()
        self._sums = sums

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and not kwargs and len(args) >= 2:
            given, weight, *bias = args
            into = self._sums.get(id(weight))
            same = into is not None and given.dtype == weight.dtype == into.dtype
            if same and not torch.is_autocast_enabled(given.device.type):
                return _Linear.apply(given, weight, into, *bias)
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, into: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.into = into
        return torch.nn.functional.linear(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        given, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        ctx.into.addmm_(flat.t(), given.reshape(-1, given.shape[-1]))
        of_given = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        of_bias = (flat.sum(0),) if len(ctx.needs_input_grad) > 3 and ctx.needs_input_grad[3] else (None,)
        return of_given, None, None, *of_bias[: len(ctx.needs_input_grad) - 3]
