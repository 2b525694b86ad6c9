"""Which ops of a stage run again, and at which of its modules watching begins and ends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from profiler.op_graph import StageOps


class ModuleSwitch(NamedTuple):
    """A module at which something changes: whether ops are watched (None: as before), whether saved tensors are."""

    module: str
    watched: bool | None
    saves: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """What to do with the ops of a stage.

    Attributes:
        ops: names of the ops in the modules that are watched, in order; a call
            that runs others there does not follow the selection.
        rerun: positions in ``ops`` of those that run again in backward; what
            all others make is kept where backward needs it.
        turns: modules (empty: the stage itself) at which something changes: whether ops are watched, in it and
            below until the next turn, or whether tensors that autograd saves are looked at, from there on downwards.
        ordinals: which of the stage's ops ``ops`` are.
    """

    ops: tuple[str, ...]
    rerun: frozenset[int]
    turns: tuple[ModuleSwitch, ...] = (ModuleSwitch("", True, True),)
    ordinals: tuple[int, ...] = ()

    @classmethod
    def of(cls, ops: StageOps, rerun: Collection[int], *, all_saves: bool = False) -> Selection:
        """The selection by which ``rerun`` ops run again.

        Only modules that have such ops, or that change in place what such ops make, are watched. Tensors that autograd
        saves are looked at where they may be what such ops make, or (``all_saves``) everywhere.
        """
        made = {number for ordinal in rerun for number in ops.ops[ordinal].allocates}
        watched = {op.module for k, op in enumerate(ops.ops) if k in rerun or made.intersection(op.writes)}
        counted = [ordinal for ordinal, op in enumerate(ops.ops) if op.module in watched]
        return cls(
            ops=tuple(ops.ops[ordinal].op for ordinal in counted),
            rerun=frozenset(position for position, ordinal in enumerate(counted) if ordinal in rerun),
            turns=_turns({op.module for op in ops.ops}, watched, _savers(ops, rerun) | ({""} if all_saves else set())),
            ordinals=tuple(counted),
        )


def _savers(ops: StageOps, rerun: Collection[int]) -> set[str]:
    """Modules in which autograd saves what ops that run again have made."""
    made = {number for ordinal in rerun for number in (*ops.ops[ordinal].allocates, *ops.ops[ordinal].writes)}
    saved = [storage for number, storage in enumerate(ops.storages) if storage.saved and number in made]
    return {module for storage in saved for module in storage.saved_in or ("",)}


def _turns(modules: set[str], watched: set[str], savers: set[str]) -> tuple[ModuleSwitch, ...]:
    """Where watching begins or ends, and where saved tensors are looked at.

    Args:
        modules: those with ops of their own.
        watched: those of them with ops that run again.
        savers: those in which what these make is saved.
    """
    known = modules | {""}
    found = []
    for module in sorted(known | savers):
        begins = module in watched and not (module and _around(module, known) in watched)
        ends = module in modules - watched and _around(module, known) in watched
        if begins or ends or module in savers:
            # Where ops are watched hooks are on: without them autograd detaches what it saves, which is an op more.
            found.append(ModuleSwitch(module, begins if begins or ends else None, begins or module in savers))
    return tuple(found)


def _around(module: str, known: Collection[str]) -> str:
    """The nearest module around one that is known; empty for the stage itself, and for what is around that."""
    around = module.rpartition(".")[0]
    while around and around not in known:
        around = around.rpartition(".")[0]
    return around
