"""Forwards are replaced and put back as they were, whoever else has replaced them."""

from __future__ import annotations

import copy
import copyreg
import gc
import inspect
import io
import pickle
import types
import typing
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiler.workload.forward_patches import Forward, ForwardPatches, is_patched


class Scale(nn.Module):
    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        """Scale it."""
        return x * factor


class Stateful(Scale):
    """Has a say in its pickles."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class CopiesItself(Scale):
    """Takes its attributes over by itself."""

    own = 2.0

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * self.own

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        made = memo[id(self)] = CopiesItself()
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made


def five_times(x: Tensor, factor: float = 5.0) -> Tensor:
    return x * factor


def plus_one(forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) + 1

    return run


ONE = torch.ones(1)


@pytest.mark.parametrize("compile_safe", [True, False])
def test_wrappers_nest_and_are_taken_off_again(compile_safe: bool) -> None:
    module, patches = Scale(), ForwardPatches(compile_safe=compile_safe)
    patches.wrap(module, plus_one)
    patches.wrap(module, plus_one)
    assert module(ONE).item() == 4
    assert is_patched(module) is compile_safe
    patches.remove()
    patches.remove()
    assert module(ONE).item() == 2 and "forward" not in module.__dict__


@pytest.mark.parametrize("compile_safe", [True, False])
def test_a_forward_of_the_instance_s_own_comes_back(compile_safe: bool) -> None:
    module, patches = Scale(), ForwardPatches(compile_safe=compile_safe)
    own = module.forward = lambda x, factor=5.0: x * factor
    patches.wrap(module, plus_one)
    assert module(ONE).item() == 6
    patches.remove()
    assert module.forward is own


@pytest.mark.parametrize("compile_safe", [True, False])
def test_what_was_put_on_top_stays(compile_safe: bool) -> None:
    module, patches = Scale(), ForwardPatches(compile_safe=compile_safe)
    patches.wrap(module, plus_one)
    inner = module.forward
    on_top = module.forward = lambda x, factor=2.0: inner(x, factor) * 10
    patches.remove()
    assert module.forward is on_top
    # The compile-safe one is passed through from now on; the other one has no part that could know of its removal.
    assert module(ONE).item() == (20 if compile_safe else 30)


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "python's pickle": lambda module: pickle._loads(pickle._dumps(module)),  # type: ignore[attr-defined]
    "sent to a process": lambda module: pickle.loads(ForkingPickler.dumps(module)),
    "torch.save": saved_and_loaded,
    "in an average": lambda module: torch.optim.swa_utils.AveragedModel(module).module,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", [Scale, Stateful])
def test_copies_and_pickles_of_a_compile_safe_patch_have_the_forward_of_their_class(kind: Any, how: str) -> None:
    module, patches = kind(), ForwardPatches()
    COPIES[how](kind())  # What it imports has entries of its own.
    gc.collect()  # What other tests left patched goes now, and not while this one counts entries.
    patches.remove()
    before = copyreg.dispatch_table.copy()
    patches.wrap(module, plus_one)
    patches.wrap(module, plus_one)
    other = COPIES[how](module)
    assert other(ONE).item() == 2 and not is_patched(other)
    assert "forward" not in vars(other) and vars(other).keys() == vars(kind()).keys()
    assert module(ONE).item() == 4 and is_patched(module)
    patches.remove()
    assert copyreg.dispatch_table == before
    assert COPIES[how](module)(ONE).item() == 2


def test_a_copy_has_the_forward_that_the_instance_had_for_its_own() -> None:
    module, patches = Scale(), ForwardPatches()
    module.forward = five_times
    patches.wrap(module, plus_one)
    for how in (copy.deepcopy, COPIES["pickle"]):
        assert vars(how(module))["forward"] is five_times
    assert module(ONE).item() == 6 and inspect.signature(module.forward) == inspect.signature(five_times)


def test_a_copy_that_a_class_makes_by_itself_runs_its_own_forward() -> None:
    module, patches = CopiesItself(), ForwardPatches()
    patches.wrap(module, plus_one)
    other = copy.deepcopy(module)
    other.own = 10.0
    assert other(ONE).item() == 10 and module(ONE).item() == 3


def test_a_module_with_a_patch_taken_off_is_held_by_nothing() -> None:
    module, patches = Scale(), ForwardPatches()
    patches.wrap(module, plus_one)
    forward = module.forward
    patches.remove()
    assert forward(ONE).item() == 2
    gone = weakref.ref(module)
    gc.disable()
    try:
        del module, forward
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("compile_safe", [True, False])
def test_a_patched_forward_is_described_as_the_module_s_own(compile_safe: bool) -> None:
    module, patches = Scale(), ForwardPatches(compile_safe=compile_safe)
    plain = module.forward
    patches.wrap(module, plus_one)
    patches.wrap(module, plus_one)
    patched = module.forward
    for described in (inspect.signature, typing.get_type_hints, inspect.getsource, inspect.getdoc):
        assert described(patched) == described(plain), described
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(patched, name) == getattr(plain, name)
    if compile_safe:
        assert inspect.getfullargspec(patched) == inspect.getfullargspec(plain)
        assert inspect.ismethod(patched) and patched.__self__ is module
        assert inspect.signature(patched.__func__) == inspect.signature(Scale.forward)
        # Who binds the function anew, as accelerate does, gets the patch, too.
        assert types.MethodType(patched.__func__, module)(ONE).item() == 4
