"""Where the bytes of an unplanned step go: model states, inputs, activations and temporaries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from planner.explain.peak import LOOP, PeakPart, predicted_peak
from planner.explain.timeline import Timeline, predicted_timelines
from planner.plans.cost_model import chain_of
from planner.plans.plan import Plan
from planner.plans.solving import plan_of
from planner.units import names_in_short
from profiler.op_graph import kind_of
from profiler.records import Profile
from solvers import Chain, Problem, replay, solve_chain
from solvers.chain import baselines

MemoryGroup = Literal["model states", "inputs", "outputs", "activations", "temporaries"]
GROUPS: tuple[MemoryGroup, ...] = ("model states", "inputs", "outputs", "activations", "temporaries")
STEP, OPTIMIZER = "forward and backward", "optimizer's step"
_STATES = {
    "parameters": "parameters",
    "other parameters": "other parameters",
    "optimizer states": "optimizer states",
    "loss scale": "loss scale",
    "buffers": "buffers",
    "gradients from before": "gradients",
    "gradients of parameters": "gradients",
    "casts of parameters": "casts of parameters",
    "resident": "other",
    "other resident": "other",
}
_NOT_TOLD = "not told apart"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """Some of the bytes alive at one moment.

    Attributes:
        group: what kind of memory it is.
        what: what it is there for.
        size_bytes: may be negative where the replay counts too much elsewhere.
        stage: that made it; empty where no stage did.
        stage_class: stages of the same class in short.
        op: kind of the op that made it, of activations.
    """

    group: MemoryGroup
    what: str
    size_bytes: int
    stage: str = ""
    stage_class: str = ""
    op: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """All bytes alive at one moment of the unplanned step.

    Attributes:
        moment: ``forward and backward`` (their highest), or ``optimizer's step`` (its highest).
        phase, stage: where in the step that is.
        peak_bytes: what the items add up to.
        items: each byte once.
    """

    moment: str
    phase: str
    stage: str
    peak_bytes: int
    items: tuple[MemoryItem, ...]

    def of_group(self, group: MemoryGroup) -> int:
        """Bytes of a group."""
        return sum(item.size_bytes for item in self.items if item.group == group)

    def by_what(self, group: MemoryGroup) -> dict[str, int]:
        """Bytes of a group by what they are there for, largest first."""
        return _summed((item.what, item.size_bytes) for item in self.items if item.group == group)

    def activations_by_stage(self) -> dict[str, int]:
        """Bytes of activations by the stage that made them, in the order of the step."""
        bytes_by_name: dict[str, int] = {}
        for item in self._activations():
            bytes_by_name[item.stage] = bytes_by_name.get(item.stage, 0) + item.size_bytes
        return bytes_by_name

    def activations_by_stage_class(self) -> dict[str, int]:
        """The same with stages of one class together, largest first."""
        return _summed((item.stage_class, item.size_bytes) for item in self._activations())

    def activations_by_op(self) -> dict[str, int]:
        """Bytes of activations by the kind of op that made them, largest first."""
        return _summed((item.op, item.size_bytes) for item in self._activations())

    def _activations(self) -> Iterator[MemoryItem]:
        return (item for item in self.items if item.group == "activations")


def _summed(pairs: Iterator[tuple[str, int]]) -> dict[str, int]:
    bytes_by_name: dict[str, int] = {}
    for name, size in pairs:
        bytes_by_name[name] = bytes_by_name.get(name, 0) + size
    return dict(sorted(bytes_by_name.items(), key=lambda item: -item[1]))


def memory_breakdowns(profile: Profile) -> tuple[MemoryBreakdown, ...]:
    """Where the memory goes in a profiled step without a plan: at its highest moment, and at the other one.

    Returns:
        The highest moment of forward and backward and, with an optimizer, that of its step; the higher one first: its
        items add up to the profile's unplanned peak.
    """
    chain = chain_of(profile)
    schedule = baselines.keep_all(chain)[0]
    problem = Problem(chain=chain, budget_bytes=replay(chain, schedule).peak_bytes)
    plan = plan_of(profile, problem, solve_chain(problem, solver="keep_all"))
    timeline = predicted_timelines(chain, schedule)[0]
    breakdowns = [_of_step(chain, plan, timeline)]
    if profile.optimizer.peak_bytes:
        breakdowns.append(_of_optimizer(profile))
    return tuple(sorted(breakdowns, key=lambda breakdown: -breakdown.peak_bytes))


def _of_step(chain: Chain, plan: Plan, timeline: Timeline) -> MemoryBreakdown:
    spans = tuple(span for span in timeline.spans if span.phase != "optimizer")
    peak = predicted_peak(chain, plan.schedule, replace(timeline, spans=spans), plan=plan)
    classes = _stage_classes(plan)
    return MemoryBreakdown(
        moment=STEP,
        phase=peak.phase,
        stage=peak.stage,
        peak_bytes=peak.peak_bytes,
        items=tuple(_item(part, classes) for part in peak.parts),
    )


def _item(part: PeakPart, classes: dict[str, str]) -> MemoryItem:
    if part.what in _STATES:
        return MemoryItem(group="model states", what=_STATES[part.what], size_bytes=part.size_bytes)
    if part.what == "batch":
        return MemoryItem(group="inputs", what="batch", size_bytes=part.size_bytes)
    if part.what == LOOP:
        return MemoryItem(group="outputs", what=LOOP, size_bytes=part.size_bytes)
    if part.what.startswith("made ") or part.what == "gradients of activations":
        return MemoryItem(group="temporaries", what=part.what, size_bytes=part.size_bytes, stage=part.stage)
    return MemoryItem(
        group="activations",
        what=part.what,
        size_bytes=part.size_bytes,
        stage=part.stage,
        stage_class=classes.get(part.stage, part.stage),
        op=kind_of(part.op) or _NOT_TOLD,
    )


def _stage_classes(plan: Plan) -> dict[str, str]:
    """The common name of stages of the same class."""
    groups: dict[str, list[str]] = {}
    for stage in plan.stages:
        groups.setdefault(stage.record.module_class if stage.kind == "stage" else stage.name, []).append(stage.name)
    return {name: names_in_short(names) for names in groups.values() for name in names}


def _of_optimizer(profile: Profile) -> MemoryBreakdown:
    """Gradients are all there and activations are gone, but for what somebody still holds: the loss, an output."""
    resident, phase = profile.resident, profile.optimizer
    gradient_bytes = profile.made_gradient_bytes
    states = {
        "parameters": resident.parameters,
        "other parameters": resident.other_parameters,
        "optimizer states": resident.optimizer,
        "loss scale": resident.scaler,
        "buffers": resident.buffers,
        "gradients": resident.gradients + gradient_bytes,
    }
    made_in_it = phase.peak_bytes - phase.start_bytes
    left_bytes = phase.start_bytes - resident.total - gradient_bytes
    items = [
        *(MemoryItem(group="model states", what=what, size_bytes=size) for what, size in states.items()),
        MemoryItem(group="inputs", what="batch", size_bytes=resident.inputs),
        MemoryItem(group="outputs", what=LOOP, size_bytes=resident.loop),
        MemoryItem(group="temporaries", what="still there after backward", size_bytes=left_bytes),
        MemoryItem(group="temporaries", what="made by the optimizer's step", size_bytes=made_in_it),
    ]
    return MemoryBreakdown(
        moment=OPTIMIZER,
        phase="optimizer",
        stage="",
        peak_bytes=phase.peak_bytes,
        items=tuple(item for item in items if item.size_bytes),
    )
