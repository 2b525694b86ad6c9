"""What the modules of a call hold: attributes, parameters and buffers, as they were before its first run."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from profiler.recomputation.host_copies import UncountedCopy, uncounted_copy
from profiler.recomputation.saved_tensors import RerunError, tensor_over, version_of
from profiler.tensors.storages import storage_key
from profiler.tensors.tensor_trees import tensors_in
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.sharded_units import StageUnits
from profiler.workload.snapshot import GENERATORS, MAPPINGS, MOST_ITEMS, SEQUENCES

leave_uncompiled(__name__)

# Larger tensors that no run was seen to change are not copied in case that one does.
MOST_COPIED_BYTES = 16 * 2**20
_DEPTH = 3  # of objects in objects, from a module's attribute on
_OF_MODULES = frozenset(vars(nn.Module())) | {"forward"}


class ModuleState:
    """What a module and those inside it hold now: for a second run, everything that was read in the first.

    Plain attributes, containers of them and objects that modules keep are remembered by identity, tensors by identity
    and version. Values are copied, to host memory, where a run may change them in place: of buffers and of attributes,
    once for each version.

    Args:
        module: the one that is about to be called.
        changing: names (relative to the module) of buffers that its run changes; kernels may do so uncounted.
        units: whose parameters it uses: these are registered and taken out by the sharding, not by the call.
    """

    __slots__ = (
        "_changing",
        "_contents",
        "_empty",
        "_generators",
        "_known",
        "_parameters",
        "_statistics",
        "_tensors",
        "_units",
        "_values",
    )

    def __init__(self, module: nn.Module, changing: Collection[str], units: StageUnits) -> None:
        self._units = units
        self._contents: list[tuple[Any, Any]] = []  # each mutable holder with what is in it
        self._empty: list[dict[str, Any]] = []  # registers of modules in which there is nothing
        self._known: set[int] = set()  # ids of holders
        self._generators: list[tuple[Any, Any]] = []
        self._parameters: list[_Parameter] = []
        self._tensors: dict[int, tuple[str, Tensor, int]] = {}  # what is held besides, with its version
        self._statistics: set[int] = set()  # ids of tensors that the call changes and does not read
        self._changing: set[int] = set()  # of those that it changes
        self._values: dict[int, UncountedCopy] = {}
        for inner in _modules_under(module):
            self._note_module(inner)
        if changing or self._changing:
            self._changing |= {id(buffer) for buffer in _buffers_named(module, changing)}
        for key, (_, tensor, _) in self._tensors.items():
            if key not in self._statistics:
                copied = uncounted_copy(tensor) if key in self._changing else _copy_of_version(tensor)
                if copied is not None:
                    self._values[key] = copied

    # Before the first run ------------------------------------------------------

    def _note_module(self, module: nn.Module) -> None:
        if _is_scripted(type(module)):  # Its tables are no dicts of Python's.
            self._parameters += map(_remembered, module.parameters())
            for buffer in module.buffers():
                self._note_tensor(type(module).__name__, buffer)
            return
        attributes = module.__dict__
        self._contents.append((attributes, attributes.copy()))
        parameters, buffers = attributes["_parameters"], attributes["_buffers"]
        tables = (buffers, attributes["_modules"])
        for table in tables if self._units.manage(module) else (parameters, *tables):
            if table:
                self._contents.append((table, table.copy()))
            else:
                self._empty.append(table)
        if parameters:
            self._parameters += [_remembered(p) for p in parameters.values() if p is not None]
        if buffers:
            self._note_buffers(module, buffers)
        for name in attributes.keys() - _OF_MODULES:
            self._note_value(name, attributes[name], _DEPTH)

    def _note_buffers(self, module: nn.Module, buffers: dict[str, Any]) -> None:
        present = {name: buffer for name, buffer in buffers.items() if buffer is not None}
        for name, buffer in present.items():
            self._note_tensor(name, buffer)
        if isinstance(module, _NormBase) and module.training and module.track_running_stats:
            # Their kernels count no change.
            self._changing.update(map(id, present.values()))
            if isinstance(module, _BatchNorm):  # It normalises by the batch's own; a GPU is spared the copies.
                self._statistics.update(id(buffer) for buffer in present.values() if buffer.device.type != "cpu")

    def _note_tensor(self, name: str, tensor: Tensor, _: int = 0) -> None:
        # A parameter is registered somewhere, or another module's; what ``torch.func`` left behind cannot be read.
        if not isinstance(tensor, nn.Parameter) and not is_functorch_wrapped_tensor(tensor):
            self._tensors.setdefault(id(tensor), (name, tensor, version_of(tensor)))

    def _note_value(self, name: str, value: Any, depth: int) -> None:
        note = _how_to_note(type(value))
        if note is not None:
            note(self, name, value, depth)

    def _note_items(self, name: str, container: Any, depth: int) -> None:
        if len(container) > MOST_ITEMS or id(container) in self._known:
            return
        self._known.add(id(container))
        self._contents.append((container, _copied(container)))
        if not isinstance(container, set):
            self._note_tuple(name, list(container.values() if isinstance(container, dict) else container), depth)

    def _note_tuple(self, name: str, items: Iterable[Any], depth: int) -> None:
        for item in items if depth else ():
            self._note_value(name, item, depth - 1)

    def _note_object(self, name: str, value: Any, depth: int) -> None:
        if depth:
            self._note_items(name, vars(value), min(depth, 1))

    def _note_generator(self, name: str, generator: Any, _: int) -> None:
        self._generators.append((generator, _STATES[type(generator)][0](generator)))

    def tensors_now(self) -> list[Tensor]:
        """The tensors in all that is remembered, as it is now."""
        return tensors_in([list(h.values()) if isinstance(h, dict) else list(h) for h, _ in self._contents])

    def storages(self) -> set[int]:
        """The storages of all tensors that are held besides parameters."""
        return {storage_key(tensor) for _, tensor, _ in self._tensors.values()}

    def first_run_over(self, before: Mapping[int, UncountedCopy]) -> list[Tensor]:
        """Second runs begin with what parameters that the first run set held ``before``; those it does not have."""
        changed = [(i, one) for i, one in enumerate(self._parameters) if version_of(one.parameter) != one.version]
        for i, one in changed:
            if (copied := before.get(key := id(one.parameter))) is not None:
                self._tensors[key], self._values[key] = ("", one.parameter, one.version), copied
                self._parameters[i] = one._replace(version=version_of(one.parameter))
        return [one.parameter for _, one in changed if id(one.parameter) not in before]

    # Around the second run -----------------------------------------------------

    @contextmanager
    def reinstated(self) -> Iterator[None]:
        """Inside, everything is as before the first run; on leaving, it is as it was on entering.

        Raises:
            RerunError: the values of a tensor have changed that were not copied.
        """
        changed = [
            key
            for key, (_, tensor, version) in self._tensors.items()
            if version_of(tensor) != version or key in self._changing
        ]
        for key in changed:
            self._check_known(key)
        for remembered in self._parameters:
            self._check_parameter(remembered)
        thawed = [one.parameter for one in self._parameters if one.thawed()]
        data = [(one, one.parameter.data) for one in self._parameters if one.moved()]
        contents = [(holder, _copied(holder)) for holder, _ in self._contents]
        filled = [(table, table.copy()) for table in self._empty if table]
        generators = [(generator, _STATES[type(generator)][0](generator)) for generator, _ in self._generators]
        # What the first run has changed in place, the second will change again.
        tensors = [self._tensors[key][1] for key in changed]
        values = [(tensor, version_of(tensor), tensor.data, uncounted_copy(tensor)) for tensor in tensors]
        try:
            for table, _ in filled:
                table.clear()
            for holder, before in self._contents:
                _fill(holder, before)
            for generator, state in self._generators:
                _STATES[type(generator)][1](generator, state)
            for parameter in thawed:
                parameter.requires_grad_(not parameter.requires_grad)
            for one, _ in data:
                one.parameter.data = one.data()
            for key in changed:
                if key in self._values:
                    self._values[key].put_back(self._tensors[key][1])
            yield
        finally:
            for tensor, version, placed, now in values:
                if now is not None:
                    if not _lies_as(tensor, placed):
                        tensor.data = placed
                    now.put_back(tensor)
                    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # type: ignore[attr-defined]
            for one, now in data:
                one.parameter.data = now
            for parameter in thawed:
                parameter.requires_grad_(not parameter.requires_grad)
            for generator, state in generators:
                _STATES[type(generator)][1](generator, state)
            for table in self._empty:
                table.clear()
            for table, now in filled:
                table.update(now)
            for holder, now in contents:
                _fill(holder, now)

    def _check_known(self, key: int) -> None:
        name, tensor, _ = self._tensors[key]
        if key not in self._statistics and key not in self._values:
            raise _changed_in_place(f"{name!r}, a tensor of shape {tuple(tensor.shape)}")

    def _check_parameter(self, remembered: _Parameter) -> None:
        parameter, version, _, storage = remembered[:4]
        if version_of(parameter) != version:
            names = (
                n
                for holder, _ in self._contents
                if isinstance(holder, dict)
                for n, v in holder.items()
                if v is parameter
            )
            raise _changed_in_place(f"{next(names, '')!r}, a parameter of shape {tuple(parameter.shape)}")
        if storage is not None and parameter.numel() and not storage.nbytes():
            raise RerunError("expected parameters as in forward, got one whose memory was given back")


class _Parameter(NamedTuple):
    """A parameter with its version, whether it takes a gradient, and where its values lie."""

    parameter: Tensor
    version: int
    takes_gradient: bool
    storage: torch.UntypedStorage | None
    offset: int
    stride: tuple[int, ...]

    def thawed(self) -> bool:
        """Whether it takes a gradient now and did not, or the reverse."""
        return self.parameter.is_leaf and self.parameter.requires_grad is not self.takes_gradient

    def moved(self) -> bool:
        """Whether its ``.data`` was replaced since."""
        return self.storage is not None and storage_key(self.parameter) != self.storage._cdata

    def data(self) -> Tensor:
        """What its ``.data`` was; raises RerunError where it had another size or type."""
        size, dtype = self.parameter.size(), self.parameter.dtype
        span = self.offset + 1 + sum((n - 1) * stride for n, stride in zip(size, self.stride, strict=True))
        assert self.storage is not None
        if span * dtype.itemsize > self.storage.nbytes():
            raise RerunError("expected parameters as in forward, got one of another shape or type")
        return tensor_over(self.storage, (size, self.stride, self.offset, dtype, False, False))


def _remembered(parameter: Tensor) -> _Parameter:
    if type(parameter) is nn.Parameter and parameter.layout is torch.strided and not parameter.is_inference():
        lies: Any = parameter.storage_offset(), parameter.stride()
        return _Parameter(parameter, parameter._version, parameter.requires_grad, parameter.untyped_storage(), *lies)
    return _Parameter(parameter, version_of(parameter), parameter.requires_grad, None, 0, ())


def _changed_in_place(what: str) -> RerunError:
    return RerunError(
        f"expected {what}, to be as it was in forward, got one that was changed in place since; call backward before "
        "the optimizer steps or anything else writes to it"
    )


def _buffers_named(module: nn.Module, names: Collection[str]) -> Iterator[Tensor]:
    for name in names:
        owner, _, leaf = name.rpartition(".")
        try:
            buffer = module.get_submodule(owner)._buffers.get(leaf)
        except AttributeError:  # It is gone since it was profiled.
            continue
        if buffer is not None:
            yield buffer


def _modules_under(module: nn.Module) -> list[nn.Module]:
    found, known = [module], {id(module)}
    for inner in found:  # It grows meanwhile.
        children = inner.__dict__["_modules"]
        if children and not _is_scripted(type(inner)):
            for child in children.values():
                if child is not None and id(child) not in known:
                    known.add(id(child))
                    found.append(child)
    return found


@functools.cache
def _is_scripted(kind: type) -> bool:
    """Whether modules of a type are made by ``torch.jit``."""
    return issubclass(kind, torch.jit.ScriptModule)


def _lies_as(tensor: Tensor, placed: Tensor) -> bool:
    return (tensor.shape, tensor.dtype, tensor.data_ptr()) == (placed.shape, placed.dtype, placed.data_ptr())


def _copied(holder: Any) -> Any:
    return dict(holder) if isinstance(holder, dict) else holder.copy()


def _fill(holder: Any, contents: Any) -> None:
    """Make a mutable container hold this, unless it does."""
    if isinstance(holder, dict):
        same = len(holder) == len(contents) and all(map(is_, holder.values(), contents.values()))
        if not (same and all(map(is_, holder, contents))):
            if holder.keys() != contents.keys():
                holder.clear()
            holder.update(contents)
    elif isinstance(holder, set):
        if holder != contents:
            holder.clear()
            holder.update(contents)
    elif len(holder) != len(contents) or not all(map(is_, holder, contents)):
        holder.clear()
        holder.extend(contents)


_COPIES: dict[int, tuple[weakref.ref[Tensor], int, int, UncountedCopy | None]] = {}


def _copy_of_version(tensor: Tensor) -> UncountedCopy | None:
    """A copy of a tensor's values, the same one as long as its version stays; None where none is made."""
    key, version, storage = id(tensor), version_of(tensor), storage_key(tensor)
    known = _COPIES.get(key)
    if known is not None and known[0]() is tensor and known[1:3] == (version, storage):
        return known[3]
    small = tensor.grad_fn is None and tensor.numel() * tensor.element_size() <= MOST_COPIED_BYTES
    # A large one that has changed before is copied all the same.
    copied = uncounted_copy(tensor) if small or (known is not None and known[0]() is tensor) else None
    _COPIES[key] = weakref.ref(tensor, lambda _: _COPIES.pop(key, None)), version, storage, copied
    return copied


_STATES = GENERATORS | {
    # As numpy's, outside torch's allocator.
    torch.Generator: (lambda g: g.get_state().numpy().copy(), lambda g, state: g.set_state(torch.from_numpy(state))),
}

_Note = Callable[[ModuleState, str, Any, int], None]


@functools.cache
def _how_to_note(kind: type) -> _Note | None:
    """How a value of a type is remembered besides by identity; None where that is enough."""
    if issubclass(kind, Tensor):
        return ModuleState._note_tensor
    if kind in MAPPINGS or kind in SEQUENCES or kind is set:
        return ModuleState._note_items
    if issubclass(kind, tuple):
        return ModuleState._note_tuple
    if kind in _STATES:
        return ModuleState._note_generator
    callable_ones = any("__call__" in vars(base) for base in kind.__mro__)
    opaque = callable_ones or issubclass(kind, (ModuleType, type)) or kind.__module__.startswith("torch.")
    return ModuleState._note_object if kind.__dictoffset__ and not opaque else None
