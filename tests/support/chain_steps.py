"""Steps made up: chains of layers whose results backward reads in turn."""

from __future__ import annotations

from planner.step_problem import StepSurroundings
from profiler.step_graph import StepGraph, StepOp, StepStorage

KIB = 2**10
AROUND = StepSurroundings(forward_bytes=0, backward_bytes=0, loss_bytes=0)


def chain_step(layers: int = 6, size_bytes: int = 100 * KIB, seconds: float = 1.0) -> StepGraph:
    """Layer k makes storage k of the one before; backward of k reads both and the gradient that comes to it.

    Storage ``layers - 1`` is returned, and the loss makes the one after it; gradients follow, the last the smallest.
    """
    forward = [
        StepOp(name=f"layer_{k}", op="aten.mm.default", reads=(k - 1,) if k else (), makes=(k,), seconds=seconds)
        for k in range(layers)
    ]
    backward = [
        StepOp(
            name=f"back_{k}",
            op="aten.mm.default",
            side="backward",
            reads=tuple(sorted({max(0, k - 1), k, 2 * layers - 1 - k})),
            makes=(2 * layers - k,),
            seconds=2 * seconds,
        )
        for k in reversed(range(layers))
    ]
    made = [StepStorage(size_bytes=size_bytes, returned=k == layers - 1) for k in range(layers)]
    gradients = [StepStorage(size_bytes=size_bytes, of_loss=k == 0, gradient=k == layers) for k in range(layers + 1)]
    return StepGraph(ops=(*forward, *backward), storages=(*made, *gradients), resident_bytes=0)
