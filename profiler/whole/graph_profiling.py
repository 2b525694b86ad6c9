"""Profiles a step as one graph of ops: captured, run op by op as two programs, and every distinct op measured."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from profiler.capture.backend import eager_backend
from profiler.capture.detached_outputs import unused_outputs
from profiler.capture.joint_graph import REMEDY, CaptureError, JointGraph, capturing
from profiler.capture.programs import order_of
from profiler.capture.step_dataflow import step_graph_of
from profiler.graph_profile import GraphProfile
from profiler.measurement.assembly import what_ran_where
from profiler.measurement.device_memory import ran_out
from profiler.measurement.link_bandwidth import measure_link
from profiler.measurement.measuring import SEVERAL_CALLS, Progress, ProgressReporter
from profiler.measurement.meter import (
    Mark,
    MarkedPhases,
    Meter,
    Place,
    highest,
    joined,
    memory_meter,
    metered_step,
    time_meter,
)
from profiler.measurement.op_costs import measured_graph
from profiler.measurement.profiling import check_profilable, ran_out_in_words
from profiler.measurement.step_measurement import beside_bytes, measure
from profiler.records import Phase
from profiler.step_graph import Side
from profiler.tensors.storages import has_storage
from profiler.trace.partition import StagesError
from profiler.workload.model_caches import ModelCaches
from profiler.workload.precision import precision_of
from profiler.workload.snapshot import RandomState, preserved
from profiler.workload.steps import (
    ProfileError,
    TensorsOfState,
    first_step,
    gradient_bytes,
    resident_bytes_of,
    until_stepped,
)
from profiler.workload.workload import StepPhase, Workload

TIMED_STEPS = 3
_PARTS = ("before", "forward", "between", "backward", "after", "optimizer")
_PROGRAM, _BEHIND = Place("stage", 0), Place("outside", 1)


def profile_graph(workload: Workload, progress: Progress | None = None) -> GraphProfile:
    """Measure a step as a graph of ops.

    Args:
        workload: the training step; its model in training mode.
        progress: called as ``progress(what, done, total)`` before each run.

    Raises:
        CaptureError: the forward is no single graph, or another one in each of a step's forwards.
        ProfileError: the step fails or does not fit, or the model is in eval mode or planned.
        StagesError: the step calls the model more than once before a backward.
    """
    check_profilable(workload)
    report = ProgressReporter(progress)
    set_aside_bytes = gradient_bytes(workload)
    with preserved(workload), ModelCaches(workload.model).off(), _running_out_in_words(workload):
        report("plain steps")
        plain = measure(workload, repeats=1)
        rounded_bytes = (plain.allocated_bytes or plain.peak_bytes) - plain.peak_bytes
        return GraphProfile(
            **what_ran_where(workload),
            precision=precision_of(workload.model, workload.autocast),
            unplanned_peak_bytes=plain.peak_bytes,
            link=measure_link(workload.device),
            allocator_bytes=rounded_bytes + beside_bytes(workload, set_aside_bytes),
            **_as_a_graph(workload, report),
        )


@contextmanager
def _running_out_in_words(workload: Workload) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # User code runs here.
        if not ran_out(error):
            raise
        said = ran_out_in_words(error, None, workload)
        raise ProfileError(f"{said}; profiles of stages are made where a step does not fit, too") from error


@contextmanager
def _compiling_in_words() -> Iterator[None]:
    """What fails in it did not fail in plain steps."""
    try:
        yield
    except (CaptureError, StagesError):
        raise
    except Exception as error:  # User code and torch's compiler run here.
        if ran_out(error):
            raise
        cause = error.__cause__ if isinstance(error, ProfileError) and error.__cause__ is not None else error
        said = next(iter(str(cause).strip().splitlines()), "")
        raise CaptureError(
            f"profile: expected a step that runs as one graph of ops as it does without, got {type(cause).__name__}: "
            f"{said}; {REMEDY}"
        ) from error


@_compiling_in_words()
def _as_a_graph(workload: Workload, report: ProgressReporter) -> dict[str, Any]:
    """The graph, and the phases of a step in which its ops run once, by the names of a profile's attributes."""
    randomness, state = RandomState.capture(), TensorsOfState(workload)
    report("capture")
    unused = unused_outputs(workload)
    with _in_programs(workload, unused) as programs:
        first_step(workload)
        programs.check()
        resident = resident_bytes_of(workload)

        def step(meter: Meter, *, plain: bool = False) -> MarkedPhases:
            randomness.restore()
            programs.wanted = not plain
            return until_stepped(workload, lambda: programs.step(workload, meter))

        report("memory")
        memory = step(memory_meter(workload.device, resident.total, state))
        report("time")
        turns = [
            [step(time_meter(workload.device), plain=plain) for plain in (True, False)] for _ in range(TIMED_STEPS)
        ]
        programs.check()
    report("ops")
    plain_times, times = zip(*turns, strict=True)
    plain_seconds, seconds = map(_step_seconds, (plain_times, times))
    typical = times[seconds.index(statistics.median_low(seconds))]
    return {
        "graph": measured_graph(programs.graphs[0], workload.device, programs.replaced),
        "unused_outputs": unused,
        "resident": resident,
        "unplanned_seconds": statistics.median(plain_seconds),
        "step_seconds": plain_seconds,
        "once_seconds": statistics.median(seconds),
        "evaluations": [mark for mark, _ in memory].count(Mark("forward", _PROGRAM)),
        **_parts(memory, typical),
    }


