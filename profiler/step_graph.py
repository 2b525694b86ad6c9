"""A training step as one graph of ops: what each reads, makes and costs, forward and backward; plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from profiler.op_graph import kind_of

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
    seconds: float = 0.0
    transient_bytes: int = 0
    random: bool = False
    state_bytes: int = 0

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

    size_bytes: int
    unseen_bytes: int = 0
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
    resident_bytes: int
