"""Cutting a traced step into stages: a chain of module calls, and what runs between them.

Then by which names of modules the stages, and the ops inside them, can be called; and which blocks would be stages if
they could be recomputed, so that the cut had to go around them.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from profiler.op_graph import NamedModule
from profiler.records import WHOLE_MODEL, LeftOutRecord
from profiler.trace.step_record import Call, Trace
from profiler.workload.compiled_forwards import plain_name, unwrapped

StagePattern = str | type[nn.Module]
Stages = Sequence[StagePattern] | Literal["whole"] | None

# A finer cut must pay: with fewer, larger stages there is less to patch and more to choose inside them.
# A cut is taken if its memory is at most this factor above the best cut's.
COARSER_WITHIN = 1.25
# The same for parts that are put together in one stage, which need not take all of that memory at once.
TOGETHER_WITHIN = 2.0
HOOKS_OF_CALLS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class StagesError(ValueError):
    """The step cannot be cut into the stages asked for; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenStage:
    """A module call that becomes a stage.

    Attributes:
        name: the module's name, with ``#n`` for the n-th further call of the same module.
        call: the record of the call in the trace.
        links: positions of input tensors that are, unchanged, outputs of the
            stage before: pairs (input leaf, output leaf); empty where it is not linked.
        boundary_storages: storages that live only for such a link.
        inner_calls: how often it calls modules of other stages itself, as an activation that layers share.
    """

    name: str
    call: Call
    links: tuple[tuple[int, int], ...] = ()
    boundary_storages: frozenset[int] = frozenset()
    inner_calls: tuple[tuple[nn.Module, int], ...] = ()


def choose_stages(trace: Trace, patterns: Stages = None) -> tuple[ChosenStage, ...]:
    """The stages of a traced step, in forward order.

    Args:
        trace: one traced step.
        patterns: None to find them automatically (the cut of the call tree
            whose recomputation, each stage on its own, needs the least memory); "whole" for the model's call as one
            stage, or that of the module that it only passes on to; otherwise module names, glob patterns or module
            classes.

    Raises:
        StagesError: a pattern matches no module that ran.
    """
    if patterns == "whole":
        chosen = [_innermost(trace, i) for i, call in enumerate(trace.calls) if call.parent < 0 and _has_backward(call)]
    else:
        chosen = best_cut(trace) if patterns is None else _matching(trace, patterns)
    calls = sorted(chosen, key=lambda i: trace.calls[i].first_node)
    return stages_of(trace, [trace.calls[i] for i in calls])


def _innermost(trace: Trace, position: int) -> int:
    """The call inside another one, or in that, that makes all of it: a loop may call either of the modules."""
    makes = operator.attrgetter("first_node", "end_node", "first_save", "end_save", "outputs")
    outer = trace.calls[position]
    for inner, call in enumerate(trace.calls):
        if call.parent == position and makes(call) == makes(outer):
            return _innermost(trace, inner)
    return position


def _has_backward(call: Call) -> bool:
    return call.end_node > call.first_node and call.end_save > call.first_save


def could_be_stage(call: Call) -> bool:
    """Whether a call is a part of the model with something to keep, whatever speaks against running it again."""
    return call.parent >= 0 and _has_backward(call)


def _usable(call: Call) -> bool:
    return could_be_stage(call) and not why_not_recomputable(call)


def best_cut(trace: Trace, usable: Callable[[Call], bool] = _usable) -> list[int]:
    """Minimise the memory that recomputation can reach (see ``_memory_of``), preferring coarse cuts.

    Args:
        trace: one traced step.
        usable: says which calls may be stages.

    Returns:
        Positions of calls in the trace, none inside another.
    """
    children = _children(trace.calls)
    weights = [
        trace.storages.total_bytes(trace.saved(c.first_save, c.end_save) - c.input_storages) for c in trace.calls
    ]
    cuts = []
    for largest in sorted({weights[i] for i, call in enumerate(trace.calls) if usable(call)}):
        cut = _without_needless(trace, _cut_below(trace, children, weights, largest, usable), weights)
        if cut:
            cuts.append((_memory_of(trace, cut, weights), len(cut), cut))
    if not cuts:
        return []
    limit = COARSER_WITHIN * min(memory for memory, _, _ in cuts)
    best = min((count, memory, cut) for memory, count, cut in cuts if memory <= limit)[2]
    opened = _without_needless(trace, _with_chains_opened(trace, children, best, usable), weights)
    return _with_parts_together(trace, opened, usable, weights)


