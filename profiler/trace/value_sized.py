"""Ops that take bytes by the values in their arguments, and not by shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.tensors.tensor_trees import tensors_in
from profiler.trace.step_record import ValueOp

# A Taylor series of a degree that is chosen by the matrix's norm.
_BY_NORM = ("aten::linalg_matrix_exp",)
_MASKS = (torch.bool, torch.uint8)


def deciding_tensors(op: Any, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
    """The tensors whose values decide how many bytes an op takes, or which way Python goes; none where shapes do."""
    if not isinstance(op, torch._ops.OpOverload):
        return []
    if op._schema.name in _BY_NORM or is_branch(op):
        return tensors_in([args, kwargs])
    if torch.Tag.dynamic_output_shape not in op.tags:
        return []
    if op._schema.name == "aten::index":  # The tag stands for masks; with positions the result has their shape.
        return [tensor for tensor in tensors_in([args[1:], kwargs]) if tensor.dtype in _MASKS]
    return tensors_in([args, kwargs])


def is_branch(op: Any) -> bool:
    """Whether an op hands a value to Python, which may go another way with another one."""
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.data_dependent_output in op.tags


def in_words(ops: Iterable[ValueOp]) -> list[str]:
    """One line for each kind of op, with the modules in which it ran."""
    modules: dict[str, list[str]] = {}
    for name, module in dict.fromkeys((op.name, op.module) for op in ops):
        modules.setdefault(name, []).append(module)
    return [f"{_what(name)} in {_places(inside)}: its bytes depend on values" for name, inside in modules.items()]


def _what(name: str) -> str:
    return "a value by which Python may branch" if name == "aten._local_scalar_dense" else name.removeprefix("aten.")


def _places(modules: Sequence[str]) -> str:
    named = [module for module in modules if module] or [""]  # In backward nobody knows the module.
    first = repr(named[0]) if named[0] else "the model"
    more = len(named) - 1
    return f"{first} and {more} other module{'s' if more > 1 else ''}" if more else first
