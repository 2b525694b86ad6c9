"""Restores what profiling and measuring change of a workload, also after an exception."""

from __future__ import annotations

import copy
import gc
import math
import random
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from profiler.workload.optimizers import stepped_parameters
from profiler.workload.ready_models import check_ready
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import Workload


@contextmanager
def preserved(workload: Workload) -> Iterator[None]:
    """Restore parameters, buffers, gradients, flags, states of optimizer and scaler, random states on leaving.

    Copies lie in host memory. Gradients are set aside, so the step inside
    starts without any. Cyclic garbage of before is collected first and none
    inside: when its tensors go would be chance, and show in the measurements.
    """
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        restore = captured(workload)
        try:
            yield
        finally:
            restore()
    finally:
        if collects:
            gc.enable()


def captured(workload: Workload) -> Callable[[], None]:
    """Remember everything, in host memory, and set gradients aside; the returned function puts it back.

    Raises:
        ValueError: the model has lazy modules that never ran, or is on the meta device; nothing is changed then.
    """
    modules = [workload.model, *([workload.loss] if isinstance(workload.loss, nn.Module) else [])]
    for module in modules:
        check_ready(module, "Workload")
    loose = stepped_parameters(workload.optimizers)
    restores = [_model_restore(modules, [*loose, *tensors_in(workload.inputs)])]
    restores += [_optimizer_restore(optimizer) for optimizer in workload.optimizers]
    if workload.scaler is not None:
        restores.append(Attributes([workload.scaler], ignored=()).restore)
    restores.append(RandomState.capture().restore)

    def restore() -> None:
        with torch.no_grad():
            for put_back in restores:
                put_back()

    return restore


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


def _model_restore(modules: list[nn.Module], others: list[Tensor]) -> Callable[[], None]:
    """For values and gradients of modules' parameters and of other tensors, buffers, train/eval flags, attributes."""
    tensors = {id(t): t for t in [*(p for m in modules for p in m.parameters()), *others]}
    parameters = [(t, _host_copy(t), t.grad if t.is_leaf else None) for t in tensors.values()]
    inside = [module for root in modules for module in root.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else _host_copy(buffer))
        for module in inside
        for name, buffer in module._buffers.items()
    ]
    training = [(module, module.training) for module in inside]
    attributes = attributes_of(inside)
    for parameter, _, _ in parameters:
        if parameter.is_leaf:
            parameter.grad = None

    def restore() -> None:
        for parameter, value, gradient in parameters:
            put_values(parameter, value)
            if parameter.is_leaf:
                parameter.grad = gradient
        for module, name, buffer, value in buffers:
            if buffer is not None and value is not None:
                put_values(buffer, value)
            module._buffers[name] = buffer
        attributes.restore()
        for module, was_training in training:
            module.training = was_training

    return restore


