"""Restores what profiling and measuring change of a workload, also after an exception."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from profiler.tensors.tensor_memory import TensorMemory
from profiler.tensors.tensor_trees import tensors_in
from profiler.workload.gradient_buckets import buckets_restored
from profiler.workload.host_numbers import host_states
from profiler.workload.loop_state import bindings_of, reached_from, tensors_of
from profiler.workload.optimizers import with_inner
from profiler.workload.plain_objects import attributes_of, in_slots, inside_of, set_slots
from profiler.workload.ready_models import check_ready
from profiler.workload.remembered_values import Attributes, Snapshot, filled
from profiler.workload.restoring import Restoring
from profiler.workload.torch_flags import current_flags, stacks_kept
from profiler.workload.workload import Workload

_OF_MODULES = frozenset(vars(nn.Module()))


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
            _remember(workload, back)
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


def captured(workload: Workload) -> Callable[[], None]:
    """Remember everything, in host memory, and set gradients aside; the returned function puts it back.

    Raises:
        RestoreError: as for ``preserved``.
        ValueError: the model has lazy modules that never ran, or is on the meta device; nothing is changed then.
    """
    back = Restoring()
    _remember(workload, back)
    return back.restore


def _remember(workload: Workload, back: Restoring) -> None:
    modules = modules_of(workload)
    functions = (None if workload.own is None else workload.own.function, workload.loss)
    plain = [each for each in functions if each is not None and not isinstance(each, nn.Module)]
    for what, put_back in bindings_of([reached for function in plain for reached in reached_from(function)]):
        back.add(what, put_back)
    for root in (workload.model, workload.loss):
        if isinstance(root, nn.Module):
            check_ready(root, "Workload")
    parameters = _named_parameters(workload, modules)
    back.add("the flags of torch", current_flags())
    back.add("random states", RandomState.capture().restore)
    for name, parameter in parameters:
        back.remember(name, lambda p=parameter: _held(p, TensorMemory(p)))
    remember_modules(modules, back)
    for module, name in _unregistered(modules).items():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                back.remember(f"{name}.{leaf}", lambda p=parameter: _held(p, TensorMemory(p)))
                back.remember(f"gradient of {name}.{leaf}", lambda p=parameter: _gradient_held(p))
    known = {id(parameter) for _, parameter in parameters}
    inputs = workload.inputs
    back.remember("inputs", lambda: _inputs_restore(inputs, known))
    for optimizer in with_inner(workload.optimizers):
        back.remember("optimizer", lambda o=optimizer: _optimizer_restore(o))
    if workload.scaler is not None:
        back.remember("scaler", lambda: Attributes([workload.scaler], ignored=()).restore)
    for name, parameter in parameters:  # Last: once all else can be put back, these can be taken away.
        if parameter.is_leaf:
            back.add(f"gradient of {name}", lambda p=parameter, gradient=parameter.grad: _set_gradient(p, gradient))
            parameter.grad = None


def modules_of(workload: Workload) -> dict[nn.Module, str]:
    """The modules of model and loss, with what to call them."""
    roots = [("model", workload.model), *([("loss", workload.loss)] if isinstance(workload.loss, nn.Module) else [])]
    if workload.own is not None:
        roots += [("a module of the step", m) for m in reached_from(workload.own.function) if isinstance(m, nn.Module)]
    names: dict[nn.Module, str] = {}
    for root, outermost in roots:
        for name, module in outermost.named_modules():
            names.setdefault(module, f"{root}.{name}" if name else root)
    return names


def remember_modules(modules: Mapping[nn.Module, str], back: Restoring) -> None:
    """All that modules hold but the values of their parameters: buffers, flags, attributes, what is registered.

    What is inside the objects that they keep, too, and modules that stand in plain containers.
    """
    modules = {**modules, **_unregistered(modules)}
    known = {id(t) for module in modules for t in (*module._parameters.values(), *module._buffers.values())}
    buffers = {id(b): (f"{name}.{leaf}", b) for m, name in modules.items() for leaf, b in m._buffers.items()}
    for name, buffer in buffers.values():
        if buffer is not None:
            back.remember(name, lambda b=buffer: _held(b, TensorMemory(b)))
    for module, name in modules.items():
        back.remember(f"what is registered in {name}", lambda m=module: _registered(m))
        back.remember(f"attributes of {name}", lambda m=module: Attributes([m], _OF_MODULES, known).restore)
    for value in inside_of(_attributes_of(modules))[0]:
        back.remember(f"what is in a {type(value).__name__}", lambda v=value: _inside_restore(v, known))
    for module, name in modules.items():  # They are made of what is put back until here.
        if (anew := buckets_restored(module)) is not None:
            back.add(f"the buckets of {name}", anew)


def _attributes_of(modules: Iterable[nn.Module]) -> list[Any]:
    """The plain attributes of modules, each once: often they share one configuration."""
    values = (value for module in modules for name, value in vars(module).items() if name not in _OF_MODULES)
    return list({id(value): value for value in values}.values())


def _unregistered(modules: Mapping[nn.Module, str]) -> dict[nn.Module, str]:
    """Modules that others keep in plain containers and objects, with what to call them."""
    found: dict[nn.Module, str] = {}
    pending: Iterable[nn.Module] = modules
    while pending:
        kept = inside_of(_attributes_of(pending))[1]
        pending = [m for outer in kept for m in outer.modules() if m not in modules and m not in found]
        found.update({module: f"a {type(module).__name__} that is not registered" for module in pending})
    return found


def _inside_restore(value: Any, known: Collection[int]) -> Callable[[], None]:
    """For the attributes and slots of an object."""
    owners = [] if attributes_of(value) is None else [value]
    attributes = Attributes(owners, (), known)
    slots = tuple(Snapshot(item, known) for item in in_slots(value))

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
    own = {name: value for name, value in vars(module).items() if name in _OF_MODULES}
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


def _named_parameters(workload: Workload, modules: Mapping[nn.Module, str]) -> list[tuple[str, Tensor]]:
    """Those of the modules, of the optimizer and the tensors of the inputs, each once."""
    named = [(f"{name}.{leaf}", p) for m, name in modules.items() for leaf, p in m._parameters.items() if p is not None]
    named += [("a parameter of the optimizer or the loss", p) for p in workload.parameters_beside()]
    named += [("an input", tensor) for tensor in tensors_in(workload.inputs)]
    if workload.own is not None:
        named += [("a tensor of the step", t) for t in tensors_of(reached_from(workload.own.function)) if t.is_leaf]
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

    def with_host_numbers(self, level: int) -> RandomState:
        """The same of torch, but Python's and numpy's such that they give numbers of a level (see ``host_numbers``)."""
        return RandomState(self._cpu, self._cuda, *host_states(level))

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


def _inputs_restore(inputs: Any, elsewhere: Collection[int]) -> Callable[[], object]:
    """For the containers of a batch, which a step may take things out of."""
    remembered = Snapshot(inputs, elsewhere)
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
