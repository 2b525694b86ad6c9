"""Finds the causes of other bytes in other steps than the measured ones, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from profiler.agreement import agreed, any_rank
from profiler.measurement.stage_probe import PlainStep
from profiler.records import ResidentBytes
from profiler.trace.partition import ChosenStage
from profiler.trace.step_record import Op, Trace, ValueOp
from profiler.trace.step_trace import first_forward
from profiler.workload.compiled_forwards import leave_uncompiled, uncompiled
from profiler.workload.optimizers import optimizer_tensors, with_inner
from profiler.workload.random_states import RandomState
from profiler.workload.snapshot import left_as_before
from profiler.workload.steps import held_by_loop, optimizer_state_bytes
from profiler.workload.tensor_parts import distinct_bytes, local_part
from profiler.workload.workload import Workload

leave_uncompiled(__name__)


def what_is_unsteady(
    workload: Workload,
    trace: Trace,
    stages: Sequence[ChosenStage],
    resident: ResidentBytes,
    varied: Sequence[str],
) -> tuple[str, ...]:
    """One line for each thing.

    Args:
        workload: the workload after the last of the measured steps.
        trace, stages: the trace and stages of its uncompiled step.
        resident: the bytes between steps, after the first one.
        varied: names of stages that did not save as many tensors in every step; empty for the model itself.
    """
    changing = _changing(trace, workload.model)
    return (
        *_in_words(op for op in _value_ops(trace, stages) if _may_change(op, trace, changing)),
        *_steps(varied),
        *_forwards(workload),
        *_gradients(trace),
        *_hooks(workload),
        *_states(workload, resident.optimizer),
        *_loop(workload, resident.loop),
    )


def what_follows_the_batch(workload: Workload, trace: Trace, stages: Sequence[ChosenStage]) -> tuple[str, ...]:
    """One line for each kind of op whose bytes follow values of the batch, and of nothing that training changes.

    They are the same in every step on one batch (the edges of a graph), and may differ on another one of its shapes.
    """
    changing, batch = _changing(trace, workload.model), _from_batch(trace, workload.model)
    return tuple(
        _in_words(
            op for op in _value_ops(trace, stages) if not _may_change(op, trace, changing) and op.deciding & batch
        )
    )


_FEW, _MANY = 4, 16  # forwards: to see that random numbers decide, and to find a large one then


class LargestStep(NamedTuple):
    """The largest of some steps where random numbers decide what runs.

    Attributes:
        start: the random states that it begins from.
        said: that they decide, in a line.
    """

    start: RandomState
    said: str


def largest_step(workload: Workload, start: RandomState, *, keeps: bool) -> LargestStep | None:
    """Returns the step to profile where random numbers decide what a step runs, or what it saves; None where not.

    Runs a forward from the random numbers given, and a few from others. Where these are not alike, some more are run,
    and it is the one that saves most tensors. The caller preserves the workload.

    Args:
        workload: the workload of the profile.
        start: the random states that the profiled step began from.
        keeps: whether forwards may keep what autograd saves.
    """
    start.restore()
    states, runs = [start], [_forward_run(workload, keeps=keeps)]
    if not any_rank(start.torch_differs() or start.host_differs()):
        return None

    def run_until(count: int) -> None:
        while len(runs) < count:
            states.append(RandomState())
            runs.append(_forward_run(workload, keeps=keeps))

    run_until(_FEW)
    if not any_rank(any(run != runs[0] for run in runs)):
        return None
    run_until(_MANY)
    sizes = [(run.saved_tensors, run.calls.total()) for run in runs]
    chosen = agreed(sizes.index(max(sizes)))
    counts = sorted(run.calls.total() for run in runs)
    return LargestStep(
        states[chosen],
        f"random numbers decide what runs: {runs[chosen].calls.total()} calls of modules in the profiled step, the "
        f"largest of {_MANY}; {counts[0]} to {counts[-1]} in the others; where one may be larger, profile the largest "
        "step, with all that can run (drop rates of 0)",
    )


class _ForwardRun(NamedTuple):
    """The calls of each module in a forward, and the number of tensors that autograd saved."""

    calls: Counter[nn.Module]
    saved_tensors: int


def _forward_run(workload: Workload, *, keeps: bool) -> _ForwardRun:
    calls, saved_tensors, modules = Counter[nn.Module](), 0, set(workload.model.modules())

    def count(module: nn.Module, _: object) -> None:
        if module in modules and torch.is_grad_enabled():
            calls[module] += 1

    def pack(tensor: Tensor) -> Tensor | None:
        nonlocal saved_tensors
        saved_tensors += 1
        return tensor.detach() if keeps else None

    hook = register_module_forward_pre_hook(count)
    try:
        which = left_as_before(workload) if keeps else first_forward(workload)
        with which, torch.autograd.graph.saved_tensors_hooks(pack, _kept):
            uncompiled(workload.step)(until="backward")
    finally:
        hook.remove()
    return _ForwardRun(calls, saved_tensors)


def _kept(saved: Tensor | None) -> Tensor:
    if saved is None:
        raise ValueError("the forward goes backward through itself, which keeps what no limit leaves room for")
    return saved


def _may_change(op: ValueOp, trace: Trace, changing: set[int]) -> bool:
    in_backward = op.position >= len(trace.ops)  # of which it is not known what it reads
    return in_backward or not changing.isdisjoint(op.deciding)


def _changing(trace: Trace, model: nn.Module) -> set[int]:
    """Storages that differ from step to step: weights, random numbers, what a step writes for the next one to read
    (counters, running statistics), and what is computed from these."""
    learned = trace.storages.numbers(tensor for tensor in _of_the_model(model) if tensor.is_floating_point())
    drawn = {storage for op in trace.ops if op.access.random for storage in (*op.storages, *op.access.writes)}
    written = {storage for op in trace.ops for storage in (*op.access.writes, *op.access.renews)} - _made(trace)
    return _reached(trace, learned | drawn | written)


def _from_batch(trace: Trace, model: nn.Module) -> set[int]:
    """Storages that were there before the step and are not the model's, and what is computed from them."""
    given = {storage for op in trace.ops for storage in _reads(op)} - _made(trace)
    return _reached(trace, given - trace.storages.numbers(_of_the_model(model)))


