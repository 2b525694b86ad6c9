"""Stating: the rules of a stated plan applied one after another, and what that makes of every stage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from planner.plans import rule_patterns
from planner.plans.rules import Rule, Rules, RuleTarget
from profiler.op_graph import Choice, ChoiceError, NamedStage, StageOps

DirectiveKind = Literal["keep", "recompute", "segment", "choice", "solve"]
_CHECKPOINTS = -1  # stands for the checkpoints where a rule's number is expected


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDirective:
    """What is stated of one stage.

    Attributes:
        kind: ``keep``; ``recompute`` from its own input; ``segment``: recomputed together with its neighbours;
            ``choice``: some of its ops run again; ``solve``: left to the solver.
        choice: those ops.
        ends: it is a checkpoint: a segment ends with it.
        source: what states it, in words.
    """

    kind: DirectiveKind
    choice: Choice | None = None
    ends: bool = False
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What rules make of a model's stages: one fate each, and one line for each rule that says what it came to."""

    fates: tuple[StageDirective, ...]
    lines: tuple[str, ...]

    def choices(self) -> dict[int, Choice]:
        """The choices inside stages, by the stage's position."""
        return {k: fate.choice for k, fate in enumerate(self.fates) if fate.choice is not None}


def stated_by(rules: Rules, stages: Sequence[NamedStage], outside: Collection[str]) -> Stated:
    """Apply rules to the stages of a model.

    Args:
        rules: what a person states.
        stages: of the model, in forward order.
        outside: names of modules that ran outside of stages.

    Raises:
        ChoiceError: a name that matches nothing, rules that contradict each other, or an op that must not run again.
    """
    return _Statement(rules, stages, outside).finish()


@dataclass(slots=True)
class _Part:
    """One stage while the rules are applied."""

    stage: NamedStage
    kind: DirectiveKind | None = None
    ends: bool = False
    again: set[int] = field(default_factory=set)
    forced: set[int] = field(default_factory=set)
    source: int = _CHECKPOINTS
    owners: dict[int, int] = field(default_factory=dict)  # op -> the last rule that names it

    @property
    def ops(self) -> StageOps:
        return self.stage.ops

    def whole(self, kind: DirectiveKind, number: int, force: bool = False) -> set[int]:
        """State what becomes of the whole stage; returns its ops."""
        every = set(range(len(self.ops.ops)))
        self.kind, self.source = kind, number
        self.again = every if kind in ("recompute", "segment") else set()
        self.forced = set(self.again) if force else set()
        self.owners = dict.fromkeys(every, number)
        return every

    def some(self, ordinals: set[int], rule: Rule, number: int) -> None:
        """State what becomes of some of its ops."""
        if rule.action == "recompute":
            if self.kind not in ("recompute", "segment"):
                self.kind, self.source = "choice", number
            self.again = self.again | ordinals
            self.forced |= ordinals if rule.force else set()
        else:
            self.kind, self.source = "choice", number
            self.again = self.again - ordinals
        self.owners.update(dict.fromkeys(ordinals, number))


