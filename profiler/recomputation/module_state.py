"""The state of the modules of a call: attributes, parameters and buffers, as they were before its first run."""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import dict_version
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from profiler.recomputation.remembered_tensors import (
    RememberedParameter,
    RememberedParameters,
    UncountedCopy,
    copy_of_version,
    uncounted_copy,
)
from profiler.recomputation.saved_tensors import RerunError, version_of
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.data_parallel import StageUnits
from profiler.workload.plain_objects import (
    MOST_ITEMS,
    PLAIN,
    Change,
    GrowingContainer,
    attributes_of,
    base_of,
    copied as _copied,
    in_slots,
    is_opened,
    items_of,
    refill as _fill,
    set_slots,
    size_of,
)
from profiler.workload.random_states import same_state
from profiler.workload.reachable import HOOKS, OF_MODULES, globals_of, in_cell, is_closed, is_plain_tensor
from profiler.workload.remembered_values import STATE_OF, StateAccess, state_access
from profiler.workload.tensor_parts import storage_key
from profiler.workload.tensor_trees import cached_by_identity, slots_of, tensors_in

leave_uncompiled(__name__)

# Python counts the writes to each dict before 3.13; from then on attributes of objects are set without one.
_VERSIONS_TELL = sys.version_info < (3, 13)
# Nothing counts the changes of an array, so each call copies it.
MOST_ARRAY_BYTES = 2**20
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_DEPTH = 3  # of containers in containers, from a module's attribute on
_OBJECT_DEPTH = 2  # of objects in objects
_OF_MODULES = OF_MODULES | {"forward"}
# A forward may register hooks, as where a model of transformers is first asked for its hidden states, or take them out.
_registers_of = operator.itemgetter("_buffers", "_modules", *HOOKS)


# Calls that put back what a recomputation found, to be made last one first. An ExitStack in its place made steps that
# recompute small blocks 1.3 % slower (benchmarks.host_cost).
Undo = list[Callable[[], object]]


