"""What an aten op does besides returning a result, as its schema says: what it changes, whether it may run again."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from profiler.op_graph import is_allocation
from profiler.tensors.tensor_trees import tensors_in

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
# Returns of attention kernels that are only written where they drop values out: memory as it was found else.
_UNWRITTEN = frozenset({"rng_state", "unused", "philox_seed", "philox_offset"})
# Their kernels call others that autocast casts for, though it has no cast for these themselves. Where a mode sees ops,
# autocast is off below it, and they give something else.
_CASTING = frozenset({"aten::affine_grid_generator", "aten::_trilinear", "aten::linalg_pinv", "aten::linalg_lstsq"})
_COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTraits:
    """What is known of an op without running it.

    Attributes:
        written: positions and names of the arguments that it changes in place.
        random: it draws random numbers.
        shape_only: of its first argument only the shape and kind matter.
        statistics: positions of running statistics (a BatchNorm); empty for other ops.
        training: position of its argument ``training``; -1 where it has none.
        blank: it makes storage that holds nothing yet.
        fills: what it changes in place need not hold anything before.
        state: position of an argument that a random generator keeps its state in; -1 where it has none.
        aliases: it returns its arguments or views of them, and nothing new.
        unwritten: positions of those of its results that may hold nothing, which differs from run to run.
        casts: its kernel casts within itself under autocast, but not where a dispatch mode sees it.
        not_rerunnable_reason: why it must not run again; empty where nothing in its schema speaks against it.
    """

    written: tuple[tuple[int, str], ...] = ()
    random: bool = False
    shape_only: bool = False
    statistics: tuple[int, ...] = ()
    training: int = -1
    blank: bool = False
    fills: bool = False
    state: int = -1
    aliases: bool = False
    unwritten: tuple[int, ...] = ()
    casts: bool = False
    not_rerunnable_reason: str = ""

    def writes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors that a call changes in place, as far as its schema says."""
        return tensors_in([args[i] if i < len(args) else kwargs.get(name) for i, name in self.written])

    def renews_statistics(self, args: tuple[Any, ...]) -> bool:
        """Whether a call updates running statistics without reading them."""
        return bool(self.statistics) and (
            self.training < 0 or (self.training < len(args) and bool(args[self.training]))
        )


_UNKNOWN = OpTraits(not_rerunnable_reason="it is no plain op")


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
        blank=op.namespace == "aten" and is_allocation(str(op)),
        fills=schema.name in _FILLING or any(argument.is_out for argument in schema.arguments),
        state=names.index("dropout_state") if "dropout_state" in names else -1,
        aliases=any(result.alias_info is not None for result in schema.returns),
        unwritten=tuple(
            k for k, result in enumerate(schema.returns) if "attention" in schema.name and result.name in _UNWRITTEN
        ),
        casts=schema.name in _CASTING,
        not_rerunnable_reason=_why_never(op),
    )


def _why_never(op: Any) -> str:
    if op.namespace in _COLLECTIVES:
        return "it communicates with other processes"
    if any("Storage" in str(argument.type) for argument in op._schema.arguments):
        return "its result lies in a storage that it is given, and nothing says whose that is"
    return "its kernel casts by itself under autocast" if op._schema.name in _CASTING else ""


def why_not_rerunnable(traits: OpTraits, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Why this call must not run again; empty where it may."""
    if traits.not_rerunnable_reason:
        return traits.not_rerunnable_reason
    if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
        return "it draws from a generator of its own, whose state is not known"
    if 0 <= traits.state < len(args) and isinstance(args[traits.state], Tensor):
        return "it draws from a state of its own, which it changes"
    return ""