class _Statement:
    """The rules applied to all stages."""

    def __init__(self, rules: Rules, stages: Sequence[NamedStage], outside: Collection[str]) -> None:
        self._rules = rules
        self._stages = stages
        self._parts = [_Part(stage) for stage in stages]
        self._outside = outside
        self._hits: dict[int, list[tuple[int, set[int]]]] = {}
        if rules.checkpoint_patterns:
            self._cut()
        for number, rule in enumerate(rules.rules):
            for target in rule.targets:
                self._apply(number, rule, target)

    def finish(self) -> Stated:
        """The fates, once it is sure that no rule is taken back as a whole by others."""
        for number in self._hits:
            self._refuse_contradiction(number)
        fates = tuple(self._fate(part) for part in self._parts)
        return Stated(fates=fates, lines=tuple(self._lines(fates)))

    def _cut(self) -> None:
        """Checkpoints: everything up to the last one is in a segment."""
        ends = {k for pattern in self._rules.checkpoint_patterns for k in self._checkpoints(pattern)}
        for k in range(max(ends) + 1):
            self._parts[k].ends = k in ends
            self._hit(_CHECKPOINTS, k, self._parts[k].whole("segment", _CHECKPOINTS))

    def _checkpoints(self, pattern: str) -> Iterable[int]:
        """The stages of that name; for a module that contains stages, the last one in it."""
        named = [k for k, stage in enumerate(self._stages) if rule_patterns.is_stage(pattern, stage)]
        if named:
            return named
        last = {name: k for k, stage in enumerate(self._stages) for name in rule_patterns.names_around(pattern, stage)}
        if last:
            return last.values()
        inside = [stage.name for stage in self._stages if rule_patterns.modules_inside(pattern, stage)]
        if not inside:
            raise rule_patterns.no_module("checkpoints", pattern, self._stages, self._outside)
        raise ChoiceError(
            f"checkpoints: expected stages, whose outputs can be kept, got {pattern!r}, which lies inside stage "
            f"{inside[0]!r}; name that one, or make it a stage when profiling (--stages)"
        )

    def _apply(self, number: int, rule: Rule, target: RuleTarget) -> None:
        called = ((k, rule_patterns.modules_called(target.module, stage)) for k, stage in enumerate(self._stages))
        found = {k: modules for k, modules in called if modules}
        if not found:
            raise rule_patterns.no_module(self._text(number), target.module, self._stages, self._outside)
        if target.ops:
            named = self._ops_named(number, target, found)
        else:
            named = self._modules_named(number, rule, target, found)
        for k, own in named.items():
            if "" in found[k] and not target.ops:
                self._parts[k].whole(rule.action, number, rule.force)
            else:
                self._parts[k].some(own, rule, number)
            self._hit(number, k, own)

    def _modules_named(
        self, number: int, rule: Rule, target: RuleTarget, found: dict[int, list[str]]
    ) -> dict[int, set[int]]:
        """The ops of modules; to recompute one inside a stage, those that make its output are left out."""
        inner = [k for k, modules in found.items() if "" not in modules]
        if inner and rule.action == "solve":
            raise ChoiceError(
                f"{self._text(number)}: expected whole stages to solve for, got a module inside stage "
                f"{self._stages[inner[0]].name!r}; name that stage"
            )
        every = {k: [rule_patterns.ops_inside(self._parts[k].ops, m) for m in modules] for k, modules in found.items()}
        if not any(ops for each in every.values() for ops in each):
            raise rule_patterns.no_op(self._text(number), "", target.module, ())
        named: dict[int, set[int]] = {}
        for k, each in every.items():
            drops = rule.action == "recompute" and k in inner
            kept = [rule_patterns.makers_of_outputs(self._parts[k].ops, ops) if drops else set() for ops in each]
            named[k] = {o for ops, own in zip(each, kept, strict=True) for o in ops if o not in own}
        return named

    def _ops_named(self, number: int, target: RuleTarget, found: dict[int, list[str]]) -> dict[int, set[int]]:
        """The ops that the patterns of a target mean; each pattern means some."""
        named: dict[int, set[int]] = {k: set() for k in found}
        inside = {k: [rule_patterns.ops_inside(self._parts[k].ops, m) for m in modules] for k, modules in found.items()}
        for pattern in target.ops:
            hits = {
                k: {o for own in each for o in rule_patterns.ops_called(pattern, self._parts[k].ops, own)}
                for k, each in inside.items()
            }
            if not any(hits.values()):
                ops = [self._parts[k].ops.ops[o] for k, each in inside.items() for own in each for o in own]
                raise rule_patterns.no_op(self._text(number), pattern, target.module, ops)
            for k, own in hits.items():
                named[k] |= own
        return {k: own for k, own in named.items() if own}

    def _hit(self, number: int, k: int, ordinals: set[int]) -> None:
        self._hits.setdefault(number, []).append((k, ordinals))

    def _action(self, number: int) -> str:
        return "recompute" if number == _CHECKPOINTS else self._rules.rules[number].action

    def _text(self, number: int) -> str:
        if number == _CHECKPOINTS:
            return f"checkpoints {', '.join(self._rules.checkpoint_patterns)}"
        return f"rule {number + 1} ({self._rules.rules[number].text})"

    def _refuse_contradiction(self, number: int) -> None:
        owners = [self._parts[k].owners[o] for k, ordinals in self._hits[number] for o in ordinals]
        if not owners or any(self._action(owner) == self._action(number) for owner in owners):
            return
        raise ChoiceError(
            f"rules: expected none that others take back as a whole, got {self._text(number)} and after it "
            f"{self._text(owners[0])}; remove one of them, or let the later one name less"
        )

    def _fate(self, part: _Part) -> StageDirective:
        if part.kind is None:
            return StageDirective(kind=self._rules.rest)
        source = self._text(part.source)
        if part.kind != "choice":
            return StageDirective(kind=part.kind, ends=part.ends, source=source)
        try:
            choice = Choice.dropping(part.ops, part.again, forced=part.forced)
        except ChoiceError as error:
            raise ChoiceError(
                f"{source}: stage {part.stage.name!r}: {error} by a later rule, or set force = true to run it anyway"
            ) from error
        if not choice.rerun:
            return StageDirective(kind="keep", source=source)
        return StageDirective(kind="choice", choice=replace(choice, stated=True), source=source)

    def _lines(self, fates: Sequence[StageDirective]) -> Iterator[str]:
        if self._rules.checkpoint_patterns:
            count = sum(fate.kind == "segment" for fate in fates)
            yield f"{self._text(_CHECKPOINTS)}: {_counted(count, 'stage')} in segments"
        for number, rule in enumerate(self._rules.rules):
            yield f"{rule.text}: {self._effect(number, rule, fates)}"
        if self._rules.rest == "solve":
            yield "the rest: solved for"

    def _effect(self, number: int, rule: Rule, fates: Sequence[StageDirective]) -> str:
        """What became of a rule."""
        owned = {k: {o for o, owner in part.owners.items() if owner == number} for k, part in enumerate(self._parts)}
        stages = [k for k, own in owned.items() if own]
        if rule.action != "recompute":
            return _counted(len(stages), "stage")
        whole = sum(fates[k].kind in ("recompute", "segment") for k in stages)
        inside = {k: len(own & c.rerun) for k, own in owned.items() if own and (c := fates[k].choice) is not None}
        ops, inner = sum(inside.values()), sum(count > 0 for count in inside.values())
        found = [f"{_counted(whole, 'stage')} as a whole"] if whole else []
        found += [f"{_counted(ops, 'op')} in {_counted(inner, 'stage')}"] if ops else []
        return " and ".join(found) or "nothing runs again, as backward needs nothing of it that is not kept anyway"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