def _step_seconds(steps: Iterable[MarkedPhases]) -> tuple[float, ...]:
    return tuple(sum(phase.seconds for _, phase in phases) for phases in steps)


class _Programs:
    """The two programs of a step, and the meter that is told of them.

    Attributes:
        graphs: that the model has been compiled to.
        replaced: names of inputs that are gone as backward begins: buffers that the forward replaces by assignment.
        wanted: the model runs as the programs; else as it is.
    """

    def __init__(self) -> None:
        self.graphs: list[JointGraph] = []
        self.replaced: set[str] = set()
        self.wanted = True
        self._inputs: dict[str, StorageWeakRef] = {}
        self._meter: Meter | None = None
        self._last: Side | None = None
        self._several = False

    def step(self, workload: Workload, meter: Meter) -> MarkedPhases:
        """One step under a meter."""

        def on_phase(phase: StepPhase, _: Any) -> None:
            meter.mark(Mark(phase))

        def warm_up() -> None:
            self._meter = None
            workload.step()
            self._meter = meter

        self._meter = meter
        try:
            first = warm_up if workload.own is not None else None
            return metered_step(workload, meter, Mark, on_phase, warm_up=first)
        finally:
            self._meter = None

    def on_program(self, side: Side, moment: Literal["begin", "end"], inputs: Mapping[str, Any]) -> None:
        """A program begins or ends."""
        if moment == "begin" and side == "forward":
            tensors = {name: each for name, each in inputs.items() if isinstance(each, Tensor) and has_storage(each)}
            self._inputs = {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in tensors.items()}
        elif moment == "begin":
            self.replaced |= {name for name, storage in self._inputs.items() if storage.expired()}
        if moment == "begin":
            self._several |= side == self._last == "forward"
            self._last = side
        if self._meter is not None:
            self._meter.mark(Mark(side, _PROGRAM if moment == "begin" else _BEHIND))

    def check(self) -> None:
        """Refuse what no plan is for; raises StagesError or CaptureError."""
        if self._several:
            raise StagesError(SEVERAL_CALLS)
        steps = [step_graph_of(graph) for graph in self.graphs]
        if any(step != steps[0] for step in steps):
            raise CaptureError(
                "profile: expected a step whose forwards run the same ops on the same shapes, got some that differ; "
                f"give all micro-batches one shape; {REMEDY}"
            )


@contextmanager
def _in_programs(workload: Workload, unused: Collection[int]) -> Iterator[_Programs]:
    """Within it the model runs as two programs, every op once."""
    programs = _Programs()

    def choose(graph: JointGraph) -> Any:
        programs.graphs.append(graph)
        return order_of(graph)

    with capturing(workload.model, eager_backend(choose, programs.on_program), unused, lambda: programs.wanted):
        yield programs


def _parts(memory: MarkedPhases, times: MarkedPhases) -> dict[str, Any]:
    """The phases of a step around and in its programs, by the names of a profile's attributes."""
    bytes_of, seconds_of = _by_part(memory), _by_part(times)
    return {
        part: highest(
            [joined(phases, 0.0) for phases in bytes_of[part]],
            sum(phase.seconds for phases in seconds_of[part] for phase in phases),
        )
        for part in _PARTS
    }


def _by_part(phases: MarkedPhases) -> dict[str, list[list[Phase]]]:
    """Of each part, for every time that it comes, its phases."""
    parts: dict[str, list[list[Phase]]] = {part: [] for part in _PARTS}
    last, now = "", "before"
    for mark, phase in phases:
        if mark.place == _PROGRAM:
            now = str(mark.phase)
        elif mark.place == _BEHIND:
            now = "between" if mark.phase == "forward" else "after"
        elif mark.phase in ("forward", "evaluation"):
            now = "before"
        elif mark.phase in ("optimizer", "end"):
            now = "optimizer"
        if now != last:
            parts[now].append([])
        parts[now][-1].append(phase)
        last = now
    return parts