def _without_needless(trace: Trace, cut: list[int], weights: Sequence[int]) -> list[int]:
    """Leave out stages that stand alone and keep nothing: running them again frees nothing."""
    return [i for run in _runs(trace, cut) for i in run if len(run) > 1 or weights[i] > 0]


def _with_chains_opened(
    trace: Trace, children: dict[int, list[int]], cut: list[int], usable: Callable[[Call], bool]
) -> list[int]:
    """Replace stages that are nothing but a chain of smaller modules: segments can put them together again."""
    opened: list[int] = []
    waiting = list(cut)
    while waiting:
        index = waiting.pop()
        inner = children.get(index, [])
        if _is_pure_chain(trace, index, inner, usable) and all(children.get(i) for i in inner):
            waiting.extend(inner)
        else:
            opened.append(index)
    return sorted(opened)


def _with_parts_together(
    trace: Trace, cut: list[int], usable: Callable[[Call], bool], weights: Sequence[int]
) -> list[int]:
    """Replace stages by the call that they are the parts of, where no two of its parts are alike.

    A block is planned op by op, and costs one call where its parts cost several; what repeats stays apart, as stages
    that are alike are measured and planned once.
    """
    limit = TOGETHER_WITHIN * _memory_of(trace, cut, weights)
    for parent in sorted({trace.calls[i].parent for i in cut}, reverse=True):  # inner ones first
        inside = [i for i in cut if parent in trace.ancestors(i)]
        if parent < 0 or len(inside) < 2 or not usable(trace.calls[parent]):
            continue
        kinds = [_kind(trace.calls[i].module) for i in inside]
        together = sorted({*cut, parent} - {*inside})
        if len(set(kinds)) == len(kinds) and _memory_of(trace, together, weights) <= limit:
            cut = together
    return cut


def _kind(module: nn.Module) -> tuple[type, tuple[tuple[str, tuple[int, ...]], ...]]:
    """The class, and the shapes of the parameters."""
    return type(module), tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def _is_pure_chain(trace: Trace, index: int, inner: list[int], usable: Callable[[Call], bool]) -> bool:
    if len(inner) < 2 or not all(usable(trace.calls[i]) for i in inner):
        return False
    calls = [trace.calls[i] for i in inner]
    parent = trace.calls[index]
    nothing_else = parent.first_node == calls[0].first_node and parent.end_node == calls[-1].end_node
    return nothing_else and len(_runs(trace, inner)) == 1 and not _has_skips(calls)


def _has_skips(calls: Sequence[Call]) -> bool:
    """Whether a call reads what one further back than the call before it returned."""
    earlier: set[int] = set()
    for before, call in itertools.pairwise(calls):
        if earlier & call.input_storages - before.output_storages:
            return True
        earlier |= before.output_storages
    return False


