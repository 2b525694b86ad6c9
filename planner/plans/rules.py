"""The rules of a manual plan, as plain data in Python or in a TOML or JSON file, and what their patterns name.

A file has the fields of ``Rules``; its rules have those of ``Rule``::

    checkpoints = ["transformer.h.3", "transformer.h.7"]   # keep what these return, recompute what lies between
    rest = "keep"                                          # or "solve": the solver decides what no rule names

    [[rules]]
    modules = "transformer.h.*.mlp"
    ops = ["tanh", "mul"]
    action = "recompute"                                   # or "keep", or "solve"
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from profiler.json_files import check_plain, read_text, to_plain
from profiler.op_graph import ChoiceError, NamedStage, StageOp, StageOps, kind_of
from profiler.step_graph import StepOp

if TYPE_CHECKING:
    from torch import nn

RuleAction = Literal["recompute", "keep", "solve"]
Rest = Literal["keep", "solve"]
Pattern: TypeAlias = "str | type[nn.Module]"
_OP = re.compile(r"[^#\s]+(#[0-9]{1,9})?|#[0-9]{1,9}")
_ENDINGS = {".toml": tomllib.loads, ".json": json.loads}


class RuleTarget(NamedTuple):
    """Parts of a model: ops inside modules, or whole modules where ``ops`` is empty."""

    module: str
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An action for the parts of a model that it names.

    A module that is a stage, or that contains stages, is recomputed from the
    input of each stage. In one that lies inside a stage everything runs again
    but the ops that make its output. Named ops run again themselves.

    Attributes:
        modules: names of modules, glob patterns or classes; one, or several. ``"name:op"`` names an op inside.
            Empty: all, for the ops named.
        ops: of these modules only the ops named so: a kind (``gelu``), a full name (``aten.gelu.default``), a glob
            pattern, ``gelu#1`` for the second one of a kind in each module, or a number (``12`` or ``#12``) for
            one op of the stage, counted from 0. Empty: the modules as a whole.
        action: ``recompute``; ``keep``; or ``solve``, to leave whole stages to the solver.
        force: recompute even an op that must not be recomputed, at your own risk.
    """

    modules: Pattern | Sequence[Pattern] = ()
    ops: str | int | Sequence[str | int] = ()
    action: RuleAction = "recompute"
    force: bool = False

    def __post_init__(self) -> None:
        modules = _module_patterns(self.modules, "modules")
        ops = _listed(self.ops, "ops", _op, "an op's name or number")
        if self.action not in get_args(RuleAction):
            raise ValueError(f"a rule: there is no action {self.action!r}; choose {_either(RuleAction)}")
        if not isinstance(self.force, bool):
            raise ValueError(f"a rule: force is {self.force!r}; write true or false")
        if ops and any(":" in text for text in modules):
            raise ValueError(f"a rule: ops are named twice, {ops[0]!r} and in {modules[0]!r}; name them in one place")
        if not modules and not ops:
            raise ValueError('a rule: it names neither modules nor ops; name some (modules = "*" means all)')
        object.__setattr__(self, "modules", modules or ("*",))
        object.__setattr__(self, "ops", ops)
        wrong = [op for target in self.targets for op in target.ops if not _OP.fullmatch(op)]
        if wrong:
            raise ValueError(f"a rule: {wrong[0]!r} is not an op; write gelu, gelu#1 or #12, say")
        if self.action == "solve" and any(target.ops for target in self.targets):
            raise ValueError(
                "a rule: only whole stages can be left to the solver, not ops; leave the ops out, or state them"
            )

    @property
    def targets(self) -> tuple[RuleTarget, ...]:
        """The named parts, one entry per pattern of modules."""
        modules: tuple[str, ...] = self.modules  # type: ignore[assignment]  # as __post_init__ left them
        ops: tuple[str, ...] = self.ops  # type: ignore[assignment]
        parts = [text.partition(":") for text in modules]
        return tuple(RuleTarget(module, (op,) if colon else ops) for module, colon, op in parts)

    @property
    def text(self) -> str:
        """The rule in words."""
        named = ", ".join(f"{', '.join(t.ops)} in {t.module}" if t.ops else t.module for t in self.targets)
        verb = "solve for" if self.action == "solve" else self.action
        return f"{verb} {named}{' (forced)' if self.force else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A manual plan. If two rules name the same part, the later one applies.

    Attributes:
        rules: in order.
        checkpoints: stages whose outputs are kept. The stages up to each one, from the one before it on, are
            recomputed together from what that one returned. Those behind the last one are kept.
        rest: what happens to stages that nothing names: ``keep``, or ``solve``.
    """

    rules: Sequence[Rule] = ()
    checkpoints: Pattern | Sequence[Pattern] = ()
    rest: Rest = "keep"

    def __post_init__(self) -> None:
        if isinstance(self.rules, (str, Rule)) or not all(isinstance(rule, Rule) for rule in self.rules):
            raise ValueError(f"rules: {self.rules!r} is not a list of planner.Rule; put the rules into a list")
        object.__setattr__(self, "rules", tuple(self.rules))
        names = _module_patterns(self.checkpoints, "checkpoints")
        object.__setattr__(self, "checkpoints", names)
        if self.rest not in get_args(Rest):
            raise ValueError(f"rules: there is no rest {self.rest!r}; choose {_either(Rest)}")
        if not self.rules and not names:
            raise ValueError("rules: there is neither a rule nor a checkpoint; state at least one")

    @property
    def checkpoint_patterns(self) -> tuple[str, ...]:
        """The checkpoints as texts."""
        return self.checkpoints  # type: ignore[return-value]  # as __post_init__ left them

    @classmethod
    def load(cls, path: str | Path) -> Rules:
        """Read a TOML or JSON file.

        Raises:
            ValueError: no such file, neither of the two, or what it says is no plan; the message names the file.
        """
        path = Path(path)
        read = _ENDINGS.get(path.suffix.lower())
        if read is None:
            raise ValueError(f"{path}: rules cannot be read from a file ending in {path.suffix!r}; use .toml or .json")
        return cls.from_document(_parsed(path, read), str(path))

    @classmethod
    def from_document(cls, document: Any, where: str) -> Rules:
        """Read plain data; ``where`` names it in errors."""
        values = _table_of(cls, document, where)
        listed = values.pop("rules", [])
        if not isinstance(listed, list):
            raise ValueError(f"{where}: rules is not a list but {listed!r}; write [[rules]] above each rule")
        places = (f"{where}: rule {k + 1}" for k in range(len(listed)))
        rules = [_built(Rule, _table_of(Rule, rule, place), place) for rule, place in zip(listed, places, strict=True)]
        return _built(cls, {**values, "rules": rules}, where)

    def to_document(self) -> dict[str, Any]:
        """Plain data, as it stands in a file."""
        return to_plain(self)


def rules_from(given: Rules | Rule | Sequence[Rule] | str | Path) -> Rules:
    """Rules as users pass them: made already, a list of rules, or the path of a file."""
    if isinstance(given, Rules):
        return given
    if isinstance(given, (str, Path)):
        return Rules.load(given)
    return Rules(rules=(given,) if isinstance(given, Rule) else given)


def _parsed(path: Path, read: Callable[[str], Any]) -> Any:
    text = read_text(path)
    try:
        stated = read(text)
    except (ValueError, RecursionError) as error:
        kind = path.suffix.removeprefix(".").upper()
        raise ValueError(f"{path}: expected {kind}, got something else: {error}; correct it there") from error
    check_plain(stated, str(path))
    return stated


def _table_of(kind: type, data: Any, where: str) -> dict[str, Any]:
    """A table with no other keys than the fields of ``kind``."""
    known = [field.name for field in fields(kind)]
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: expected a table with {', '.join(known)}, got {data!r}; correct it")
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ValueError(f"{where}: expected {', '.join(known)}, got {', '.join(unknown)}; remove or rename it")
    return dict(data)


def _built(kind: type, values: Mapping[str, Any], where: str) -> Any:
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _module_patterns(given: Any, name: str) -> tuple[str, ...]:
    return _listed(given, name, _module, "a name, a glob pattern or a class")


def _listed(given: Any, name: str, text: Callable[[Any], str | None], expected: str) -> tuple[str, ...]:
    """One or several patterns as texts."""
    texts: list[str] = []
    for item in given if isinstance(given, (list, tuple)) else [given]:
        if not (read := text(item)):
            raise ValueError(f"{name}: expected {expected}, or a list of them, got {item!r}; correct it")
        texts.append(read)
    return tuple(texts)


def _module(item: Any) -> str | None:
    if isinstance(item, type):
        return item.__name__
    return item.strip() if isinstance(item, str) else None


def _op(item: Any) -> str | None:
    if isinstance(item, int) and not isinstance(item, bool):
        return f"#{item}" if item >= 0 else None
    return item.strip() if isinstance(item, str) else None


def _either(kind: Any) -> str:
    return " or ".join(repr(value) for value in get_args(kind))


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
    """Selects the ops of a stage that a pattern names.

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
            f"{where}: {pattern!r} runs outside of stages and is always kept; make it a stage when profiling (--stages)"
        )
    known = (name for stage in stages for pair in (*stage.parents, *stage.inside(), (stage.name,)) for name in pair)
    return ChoiceError(
        f"{where}: {pattern!r} matches the name or class of no module that runs; nearest: {_nearest(pattern, known)}"
    )


def no_op(where: str, pattern: str, module: str, ops: Iterable[StageOp | StepOp]) -> ChoiceError:
    """The error for a pattern that names none of the ops of some modules."""
    known = [op.kind for op in ops]
    if not known:
        return ChoiceError(f"{where}: {module!r} runs no ops; leave it out")
    near = _nearest(pattern.partition("#")[0], known)
    return ChoiceError(
        f"{where}: {pattern!r} matches the kind, name or number of no op that runs in {module!r}; nearest: {near}"
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
