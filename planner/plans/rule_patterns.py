"""Which stages, modules inside stages and ops the pattern of a rule names, and the nearest names where it fails."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Sequence

from profiler.op_graph import ChoiceError, NamedStage, StageOp, StageOps, kind_of
from profiler.step_graph import StepOp

_NEAREST = 5


def modules_named(pattern: str, stage: NamedStage) -> list[str]:
    """Modules of a stage that a pattern names, by their names inside it; the empty name is the stage itself.

    A stage is named by its own name or class, and by those of a module that contains it.
    """
    whole = names_stage(pattern, stage) or bool(parents_named(pattern, stage))
    return [""] if whole else inner_modules_named(pattern, stage)


def names_stage(pattern: str, stage: NamedStage) -> bool:
    """Whether a pattern names the stage: its name, with or without the number of its call, or its class."""
    return _matches(pattern, (stage.name, stage.module, *(kind for name, kind in stage.ops.modules if not name)))


def inner_modules_named(pattern: str, stage: NamedStage) -> list[str]:
    """Modules inside a stage that a pattern names, by their names inside it."""
    inside = zip(stage.inside(), stage.ops.modules, strict=True)
    return [relative for (name, kind), (relative, _) in inside if relative and _matches(pattern, (name, kind))]


def parents_named(pattern: str, stage: NamedStage) -> list[str]:
    """Names of the modules that contain a stage and that a pattern names; the model's is empty."""
    path = stage.module.split(".")
    containers = {".".join(path[:end]): "" for end in range(1, len(path))}  # those that never run themselves, too
    return [name for name, kind in {**containers, **dict(stage.parents)}.items() if _matches(pattern, (name, kind))]


def names_op(pattern: str, op: str) -> bool:
    """Whether a pattern names an op such as ``aten._softmax.default``."""
    return _matches(pattern, _op_names(op))


def ops_inside(ops: StageOps, module: str) -> list[int]:
    """Ordinals of the ops that a module of a stage runs, those of the modules in it included."""
    if not module:
        return list(range(len(ops.ops)))
    return [k for k, op in enumerate(ops.ops) if op.module == module or op.module.startswith(f"{module}.")]


def ops_named(pattern: str, ops: StageOps, inside: Sequence[int]) -> list[int]:
    """Those of some ops of a stage that a pattern names.

    Patterns are ``gelu``, ``aten.gelu.default``, ``*norm``, ``mul#1`` (the second one) or ``#12`` (op 12 of the stage).
    Underscores around a kind may be left out: ``softmax`` means ``_softmax`` too, and ``relu`` also ``relu_``.
    """
    text, _, number = pattern.partition("#")
    if not text:
        return [k for k in inside if k == int(number)]
    matches = [k for k in inside if names_op(text, ops.ops[k].op)]
    return matches[int(number) : int(number) + 1] if number else matches


def makers_of_outputs(ops: StageOps, inside: Collection[int]) -> set[int]:
    """Ops among some that make or change what others than these read: a module's outputs."""
    used_outside = {number for number, storage in enumerate(ops.storages) if storage.returned or storage.op < 0}
    for ordinal in set(range(len(ops.ops))) - set(inside):
        op = ops.ops[ordinal]
        used_outside |= {number for number, _ in op.reads} | {*op.allocates, *op.writes}
    return {ordinal for ordinal in inside if used_outside & {*ops.ops[ordinal].allocates, *ops.ops[ordinal].writes}}


def no_module(where: str, pattern: str, stages: Sequence[NamedStage], outside: Iterable[str]) -> ChoiceError:
    """The error for a pattern that names no stage and no module inside one."""
    if any(_matches(pattern, (name,)) for name in outside):
        return ChoiceError(
            f"{where}: expected stages or modules inside them, got {pattern!r}, which runs outside of stages and is "
            "always kept; make it a stage when profiling (--stages)"
        )
    known = (name for stage in stages for pair in (*stage.parents, *stage.inside(), (stage.name,)) for name in pair)
    return ChoiceError(
        f"{where}: expected the name, glob pattern or class of a module that runs, got {pattern!r}, which matches "
        f"nothing; nearest: {_nearest(pattern, known)}"
    )


def no_op(where: str, pattern: str, module: str, ops: Iterable[StageOp | StepOp]) -> ChoiceError:
    """The error for a pattern that names none of the ops of some modules."""
    known = [op.kind for op in ops]
    if not known:
        return ChoiceError(f"{where}: expected a module that runs ops, got {module!r}, which runs none; leave it out")
    near = _nearest(pattern.partition("#")[0], known)
    return ChoiceError(
        f"{where}: expected the kind, name or number of ops that run in {module!r}, got {pattern!r}, which matches "
        f"nothing; nearest: {near}"
    )


def _op_names(op: str) -> tuple[str, ...]:
    """``aten._softmax.default``, ``aten._softmax``, ``_softmax`` and ``softmax``."""
    kind = kind_of(op)
    return op, op.rpartition(".")[0], kind, kind.strip("_")


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names if name)


def _nearest(text: str, names: Iterable[str]) -> str:
    known = [name for name in dict.fromkeys(names) if name]
    return ", ".join(difflib.get_close_matches(text, known, n=_NEAREST, cutoff=0.3) or known[:_NEAREST])
