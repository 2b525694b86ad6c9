"""Restores what profiling and measuring change of a workload, also after an exception."""

from __future__ import annotations

import functools
import gc
import math
import random
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from profiler.caller_warnings import warn_caller
from profiler.tensors.tensor_memory import TensorMemory
from profiler.workload.data_parallel import buckets_restored
from profiler.workload.given_models import check_ready
from profiler.workload.iterator_places import replace_iterators
from profiler.workload.optimizers import with_inner
from profiler.workload.own_step import OwnStep
from profiler.workload.plain_objects import in_slots, is_opened, set_slots
from profiler.workload.reachable import (
    OF_MODULES,
    globals_of,
    in_cell,
    is_known_otherwise,
    is_plain_tensor,
    modules_in,
    own_spaces,
    reached_from,
    tensors_held,
    tensors_of,
)
from profiler.workload.remembered_values import Attributes, Memories, Restoring, Snapshot, filled
from profiler.workload.torch_state import current_flags, stacks_kept
from profiler.workload.workload import Workload


@contextmanager
def preserved(workload: Workload) -> Iterator[None]:
    """Restore on leaving whatever a training step may change, and random states.

    Parameters, buffers and gradients, modules' flags and attributes, the states of optimizer and scaler, the inputs,
    and the flags of torch. Copies lie in host memory. Gradients are set aside, so the step inside starts without any.
    Cyclic garbage of before is collected first and none inside: when its tensors go would be chance, and show in the
    measurements.

    Raises:
        RestoreError: something cannot be remembered, before anything has run; or not be put back, when all else is.
    """
    gc.collect()
    collects, back = gc.isenabled(), Restoring()
    with torch.set_grad_enabled(torch.is_grad_enabled()), stacks_kept():
        try:
            gc.disable()
            with nullcontext() if workload.own is None else _replaying(workload.own):
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
            if collects:
                gc.enable()


@contextmanager
def _replaying(step: OwnStep) -> Iterator[None]:
    """Inside, each step gets the same items of the iterators that it takes from; afterwards they come again."""
    before = step.replays
    step.replays, end = replace_iterators(step.function)
    for replay in step.replays:
        replay.begin(_item_restore, RandomState.capture)
    try:
        yield
    finally:
        end()
        step.replays = before


def _item_restore(value: Any) -> Callable[[], None]:
    """For an item that steps get again, which one may have changed; its tensors stay where a meter moved them to."""
    back, reached = Restoring(), reached_from(value)
    tensors = tensors_of(reached)
    memories: Memories = dict.fromkeys(map(id, tensors))
    for tensor in tensors:
        back.remember(
            "an item of an iterator", lambda t=tensor: functools.partial(TensorMemory(t).put_back, stays=True)
        )
    back.remember("an item of an iterator", lambda: _held_restore(value, memories, keeps=True))
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
    back.remember("attributes of modules", lambda: Attributes(modules, OF_MODULES, memories).restore)
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
    back.add("random states", RandomState.capture().restore)
    memories: Memories = {id(parameter): None for _, parameter in parameters}
    for name, parameter in parameters:
        back.remember(name, lambda p=parameter: _held(p, TensorMemory(p)))
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
    back.remember("inputs", lambda: _inputs_restore(inputs, memories))
    for optimizer in with_inner(workload.optimizers):
        back.remember("optimizer", lambda o=optimizer: _optimizer_restore(o))
    if workload.scaler is not None:
        back.remember("scaler", lambda: Attributes([workload.scaler], ignored=()).restore)
    for name, parameter in parameters:  # Last: once all else can be put back, these can be taken away.
        if parameter.is_leaf:
            back.add(f"gradient of {name}", lambda p=parameter, gradient=parameter.grad: _set_gradient(p, gradient))
            parameter.grad = None


def _functions(workload: Workload) -> list[Any]:
    """What is run that is no module, and the batch that it is run on."""
    run = (None if workload.own is None else workload.own.function, workload.loss)
    return [*(each for each in run if not (each is None or isinstance(each, nn.Module))), workload.inputs]


def modules_of(workload: Workload) -> dict[nn.Module, str]:
    """The modules of model and loss, with what to call them."""
    roots = [("model", workload.model), *([("loss", workload.loss)] if isinstance(workload.loss, nn.Module) else [])]
    if workload.own is not None:
        roots += [("a module of the step", module) for module in modules_in(reached_from(workload.own.function))]
    names: dict[nn.Module, str] = {}
    for root, outermost in roots:
        for name, module in outermost.named_modules():
            names.setdefault(module, f"{root}.{name}" if name else root)
    return names


