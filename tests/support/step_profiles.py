"""Profiles of steps of single ops, made up: chains of layers whose results backward reads in turn."""

from __future__ import annotations

from planner.steps.graph_problem import StepSurroundings
from profiler.graph_profile import GraphProfile
from profiler.records import Phase, ResidentBytes
from profiler.step_graph import StepGraph, StepOp, StepStorage
from profiler.step_replay import replay_step, runs_once

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


def profile_of(step: StepGraph) -> GraphProfile:
    """Of a step with nothing around its programs; its loss takes no time."""
    once = replay_step(step, runs_once(step), held=False)
    seconds = {side: sum(op.seconds for op in step.ops if op.side == side) for side in ("forward", "backward")}
    forward, backward = (
        Phase(start_bytes=side.start_bytes, peak_bytes=side.peak_bytes, end_bytes=side.end_bytes, seconds=seconds[name])
        for name, side in (("forward", once.forward), ("backward", once.backward))
    )
    between = Phase(
        start_bytes=once.between_bytes, peak_bytes=max(once.between_bytes, backward.start_bytes), end_bytes=0
    )
    return GraphProfile(
        model_class="Chain",
        input_shapes=(),
        device="cpu",
        device_name="none",
        torch_version="0",
        precision="float32",
        unused_outputs=(),
        graph=step,
        resident=ResidentBytes(parameters=0, buffers=0, optimizer=0, inputs=0),
        before=Phase(),
        forward=forward,
        between=between,
        backward=backward,
        after=Phase(),
        optimizer=Phase(),
        unplanned_peak_bytes=max(forward.peak_bytes, backward.peak_bytes, between.peak_bytes),
        unplanned_seconds=sum(seconds.values()),
        once_seconds=sum(seconds.values()),
        step_seconds=(sum(seconds.values()),),
    )
