"""Calls of two linear layers with ops of some kinds to run again, and a look at what their backward does."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from profiler.op_graph import kind_of
from profiler.recomputation.selection import Selection
from profiler.recomputation.selective_call import SelectiveCall
from tests.support.op_cases.observed import Observer
from tests.support.op_cases.registry import ROWS, WIDTH, Body, Case, of_pair
from tests.support.op_cases.runs import differences, flow_of, inner, run, total

# Bytes of the input, and of whatever has its shape.
ONE = ROWS * WIDTH * 4


def selected(made: Case, kinds: Collection[str], packed: Collection[str] = ()) -> Selection:
    """That by which all ops of these kinds run again; of ``packed`` ones the results are held as bits instead."""
    flow = flow_of(made)
    rerun, as_bits = ({k for k, op in enumerate(flow.ops) if op.kind in some} for some in ({*kinds, *packed}, packed))
    return Selection.of(flow, rerun, as_bits)


class Call:
    """One forward with ops of some kinds to run again, and a look at what its backward does."""

    def __init__(self, body: Body, kinds: Collection[str], packed: Collection[str] = ()) -> None:
        made = of_pair(body)
        selection = selected(made, kinds, packed)
        self.stage, inputs = made.make()
        given = inner(inputs)
        self.input = inputs[0]
        self.observer = Observer([*self.stage.parameters(), *inputs, *given])
        with self.observer:
            self.output = SelectiveCall(self.stage, selection).run(self.stage.forward, given, {})

    def backward(self, loss: Tensor | None = None, **settings: Any) -> list[str]:
        """Kinds of the ops that ran again, in order."""
        before = len(self.observer.again)
        loss = total(self.output) if loss is None else loss
        with self.observer:
            loss.backward(**settings)
        return [kind_of(op) for op in self.observer.again[before:]]

    @property
    def alive(self) -> int:
        """Bytes that ops have made and that are alive."""
        return sum(size * count for size, count in self.observer.alive().items())


def assert_exact(body: Body, kinds: Collection[str], packed: Collection[str] = ()) -> None:
    """The step is that of the plain stage, bit for bit."""
    made = of_pair(body)
    plain, _ = run(made, None)
    found, call = run(made, selected(made, kinds, packed))
    assert differences(plain, found) == []
    assert call is not None and call.diverged is None
