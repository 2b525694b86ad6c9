"""The record of one traced step: which module calls ran, what they took, returned and saved, and every op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor, nn

from profiler.workload.tensor_parts import StorageTable


@dataclass(slots=True)
class Leaf:
    """A tensor that goes into or comes out of a call.

    Attributes:
        storage: the number of the storage.
        identity: the object's own.
        version: the number of changes in place before.
        shape, dtype, requires_grad: the properties of the tensor.
    """

    storage: int | None
    identity: int
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    version: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One call of one module. Positions count ops and saved tensors of the forward, in order.

    Attributes:
        name: the module's name in the model.
        index: the number of earlier calls of the same module.
        parent: position of the enclosing call in ``Trace.calls``; -1 for the model itself.
        first_op, end_op: the bounds of its ops, ``Trace.ops[first_op:end_op]``.
        first_save, end_save: the bounds of its saved tensors, ``Trace.saves[first_save:end_save]``.
        opaque: class of an object in its arguments or output that holds tensors where they are not found.
        fills: class of an object in its arguments that it put tensors into, and did not return.
        side_effect: the other changes that a recomputation would repeat, in words.
        scripted: the part of its module that ``torch.jit.script`` has compiled, in words; empty for none.
        fills_late: an op in it writes to a tensor that it has saved for backward before it ran.
        goes_backward: some of what it saved was used before the step's forward was over.
        hides: function that keeps tensors made in it where no saved-tensor hook sees them; empty for none.
        hidden: storages of such tensors.
        distributed: ops of distributed tensors ran in it, or collectives.
        waits: a head in it waits for its loss.
    """

    name: str
    module: nn.Module
    index: int
    parent: int
    inputs: list[Leaf]
    first_op: int
    first_save: int
    first_node: int
    end_op: int = 0
    end_save: int = 0
    end_node: int = 0
    outputs: list[Leaf] = field(default_factory=list)
    mutates_input: bool = False
    draws_random: bool = False
    mutated_buffers: tuple[str, ...] = ()
    opaque: str = ""
    fills: str = ""
    side_effect: str = ""
    scripted: str = ""
    fills_late: bool = False
    goes_backward: bool = False
    hides: str = ""
    hidden: set[int] = field(default_factory=set)
    distributed: bool = False
    waits: bool = False

    @property
    def input_storages(self) -> set[int]:
        return {leaf.storage for leaf in self.inputs if leaf.storage is not None}

    @property
    def output_storages(self) -> set[int]:
        return {leaf.storage for leaf in self.outputs if leaf.storage is not None}


@dataclass(slots=True)
class Save:
    """A tensor that autograd saved: its storage, how many ops had run before, and in which module.

    Attributes:
        filled_late: the op that it was saved for, or the next one, writes to it.
        unused: whether it was gone when backward began: the loss does not depend on it.
    """

    storage: int | None
    op: int
    module: str = ""
    filled_late: bool = False
    unused: bool = False


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SavedInGraph:
    """The stand-in of a saved tensor in the graph, with the open calls; None where steps may keep nothing."""

    tensor: Tensor | None
    calls: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The uses of earlier storages by an op; versions count changes in place during the step.

    Attributes:
        reads: pairs (storage, version) whose contents it read.
        writes: storages that it changed in place.
        renews: running statistics that it changed without having read them.
        fills: whether it overwrote what it changed.
        random: whether it drew random numbers.
    """

    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[int, ...] = ()
    renews: tuple[int, ...] = ()
    fills: bool = False
    random: bool = False


@dataclass(slots=True, kw_only=True)
class Op:
    """One aten op as it was dispatched."""

    name: str
    module: str
    side: Literal["forward", "backward"]
    seconds: float
    output_bytes: int
    storages: tuple[int, ...]
    node: int
    access: Access
    kept: bool = False


class ValueOp(NamedTuple):
    """An op by whose values bytes differ.

    Attributes:
        position: the number of ops of the forward that had run before.
        name, module: the op, and the module that ran it.
        branch: whether it hands a value to Python, which may branch by it.
        deciding: storages of the values.
    """

    position: int
    name: str
    module: str
    branch: bool
    deciding: frozenset[int]


@dataclass(slots=True)
class Trace:
    """One traced step.

    Attributes:
        calls, saves, ops, backward_ops: the records in order.
        storages: all that it met, by number.
        always_alive: the storages of parameters, buffers and the batch.
        casts: the storages that autocast made of parameters, and caches until the forward ends.
        by_values: ops that take bytes by values, or hand values to Python, which may branch by them.
        sparse_gradients: names of the parameters that got one.
    """

    calls: list[Call] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    backward_ops: list[Op] = field(default_factory=list)
    storages: StorageTable = field(default_factory=StorageTable)
    always_alive: set[int] = field(default_factory=set)
    casts: set[int] = field(default_factory=set)
    by_values: list[ValueOp] = field(default_factory=list)
    sparse_gradients: list[str] = field(default_factory=list)

    def saved(self, first: int, end: int) -> set[int]:
        """Storages under ``saves[first:end]``, but for those that are always alive."""
        return {save.storage for save in self.saves[first:end] if save.storage is not None} - self.always_alive

    def ancestors(self, position: int) -> Iterator[int]:
        """Positions of the calls that the call at ``position`` is a part of, the innermost first."""
        parent = self.calls[position].parent
        while parent >= 0:
            yield parent
            parent = self.calls[parent].parent
