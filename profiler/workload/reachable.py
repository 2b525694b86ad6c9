"""Finds the objects that can be reached from a step: one walk, to restore them after measuring and to count bytes.

The references that an object holds by names can be read and written in one way (``Space``), be they attributes, slots,
variables of a closure, globals or arguments: values are put back there, and iterators are replaced.
"""

from __future__ import annotations

import functools
import gc
import io
import itertools
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils.data
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data.dataloader import _BaseDataLoaderIter

from profiler.workload.plain_objects import (
    GONE,
    MOST_ITEMS,
    PLAIN,
    attributes_of,
    base_of,
    copied,
    in_slots,
    is_opened,
    items_of,
    refill,
)
from profiler.workload.replayed_iterators import ReplayedIterator
from profiler.workload.tensor_trees import cached_by_identity, slots_of, tensors_in

# Further away than this, things are not the step's own.
_DEPTH = 8
MOST_REACHED = 50_000  # values of one walk, which takes some 50 ms then
OF_MODULES = frozenset(vars(nn.Module()))
HOOKS = sorted(name for name in OF_MODULES if "_hooks" in name and "state_dict" not in name)
# Methods that nobody names in code of the user's own: torch and frameworks call them.
_CALLED = ("__call__", "__next__", "forward", "training_step")
# Data sets, whose tensors are no part of a step; optimizers, which are known by themselves.
_LEAVES = (
    torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.utils.data.Sampler, torch.optim.Optimizer,
    _BaseDataLoaderIter,
)  # fmt: skip
# What a thread or a process fills: taken from it, nothing comes back.
_FILLED_BY_OTHERS = ("queue", "_queue", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "socket")
_CACHED = type(functools.lru_cache(lambda: None))


class Reached(list[Any]):
    """Everything that was reached, each once, the nearest first.

    Attributes:
        names: the names that the code of reached functions uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set(_CALLED)

    @property
    def is_cut(self) -> bool:
        """Whether there was more than is looked at."""
        return len(self) >= MOST_REACHED


def reached_from(*roots: Any, through_iterators: bool = True) -> Reached:
    """Everything that is in the roots, whatever they are, and what code that they run refers to.

    That is items of containers, attributes, slots, what modules hold and their hooks, attributes and hooks of tensors;
    of functions closures, defaults, globals by the names in their code; of classes and modules of the user's own what
    has one of these names. Nothing of the user's is called: no property, no ``__len__`` and no ``__eq__``.

    Args:
        roots: the objects to begin at.
        through_iterators: whether what is behind generators and other iterators counts.
    """
    reached, known, spaces = Reached(), set[int](), dict[Any, set[str]]()
    level: Iterable[Any] = roots
    for depth in range(_DEPTH + 1):
        following: list[Any] = []
        for value in level:
            kind = type(value)
            if kind in PLAIN or id(value) in known:
                continue
            known.add(id(value))
            reached.append(value)
            if not through_iterators and is_iterator(value):
                continue
            if reached.is_cut:
                return reached
            if issubclass(kind, nn.Module):  # What a proxy says that it is does not count.
                below = [each for each in value.modules() if id(each) not in known]
                known.update(map(id, below))
                reached += below
                for each in (value, *below):
                    following += _of_module(each)
                    _note_spaces(each, spaces)
            elif (contents := _how_to_open(kind)) is not None:
                following += contents(value)
                _note_spaces(value, spaces)
                if contents is _of_function:
                    reached.names.update(names_in(value.__code__))
            elif not depth:
                following += _of_object(value)
        following += (item for space, taken in spaces.items() for item in _named_in(space, taken, reached.names))
        level = following
        if not following:
            break
    return reached


def modules_in(reached: Iterable[Any]) -> list[nn.Module]:
    """The modules among what was reached, each once."""
    return [value for value in reached if issubclass(type(value), nn.Module)]


def tensors_of(reached: Iterable[Any]) -> list[Tensor]:
    """The tensors among what was reached, each once, and those of containers that only torch opens."""
    tensors: list[Tensor] = []
    for value in reached:
        if issubclass(type(value), Tensor):
            tensors.append(value)
        elif type(value) in pytree.SUPPORTED_NODES and base_of(type(value)) is None:
            tensors += tensors_in(value)
    return list({id(tensor): tensor for tensor in tensors}.values())


def tensors_held(tree: Any) -> list[Tensor]:
    """The tensors in arguments of any kind as ``tensors_in`` lists them, then those that only their objects hold."""
    found = tensors_in(tree)
    listed = set(map(id, found))
    return [*found, *(tensor for tensor in tensors_of(reached_from(tree)) if id(tensor) not in listed)]


@cached_by_identity
def _how_to_open(kind: type) -> Callable[[Any], Iterable[Any]] | None:
    """Returns the function that lists the contents of values of a type; None where they have none that matter."""
    for known, contents in _CONTENTS:
        if issubclass(kind, known):
            return contents
    if hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools"):
        return gc.get_referents
    if base_of(kind) is not None or issubclass(kind, (tuple, frozenset)):
        return _of_container if not is_opened(kind) else lambda value: [*_of_container(value), *_of_object(value)]
    return _of_object if is_opened(kind) else None


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator that no attributes of its own set back: of Python's, of a DataLoader, or of a thread's.

    Objects of the user's own that count by attributes are none, nor are open files.
    """
    kind = type(value)
    if not hasattr(kind, "__next__") or issubclass(kind, (io.IOBase, nn.Module, Tensor)):
        return False
    if not is_opened(kind) or issubclass(kind, _BaseDataLoaderIter):
        return True
    return any(type(each).__module__.partition(".")[0] in _FILLED_BY_OTHERS for each in _of_object(value))


