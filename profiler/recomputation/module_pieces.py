"""A module that runs a few rows at a time, keeps its inputs alone, and is recomputed so in backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.fx.traceback import annotate
from torch.nn.utils.stateless import _reparametrize_module

from profiler.workload.compiled_forwards import Forward
from profiler.workload.tensor_trees import tensors_in, with_tensors, without_tensors
from profiler.workload.torch_state import TorchState

ONE_SUM = "planner_one_sum"  # in what tracing notes of an op: it adds up what uses of one call contribute


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInPieces:
    """A call of a module, whose tensors are taken apart along one dimension.

    Attributes:
        run: the module's forward, as a function of the tensors in its arguments.
        module: the module of the forward.
        state: torch's flags and autocast, as they were at the call.
        dim: the dimension of the tensors, and of the result, that is taken apart.
        size: the size along it.
        pieces: the number of pieces.
    """

    run: Callable[[Sequence[Tensor]], Tensor]
    module: nn.Module
    state: TorchState
    dim: int
    size: int
    pieces: int

    def bounds(self) -> list[tuple[int, int]]:
        """The first and the length of each piece."""
        return [(piece.start, piece.stop - piece.start) for piece in slices(self.size, self.pieces)]

    def is_apart(self, tensor: Tensor) -> bool:
        """Whether a tensor is taken apart: it has as many rows as the others."""
        return tensor.dim() > self.dim and tensor.shape[self.dim] == self.size

    def piece(self, tensor: Tensor, first: int, length: int) -> Tensor:
        """Returns some rows of a tensor; all of one that is not taken apart."""
        return tensor.narrow(self.dim, first, length) if self.is_apart(tensor) else tensor

    def result(self, tensors: Sequence[Tensor], held: Sequence[Tensor]) -> Tensor:
        """Returns the module's output with these parameters and buffers, which are others while it is captured."""
        now = _held(self.module)
        with self.state.reinstated(), fit_to_cache():
            if all(one is other for one, other in zip(now.values(), held, strict=True)):
                return self.run(tensors)
            with _reparametrize_module(self.module, dict(zip(now, held, strict=True))):
                return self.run(tensors)


def slices(count: int, pieces: int) -> list[slice]:
    """Returns so many slices of a number of rows, of as equal lengths as can be."""
    return [slice(*ends) for ends in itertools.pairwise(count * k // pieces for k in range(pieces + 1))]


def _held(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@contextmanager
def fit_to_cache() -> Any:
    """Without gradients, autocast keeps no cast of a weight: those that come later would take one without history."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(cached and torch.is_grad_enabled())
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


class ModuleInPieces:
    """Calls of a module in pieces.

    Args:
        module: a module that takes each row by itself.
        dim: the dimension of its tensors along which rows lie.
        pieces: the number of pieces of a call; as many as rows where these are fewer.
    """

    def __init__(self, module: nn.Module, dim: int, pieces: int) -> None:
        self._module, self._dim, self._pieces = module, dim, pieces

    def wrapped(self, forward: Forward) -> Forward:
        """Returns the function that runs in place of the module's forward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            given = tensors_in((args, kwargs))
            size = next((t.shape[self._dim] for t in given if t.is_floating_point() and t.dim() > self._dim + 1), 0)
            if size < 2 or not torch.is_grad_enabled() or not self._module.training:
                return forward(*args, **kwargs)
            tree = without_tensors((args, kwargs))

            def of(tensors: Sequence[Tensor]) -> Tensor:
                given_args, given_kwargs = with_tensors(tree, list(tensors))
                return forward(*given_args, **given_kwargs)

            call = CallInPieces(
                run=of,
                module=self._module,
                state=TorchState(given[0].device),
                dim=self._dim,
                size=size,
                pieces=min(size, self._pieces),
            )
            return _InPieces.apply(call, len(given), *given, *_held(self._module).values())

        return run


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: CallInPieces, count: int, *tensors: Tensor) -> Tensor:
        ctx.call, ctx.count = call, count
        ctx.save_for_backward(*tensors)
        given, held = tensors[:count], tensors[count:]
        made = [call.result([call.piece(t, *bounds) for t in given], held) for bounds in call.bounds()]
        return torch.cat(made, call.dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        call, tensors = ctx.call, ctx.saved_tensors
        given, held = tensors[: ctx.count], tensors[ctx.count :]
        wanted = ctx.needs_input_grad[2:]
        parts: list[list[Tensor]] = [[] for _ in tensors]
        for bounds in call.bounds():
            with torch.enable_grad():
                pieces = [
                    call.piece(t.detach(), *bounds).requires_grad_(wants)
                    for t, wants in zip(given, wanted, strict=False)
                ]
                made = call.result(pieces, held)
            taken = [each for each, wants in zip([*pieces, *held], wanted, strict=True) if wants]
            with torch._C._DisableAutocast():
                of_piece = torch.autograd.grad(made, taken, call.piece(gradient, *bounds), allow_unused=True)
            del made
            places = [k for k, wants in enumerate(wanted) if wants]
            for place, each in zip(places, of_piece, strict=True):
                if each is None:
                    continue
                if place < ctx.count and call.is_apart(given[place]):
                    parts[place].append(each)
                else:
                    with annotate({ONE_SUM: True}):
                        parts[place] = [each if not parts[place] else parts[place][0] + each]
        made_gradients = [
            None if not each else torch.cat(each, call.dim) if len(each) > 1 else each[0] for each in parts
        ]
        return None, None, *made_gradients