def _made(trace: Trace) -> set[int]:
    return {storage for op in trace.ops for storage in op.storages}


def _of_the_model(model: nn.Module) -> list[Tensor]:
    return [local_part(tensor) for tensor in (*model.parameters(), *model.buffers())]


def _reached(trace: Trace, roots: set[int]) -> set[int]:
    """Storages whose contents depend on those of ``roots``, these included."""
    reached = set(roots)
    for op in trace.ops:
        if not reached.isdisjoint(_reads(op)):
            reached.update(op.storages, op.access.writes, op.access.renews)
    return reached


def _value_ops(trace: Trace, stages: Sequence[ChosenStage]) -> Iterator[ValueOp]:
    """Branches outside of stages are left out: nearly every model asks there whether a mask is needed.

    So are those by numbers that are drawn: ``largest_step`` tells whether they decide what runs.
    """
    spans = [(stage.call.first_op, stage.call.end_op) for stage in stages]
    drawn = _drawn(trace)
    for op in trace.by_values:
        inside = any(first <= op.position < end for first, end in spans)
        if not op.branch or (inside and not op.deciding <= drawn):
            yield op


def _drawn(trace: Trace) -> set[int]:
    """Storages of random numbers, and of what is computed from nothing else."""
    drawn: set[int] = set()
    for op in trace.ops:
        reads = set() if op.access.fills else _reads(op)
        if (op.access.random and not reads) or (reads and reads <= drawn):
            drawn.update(op.storages, op.access.writes)
        else:
            drawn.difference_update(op.access.writes)
    return drawn


def _reads(op: Op) -> set[int]:
    return {storage for storage, _ in op.access.reads}


