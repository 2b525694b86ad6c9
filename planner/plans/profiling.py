"""Profiles a workload as users call it, and proposes the options inside stages that are worth measuring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from planner.plans.call_programs import program_menu
from planner.plans.cut_choice import with_best_cut
from planner.plans.rule_resolution import resolve_rules
from planner.plans.rules import Rule, Rules, rules_from
from planner.units import parse_bytes
from profiler.measurement import profiling
from profiler.measurement.measuring import Progress
from profiler.op_graph import Choice, ChoiceError, NamedStage, StageOp, StageOps
from profiler.records import Profile
from profiler.step_graph import StepGraph
from profiler.step_replay import StepRuns, runs_once
from profiler.trace.partition import Stages
from profiler.workload.compiled_forwards import is_compiled
from profiler.workload.steps import check_workload
from profiler.workload.workload import Workload
from solvers.saved_tensors import HeldTensor, RerunCandidate, SavedSetProblem, frontier


def profile(
    workload: Workload,
    *,
    stages: Stages = None,
    menus: bool = True,
    rules: Rules | Rule | Sequence[Rule] | str | Path | None = None,
    limit: str | int | None = None,
    progress: Progress | None = None,
) -> Profile:
    """What ``planner.profile`` does in one process, which measures by itself; arguments and errors are as there."""
    check_workload(workload, "profile")
    stated = None if rules is None else rules_from(rules)
    compiled = is_compiled(workload.model)
    measure = partial(
        profiling.profile,
        workload,
        propose=choices_for if menus and not compiled else None,
        programs=None if compiled else _orders_for if menus else _once if stated is not None else None,
        state=None if stated is None else (lambda named, outside: _choices(stated, named, outside, compiled)),
        progress=progress,
        limit_bytes=None if limit is None else parse_bytes(limit),
    )
    measured = measure(stages=stages)
    if stages is not None or stated is not None or compiled or not menus:
        return measured
    return with_best_cut(measured, lambda: measure(stages="whole"))


def _orders_for(graph: StepGraph) -> list[StepRuns]:
    """The orders of a captured call's ops that no other one beats; each op once first, whatever it is worth."""
    once = runs_once(graph)
    return [once, *(each.runs for each in program_menu(graph) if each.runs != once)]


def _once(graph: StepGraph) -> list[StepRuns]:
    return [runs_once(graph)]


def _choices(rules: Rules, named: Sequence[NamedStage], outside: Sequence[str], compiled: bool) -> Mapping[int, Choice]:
    choices = resolve_rules(rules, named, outside).choices()
    if choices and compiled:
        raise ChoiceError(
            "rules: expected whole stages in a compiled model, got a choice of ops inside "
            f"{named[min(choices)].name!r}; compiled code shows no ops to choose from: "
            "state it for the whole stage, or do not compile"
        )
    return choices


# Measured on one core at 3 GHz: an op that runs again costs this beside its kernel (recording it in forward and
# calling it in backward). It keeps swarms of tiny ops out of the choices; what is planned with is measured.
OP_SECONDS = 15e-6
FRONTIER_CHOICES = 6
MOST_CHOICES = 11  # with keeping everything, a menu of twelve; as many more where results are worth packing as bits
# Ops that practitioners recompute by hand because they are cheap for their bytes; by kind of op.
_CHEAP_KINDS = ("norm", "gelu", "relu", "silu", "tanh", "sigmoid", "softmax", "dropout", "bernoulli", "mul", "add")
_CHEAP_KINDS += ("div", "sub", "pow", "rsqrt", "mean", "where", "masked_fill", "clone", "copy", "cat", "exp", "sqrt")


def choices_for(ops: StageOps) -> list[Choice]:
    """Choices worth measuring: the bytes/seconds frontier, and what practitioners recompute by hand.

    Args:
        ops: the dataflow of one stage.

    Returns:
        At most ``MOST_CHOICES``, none that keeps everything, and as many in which results are held as bits; equal ones
        are given once.
    """
    packable = ops.packable()
    with_bits = _distinct(ops, packable) if packable else []
    return [*_distinct(ops, frozenset())[:MOST_CHOICES], *[each for each in with_bits if each.packed][:MOST_CHOICES]]


def _distinct(ops: StageOps, packed: frozenset[int]) -> list[Choice]:
    """Choices in which something runs again, each once; ``packed``: ops that are unpacked in place of that."""
    choices = {choice.again: choice for choice in (*_frontier(ops, packed), *_common_by_hand(ops, packed))}
    return [choice for choice in choices.values() if choice.rerun]


def _packing(ops: StageOps, packed: frozenset[int]) -> StageOps:
    """The ops, with those that are unpacked in place of running again."""

    def as_bits(k: int, op: StageOp) -> StageOp:
        seconds, reads = ops.packing_seconds(k), op.reads_again(True)
        return replace(op, seconds=seconds, reads=reads, random=False, not_rerunnable_reason="")

    return replace(ops, ops=tuple(as_bits(k, op) if k in packed else op for k, op in enumerate(ops.ops)))


def _frontier(ops: StageOps, packed: frozenset[int]) -> Iterator[Choice]:
    problem = SavedSetProblem(
        steps=tuple(
            RerunCandidate(
                seconds=op.seconds + OP_SECONDS,
                reads=op.reads,
                allocates=op.allocates,
                writes=op.writes,
                must_run_once=bool(op.not_rerunnable_reason),
            )
            for op in _packing(ops, packed).ops
        ),
        storages=tuple(
            HeldTensor(size_bytes=0 if s.always_live else s.size_bytes, saved=s.saved, outside=s.op < 0)
            for s in ops.storages
        ),
    )
    for solution in frontier(problem, FRONTIER_CHOICES):
        yield Choice.of(ops, solution.kept, packable=packed)


def _common_by_hand(ops: StageOps, packed: frozenset[int]) -> Iterator[Choice]:
    """What practitioners choose: one child module recomputed, the cheap kinds of ops recomputed."""
    for child in sorted({op.module.partition(".")[0] for op in ops.ops if op.module}):
        yield from _dropping(ops, lambda op, c=child: op.module == c or op.module.startswith(c + "."), child, packed)
    cheap = "norms and activations"
    yield from _dropping(ops, lambda op: any(kind in op.kind for kind in _CHEAP_KINDS), cheap, packed)
    if packed:  # Without bits that is no choice, but the stage recomputed.
        yield from _dropping(ops, lambda _: True, "everything", packed)


def _dropping(ops: StageOps, which: Callable[[StageOp], bool], name: str, packed: frozenset[int]) -> Iterator[Choice]:
    named = f"{name}, with bits" if packed else name
    try:
        yield Choice.dropping(ops, (k for k, op in enumerate(ops.ops) if which(op)), named, packable=packed)
    except ValueError:
        return  # One of them must not run again: that choice is none.