def _children(calls: Sequence[Call]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for position, call in enumerate(calls):
        children.setdefault(call.parent, []).append(position)
    return children


def _cut_below(
    trace: Trace,
    children: dict[int, list[int]],
    weights: Sequence[int],
    largest: int,
    usable: Callable[[Call], bool],
) -> list[int]:
    """The outermost usable calls that keep at most ``largest`` bytes."""
    cut: list[int] = []
    waiting = list(children.get(-1, ()))
    while waiting:
        position = waiting.pop()
        if usable(trace.calls[position]) and weights[position] <= largest:
            cut.append(position)
        else:
            waiting.extend(children.get(position, ()))
    return sorted(cut)


def _memory_of(trace: Trace, cut: list[int], weights: Sequence[int]) -> int:
    """Bytes kept when every stage is recomputed, plus the largest stage.

    Boundaries inside a run of n linked stages can be dropped too: they count
    as the sqrt(n) that the square-root rule keeps (Chen et al. 2016, section 4.1).
    """
    inner: set[int] = set()
    reduced = 0
    for run in _runs(trace, cut):
        links = [trace.calls[i].input_storages & trace.calls[j].output_storages for j, i in itertools.pairwise(run)]
        sizes = [trace.storages.total_bytes(link - trace.always_alive) for link in links]
        kept = math.ceil(math.sqrt(len(run))) * max(sizes, default=0)
        if kept < sum(sizes):
            inner.update(*links)
            reduced += kept
    outside = _outside(trace, cut) - inner
    return trace.storages.total_bytes(outside) + reduced + max(weights[i] for i in cut)


def _outside(trace: Trace, cut: list[int]) -> set[int]:
    """Storages that stay alive when every stage of the cut is recomputed on its own."""
    outside: set[int] = set()
    position = 0
    for call in (trace.calls[index] for index in cut):
        outside |= trace.saved(position, call.first_save) | (call.input_storages - trace.always_alive)
        position = call.end_save
    return outside | trace.saved(position, len(trace.saves))


def _runs(trace: Trace, cut: list[int]) -> list[list[int]]:
    """The cut in forward order, split where a stage is not linked to the one before."""
    runs: list[list[int]] = []
    for index in sorted(cut, key=lambda i: trace.calls[i].first_node):
        call = trace.calls[index]
        before = trace.calls[runs[-1][-1]] if runs else None
        if before is not None and _nothing_between(trace, before, call) and _links(before, call):
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _matching(trace: Trace, patterns: Sequence[StagePattern]) -> list[int]:
    matched: list[int] = []
    for pattern in patterns:
        matches = [i for i, call in enumerate(trace.calls) if call.parent >= 0 and _matches(call, pattern)]
        if not matches:
            raise StagesError(_no_match(trace, pattern))
        matched.extend(matches)
    outermost = [i for i in sorted(set(matched)) if not any(j in set(matched) for j in trace.ancestors(i))]
    return [i for i in outermost if _has_backward(trace.calls[i])]


def _matches(call: Call, pattern: StagePattern) -> bool:
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(call.name, pattern) or type(call.module).__name__ == pattern
    return isinstance(call.module, pattern)


def _no_match(trace: Trace, pattern: StagePattern) -> str:
    text = pattern if isinstance(pattern, str) else pattern.__name__
    names = list(dict.fromkeys(call.name for call in trace.calls if call.name))
    classes = list(dict.fromkeys(type(call.module).__name__ for call in trace.calls))
    near = difflib.get_close_matches(text, names + classes, n=5, cutoff=0.3) or names[:5]
    return f"stages: expected a module name, glob pattern or class that ran, got {text!r}; nearest: {', '.join(near)}"


def stage_name(call: Call) -> str:
    """The module's name, with ``#n`` for its n-th further call."""
    if not call.name:
        return WHOLE_MODEL
    return call.name if call.index == 0 else f"{call.name}#{call.index}"


def stages_of(trace: Trace, calls: Sequence[Call]) -> tuple[ChosenStage, ...]:
    """Calls of a trace, in forward order, as stages."""
    stages = [ChosenStage(name=stage_name(c), call=c, inner_calls=_inner_calls(trace, c, calls)) for c in calls]
    for k in range(1, len(calls)):
        links = _links(calls[k - 1], calls[k])
        if links and _nothing_between(trace, calls[k - 1], calls[k]):
            stages[k] = replace(stages[k], links=links, boundary_storages=_exclusive(trace, calls, k, links))
    return tuple(stages)


def _inner_calls(trace: Trace, call: Call, calls: Sequence[Call]) -> tuple[tuple[nn.Module, int], ...]:
    others = {each.module for each in calls} - {call.module}
    if not others.intersection(call.module.modules()):
        return ()
    inside = (trace.calls[k].module for k in calls_inside(trace, call))
    return tuple(Counter(module for module in inside if module in others).items())


def _links(before: Call, after: Call) -> tuple[tuple[int, int], ...]:
    outputs = {(leaf.identity, leaf.version): position for position, leaf in enumerate(before.outputs)}
    inputs = enumerate((leaf.identity, leaf.version) for leaf in after.inputs)
    return tuple((i, outputs[leaf]) for i, leaf in inputs if leaf in outputs)


def _nothing_between(trace: Trace, before: Call, after: Call) -> bool:
    """Whether nothing that backward needs runs between two calls, and nothing that changes what is linked.

    Changes through ``.data`` count in no version, but are ops like others.
    """
    if before.end_node != after.first_node or before.end_save != after.first_save:
        return False
    linked = before.output_storages & after.input_storages
    return not any(linked.intersection(op.access.writes) for op in trace.ops[before.end_op : after.first_op])


def _exclusive(trace: Trace, calls: Sequence[Call], k: int, links: tuple[tuple[int, int], ...]) -> frozenset[int]:
    """Storages of a link that nothing but the stages on both sides needs."""
    linked = {number for i, _ in links if (number := calls[k].inputs[i].storage) is not None}
    needed_elsewhere = set().union(*(call.input_storages for j, call in enumerate(calls) if j != k))
    before, after = calls[k - 1], calls[k]
    saved_elsewhere = trace.saved(0, before.first_save) | trace.saved(after.end_save, len(trace.saves))
    return frozenset(linked - trace.always_alive - needed_elsewhere - saved_elsewhere)


def alike(stages: Sequence[ChosenStage]) -> list[int]:
    """A number for each stage; equal where structure, shapes and hooks are equal."""
    numbers: dict[Any, int] = {}
    kinds = []
    for stage in stages:
        call = stage.call
        key = (
            type(call.module),
            tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in call.module.named_parameters()),
            tuple((leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in call.inputs),
            call.end_op - call.first_op,
            call.end_save - call.first_save,
            call.draws_random,
            _hooks_of(call.module),
        )
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


def _hooks_of(module: nn.Module) -> tuple[tuple[str, str, str], ...]:
    """Names the hooks that run with a call: on which module in it, or for the gradient of which parameter."""
    on_modules = [
        (name, kind, getattr(hook, "__qualname__", type(hook).__name__))
        for name, inner in module.named_modules()
        for kind in HOOKS_OF_CALLS
        for hook in getattr(inner, kind).values()
    ]
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    on_parameters = [(name, kind, "") for name, p in module.named_parameters() for kind in kinds if getattr(p, kind)]
    return (*on_modules, *on_parameters)


def name_outside(stages: Sequence[str], k: int) -> str:
    """Returns the name of the part outside of stages directly before the stage of this number, or after all stages.

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
    kinds = {_alike(stage.call.module) for stage in stages}
    called = {id(call.module) for call in trace.calls}
    return tuple(
        plain_name(name)
        for name, module in model.named_modules()
        if id(module) not in called and unwrapped(module) is module and _alike(module) in kinds
    )


def _alike(module: nn.Module) -> object:
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


# Of all that is saved for backward: blocks that keep less of it are not what stands in the way.
LEAST_SHARE = 0.05


def left_out_of(trace: Trace, stages: Sequence[ChosenStage]) -> tuple[LeftOutRecord, ...]:
    """Returns the stages that the best cut would have had besides, if all could be recomputed; equal blocks together.

    Args:
        trace: one traced step.
        stages: the stages that were found in it.
    """
    if not any(could_be_stage(call) and why_not_recomputable(call) for call in trace.calls):
        return ()
    groups: dict[tuple[str, str, str], list[Call]] = {}
    for call in (trace.calls[k] for k in best_cut(trace, could_be_stage)):
        if reason := why_not_recomputable(call):
            key = _class_of(call.module), reason + _where(trace, call), remedy_for(call)
            groups.setdefault(key, []).append(call)
    least_bytes = LEAST_SHARE * trace.storages.total_bytes(trace.saved(0, len(trace.saves)))
    records = [
        LeftOutRecord(
            names=tuple(stage_name(call) for call in sorted(calls, key=lambda call: call.first_op)),
            module_class=module_class,
            kept_bytes=_kept_bytes(trace, calls, stages),
            reason=reason,
            remedy=remedy,
        )
        for (module_class, reason, remedy), calls in groups.items()
    ]
    return tuple(record for record in records if record.kept_bytes >= max(1, least_bytes))


def _class_of(module: nn.Module) -> str:
    """The class by which a person knows the module, also where ``torch.jit`` has made another of it."""
    return getattr(module, "original_name", type(module).__name__)


def _kept_bytes(trace: Trace, calls: Iterable[Call], stages: Sequence[ChosenStage]) -> int:
    """Returns the bytes that calls save for backward outside of stages, and hide, without their inputs."""
    spans = [(stage.call.first_save, stage.call.end_save) for stage in stages]
    kept: set[int] = set()
    for call in calls:
        kept |= call.hidden
        position = call.first_save
        for first, end in sorted(span for span in spans if call.first_save <= span[0] and span[1] <= call.end_save):
            kept |= trace.saved(position, first) - call.input_storages
            position = end
        kept |= trace.saved(position, call.end_save) - call.input_storages
    return trace.storages.total_bytes(kept)


def _where(trace: Trace, call: Call) -> str:
    """The module within a block that brings the reason in, where that is one of its parts; empty otherwise."""
    if not (call.side_effect or call.mutates_input):
        return ""
    reason = why_not_recomputable(call)
    inside = [(name, trace.calls[k]) for k, name in calls_inside(trace, call).items() if name]
    names = [name for name, inner in inside if why_not_recomputable(inner) == reason]
    return f", in its {names[-1]}" if names else ""


# What was dropped would be made again while forward goes on, and then be kept by the graph of that backward.
GOES_BACKWARD = "the forward goes backward through it (for forces, or a penalty on gradients)"
_HOST_RANDOM = "it draws from Python's or numpy's random generator"
_WAITS = "the head in it waits for its loss, and runs in pieces with it"
_FILLS_LATE = "an op in it saves a tensor for backward before it fills it (rrelu its noise)"
_FOREIGN_CHANGE = "it changes a parameter, or a buffer of another module"


def why_not_recomputable(call: Call) -> str:
    """Returns why a recomputation would not be the same; empty for no reason."""
    return _obstacle(call)[0]


def remedy_for(call: Call) -> str:
    """Returns the change in the model, or in its settings, that makes the call recomputable; empty where it is."""
    return _obstacle(call)[1]


def _obstacle(call: Call) -> tuple[str, str]:
    """Reason and remedy."""
    if call.waits:
        return _WAITS, ""
    if call.mutates_input:
        return "it changes its input in place", "write the result into a new tensor (x = x + y for x += y)"
    if call.opaque or call.fills:
        return _holder(call)
    if call.scripted:
        reason = f"{call.scripted} is compiled by torch.jit, and saves other tensors in its first runs than later"
        return reason, "use the module as it was before torch.jit"
    if not call.outputs:
        return "it returns no tensor", "return its tensors, in a tuple, a dict or a dataclass"
    if call.fills_late:
        return _FILLS_LATE, "use leaky_relu for rrelu, or draw the noise with torch.rand"
    if call.goes_backward:
        remedy = "where that is a penalty, compute it in a step of its own: the gradients of both add up"
        return GOES_BACKWARD, f"{remedy}; for forces, take the batch in smaller pieces"
    if call.hides:
        reason = f"{call.hides} keeps tensors for backward in attributes of its context, where no hook can drop them"
        return reason, "have the function save them (ctx.save_for_backward); of bitsandbytes take a 4-bit base"
    if call.side_effect:
        return call.side_effect, _SIDE_EFFECTS.get(call.side_effect, "")
    return "", ""


_SIDE_EFFECTS = {
    _HOST_RANDOM: "draw with torch.rand and its like, whose state is put back for a recomputation",
    _FOREIGN_CHANGE: "change it between steps, or keep it in a buffer of the module itself",
}


def _holder(call: Call) -> tuple[str, str]:
    remedy = "pass its tensors in a tuple, a dict or a dataclass"
    if "Cache" in call.fills + call.opaque:
        remedy = "pass no cache (use_cache=False)"
    if call.fills:
        return f"it puts tensors into a {call.fills} that it is given and does not return", remedy
    return (
        f"it passes a {call.opaque} that holds tensors, which a recomputation could not be given as they were",
        remedy,
    )
