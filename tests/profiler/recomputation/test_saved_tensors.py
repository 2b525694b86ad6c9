"""What stands in the graph for a tensor: it notices changes, and reads memory as it lies."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.recomputation.saved_tensors import (
    RerunError,
    SavedParameter,
    change_counter,
    compared_places,
    geometry_of,
    is_parameter_like,
    some_values_of,
    tensor_over,
    unpack,
    version_of,
    without_graph,
)
from profiler.workload.random_states import drawing_from_all, states_on


class Holder:
    """Another stand-in."""

    def __init__(self, tensor: Tensor) -> None:
        self.held = tensor

    def tensor(self) -> Tensor:
        return self.held


def test_a_tensor_changed_in_place_since_is_refused_as_autograd_does() -> None:
    tensor = torch.ones(2, 3)
    saved = SavedParameter(tensor)
    assert unpack(saved) is tensor
    tensor.add_(1)
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(2, 3\) is at version 1, expected version 0"):
        saved.tensor()
    saved.pass_on(lambda tensor: pytest.fail("who holds it from now on could not tell"))


def test_a_tensor_that_is_passed_on_is_held_by_the_other_one_alone() -> None:
    tensor = torch.ones(2)
    saved, alive = SavedParameter(tensor), weakref.ref(tensor)
    del tensor
    saved.pass_on(lambda tensor: Holder(tensor.clone()))
    assert alive() is None and torch.equal(saved.tensor(), torch.ones(2))
    saved.pass_on(lambda tensor: pytest.fail("it is passed on already"))


def test_a_graph_of_gradients_holds_a_parameter_where_it_was() -> None:
    parameter = nn.Parameter(torch.ones(2))
    saved = SavedParameter(parameter)
    with torch.no_grad():
        saved.tensor()
    parameter.data = torch.zeros(2)
    assert saved.tensor() is parameter  # With gradients: from now on it has to stay.
    assert saved.tensor() is parameter
    parameter.data = torch.zeros(2)
    with pytest.raises(RerunError, match="the .data of a parameter was replaced"):
        saved.tensor()


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.arange(24).to(dtype) for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64)),
        torch.arange(24).to(torch.complex64),
        torch.arange(24).to(torch.complex128),
        torch.arange(1000.0).view(10, 100).t()[3:, 2:9],
        torch.arange(8.0)[:, None].expand(8, 5),
        torch.tensor(3.0),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_the_values_compared_are_those_at_their_places(tensor: Tensor) -> None:
    values, places = some_values_of(tensor), [*compared_places(tensor.numel())]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = torch.view_as_real(tensor).flatten()[::2] if tensor.dtype is torch.complex128 else tensor.flatten()
    expected = flat.contiguous().view(bits[flat.element_size()])[places].tolist()
    size = 2 ** (8 * flat.element_size())
    assert list(values) == [value % size for value in expected] and len(places) < 32


def test_of_what_is_no_plain_tensor_no_values_are_read() -> None:
    assert some_values_of(torch.eye(2).to_sparse()) == some_values_of(torch.empty(2, device="meta")) == ()
    assert some_values_of(torch.empty(0)) == ()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(4, 6)[1:, ::2].t(),
        torch.randn(3, 4, dtype=torch.complex64).conj(),
        torch.randn(3, 4, dtype=torch.complex64).conj().imag,
        torch.arange(8.0).view(torch.int32)[2:],
    ],
    ids=["view", "conjugate", "negative", "other numbers"],
)
def test_a_tensor_is_found_over_its_storage(tensor: Tensor) -> None:
    found = tensor_over(tensor.untyped_storage(), geometry_of(tensor))
    assert geometry_of(found) == geometry_of(tensor) and torch.equal(found, tensor)
    assert found.untyped_storage()._cdata == tensor.untyped_storage()._cdata


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_without_its_graph_a_tensor_counts_its_changes_inside_of_modes_too() -> None:
    tensor = torch.ones(3, requires_grad=True) * 2
    with Passing():
        alone = without_graph(tensor)
    assert not alone.requires_grad
    with torch.no_grad():
        tensor.add_(1)
    assert alone._version == tensor._version == 1


def test_a_counter_of_changes_lies_in_no_memory_and_outlives_the_tensor() -> None:
    tensor = torch.ones(3, requires_grad=True) * 2
    with Passing():
        counter = change_counter(tensor)
    assert counter.untyped_storage().nbytes() == 0
    with torch.no_grad():
        tensor[1:].add_(1)
    del tensor
    assert version_of(counter) == 1


def test_parameters_are_there_anyway_and_results_are_not() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    assert is_parameter_like(frozen) and is_parameter_like(torch.ones(2, requires_grad=True))
    assert not is_parameter_like(torch.ones(2)) and not is_parameter_like(torch.ones(2, requires_grad=True) * 2)


def test_inference_tensors_count_no_changes() -> None:
    with torch.inference_mode():
        assert version_of(torch.ones(2)) == -1


def test_what_is_drawn_again_is_what_was_drawn_and_draws_nothing_more() -> None:
    states = states_on(torch.device("cpu"))
    first = torch.rand(3)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    with drawing_from_all(states):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(MemoryError), drawing_from_all(states):
        torch.rand(3)
        raise MemoryError
    assert torch.equal(torch.get_rng_state(), before)
