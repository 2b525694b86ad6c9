"""By which names of modules the stages of a step, and the ops inside them, can be called."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from profiler.op_graph import NamedModule
from profiler.trace.partition import ChosenStage
from profiler.trace.step_record import Call, Trace
from profiler.workload.compiled_forwards import plain_name, unwrapped


def name_outside(stages: Sequence[str], k: int) -> str:
    """What runs outside of stages directly before the one of this number is called, after all where there is none.

    >>> [name_outside(["embed", "h.0"], k) for k in range(3)]
    ['before embed', 'between embed and h.0', 'after h.0']
    """
    if not stages:
        return "the whole model"
    if k == 0:
        return f"before {stages[0]}"
    return f"after {stages[-1]}" if k == len(stages) else f"between {stages[k - 1]} and {stages[k]}"


def names_unseen(model: nn.Module, trace: Trace, stages: Sequence[ChosenStage]) -> tuple[str, ...]:
    """Names of modules that the step did not call, of the same class and with parameters like those of a stage."""
    kinds = {_kind(stage.call.module) for stage in stages}
    called = {id(call.module) for call in trace.calls}
    return tuple(
        plain_name(name)
        for name, module in model.named_modules()
        if id(module) not in called and unwrapped(module) is module and _kind(module) in kinds
    )


def _kind(module: nn.Module) -> object:
    """Equal for modules of a class whose parameters are alike; never for those without parameters."""
    shapes = tuple((plain_name(name), tuple(p.shape)) for name, p in module.named_parameters())
    return (type(module), shapes) if shapes else id(module)


def parents_of(trace: Trace, call: Call) -> tuple[NamedModule, ...]:
    """Names and classes of the modules whose call one is a part of, the model first."""
    parents = [trace.calls[k] for k in trace.ancestors(trace.calls.index(call))]
    return tuple((parent.name, type(parent.module).__name__) for parent in reversed(parents))


def modules_inside(trace: Trace, call: Call) -> tuple[NamedModule, ...]:
    """Names, relative to it, and classes of the modules that ran in a call, itself first with an empty name."""
    class_of: dict[str, str] = {}
    for k, name in calls_inside(trace, call).items():
        class_of.setdefault(name, type(trace.calls[k].module).__name__)
    return tuple(class_of.items())


def calls_inside(trace: Trace, call: Call) -> dict[int, str]:
    """Positions of a call and of those inside it, in order, with the names of their modules as its own module has them.

    A module that several stages share has one name in the model and one in each stage. One that
    the stage's module calls but does not own goes by the name of the module that calls it.
    """
    names = {
        id(module): plain_name(name) for name, module in call.module.named_modules() if unwrapped(module) is module
    }
    position = trace.calls.index(call)
    name_of = {position: ""}
    for k in range(position + 1, len(trace.calls)):
        inner = trace.calls[k]
        if inner.parent not in name_of:
            break  # Calls stand in the order in which they began: what is inside follows without a gap.
        name_of[k] = names.get(id(inner.module), name_of[inner.parent])
    return name_of
