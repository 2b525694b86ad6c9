"""The ops of a stage: their inputs, results and costs, and which are recomputed for a choice of kept storages."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from profiler.json_files import check_positions

StorageVersion = tuple[int, int]
NamedModule = tuple[str, str]  # a module's name, and the name of its class


class ChoiceError(ValueError):
    """A choice inside a stage that cannot be; the message names the op, or what is not there, and says why."""


def kind_of(op: str) -> str:
    """An op's name without library and overload.

    >>> kind_of("aten.mm.default")
    'mm'
    """
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


def is_allocation(op: str) -> bool:
    """Whether an op only allocates what another one fills; whoever names the maker of a tensor means that one.

    >>> is_allocation("aten.empty_like.default"), is_allocation("aten.zeros_like.default")
    (True, False)
    """
    return kind_of(op) in _ALLOCATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStorage:
    """A storage that ops of a stage touch: made in the stage, or come from outside of it.

    Attributes:
        size_bytes: the size of the storage, however many tensors view it.
        op: ordinal of the op that made it; -1 where it comes from outside.
        output: its number among the new storages of that op.
        versions: the number of times that ops of the stage change it in place.
        saved: autograd saves it inside the stage.
        saved_in: modules in which it does, relative to the stage; empty where that is not known.
        always_live: whether it is alive until the stage's backward whatever the stage keeps: it comes from outside as a
            parameter or a buffer or is saved by the stage in any case, or it is a saved cast of a parameter, which
            autocast holds until the forward ends.
        dies_after_stage: whether it comes from the stage before and lives for this stage alone.
        returned: whether it is part of the stage's output.
    """

    size_bytes: int
    op: int
    output: int = 0
    versions: int = 0
    saved: bool = False
    saved_in: tuple[str, ...] = ()
    always_live: bool = False
    dies_after_stage: bool = False
    returned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOp:
    """One aten op of a stage's forward. Its ordinal is its position in ``StageOps.ops``.

    Attributes:
        op: the name, for example ``aten.mm.default``.
        module: name of the module that called it, relative to the stage; empty for the stage itself.
        seconds: the time of the forward kernel.
        reads: pairs (storage, version) whose contents it reads; version counts in-place changes.
        allocates: storages it makes.
        writes: storages it changes in place.
        random: whether it draws random numbers.
        not_rerunnable_reason: why it must not be recomputed; empty where it may.
    """

    op: str
    module: str
    seconds: float
    reads: tuple[StorageVersion, ...] = ()
    allocates: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    random: bool = False
    not_rerunnable_reason: str = ""

    @property
    def kind(self) -> str:
        """The op's name without library and overload."""
        return kind_of(self.op)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOps:
    """The dataflow of one stage's forward.

    A value is a storage in one of its versions. What is kept of a storage is its last version.

    Attributes:
        ops, storages: each referred to by its position.
        modules: pairs (name relative to the stage, class) of the modules that ran, the stage itself first.
        saves: the storage under each tensor that autograd saves, in order; -1 for what lives through the step anyway
            (parameters, buffers, the batch), and for what has no storage. Empty in files of older releases.
        inputs: the storage under each tensor that goes in; -1 for what no op touches.
    """

    ops: tuple[StageOp, ...]
    storages: tuple[StageStorage, ...]
    modules: tuple[NamedModule, ...] = ()
    saves: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()

    def check_positions(self) -> None:
        """Raises ValueError where it refers to an op or a storage that it does not have."""
        for op in self.ops:
            numbers = (*(number for number, _ in op.reads), *op.allocates, *op.writes)
            check_positions("storages of an op", numbers, len(self.storages))
        check_positions("ops of storages", (storage.op for storage in self.storages), len(self.ops), least=-1)
        check_positions("storages that are saved", self.saves, len(self.storages), least=-1)
        check_positions("storages of inputs", self.inputs, len(self.storages), least=-1)
        versions = [0] * len(self.storages)
        for op in self.ops:
            for number in op.writes:
                versions[number] += 1
        if any(storage.versions > count for storage, count in zip(self.storages, versions, strict=True)):
            raise ValueError("expected storages that are changed as often as their ops do, got more versions")

    @property
    def saved_bytes(self) -> int:
        """Bytes that the unplanned stage saves of what it makes."""
        return sum(storage.size_bytes for storage in self.storages if storage.saved and storage.op >= 0)

    def writers(self) -> dict[StorageVersion, int]:
        """The op that makes each value of the stage."""
        writers: dict[StorageVersion, int] = {}
        version = [0] * len(self.storages)
        for ordinal, op in enumerate(self.ops):
            for storage in op.allocates:
                writers[storage, 0] = ordinal
            for storage in op.writes:
                version[storage] += 1
                writers[storage, version[storage]] = ordinal
        return writers

    def rerun(self, kept: Iterable[int], forced: Collection[int] = ()) -> frozenset[int]:
        """Returns the ordinals of the ops that have to be recomputed in backward when only ``kept`` storages are kept.

        Args:
            kept: numbers of storages.
            forced: the ordinals of ops that may be recomputed even if they must not.

        Raises:
            ChoiceError: an op that must not be recomputed would have to; the message names it.
        """
        held = set(kept) | {n for n, storage in enumerate(self.storages) if storage.always_live}
        writers = self.writers()
        waiting = [(n, s.versions) for n, s in enumerate(self.storages) if s.saved and n not in held]
        rerun: set[int] = set()
        while waiting:
            number, version = value = waiting.pop()
            if number in held and version == self.storages[number].versions:
                continue
            if value not in writers:
                raise ChoiceError(
                    f"a choice of what to keep: input {number} of the stage, which recomputed ops read, is dropped or "
                    "changed in place; keep it"
                )
            ordinal = writers[value]
            if ordinal in rerun:
                continue
            op = self.ops[ordinal]
            if op.not_rerunnable_reason and ordinal not in forced:
                raise ChoiceError(
                    f"op {ordinal} ({op.op} in {op.module or 'the stage itself'}) must not be recomputed: "
                    f"{op.not_rerunnable_reason}; keep its results"
                )
            rerun.add(ordinal)
            waiting.extend(op.reads)
        return frozenset(rerun)

    def rerun_without(self, dropped: Iterable[int], forced: Collection[int] = ()) -> frozenset[int]:
        """Returns the ordinals of the ops that are recomputed in backward when the results of these ops are not kept.

        What they read from other ops is kept, as far as in-place changes allow.

        Args:
            dropped: ordinals of ops.
            forced: the ordinals of ops that may be recomputed even if they must not.

        Raises:
            ChoiceError: one of the ops must not be recomputed.
        """
        return self.rerun(_kept_without(self, set(dropped)), forced)

    def read_by(self, ordinals: Iterable[int]) -> frozenset[int]:
        """Storages whose contents these ops read."""
        return frozenset(number for ordinal in ordinals for number, _ in self.ops[ordinal].reads)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedStage:
    """A stage with the names of the modules that it is a part of, and of those inside it.

    Attributes:
        name: the module's name (``#n``: its n-th further call).
        parents: pairs (name, class) of the modules whose call it is a part of, the model first.
        ops: the dataflow of the stage, with the modules inside.
    """

    name: str
    parents: tuple[NamedModule, ...]
    ops: StageOps

    @property
    def module(self) -> str:
        """The module's name, whichever of its calls the stage is."""
        return self.name.partition("#")[0]

    def inside(self) -> tuple[NamedModule, ...]:
        """Full names and classes of the modules that run in it; the stage itself comes first."""
        return tuple((f"{self.module}.{name}" if name else self.module, kind) for name, kind in self.ops.modules)


def _kept_without(ops: StageOps, dropped: set[int]) -> set[int]:
    """Returns the storages to keep so that only these ops are recomputed, as far as in-place changes allow."""
    writers = ops.writers()
    dropped_storages = {number for (number, _), ordinal in writers.items() if ordinal in dropped}
    kept = {n for n, s in enumerate(ops.storages) if s.saved and n not in dropped_storages}
    waiting = [(n, s.versions) for n, s in enumerate(ops.storages) if s.saved and n in dropped_storages]
    seen: set[StorageVersion] = set()
    while waiting:
        number, version = value = waiting.pop()
        if value in seen or (number in kept and version == ops.storages[number].versions):
            continue
        seen.add(value)
        if value not in writers or (writers[value] not in dropped and version == ops.storages[number].versions):
            kept.add(number)
        else:
            waiting.extend(ops.ops[writers[value]].reads)
    return kept
