"""Applies the rules of a stated plan one after another, and says what they make of every stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from planner.plans import rule_patterns
from planner.plans.rules import Rule, Rules, RuleTarget
from planner.units import counted
from profiler.op_graph import ChoiceError, NamedStage

DirectiveKind = Literal["keep", "recompute", "segment", "choice", "solve"]
_CHECKPOINTS = -1  # stands for the checkpoints where a rule's number is expected


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDirective:
    """What is stated of one stage.

    Attributes:
        kind: ``keep``; ``recompute`` from its own input; ``segment``: recomputed together with its neighbours;
            ``choice``: some of its ops run again; ``solve``: left to the solver.
        rerun: the ordinals of those ops.
        ends_segment: it is a checkpoint: a segment ends with it.
        source: what states it, in words.
    """

    kind: DirectiveKind
    rerun: frozenset[int] = frozenset()
    ends_segment: bool = False
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRules:
    """One directive for each stage of a model, and one line for each rule that says what it came to."""

    directives: tuple[StageDirective, ...]
    lines: tuple[str, ...]


def resolve_rules(rules: Rules, stages: Sequence[NamedStage], outside: Collection[str]) -> ResolvedRules:
    """Apply rules to the stages of a model.

    Args:
        rules: what a person states.
        stages: of the model, in forward order.
        outside: names of modules that ran outside of stages.

    Raises:
        ChoiceError: a name that matches nothing, rules that contradict each other, or an op that must not run again.
    """
    resolution = _Resolution(rules, stages, outside)
    if rules.checkpoint_patterns:
        resolution.apply_checkpoints()
    for number, rule in enumerate(rules.rules):
        for target in rule.targets:
            resolution.apply_rule(number, rule, target)
    return resolution.resolved()


@dataclass(slots=True)
class _StageRules:
    """What the rules so far state of one stage.

    Attributes:
        kind, ends_segment: as in the directive; no kind where nothing is stated.
        source: number of the rule that decides the kind.
        rerun, forced: ordinals of the ops that run again, and of those that do even if they must not.
        last_rules: by the ordinal of an op, the number of the last rule that names it.
    """

    stage: NamedStage
    kind: DirectiveKind | None = None
    ends_segment: bool = False
    source: int = _CHECKPOINTS
    rerun: set[int] = field(default_factory=set)
    forced: set[int] = field(default_factory=set)
    last_rules: dict[int, int] = field(default_factory=dict)

    def state_whole(self, kind: DirectiveKind, number: int, force: bool = False) -> set[int]:
        """State what becomes of the whole stage; returns its ops."""
        ordinals = set(range(len(self.stage.ops.ops)))
        self.kind, self.source = kind, number
        self.rerun = ordinals if kind in ("recompute", "segment") else set()
        self.forced = set(self.rerun) if force else set()
        self.last_rules = dict.fromkeys(ordinals, number)
        return ordinals

    def state_ops(self, ordinals: set[int], rule: Rule, number: int) -> None:
        """State what becomes of some of its ops."""
        drops = rule.action == "recompute"
        if not drops or self.kind not in ("recompute", "segment"):
            self.kind, self.source = "choice", number
        self.rerun = self.rerun | ordinals if drops else self.rerun - ordinals
        if drops and rule.force:
            self.forced |= ordinals
        self.last_rules.update(dict.fromkeys(ordinals, number))


class _Resolution:
    """The rules while they are applied to all stages."""

    def __init__(self, rules: Rules, stages: Sequence[NamedStage], outside: Collection[str]) -> None:
        self._rules = rules
        self._named = stages
        self._outside = outside
        self._stages = [_StageRules(stage) for stage in stages]
        self._named_ops: defaultdict[int, list[tuple[int, set[int]]]] = defaultdict(
            list
        )  # by rule: pairs (stage, ordinals)

    def apply_checkpoints(self) -> None:
        """Everything up to the last checkpoint is in a segment."""
        ends = {k for pattern in self._rules.checkpoint_patterns for k in self._checkpoints(pattern)}
        for k, stage in enumerate(self._stages[: max(ends) + 1]):
            stage.ends_segment = k in ends
            self._named_ops[_CHECKPOINTS].append((k, stage.state_whole("segment", _CHECKPOINTS)))

    def _checkpoints(self, pattern: str) -> Iterable[int]:
        """The stages of that name; for a module that contains stages, the last one in it."""
        named = [k for k, stage in enumerate(self._named) if rule_patterns.names_stage(pattern, stage)]
        if named:
            return named
        last = {name: k for k, stage in enumerate(self._named) for name in rule_patterns.parents_named(pattern, stage)}
        if last:
            return last.values()
        inside = [stage.name for stage in self._named if rule_patterns.inner_modules_named(pattern, stage)]
        if not inside:
            raise rule_patterns.no_module("checkpoints", pattern, self._named, self._outside)
        raise ChoiceError(
            f"checkpoints: expected stages, whose outputs can be kept, got {pattern!r}, which lies inside stage "
            f"{inside[0]!r}; name that one, or make it a stage when profiling (--stages)"
        )

    def apply_rule(self, number: int, rule: Rule, target: RuleTarget) -> None:
        """What a rule says of the modules, or of the ops in them, that one of its targets names."""
        named = ((k, rule_patterns.modules_named(target.module, stage)) for k, stage in enumerate(self._named))
        modules = {k: names for k, names in named if names}
        if not modules:
            raise rule_patterns.no_module(self._text(number), target.module, self._named, self._outside)
        inside = {k: [rule_patterns.ops_inside(self._named[k].ops, name) for name in modules[k]] for k in modules}
        if target.ops:
            ordinals = self._ops_named(number, target, inside)
        else:
            whole = {k for k, names in modules.items() if "" in names}
            ordinals = self._ops_of_modules(number, rule, target, inside, whole)
        for k, of_stage in ordinals.items():
            if "" in modules[k] and not target.ops:
                self._stages[k].state_whole(rule.action, number, rule.force)
            else:
                self._stages[k].state_ops(of_stage, rule, number)
            self._named_ops[number].append((k, of_stage))

    def _ops_of_modules(
        self, number: int, rule: Rule, target: RuleTarget, inside: dict[int, list[list[int]]], whole: set[int]
    ) -> dict[int, set[int]]:
        """The ops of modules; to recompute one inside a stage, those that make its output are left out."""
        inner = [k for k in inside if k not in whole]
        if inner and rule.action == "solve":
            raise ChoiceError(
                f"{self._text(number)}: expected whole stages to solve for, got a module inside stage "
                f"{self._named[inner[0]].name!r}; name that stage"
            )
        if not any(ops for modules in inside.values() for ops in modules):
            raise rule_patterns.no_op(self._text(number), "", target.module, ())
        ordinals: dict[int, set[int]] = {}
        for k, modules in inside.items():
            drops = rule.action == "recompute" and k not in whole
            outputs = [rule_patterns.makers_of_outputs(self._named[k].ops, ops) if drops else set() for ops in modules]
            ordinals[k] = {o for ops, makers in zip(modules, outputs, strict=True) for o in ops if o not in makers}
        return ordinals

    def _ops_named(self, number: int, target: RuleTarget, inside: dict[int, list[list[int]]]) -> dict[int, set[int]]:
        """The ops that the patterns of a target mean; each pattern means some."""
        ordinals: dict[int, set[int]] = {k: set() for k in inside}
        for pattern in target.ops:
            matches = {
                k: {o for ops in modules for o in rule_patterns.ops_named(pattern, self._named[k].ops, ops)}
                for k, modules in inside.items()
            }
            if not any(matches.values()):
                known = [self._named[k].ops.ops[o] for k, modules in inside.items() for ops in modules for o in ops]
                raise rule_patterns.no_op(self._text(number), pattern, target.module, known)
            for k, of_stage in matches.items():
                ordinals[k] |= of_stage
        return {k: of_stage for k, of_stage in ordinals.items() if of_stage}

    def resolved(self) -> ResolvedRules:
        """The directives, once it is sure that no rule is taken back as a whole by others."""
        for number in self._named_ops:
            self._refuse_contradiction(number)
        directives = tuple(self._directive(stage) for stage in self._stages)
        return ResolvedRules(directives=directives, lines=tuple(self._lines(directives)))

    def _refuse_contradiction(self, number: int) -> None:
        actions = {_CHECKPOINTS: "recompute", **{k: rule.action for k, rule in enumerate(self._rules.rules)}}
        last = [self._stages[k].last_rules[o] for k, ordinals in self._named_ops[number] for o in ordinals]
        if not last or any(actions[other] == actions[number] for other in last):
            return
        raise ChoiceError(
            f"rules: expected none that others take back as a whole, got {self._text(number)} and after it "
            f"{self._text(last[0])}; remove one of them, or let the later one name less"
        )

    def _directive(self, stage: _StageRules) -> StageDirective:
        if stage.kind is None:
            return StageDirective(kind=self._rules.rest)
        source = self._text(stage.source)
        if stage.kind != "choice":
            return StageDirective(kind=stage.kind, ends_segment=stage.ends_segment, source=source)
        try:
            rerun = stage.stage.ops.rerun_without(stage.rerun, forced=stage.forced)
        except ChoiceError as error:
            raise ChoiceError(
                f"{source}: stage {stage.stage.name!r}: {error} by a later rule, or set force = true to run it anyway"
            ) from error
        if not rerun:
            return StageDirective(kind="keep", source=source)
        return StageDirective(kind="choice", rerun=rerun, source=source)

    def _lines(self, directives: Sequence[StageDirective]) -> Iterator[str]:
        if self._rules.checkpoint_patterns:
            count = sum(directive.kind == "segment" for directive in directives)
            yield f"{self._text(_CHECKPOINTS)}: {counted(count, 'stage')} in segments"
        for number, rule in enumerate(self._rules.rules):
            yield f"{rule.text}: {self._effect(number, rule, directives)}"
        if self._rules.rest == "solve":
            yield "the rest: solved for"

    def _effect(self, number: int, rule: Rule, directives: Sequence[StageDirective]) -> str:
        """What became of a rule."""
        ordinals = {
            k: {o for o, last in stage.last_rules.items() if last == number} for k, stage in enumerate(self._stages)
        }
        stages = [k for k in ordinals if ordinals[k]]
        if rule.action != "recompute":
            return counted(len(stages), "stage")
        whole = sum(directives[k].kind in ("recompute", "segment") for k in stages)
        counts = [len(ordinals[k] & directives[k].rerun) for k in stages if directives[k].kind == "choice"]
        effects = [f"{counted(whole, 'stage')} as a whole"] if whole else []
        if any(counts):
            effects.append(f"{counted(sum(counts), 'op')} in {counted(sum(map(bool, counts)), 'stage')}")
        return " and ".join(effects) or "nothing runs again, as backward needs nothing of it that is not kept anyway"

    def _text(self, number: int) -> str:
        if number == _CHECKPOINTS:
            return f"checkpoints {', '.join(self._rules.checkpoint_patterns)}"
        return f"rule {number + 1} ({self._rules.rules[number].text})"
