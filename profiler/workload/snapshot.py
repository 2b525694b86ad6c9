"""Restores what profiling and measuring change of a workload, also after an exception."""

from __future__ import annotations

import functools
import gc
import math
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from profiler.messages import warn_caller
from profiler.workload.custom_step import CustomStep
from profiler.workload.data_parallel import buckets_restored
from profiler.workload.given_models import check_ready
from profiler.workload.optimizers import with_inner
from profiler.workload.plain_objects import base_of, copied, is_opened, refill
from profiler.workload.random_states import RandomState
from profiler.workload.reachable import (
    OF_MODULES,
    Space,
    attributes_space,
    is_iterator,
    is_known_otherwise,
    is_plain_tensor,
    items_space,
    modules_in,
    named_space,
    own_spaces,
    reached_from,
    spaces_of,
    tensors_held,
    tensors_of,
)
from profiler.workload.remembered_values import Memories, Restoring, Snapshot, filled, remembered_space
from profiler.workload.replayed_iterators import ReplayedIterator
from profiler.workload.tensor_memory import TensorMemory
from profiler.workload.torch_state import current_flags, stacks_kept
from profiler.workload.workload import Workload

_FROZEN_FROM_START = gc.get_freeze_count()  # Python 3.12 begins with some hundred objects frozen


@contextmanager
def preserved(workload: Workload) -> Iterator[None]:
    """Restore on leaving whatever a training step may change, and random states.

    Parameters, buffers and gradients, modules' flags and attributes, the states of optimizer and scaler, the inputs,
    and the flags of torch. Copies lie in host memory. Gradients are set aside, so the step inside starts without any.
    Cyclic garbage of before is collected first and none inside: when its tensors go would be chance, and show in the
    measurements. Where a measurement collects garbage itself, it looks only at objects made inside: all others are
    frozen, unless some were before.

    Raises:
        RestoreError: something cannot be remembered, before anything has run; or not be put back, when all else is.
    """
    gc.collect()
    collects, freezes, back = gc.isenabled(), gc.get_freeze_count() <= _FROZEN_FROM_START, Restoring()
    with torch.set_grad_enabled(torch.is_grad_enabled()), stacks_kept():
        try:
            gc.disable()
            if freezes:
                gc.freeze()
            with nullcontext() if workload.custom_step is None else _replaying(workload.custom_step):
                _remember(workload, back)
                try:
                    yield
                finally:
                    workload.release()
                    try:
                        back.restore()
                    except KeyboardInterrupt:  # It may have come before anything was back.
                        back.restore()
                        raise
        finally:
            if freezes:
                gc.unfreeze()
            if collects:
                gc.enable()


@contextmanager
def _replaying(step: CustomStep) -> Iterator[None]:
    """Gives each step inside the same items of the iterators that it takes from; afterwards they come again."""
    before = step.replays
    step.replays, end = _replace_iterators(step.function)
    for replay in step.replays:
        replay.begin(_item_restore)
    try:
        yield
    finally:
        end()
        step.replays = before


def _replace_iterators(*roots: Any) -> tuple[list[ReplayedIterator], Callable[[], None]]:
    """Put replayed iterators in the place of those that can be reached; returns them, and what ends that.

    Where nothing was taken the iterators themselves stand there again in the end.
    """
    places: dict[int, tuple[Any, list[Callable[[Any], object]]]] = {}
    for holder in reached_from(*roots, through_iterators=False):
        for space in () if is_known_otherwise(holder) else (*spaces_of(holder), *items_space(holder)):
            for name, value in space.read().items():
                if is_iterator(value):
                    place = functools.partial(space.write, name)
                    places.setdefault(id(value), (value, []))[1].append(place)
    holder = space = value = None  # What still holds an iterator here counts below.
    replays: list[tuple[ReplayedIterator, list[Callable[[Any], object]]]] = []
    for found in places.values():
        if isinstance(found[0], ReplayedIterator):
            replays.append((found[0], []))
        else:  # It is held by each place, by ``found`` and by the call.
            shared = sys.getrefcount(found[0]) > len(found[1]) + 2
            replays.append((ReplayedIterator(found[0], shared=shared), found[1]))
    places.clear()
    for replay, where in replays:
        for place in where:
            place(replay)

    def end() -> None:
        for replay, where in replays:
            if not replay.end():
                for place in where:
                    place(replay.source)

    return [replay for replay, _ in replays], end


