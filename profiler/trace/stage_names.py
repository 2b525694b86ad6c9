"""Named stages: by which names of modules the stages of a step, and the ops inside them, can be called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from profiler.op_graph import Choice, NamedModule, NamedStage, StageOps
from profiler.trace.partition import ChosenStage
from profiler.trace.step_trace import Call, Trace
from profiler.workload.compiled_forwards import plain_name, unwrapped

# Which choice a person states for which of the stages; the second argument names what ran outside of stages.
StateChoices = Callable[[Sequence[NamedStage], Sequence[str]], Mapping[int, Choice]]


def with_names(trace: Trace, stages: Sequence[ChosenStage], flows: Sequence[StageOps]) -> tuple[NamedStage, ...]:
    """The stages of a traced step, each with its dataflow."""
    return tuple(
        NamedStage(name=stage.name, parents=parents_of(trace, stage.call), ops=flow)
        for stage, flow in zip(stages, flows, strict=True)
    )


def names_outside(trace: Trace, stages: Sequence[ChosenStage]) -> tuple[str, ...]:
    """Names of the modules that ran, but as a part of no stage and around none."""
    positions = {id(call): position for position, call in enumerate(trace.calls)}
    chosen = {positions[id(stage.call)] for stage in stages}
    covers = {position for k in chosen for position in _ancestors(trace, k)}
    found = [
        call.name
        for position, call in enumerate(trace.calls)
        if not (position in chosen | covers or chosen & set(_ancestors(trace, position)))
    ]
    return tuple(dict.fromkeys(found))


def parents_of(trace: Trace, call: Call) -> tuple[NamedModule, ...]:
    """Names and classes of the modules whose call one is a part of, the model first."""
    position = next(k for k, each in enumerate(trace.calls) if each is call)
    found = [trace.calls[k] for k in _ancestors(trace, position)]
    return tuple((each.name, type(each.module).__name__) for each in reversed(found))


def modules_inside(trace: Trace, call: Call) -> tuple[NamedModule, ...]:
    """Names, relative to it, and classes of the modules that ran in a call, itself first with an empty name."""
    found: dict[str, str] = {}
    for k, name in calls_inside(trace, call).items():
        found.setdefault(name, type(trace.calls[k].module).__name__)
    return tuple(found.items())


def calls_inside(trace: Trace, call: Call) -> dict[int, str]:
    """Positions of a call and of those inside it, in order, with the names of their modules as its own module has them.

    A module that several stages share has one name in the model and one in each stage. One that
    the stage's module calls but does not own goes by the name of the module around it.
    """
    names = {
        id(module): plain_name(name) for name, module in call.module.named_modules() if unwrapped(module) is module
    }
    position = next(k for k, each in enumerate(trace.calls) if each is call)
    found = {position: ""}
    for k in range(position + 1, len(trace.calls)):
        each = trace.calls[k]
        if each.parent not in found:
            break  # Calls stand in the order in which they began: what is inside follows without a gap.
        found[k] = names.get(id(each.module), found[each.parent])
    return found


def _ancestors(trace: Trace, position: int) -> Iterable[int]:
    parent = trace.calls[position].parent
    while parent >= 0:
        yield parent
        parent = trace.calls[parent].parent
