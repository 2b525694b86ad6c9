"""Menus: which choices of what to keep inside a stage are worth measuring."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from profiler.measurement.stage_options import Choice
from profiler.op_graph import StageOp, StageOps
from solvers.saved_tensors import Held, SavedSets, Step, frontier

# Measured on one core at 3 GHz: an op that runs again costs this beside its kernel (recording it in forward and
# calling it in backward). It keeps swarms of tiny ops out of the choices; what is planned with is measured.
OP_SECONDS = 15e-6
FRONTIER_CHOICES = 9
MOST_CHOICES = 11  # with keeping everything, a menu of twelve
# Ops that practitioners recompute by hand because they are cheap for their bytes; by kind of op.
_CHEAP_KINDS = ("norm", "gelu", "relu", "silu", "tanh", "sigmoid", "softmax", "dropout", "bernoulli", "mul", "add")
_CHEAP_KINDS += ("div", "sub", "pow", "rsqrt", "mean", "where", "masked_fill", "clone", "copy", "cat", "exp", "sqrt")


def choices_for(ops: StageOps) -> list[Choice]:
    """Choices worth measuring: the bytes/seconds frontier, and what practitioners recompute by hand.

    Args:
        ops: the dataflow of one stage.

    Returns:
        At most ``MOST_CHOICES``, none that keeps everything; equal ones are given once.
    """
    found: dict[frozenset[int], Choice] = {}
    for choice in (*_frontier(ops), *_by_hand(ops)):
        if choice.rerun and choice.rerun not in found:
            found[choice.rerun] = choice
    return list(found.values())[:MOST_CHOICES]


def _frontier(ops: StageOps) -> Iterator[Choice]:
    problem = SavedSets(
        steps=tuple(_step(op) for op in ops.ops),
        storages=tuple(
            Held(size_bytes=0 if s.held else s.size_bytes, saved=s.saved, outside=s.op < 0) for s in ops.storages
        ),
    )
    for answer in frontier(problem, FRONTIER_CHOICES):
        yield Choice.of(ops, answer.kept)


def _step(op: StageOp) -> Step:
    return Step(seconds=op.seconds + OP_SECONDS, reads=op.reads, makes=op.makes, writes=op.writes, fixed=bool(op.fixed))


def _by_hand(ops: StageOps) -> Iterator[Choice]:
    """One child module recomputed, the cheap kinds of ops recomputed."""
    for child in sorted({op.module.partition(".")[0] for op in ops.ops if op.module}):
        yield from _dropping(ops, lambda op, c=child: op.module == c or op.module.startswith(c + "."), child)
    yield from _dropping(ops, lambda op: any(kind in op.kind for kind in _CHEAP_KINDS), "norms and activations")


def _dropping(ops: StageOps, which: Callable[[StageOp], bool], name: str) -> Iterator[Choice]:
    try:
        yield Choice.dropping(ops, (k for k, op in enumerate(ops.ops) if which(op)), name)
    except ValueError:
        return  # One of them must not run again: that choice is none.
