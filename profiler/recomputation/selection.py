"""Which ops of a stage run again, and at which of its modules the mode that records them is entered and left."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from profiler.op_graph import StageOps


class ModuleSwitch(NamedTuple):
    """Whether ops are recorded (None: as in the calling module) and saved tensors packed in a module's forward."""

    module: str
    recorded: bool | None
    saves: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """What to do with the ops of a stage.

    Attributes:
        ops: names of the ops in the modules that are recorded, in order; a call
            that runs others there does not follow the selection.
        rerun: positions in ``ops`` of those that run again in backward; what
            all others make is kept where backward needs it.
        switches: modules (empty: the stage itself) at which something changes: whether ops are recorded, in it and
            below until the next switch, or whether tensors that autograd saves are packed, from there on downwards.
        ordinals: which of the stage's ops ``ops`` are.
        packed: those of ``rerun`` whose results are held as bits, and unpacked instead.
    """

    ops: tuple[str, ...]
    rerun: frozenset[int]
    switches: tuple[ModuleSwitch, ...] = (ModuleSwitch("", True, True),)
    ordinals: tuple[int, ...] = ()
    packed: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, ops: StageOps, rerun: Collection[int], packed: Collection[int] = (), *, all_saves: bool = False
    ) -> Selection:
        """The selection by which ``rerun`` ops run again.

        Only modules that have such ops, or that change in place what such ops make, are recorded. Tensors that
        autograd saves are packed where they may be what such ops make, or (``all_saves``) everywhere.
        """
        made = {number for ordinal in rerun for number in ops.ops[ordinal].allocates}
        recorded = {op.module for k, op in enumerate(ops.ops) if k in rerun or made.intersection(op.writes)}
        counted = [ordinal for ordinal, op in enumerate(ops.ops) if op.module in recorded]
        return cls(
            ops=tuple(ops.ops[ordinal].op for ordinal in counted),
            rerun=frozenset(position for position, ordinal in enumerate(counted) if ordinal in rerun),
            switches=_switches(
                {op.module for op in ops.ops}, recorded, _savers(ops, rerun) | ({""} if all_saves else set())
            ),
            ordinals=tuple(counted),
            packed=frozenset(position for position, ordinal in enumerate(counted) if ordinal in packed),
        )


def _savers(ops: StageOps, rerun: Collection[int]) -> set[str]:
    """Modules in which autograd saves what ops that run again have made."""
    made = {number for ordinal in rerun for number in (*ops.ops[ordinal].allocates, *ops.ops[ordinal].writes)}
    saved = [storage for number, storage in enumerate(ops.storages) if storage.saved and number in made]
    return {module for storage in saved for module in storage.saved_in or ("",)}


def _switches(modules: set[str], recorded: set[str], savers: set[str]) -> tuple[ModuleSwitch, ...]:
    """Where recording begins or ends, and where saved tensors are packed.

    Args:
        modules: those with ops of their own.
        recorded: those of them with ops that run again.
        savers: those in which what these make is saved.
    """
    known = modules | {""}
    switches = []
    for module in sorted(known | savers):
        begins = module in recorded and not (module and _nearest_parent(module, known) in recorded)
        ends = module in modules - recorded and _nearest_parent(module, known) in recorded
        if begins or ends or module in savers:
            # Where ops are recorded hooks are on: without them autograd detaches what it saves, which is an op more.
            switches.append(ModuleSwitch(module, begins if begins or ends else None, begins or module in savers))
    return tuple(switches)


def _nearest_parent(module: str, known: Collection[str]) -> str:
    """The nearest known module that a module lies in; empty where there is none."""
    parent = module.rpartition(".")[0]
    while parent and parent not in known:
        parent = parent.rpartition(".")[0]
    return parent