def remember_modules(modules: Mapping[nn.Module, str], back: Restoring, memories: Memories | None = None) -> set[int]:
    """All that modules hold but the values of their parameters: buffers, flags, attributes, what is registered.

    What can be reached from them, too, and modules that are registered nowhere.

    Args:
        modules: with what to call them.
        back: to which the ways back are added.
        memories: as for ``Snapshot``.

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
            back.remember(name, lambda b=buffer: _held(b, TensorMemory(b)))
    for module, name in beside.items():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                back.remember(f"{name}.{leaf}", lambda p=parameter: _held(p, TensorMemory(p)))
                back.remember(f"gradient of {name}.{leaf}", lambda p=parameter: _gradient_held(p))
    for module, name in modules.items():
        back.remember(f"what is registered in {name}", lambda m=module: _registered(m))
        back.remember(f"attributes of {name}", lambda m=module: Attributes([m], OF_MODULES, memories).restore)
    remember_reached(reached, reached.names, back, memories)
    for module, name in modules.items():  # They are made of what is put back until here.
        if (anew := buckets_restored(module)) is not None:
            back.add(f"the buckets of {name}", anew)
    return set(map(id, reached))


def remember_reached(
    reached: Iterable[Any], names: Collection[str], back: Restoring, memories: Memories, *, keeps: bool = False
) -> None:
    """What everything that was reached refers to, but for modules: attributes, slots, variables, globals, arguments.

    Args:
        reached: by ``reached_from``.
        names: that reached code uses: of classes and modules of the user's own nothing else is remembered.
        back: to which the ways back are added.
        memories, keeps: as for ``Snapshot``.
    """
    seen: set[int] = set()
    for value in reached:
        kind = type(value).__name__
        if is_known_otherwise(value):
            continue
        if issubclass(type(value), nn.Module):
            spaces = own_spaces(value)
        elif isinstance(value, types.FunctionType):
            back.remember(f"what {value.__name__} refers to", lambda v=value: _function_restore(v, memories, keeps))
            continue
        elif isinstance(value, types.CellType):
            back.remember("a variable of the step", lambda v=value: _cell_restore(v, memories, keeps))
            continue
        elif isinstance(value, functools.partial):
            arguments = (value.args, value.keywords)
            back.remember("arguments of a partial", lambda v=arguments: _held_restore(v, memories, keeps))
            continue
        else:
            spaces = own_spaces(value)
            if is_plain_tensor(value):  # It is not kept alive.
                back.remember("attributes of a tensor", lambda v=value: Attributes([v], (), memories).restore)
            elif is_opened(type(value)):
                back.remember(f"what is in a {kind}", lambda v=value: _inside_restore(v, memories, keeps))
        for space in spaces:
            if id(space) not in seen:
                seen.add(id(space))
                back.remember(f"what is in {space.__name__}", lambda s=space: _space_restore(s, names, memories, keeps))


def _function_restore(function: types.FunctionType, memories: Memories, keeps: bool) -> Callable[[], None]:
    """For its attributes and what its defaults hold, and the globals that it names."""
    attributes = Attributes([function], (), memories, keeps=keeps)
    defaults = _held_restore((function.__defaults__, function.__kwdefaults__), memories, keeps)
    names = globals_of(function)
    variables = {name: Snapshot(function.__globals__[name], memories, keeps=keeps) for name in names}

    def restore() -> None:
        attributes.restore()
        defaults()
        for name, before in variables.items():
            function.__globals__[name] = before.put_back(function.__globals__.get(name))

    return restore


def _cell_restore(cell: types.CellType, memories: Memories, keeps: bool) -> Callable[[], None]:
    remembered = [Snapshot(value, memories, keeps=keeps) for value in in_cell(cell)]

    def restore() -> None:
        now = next(iter(in_cell(cell)), None)
        for before in remembered:
            cell.cell_contents = before.put_back(now)

    return restore


def _held_restore(values: Any, memories: Memories, keeps: bool) -> Callable[[], None]:
    """For what is in values that stay where they are."""
    remembered = Snapshot(values, memories, keeps=keeps)
    return lambda: remembered.put_back(values)


def _space_restore(space: Any, names: Collection[str], memories: Memories, keeps: bool) -> Callable[[], None]:
    """For what code that was reached names in a class or a module of the user's own; functions are no state."""

    def now() -> dict[str, Any]:
        named = ((name, vars(space)[name]) for name in vars(space).keys() & names)
        return {name: value for name, value in named if not (callable(value) or hasattr(type(value), "__get__"))}

    remembered = {name: Snapshot(value, memories, keeps=keeps) for name, value in now().items()}

    def restore() -> None:
        there = now()
        for name in there.keys() - remembered.keys():
            delattr(space, name)
        for name, before in remembered.items():
            if (value := before.put_back(there.get(name))) is not there.get(name):
                setattr(space, name, value)

    return restore


def _inside_restore(value: Any, memories: Memories, keeps: bool) -> Callable[[], None]:
    """For the attributes and slots of an object."""
    attributes = Attributes([value], (), memories, keeps=keeps)
    slots = tuple(Snapshot(item, memories, keeps=keeps) for item in in_slots(value))

    def restore() -> None:
        attributes.restore()
        if slots:
            set_slots(value, tuple(slot.put_back(now) for slot, now in zip(slots, in_slots(value), strict=True)))

    return restore


