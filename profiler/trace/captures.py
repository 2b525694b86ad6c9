"""Captured calls of a model's modules: kept with the model, guarded at each call, and checked against the module.

A guard compares what a capture takes for granted: arguments, what the modules hold, torch's flags. A plan uses the
captures of its profile.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from profiler.recomputation.module_rerun import CallState
from profiler.recomputation.module_state import ModuleState
from profiler.trace.call_program import BoundProgram
from profiler.trace.captured_call import CONTIGUOUS, CapturedCall, GradientLayouts, UnsettledError, capture_call
from profiler.trace.joint_graph import random_state
from profiler.workload.compiled_forwards import Forward, leave_uncompiled
from profiler.workload.data_parallel import units_of
from profiler.workload.forward_patches import users_forward
from profiler.workload.reachable import globals_of_forwards
from profiler.workload.tensor_trees import TensorSlot, contents_of, device_of, tensors_in, with_tensors, without_tensors
from profiler.workload.torch_state import TorchState

leave_uncompiled(__name__)


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class CallGuard:
    """Says whether a call is one that a capture holds for.

    Args:
        module, args, kwargs: module and arguments of the captured call, as they are before it.
    """

    __slots__ = ("_flat", "_globals", "_module", "_modules", "_parameters", "_tensors", "_torch", "_trained", "_tree")

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = tensors_in((args, kwargs))
        self._flat = _flat(args, kwargs)
        self._tree = _frozen(without_tensors((args, kwargs)))
        self._tensors = [*map(_layout, tensors)]
        self._torch = TorchState(device_of(tensors))
        self._module = module
        with without_forward(module):
            self._modules = ModuleState(module, (), units_of(module), values=False)
        self._parameters = [*module.parameters()]
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._globals = [each for each in globals_of_forwards(module) if isinstance(each[2], _PLAIN)]

    def other_arguments(self, args: Any, kwargs: Any) -> str:
        """Says how the arguments of a call differ from those of the captured one; empty where they do not."""
        if self._flat is not None and _flat(args, kwargs) == self._flat:
            return ""
        tensors = tensors_in((args, kwargs))
        if len(tensors) != len(self._tensors) or _frozen(without_tensors((args, kwargs))) != self._tree:
            return "it is called with other arguments"
        for tensor, layout in zip(tensors, self._tensors, strict=True):
            if (found := _layout(tensor)) != layout:
                return f"it is called with a tensor of shape {tuple(tensor.shape)} that {_differing(found, layout)}"
        return ""

    def refusal(self, args: Any, kwargs: Any) -> str:
        """Says what differs now from the captured call; empty where nothing does."""
        if what := self.other_arguments(args, kwargs):
            return what
        with without_forward(self._module):
            if not self._modules.holds_what_it_held():
                return "its modules hold something else (an attribute, a hook, a mode)"
        if [parameter.requires_grad for parameter in self._parameters] != self._trained:
            return "other parameters are trained"
        if any(space.get(name) is not value for space, name, value in self._globals):
            return "a global that it reads is another"
        return "" if self._torch.is_now() else "torch's settings are others (autocast, flags, modes)"

    def holds_for_another(self, module: nn.Module, unread: Collection[str], args: Any, kwargs: Any) -> bool:
        """Whether a call of another module is as the captured one, whose own module has to be as it was then.

        Args:
            module: the called module.
            unread: attributes that may differ.
            args, kwargs: arguments of the call.
        """
        differing = differing_attributes(self._module, module)
        if differing is None or not differing <= {*unread}:
            return False
        trained = [parameter.requires_grad for parameter in module.parameters()]
        # What is frozen here gets a gradient that nobody takes.
        gets_gradients = all(map(operator.le, trained, self._trained))
        return gets_gradients and _names_held(module) == _names_held(self._module) and not self.refusal(args, kwargs)


def _names_held(module: nn.Module) -> list[str]:
    """Names of a module's parameters and buffers."""
    return [name for name, _ in (*module.named_parameters(), *module.named_buffers())]


class without_forward:  # a generator would take longer, and guards are asked at every call
    """Takes a module's own ``forward`` away inside, so that its class's counts: who patches it is no matter."""

    __slots__ = ("_attributes", "_patched")

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)

    def __enter__(self) -> None:
        self._patched = self._attributes.pop("forward", None)

    def __exit__(self, *error: object) -> None:
        if self._patched is not None:
            self._attributes["forward"] = self._patched


