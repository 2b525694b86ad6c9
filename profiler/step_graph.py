"""A training step as one graph of ops: what each reads, makes and costs, forward and backward; plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from profiler.json_files import check_positions
from profiler.op_graph import kind_of

Bytes = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Side = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOp:
    """One aten op of a step. Its ordinal is its position in ``StepGraph.ops``.

    Attributes:
        name: unique in the step.
        op: for example ``aten.mm.default``.
        module: name of the module whose forward calls it, or whose forward it is the backward of; empty where unknown.
        side: ``forward`` where the forward's outputs need it.
        reads: storages that it reads, parameters, buffers and the batch left out.
        arguments: of a captured call, numbers of the tensors among its arguments that the op reads.
        makes: storages that it makes. A view makes none, and is no op here: who reads a view reads its storage.
        once_makes: those of them that its first run alone makes: a batch norm's running statistics.
        once_reason: why it must not run again; empty where it may.
        seconds: of one run.
        transient_bytes: the most it holds while it runs, beside what it reads and makes.
        random: it draws random numbers.
        state_bytes: on the device, of the state that it draws random numbers from; kept where it runs again.
    """

    name: str
    op: str
    module: str = ""
    side: Side = "forward"
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    once_makes: tuple[int, ...] = ()
    once_reason: str = ""
    seconds: Seconds = 0.0
    transient_bytes: Bytes = 0
    random: bool = False
    state_bytes: Bytes = 0
    arguments: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """The op's name without library and overload."""
        return kind_of(self.op)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStorage:
    """A storage that an op of the step makes, or the loss.

    Attributes:
        size_bytes: of the storage, however many tensors view it.
        unseen_bytes: how much of it tracing does not show: some ops allocate more than what they return takes, and
            CUDA's allocator does.
        returned: the forward returns it.
        written: it is written into a buffer as the forward ends.
        gradient: it is a gradient of a parameter or an input, alive as the step's backward ends.
        of_loss: the loss makes it: the gradient of an output of the forward, with which backward begins.
    """

    size_bytes: Bytes
    unseen_bytes: Bytes = 0
    returned: bool = False
    written: bool = False
    gradient: bool = False
    of_loss: bool = False

    @property
    def traced_bytes(self) -> int:
        """Those that tracing shows."""
        return self.size_bytes - self.unseen_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """The dataflow of a step's forward and backward; between them the loss is outside of the model.

    Attributes:
        ops: in the order in which they were traced, those of the forward first.
        storages: each referred to by its position.
        resident_bytes: of what ops read and none makes: parameters, buffers, the batch, constants.
    """

    ops: tuple[StepOp, ...]
    storages: tuple[StepStorage, ...]
    resident_bytes: Bytes

    def check_positions(self) -> None:
        """Raises ValueError where an op refers to a storage that is not there, or reads one that none makes before."""
        made: set[int] = {number for number, storage in enumerate(self.storages) if storage.of_loss}
        for op in self.ops:
            check_positions("storages of an op", (*op.reads, *op.makes, *op.once_makes), len(self.storages))
            if missing := set(op.reads) - made - set(op.makes):
                raise ValueError(f"expected ops that read what ops before them make, got storage {min(missing)}")
            made.update(op.makes)
