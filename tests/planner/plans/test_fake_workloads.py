"""A copy of a workload on a simulated device leaves the original as it was, and takes what it takes in layout alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.estimates import A_CPU
from planner.plans.estimating import on_fake_tensors
from profiler.simulation.op_costs import DeviceCosts
from profiler.simulation.simulated_device import SimulatedDevice, simulating
from profiler.workload.optimizers import optimizer_tensors
from profiler.workload.steps import ProfileError
from profiler.workload.workload import Workload


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.arange(3))

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.dropout(self.norm(self.embedding(words)), 0.5, self.training))


class Loss:
    def __init__(self, targets: Tensor) -> None:
        self.targets, self.weights = targets, torch.ones(20)

    def __call__(self, output: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, self.targets, self.weights)


def trained() -> Workload:
    """A workload after a step, so that its optimizer has states and its parameters have gradients."""
    torch.manual_seed(0)
    model, words = Words(), torch.randint(0, 20, (6,))
    optimizer = torch.optim.AdamW(model.parameters())
    workload = Workload(model, words, loss=Loss(words.flip(0)), optimizer=optimizer, accumulate=True)
    workload.step()
    return workload


def tensors(workload: Workload) -> dict[str, Tensor]:
    model: Any = workload.model
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    states = optimizer_tensors(workload.optimizers)
    found |= {f"{number} {name}": tensor for number, (_, name, tensor) in enumerate(states)}
    loss: Any = workload.loss
    return {**found, "inputs": workload.inputs, "targets": loss.targets, "weights": loss.weights}


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulating(DeviceCosts(A_CPU)) as found:
        yield found


def test_the_original_is_untouched() -> None:
    workload = trained()
    before = {name: (tensor.clone(), tensor.data_ptr(), tensor._version) for name, tensor in tensors(workload).items()}
    groups = copy.deepcopy(workload.optimizers[0].state_dict())["param_groups"]
    drawn: Any = np.random
    random = torch.get_rng_state().tolist(), drawn.get_state(legacy=False)["state"]["pos"]
    with simulating(DeviceCosts(A_CPU)):
        fake = on_fake_tensors(workload)
        assert (torch.get_rng_state().tolist(), drawn.get_state(legacy=False)["state"]["pos"]) == random
        for _ in range(2):
            fake.step()
            fake.zero_grad()
    after = tensors(workload)
    assert after.keys() == before.keys() and len(before) > 12
    for name, (values, address, version) in before.items():
        assert not isinstance(after[name], FakeTensor), name
        assert torch.equal(after[name], values), name
        assert (after[name].data_ptr(), after[name]._version) == (address, version), name
    assert workload.optimizers[0].state_dict()["param_groups"] == groups


def test_the_copy_has_the_same_layout_on_the_simulated_device(device: SimulatedDevice) -> None:
    with _disable_current_modes():
        workload = trained()
    fake = on_fake_tensors(workload)
    given = {name: tensor for name, tensor in tensors(workload).items() if "gradient" not in name}
    made = tensors(fake)  # The first step makes gradients.
    assert given.keys() == made.keys()
    for name, tensor in made.items():
        assert tensor is not given[name]
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (
            given[name].shape,
            given[name].stride(),
            given[name].dtype,
        ), name
        assert isinstance(tensor, FakeTensor) == tensor.is_floating_point(), name
        assert tensor.requires_grad == given[name].requires_grad
    model: Any = fake.model
    assert model.head.weight is model.embedding.weight, "what is shared stays shared"
    assert fake.optimizers[0].param_groups[0]["params"][0] is model.embedding.weight
    assert made["inputs"].tolist() == given["inputs"].tolist() and made["seen"].tolist() == [0, 1, 2]
    assert device.live_bytes == sum(tensor.nbytes for tensor in given.values())


def test_a_view_of_a_buffer_and_a_layout_of_channels_are_kept(device: SimulatedDevice) -> None:
    with _disable_current_modes():
        model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        workload = Workload(model, torch.ones(2, 4, 8, 8), loss=lambda y: y.sum())
    fake = on_fake_tensors(workload)
    made: Any = fake.model
    assert made.weight.is_contiguous(memory_format=torch.channels_last) and not made.weight.is_contiguous()
    assert isinstance(made.weight, nn.Parameter)


def test_a_step_of_ones_own_is_refused_in_words(device: SimulatedDevice) -> None:
    model = nn.Linear(2, 2)
    workload = Workload(model, step=lambda: model(torch.ones(1, 2)).sum().backward())
    with pytest.raises(ProfileError, match="step of its own .* give the function that builds the workload instead"):
        on_fake_tensors(workload)


def test_what_cannot_be_copied_is_refused_in_words(device: SimulatedDevice) -> None:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()  # pyright: ignore[reportArgumentType]
    workload = Workload(model, torch.ones(1, 2), loss=lambda y: y.sum())
    with pytest.raises(ProfileError, match="cannot be copied .*lock.*; give the function that builds it instead"):
        on_fake_tensors(workload)