def differing_attributes(one: nn.Module, other: nn.Module) -> frozenset[str] | None:
    """Names of the attributes in which two modules of one structure differ; None where their structures do.

    Parameters and buffers are no attributes here, nor are hooks.
    """
    found: set[str] = set()
    for (name, mine), (other_name, theirs) in zip_longest(
        one.named_modules(), other.named_modules(), fillvalue=("", None)
    ):
        if mine is None or theirs is None or name != other_name or type(mine) is not type(theirs):
            return None
        ours, others = vars(mine), vars(theirs)
        if ours.keys() != others.keys():
            return None
        tables = ("_parameters", "_buffers", "_modules", "forward")
        keys = (key for key in ours if key not in tables and not key.endswith("_hooks"))
        found |= {f"{name}.{key}" for key in keys if not _alike(ours[key], others[key])}
    return frozenset(found)


def _alike(mine: Any, theirs: Any) -> bool:
    if mine is theirs:
        return True
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, _PLAIN):
        return mine == theirs
    if isinstance(mine, (tuple, list)):
        return len(mine) == len(theirs) and all(map(_alike, mine, theirs))
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(_alike(mine[key], theirs[key]) for key in mine)
    return isinstance(mine, (set, frozenset)) and mine == theirs


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, type(tensor), tensor.requires_grad


def _differing(found: tuple[Any, ...], captured: tuple[Any, ...]) -> str:
    """How the layout of a tensor differs from the captured one, as the end of a sentence."""
    if found[:-1] == captured[:-1]:
        return "takes a gradient, and took none" if found[-1] else "takes no gradient, and took one"
    return "lies otherwise"


def _flat(args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """How the arguments lie, and which plain values they are; None where any is something else."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(_layout(value))
        elif isinstance(value, _PLAIN):
            found.append((type(value), value))
        else:
            return None
    return tuple(kwargs), *found


def _frozen(tree: Any, outer: tuple[int, ...] = ()) -> Any:
    """A tree that is equal to another one where all that is in both is plain and equal, or the same object.

    Args:
        tree: a tree that ``without_tensors`` has made.
        outer: ids of the objects that it is in, one of which it may refer to.
    """
    kind = type(tree)
    if kind in (tuple, list):
        return kind, tuple(_frozen(value, outer) for value in tree)
    if kind is dict:
        return kind, tuple((key, _frozen(value, outer)) for key, value in tree.items())
    if isinstance(tree, _PLAIN):
        return kind, tree
    if isinstance(tree, TensorSlot):
        return kind, tree.number
    if id(tree) in outer:
        return kind, outer.index(id(tree))
    contents = contents_of(tree, TensorSlot)
    return _Same(tree) if contents is None else (kind, _frozen(contents, (*outer, id(tree))))


class _Same:
    """Equal to what stands for the very same object."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


class Capture(NamedTuple):
    """A captured call, the module and the function that it is of, and what it takes for granted."""

    call: CapturedCall
    module: nn.Module
    guard: CallGuard
    gradients: GradientLayouts
    function: Any


_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, list[Capture]] = weakref.WeakKeyDictionary()
_MOST = 256  # of one model: the oldest go


def captures_of(model: nn.Module) -> list[Capture]:
    """The captures of a model's modules, the latest first."""
    return _OF_MODELS.get(model, [])


def captured(
    model: nn.Module,
    module: nn.Module,
    forward: Forward,
    args: Any,
    kwargs: Any,
    gradients: GradientLayouts = CONTIGUOUS,
) -> Capture:
    """Trace a call of one of a model's modules and keep the capture; arguments and errors as of ``capture_call``.

    Attributes that a first call sets, and those after it need not (a ``problem_type``), are set then.
    """

    def traced() -> tuple[CallGuard, CapturedCall]:
        return CallGuard(module, args, kwargs), capture_call(module, forward, args, kwargs, gradients)

    try:
        guard, call = traced()
    except UnsettledError as error:
        if not error.changes:
            raise
        try:
            for change in error.changes:
                change.make()
            guard, call = traced()
        except BaseException:  # Whatever ends it, the module is left as it was.
            for change in error.changes:
                change.undo()
            raise
    capture = Capture(call, module, guard, gradients, users_forward(forward))
    if module is not model:  # Captures hold their modules.
        kept = _OF_MODELS.setdefault(model, [])
        kept.insert(0, capture)
        del kept[_MOST:]
    return capture