def is_known_otherwise(value: Any) -> bool:
    """Whether what it holds is put back in another way (optimizers, iterators), or is no state (data sets)."""
    return issubclass(type(value), _LEAVES) or is_iterator(value)


def _nothing(_: Any) -> Iterable[Any]:
    return ()


def _of_object(value: Any) -> Iterable[Any]:
    return (*(attributes_of(value) or {}).values(), *in_slots(value))


def _of_container(value: Any) -> Iterable[Any]:
    """Its items; of a long one none where the first ones are plain data: a table (a vocabulary, say)."""
    items = items_of(value)
    first = list(itertools.islice(items, MOST_ITEMS))
    if len(first) == MOST_ITEMS and all(type(item) in PLAIN for item in first):
        return ()
    return (*first, *itertools.islice(items, MOST_REACHED))


def _of_module(module: nn.Module) -> Iterable[Any]:
    if isinstance(module, torch.jit.ScriptModule):  # Its tables are no dicts of Python's.
        yield from (*module.parameters(), *module.buffers())
        return
    attributes = module.__dict__
    yield from (value for name, value in attributes.items() if name not in OF_MODULES)
    for table in ("_parameters", "_buffers", *HOOKS):
        yield from items_of(attributes[table])


def is_plain_tensor(value: Any) -> bool:
    """Whether it is a tensor that carries attributes of others, and is not made of its attributes."""
    return issubclass(type(value), Tensor) and not is_traceable_wrapper_subclass(value)


def _of_tensor(tensor: Tensor) -> Iterable[Any]:
    """Returns what a tensor carries besides its values: attributes, a gradient, the functions of its hooks."""
    if not is_plain_tensor(tensor):
        return
    yield from (attributes_of(tensor) or {}).values()
    if tensor.is_leaf and tensor.grad is not None:
        yield tensor.grad
    for hooks in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)):
        yield from (hooks or {}).values()


def _of_function(function: types.FunctionType) -> Iterable[Any]:
    if is_closed(function.__module__):
        return
    yield from function.__closure__ or ()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    yield from (function.__globals__[name] for name in globals_of(function))


def globals_of(function: types.FunctionType) -> list[str]:
    """The globals that a function's code names; none of a library's, which keeps no state of a loop there."""
    if "site-packages" in function.__code__.co_filename or function.__module__ in sys.stdlib_module_names:
        return []
    return [name for name in names_in(function.__code__) if name in function.__globals__]


def globals_of_forwards(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Globals that the forwards of a module and of those inside it name, each with its file's names and its value."""
    for kind in dict.fromkeys(type(inner) for inner in module.modules()):
        forward = kind.forward
        if isinstance(forward, types.FunctionType):
            for name in globals_of(forward):
                yield forward.__globals__, name, forward.__globals__[name]


@cached_by_identity
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names in a function's code and in that of the functions that it defines, each once."""
    inner = (name for each in code.co_consts if isinstance(each, types.CodeType) for name in names_in(each))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def in_cell(cell: types.CellType) -> Iterator[Any]:
    """Yields the value of a variable of a closure; nothing before it is set."""
    try:
        yield cell.cell_contents
    except ValueError:
        return


def _of_generator(generator: Any) -> Iterable[Any]:
    frame = generator.gi_frame
    return () if frame is None or generator.gi_running else tuple(frame.f_locals.values())


def _of_cached(function: Any) -> Iterable[Any]:
    """The results that ``functools.lru_cache`` keeps; they stay where they are."""
    for kept in gc.get_referents(function):
        if type(kept) is dict:  # Its attributes, or the results where their number has no bound.
            yield from kept.values()
        elif kept is not type(function):
            yield kept


_CONTENTS: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (Tensor, _of_tensor),
    (_LEAVES, _nothing),
    (types.FunctionType, _of_function),
    (types.MethodType, lambda method: (method.__self__, method.__func__)),
    (functools.partial, lambda call: (call.func, *call.args, *call.keywords.values())),
    (types.CellType, in_cell),
    ((staticmethod, classmethod), lambda wrapped: (wrapped.__func__,)),
    (property, lambda wrapped: (wrapped.fget, wrapped.fset)),
    (functools.cached_property, lambda wrapped: (wrapped.func,)),
    (types.GeneratorType, _of_generator),
    (ReplayedIterator, lambda replay: replay.held),
    (_CACHED, _of_cached),
    ((type, types.ModuleType), _nothing),  # By name, see ``_named_in``.
)


