"""What a function refers to: the tensors that a loop holds from step to step, and how all of it is put back."""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data
from torch import Tensor, nn

from profiler.tensors.tensor_trees import tensors_in

# Further away than this, things are not the loop's own.
_DEPTH = 8
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
# What is no state of a loop: code, and data sets, whose tensors are no part of a step.
_LEAVES = (
    types.ModuleType, type, str, bytes, int, float, complex, types.BuiltinFunctionType, torch.dtype, torch.device,
    torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.utils.data.Sampler, Tensor, nn.Module,
    torch.optim.Optimizer,
)  # fmt: skip
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)


def reached_from(function: Any) -> list[Any]:
    """Everything that a function refers to, and what is in it, each once: the nearest first.

    Closures, defaults, globals by the names in its code, the object of a method, attributes, items of containers.
    """
    seen: dict[int, Any] = {id(function): function}
    level = [function]
    for _ in range(_DEPTH):
        following = [item for value in level for item in _referents(value)]
        level = []
        for item in following:
            if id(item) not in seen:
                seen[id(item)] = item
                level.append(item)
    return list(seen.values())


def reached_from_loss(loss: Any) -> list[Any]:
    """The same for a loss; of a module, from what its modules hold as plain attributes, and from their forwards."""
    if not isinstance(loss, nn.Module):
        return reached_from(loss)
    held = _attributes_of(loss)
    return [
        item for each in [*held, *{type(module).forward for module in loss.modules()}] for item in reached_from(each)
    ]


def _attributes_of(outermost: nn.Module) -> list[Any]:
    """What its modules hold as plain attributes."""
    own = set(vars(nn.Module()))
    return [value for module in outermost.modules() for name, value in vars(module).items() if name not in own]


def _referents(value: Any) -> Iterator[Any]:
    if isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.CellType):
        yield from _in_cell(value)
    elif isinstance(value, dict):
        yield from list(value.values())
    elif isinstance(value, _CONTAINERS):
        yield from list(value)
    elif not _is_leaf(value):
        yield from list(getattr(value, "__dict__", {}).values())
        yield from _in_slots(value).values()


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _in_slots(value: Any) -> dict[str, Any]:
    names = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    return {name: getattr(value, name) for name in names if hasattr(value, name) and not name.startswith("__")}


def _is_leaf(value: Any) -> bool:
    """Whether nothing in it belongs to the loop, or somebody else remembers it; objects of Python's own library too."""
    module = type(value).__module__.partition(".")[0]
    return isinstance(value, _LEAVES) or (module in sys.stdlib_module_names and not isinstance(value, _NAMESPACES))


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    yield from function.__closure__ or ()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    if not _is_installed(function):
        yield from (function.__globals__[name] for name in _globals_of(function))


def _globals_of(function: types.FunctionType) -> list[str]:
    return [name for name in dict.fromkeys(_names(function.__code__)) if name in function.__globals__]


def _is_installed(function: types.FunctionType) -> bool:
    """Whether its code is a library's, which keeps no state of a loop in its globals."""
    return "site-packages" in function.__code__.co_filename or function.__module__ in sys.stdlib_module_names


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _in_cell(cell: types.CellType) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # Nothing is in it yet.
        return


def tensors_of(reached: list[Any]) -> list[Tensor]:
    """The tensors among what was reached, with those of modules and of containers that only torch opens."""
    tensors = [value for value in reached if isinstance(value, Tensor)]
    for value in reached:
        if isinstance(value, nn.Module):
            tensors += [*value.parameters(), *value.buffers()]
        elif not isinstance(value, (types.FunctionType, type)):
            tensors += tensors_in(value)
    return list({id(tensor): tensor for tensor in tensors}.values())


def kept_by_modules(reached: list[Any]) -> list[Tensor]:
    """Tensors that modules among what was reached keep as plain attributes."""
    return [
        t
        for value in reached
        if isinstance(value, nn.Module)
        for each in _attributes_of(value)
        for t in tensors_in(each)
    ]


def kept_by_nodes(outputs: list[Tensor]) -> list[Tensor]:
    """Tensors that the nodes of a graph still keep: those go with the last tensor of the graph, not with backward.

    They are in attributes (``ctx.x = x`` in a function of the user's own), were saved for a backward that did not come
    this way (of outputs that have no part in the loss), or are leaves that forward made, with their gradients.
    """
    nodes = list(dict.fromkeys(output.grad_fn for output in outputs if output.grad_fn is not None))
    seen = set(nodes)
    found: list[Tensor] = []
    while nodes:
        node = nodes.pop()
        found += tensors_in([getattr(node, "__dict__", {}), *_still_saved(node), *_leaf_of(node)])
        following = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= following
        nodes += following
    return found


def _still_saved(node: Any) -> list[Any]:
    """What autograd holds for a node's backward, as hooks have packed it; nothing once that has been."""
    try:
        values = [getattr(node, name) for name in _saved_by(type(node))]
    except RuntimeError:  # Of a function of the user's own, after its backward.
        return []
    return [one.data for value in values for one in (value if isinstance(value, tuple) else (value,))]


def _leaf_of(node: Any) -> list[Any]:
    """The leaf whose gradient a node adds up, and that gradient; none of a parameter's, which others know."""
    leaf = getattr(node, "variable", None)
    return [leaf, leaf.grad] if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) else []


@functools.cache
def _saved_by(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def bindings_of(reached: list[Any]) -> list[tuple[str, Callable[[], None]]]:
    """Ways back for what a step may bind anew: names, items of containers, attributes; with what each is for.

    What they are bound to now is held until the ways are gone.
    """
    ways: list[tuple[str, Callable[[], None]]] = []
    for value in reached:
        kind = type(value).__name__
        if isinstance(value, types.FunctionType):
            ways.append((f"attributes of {value.__name__}", functools.partial(_refill, vars(value), dict(vars(value)))))
            if not _is_installed(value):
                names = {name: value.__globals__[name] for name in _globals_of(value)}
                ways.append((f"globals of {value.__name__}", functools.partial(value.__globals__.update, names)))
        elif isinstance(value, types.CellType):
            ways += [("a variable of the step", functools.partial(_rebind, value, item)) for item in _in_cell(value)]
        elif isinstance(value, (list, deque, dict, set)):
            ways.append((f"a {kind} of the step", functools.partial(_refill, value, _copied(value))))
        elif not (_is_leaf(value) or isinstance(value, _CONTAINERS)):
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict):
                ways.append((f"attributes of a {kind}", functools.partial(_refill, attributes, dict(attributes))))
            if slots := _in_slots(value):
                ways.append((f"attributes of a {kind}", functools.partial(_reset, value, slots)))
    return ways


def _rebind(cell: types.CellType, value: Any) -> None:
    cell.cell_contents = value


def _reset(owner: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if getattr(owner, name, None) is not value:
            object.__setattr__(owner, name, value)


def _copied(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _refill(container: Any, items: Any) -> None:
    """Put items back into a container, which is left alone where they are still there."""
    if isinstance(container, dict):
        if [(key, id(value)) for key, value in container.items()] != [(k, id(v)) for k, v in items.items()]:
            container.clear()
            container.update(items)
    elif list(map(id, container)) != list(map(id, items)):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(items)