def _item_restore(value: Any) -> Callable[[], None]:
    """Returns the function that restores an item that steps get again; its tensors stay where a meter moved them to."""
    back, reached = Restoring(), reached_from(value)
    tensors = tensors_of(reached)
    memories: Memories = dict.fromkeys(map(id, tensors))
    for tensor in tensors:
        back.remember(
            "an item of an iterator", lambda t=tensor: functools.partial(TensorMemory(t).put_back, stays=True)
        )
    back.remember("an item of an iterator", lambda: _in_place(value, memories, keeps=True))
    remember_reached(reached, reached.names, back, memories, keeps=True)
    return back.restore


def captured(workload: Workload) -> Callable[[], None]:
    """Remember everything, in host memory, and set gradients aside; the returned function puts it back.

    Raises:
        RestoreError: as for ``preserved``.
        ValueError: the model has lazy modules that never ran, or is on the meta device; nothing is changed then.
    """
    back = Restoring()
    _remember(workload, back)
    return back.restore


@contextmanager
def left_as_before(workload: Workload) -> Iterator[None]:
    """Put back on leaving what modules keep on themselves and on parameters, but for values of tensors.

    A forward without its backward leaves there what hooks note for a backward (for per-sample gradients, say). Nothing
    is copied or kept alive: what has taken the place of a tensor that is gone stays there.
    """
    back, modules = Restoring(), list(modules_of(workload))
    reached = reached_from(*modules)
    memories: Memories = dict.fromkeys(map(id, tensors_of(reached)))
    for module in modules:
        _remember_attributes("attributes of modules", module, OF_MODULES, back, memories)
    remember_reached(reached, reached.names, back, memories)
    try:
        yield
    finally:
        back.restore()


def _remember(workload: Workload, back: Restoring) -> None:
    for root in (workload.model, workload.loss):
        if isinstance(root, nn.Module):
            check_ready(root, "Workload")
    modules = modules_of(workload)
    reached = reached_from(*_functions(workload))
    parameters = _named_parameters(workload, modules, tensors_of(reached))
    back.add("the flags of torch", current_flags())
    back.add("random states", RandomState().restore)
    memories: Memories = {id(parameter): None for _, parameter in parameters}
    for name, parameter in parameters:
        back.remember(name, lambda p=parameter: _held(p))
    handled = remember_modules(modules, back, memories)
    remember_reached(
        [value for value in reached if id(value) not in handled], reached.names, back, memories, keeps=True
    )
    if reached.is_cut:
        warn_caller(
            f"profile: the step refers to more than {len(reached):,} objects: what is behind the nearest of them is "
            "neither put back after profiling nor counted; keep large tables out of what the step refers to, or make "
            "them a torch Dataset"
        )
    inputs = workload.inputs
    back.remember("inputs", lambda: _in_place(inputs, memories))
    for optimizer in with_inner(workload.optimizers):
        back.remember("optimizer", lambda o=optimizer: _optimizer_restore(o))
        _remember_attributes("optimizer", optimizer, ("state", "param_groups", "defaults"), back)
    if workload.scaler is not None:
        _remember_attributes("scaler", workload.scaler, (), back)
    for name, parameter in parameters:  # Last: once all else can be put back, these can be taken away.
        if parameter.is_leaf:
            back.add(f"gradient of {name}", lambda p=parameter, gradient=parameter.grad: _set_gradient(p, gradient))
            parameter.grad = None