@functools.cache
def is_closed(module: str | None) -> bool:
    """Whether what a module defines is a part of this program and not of the user's step."""
    return (module or "").partition(".")[0] in ("planner", "profiler", "solvers")


@functools.cache
def _is_own(module: str) -> bool:
    """Whether a module is the user's own, and no library's."""
    file = getattr(sys.modules.get(module), "__file__", None)
    library = is_closed(module) or module.partition(".")[0] in sys.stdlib_module_names
    return module == "__main__" or not (library or file is None or "site-packages" in file)


def own_spaces(value: Any) -> list[Any]:
    """The classes and modules of the user's own that a value is, or is of."""
    if isinstance(value, types.ModuleType):
        return [value] if _is_own(value.__name__) else []
    kinds = (value if isinstance(value, type) else type(value)).__mro__
    return [kind for kind in kinds if _is_own(kind.__module__)]


class Space(NamedTuple):
    """The named references of an object: functions that read all of them, and that write or delete one name."""

    read: Callable[[], dict[Any, Any]]
    write: Callable[[Any, Any], object]
    delete: Callable[[Any], object]


def _stays(_: Any) -> None:
    """A name that has come since is left there."""


def spaces_of(holder: Any) -> Iterator[Space]:
    """Yields the references of an object, but for the items of containers and those of its class."""
    if isinstance(holder, types.CellType):
        put = functools.partial(setattr, holder, "cell_contents")
        yield Space(lambda: dict(enumerate(in_cell(holder))), lambda _, value: put(value), _stays)
        return
    if isinstance(holder, types.FunctionType):
        space, names = holder.__globals__, globals_of(holder)
        yield Space(lambda: {n: space[n] for n in names if n in space}, space.__setitem__, _stays)
        yield Space(
            lambda: dict(enumerate(holder.__defaults__ or ())),
            lambda number, value: setattr(holder, "__defaults__", _replaced(holder.__defaults__, number, value)),
            _stays,
        )
        yield _items_of_dict(holder.__kwdefaults__ or {})
    if isinstance(holder, functools.partial):
        yield Space(lambda: dict(enumerate(holder.args)), functools.partial(_set_argument, holder), _stays)
        yield _items_of_dict(holder.keywords)
        return
    yield from attributes_space(holder)
    slots = () if issubclass(type(holder), nn.Module) else slots_of(type(holder))
    if slots:
        yield Space(
            lambda: {n: item for n, item in zip(slots, in_slots(holder), strict=True) if item is not GONE},
            functools.partial(object.__setattr__, holder),
            functools.partial(object.__delattr__, holder),
        )


def attributes_space(owner: Any, ignored: Collection[str] = ()) -> Iterator[Space]:
    """The attributes of an object but for some; functions are no state. Nothing where it has none."""
    attributes = attributes_of(owner)
    if attributes is not None:  # The owner is not kept alive.
        yield Space(
            lambda: {
                name: value
                for name, value in attributes.items()
                if name not in ignored and (is_opened(type(value)) or not callable(value))
            },
            attributes.__setitem__,
            attributes.__delitem__,
        )


def named_space(owner: Any, names: Collection[str]) -> Space:
    """Returns the space of the names that code uses in a user's class or module; functions are no state."""

    def read() -> dict[str, Any]:
        named = ((name, vars(owner)[name]) for name in vars(owner).keys() & names)
        return {name: value for name, value in named if not (callable(value) or hasattr(type(value), "__get__"))}

    return Space(read, functools.partial(setattr, owner), functools.partial(delattr, owner))


def items_space(container: Any) -> Iterator[Space]:
    """The items of a container, by their keys or places; nothing of what is none, and of a set."""
    base = base_of(type(container))
    if isinstance(base, type) and issubclass(base, dict):
        yield _items_of_dict(container)
    elif base is not None and base is not set:
        yield Space(lambda: dict(enumerate(copied(container))), functools.partial(_set_item, container), _stays)


def _items_of_dict(items: Any) -> Space:
    return Space(lambda: dict(dict.items(items)), functools.partial(dict.__setitem__, items), _stays)


def _replaced(values: Any, number: int, value: Any) -> tuple[Any, ...]:
    return (*values[:number], value, *values[number + 1 :])


def _set_item(container: Any, number: int, value: Any) -> None:
    contents = copied(container)
    contents[number] = value
    refill(container, contents)


def _set_argument(call: functools.partial[Any], number: int, value: Any) -> None:
    state = (call.func, _replaced(call.args, number, value), call.keywords, vars(call))
    call.__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]


def _note_spaces(value: Any, spaces: dict[Any, set[str]]) -> None:
    for space in own_spaces(value):
        spaces.setdefault(space, set())


def _named_in(space: Any, taken: set[str], names: set[str]) -> list[Any]:
    """Returns the contents of a user's class or module that have one of these names and were not returned before."""
    found = (vars(space).keys() & names) - taken
    taken |= found
    return [vars(space)[name] for name in found]
