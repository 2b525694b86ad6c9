"""Forwards are replaced and put back as they were, whoever else has replaced them."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiler.workload.forward_patches import Forward, ForwardPatches, is_patched


class Scale(nn.Module):
    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
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


def test_copies_and_pickles_of_a_compile_safe_patch_are_plain() -> None:
    module, patches = Scale(), ForwardPatches()
    patches.wrap(module, plus_one)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other(ONE).item() == 2 and not is_patched(other)
    assert module(ONE).item() == 3


def test_the_other_one_keeps_the_signature_that_models_look_at() -> None:
    module, patches = Scale(), ForwardPatches(compile_safe=False)
    patches.wrap(module, plus_one)
    assert list(inspect.signature(module.forward).parameters) == ["x", "factor"]