def _functions(workload: Workload) -> list[Any]:
    """Returns the step's functions other than modules, and the batch that they run on."""
    step = [] if workload.custom_step is None else [workload.custom_step.function]
    loss = [] if workload.loss is None or isinstance(workload.loss, nn.Module) else [workload.loss]
    return [*step, *loss, workload.inputs]


def modules_of(workload: Workload) -> dict[nn.Module, str]:
    """Returns the modules of model and loss, each with its name in messages."""
    roots = [("model", workload.model), *([("loss", workload.loss)] if isinstance(workload.loss, nn.Module) else [])]
    if workload.custom_step is not None:
        reached = reached_from(workload.custom_step.function)
        roots += [("a module of the step", module) for module in modules_in(reached)]
    names: dict[nn.Module, str] = {}
    for root, outermost in roots:
        for name, module in outermost.named_modules():
            names.setdefault(module, f"{root}.{name}" if name else root)
    return names


def remember_modules(modules: Mapping[nn.Module, str], back: Restoring, memories: Memories | None = None) -> set[int]:
    """Remembers all contents of modules but the values of their parameters: buffers, flags, attributes, registrations.

    Objects that can be reached from them are remembered, too, and modules that are registered nowhere.

    Args:
        modules: the modules, each with its name in messages.
        back: to which the ways back are added.
        memories: the same as for ``Snapshot``.

    Returns:
        The ids of all that was remembered.
    """
    reached = reached_from(*modules)
    beside = {
        module: f"a {type(module).__name__} that is not registered"
        for module in modules_in(reached)
        if module not in modules
    }
    modules = {**modules, **beside}
    memories = {} if memories is None else memories
    memories.update((id(p), None) for module in modules for p in module._parameters.values() if p is not None)
    buffers = {id(b): (f"{name}.{leaf}", b) for m, name in modules.items() for leaf, b in m._buffers.items()}
    for name, buffer in buffers.values():
        if buffer is not None:
            memories[id(buffer)] = None
            back.remember(name, lambda b=buffer: _held(b))
    for module, name in beside.items():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                back.remember(f"{name}.{leaf}", lambda p=parameter: _held(p))
                back.remember(f"gradient of {name}.{leaf}", lambda p=parameter: _gradient_held(p))
    for module, name in modules.items():
        back.remember(f"what is registered in {name}", lambda m=module: _registered(m))
        _remember_attributes(f"attributes of {name}", module, OF_MODULES, back, memories)
    remember_reached(reached, reached.names, back, memories)
    for module, name in modules.items():  # They are made of what is put back until here.
        if (anew := buckets_restored(module)) is not None:
            back.add(f"the buckets of {name}", anew)
    return set(map(id, reached))


def remember_reached(
    reached: Iterable[Any], names: Collection[str], back: Restoring, memories: Memories, *, keeps: bool = False
) -> None:
    """Remembers the references of all reached objects but modules: attributes, slots, variables, globals, arguments.

    Args:
        reached: the objects that ``reached_from`` has found.
        names: the names that reached code uses: nothing else of the user's own classes and modules is remembered.
        back: to which the ways back are added.
        memories, keeps: the same as for ``Snapshot``.
    """
    seen: set[int] = set()
    for value in reached:
        if is_known_otherwise(value):
            continue
        for owner in own_spaces(value):
            if id(owner) not in seen:
                seen.add(id(owner))
                _remember_space(f"what is in {owner.__name__}", named_space(owner, names), back, memories, keeps=keeps)
        tensor = is_plain_tensor(value)  # It is not kept alive.
        if tensor or is_opened(type(value)) or isinstance(value, _OF_CODE):
            for space in attributes_space(value) if tensor else spaces_of(value):
                _remember_space(f"what is in {_named(value)}", space, back, memories, keeps=keeps and not tensor)


_OF_CODE = (types.FunctionType, types.CellType, functools.partial)