def _optimizer_restore(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """For states, settings of the groups, and counters that an optimizer keeps on itself."""
    state = Snapshot(optimizer.state, most_items=math.inf)
    attributes = Attributes([optimizer], ("state", "param_groups", "defaults"))
    groups = [
        {name: Snapshot(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]

    def restore() -> None:
        state.put_back(optimizer.state)
        attributes.restore()
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update({name: value.put_back(group.get(name)) for name, value in values.items()})

    return restore


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


# More items are a table (a vocabulary, say), which no step changes and which it would take long to go through.
MOST_ITEMS = 1000
_DEPTH = 8  # Containers further inside are left alone: they may hold themselves.
_NUMBERS = (type(None), bool, int, float, complex, str, bytes)
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, deque)
_OF_MODULES = frozenset(vars(nn.Module()))


class Snapshot:
    """A value and what is in it. Tensors are copied to host memory and not kept alive, nor are containers.

    Args:
        value: anything; what is no plain data is put back as the same object, whatever happened to it.
        elsewhere: ids of tensors whose values somebody else puts back.
        most_items: containers of more are taken as objects.
    """

    def __init__(
        self, value: Any, elsewhere: Collection[int] = (), most_items: float = MOST_ITEMS, depth: int = _DEPTH
    ) -> None:
        self._identity = id(value)
        self._back: Callable[[Any], Any]
        if isinstance(value, Tensor) and _is_copied(value):
            self._back = _tensor(value, copied=id(value) not in elsewhere)
        elif is_container(value) and depth and len(value) <= most_items:
            self._back = self._container(value, lambda item: Snapshot(item, elsewhere, most_items, depth - 1))
        else:
            self._back = lambda _: value

    def put_back(self, now: Any) -> Any:
        """The value as it was: the same object as far as it still is there, or stands in its place ``now``."""
        return self._back(now)

    def _container(self, value: Any, remember: Callable[[Any], Snapshot]) -> Callable[[Any], Any]:
        if isinstance(value, tuple):
            make = getattr(type(value), "_make", tuple)
            items = [remember(item) for item in value]
            return lambda now: make(item.put_back(None) for item in items)
        shell = copy.copy(value)
        shell.clear()
        if isinstance(value, _MAPPINGS):
            pairs = {key: remember(item) for key, item in value.items()}

            def back(now: Any) -> Any:
                target = now if id(now) == self._identity else copy.copy(shell)
                return _filled(target, target.update, {k: item.put_back(target.get(k)) for k, item in pairs.items()})

            return back
        items = [remember(item) for item in value]

        def refill(now: Any) -> Any:
            target = now if id(now) == self._identity else copy.copy(shell)
            old = {id(item): item for item in target}
            return _filled(target, target.extend, [item.put_back(old.get(item._identity)) for item in items])

        return refill


def _filled(container: Any, fill: Callable[[Any], None], items: Any) -> Any:
    container.clear()
    fill(items)
    return container


def is_container(value: Any) -> bool:
    """Whether it is opened: subclasses of other people may mean something else by what is in them."""
    return type(value) in (tuple, *_MAPPINGS, *_SEQUENCES) or (isinstance(value, tuple) and hasattr(value, "_make"))


def _is_copied(tensor: Tensor) -> bool:
    """Others (sparse, nested ones) can neither be compared nor filled: they are put back as they are."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta


def _tensor(value: Tensor, *, copied: bool) -> Callable[[Any], Any]:
    reference, device, wants = weakref.ref(value), value.device, value.is_leaf and value.requires_grad
    values = _host_copy(value) if copied else None

    def back(_: Any) -> Any:
        tensor = reference()
        if tensor is None:
            return None if values is None else values.to(device, copy=True).requires_grad_(wants)
        if values is not None:
            put_values(tensor, values)
        return tensor

    return back


def put_values(tensor: Tensor, values: Tensor) -> None:
    """Write values into a tensor unless it has them; through ``.data``, so that its version stays as it was."""
    if tensor.dtype != values.dtype or not torch.equal(tensor.detach().cpu(), values):
        tensor.data.copy_(values)


class Attributes:
    """What objects keep on themselves: counters, hidden states, caches of tensors.

    Args:
        objects: modules, say.
        ignored: names of attributes that are left alone.
        elsewhere: as for ``Snapshot``.
    """

    def __init__(self, objects: Iterable[Any], ignored: Collection[str], elsewhere: Collection[int] = ()) -> None:
        self._ignored = ignored
        self._objects = [(owner, self._remembered(vars(owner), elsewhere)) for owner in objects]

    def restore(self) -> None:
        """Put back what was plain data then; what has come since goes, where it is plain data."""
        for owner, before in self._objects:
            now = vars(owner)
            for name in [name for name, value in now.items() if name not in before and self._counts(name, value)]:
                del now[name]
            for name, value in before.items():
                if value is not None:
                    now[name] = value.put_back(now.get(name))

    def _remembered(self, attributes: Mapping[str, Any], elsewhere: Collection[int]) -> dict[str, Snapshot | None]:
        """By name; None for what is left alone."""
        return {name: Snapshot(v, elsewhere) if self._counts(name, v) else None for name, v in attributes.items()}

    def _counts(self, name: str, value: Any) -> bool:
        return name not in self._ignored and (isinstance(value, (Tensor, *_NUMBERS)) or is_container(value))


def attributes_of(modules: Collection[nn.Module]) -> Attributes:
    """What modules keep besides parameters and buffers."""
    known = {id(t) for module in modules for t in (*module._parameters.values(), *module._buffers.values())}
    return Attributes(modules, _OF_MODULES, known)