def difference(
    bound: Forward, module: nn.Module, forward: Forward, args: Any, kwargs: Any, *, rounded: bool = False
) -> str:
    """Names the first thing in which a program differs from the module's own call, bit for bit; empty if nothing does.

    The module's call runs first, and its effects stay. The program then runs from the same starting state, and its
    effects are undone.

    Args:
        bound: the program.
        module, forward, args, kwargs: the call.
        rounded: whether values as near as ``torch.testing.assert_close`` asks for are equal.
    """
    same = _same_but_for_rounding if rounded else _same_bits
    state = CallState(module, device_of((args, kwargs)), draws_random=True)
    expected = _observed(forward, bound, module, args, kwargs)
    with state.reinstated(), torch.enable_grad():
        got = _observed(bound, bound, module, args, kwargs)
    if expected.keys() != got.keys():
        return "the number of its outputs"
    return next((what for what, value in expected.items() if not same(value, got[what])), "")


def _numbers_like(tensor: Tensor, stride: Sequence[int] | None) -> Tensor:
    """Other numbers everywhere, in a tensor that lies so; in the rows that lie at one place the same."""
    if stride is None:
        stride = tensor.stride()
    sizes = [1 if not step else size for size, step in zip(tensor.shape, stride, strict=True)]
    count = math.prod(sizes)
    numbers = torch.linspace(-1, 1, count, dtype=tensor.dtype, device=tensor.device).reshape(sizes)
    lying = torch.empty_strided(sizes, stride, dtype=tensor.dtype, device=tensor.device).copy_(numbers)
    return lying.as_strided(tensor.shape, stride)


def _observed(call: Forward, bound: Forward, module: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor | None]:
    """Outputs and gradients of a call, and what is in buffers and in the generator after it."""
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors_in((args, kwargs))]
    # Modules may write to what they are given: not to a leaf.
    given, named = with_tensors(without_tensors((args, kwargs)), [t * 1 if t.requires_grad else t for t in leaves])
    output = call(*given, **named)
    drawn_on = device_of(leaves)
    drawn = random_state(drawn_on)
    outputs = tensors_in(output)
    sources = {f"the gradient of argument {k}": leaf for k, leaf in enumerate(leaves) if leaf.requires_grad}
    sources |= {f"the gradient of {name!r}": p for name, p in module.named_parameters() if p.requires_grad}
    trained = [tensor for tensor in outputs if tensor.requires_grad]
    # What others contribute to the gradients of inputs comes first, as of tensors that calls share.
    trained += [t * 1 for t in sources.values()]
    strides: list[Sequence[int] | None] = []
    if isinstance(bound, BoundProgram):
        layouts = iter(bound.program.layouts)
        made = zip(outputs, bound.program.differentiable, strict=False)  # A number that differs is told later.
        strides += [next(layouts)[1] if takes else None for tensor, takes in made if tensor.requires_grad]
    strides += [None] * (len(trained) - len(strides))
    numbers = [_numbers_like(tensor, stride) for tensor, stride in zip(trained, strides, strict=True)]
    seen: dict[str, Tensor | None] = {f"output {k}": tensor.detach() for k, tensor in enumerate(outputs)}
    # A loop goes backward outside of autocast, as a rule.
    for autocast in dict.fromkeys((False, torch.is_autocast_enabled(drawn_on.type))):
        with torch.autocast(drawn_on.type, enabled=autocast, dtype=torch.get_autocast_dtype(drawn_on.type)):
            gradients = torch.autograd.grad(trained, [*sources.values()], numbers, allow_unused=True, retain_graph=True)
        where = ", under autocast" if autocast else ""
        seen |= {name + where: gradient for name, gradient in zip(sources, gradients, strict=True)}
    seen |= {f"buffer {name!r}": buffer.detach().clone() for name, buffer in module.named_buffers()}
    return seen | {"the random numbers that it draws": drawn}


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    bits, others = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(bits, others)


def _same_but_for_rounding(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    try:
        torch.testing.assert_close(other, one, equal_nan=True)
    except AssertionError:
        return False
    return True