def _gradient_held(parameter: Tensor) -> Callable[[], object]:
    """For the gradient of a parameter that no step takes away."""
    gradient = parameter.grad
    held = (lambda: None) if gradient is None else _held(gradient, TensorMemory(gradient))
    return lambda: (held(), _set_gradient(parameter, gradient))


def _held(tensor: Tensor, memory: TensorMemory) -> Callable[[], object]:
    """The way back for a tensor that lives until then."""
    return lambda: (tensor, memory.put_back())


def _registered(module: nn.Module) -> Callable[[], None]:
    """Which parameters, buffers, modules and hooks a module has, and its flags."""
    own = {name: value for name, value in vars(module).items() if name in OF_MODULES}
    tables = [(table, dict(table)) for table in own.values() if isinstance(table, dict)]
    names, training = set(module._non_persistent_buffers_set), module.training

    def back() -> None:
        vars(module).update(own)
        for table, items in tables:
            # Compiled code asks whether they were written to, so they are only where they differ.
            if [(key, id(value)) for key, value in table.items()] != [(k, id(v)) for k, v in items.items()]:
                filled(table, table.update, items)
        module._non_persistent_buffers_set.intersection_update(names)
        module._non_persistent_buffers_set.update(names)
        if module.training is not training:
            module.training = training

    return back


def _named_parameters(
    workload: Workload, modules: Mapping[nn.Module, str], reached: Iterable[Tensor]
) -> list[tuple[str, Tensor]]:
    """Those of the modules, of the optimizer and the tensors of the inputs, each once."""
    named = [(f"{name}.{leaf}", p) for m, name in modules.items() for leaf, p in m._parameters.items() if p is not None]
    named += [("a parameter of the optimizer or the loss", p) for p in workload.parameters_beside()]
    named += [("an input", tensor) for tensor in tensors_held(workload.inputs)]
    if workload.own is not None:
        named += [("a tensor of the step", tensor) for tensor in reached if tensor.is_leaf]
    if not isinstance(workload.loss, nn.Module):  # A teacher's weights are many, and none of a loss's own.
        held = [t for t in workload.held_by_loss if t.is_leaf and not isinstance(t, nn.Parameter)]
        named += [("a tensor of the loss", t) for t in held]
    return list({id(tensor): (name, tensor) for name, tensor in reversed(named)}.values())[::-1]


class RandomState:
    """The random states of torch (every device in use), numpy and Python."""

    def __init__(self, cpu: Tensor, cuda: list[Tensor], numpy: Any, python: Any) -> None:
        self._cpu, self._cuda, self._numpy, self._python = cpu, cuda, numpy, python

    @classmethod
    def capture(cls) -> RandomState:
        """Read the states as they are now."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())

    def host_differs(self) -> bool:
        """True where Python's or numpy's generator has advanced since."""
        moved = self._python != random.getstate()
        return moved or any(np.any(a != b) for a, b in zip(self._numpy, np.random.get_state(), strict=True))

    def torch_differs(self) -> bool:
        """True where a torch generator has advanced since."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        moved = any(not torch.equal(a, b) for a, b in zip(self._cuda, cuda, strict=False))
        return moved or not torch.equal(self._cpu, torch.get_rng_state())

    def restore(self) -> None:
        """Put the states back; may be called any number of times."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        np.random.set_state(self._numpy)
        random.setstate(self._python)

    def repeat(self, run: Callable[[], object]) -> None:
        """Call ``run`` from these states, and go on from those of now: it draws what was drawn since they were read."""
        now = RandomState.capture()
        self.restore()
        run()
        now.restore()


def _set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    parameter.grad = gradient


def _inputs_restore(inputs: Any, memories: Memories) -> Callable[[], object]:
    """For the containers of a batch, which a step may take things out of."""
    remembered = Snapshot(inputs, memories)
    return lambda: remembered.put_back(inputs)


def _optimizer_restore(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """For states, the groups and their settings, and counters that an optimizer keeps on itself."""
    state = Snapshot(optimizer.state, most_items=math.inf)
    attributes = Attributes([optimizer], ("state", "param_groups", "defaults"))
    together = optimizer.param_groups
    groups = [(group, dict(group), [*group["params"]]) for group in together]
    settings = [{name: Snapshot(value) for name, value in group.items() if name != "params"} for group, *_ in groups]

    def restore() -> None:
        state.put_back(optimizer.state)
        attributes.restore()
        for (group, items, parameters), values in zip(groups, settings, strict=True):
            items["params"][:] = parameters
            before = {name: value.put_back(group.get(name)) for name, value in values.items()}
            filled(group, group.update, {name: before.get(name, value) for name, value in items.items()})
        together[:] = [group for group, *_ in groups]
        if optimizer.param_groups is not together:
            optimizer.param_groups = together

    return restore