class ModuleState:
    """The state of a module and those inside it, recorded so that a recomputation reads what the first run read.

    Plain attributes, containers of them and objects that modules keep are remembered by identity, tensors by identity
    and version. Values are copied, to host memory, where a run may change them in place: of buffers and of attributes,
    once for each version. Modules in plain containers are remembered as those that are registered.

    Args:
        module: the one that is about to be called.
        changing: the names (relative to the module) of buffers that its run changes; kernels may do so uncounted.
        units: the units whose parameters it uses: these are registered and taken out by the sharding, not by the call.
        values: whether values of tensors are copied; without, it only tells whether the same objects are held.
        inputs: the parameters and buffers, where its run reads nothing else of the modules.
    """

    __slots__ = (
        "_changing",
        "_contents",
        "_empty",
        "_found",
        "_globals",
        "_known",
        "_long",
        "_module",
        "_parameters",
        "_slotted",
        "_stateful",
        "_statistics",
        "_tensors",
        "_units",
        "_values",
        "_variables",
        "_versioned",
        "_versions",
    )

    def __init__(
        self,
        module: nn.Module,
        changing: Collection[str],
        units: StageUnits,
        *,
        values: bool = True,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        self._units, self._module = units, module
        self._contents: list[tuple[Any, Any]] = []  # each mutable holder with what is in it
        self._empty: list[dict[str, Any]] = []  # registers of modules in which there is nothing
        self._long: list[GrowingContainer] = []
        self._slotted: list[tuple[Any, tuple[Any, ...]]] = []  # objects with what their slots hold
        self._known: set[int] = set()  # ids of holders, and of modules
        self._stateful: list[tuple[Any, StateAccess, Any]] = []  # generators and arrays, each with its state
        self._variables: list[tuple[types.CellType, Any]] = []  # of closures of hooks, with what is in them
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._tensors: dict[int, tuple[str, Tensor, int]] = {}  # what is held besides, with its version
        self._statistics: set[int] = set()  # ids of tensors that the call changes and does not read
        self._changing: set[int] = set()  # of those that it changes
        self._values: dict[int, UncountedCopy] = {}
        self._found: list[Tensor] = []  # parameters
        self._versions: list[int] | None = None  # of the dicts that held, as they were looked at last, what they held
        self._versioned: list[dict[Any, Any]] | None = None
        if inputs is None:
            under = _modules_under(module)
            self._known.update(map(id, under))
            for inner in under:
                self._note_module(inner)
        for tensor in inputs or ():
            if isinstance(tensor, nn.Parameter):
                self._found.append(tensor)
            else:
                self._note_tensor("a buffer", tensor)
        self._parameters = RememberedParameters(self._found)
        if changing or self._changing:
            self._changing |= {id(buffer) for buffer in _buffers_named(module, changing)}
        if not values:
            self._tensors.clear()
        for key, (_, tensor, _) in self._tensors.items():
            if key not in self._statistics:
                copied = uncounted_copy(tensor) if key in self._changing else copy_of_version(tensor)
                if copied is not None:
                    self._values[key] = copied

    # Before the first run ------------------------------------------------------

    def _note_module(self, module: nn.Module) -> None:
        if _is_scripted(type(module)):  # Its tables are no dicts of Python's.
            self._found += module.parameters()
            for buffer in module.buffers():
                self._note_tensor(type(module).__name__, buffer)
            return
        attributes = module.__dict__
        self._contents.append((attributes, attributes.copy()))
        parameters, buffers = attributes["_parameters"], attributes["_buffers"]
        tables = _registers_of(attributes)
        for table in tables if self._units.manage(module) else (parameters, *tables):
            if table:
                self._contents.append((table, table.copy()))
            else:
                self._empty.append(table)
        if parameters:
            for parameter in (each for each in parameters.values() if each is not None):
                self._found.append(parameter)
                if type(parameter) is nn.Parameter and not (kept := vars(parameter)):
                    self._empty.append(kept)  # As nearly always.
                else:
                    self._note_attributes(parameter)
        for table in filter(None, tables[2:]):
            for hook in table.values():
                self._note_function(hook)
        if buffers:
            self._note_buffers(module, buffers)
        for name, value in attributes.items():
            if type(value) not in PLAIN and name not in _OF_MODULES:
                self._note_value(name, value, _DEPTH)

    def _note_attributes(self, parameter: Tensor) -> None:
        """Notes a parameter's attributes, set by hooks; tensors (``main_grad``) by identity: backwards change them."""
        attributes = attributes_of(parameter) if is_plain_tensor(parameter) else None
        if attributes:
            self._contents.append((attributes, attributes.copy()))
            for name, value in attributes.items():
                if not isinstance(value, Tensor):
                    self._note_value(name, value, _DEPTH)
        elif attributes is not None:
            self._empty.append(attributes)

    def _note_function(self, function: Any) -> None:
        """Notes the references of a hook: variables of its closure, the object of a method, globals that it names."""
        if isinstance(function, types.MethodType):
            self._note_value(function.__name__, function.__self__, _DEPTH)
            function = function.__func__
        if isinstance(function, partial):
            self._note_tuple("partial", (*function.args, *function.keywords.values()), _DEPTH)
            function = function.func
        if (
            not isinstance(function, types.FunctionType)
            or is_closed(function.__module__)
            or id(function) in self._known
        ):
            return
        self._known.add(id(function))
        for cell in function.__closure__ or ():
            for value in in_cell(cell):
                self._variables.append((cell, value))
                self._note_value(function.__name__, value, _DEPTH)
        for name in globals_of(function):
            value = function.__globals__[name]
            if not isinstance(value, _CODE):
                self._globals.append((function.__globals__, name, value))
                self._note_value(name, value, _DEPTH)

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
        if id(container) in self._known:
            return
        self._known.add(id(container))
        is_long = size_of(container) > MOST_ITEMS
        if is_long and isinstance(container, (list, dict)):
            self._long.append(GrowingContainer(name, container))
            return
        contents = _copied(container)
        self._contents.append((container, contents))
        if not is_long and not isinstance(container, set):
            self._note_tuple(name, list(contents.values()) if isinstance(contents, dict) else contents, depth)

    def _note_subclass(self, name: str, container: Any, depth: int) -> None:
        self._note_items(name, container, depth)
        self._note_object(name, container, depth)

    def _note_tuple(self, name: str, items: Iterable[Any], depth: int) -> None:
        for item in (items_of(items) if isinstance(items, tuple) else items) if depth else ():
            self._note_value(name, item, depth - 1)

    def _note_object(self, name: str, value: Any, depth: int) -> None:
        if not depth:
            return
        inside = min(depth, _OBJECT_DEPTH)
        if (attributes := attributes_of(value)) is not None:
            self._note_items(name, attributes, inside)
        if slots_of(type(value)) and id(value) not in self._known:
            self._known.add(id(value))
            self._slotted.append((value, in_slots(value)))
            self._note_tuple(name, self._slotted[-1][1], inside)

    def _note_state(self, name: str, value: Any, _: int) -> None:
        if isinstance(value, np.ndarray) and (value.nbytes > MOST_ARRAY_BYTES or not value.flags.writeable):
            return
        access = state_access(value)
        assert access is not None
        self._stateful.append((value, access, access.read(value)))

    def _note_unregistered(self, name: str, module: nn.Module, depth: int) -> None:
        if id(module) in self._known:
            return
        self._known.add(id(module))
        under = _modules_under(module)
        if any(inner is self._module for inner in under):
            return  # One that the call is a part of: most of it does not take part.
        for inner in under:
            if inner is module or id(inner) not in self._known:
                self._known.add(id(inner))
                self._note_module(inner)

    def tensors_now(self) -> list[Tensor]:
        """The tensors in all that is remembered, as it is now."""
        return tensors_in([list(h.values()) if isinstance(h, dict) else list(h) for h, _ in self._contents])

    def storages(self) -> set[int]:
        """The storages of all tensors that are held besides parameters."""
        return {storage_key(tensor) for _, tensor, _ in self._tensors.values()}

    def first_run_over(self, before: Mapping[int, UncountedCopy]) -> list[Tensor]:
        """Has recomputations begin with the parameters ``before`` the first run; returns those that have no copy."""
        missing = []
        for parameter, version in self._parameters.set_since():
            key = id(parameter)
            if (copied := before.get(key)) is None:
                missing.append(parameter)
            else:
                self._tensors[key], self._values[key] = ("", parameter, version), copied
                self._parameters.accept(parameter)
        return missing

    # Around the recomputation --------------------------------------------------

    @contextmanager
    def reinstated(self) -> Iterator[None]:
        """Reinstates everything as it was before the first run; on leaving, it is as it was on entering.

        Raises:
            RerunError: the values of a tensor have changed that were not copied.
        """
        changed = [
            key
            for key, (_, tensor, version) in self._tensors.items()
            if version_of(tensor) != version or key in self._changing or self._written_uncounted(key, tensor)
        ]
        for key in changed:
            self._check_known(key)
        for one in self._long:
            if not one.only_grew():
                raise RerunError(
                    f"{one.shown}, has lost or replaced items since forward, and may only grow at its end; keep fewer "
                    "items in it, use a collections.deque, or keep this stage"
                )
        parameters = self._parameters.changed()
        for remembered in parameters:
            self._check_parameter(remembered)
        back: Undo = []
        try:
            self._reinstate_containers(back)
            self._reinstate_references(back)
            for value, access, state in self._stateful:
                back.append(partial(access.write, value, access.read(value)))
                access.write(value, state)
            _reinstate_parameters(parameters, back)
            self._reinstate_values(changed, back)
            yield
        finally:
            for undo in reversed(back):
                undo()

    def _reinstate_containers(self, back: Undo) -> None:
        """Has dicts, lists and sets hold what they held; ``back`` undoes it, and what the recomputation changes."""
        differing = self._differing()
        contents = {id(holder): (holder, _copied(holder)) for holder, _ in differing}
        filled = [(table, table.copy()) for table in self._empty if table] if any(self._empty) else []
        grown = [(one, one.cut()) for one in self._long]

        def undo() -> None:
            if any(self._empty):
                for table in filter(None, self._empty):
                    table.clear()
            for table, now in filled:
                table.update(now)
            for holder, now in contents.values():
                _fill(holder, now)
            for holder, before in self._differing():  # The recomputation has changed these and the first run had not.
                if id(holder) not in contents:
                    _fill(holder, before)
            for one, tail in grown:
                one.extend_again(tail)

        back.append(undo)
        for table, _ in filled:
            table.clear()
        for holder, before in differing:
            _fill(holder, before)

    def _reinstate_references(self, back: Undo) -> None:
        """Has slots, variables of closures and globals refer to what they did; ``back`` undoes it."""
        for value, before in self._slotted:
            back.append(partial(set_slots, value, in_slots(value)))
            set_slots(value, before)
        if self._variables or self._globals:
            variables = [(cell, value) for cell, _ in self._variables for value in in_cell(cell)]
            back.append(
                partial(_rebind, variables, [(space, name, space.get(name)) for space, name, _ in self._globals])
            )
            _rebind(self._variables, self._globals)

    def _reinstate_values(self, changed: Sequence[int], back: Undo) -> None:
        """Writes the values that tensors had before the first run; ``back`` writes those of now."""
        for key in changed:
            tensor = self._tensors[key][1]
            back.append(partial(_put_back_values, tensor, version_of(tensor), tensor.data, uncounted_copy(tensor)))
        for key in changed:
            if key in self._values:
                self._values[key].put_back(self._tensors[key][1])

    def holds_what_it_held(self) -> bool:
        """Whether attributes, containers, objects, closures and globals hold the very things that they held.

        Of arrays and generators the contents count, of long containers how long they are and both their ends.
        """
        return (
            self._dicts_hold()
            and all(all(map(operator.is_, in_slots(value), before)) for value, before in self._slotted)
            and all(value is now for cell, value in self._variables for now in in_cell(cell))
            and all(space.get(name) is value for space, name, value in self._globals)
            and all(same_state(access.read(each), state) for each, access, state in self._stateful)
            and all(one.is_as_it_was() for one in self._long)
        )

    def plain_changes(self) -> list[Change] | None:
        """Returns the changes of attributes and containers; None where these are more than numbers and names."""
        held = ((holder, before, _copied(holder)) for holder, before in self._differing())
        changes = [Change(*each) for each in held if not _are_same(*each[1:])]
        if any(self._empty) or not all(each.is_plain() for each in changes):
            return None
        for each in changes:
            each.undo()
        holds = self.holds_what_it_held()
        for each in changes:
            each.make()
        return changes if holds else None

    def _dicts_hold(self) -> bool:
        """Whether containers hold what they held; dicts known to have had no writes are not looked into."""
        own = vars(self._module)  # in which a patched forward comes and goes
        if self._versioned is None:
            dicts = (holder for holder, _ in self._contents if type(holder) is dict and holder is not own)
            self._versioned = [*dicts, *self._empty]
        versions = [*map(dict_version, self._versioned)] if _VERSIONS_TELL else None
        if versions is not None and versions == self._versions:
            contents = ((h, before) for h, before in self._contents if type(h) is not dict or h is own)
            return all(_are_same(_copied(holder), before) for holder, before in contents)
        if any(self._empty) or not all(_are_same(_copied(holder), before) for holder, before in self._differing()):
            return False
        self._versions = versions
        return True

    def _differing(self) -> list[tuple[Any, Any]]:
        """The holders that may hold something else than they held, with that: looking at all dicts at once is quick."""
        dicts = [pair for pair in self._contents if type(pair[0]) is dict]
        now, before = [holder for holder, _ in dicts], [held for _, held in dicts]
        same = (
            list(map(len, now)) == list(map(len, before))
            and all(map(operator.is_, chain.from_iterable(now), chain.from_iterable(before)))
            and all(map(operator.is_, _values_of(now), _values_of(before)))
        )
        return [pair for pair in self._contents if type(pair[0]) is not dict] if same else self._contents

    def _written_uncounted(self, key: int, tensor: Tensor) -> bool:
        """Whether a tensor of the same version has other values now: what is written through ``.data`` counts none."""
        values = self._values.get(key)
        return values is not None and values.other_than(tensor)

    def _check_known(self, key: int) -> None:
        name, tensor, _ = self._tensors[key]
        if key not in self._statistics and key not in self._values:
            raise _changed_in_place(f"{name!r}, a tensor of shape {tuple(tensor.shape)}")

    def _check_parameter(self, remembered: RememberedParameter) -> None:
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
            raise RerunError("the memory of a parameter was given back after forward; keep it until backward is over")


def _are_same(now: Any, before: Any) -> bool:
    """Whether two copies of containers hold the same things in the same order."""
    if isinstance(now, set) or len(now) != len(before):
        return now == before
    same = all(map(operator.is_, now, before))
    return same and (not isinstance(now, dict) or all(map(operator.is_, now.values(), before.values())))


def _values_of(dicts: list[dict[Any, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))


def _reinstate_parameters(parameters: Sequence[RememberedParameter], back: Undo) -> None:
    """Has parameters lie where they did and take gradients as they did; ``back`` undoes it."""
    for one in parameters:
        if one.thawed():
            back.append(partial(one.parameter.requires_grad_, one.parameter.requires_grad))
            one.parameter.requires_grad_(not one.parameter.requires_grad)
    for one in parameters:
        if one.moved():
            back.append(partial(setattr, one.parameter, "data", one.parameter.data))
            one.parameter.data = one.data()


def _put_back_values(tensor: Tensor, version: int, placed: Tensor, values: UncountedCopy | None) -> None:
    if values is None:
        return
    if not _lies_as(tensor, placed):
        tensor.data = placed
    values.put_back(tensor)
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # type: ignore[attr-defined]


def _rebind(variables: list[tuple[types.CellType, Any]], names: list[tuple[dict[str, Any], str, Any]]) -> None:
    for cell, value in variables:
        cell.cell_contents = value
    for space, name, value in names:
        space[name] = value


def _changed_in_place(what: str) -> RerunError:
    return RerunError(
        f"{what}, was changed in place since forward; call backward before the optimizer steps or anything else writes "
        "to it"
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


@cached_by_identity
def _is_scripted(kind: type) -> bool:
    """Whether modules of a type are made by ``torch.jit``."""
    return issubclass(kind, torch.jit.ScriptModule)


def _lies_as(tensor: Tensor, placed: Tensor) -> bool:
    if isinstance(tensor, FakeTensor) or isinstance(placed, FakeTensor):  # They have no address.
        return (tensor.shape, tensor.dtype, storage_key(tensor)) == (placed.shape, placed.dtype, storage_key(placed))
    return (tensor.shape, tensor.dtype, tensor.data_ptr()) == (placed.shape, placed.dtype, placed.data_ptr())


_Note = Callable[[ModuleState, str, Any, int], None]
_NOTES: list[tuple[type, _Note]] = [
    (Tensor, ModuleState._note_tensor),
    (nn.Module, ModuleState._note_unregistered),
    (tuple, ModuleState._note_tuple),
    *((kind, ModuleState._note_state) for kind in STATE_OF),
]


@cached_by_identity
def _how_to_note(kind: type) -> _Note | None:
    """How a value of a type is remembered besides by identity; None where that is enough."""
    base = base_of(kind)
    if base is not None:
        return ModuleState._note_items if kind is base or not is_opened(kind) else ModuleState._note_subclass
    of_objects = ModuleState._note_object if is_opened(kind) else None
    return next((note for known, note in _NOTES if issubclass(kind, known)), of_objects)
