"""The side effects of an aten op, as its schema says."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from profiler.workload.tensor_trees import tensors_in

# Their first argument gives shape and kind only; its contents are not read.
_SHAPE_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    )
)
# In-place ops that do not need what was there before; a part may be left as it was.
_FILLING = frozenset(
    f"aten::{name}_"
    for name in (
        *("copy", "fill", "zero", "set", "rrelu_with_noise", "_foreach_copy", "_foreach_zero"),
        *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform"),
        *("index_put", "_index_put_impl", "index_copy", "index_fill", "masked_fill", "masked_scatter", "scatter"),
    )
) | {"aten::rrelu_with_noise"}
# BatchNorm kernels change these, though some schemas do not say so; in training mode they do not read them.
_STATISTICS = ("running_mean", "running_var")
# Their kernels call others that autocast casts for, though it has no cast for these themselves. Where a mode sees ops,
# autocast is off below it, and they give something else.
_CASTING = frozenset({"aten::affine_grid_generator", "aten::_trilinear", "aten::linalg_pinv", "aten::linalg_lstsq"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTraits:
    """The properties of an op that are known without running it.

    Attributes:
        written: positions and names of the arguments that it changes in place.
        random: whether it draws random numbers.
        shape_only: whether only the shape and type of its first argument matter.
        statistics: positions of running statistics (a BatchNorm); empty for other ops.
        training: position of its argument ``training``; -1 where it has none.
        fills: whether it overwrites what it changes in place.
        casts: whether its kernel casts within itself under autocast, but not where a dispatch mode sees it.
    """

    written: tuple[tuple[int, str], ...] = ()
    random: bool = False
    shape_only: bool = False
    statistics: tuple[int, ...] = ()
    training: int = -1
    fills: bool = False
    casts: bool = False

    def writes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors that a call changes in place, as far as its schema says."""
        return tensors_in([args[i] if i < len(args) else kwargs.get(name) for i, name in self.written])

    def renews_statistics(self, args: tuple[Any, ...]) -> bool:
        """Whether a call updates running statistics without reading them."""
        return bool(self.statistics) and (
            self.training < 0 or (self.training < len(args) and bool(args[self.training]))
        )


_UNKNOWN = OpTraits()


def overload_of(name: str) -> Any:
    """``torch.ops.aten.mm.default`` of ``aten.mm.default``; None of what is no plain op here."""
    op: Any = torch.ops
    for part in name.split("."):
        op = getattr(op, part, None)
    return op


@functools.cache
def traits_of(op: Any) -> OpTraits:
    """The traits of an overload, for example ``torch.ops.aten.mm.default``."""
    if not isinstance(op, torch._ops.OpOverload):
        return _UNKNOWN
    schema = op._schema
    names = [argument.name for argument in schema.arguments]
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    if op.namespace == "c10d":  # They change tensors, and their schemas do not say so.
        written = [i for i, a in enumerate(schema.arguments) if "Tensor" in str(a.type)]
    functional = schema.name.endswith("_functional")  # These return the new statistics and change nothing.
    statistics = () if functional else tuple(names.index(name) for name in _STATISTICS if name in names)
    return OpTraits(
        written=tuple((i, names[i]) for i in written if i not in statistics),
        random=torch.Tag.nondeterministic_seeded in op.tags,
        shape_only=schema.name in _SHAPE_ONLY,
        statistics=statistics,
        training=next((names.index(n) for n in ("training", "train", "is_training") if n in names), -1),
        fills=schema.name in _FILLING or any(argument.is_out for argument in schema.arguments),
        casts=schema.name in _CASTING,
    )