def _steps(varied: Sequence[str]) -> Iterator[str]:
    if varied:
        name = repr(varied[0]) if varied[0] else "the model"
        more = f" and {len(varied) - 1} more" if len(varied) > 1 else ""
        yield f"{name}{more}: what is saved differs from one step to the next (by a counter, or a branch)"


def _forwards(workload: Workload) -> Iterator[str]:
    step = workload.custom_step
    if step is not None and len(set(step.inputs_take_gradients)) > 1:
        yield (
            f"the step runs {step.forwards} forwards, with inputs that take a gradient in some of them and none in "
            "others; the plan is made for one of them"
        )


def _gradients(trace: Trace) -> Iterator[str]:
    for name in trace.sparse_gradients:
        yield f"the gradient of {name!r} is sparse: its bytes depend on the rows that a batch names"


def _hooks(workload: Workload) -> Iterator[str]:
    hooked = [n for n, p in workload.model.named_parameters() if getattr(p, "_post_accumulate_grad_hooks", None)]
    if hooked:
        yield (
            f"a hook runs once the gradient of {hooked[0]!r} is complete: what it keeps from step to step (the states "
            "of an optimizer in backward) is not known here, and not put back after profiling"
        )


def _states(workload: Workload, first_bytes: int) -> Iterator[str]:
    if any(group.get("line_search_fn") for each in with_inner(workload.optimizers) for group in each.param_groups):
        yield "the optimizer's line search keeps more or fewer gradients as the loss goes: its bytes depend on values"
    tensors = optimizer_tensors(workload.optimizers)
    names = sorted({name for _, name, tensor in tensors if tensor.layout is not torch.strided})
    if names:
        yield f"the optimizer's {names[0]!r} is sparse, and grows from step to step; use one that keeps dense states"
    elif (grown := optimizer_state_bytes(workload) - first_bytes) > 0:
        yield f"the optimizer's states grow from step to step: by {grown} bytes in the steps that were measured"


def _loop(workload: Workload, first_bytes: int) -> Iterator[str]:
    if workload.custom_step is not None and workload.custom_step.retains:
        yield (
            "backward goes more than once through one graph (retain_graph, autograd.grad): its tensors, and those "
            "recomputed for it, are held until the last time"
        )
    if workload.custom_step is not None and (grown := distinct_bytes(held_by_loop(workload)) - first_bytes) > 0:
        yield f"what the loop holds grows from step to step: by {grown} bytes in the steps that were measured"


_NOTICED = 1e-3  # of a step's peak, that it may leave without a word


def left_in_cycles(step: PlainStep) -> Iterator[str]:
    """A line where a step leaves tensors in reference cycles: they go when Python's collector happens to run."""
    if step.cyclic_bytes > _NOTICED * max(phase.peak_bytes for _, phase in step.phases):
        yield (
            f"each step leaves {step.cyclic_bytes} bytes of tensors in reference cycles, which pile up until Python's "
            "garbage collector runs: call gc.collect() after each step, or break the cycles (gc.DEBUG_SAVEALL shows "
            "them)"
        )


def _in_words(ops: Iterable[ValueOp]) -> list[str]:
    """One line for each kind of op, with the modules in which it ran."""
    modules: dict[str, list[str]] = {}
    for name, module in dict.fromkeys((op.name, op.module) for op in ops):
        modules.setdefault(name, []).append(module)
    return [f"{_what(name)} in {_places(inside)}: its bytes depend on values" for name, inside in modules.items()]


def _what(name: str) -> str:
    return "a value by which Python may branch" if name == "aten._local_scalar_dense" else name.removeprefix("aten.")


def _places(modules: Sequence[str]) -> str:
    named = [module for module in modules if module] or [""]  # In backward nobody knows the module.
    first = repr(named[0]) if named[0] else "the model"
    more = len(named) - 1
    return f"{first} and {more} other module{'s' if more > 1 else ''}" if more else first