def _named(value: Any) -> str:
    if isinstance(value, types.CellType):
        return "a variable of the step"
    return value.__name__ if isinstance(value, types.FunctionType) else f"a {type(value).__name__}"


def _remember_space(what: str, space: Space, back: Restoring, memories: Memories, *, keeps: bool) -> None:
    back.remember(what, lambda: remembered_space(space, memories, keeps=keeps))


def _remember_attributes(
    what: str, owner: Any, ignored: Collection[str], back: Restoring, memories: Memories | None = None
) -> None:
    """Remembers the attributes of an object, but for some names: counters, hidden states, caches of tensors."""
    for space in attributes_space(owner, ignored):
        _remember_space(what, space, back, {} if memories is None else memories, keeps=False)


def _in_place(value: Any, memories: Memories, *, keeps: bool = False) -> Callable[[], object]:
    """Returns the function that restores the contents of a value that stays where it is."""
    remembered = Snapshot(value, memories, keeps=keeps)
    return lambda: remembered.put_back(value)


def _gradient_held(parameter: Tensor) -> Callable[[], object]:
    """Returns the function that restores the gradient of a parameter that no step takes away."""
    gradient = parameter.grad
    held = (lambda: None) if gradient is None else _held(gradient)
    return lambda: (held(), _set_gradient(parameter, gradient))


def _held(tensor: Tensor) -> Callable[[], object]:
    """The way back for a tensor that lives until then."""
    memory = TensorMemory(tensor)
    return lambda: (tensor, memory.put_back())


def _registered(module: nn.Module) -> Callable[[], None]:
    """Returns the function that restores which parameters, buffers, modules, hooks and flags a module has."""
    own = {name: value for name, value in vars(module).items() if name in OF_MODULES}
    tables = [(value, copied(value)) for value in own.values() if base_of(type(value)) is not None]
    training = module.training

    def back() -> None:
        vars(module).update(own)
        for table, items in tables:
            refill(table, items)
        if module.training is not training:  # A scripted module's is no attribute of Python's.
            module.training = training

    return back


def _named_parameters(
    workload: Workload, modules: Mapping[nn.Module, str], reached: Iterable[Tensor]
) -> list[tuple[str, Tensor]]:
    """Returns the parameters of the modules and the optimizer, and the tensors of the inputs, each once."""
    named = [(f"{name}.{leaf}", p) for m, name in modules.items() for leaf, p in m._parameters.items() if p is not None]
    named += [("a parameter of the optimizer or the loss", p) for p in workload.parameters_beside()]
    named += [("an input", tensor) for tensor in tensors_held(workload.inputs)]
    if workload.custom_step is not None:
        named += [("a tensor of the step", tensor) for tensor in reached if tensor.is_leaf]
    if not isinstance(workload.loss, nn.Module):  # A teacher's weights are many, and none of a loss's own.
        held = [t for t in workload.held_by_loss if t.is_leaf and not isinstance(t, nn.Parameter)]
        named += [("a tensor of the loss", t) for t in held]
    return list({id(tensor): (name, tensor) for name, tensor in reversed(named)}.values())[::-1]


def _set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    parameter.grad = gradient


def _optimizer_restore(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Returns the function that restores the states of an optimizer, its groups and their settings."""
    state = Snapshot(optimizer.state, most_items=math.inf)
    together = optimizer.param_groups
    groups = [(group, dict(group), [*group["params"]]) for group in together]
    settings = [{name: Snapshot(value) for name, value in group.items() if name != "params"} for group, *_ in groups]

    def restore() -> None:
        state.put_back(optimizer.state)
        for (group, items, parameters), values in zip(groups, settings, strict=True):
            items["params"][:] = parameters
            before = {name: value.put_back(group.get(name)) for name, value in values.items()}
            filled(group, group.update, {name: before.get(name, value) for name, value in items.items()})
        together[:] = [group for group, *_ in groups]
        if optimizer.param_groups is not together:
            optimizer.param_groups = together

    return restore
