"""Profiles a step as one graph of ops: captured, run op by op as two programs, and every distinct op measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from profiler.capture.backend import eager_backend
from profiler.capture.joint_graph import JointGraph, capturing
from profiler.capture.op_costs import costs_of
from profiler.capture.programs import order_of
from profiler.capture.step_dataflow import step_graph_of
from profiler.graph_profile import GraphProfile
from profiler.measurement.assembly import what_ran_where
from profiler.measurement.joined_phases import joined
from profiler.measurement.measuring import Progress, ProgressReporter
from profiler.measurement.meter import Mark, MarkedPhases, Meter, Place, memory_meter, metered_step, time_meter
from profiler.measurement.step_measurement import measure
from profiler.records import Phase
from profiler.step_graph import StepGraph
from profiler.workload.model_caches import ModelCaches
from profiler.workload.precision import precision_of
from profiler.workload.snapshot import RandomState, preserved
from profiler.workload.steps import TensorsOfState, first_step, resident_bytes_of, until_stepped
from profiler.workload.workload import StepPhase, Workload

TIMED_STEPS = 3
_PROGRAM, _BEHIND = Place("stage", 0), Place("outside", 1)


def profile_graph(workload: Workload, progress: Progress | None = None) -> GraphProfile:
    """Measure a step as a graph of ops.

    Args:
        workload: the training step; its model in training mode.
        progress: called as ``progress(what, done, total)`` before each run.

    Raises:
        CaptureError: the forward is no single graph.
        ProfileError: the step fails.
    """
    report = ProgressReporter(progress)
    report("plain steps")
    with preserved(workload), ModelCaches(workload.model).off():
        plain = measure(workload)
        randomness, state = RandomState.capture(), TensorsOfState(workload)
        report("capture")
        with _in_programs(workload) as programs:
            first_step(workload)
            resident = resident_bytes_of(workload)

            def step(meter: Meter) -> MarkedPhases:
                randomness.restore()
                return until_stepped(workload, lambda: programs.step(workload, meter))

            report("memory")
            memory = step(memory_meter(workload.device, resident.total, state))
            report("time")
            times = [step(time_meter(workload.device)) for _ in range(TIMED_STEPS)]
        report("ops")
        graph = _measured(programs.graph, workload.device)
    seconds = [sum(phase.seconds for _, phase in phases) for phases in times]
    typical = times[seconds.index(statistics.median_low(seconds))]
    return GraphProfile(
        **what_ran_where(workload),
        precision=precision_of(workload.model, workload.autocast),
        graph=graph,
        resident=resident,
        **_parts(memory, typical),
        unplanned_peak_bytes=plain.peak_bytes,
        unplanned_seconds=plain.seconds,
        once_seconds=statistics.median(seconds),
        step_seconds=plain.step_seconds,
    )


@dataclass(slots=True)
class _Programs:
    """The two programs of a step, and the meter that is told of them."""

    graphs: list[JointGraph]
    meter: Meter | None = None

    @property
    def graph(self) -> JointGraph:
        return self.graphs[0]

    def step(self, workload: Workload, meter: Meter) -> MarkedPhases:
        """One step under a meter."""

        def on_phase(phase: StepPhase, _: Any) -> None:
            meter.mark(Mark(phase))

        self.meter = meter
        try:
            warm_up = workload.step if workload.own is not None else None
            return metered_step(workload, meter, Mark, on_phase, warm_up=warm_up)
        finally:
            self.meter = None

    def on_program(self, side: Any, moment: str) -> None:
        if self.meter is not None:
            self.meter.mark(Mark(side, _PROGRAM if moment == "begin" else _BEHIND))


@contextmanager
def _in_programs(workload: Workload) -> Iterator[_Programs]:
    """Within it the model runs as two programs, every op once."""
    programs = _Programs([])

    def choose(graph: JointGraph) -> Any:
        programs.graphs.append(graph)
        return order_of(graph)

    with capturing(workload.model, eager_backend(choose, programs.on_program)):
        yield programs


def _measured(graph: JointGraph, device: torch.device) -> StepGraph:
    """The dataflow with what its ops cost."""
    costs = {op.name: cost for op, cost in costs_of(graph, dict.fromkeys(graph.makers.values()), device).items()}
    step = step_graph_of(graph)
    ops = [
        replace(op, seconds=costs[op.name].seconds, transient_bytes=costs[op.name].transient_bytes) for op in step.ops
    ]
    return replace(step, ops=tuple(ops))


def _parts(memory: MarkedPhases, times: MarkedPhases) -> dict[str, Any]:
    """The phases of a step around and in its programs, by the names of a profile's attributes."""
    bytes_of, seconds_of = _by_part(memory), _by_part(times)
    return {part: joined(bytes_of[part], sum(phase.seconds for phase in seconds_of[part])) for part in bytes_of}


def _by_part(phases: MarkedPhases) -> dict[str, list[Phase]]:
    parts: dict[str, list[Phase]] = {
        name: [] for name in ("before", "forward", "between", "backward", "after", "optimizer")
    }
    now = "before"
    for mark, phase in phases:
        if mark.place == _PROGRAM:
            now = str(mark.phase)
        elif mark.place == _BEHIND:
            now = "between" if mark.phase == "forward" else "after"
        elif mark.phase in ("optimizer", "end"):
            now = "optimizer"
        parts[now].append(phase)
    return parts
